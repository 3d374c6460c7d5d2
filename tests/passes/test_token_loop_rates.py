"""Rates of heads as tables that the graph makes of numbers have logarithms; those that are not known have none."""

from __future__ import annotations

import math

import pytest
import torch

from tests.corpus.delta.block import PlainDelta, Spelling
from tests.corpus.delta.parts import no_norm, repeated

from .contract import assert_fires, assert_refused

NAME = "token_loop"


def by_token(rates):
    """Retention (arXiv:2307.08621) as a loop, with the rates that `rates` makes for so many heads."""

    def form(q, k, v, g, beta, state, size, scale, norm):
        h = v.shape[2]
        q, k = repeated(q, h) * scale, repeated(k, h)
        decay, out = rates(h).to(v.dtype)[:, None, None], []
        state = v.new_zeros(v.shape[0], h, k.shape[-1], v.shape[-1])
        for i in range(v.shape[1]):
            state = decay * state + k[:, i, ..., None] * v[:, i, :, None]
            out.append((q[:, i, :, None] @ state).squeeze(-2))
        return torch.stack(out, 1), state

    return Spelling(form, gate=None, norm=no_norm, delta=False)


KNOWN = {
    "powers": lambda h: 1 - 2.0 ** (-5 - torch.arange(h, dtype=torch.float64)),
    "exponentials_between": lambda h: 1 - torch.linspace(math.log(1 / 32), math.log(1 / 512), h, dtype=torch.float64).exp(),
    "exponentials_of_heads": lambda h: 1 - torch.exp(-math.log(2) * (torch.arange(h, dtype=torch.float64) + 5)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_tables_of_numbers_in_float64(name):
    module = PlainDelta(by_token(KNOWN[name]), state=True).double()
    frames = assert_fires(NAME, module, module.example_inputs(4, dtype=torch.float64))
    assert torch.ops.megacpp.ssd_scan.default in {n.target for n in frames.graph.graph.nodes}


def test_a_table_of_numbers_in_bfloat16():
    module = PlainDelta(by_token(KNOWN["powers"])).bfloat16()
    assert_fires(NAME, module, module.example_inputs(3, dtype=torch.bfloat16))


def test_refuses_a_buffer():
    """What it holds is not known when compiling, and may change."""
    module = PlainDelta(by_token(lambda h: module.table))
    module.register_buffer("table", KNOWN["powers"](4))
    assert_refused(NAME, "decay", module, module.example_inputs(4))


def test_refuses_a_table_with_rates_that_are_not_above_zero():
    module = PlainDelta(by_token(lambda h: 1.5 - 2.0 ** torch.arange(h, dtype=torch.float64)))
    assert_refused(NAME, "decay", module, module.example_inputs(4))
