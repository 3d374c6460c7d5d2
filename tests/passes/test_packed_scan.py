"""Scans that start anew with packed documents: no op serves them yet, and the report says so."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.corpus.scans import PlainMamba2, chunks, einsums, one_triangle, segment_sums
from tests.frames import passed

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


def chunks_masked(x, dt, A, B, C, D, state, size, numbers):
    """The chunked form, decays and what is carried from chunk to chunk masked by equal numbers."""
    of = chunks(numbers, size)
    ends = torch.cat([of[:, 0, :1], of[..., -1]], 1)  # of what enters each chunk, and of what leaves the last

    def sums_of(a):
        inner = a.shape[-1] == size
        rows = of if inner else ends
        same = (rows[..., :, None] == rows[..., None, :])[:, None]
        return segment_sums(a) + torch.where(same, 0.0, -torch.inf)

    return einsums(x, dt, A, B, C, D, state, size, sums_of)


def positions_filled(x, dt, A, B, C, D, state, size, numbers, fill=-30.0):
    """The quadratic form, with the logarithms of decays overwritten where a document begins."""
    sums = (A * dt).masked_fill((numbers == 0)[..., None], fill).cumsum(1)
    decay = torch.exp(sums[:, :, None] - sums[:, None]) * torch.ones(len(sums[0]), len(sums[0])).tril()[None, :, :, None]
    scores = torch.einsum("blgn,bsgn->blsg", C, B).repeat_interleave(x.shape[2] // B.shape[2], -1) * decay * dt[:, None]
    return torch.einsum("blsh,bshp->blhp", scores, x) + D[:, None] * x, x


class Packed(PlainMamba2):
    def forward(self, u, numbers):
        plain = self.form
        self.form = partial(plain, numbers=numbers)
        try:
            return super().forward(u)
        finally:
            self.form = plain


NUMBERS = [[0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3], [0] * 5 + [1] * 7]
POSITIONS = [[0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 1, 2], [*range(5), *range(7)]]


@pytest.mark.parametrize("form", [masked_decays, decays_added], ids=lambda f: f.__name__)
def test_documents_are_named(form):
    module = Packed(form)
    assert_refused_in_a_graph(NAME, "documents", module, (*module.example_inputs(), torch.tensor(NUMBERS)))


@pytest.mark.parametrize(("form", "integers", "tag"), [
    (chunks_masked, NUMBERS, "documents"),
    (positions_filled, POSITIONS, "documents"),
    (partial(positions_filled, fill=0.0), POSITIONS, "no-step"),
], ids=["chunks", "filled", "nothing decayed away"])  # fmt: skip
def test_other_spellings_of_documents_are_named(form, integers, tag):
    module = Packed(form)
    outcome = passed(module, (*module.example_inputs(), torch.tensor(integers)))
    assert not outcome.sites and {m.tag for m in outcome.misses if m.pass_name == NAME} == {tag}


def test_a_mask_of_positions_is_no_document():
    """Positions compared with each other come from no input."""

    def equal_positions(x, dt, A, B, C, D, state, size):
        position = torch.arange(x.shape[1])
        y, final = one_triangle(x, dt, A, B, C, D, state, size)
        return y * (position[:, None] == position).any(-1)[None, :, None, None], final

    module = PlainMamba2(equal_positions)
    assert_fires(NAME, module, module.example_inputs())
