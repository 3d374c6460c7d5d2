"""Cases of linears whose weight is fp8."""

from __future__ import annotations

import torch

from .cases import case


def operands(rand, dtype, outer=(2, 5), n=48, k=32, per="tensor", bias=True, zero=False):
    x = rand(*outer, k, dtype=dtype) * (0 if zero else 1)
    shape = {"tensor": (1, 1), "row": (n, 1), "block": (-(-n // 128), -(-k // 128))}[per]
    payload = (rand(n, k) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    return x, payload, (rand(*shape).abs() / 200 + 0.001).float(), rand(n, dtype=dtype) if bias else None, dtype


LINEARS = {
    "tensor": {},
    "rows": {"per": "row"},
    "blocks": {"per": "block", "n": 144, "k": 160},
    "blocks_of_rows": {"per": "block", "n": 144},
    "no_bias": {"bias": False},
    "flat": {"outer": (7,)},
    "one_row": {"outer": ()},
    "odd_sizes": {"n": 13, "k": 21, "per": "row"},
    "all_zero": {"zero": True},
    "no_rows": {"outer": (0, 3)},
}
for label, options in LINEARS.items():

    @case("linear_fp8_weight", label)
    def _(rand, dtype, options=options):
        return operands(rand, dtype, **options)

    @case("linear_fp8_weight_backward", label)
    def _(rand, dtype, options=options):
        x, payload, scale, _, out_dtype = operands(rand, dtype, **options)
        grad = rand(*x.shape[:-1], payload.shape[0], dtype=dtype) * (0 if options.get("zero") else 1)
        return grad, payload, scale, out_dtype
