"""Scans that start anew with packed documents: no op serves them yet, and the report says so."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.corpus.scans import PlainMamba2, chunks, einsums, one_triangle, segment_sums

from .contract import assert_fires, assert_refused_in_a_graph

NAME = "ssd_scan"


def masked_decays(x, dt, A, B, C, D, state, size, numbers):
    """The quadratic form, with decays of one document alone."""
    t, h = x.shape[1:3]
    sums = (A * dt).cumsum(1)
    same = (numbers[:, :, None] == numbers[:, None])[..., None]
    decay = torch.exp(sums[:, :, None] - sums[:, None]) * torch.ones(t, t).tril()[None, :, :, None] * same
    scores = torch.einsum("blgn,bsgn->blsg", C, B).repeat_interleave(h // B.shape[2], -1) * decay * dt[:, None]
    return torch.einsum("blsh,bshp->blhp", scores, x) + D[:, None] * x, x


def _decayed_at_starts(numbers):
    begins = F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=False)
    return torch.where(begins, -30.0, 0.0)


def decays_added(x, dt, A, B, C, D, state, size, numbers):
    """What comes before a document's first token is decayed away, in the chunked form."""
    reset = chunks(_decayed_at_starts(numbers), size)[:, None]
    sums_of, cumsum = lambda a: segment_sums(a + reset), lambda a: torch.cumsum(a + reset, -1)
    return einsums(x, dt, A, B, C, D, state, size, sums_of, cumsum)


class Packed(PlainMamba2):
    def forward(self, u, numbers):
        plain = self.form
        self.form = partial(plain, numbers=numbers)
        try:
            return super().forward(u)
        finally:
            self.form = plain


@pytest.mark.parametrize("form", [masked_decays, decays_added], ids=lambda f: f.__name__)
def test_documents_are_named(form):
    module = Packed(form)
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3], [0] * 5 + [1] * 7])
    assert_refused_in_a_graph(NAME, "documents", module, (*module.example_inputs(), numbers))


def test_a_mask_of_positions_is_no_document():
    """Positions compared with each other come from no input."""

    def equal_positions(x, dt, A, B, C, D, state, size):
        position = torch.arange(x.shape[1])
        y, final = one_triangle(x, dt, A, B, C, D, state, size)
        return y * (position[:, None] == position).any(-1)[None, :, None, None], final

    module = PlainMamba2(equal_positions)
    assert_fires(NAME, module, module.example_inputs())
