"""`sparse_mla` in Gluon: that it compiles for Hopper to what it is written for, whom it refuses, and on a GPU its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_compile.errors import OperandError
from megacpp_compile.lowerings.sparse_mla import reference, sparse_mla

from . import relative_error
from .agreement import DoesNotCompile, poisoned_memory
from .attention_cases import operands as small
from .attention_cases import quantised
from .gluon_kernels import assemble, lowering, needs_triton, on_hopper

E4M3 = torch.float8_e4m3fn


def compiled(mode: str, values: int, query: str, index: str) -> Any:
    gluon = lowering("sparse_mla")
    kernel = gluon.kernels.sparse_mla_forward
    constants = {"V": values, "R": 64, "CAUSAL": 1, "MODE": getattr(gluon.kernels, mode).value, "BH": 64, "BK": 64,
                 **gluon._SETTINGS[mode]}  # fmt: skip
    rows = query if mode == "WIDE" else "*fp8e4nv"
    types = {"q": query, "kv": rows, "indices": index, "kv_scale": "*fp32", "out": query, "lse": "*fp32", "scale": "fp32"}
    whole = {*kernel.arg_names} - {*constants, "scale", "offset"}
    return assemble(kernel, types, constants, whole, num_warps=8)


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@needs_triton
@pytest.mark.parametrize("mode, values, query, index",
                         [("WIDE", 512, "*bf16", "*i32"), ("WIDENED", 512, "*bf16", "*i64"),
                          ("FP8", 512, "*bf16", "*i32"), ("WIDE", 256, "*fp16", "*i64"), ("FP8", 256, "*fp16", "*i64")])
def test_compiles_for_hopper(mode, values, query, index):
    made = compiled(mode, values, query, index)
    text = made.asm["ptx"]
    assert made.metadata.shared <= 227 * 1024
    # Rows are copied 16 bytes at once: with less each copy writes to memory that another one waits for.
    assert "0x10, " in text and "], 0x8, " not in text
    fp8 = text.count("m64n64k32.f32.e4m3.e4m3")
    channels, kind = values + 64, query[1:].replace("fp", "f")
    if mode == "FP8":
        # Scores of 64 rows, and two halves of 32 rows for a warp group's 128 channels, even and odd.
        assert fp8 == channels // 32 + 2 * values // 128
        assert text.count("ldmatrix.sync.aligned.m8n8.x4.trans") == 2 * values // 128
    else:
        values_gemm = values // 2 // 128 * 4  # four steps of 16 rows, for 128 channels at once
        assert fp8 == 0 and text.count(f".f32.{kind}.{kind}") == channels // 16 + values_gemm


@pytest.mark.sampled(3)
@needs_triton
@pytest.mark.parametrize("change, words",
                         [({}, None), ({"kind": "fp8"}, None), ({"kind": "fp16"}, None), ({"h": 128}, None),
                          ({"d_v": 256}, None), ({"h": 32}, "32 heads"), ({"d_v": 128}, "128 and 64 channels"),
                          ({"rest": 32}, "512 and 32 channels"), ({"kind": "fp32"}, "torch.float32"),
                          ({"kind": "blocks"}, "every block of channels"), ({"s": 0}, "nothing to attend"),
                          ({"gap": 4}, "16 bytes"), ({"hopper": False}, "Hopper")])  # fmt: skip
def test_whom_it_serves(monkeypatch, change, words):
    gluon = lowering("sparse_mla")
    sizes = {"h": 64, "d_v": 512, "rest": 64, "s": 100, "gap": 0, "kind": "bf16", "hopper": True, **change}
    monkeypatch.setattr(gluon, "on_hopper", lambda device: sizes["hopper"])
    dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(sizes["kind"], torch.bfloat16)
    channels = sizes["d_v"] + sizes["rest"]
    q = torch.empty(1, 8, sizes["h"], channels + sizes["gap"], dtype=dtype, device="meta")[..., :channels]
    kv, scale = torch.empty(1, sizes["s"], 1, channels, dtype=dtype, device="meta"), None
    if sizes["kind"] in ("fp8", "blocks"):
        kv, scale = kv.to(E4M3), torch.empty(1, sizes["s"], 1, 5 if sizes["kind"] == "blocks" else 1, device="meta")
    indices = torch.empty(1, 8, 1, 16, dtype=torch.int32, device="meta")
    why = gluon.supports("sparse_mla", (q, kv, indices, scale, 0.1, sizes["d_v"]))
    assert (why is None) if words is None else words in why


@needs_triton
def test_what_does_not_compile_is_served_otherwise(monkeypatch, rand, caplog):
    gluon = lowering("sparse_mla")
    monkeypatch.setattr(gluon, "missing", "")
    monkeypatch.setattr(gluon.kernels, "sparse_mla_forward", DoesNotCompile())
    monkeypatch.setattr(gluon.cuda_triton, "sparse_mla", reference.sparse_mla)
    args = small(rand, torch.bfloat16)
    got, want = gluon.sparse_mla(*args), reference.sparse_mla(*args)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert "no attribute 'barrier'" in caplog.text and "no attribute 'barrier'" in gluon.supports("sparse_mla", args)


def operands(tokens=70, rows=150, heads=64, k=200, d_v=512, batch=2, dtype=torch.bfloat16, index=torch.int32, causal=True):
    """Random, with rows named twice, rows that are none, and queries that see nothing, or nothing in their first tile."""
    def normal(*shape):
        return torch.randn(*shape, device="cuda")

    q, kv = normal(batch, tokens, heads, d_v + 64).to(dtype), normal(batch, rows, 1, d_v + 64).to(dtype)
    indices = torch.randint(-20, rows + 20, (batch, tokens, 1, k), device="cuda", dtype=index)
    indices[:, 3], indices[:, 4, :, :70] = -1, -1
    indices[:, 5, :, 70:] = rows + 5
    return q, kv, indices, None, (d_v + 64) ** -0.5, d_v, causal, rows // 2


def payload(args, whole=False):
    """The same with rows in fp8 of very different scales, some negative and one zero; or with one scale for all."""
    q, kv, *others = args
    kv = kv.float()
    scale = kv.abs().amax(None if whole else -1, keepdim=True) / 448
    fp8 = (kv / scale).to(E4M3)
    if whole:
        return q, fp8, others[0], scale.view(1, 1, 1, 1).expand(*kv.shape[:3], 1), *others[2:]
    scale[:, ::7] *= -1
    scale[:, 11] = 0
    return q, fp8, others[0], scale, *others[2:]


def check(args, tolerance, **how):
    gluon = lowering("sparse_mla")
    assert gluon.supports("sparse_mla", args) is None
    q, kv, indices, scale, *settings = args
    want = reference.sparse_mla(q.double(), kv if scale is not None else kv.double(), indices, scale, *settings)
    with poisoned_memory():
        got = gluon.sparse_mla(*args, **how)
        torch.cuda.synchronize()
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g.isinf(), w.isinf()) and not g.isnan().any()
        g, w = (t.masked_fill(t.isinf(), 0) for t in (g, w))
        assert relative_error(g, w) < tolerance, relative_error(g, w)


@on_hopper
@pytest.mark.parametrize("change", [
    {}, {"heads": 40}, {"heads": 128, "tokens": 9}, {"dtype": torch.float16, "index": torch.int64}, {"d_v": 256},
    {"causal": False, "k": 64}, {"k": 2100, "tokens": 7, "rows": 3000}, {"k": 1, "batch": 1},
])  # fmt: skip
class TestOnHopper:
    def test_rows_of_the_queries_dtype(self, change):
        check(operands(**change), 5e-3)

    def test_rows_in_fp8(self, change):
        check(payload(operands(**change)), 6e-3)

    def test_products_in_fp8(self, change):
        check(payload(operands(**change)), 5e-2, fp8_gemms=True)


@on_hopper
@pytest.mark.parametrize("fp8_gemms", [False, True])
def test_one_scale_for_all_rows(fp8_gemms):
    check(payload(operands(), whole=True), 5e-2 if fp8_gemms else 6e-3, fp8_gemms=fp8_gemms)


@on_hopper
@pytest.mark.parametrize("fp8, fp8_gemms", [(False, False), (True, False), (True, True)])
def test_a_row_that_is_not_valid_is_not_read(fp8, fp8_gemms):
    args = operands()
    args[1][:, 17] = float("nan")
    args = (*args[:2], args[2].masked_fill(args[2] == 17, -1), *args[3:])
    if fp8:
        bad = args[1].isnan()
        q, kv, indices, scale, *others = payload((args[0], args[1].nan_to_num(1.0), *args[2:]))
        args = q, torch.where(bad.cpu(), torch.tensor(float("nan")), kv.cpu().float()).to(E4M3).cuda(), indices, scale, *others
    out, lse = lowering("sparse_mla").sparse_mla(*args, fp8_gemms=fp8_gemms)
    assert not out.isnan().any() and not lse.isnan().any()


def test_fp8_products_want_rows_with_a_scale_each(rand):
    args = small(rand, torch.float32)
    with pytest.raises(OperandError, match="fp8_gemms"):
        sparse_mla(*args, fp8_gemms=True)
    with pytest.raises(OperandError, match="fp8_gemms"):
        sparse_mla(*quantised(rand, small(rand, torch.float32, d_qk=200, d_v=160), "block"), fp8_gemms=True)
    fp8 = quantised(rand, args)
    exact, allowed = (sparse_mla(*fp8, fp8_gemms=p) for p in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(exact, allowed, strict=True))  # a CPU gains nothing by rounding
