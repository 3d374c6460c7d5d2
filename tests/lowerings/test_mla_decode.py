"""`megacpp::mla_decode`: registration, the formula one query after the other, rows of bytes, what it refuses, and that its
kernels compile for Hopper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megacpp_compile.errors import AbsorbedInTrainingError, OperandError
from megacpp_compile.lowerings._registry import choose, semantic_ops
from megacpp_compile.lowerings.mla_decode import mla_decode, reference

from . import relative_error
from .agreement import DEVICE, KERNELS, on, seldom
from .cases import CASES
from .decode_cases import operands
from .gluon_kernels import assemble, needs_triton

assert semantic_ops()
EMPTY = ("no_token", "no_sequence", "many_parts", "parts_without_rows")


def row(kv, row_scale, codebook, i, n, d_v):
    """One row of the cache, channel by channel."""
    if row_scale is None:
        return kv[i, n]
    if codebook is None:
        return kv[i, n].double() * row_scale[i, n, 0].double()
    d, half, channels = 2 * kv.shape[-1], d_v // 2, []
    for channel in range(d):
        start, size, at = (0, half, channel) if channel < d_v else (half, d // 2 - half, channel - d_v)
        byte = int(kv[i, n, start + at % size])
        code = byte % 16 if at < size else byte // 16
        channels.append(codebook[code].double() * row_scale[i, n, int(channel >= d_v)].double())
    return torch.stack(channels)


def formula(q, kv, lengths, row_scale, codebook, scale, d_v):
    """One query, one head and one row after the other."""
    b, t, h, _ = q.shape
    outs, sums = [], []
    for i in range(b):
        length = int(lengths[i])
        for j in range(t):
            seen = range(min(length - t + j + 1, kv.shape[1]))
            rows = [row(kv, row_scale, codebook, i, n, d_v) for n in seen]
            for head in range(h):
                if not rows:
                    outs.append(q.new_zeros(d_v))
                    sums.append(q.new_full((), -math.inf))
                    continue
                scores = torch.stack([(q[i, j, head] * r).sum() for r in rows]) * scale
                total = scores.exp().sum()
                outs.append(sum(s.exp() / total * r[:d_v] for s, r in zip(scores, rows, strict=True)))
                sums.append(total.log())
    return torch.stack(outs).view(b, t, h, d_v), torch.stack(sums).view(b, t, h)


@pytest.mark.parametrize("label", [name for name in CASES["mla_decode"] if name not in EMPTY and "deepseek" not in name])
def test_is_the_formula(rand, label):
    args = CASES["mla_decode"][label](rand, torch.float64)
    assert all(relative_error(g, w) < 1e-12 for g, w in zip(mla_decode(*args), formula(*args), strict=True))


def test_a_row_nobody_may_see_does_no_harm(rand):
    """Not even as a NaN: what is beyond the length may be anything."""
    q, kv, *others = operands(rand, torch.float32, t=2, lengths=(7, 7))
    want = mla_decode(q, kv, *others)
    kv[:, 7:] = float("nan")
    assert all(torch.equal(a, b) for a, b in zip(mla_decode(q, kv, *others), want, strict=True))


def test_several_tokens_are_as_many_steps(rand):
    q, kv, lengths, *others = operands(rand, torch.float64, t=3)
    out, lse = mla_decode(q, kv, lengths, *others)
    for i in range(3):
        one, its = mla_decode(q[:, i : i + 1], kv, lengths - 2 + i, *others)
        assert relative_error(one, out[:, i : i + 1]) < 1e-14 and relative_error(its, lse[:, i : i + 1]) < 1e-14


def test_operands_that_mean_nothing(rand):
    args = operands(rand, torch.float32)
    q, kv, lengths, _, _, *others = args
    fp8, codes = operands(rand, torch.float32, rows="fp8"), operands(rand, torch.float32, rows="codes")
    for wrong, words in (((q, kv.unsqueeze(2), *args[2:]), "[b, s, w]"), ((q, kv[:1], *args[2:]), "1 in rows"),
                         ((q, kv, lengths.float(), *args[3:]), "int32 or int64"), ((*args[:6], 25), "d_v = 25"),
                         ((q, kv[..., :20], *args[2:]), "a row 20 elements"),
                         ((q, kv.bfloat16(), *args[2:]), "q is torch.float32, rows torch.bfloat16"),
                         ((*fp8[:3], None, *fp8[4:]), "without row_scale"),
                         ((*fp8[:3], fp8[3].expand(-1, -1, 2), *fp8[4:]), "row_scale is (2, 9, 2)"),
                         ((*codes[:4], None, *codes[5:]), "without a codebook"),
                         ((*codes[:4], codes[4][:8], *codes[5:]), "a codebook [16]"),
                         ((*codes[:6], 15), "an even number of channels"),
                         ((q, kv, lengths, None, codes[4], *others), "with a codebook")):
        with pytest.raises(OperandError) as caught:
            mla_decode(*wrong)
        assert words in str(caught.value), caught.value


@pytest.mark.parametrize("operand", [0, 1])
def test_training_is_refused(rand, operand):
    args = operands(rand, torch.float32)
    args[operand].requires_grad_()
    with pytest.raises(AbsorbedInTrainingError, match=r"24 channels and a value 16.*no flash kernel.*no_grad"):
        mla_decode(*args)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            mla_decode(*args)


def test_training_is_refused_compiled(rand):
    args = operands(rand, torch.float32)
    args[0].requires_grad_()
    with pytest.raises(RuntimeError, match=r"no flash kernel[\s\S]*no_grad"):
        torch.compile(lambda *a: mla_decode(*a)[0], backend="aot_eager", fullgraph=True)(*args)


@torch.no_grad()
def test_one_graph_serves_all_lengths(rand, no_kernels):
    torch._dynamo.reset()
    args = operands(rand, torch.float32)
    compiled = torch.compile(lambda *a: mla_decode(*a)[0] * 2, backend="megacpp", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((9, 6), (1, 2), (0, 8)):
            now = (*args[:2], torch.tensor(lengths, dtype=torch.int32), *args[3:])
            assert torch.equal(compiled(*now), mla_decode(*now)[0] * 2)


@KERNELS
class TestKernels:
    def test_refusals(self, rand):
        args = operands(rand, torch.float32)
        for wrong, why in ((on("cpu", args, torch.float64), "float64"),
                           (operands(rand, torch.float32, d_qk=700, d_v=600), "channels"),
                           (operands(rand, torch.float32, t=0), "nothing to attend"),
                           (operands(rand, torch.float32, rows="codes", d_qk=36, d_v=23 + 9), None)):
            choice = choose(torch.ops.megacpp.mla_decode.default, "cuda", wrong)
            assert choice.effective == ("cuda_triton" if why is None else "reference") and (why or "") in choice.reason

    @pytest.mark.parametrize("rows", ["fp8", "codes"])
    def test_payloads_are_exact(self, rand, rows):
        """No rounding but float32's: a payload is widened inside the kernel, never rounded again."""
        from megacpp_compile.lowerings.mla_decode import cuda_triton

        args = on(DEVICE, operands(rand, torch.float32, d_qk=200, d_v=130, s=300, lengths=(290, 31), rows=rows))
        got, want = cuda_triton.mla_decode(*args), reference.mla_decode(*args)
        assert all(relative_error(g, w) < 2e-6 for g, w in zip(got, want, strict=True))

    @seldom
    def test_the_number_of_parts_changes_rounding_alone(self, rand, monkeypatch):
        from megacpp_compile.lowerings.mla_decode import cuda_triton

        results = []
        args = on(DEVICE, operands(rand, torch.float32, b=1, t=2, s=700, lengths=(611,)))
        for parts in (1, 2, 5, 11, 64):
            monkeypatch.setattr(cuda_triton, "parts", lambda *_, n=parts: n)
            results.append(cuda_triton.mla_decode(*args))
        for result in results[1:]:
            assert all(relative_error(g, w) < 1e-6 for g, w in zip(result, results[0], strict=True))

    def test_parts_follow_from_shapes(self, rand):
        """Enough to fill the device, none below 256 rows, and no look at lengths."""
        from megacpp_compile.lowerings.mla_decode.cuda_triton import parts

        def of(b, s, h=16):
            return parts(torch.empty(b, 1, h, 8, device="meta"), torch.empty(b, s, 8, device="meta"), 64)

        assert of(1, 256) == 1 and of(1, 1024) == 4 and of(1, 8192) == 32 and of(1, 65536) == 128
        # Whole waves of 132 programs, or nearly: 16 x 8, 20 x 13, 64 x 2, 3 blocks of 64 x 16 queries x 11.
        assert of(16, 65536) == 8 and of(20, 65536) == 13 and of(64, 65536) == 2 and of(128, 65536, h=128) == 1


def compiled(name: str, query: str, **given: Any) -> Any:
    from megacpp_compile.lowerings.mla_decode import _triton_kernels as kernels

    kernel = getattr(kernels, name)
    rows = {"mla_decode_codes": "*u8"}.get(name, "*fp8e4nv" if given.get("SCALED") else query)
    types = {"q": query, "kv": rows, "row_scale": "*fp32", "codebook": "*fp32", "lengths": "*i32", "part_out": "*fp32",
             "part_lse": "*fp32", "out": query, "lse": "*fp32", "scale": "fp32"}  # fmt: skip
    options = {name: given.pop(name) for name in ("num_warps", "num_stages")}
    strides = {n for n in kernel.arg_names if n[-2:] in ("_b", "_t", "_h", "_s") and n != "s_s"}
    return assemble(kernel, types, given, (strides | types.keys()) - {"scale"}, plain=True, **options)


SIZES = {"V": 512, "VP": 512, "R": 64, "RP": 64}
HALVES = {"V": 256, "VP": 256, "R": 32, "RP": 32}
EXACT = {"PRECISION": "ieee", "INTERPRETED": False}
ROWS = {"plain": torch.bfloat16, "fp8": torch.float8_e4m3fn, "codes": torch.uint8}


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@needs_triton
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kind", ROWS)
def test_compiles_for_hopper(hopper, kind, heads):
    """At 512 + 64 channels it fits, and its GEMMs are on tensor cores, those of 64 queries in warp groups."""
    from megacpp_compile.lowerings.mla_decode.cuda_triton import tile

    meta = {"device": "meta", "dtype": torch.bfloat16}
    block = tile(torch.empty(1, 1, heads, 576, **meta), torch.empty(1, 9, 576, **{**meta, "dtype": ROWS[kind]}))
    sizes = HALVES if kind == "codes" else {**SIZES, "SCALED": int(kind == "fp8")}
    name = "mla_decode_codes" if kind == "codes" else "mla_decode_rows"
    made = compiled(name, "*bf16", **block, **sizes, **EXACT)
    assert made.metadata.shared <= 227 * 1024
    assert ("wgmma.mma_async" if heads == 128 else "mma.sync.aligned.m16n8k16") in made.asm["ptx"]


@pytest.mark.end_to_end
@needs_triton
def test_the_combining_kernel_compiles_for_hopper(hopper):
    for sizes in ({"BV": 64, "BS": 32, "SP": 256}, {"BV": 512, "BS": 4, "SP": 8}):
        text = compiled("mla_decode_combine", "*bf16", num_warps=4, num_stages=1, V=512, **sizes).asm["ptx"]
        assert "ex2.approx" in text and "ld.global.v4" in text
