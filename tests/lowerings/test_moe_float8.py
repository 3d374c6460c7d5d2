"""Routed experts in float8: the rounding, gradients, what is kept for backward, and kernels against the reference."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megacpp_compile.lowerings._activation import Activation
from megacpp_compile.lowerings._gemm.float8_support import no_grouped_float8
from megacpp_compile.lowerings._kernels.fp8 import round_to_fp8
from megacpp_compile.lowerings.moe import cuda_triton, moe, moe_backward, reference, tpu_xla

from . import relative_error
from .agreement import CUDA, DEVICE, OF_KERNELS, on, poisoned_memory, rarely
from .cases import CURVES, EXPERTS, _experts
from .contract import as_leaves, assert_keeps, identical, leaves

OP = torch.ops.megacpp.moe.default
FP8 = "fp8_current"
WITHOUT = CUDA and bool(no_grouped_float8(torch.device(DEVICE)))
kernels = [*OF_KERNELS, pytest.mark.skipif(WITHOUT, reason="a GPU without such GEMMs")]
# Numbers of e4m3 have four bits: an operand is off by 2^-4 / sqrt(12) of itself or so, 0.026 in norm, and a product of
# two such by sqrt(2) of that. Three GEMMs, one behind the other, are in the output and in every gradient.
ROUNDED = 0.1


def call(rand, dtype, **options):
    args = _experts(rand, dtype, **options)
    return *args[:10], FP8, *args[11:]


def gradients_of(module, args, seed):
    y, kept, order, offsets = module.moe(*args)
    x, _, gates, *lists, activation, layout = args[:8]
    others = FP8, *args[11:]
    *gradients, biases = module.moe_backward(seed, x, gates, *lists, kept, order, offsets, activation, layout, *others)
    return y, *gradients, *biases


def by_hand(x, indices, gates, w_gate, w_up, w_down, seed):
    """Output and gradients of the layout "pair" with silu, slot after slot, in float64 of what float8 made of it."""

    def rounded(t, payload=False):
        p, scale = round_to_fp8(t, torch.float8_e4m3fn)
        return (p.double() if payload else p.double() * scale), scale

    y, d_x, d_gates = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(gates)
    grads = [torch.zeros(len(ws), *ws[0].shape, dtype=x.dtype) for ws in (w_gate, w_up, w_down)]
    for t, j in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(gates.shape[1])).tolist():
        e = int(indices[t, j])
        if not 0 <= e < len(w_down):
            continue
        (gate8, gate_s), (up8, up_s), (down8, down_s) = (rounded(ws[e], True) for ws in (w_gate, w_up, w_down))
        x8, _ = rounded(x[t])
        gate, up = (gate8 * gate_s) @ x8, (up8 * up_s) @ x8
        s = torch.sigmoid(gate)
        a = gate * s * up
        y[t] += (down8 * down_s) @ rounded(a)[0] * gates[t, j]
        d_a = rounded(seed[t] * down_s.squeeze(-1))[0] @ down8
        d_gates[t, j] = d_a @ a
        d_a = d_a * gates[t, j]
        d_hidden = torch.cat([d_a * up * s * (1 + gate * (1 - s)), d_a * gate * s])
        scales = torch.cat([gate_s, up_s]).squeeze(-1)
        d_x[t] += rounded(d_hidden * scales)[0] @ torch.cat([gate8, up8])
        d_gate, d_up = d_hidden.chunk(2)
        for grad, left, right in zip(grads, (d_gate, d_up, seed[t] * gates[t, j]), (x[t], x[t], a), strict=True):
            grad[e] += left[:, None] * right
    return y, d_x, d_gates, torch.cat(grads[:2], 1), grads[2]


@pytest.mark.parametrize("kind", ["random", "to_one", "some_of_none"])
def test_is_rounded_as_promised(rand, kind):
    args = call(rand, torch.float64, kind=kind, tokens=9)
    seed = rand(9, 24)
    want = by_hand(*args[:6], seed)
    for got, exact in zip(gradients_of(reference, args, seed), want, strict=True):
        assert relative_error(got, exact) < 1e-12


@pytest.mark.parametrize("label", sorted(k for k in EXPERTS if "no_token" not in k))
def test_is_near_the_exact_one(rand, label):
    """Where a clamp passes no gradient on, numbers that moved beyond its end have none at all: of such, the output."""
    args = call(rand, torch.float64, **EXPERTS[label])
    results = []
    for given in ((*args[:10], "", *args[11:]), args):
        x, _, gates, *lists = given[:6]
        leaves = [t.requires_grad_() for t in (x, gates, *(w for part in lists for w in part))]
        y = OP(*given)[0]
        d_x, d_gates, *d_weights = torch.autograd.grad(y, leaves, torch.ones_like(y))
        outs = (y, d_x, d_gates, torch.cat([g.flatten() for g in d_weights]))
        results.append(outs[:1] if "clamp" in args[6] or "hardtanh" in args[6] else outs)
    worst = max(map(relative_error, *reversed(results)))
    assert 0.01 < worst < 4 * ROUNDED  # gradients of gates are sums that cancel, a relu's start at a number that moved


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("label", ["pair_separate", "gate_up_stacked", "some_of_none", "hidden_not_kept"])
def test_opcheck(rand, label):
    torch.library.opcheck(OP, as_leaves(call(rand, torch.float32, **EXPERTS[label])))


@pytest.mark.parametrize("keep", [True, False])
def test_no_payload_is_saved_for_backward(rand, keep):
    args = as_leaves(call(rand, torch.bfloat16, keep=keep))
    hidden = 2 if keep else 0
    outs = assert_keeps(moe, args, leaves(args), *range(1, hidden + 5))
    scales = outs[1 + hidden : 3 + hidden]
    assert [(tuple(t.shape), t.dtype) for t in scales] == [((5, 32), torch.float32), ((5, 24), torch.float32)]
    assert len(outs) == hidden + 5


def test_hidden_is_made_again(rand):
    seed = rand(23, 24)
    args = call(rand, torch.float64)
    others = *args[:9], False, FP8
    identical(gradients_of(reference, others, seed), gradients_of(reference, args, seed))


def test_who_serves_it(rand):
    args = _experts(rand, torch.bfloat16, d=48, n=32)
    assert cuda_triton.supports("moe", (*args, FP8)) is None
    assert "multiples of 16" in cuda_triton.supports("moe", call(rand, torch.bfloat16))
    assert "payloads of torch.float32" in cuda_triton.supports("moe", call(rand, torch.float32))
    assert cuda_triton.supports("moe", call(rand, torch.float32)[:-1]) is None
    assert tpu_xla.supports("moe", (*args, FP8)) == "no float8 GEMMs" and tpu_xla.supports("moe", args) is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("label", ["pair_separate", "pair_stacked", "gate_up_separate", "single_stacked", "transposed"])
@pytest.mark.parametrize("module", [reference, cuda_triton])
def test_results_lie_as_promised(rand, module, label):
    args = call(rand, torch.bfloat16, **EXPERTS[label], d=48, n=32)
    x, _, gates, *lists, activation, layout = args[:8]
    with FakeTensorMode() as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, args)
        outs = [f(*fakes) for f in (module.moe, OP)]
        (_, kept, order, ends), others = outs[1], tree_map_only(torch.Tensor, mode.from_tensor, (x, x, gates, *lists))
        outs += [f(*others, kept, order, ends, activation, layout, FP8) for f in (module.moe_backward, moe_backward)]
    described = [[(t.shape, t.dtype, t.stride()) for t in tree_leaves(out)] for out in outs]
    assert described[0] == described[1] and described[2] == described[3]


@contextlib.contextmanager
def rounding_to_nearest(monkeypatch):
    """Triton's interpreter cuts off what float8 has no bits for (3.9); a GPU rounds to the nearest, and so does torch."""
    if not CUDA:
        from triton import language as tl
        from triton.runtime import interpreter

        plain = interpreter._convert_float

        def convert(data, source, target, mode):
            if source != tl.float32 or target not in (tl.float8e4nv, tl.bfloat16):
                return plain(data, source, target, mode)
            wide = torch.from_numpy(np.ascontiguousarray(data))
            if target == tl.bfloat16:
                return wide.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(data.shape)
            return wide.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(data.shape)

        monkeypatch.setattr(interpreter, "_convert_float", convert)
    with poisoned_memory():
        yield


SIZES = {
    "pair_separate": {"d": 160, "n": 48},  # no multiples of a tile's sides
    "pair_stacked": {"d": 48, "n": 144, "stacked": True},
    "gate_up": {"d": 48, "n": 32, "layout": "gate_up"},
    "gate_up_stacked": {"d": 144, "n": 80, "layout": "gate_up", "stacked": True},
    "up_gate": {"d": 32, "n": 16, "layout": "up_gate"},
    "single": {"d": 32, "n": 48, "layout": "single", "activation": "relu2"},
    "biased": {"d": 48, "n": 32, "biased": "gate up down", "activation": CURVES["swish"]},
    "softcapped": {"d": 48, "n": 32, "activation": CURVES["softcapped_silu"]},  # no kernel of gate and up together
    "biased_gate_up": {"d": 48, "n": 32, "layout": "gate_up", "biased": "up down"},
    "interleaved": {"d": 32, "n": 16, "layout": "interleaved", "biased": "up down", "activation": CURVES["swish"]},
    "to_one": {"d": 64, "n": 32, "kind": "to_one", "tokens": 150},
    "some_of_none": {"d": 64, "n": 32, "kind": "some_of_none"},
    "transposed": {"d": 48, "n": 32, "stacked": True, "transposed": True},
    "hidden_not_kept": {"d": 48, "n": 32, "keep": False},
    "no_token": {"d": 32, "n": 16, "tokens": 0},
    "one_expert": {"d": 32, "n": 16, "experts": 1, "choices": 1},
}
# Large enough for a CPU's GEMMs to add in another order where operands lie elsewhere.
ON_GPUS = {"many": {"d": 512, "n": 384, "experts": 16, "choices": 4, "tokens": 1000},
           "a_width_of_11_tiles": {"d": 2048, "n": 1408, "experts": 4, "tokens": 300}}
if CUDA:
    SIZES |= ON_GPUS


# With kernels of gate and up together, and apart.
OFTEN = "gate_up", "softcapped"
SIDES = rarely(160, 48), rarely(128, 128)


class TestKernels:
    pytestmark = kernels

    @pytest.mark.parametrize("label", [size if size in OFTEN else rarely(size) for size in SIZES])
    def test_agree_with_the_reference(self, rand, monkeypatch, label):
        """But for numbers that fall to the other side of a tie. What is rounded to float8 again is now and then off by a
        bit of bfloat16, as the reference rounds in between and a GPU sums in 22 bits: 0.02 of all in the worst of many
        seeds."""
        args = on(DEVICE, call(rand, torch.bfloat16, **SIZES[label]))
        seed = rand(*args[0].shape, dtype=torch.bfloat16, device=DEVICE)
        with rounding_to_nearest(monkeypatch):
            got = gradients_of(cuda_triton, args, seed)
        for g, want in zip(got, gradients_of(reference, args, seed), strict=True):
            assert g.shape == want.shape and g.dtype == want.dtype
            assert not g.numel() or relative_error(g, want) < 4e-2

    @pytest.mark.parametrize("activation", ["silu", rarely("relu"), rarely(CURVES["clamped_silu"])])
    def test_gradients_behind_a_gemm(self, rand, activation):
        """Of rows of experts, and of some of none, whose channels are no whole blocks."""
        from megacpp_compile.lowerings._kernels import triton_gated_gradients as kernel

        offsets, n = torch.tensor([5, 5, 19], dtype=torch.int32, device=DEVICE), 520
        d_a, gates = rand(23, n, dtype=torch.bfloat16).to(DEVICE), rand(23, dtype=torch.float32).to(DEVICE)
        gate, up = rand(23, 2 * n, dtype=torch.bfloat16).to(DEVICE).chunk(2, 1)
        leaves = [t[:19].double().requires_grad_() for t in (gate, up, gates)]
        (f, _), (factor, _) = Activation.parse(activation).of_gate(leaves[0]), Activation.parse(activation).of_up(leaves[1])
        a = f * factor
        want = torch.autograd.grad(a * leaves[2][:, None], leaves, d_a[:19].double())
        d_a[19:] = float("nan")
        with poisoned_memory():
            d_hidden, out, d_gates = kernel.gradients_of_rows(d_a, gate, up, gates, offsets, activation)
        near = 2**-7
        assert relative_error(d_hidden[:19], torch.cat(want[:2], 1)) < near
        assert relative_error(out[:19], a * leaves[2][:, None]) < near
        assert relative_error(d_gates[:19], want[2]) < 1e-5
        assert not any(t[19:].any() for t in (d_hidden, out, d_gates))

    @pytest.mark.parametrize("r, c", [(48, 160), *SIDES, *[(1408, 2048), (2048, 1408)] * CUDA])
    @pytest.mark.parametrize("parts", [1, 2])
    def test_payloads_of_weights(self, rand, monkeypatch, r, c, parts):
        from megacpp_compile.lowerings._kernels import triton_quantise as kernel

        weights = [rand(r, c, dtype=torch.bfloat16, device=DEVICE) for _ in range(3 * parts)]
        weights[1][5] = 0
        with rounding_to_nearest(monkeypatch):
            payload, scale = kernel.quantised_weights(weights, parts)
            turned = kernel.transposed_weights(weights, parts, scale)
        want = [torch.cat([weights[part * 3 + e] for part in range(parts)]).float() for e in range(3)]
        for e, w in enumerate(want):
            p, s = round_to_fp8(w, torch.float8_e4m3fn)
            assert relative_error(scale[e], s.squeeze(1)) < 1e-6
            assert relative_error(payload[e].float(), p.float()) < 1e-2  # ties
            assert torch.equal(turned[e].float(), payload[e].float().t())

    @pytest.mark.parametrize("k", [rarely(16), 176])
    def test_payloads_of_rows(self, rand, monkeypatch, k):
        from megacpp_compile.lowerings._kernels import triton_quantise as kernel

        x = rand(7, k, dtype=torch.bfloat16, device=DEVICE)
        x[3] = 0
        x[4] *= 1e30
        take = torch.tensor([3, 3, 0, 6, 4, 5], device=DEVICE)
        ends = torch.tensor([1, 1, 5], dtype=torch.int32, device=DEVICE)
        lane = rand(3, k, dtype=torch.float32, device=DEVICE).abs()
        with rounding_to_nearest(monkeypatch):
            payload, scale = kernel.quantised_rows(x, take, lane, ends)
            plain, plain_scale = kernel.quantised_rows(x)
        wide = x[take].float() * lane[torch.tensor([0, 2, 2, 2, 2, 2])]
        for got, s, want in ((payload, scale, wide), (plain, plain_scale, x.float())):
            assert relative_error(got.float() * s[:, None], want) < 0.035
            exact = round_to_fp8(want, torch.float8_e4m3fn)
            assert relative_error(s, exact[1].squeeze(1)) < 1e-6
            assert relative_error(got.float(), exact[0].float()) < 1e-2

    @pytest.mark.skipif(not CUDA, reason="Triton's interpreter knows no NaN of float8")
    def test_numbers_that_are_none_stay_so(self, rand, monkeypatch):
        """Not silently the largest number of float8."""
        for bad in (float("nan"), float("inf")):
            args = on(DEVICE, call(rand, torch.bfloat16, d=32, n=16))
            args[0][2, 3] = bad
            with rounding_to_nearest(monkeypatch), np.errstate(all="ignore"):
                y, *_ = cuda_triton.moe(*args)
            assert not y[2].isfinite().any() and y[3:].isfinite().all()


class Rounded(nn.Module):
    """A router that chooses as one in bfloat16 does, for a model in float32."""

    def __init__(self, router: nn.Module):
        super().__init__()
        self.router = router

    def forward(self, x):
        return self.router(x.bfloat16()).float()


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA or WITHOUT, reason="needs grouped float8 GEMMs")
@pytest.mark.parametrize("stacked", [False, True])
def test_compiled_under_a_plan(stacked):
    import megacpp_compile
    from benchmarks import models

    torch.manual_seed(0)
    sizes = 256, 128, 8, 2, 1, stacked
    model = models.RangeLoopMoE(*sizes).to(DEVICE, torch.bfloat16)
    exact = models.RangeLoopMoE(*sizes).to(DEVICE)
    exact.load_state_dict(model.state_dict())
    exact.router = Rounded(copy.deepcopy(model.router))
    x = torch.randn(512, 256, device=DEVICE, dtype=torch.bfloat16)
    seed = torch.randn(512, 256, device=DEVICE)
    plan = megacpp_compile.PrecisionPlan(rules=(("shared.*", "bf16"),), gate=False)
    with megacpp_compile.record() as report:
        compiled = torch.compile(model, backend="megacpp", options={"precision": plan})
        results = []
        for module, parameters, given in ((compiled, model, x), (exact, exact, x.float())):
            leaf = given.detach().requires_grad_()
            y = module(leaf)
            results.append((y, *torch.autograd.grad(y, [leaf, *parameters.parameters()], seed.to(y.dtype))))
    rows = [r for f in report.frames for r in f.precision if r["kind"] == "experts"]
    assert [(r["requested"], r["effective"], r["reason"]) for r in rows] == [(FP8, FP8, "")], rows
    assert {s.effective for s in report.sites if s.pass_name == "moe"} == {"cuda_triton" if CUDA else "reference"}
    y, *gradients = map(relative_error, *results)
    assert 0.01 < y < 0.1 and max(gradients) < 0.12, (y, gradients)
