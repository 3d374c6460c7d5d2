"""`sparse_mla` as a model calls it: what it hands to the op."""

from __future__ import annotations

import pytest
import torch

import megacpp_compile
from megacpp_compile.errors import OperandError
from tests.precision.wrapped import te_tensor


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


def test_a_wrapper_in_a_compiled_frame(no_kernels):
    """It is split while the frame is traced, which breaks it nowhere."""
    rows = te_tensor(torch.randn(1, 16, 1, 24))
    q, indices = torch.randn(1, 8, 2, 24).bfloat16(), torch.randint(-1, 8, (1, 8, 1, 4))

    def attend(q, rows, indices):
        return megacpp_compile.sparse_mla(q.tanh() * 2, rows, indices, d_v=16, offset=8)[0].exp()

    torch._dynamo.reset()
    with torch.no_grad(), megacpp_compile.record() as report:
        want, got = attend(q, rows, indices), torch.compile(attend, backend="megacpp")(q, rows, indices)
    assert [frame.outcome for frame in report.frames] == ["captured"] and not report.misses
    assert torch.equal(got, want)
