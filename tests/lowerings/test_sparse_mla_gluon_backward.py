"""The backward of `sparse_mla` in Gluon: that it compiles for Hopper to what it is written for, whom it refuses, what
serves in its place, and on a GPU its numbers."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import subprocess
from typing import Any

import pytest
import torch

import megacpp_compile
from megacpp_compile.lowerings.sparse_mla import reference

from . import relative_error
from .agreement import DoesNotCompile
from .cases import CASES
from .gluon_kernels import assemble, lowering, needs_triton, on_hopper
from .test_sparse_mla import deterministic, filled_memory
from .test_sparse_mla_gluon import operands


def compiled(dtype: str, index: str, listed: int) -> Any:
    gluon = lowering("sparse_mla")
    kernel = gluon.backward_kernels.sparse_mla_backward
    constants = {"V": 512, "R": 64, "CAUSAL": 1, "WITH_LSE": 1, "LISTED": listed, "BH": 64, "BK": 64, "i_k": 1,
                 **gluon._BACKWARD_SETTINGS}  # fmt: skip
    types = dict.fromkeys(("grad", "q", "kv", "out", "dq", "weights"), dtype)
    types |= {"indices": index, **dict.fromkeys(("lse", "grad_lse"), "*fp32"), "scale": "fp32"}
    types["to"] = dtype if listed else "*fp32"
    free = {"batches", "tokens", "first", "count", "rows", "heads", "topk", "offset", "scale", *constants}
    return assemble(kernel, types, constants, {*kernel.arg_names} - free, num_warps=8)


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@needs_triton
@pytest.mark.parametrize("dtype, index, listed", [("*bf16", "*i32", 0), ("*fp16", "*i64", 0), ("*bf16", "*i64", 1)])
def test_compiles_for_hopper(dtype, index, listed, tmp_path):
    from triton.backends.nvidia import compiler

    made = compiled(dtype, index, listed)
    text = made.asm["ptx"]
    assert made.metadata.shared <= 227 * 1024
    # Everything is copied 16 bytes at once, and rows' gradients are added four numbers at once.
    assert "0x10, " in text and "], 0x8, " not in text and "], 0x4, " not in text
    # 64 rows by 512 channels of eight warps, and by 64 of four. The machine code says so: Triton 3.6 writes additions
    # whose result nobody reads, which the assembler makes into such as give none.
    machine = made.asm["sass"]
    adds = 0 if listed else 64 * 512 // 256 // 4 + 64 * 64 // 128 // 4
    assert machine.count("REDG.E.ADD.F32x4") == machine.count("REDG") == adds and "ATOM" not in machine
    # One GEMM gives scores and probabilities' gradients.
    assert text.count(f"m64n128k16.f32.{dtype[1:].replace('fp', 'f')}") >= 512 // 16
    # Accumulators that are short of registers, or that anybody reads too early: the assembler would then wait for every
    # wgmma, and says so.
    (tmp_path / "kernel.ptx").write_text(text)
    assembler = compiler.get_ptxas(*[90][: len(inspect.signature(compiler.get_ptxas).parameters)]).path
    assemble = [assembler, "-v", "--gpu-name=sm_90a", str(tmp_path / "kernel.ptx"), "-o", str(tmp_path / "out")]
    said = subprocess.run(assemble, capture_output=True, text=True, check=True)
    assert "registers" in said.stderr and "serialized" not in said.stderr


@needs_triton
@pytest.mark.parametrize("change, words",
                         [({}, None), ({"dtype": torch.float16}, None), ({"h": 128}, None), ({"h": 32}, "32 heads"),
                          ({"d_v": 256}, "256 and 64 channels"), ({"dtype": torch.float32}, "torch.float32"),
                          ({"s": 0}, "nothing to attend"), ({"gap": 4}, "16 bytes"),
                          ({"h": 64, "in_order": True}, None), ({"h": 128, "in_order": True}, "deterministic"),
                          ({"dtype": torch.float16, "in_order": True}, "deterministic"), ({"grad_gap": 4}, "16 bytes"),
                          ({"hopper": False}, "Hopper"), ({"missing": "no Gluon"}, "no Gluon"),
                          ({"by_heads": True}, None)])  # fmt: skip
def test_whom_it_serves(monkeypatch, change, words):
    gluon = lowering("sparse_mla")
    sizes = {"h": 64, "d_v": 512, "s": 100, "gap": 0, "grad_gap": 0, "dtype": torch.bfloat16, "hopper": True,
             "missing": "", "in_order": False, "by_heads": False, **change}  # fmt: skip
    monkeypatch.setattr(gluon, "on_hopper", lambda device: sizes["hopper"])
    monkeypatch.setattr(gluon, "backward_missing", sizes["missing"])
    monkeypatch.setattr(gluon, "in_order", lambda: sizes["in_order"])

    def empty(*shape, gap=0):
        return torch.empty(*shape[:-1], shape[-1] + gap, dtype=sizes["dtype"], device="meta")[..., : shape[-1]]

    channels = sizes["d_v"] + 64
    q, kv = empty(1, 8, sizes["h"], channels, gap=sizes["gap"]), empty(1, sizes["s"], 1, channels)
    out, grad = empty(1, 8, sizes["h"], sizes["d_v"]), empty(1, 8, sizes["h"], sizes["d_v"], gap=sizes["grad_gap"])
    if sizes["by_heads"]:  # as a GEMM leaves the gradient of a single sequence, in a compiled frame
        grad = grad.as_strided(grad.shape, (1, sizes["d_v"], 8 * sizes["d_v"], 1))
    indices = torch.empty(1, 8, 1, 16, dtype=torch.int32, device="meta")
    args = grad, None, q, kv, indices, out, out[..., 0].float(), 0.1, sizes["d_v"], True, 0
    why = gluon.supports("sparse_mla_backward", args)
    assert (why is None) if words is None else words in why


def small_backward(rand):
    return CASES["sparse_mla_backward"]["plain"](rand, torch.bfloat16)


@needs_triton
@pytest.mark.parametrize("in_order", [False, True])
def test_what_does_not_compile_is_served_otherwise(monkeypatch, rand, caplog, in_order):
    gluon = lowering("sparse_mla")
    monkeypatch.setattr(gluon, "backward_missing", "")
    monkeypatch.setattr(gluon.backward_kernels, "sparse_mla_backward", DoesNotCompile())
    monkeypatch.setattr(gluon.cuda_triton, "sparse_mla_backward", reference.sparse_mla_backward)
    monkeypatch.setattr(gluon, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(gluon, "in_order", lambda: in_order)
    args = small_backward(rand)
    got, want = gluon.sparse_mla_backward(*args), reference.sparse_mla_backward(*args)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert "no attribute 'barrier'" in caplog.text and "no attribute 'barrier'" in gluon.supports("sparse_mla_backward", args)


@needs_triton
def test_what_is_launched(monkeypatch, rand):
    """A program for each multiprocessor, or for each query and block of heads, if there are fewer; parts of some queries
    at a time where rows' gradients are to be in order."""
    gluon, launched = lowering("sparse_mla"), []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append((grid[0], args[8], args[12:14], constants["LISTED"]))

    monkeypatch.setattr(gluon, "backward_missing", "")
    monkeypatch.setattr(gluon.backward_kernels, "sparse_mla_backward", Kernel())
    monkeypatch.setattr(gluon, "multiprocessors", lambda device: 7)
    added = []
    monkeypatch.setattr(gluon, "add_lists", lambda parts, index, dkv, causal, offset: added.append((parts, index, offset)))
    args = small_backward(rand)
    q, indices = args[2], args[4]
    (b, t, _, d), k = q.shape, indices.shape[-1]
    gluon.sparse_mla_backward(*args)
    programs, to, share, listed = launched.pop()
    assert (programs, share, listed) == (7, (0, t), 0) and to.shape == (b, 9, 1, d) and to.dtype == torch.float32
    monkeypatch.setattr(gluon._lists, "PART_BYTES", 3 * b * k * d * 2)
    with deterministic():
        gluon.sparse_mla_backward(*args)
    assert [(n, share, listed) for n, _, share, listed in launched] == [(6, (0, 3), 1), (4, (3, 2), 1)]
    assert [to.shape for _, to, _, _ in launched] == [(b * 3 * k, d), (b * 2 * k, d)]
    assert [offset for *_, offset in added] == [0, 3]
    assert all(torch.equal(index, indices[:, part]) for (_, index, _), part in zip(added, (slice(3), slice(3, 5)), strict=True))


SIZES = [{}, {"by_heads": True, "batch": 1}, {"heads": 40}, {"heads": 128, "tokens": 9},
         {"dtype": torch.float16, "index": torch.int64}, {"causal": False, "k": 64},
         {"k": 2100, "tokens": 7, "rows": 3000}, {"k": 1}, {"batch": 1}]  # fmt: skip


def backward(change, with_lse=True):
    """The backward's arguments for a forward's, and its results in float64. With one row listed q has a gradient through
    the log-sum-exp alone."""
    by_heads = change.pop("by_heads", False)
    q, kv, indices, _, *settings = operands(**change)
    out, lse = reference.sparse_mla(q, kv, indices, None, *settings)
    grad = torch.randn(*out.shape, device="cuda").to(q.dtype)
    if by_heads:
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
        grad = grad.as_strided(grad.shape, (1, *grad.stride()[1:]))
    grad_lse = torch.randn(*lse.shape, device="cuda") if with_lse else None
    args = grad, grad_lse, q, kv, indices, out, lse, *settings
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    wide[5:7] = reference.sparse_mla(wide[2], wide[3], indices, None, *settings)
    return args, reference.sparse_mla_backward(*wide)


@on_hopper
@pytest.mark.parametrize("change", SIZES)
@pytest.mark.parametrize("in_order", [False, True])
def test_gradients(monkeypatch, change, in_order):
    gluon = lowering("sparse_mla")
    args, want = backward(dict(change), with_lse=change.get("batch") != 1)
    monkeypatch.setattr(gluon, "in_order", lambda: in_order)
    if why := gluon.supports("sparse_mla_backward", args):
        assert in_order and "deterministic" in why
        return
    q, indices = args[2], args[4]
    monkeypatch.setattr(gluon._lists, "PART_BYTES", 20 * q.shape[0] * indices.shape[-1] * q.shape[-1] * 2)
    with deterministic(), filled_memory():  # of any other op too
        got, again = (gluon.sparse_mla_backward(*args) for _ in range(2))
    assert not gluon.backward_missing
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 6e-3, relative_error(a, b)
    assert torch.equal(got[0], again[0]) and (not in_order or torch.equal(got[1], again[1]))


@on_hopper
def test_a_row_that_is_not_valid_is_not_read():
    args, _ = backward({})
    args[3][:, 17] = float("nan")
    args[4].masked_fill_(args[4] == 17, -1)
    dq, dkv = lowering("sparse_mla").sparse_mla_backward(*args)
    assert not dq.isnan().any() and not dkv.isnan().any() and not dkv[:, 17].any()


@on_hopper
@pytest.mark.parametrize("in_order", [False, True])
def test_as_an_op_and_in_a_graph(in_order):
    q, kv, indices, _, scale, d_v, causal, offset = operands(tokens=40)

    def call(q, kv):
        return megacpp_compile.sparse_mla(q, kv, indices, scale=scale, d_v=d_v, causal=causal, offset=offset)[0]

    grad, results = torch.randn(*q.shape[:3], d_v, device="cuda", dtype=q.dtype), []
    wide = [t.double().requires_grad_() for t in (q, kv)]
    runs = [(call, wide), *itertools.product((call, torch.compile(call, backend="megacpp")), [(q, kv)] * 2)]
    for run, pair in runs:
        pair = [t.detach().requires_grad_() for t in pair]
        # Not the reference's, whose GEMMs would ask for a setting of cuBLAS's.
        with deterministic() if in_order and results else contextlib.nullcontext():
            out = run(*pair)
            results.append([out, *torch.autograd.grad(out, pair, grad.to(out.dtype))])
    for got in results[1:]:
        assert all(relative_error(g, w) < 1e-2 for g, w in zip(got, results[0], strict=True))
        assert not in_order or all(torch.equal(a, b) for a, b in zip(got, results[1], strict=True))
