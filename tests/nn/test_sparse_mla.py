"""`sparse_mla` as a model calls it: what it hands to the op."""

from __future__ import annotations

import pytest
import torch

import megacpp_compile
from megacpp_compile.errors import OperandError


def test_the_old_keyword_is_taken_with_a_warning():
    torch.manual_seed(0)
    q, rows = torch.randn(1, 3, 2, 24), torch.randn(1, 9, 1, 24)
    indices = torch.tensor([0, 3, -1]).expand(1, 3, 1, 3)
    scale = rows.abs().amax(-1, keepdim=True) / 448
    rows = (rows / scale).to(torch.float8_e4m3fn)
    want = megacpp_compile.sparse_mla(q, rows, indices, d_v=16, kv_scale=scale, fp8_gemms=True)
    with pytest.warns(FutureWarning, match="fp8_products= is now called fp8_gemms="):
        got = megacpp_compile.sparse_mla(q, rows, indices, d_v=16, kv_scale=scale, fp8_products=True)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    # The option arrives: it is refused where rows have no scale.
    with pytest.warns(FutureWarning), pytest.raises(OperandError, match="fp8_gemms"):
        megacpp_compile.sparse_mla(q, torch.randn(1, 9, 1, 24), indices, d_v=16, fp8_products=True)
