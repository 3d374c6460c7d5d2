"""`mla_decode` in Gluon: that it compiles for Hopper to what it is written for, whom it serves, and on a GPU its numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from megacpp_compile.lowerings.mla_decode import mla_decode, reference

from . import relative_error
from .agreement import DoesNotCompile, poisoned_memory
from .decode_cases import operands as small
from .gluon_kernels import assemble, lowering, needs_triton, on_hopper

KINDS = {"PLAIN": torch.bfloat16, "FP8": torch.float8_e4m3fn, "CODES": torch.uint8}


def compiled(kind: str, queries: int) -> Any:
    gluon = lowering("mla_decode")
    kernel, warps, sizes = gluon.launch_of(kind, queries)
    known = {"V": 512, "R": 64, "KIND": getattr(gluon.kinds, kind).value, "BK": 64, **sizes}
    constants = {name: value for name, value in known.items() if name in kernel.arg_names}
    rows = "*bf16" if kind == "PLAIN" else "*i32"
    types = {"q": "*bf16", "kv": rows, "halves": rows, "rests": rows, "row_scale": "*fp32", "codebook": "*fp32",
             "lengths": "*i32", "part_out": "*fp32", "part_lse": "*fp32", "scale": "fp32"}  # fmt: skip
    if kind == "PLAIN":
        for name, lanes in (("halves", 256), ("rests", 64)):
            layout = gluon.NVMMASharedLayout.get_default_for([1, 64, lanes], gluon.bfloat16)
            types[name] = f"tensordesc<bf16[1, 64, {lanes}],{layout!r}>"
    aligned = ("q", "kv", "part_out", "q_b", "q_t", "q_h", "kv_b", "kv_s")
    return assemble(kernel, types, constants, aligned, num_warps=warps)


@pytest.mark.end_to_end
@pytest.mark.sampled(5)
@needs_triton
@pytest.mark.parametrize("queries", [16, 32, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_for_hopper(kind, queries):
    made = compiled(kind, queries)
    text = made.asm["ptx"]
    assert made.metadata.shared <= 227 * 1024
    scores = text.count(f"m64n{queries}k16.f32.bf16.bf16")
    if queries == 64:
        # 576 channels; and 64 rows by 512 channels, of which a warp group multiplies 128 at once.
        assert scores == 36 and text.count("m64n128k16.f32.bf16.bf16") == 8
    else:
        # The same and 512 channels, 64 at once, by 64 rows.
        assert scores == 36 + 8 * 4
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (0x[0-9a-f]+)", text)
    assert set(copies) == ({"0x10"} if kind == "PLAIN" else set())
    assert ("cp.async.bulk.tensor.3d" in text) == (kind == "PLAIN" and queries == 64)
    assert ("mul.rn.bf16x2" in text) == (kind == "FP8") and ("prmt.b32 lo" in text) == (kind == "CODES")


@needs_triton
@pytest.mark.parametrize("change, words",
                         [({}, None), ({"kind": "FP8"}, None), ({"kind": "CODES"}, None), ({"h": 128, "t": 3}, None),
                          ({"d_v": 256}, "256 and 64 channels"), ({"rest": 32}, "512 and 32 channels"),
                          ({"dtype": torch.float16}, "float16"), ({"gap": 4}, "16 bytes"), ({"same": True}, "16 bytes"),
                          ({"s": 0}, "nothing to attend"), ({"hopper": False}, "Hopper")])  # fmt: skip
def test_whom_it_serves(monkeypatch, change, words):
    gluon = lowering("mla_decode")
    sizes = {"h": 16, "t": 1, "d_v": 512, "rest": 64, "s": 100, "gap": 0, "kind": "PLAIN", "dtype": torch.bfloat16,
             "hopper": True, "same": False, **change}  # fmt: skip
    monkeypatch.setattr(gluon, "on_hopper", lambda device: sizes["hopper"])
    channels = sizes["d_v"] + sizes["rest"]
    q = torch.empty(2, sizes["t"], sizes["h"], channels, dtype=sizes["dtype"], device="meta")
    dtype, width = KINDS[sizes["kind"]], channels // (2 if sizes["kind"] == "CODES" else 1)
    dtype = sizes["dtype"] if sizes["kind"] == "PLAIN" else dtype
    rows = torch.empty(2, sizes["s"], width + sizes["gap"], dtype=dtype, device="meta")[..., :width]
    if sizes["same"]:
        rows = rows[:, :1].expand(-1, 100, -1)
    why = gluon.supports("mla_decode", (q, rows, None, None, None, 0.1, sizes["d_v"]))
    assert (why is None) if words is None else words in why


@needs_triton
def test_what_does_not_compile_is_served_otherwise(monkeypatch, rand, caplog):
    gluon = lowering("mla_decode")
    monkeypatch.setattr(gluon, "missing", "")
    monkeypatch.setattr(gluon, "launch_of", lambda *_: (DoesNotCompile(), 4, {}))
    monkeypatch.setattr(gluon.cuda_triton, "mla_decode", reference.mla_decode)
    args = small(rand, torch.bfloat16, d_qk=576, d_v=512)
    got, want = gluon.mla_decode(*args), reference.mla_decode(*args)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert "no attribute 'barrier'" in caplog.text and "no attribute 'barrier'" in gluon.supports("mla_decode", args)


def cached(kind, b=3, t=1, h=16, s=900, lengths=(900, 333, 64), index=torch.int32):
    """Random; behind a sequence's length rows and scales are NaNs."""
    q = torch.randn(b, t, h, 576, device="cuda").bfloat16()
    beyond = torch.arange(s, device="cuda") >= torch.tensor(lengths, device="cuda")[:, None]
    row_scale = codebook = None
    if kind == "PLAIN":
        rows = torch.randn(b, s, 576, device="cuda").bfloat16()
        rows[beyond] = float("nan")
    elif kind == "FP8":
        # All of e4m3's numbers, subnormal ones too.
        rows = torch.randint(0, 127, (b, s, 576), device="cuda", dtype=torch.uint8)
        rows = rows + 128 * torch.randint(0, 2, rows.shape, device="cuda", dtype=torch.uint8)
        rows[beyond] = 127
        rows, row_scale = rows.view(torch.float8_e4m3fn), torch.rand(b, s, 1, device="cuda") / 30
    else:
        rows = torch.randint(0, 256, (b, s, 288), device="cuda", dtype=torch.uint8)
        row_scale, codebook = torch.rand(b, s, 2, device="cuda"), torch.randn(16, device="cuda")
    if row_scale is not None:
        row_scale[:, ::7] *= -1
        row_scale[:, 5] = 0
        row_scale[beyond] = float("nan")
    return q, rows, torch.tensor(lengths, device="cuda", dtype=index), row_scale, codebook, 576**-0.5, 512


def agrees(args, tolerance=6e-3):
    gluon = lowering("mla_decode")
    assert gluon.supports("mla_decode", args) is None
    q, rows, *others = args
    want = reference.mla_decode(q.double(), rows.double() if others[1] is None else rows, *others)
    with poisoned_memory():
        got = gluon.mla_decode(*args)
        torch.cuda.synchronize()
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g.isinf(), w.isinf()) and not g.isnan().any()
        g, w = (t.masked_fill(t.isinf(), 0) for t in (g, w))
        assert relative_error(g, w) < tolerance, relative_error(g, w)


@on_hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change",
                         [{}, {"h": 5}, {"t": 2}, {"h": 128}, {"h": 64, "t": 3}, {"h": 40, "lengths": (1, 899, 0)},
                          {"t": 4, "lengths": (2, 5, 700)}, {"index": torch.int64, "b": 1, "lengths": (1000,)},
                          {"s": 20000, "b": 1, "lengths": (19999,)}])  # fmt: skip
def test_agrees_on_hopper(kind, change):
    agrees(cached(kind, **change))


@on_hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("h", [16, 128])
def test_rows_of_a_larger_buffer(kind, h):
    q, rows, lengths, row_scale, *others = cached(kind, h=h)
    wide = torch.cat((rows.view(torch.uint8), rows.view(torch.uint8)), -1)
    rows = wide[..., wide.shape[2] // 2 :].view(rows.dtype)
    if row_scale is not None:
        row_scale = torch.stack((row_scale, row_scale), -1)[..., 1]
    q = torch.cat((q, q), 2)[:, :, ::2]
    agrees((q, rows, lengths, row_scale, *others))


@on_hopper
@pytest.mark.parametrize("kind", KINDS)
def test_one_captured_launch_serves_all_lengths(kind):
    args = cached(kind)
    q, rows, lengths, row_scale, *others = args
    mla_decode(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = mla_decode(*args)
    for now in ((900, 333, 64), (17, 1, 0)):
        lengths.copy_(torch.tensor(now))
        graph.replay()
        want = mla_decode(*args)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
