"""Cases of linears in float8, and of those whose weight is fp8 already."""

from __future__ import annotations

import torch

from megacpp_compile.lowerings._kernels.fp8_tiles import widened_by_tiles

from .agreement import reference_of
from .cases import each_case


def operands(rand, dtype, outer=(2, 5), n=48, k=32, per="tensor", bias=True, zero=False):
    x = rand(*outer, k, dtype=dtype) * (0 if zero else 1)
    shape = {"tensor": (1, 1), "row": (n, 1), "block": (-(-n // 128), -(-k // 128))}[per]
    payload = (rand(n, k) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    return x, payload, (rand(*shape).abs() / 200 + 0.001).float(), rand(n, dtype=dtype) if bias else None, dtype


LINEARS = {"tensor": {}, "rows": {"per": "row"}, "blocks": {"per": "block", "n": 144, "k": 160},
           "blocks_of_rows": {"per": "block", "n": 144}, "no_bias": {"bias": False}, "flat": {"outer": (7,)},
           "one_row": {"outer": ()}, "odd_sizes": {"n": 13, "k": 21, "per": "row"}, "all_zero": {"zero": True},
           "no_rows": {"outer": (0, 3)}}
each_case("linear_fp8_weight", LINEARS)(operands)


@each_case("linear_fp8_weight_backward", LINEARS)
def weight_backward(rand, dtype, **options):
    x, payload, scale, _, out_dtype = operands(rand, dtype, **options)
    grad = rand(*x.shape[:-1], payload.shape[0], dtype=dtype) * (0 if options.get("zero") else 1)
    return grad, payload, scale, out_dtype


def _fp8(rand, dtype, outer=(2, 24), k=48, n=32, bias=True, grad_format="e4m3", parts=(1,), past=(), wide=False,
         given=False):
    """Operands of fp8_linear, one of them of very small numbers. parts: the weights' rows, in sixteens. past: largest
    magnitudes of gradients in earlier steps, of which the first counts; none without delayed scaling. wide: the weights'
    gradients are in float32. given: backward has the weights' payload."""
    x, w = rand(*outer, k, dtype=dtype), rand(n, k, dtype=dtype) * 1e-4
    quantise = reference_of("fp8_quantize")
    weights, b = _parts(w, parts), _parts(rand(n, dtype=dtype), parts) if bias else []
    args = x, weights, *quantise(x, "e4m3"), *quantise(w, "e4m3"), b, grad_format, dtype
    delayed = (torch.tensor(past), torch.zeros(()), args[2].flatten(0, -2).t().contiguous()) if past else ()
    others = (*(delayed or [None] * 3), torch.float32 if wide else None, args[4].t().contiguous() if given else None)
    return *args, *(others if given else others[:4] if wide else delayed)


def _parts(t, parts):
    return [t] if len(parts) == 1 else list(t.split([16 * rows for rows in parts]))


QUANTISED = {"two_outer": {}, "flat_no_bias": {"outer": (16,), "bias": False}, "wide": {"k": 160, "n": 16},
             "gradients_in_e5m2": {"grad_format": "e5m2"}, "three_weights": {"n": 96, "parts": (1, 3, 2)},
             "two_weights_no_bias": {"n": 64, "parts": (3, 1), "bias": False}, "delayed": {"past": (4e3, 1.0)},
             "delayed_first_step": {"past": (0.0,), "bias": False},
             "delayed_in_e5m2": {"past": (4e3,), "grad_format": "e5m2"},
             "float32_gradients": {"n": 64, "parts": (3, 1), "wide": True},
             "delayed_float32_gradients": {"past": (4e3,), "bias": False, "wide": True},
             "delayed_beyond_the_past": {"past": (200.0,), "n": 64, "parts": (3, 1), "bias": False},
             "given_payload": {"n": 64, "parts": (3, 1), "given": True},
             "delayed_given_payload": {"past": (4e3,), "bias": False, "given": True}}
each_case("fp8_linear", QUANTISED)(_fp8)


@each_case("fp8_linear_backward", QUANTISED)
def backward(rand, dtype, **options):
    x, weights, x8, x_scale, _, w_scale, _, grad_format, _, *delayed = _fp8(rand, dtype, **options)
    grads = [rand(*x.shape[:-1], w.shape[0], dtype=dtype) * 1e3 for w in weights]
    if not delayed:
        return grads, x8, x_scale, weights, w_scale, grad_format, dtype
    largest, _, transposed, *others = delayed
    x8 = x8 if transposed is None else transposed
    return grads, x8, x_scale, weights, w_scale, grad_format, dtype, largest, transposed is not None, *others


def _by_blocks(rand, dtype, outer=(2, 128), k=256, n=128, bias=True, wide=False):
    """Operands of fp8_block_linear. wide: the weight's gradient is in float32."""
    x, w = rand(*outer, k, dtype=dtype), rand(n, k, dtype=dtype) * 1e-4
    quantise = reference_of("fp8_quantize_tiles")
    b = rand(n, dtype=dtype) if bias else None
    return x, w, *quantise(x, 1), *quantise(w, 128), b, dtype, *([torch.float32] if wide else [])


BY_BLOCKS = {"blocks": {}, "flat_ragged": {"outer": (40,), "k": 144, "n": 48, "bias": False},
             "float32_gradients": {"wide": True}}
each_case("fp8_block_linear", BY_BLOCKS)(_by_blocks)


@each_case("fp8_block_linear_backward", BY_BLOCKS)
def block_backward(rand, dtype, **options):
    x, w, x8, x_scale, _, w_scale, _, *dtypes = _by_blocks(rand, dtype, **options)
    return rand(*x.shape[:-1], w.shape[0], dtype=dtype) * 1e3, x8, x_scale, w, w_scale, *dtypes


@each_case("fp8_quantize_tiles", BY_BLOCKS)
def tiles(rand, dtype, **options):
    return _by_blocks(rand, dtype, **options)[0], 128 if "bias" in options else 1


CASTS = {f"{format}_{label}": {"format": format, "factor": factor} for format in ("e4m3", "e5m2")
         for label, factor in {"ordinary": 1, "tiny": 1e-30, "huge": 1e30, "zero": 0}.items()}
each_case("fp8_quantize", CASTS)(lambda rand, dtype, format, factor: (rand(3, 16, dtype=dtype) * factor, format))
each_case("fp8_quantize_transposed",
          CASTS)(lambda rand, dtype, format, factor: (rand(2, 24, 144, dtype=dtype) * factor, format))
PASTS = {"known": {"past": 3.0}, "none": {"past": 0.0, "factor": 1e-6}, "beyond": {"past": 0.5},
         "known_in_e5m2": {"past": 3.0, "format": "e5m2"}, "transposed": {"past": 3.0, "outer": (2, 40), "transposed": True},
         "transposed_none": {"past": 0.0, "outer": (144,), "k": 336, "transposed": True}, "zero": {"past": 0.0, "factor": 0}}


@each_case("fp8_quantize_delayed", PASTS)
def with_past(rand, dtype, past, outer=(3, 16), k=48, factor=1, format="e4m3", transposed=False):
    return rand(*outer, k, dtype=dtype) * factor, torch.tensor([past, 7.0]), format, transposed


WEIGHTS = {"one": {"rows": [48]}, "several": {"rows": [16, 48, 16], "k": 160},
           "no_backward": {"rows": [32], "transposed": False}, "tiny": {"rows": [144], "factor": 1e-30},
           "zero": {"rows": [16], "factor": 0}}


@each_case("fp8_quantize_weights", WEIGHTS)
def weights(rand, dtype, rows, k=48, factor=1, transposed=True):
    return [rand(n, k, dtype=dtype) * factor for n in rows], transposed


def experts_weights(rand, dtype, parts=2, stacked=False, across=False, transposed=True):
    """Weights [48, 160] of 3 experts, one with a row of zeros. across: they lie [160, 48]."""
    made = [rand(3, *((160, 48) if across else (48, 160)), dtype=dtype) for _ in range(parts)]
    stacks = [t.transpose(1, 2) for t in made] if across else made
    stacks[0][1, 5] = 0
    return stacks if stacked else [w for stack in stacks for w in stack.unbind(0)], parts, transposed


EXPERTS_WEIGHTS = {"separate": {}, "one_part": {"parts": 1}, "stacked": {"stacked": True},
                   "stacked_of_one_part": {"stacked": True, "parts": 1},
                   "transposed": {"stacked": True, "across": True}, "no_backward": {"transposed": False}}
each_case("fp8_quantize_experts", EXPERTS_WEIGHTS)(experts_weights)


@each_case("push_maxima", {"forward_alone": {"grads": 0}, "with_gradients": {"grads": 3}})
def maxima(rand, dtype, grads):
    latest = rand(4, dtype=torch.float32).abs()
    latest[1], latest[2] = float("inf"), float("nan")
    return rand(5, 4 + grads, dtype=torch.float32).abs(), latest, list(rand(grads, dtype=torch.float32).abs())


def block_scaled_as_torch_has_it(a, b, scale_a, scale_b, *, out_dtype, use_fast_accum):
    """`torch._scaled_mm` with block scales: what ScaledBlas.cpp asks of operands, in its oldest and newest form, and the
    GEMM in float64."""
    assert a.is_contiguous() and b.t().is_contiguous() and not use_fast_accum
    (m, k), n = a.shape, b.shape[1]
    assert scale_a.shape == (m, k // 128) and (k == 128 or scale_a.stride() == (1, m))
    if scale_b.shape == (k // 128, n):
        assert k == 128 or scale_b.t().stride() == (1, n)
        rows = 1
    else:
        assert scale_b.shape == (k // 128, n // 128) and (k // 128) % 4 == 0 and scale_b.t().stride() == (k // 128, 1)
        rows = 128
    wide = widened_by_tiles(a, scale_a, 1, 128, torch.float64)
    return (wide @ widened_by_tiles(b.t(), scale_b.t(), rows, 128, torch.float64).t()).to(out_dtype)
