"""The Triton kernels of `gated_delta_rule` beyond agreeing with the reference: what they refuse, how exact the inverse
is, and that a sequence may be cut."""

from __future__ import annotations

import pytest
import torch

from .agreement import DEVICE, OF_KERNELS, faults, module_of, on, seldom
from .contract import identical
from .delta_cases import rule

pytestmark = OF_KERNELS


def kernels():
    return module_of("gated_delta_rule", "cuda_triton")


def call(rand, dtype=torch.float32, **options):
    return on(DEVICE, rule(rand, dtype, **options))


def test_equal_keys_have_an_exact_inverse(rand):
    """64 equal keys of length 1 without a gate: T is 1 on the diagonal and -1 below it, where powers of L would cancel
    binomials of 1e18."""
    q, k, v, g, beta, state, *others = call(rand, b=1, t=64, hk=1, hv=1, chunk=64, gate="none", beta=False)
    k = torch.ones_like(k) / k.shape[-1] ** 0.5
    *_, inverse = kernels().gated_delta_rule(q, k, v, g, beta, state, *others[:-3], None, *others[-2:])
    eye = torch.eye(64, device=DEVICE)
    assert torch.allclose(inverse[0, :, 0], eye - eye.diag(0).diag_embed().roll(1, 0).tril(-1), atol=1e-5)


@seldom
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_state_carried_over_is_the_whole_sequence(rand, gate):
    q, k, v, g, beta, state, _, *others = call(rand, b=1, t=40, gate=gate)
    whole, final, *_ = kernels().gated_delta_rule(q, k, v, g, beta, state, None, *others)
    parts = []
    for part in (slice(0, 23), slice(23, None)):
        cut = (x[:, part] for x in (q, k, v, g, beta))
        o, state, *_ = kernels().gated_delta_rule(*cut, state, None, *others)
        parts.append(o)
    assert not faults([torch.cat(parts, 1), state], [whole, final], 1e-6)


@seldom
def test_equal_inputs_give_equal_bits(rand):
    args = call(rand, b=1, t=40, gate="channel")
    identical(*(kernels().gated_delta_rule(*args) for _ in range(2)))


@pytest.mark.parametrize(("dtype", "options", "reason"),
                         [(torch.float64, {}, "float64"), (torch.float32, {"k": 24}, "keys of 24"),
                          (torch.float32, {"v": 12}, "values of 12")], ids=["float64", "keys", "values"])
def test_refusals(rand, dtype, options, reason):
    assert reason in kernels().supports("gated_delta_rule", call(rand, dtype, t=3, **options))
    assert kernels().supports("gated_delta_rule", call(rand, t=3)) is None
