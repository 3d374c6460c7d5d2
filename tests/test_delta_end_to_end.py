"""Delta rules and linear attention through the whole compiler on a GPU, with the kernels (see `test_hybrid_end_to_end`)."""

from __future__ import annotations

import pytest
import torch

from tests.corpus.delta.block import CHUNKED, LINEAR, TOKENS, PlainDelta
from tests.test_hybrid_end_to_end import compare, kernels_serve, never_waits

__all__ = ["kernels_serve"]
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DIM = 64
CHUNKS = {name: CHUNKED[name] for name in ("rows_in_place", "solved_at_once", "no_gate_row_by_row", "channel_gates")}
LOOPS = {name: TOKENS[name] for name in ("sums_of_products", "einsums_channel_gates", "no_gate")}


def make(spelling, **sizes):
    return lambda: PlainDelta(spelling, dim=DIM, groups=2, heads=4, width=32, values=32, wide=True, **sizes)


def tokens(length):
    return (torch.randn(2, length, DIM, device="cuda", dtype=torch.bfloat16),)


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks(name):
    never_waits(compare(make(CHUNKS[name], chunk=64), tokens(192), {"gated_delta_rule": 1}, 1.5))


@pytest.mark.parametrize("name", LOOPS)
def test_tokens(name):
    never_waits(compare(make(LOOPS[name]), tokens(24), {"token_loop": 1}, 1.5))


def test_a_linear_attention_token_by_token():
    compare(make(LINEAR["rate_by_token"]), tokens(24), {"token_loop": 1}, 1.5)
