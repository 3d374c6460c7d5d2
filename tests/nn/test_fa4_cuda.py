"""FlashAttention-4 on a GPU, with the evidence that each run leaves for `megacpp evidence run`."""

from __future__ import annotations

import json

import pytest
import torch

import megacpp_compile
from megacpp_compile.evidence.rollout import BASELINES, DETACHED_SHAPE, MATRIX
from megacpp_compile.nn.attention import fa4_runtime
from megacpp_compile.report.kernels import families
from tests.nn.fa4_evidence import forward, train

pytestmark = [
    pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not fa4_runtime.installed(), reason="needs flash-attn-4"),
]
BOUND = 3e-3  # of the largest element, forward and gradients, against float32


def left(record_property, **evidence):
    record_property("evidence", json.dumps(evidence))
    return evidence


@pytest.mark.parametrize(("keys", "values"), [(192, 128), (128, 128), (64, 64)])
def test_gradients_against_float32(keys, values):
    sizes = ((2, 4, 512, width) for width in (keys, keys, values))
    tensors = [torch.randn(s, device="cuda").mul(0.5).bfloat16().requires_grad_() for s in sizes]
    exact = [t.detach().float().requires_grad_() for t in tensors]
    weight = torch.randn(2, 4, 512, values, device="cuda")
    for operands, backend in ((tensors, "fa4"), (exact, "plain")):
        megacpp_compile.attention(*operands, backend=backend).backward(weight.to(operands[0].dtype))
    for mine, theirs in zip(tensors, exact, strict=True):
        assert (mine.grad.float() - theirs.grad).norm() <= BOUND * theirs.grad.norm() + 2**-8 * theirs.grad.norm()


def test_forward(record_property):
    """At the second environment's shape, which is the rung's on both machines."""
    batch, heads, tokens, _, keys, values = DETACHED_SHAPE
    found = left(record_property, **forward("cuda", batch, heads, tokens, keys, values))
    assert found["actual_backend"] == "fa4" and found["kernel_family"] == "fa4" and all(found["checks"].values())


@pytest.mark.parametrize(("configuration", "backend"), [*((c, "fa4") for c in MATRIX), *((c, "sdpa") for c in BASELINES)])
def test_matrix(configuration, backend, record_property):
    """At 64 heads in all, as the host takes longer than the GPU over a few."""
    widths, _, tokens = configuration.removeprefix("baseline of ").partition(" x ")
    keys, values = map(int, widths.split("/"))
    found = forward("cuda", 2, 32, int(tokens), keys, values, backend=backend)
    left(record_property, configuration=configuration, **found)
    assert found["actual_backend"] == backend


def test_profile(record_property):
    q, k, v = (torch.randn(1, 8, 1024, 128, device="cuda").bfloat16() for _ in range(3))
    call = megacpp_compile.observed_attention(lambda: megacpp_compile.attention(q, k, v, backend="fa4"), "cuda")
    family = ", ".join(families(call.kernels))
    left(record_property, shape=[1, 8, 1024, 1024, 128, 128], dtype="bfloat16", requested_backend="fa4",
         actual_backend=call.effective, fallback_reason=call.reason, phase=call.kind, kernel_family=family)  # fmt: skip
    assert family == "fa4", call.kernels


def test_two_steps(record_property):
    assert all(left(record_property, **train("cuda", 2))["checks"].values())


@pytest.mark.end_to_end
def test_hundred_steps(record_property):
    assert all(left(record_property, **train("cuda", 100))["checks"].values())
