"""The Triton kernels of `gated_linear_attention` beyond agreeing with the reference: cleared states, heads of any size,
sequences that may be cut, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from .agreement import DEVICE, OF_KERNELS, disagreements, faults, module_of, on, reference_of, seldom, tensors_of
from .contract import identical
from .delta_cases import attention

pytestmark = OF_KERNELS
OP = "gated_linear_attention"


def kernels():
    return module_of(OP, "cuda_triton")


def call(rand, dtype=torch.float32, **options):
    return on(DEVICE, attention(rand, dtype, **options))


def backward_of(rand, args):
    *given, scale, chunk, dtype = args
    o, final, states = reference_of(OP)(*args)
    return rand(*o.shape, dtype=dtype).to(DEVICE), rand(*final.shape).to(DEVICE), *given, states, scale, chunk


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_cleared_state(rand, gate):
    """-inf, as a number so small that nothing is left: no NaN, and no digits lost of the gates behind it."""
    q, k, v, g, *others = call(rand, b=1, t=40, hk=1, hv=2, gate=gate)
    g = g.clone()
    g[0, 5], g[0, 21:23] = -torch.inf, -torch.inf
    args = q, k, v, g, *others
    got = kernels().gated_linear_attention(*args)
    assert not disagreements(tensors_of(got), OP, args)
    back = backward_of(rand, args)
    got = kernels().gated_linear_attention_backward(*back)
    assert not disagreements(tensors_of(got), f"{OP}_backward", back)


@pytest.mark.parametrize(("keys", "values"), [(12, 20), (8, 80)])
def test_heads_of_any_size(rand, keys, values):
    """Padded in front of the kernels, and cut behind them."""
    args = call(rand, b=1, t=20, hk=1, hv=2, k=keys, v=values)
    assert not disagreements(tensors_of(kernels().gated_linear_attention(*args)), OP, args)
    back = backward_of(rand, args)
    got = kernels().gated_linear_attention_backward(*back)
    assert not disagreements(tensors_of(got), f"{OP}_backward", back)


def test_documents_over_segments(rand):
    """Of 8 chunks, whose states are joined: one that ends where a segment does, one of several segments, none."""
    args = call(rand, torch.bfloat16, hk=1, hv=1, documents=(128, 150, 0, 3))
    assert not disagreements(tensors_of(kernels().gated_linear_attention(*args)), OP, args)
    back = backward_of(rand, args)
    got = kernels().gated_linear_attention_backward(*back)
    assert not disagreements(tensors_of(got), f"{OP}_backward", back)


@seldom
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_state_carried_over_is_the_whole_sequence(rand, gate):
    q, k, v, g, state, _, *others = call(rand, b=1, t=40, gate=gate)
    whole, final, _ = kernels().gated_linear_attention(q, k, v, g, state, None, *others)
    parts = []
    for part in (slice(0, 23), slice(23, None)):
        o, state, _ = kernels().gated_linear_attention(*(x[:, part] for x in (q, k, v, g)), state, None, *others)
        parts.append(o)
    assert not faults([torch.cat(parts, 1), state], [whole, final], 1e-6)


@seldom
def test_equal_inputs_give_equal_bits(rand):
    args = call(rand, b=1, t=40, gate="channel")
    identical(*(kernels().gated_linear_attention(*args) for _ in range(2)))


@pytest.mark.parametrize(("dtype", "options", "reason"),
                         [(torch.float64, {}, "float64"), (torch.float32, {"k": 160}, "keys of 160"),
                          (torch.bfloat16, {"k": 320}, "keys of 320")], ids=["float64", "wide_keys", "keys"])
def test_refusals(rand, dtype, options, reason):
    assert reason in kernels().supports(OP, call(rand, dtype, t=3, **options))
    assert kernels().supports(OP, call(rand, t=3)) is None
