"""Cases of top-k sparse MLA."""

from __future__ import annotations

import torch

from .agreement import reference_of
from .cases import each_case


def operands(rand, dtype, b=2, t=5, h=3, s=9, k=6, d_qk=24, d_v=16, causal=True, offset=0, chosen="some",
             index=torch.int64, layout="plain"):  # fmt: skip
    """Rows in no order. chosen: "some", of which some are named twice, or lie beyond the query, or are -1; "none";
    "beyond", among them rows there are not. Where every query has but one row, the gradient of q is a zero that is all
    rounding: every query names the first two."""
    q, kv = rand(b, t, h, d_qk, dtype=dtype), rand(b, s, 1, d_qk, dtype=dtype)
    if layout == "parts":  # of wider buffers, heads before tokens
        q = rand(b, h, t, d_qk + 8, dtype=dtype).transpose(1, 2)[..., 8:]
        kv = rand(s, b, 1, d_qk + 3, dtype=dtype).transpose(0, 1)[..., :d_qk]
    drawn = (rand(b, t, 1, k).abs() * 0.7 * max(s, 1)).long() - 1
    drawn[..., :2] = torch.arange(2, device=drawn.device)
    indices = {"some": drawn, "none": torch.full_like(drawn, -1), "beyond": drawn * 2}[chosen]
    return q, kv, indices.to(index), None, d_qk**-0.5, d_v, causal, offset


def quantised(rand, args, per="row"):
    """The same rows as a payload and its scale."""
    q, kv, indices, _, *others = args
    b, s, _, d = kv.shape
    n = -(-d // 128) if per == "block" else 1
    shape = {"tensor": (1, 1, 1, 1), "sequence": (b, 1, 1, 1), "row": (b, s, 1, 1), "block": (b, s, 1, n)}[per]
    scale = (rand(*shape).abs() / 30 + 0.01).float()
    if per in ("tensor", "sequence"):
        scale = scale.expand(b, s, 1, 1)
    payload = (kv.float() * 20).clamp(-448, 448).to(torch.float8_e4m3fn)
    return q, payload, indices, scale, *others


ATTENTION = {"plain": {}, "cached_prefix": {"offset": 4, "t": 3, "s": 7}, "not_causal": {"causal": False},
             "no_row_is_valid": {"chosen": "none"}, "rows_there_are_not": {"chosen": "beyond", "causal": False},
             "int32": {"index": torch.int32}, "one_head": {"h": 1},
             "two_blocks_of_heads": {"h": 70, "b": 1, "t": 2, "offset": 7},
             "many_tiles": {"k": 150, "s": 40, "b": 1, "t": 3, "offset": 40}, "one_token": {"t": 1, "offset": 5},
             "no_token": {"t": 0}, "no_sequence": {"b": 0}, "values_are_rows": {"d_v": 24},
             "odd_channels": {"d_qk": 37, "d_v": 21},
             "deepseek_channels": {"b": 1, "t": 2, "h": 2, "d_qk": 576, "d_v": 512, "offset": 7},
             "parts_of_buffers": {"layout": "parts"}}


def backward(rand, dtype, with_lse=False, **options):
    q, kv, indices, _, *others = operands(rand, dtype, **options)
    out, lse = reference_of("sparse_mla")(q, kv, indices, None, *others)
    grad_lse = rand(*lse.shape, dtype=lse.dtype) if with_lse else None
    return rand(*out.shape, dtype=dtype), grad_lse, q, kv, indices, out, lse, *others


each_case("sparse_mla", ATTENTION)(operands)


@each_case("sparse_mla", {f"fp8_{per}": {"per": per} for per in ("tensor", "sequence", "row", "block")})
def in_fp8(rand, dtype, per):
    wide = {"d_qk": 200, "d_v": 160} if per == "block" else {"k": 40, "s": 30, "offset": 20}
    return quantised(rand, operands(rand, dtype, **wide), per)


each_case("sparse_mla_backward", {k: {**options, "with_lse": k < "n"} for k, options in ATTENTION.items()})(backward)
