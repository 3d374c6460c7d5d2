"""Cases of attention over cached latent rows."""

from __future__ import annotations

import torch

from .cases import each_case


def operands(rand, dtype, b=2, t=1, h=3, s=9, d_qk=24, d_v=16, lengths=(9, 6), index=torch.int32, rows="plain",
             layout="plain"):  # fmt: skip
    """rows: "plain"; "fp8", a payload with a scale a row; "codes", two channels a byte with two scales a row."""
    q, kv = rand(b, t, h, d_qk, dtype=dtype), rand(b, s, d_qk, dtype=dtype)
    if layout == "parts":  # of wider buffers, heads before tokens
        q = rand(b, h, t, d_qk + 8, dtype=dtype).transpose(1, 2)[..., 8:]
        kv = rand(s, b, d_qk + 3, dtype=dtype).transpose(0, 1)[..., :d_qk]
    counts = torch.tensor((lengths * b)[:b], dtype=index)
    row_scale = codebook = None
    if rows == "fp8":
        kv = (kv.float() * 20).clamp(-448, 448).to(torch.float8_e4m3fn)
        row_scale = (rand(b, s, 1).abs() / 30 + 0.01).float()
    elif rows == "codes":
        kv = (rand(b, s, d_qk // 2).abs() * 100).long().remainder(256).to(torch.uint8)
        row_scale, codebook = (rand(b, s, 2).abs() + 0.1).float(), rand(16).float()
    return q, kv, counts, row_scale, codebook, d_qk**-0.5, d_v


DECODE = {
    "one_token": {}, "three_tokens": {"t": 3}, "int64": {"index": torch.int64},
    "fewer_rows_than_tokens": {"t": 4, "lengths": (2, 3)}, "no_row": {"lengths": (0, 9)},
    "one_row": {"lengths": (1, 1)}, "more_than_there_are": {"lengths": (12, 10), "t": 3}, "one_head": {"h": 1},
    "two_blocks_of_queries": {"h": 70, "b": 1, "t": 2}, "many_parts": {"s": 1100, "b": 1, "lengths": (1043,), "h": 2},
    "parts_without_rows": {"s": 1100, "b": 2, "lengths": (3, 700), "h": 2}, "no_token": {"t": 0},
    "no_sequence": {"b": 0}, "values_are_rows": {"d_v": 24}, "odd_channels": {"d_qk": 37, "d_v": 21},
    "deepseek_channels": {"b": 1, "t": 2, "h": 2, "d_qk": 576, "d_v": 512},
    "parts_of_buffers": {"layout": "parts", "t": 2}, "fp8": {"rows": "fp8", "t": 2},
    "fp8_deepseek_channels": {"rows": "fp8", "b": 1, "h": 2, "d_qk": 576, "d_v": 512, "s": 300, "lengths": (290,)},
    "codes": {"rows": "codes", "t": 2}, "codes_odd_halves": {"rows": "codes", "d_qk": 36, "d_v": 22},
    "codes_values_are_rows": {"rows": "codes", "d_v": 24},
    "codes_deepseek_channels": {"rows": "codes", "b": 1, "h": 2, "d_qk": 576, "d_v": 512, "s": 300, "lengths": (290,)},
}
each_case("mla_decode", DECODE)(operands)
