"""Float8 in `special_values.ENTRIES`: operands are rounded on their way to an op, which is a part of what is held to plain
code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._kernels.fp8_tiles import widened_by_tiles

from .cases import CASES
from .special_values import ENTRIES, Entry, filled, of_case, replaced

E4M3_ERROR = 0.06


def widened(payload: Tensor, scale: Tensor) -> Tensor:
    return payload.to(scale.dtype) * scale


def as_numbers(op, x, format, *_):
    payload, *_, scale = op(x, format)
    return widened(payload, scale)


def by_past(op, x, *others):
    payload, _, scale, _ = op(x, *others)
    return widened(payload, scale)


def the_same(x, *_):
    return [x]


for name, call, label in (
    ("fp8_quantize", as_numbers, "e4m3_tiny"), ("fp8_quantize_transposed", as_numbers, "e4m3_tiny"),
    ("fp8_quantize_delayed", by_past, "known"), ("fp8_quantize_delayed first", by_past, "none"),
    ("fp8_quantize_tiles", lambda op, x, rows: widened_by_tiles(*op(x, rows), rows, 128, torch.float32),
     "float32_gradients"),
):  # fmt: skip
    ENTRIES[name] = Entry(
        the_same, (), label, token={0: 1}, call=call, tolerance=E4M3_ERROR,
        empty=of_case(own := name.split()[0], *[zero for zero in ("e4m3_zero", "e5m2_zero", "zero") if zero in CASES[own]]),
    )  # fmt: skip
# All of a weight has one scale, and one row that is no number is one channel of eager's result for every token.
ENTRIES["fp8_quantize_weights"] = Entry(
    lambda weights, _: [torch.cat(weights)], (), "tiny", empty=of_case("fp8_quantize_weights", "zero", "tiny"),
    call=lambda op, *args: widened(*op(*args)[::2]), tolerance=E4M3_ERROR,
)  # fmt: skip


def of_experts(weights, parts, _):
    return [torch.stack(weights).unflatten(0, (parts, -1)).transpose(0, 1).flatten(1, 2)]


def experts_as_numbers(op, *args):
    rows, _, scale = op(*args)
    return widened(rows, scale[..., None])


ENTRIES["fp8_quantize_experts"] = Entry(
    of_experts, (), "separate", token={0: 0}, call=experts_as_numbers, tolerance=E4M3_ERROR
)


def newest_first(history, latest, grads):
    newest = torch.cat([latest, torch.stack(grads)]) if grads else latest
    return [torch.cat([newest.masked_fill(~newest.isfinite(), 0)[None], history[:-1]])]


ENTRIES["push_maxima"] = Entry(
    newest_first, (), "with_gradients", call=lambda op, *args: op(*args)[0],
    left_out={"a maximum": lambda args, bad: replaced(args, _1=filled(args[1], 0, bad))},
)  # fmt: skip


def linears(x, weights, x8, x_scale, w8, w_scale, biases, *_):
    return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]


def rounded_linears(op, x, weights, x8, x_scale, w8, w_scale, *others):
    with torch.no_grad():
        x8, x_scale = torch.ops.megacpp.fp8_quantize(x, "e4m3")
    return op(x, weights, x8, x_scale, w8, w_scale, *others)


def block_linear(x, weight, x8, x_scale, w8, w_scale, bias, *_):
    return [F.linear(x, weight, bias)]


def rounded_block_linear(op, x, weight, x8, x_scale, *others):
    with torch.no_grad():
        x8, x_scale = torch.ops.megacpp.fp8_quantize_tiles(x, 1)
    return op(x, weight, x8, x_scale, *others)


def linear_of_payload(x, payload, scale, bias, out_dtype):
    for dim, size in enumerate(payload.shape):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, size)
    return [F.linear(x, widened(payload, scale), bias).to(out_dtype)]


ENTRIES["fp8_linear"] = Entry(
    linears, (0, 1, 6), "two_outer", token={0: 1}, rows=(1,), call=rounded_linears, tolerance=E4M3_ERROR
)
ENTRIES["fp8_block_linear"] = Entry(
    block_linear, (0, 1, 6), "blocks", token={0: 1}, rows=(1,), call=rounded_block_linear, tolerance=E4M3_ERROR
)
for label in ("tensor", "rows", "blocks"):
    ENTRIES[f"linear_fp8_weight {label}"] = Entry(
        linear_of_payload, (0, 3), label, empty=of_case("linear_fp8_weight", "all_zero", "no_rows"), token={0: 1},
        rows=(1,), tolerance=E4M3_ERROR,
    )  # fmt: skip
