"""Attention to rows that are gathered by index, on a GPU, with the evidence for `megacpp evidence run`."""

from __future__ import annotations

import json

import pytest
import torch

import megacpp_compile
from megacpp_compile.lowerings._registry import choose
from tests.seeds import Draws

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOKENS, HEADS, LATENT, ROPE, TOP = 512, 64, 512, 64, 256
BOUND = 1e-2  # of the norm, forward and gradients, of bfloat16 against float64


def test_gather(record_property):
    """A kernel that reads the rows by their indices serves it, and result and gradients are the formula's."""
    rand = Draws("test_gather", torch.float64)
    q, kv = rand(1, TOKENS, HEADS, LATENT + ROPE), rand(1, TOKENS, 1, LATENT + ROPE)
    weight = rand(1, TOKENS, HEADS, LATENT)
    order = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)).argsort(-1)[:, :TOP]
    indices = torch.where(order <= torch.arange(TOKENS)[:, None], order, -1)
    mine = [t.to("cuda", torch.bfloat16).requires_grad_() for t in (q, kv)]
    rows = indices[None, :, None].to("cuda")
    out, _ = megacpp_compile.sparse_mla(*mine, rows)
    out.backward(weight.to("cuda", torch.bfloat16))
    torch.cuda.synchronize()
    call = (*(t.detach() for t in mine), rows, None, mine[0].shape[-1] ** -0.5, LATENT, True, 0, False)
    served = choose(torch.ops.megacpp.sparse_mla.default, "cuda", call)

    exact = [t.detach().double().cpu().requires_grad_() for t in mine]
    scores = torch.einsum("qhd,kd->qhk", exact[0][0], exact[1][0, :, 0]) * (LATENT + ROPE) ** -0.5
    seen = torch.zeros(TOKENS, TOKENS + 1, dtype=torch.bool).scatter(1, indices % (TOKENS + 1), True)[:, :-1]
    probabilities = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1).nan_to_num()  # a query may see no row
    want = torch.einsum("qhk,kd->qhd", probabilities, exact[1][0, :, 0, :LATENT])[None]
    want.backward(weight.bfloat16().double())
    pairs = [(out, want), *((m.grad, e.grad) for m, e in zip(mine, exact, strict=True))]
    errors = [float((a.detach().double().cpu() - b.detach()).norm() / b.detach().norm()) for a, b in pairs]
    gathers = served.effective in ("cuda_gluon", "cuda_triton")
    record_property("evidence", json.dumps({
        "shape": [1, TOKENS, HEADS, LATENT + ROPE, TOP], "dtype": "bfloat16", "requested_backend": "sparse_mla",
        "actual_backend": "gather" if gathers else served.effective, "fallback_reason": served.reason, "phase": "prefill",
        "kernel_family": served.effective, "difference_against": "float64",
        "checks": {
            "imported": True, "synchronised": True, "shape": out.shape == weight.shape,
            "finite": all(bool(a.isfinite().all()) for a, _ in pairs),
        },
        "metrics": {"worst_relative_error": max(errors)},
    }))  # fmt: skip
    assert gathers and not served.reason, served
    assert max(errors) <= BOUND, errors
