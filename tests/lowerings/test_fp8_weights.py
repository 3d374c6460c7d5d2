"""Casts of weights: kernels against the reference, and that what they make is what a call would have made itself."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.lowerings._kernels.fp8 import round_to_fp8
from megacpp_compile.lowerings.fp8_weights import cuda_triton, reference
from megacpp_compile.lowerings.moe import cuda_triton as experts_on_cuda
from megacpp_compile.lowerings.moe import reference as experts
from megacpp_compile.lowerings.moe_sorted import cuda_triton as sorted_on_cuda
from megacpp_compile.lowerings.moe_sorted import reference as sorted_experts

from . import relative_error
from .agreement import DEVICE, on, seldom
from .contract import agree
from .fp8_cases import EXPERTS_WEIGHTS, WEIGHTS, experts_weights
from .test_moe_float8 import FP8, ON_GPUS, SIZES, call, gradients_of, kernels, rounding_to_nearest


def payloads_of(module, args):
    """The last arguments of a call of `moe`: casts of its weights."""
    w_gate, w_up, w_down = args[3:6]
    pairs = (([*w_gate, *w_up], 2 if w_gate else 1), (w_down, 1))
    return [t for own, parts in pairs for t in module.fp8_quantize_experts(list(own), parts, True)]


def gradients_given_payloads(module, casts, args, seed):
    """`gradients_of`, of a call that is given what it would make."""
    payloads = payloads_of(casts, args)
    biases = [*args[11:], None, None, None][:3]
    y, kept, order, offsets = module.moe(*args[:11], *biases, *payloads)
    assert len(kept) == (len([w for w in args[3:5] if w]) if args[9] else 0)
    x, _, gates, *lists, activation, layout = args[:8]
    kept = [*kept, payloads[2], payloads[5]]
    others = FP8, *biases, payloads[1], payloads[4]
    *gradients, d_biases = module.moe_backward(seed, x, gates, *lists, kept, order, offsets, activation, layout, *others)
    return y, *gradients, *d_biases


@pytest.mark.parametrize("label", [k for k in SIZES if k not in ("no_token", *ON_GPUS)])
def test_experts_given_their_payloads(rand, label):
    args = call(rand, torch.float64, **SIZES[label])
    seed = rand(*args[0].shape)
    plain = gradients_of(experts, args, seed)
    # Not to the last bit: some processors sum a small product otherwise where an operand is transposed.
    agree(gradients_given_payloads(experts, reference, args, seed), plain)


@pytest.mark.parametrize("label", ["pair_separate", "gate_up_stacked", "biased", "hidden_not_kept"])
def test_opcheck_of_experts_given_payloads(rand, label):
    args = call(rand, torch.float32, **SIZES[label])
    biases = [*args[11:], None, None, None][:3]
    for t in (args[0], args[2], *(w for part in args[3:6] for w in part)):
        t.requires_grad_()
    payloads = [t.detach() for t in payloads_of(reference, args)]
    moe_args = (*args[:11], *biases, *payloads)
    torch.library.opcheck(torch.ops.megacpp.moe.default, moe_args, test_utils=("test_faketensor",))
    rows = args[0].shape[0]
    ends = torch.linspace(0, rows, len(payloads[0]) + 1, device=args[0].device)[1:].int()
    sorted_args = (args[0], ends, *args[3:8], args[9], FP8, *biases, *payloads)
    torch.library.opcheck(torch.ops.megacpp.moe_sorted.default, sorted_args, test_utils=("test_faketensor",))


@pytest.mark.parametrize("label", ["pair_separate", "gate_up_stacked"])
def test_sorted_experts_given_their_payloads(rand, label):
    args = call(rand, torch.float64, **SIZES[label])
    x, weights, form = args[0], args[3:6], args[6:8]
    payloads = payloads_of(reference, args)
    ends = torch.linspace(0, x.shape[0] - 2, len(payloads[0]) + 1)[1:].int()
    results = []
    for given in ((), payloads):
        biases = [None, None, None] if given else []
        y, kept = sorted_experts.moe_sorted(x, ends, *weights, *form, True, FP8, *biases, *given)
        kept = [*kept, *given[2::3]]
        transposed = given[1::3]
        outs = sorted_experts.moe_sorted_backward(y, x, *weights, kept, ends, *form, FP8, *biases, *transposed)
        results.append((y, *outs[:3]))
    agree(*results)


class TestKernels:
    pytestmark = kernels

    @pytest.mark.parametrize("label", WEIGHTS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_of_linears(self, rand, monkeypatch, label, dtype):
        options = {"factor": 1, "k": 48, "transposed": True} | WEIGHTS[label]
        weights = [rand(n, options["k"], dtype=dtype, device=DEVICE) * options["factor"] for n in options["rows"]]
        with rounding_to_nearest(monkeypatch):
            payload, columns, scale = cuda_triton.fp8_quantize_weights(weights, options["transposed"])
        want, _, want_scale = reference.fp8_quantize_weights(weights, options["transposed"])
        assert relative_error(scale, want_scale) < 1e-6 and scale.shape == ()
        assert relative_error(payload.float(), want.float()) < 1e-2  # ties
        assert torch.equal(columns.float(), payload.float().t()) if options["transposed"] else columns.numel() == 0

    @pytest.mark.parametrize("label", EXPERTS_WEIGHTS)
    def test_of_experts(self, rand, monkeypatch, label):
        args = experts_weights(lambda *s, **k: rand(*s, **k, device=DEVICE), torch.bfloat16, **EXPERTS_WEIGHTS[label])
        with rounding_to_nearest(monkeypatch):
            payload, columns, scale = cuda_triton.fp8_quantize_experts(*args)
        want, _, want_scale = reference.fp8_quantize_experts(*args)
        assert relative_error(scale, want_scale) < 1e-6
        assert relative_error(payload.float(), want.float()) < 1e-2
        assert torch.equal(columns.float(), payload.float().transpose(1, 2)) if args[2] else columns.numel() == 0

    @seldom
    @pytest.mark.parametrize("label", [k for k in SIZES if k != "no_token"])
    def test_experts_given_their_payloads(self, rand, monkeypatch, label):
        args = on(DEVICE, call(rand, torch.bfloat16, **SIZES[label]))
        seed = rand(*args[0].shape, dtype=torch.bfloat16, device=DEVICE)
        with rounding_to_nearest(monkeypatch):
            plain = gradients_of(experts_on_cuda, args, seed)
            given = gradients_given_payloads(experts_on_cuda, cuda_triton, args, seed)
        assert all(torch.equal(got, want) for got, want in zip(given, plain, strict=True))

    def test_sorted_experts_given_their_payloads(self, rand, monkeypatch):
        args = on(DEVICE, call(rand, torch.bfloat16, **SIZES["pair_separate"]))
        x, weights, form = args[0], args[3:6], args[6:8]
        ends = torch.linspace(0, x.shape[0] - 2, len(weights[2]) + 1, device=DEVICE)[1:].int()
        with rounding_to_nearest(monkeypatch):
            payloads = payloads_of(cuda_triton, args)
            want, _ = sorted_on_cuda.moe_sorted(x, ends, *weights, *form, True, FP8)
            got, _ = sorted_on_cuda.moe_sorted(x, ends, *weights, *form, True, FP8, None, None, None, *payloads)
        assert torch.equal(got, want)


def test_scales_are_those_of_each_row(rand):
    weights = [rand(16, 32) for _ in range(4)]
    payload, columns, scale = reference.fp8_quantize_experts(weights, 2, True)
    gate, up = weights[1], weights[3]
    want, want_scale = round_to_fp8(torch.cat([gate, up]), torch.float8_e4m3fn)
    assert torch.equal(payload[1].float(), want.float()) and torch.equal(scale[1], want_scale.squeeze(1))
    assert torch.equal(columns[1].float(), want.float().t())
