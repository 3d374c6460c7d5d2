"""Cases of `attention`."""

from __future__ import annotations

import torch

from megacpp_compile.lowerings.attention._dropout import WORDS

from .agreement import reference_of
from .cases import each_case

INF = float("-inf")


def operands(rand, dtype, b=2, h=4, g=2, t=7, s=7, d=16, e=16, mask=None, bias=None, sinks=False, softcap=0.0, left=None,
             right=None, fill=INF, layout="plain", documents=None, dropout=0.0, prefix=None):  # fmt: skip
    """mask, bias: the sizes of what broadcasts to the scores. A mask hides no key from some query, and the first from
    none, but under "rows": there whole rows are hidden."""
    q, k, v = rand(b, h, t, d, dtype=dtype), rand(b, g, s, d, dtype=dtype), rand(b, g, s, e, dtype=dtype)
    if layout == "tokens first":  # as projections leave them, values beside keys
        q = rand(b, t, h, d, dtype=dtype).transpose(1, 2)
        k, v = rand(b, s, g, d + e, dtype=dtype).transpose(1, 2).split([d, e], -1)
    seen = None
    if mask is not None:
        seen = rand(*(n if m else 1 for m, n in zip(mask, (b, h, t, s), strict=True))) < 0.7
        seen[..., 0] = True
        if fill != INF:
            seen[:1, ..., :1, :] = False
    added = None if bias is None else rand(*(n if m else 1 for m, n in zip(bias, (b, h, t, s), strict=True)), dtype=dtype)
    logits = None
    if sinks:  # of each head, or sizes of what broadcasts to rows
        logits = rand(*((h,) if sinks is True else (n if m else 1 for m, n in zip(sinks, (b, h, t), strict=True))), dtype=dtype)
    ids = None
    if documents is not None:  # of lengths that are no units of tokens, or in no order
        ids = torch.arange(t)[None].repeat(b, 1) // documents
        ids = ids if documents < t else (rand(b, t) > 0).long()
    generator = torch.Generator().manual_seed(b * h * t)
    drawn = (torch.randint(WORDS, [s + b * h * t], generator=generator), dropout) if dropout else ()
    if prefix is not None:
        drawn = (*(drawn or (None, 0.0)), torch.tensor(prefix))
    return q, k, v, seen, added, logits, ids, d**-0.5, softcap, left, right, fill, *drawn


SOFTMAX = {
    "all_keys": {}, "causal": {"right": 0}, "one_group": {"g": 1, "right": 0}, "own_keys": {"g": 4, "right": 0},
    "window": {"left": 2, "right": 0, "t": 9, "s": 9}, "both_sides": {"left": 1, "right": 2, "s": 8},
    "last_queries": {"right": 4, "t": 3, "s": 7}, "window_of_last_queries": {"left": -2, "right": 4, "t": 3, "s": 7},
    "more_queries": {"t": 9, "s": 5}, "one_query": {"t": 1}, "one_key": {"s": 1, "right": 0},
    "softcap": {"softcap": 2.0, "right": 0}, "sinks": {"sinks": True, "right": 0},
    "sinks_and_window": {"sinks": True, "left": 3, "right": 0}, "sinks_of_rows": {"sinks": (1, 1, 1), "right": 0},
    "sinks_of_tokens": {"sinks": (0, 0, 1), "bias": (1, 1, 1, 1), "left": 3, "right": 0}, "bias_a_head": {"bias": (0, 1, 1, 1)},
    "bias_of_all": {"bias": (1, 1, 1, 1), "right": 0}, "bias_of_keys": {"bias": (1, 0, 0, 1)},
    "mask_of_keys": {"mask": (1, 0, 0, 1)}, "mask_of_scores": {"mask": (1, 0, 1, 1), "right": 0},
    "rows_without_a_key": {"mask": (1, 0, 1, 1), "fill": torch.finfo(torch.float32).min},
    "all_at_once": {"mask": (1, 0, 1, 1), "bias": (0, 1, 1, 1), "sinks": True, "softcap": 3.0, "left": 4, "right": 1},
    "wide_values": {"e": 32, "right": 0}, "two_parts": {"d": 24, "right": 0}, "odd_channels": {"d": 21, "e": 13},
    "tokens_first": {"layout": "tokens first", "right": 0}, "no_sequence": {"b": 0},
    "documents": {"documents": 3, "right": 0}, "documents_in_no_order": {"documents": 9},
    "documents_in_several_blocks": {"b": 2, "h": 2, "g": 1, "t": 300, "s": 300, "documents": 70, "right": 0, "e": 8},
    "documents_of_whole_blocks": {"b": 1, "h": 1, "g": 1, "t": 448, "s": 448, "documents": 192, "right": 0},
    "documents_and_a_window": {"b": 1, "h": 1, "t": 200, "s": 200, "g": 1, "documents": 70, "left": 40, "right": 0},
    "several_blocks": {"b": 1, "h": 2, "g": 1, "t": 150, "s": 150, "right": 0},
    "windows_of_several_blocks": {"b": 1, "h": 1, "g": 1, "t": 200, "s": 200, "left": 40, "right": 0},
    "both_sides_of_several_blocks": {"b": 1, "h": 1, "g": 1, "t": 140, "s": 170, "left": 70, "right": 33},
    "prefix": {"right": 0, "prefix": [3]}, "prefixes": {"right": 0, "prefix": [0, 9]},
    "prefix_of_last_queries": {"right": 4, "t": 3, "s": 7, "prefix": [6, 2]},
    "prefixes_of_several_blocks": {"h": 2, "g": 1, "t": 200, "s": 200, "right": 0, "prefix": [33, 150]},
    "prefix_and_a_window": {"b": 1, "h": 1, "g": 1, "t": 200, "s": 200, "left": 50, "right": 0, "prefix": [96]},
    "prefix_beside_all": {"mask": (1, 0, 1, 1), "bias": (0, 1, 1, 1), "sinks": True, "softcap": 3.0, "left": 4, "right": 1,
                          "prefix": [2, 5], "dropout": 0.2},
    "prefix_and_a_bias": {"bias": (0, 1, 1, 1), "right": 0, "prefix": [2, 5]},
    "prefix_and_documents": {"b": 1, "h": 1, "g": 1, "t": 200, "s": 200, "documents": 70, "right": 0, "prefix": [100]},
    "dropout": {"dropout": 0.3, "right": 0}, "dropout_of_all": {"dropout": 1.0},
    "dropout_of_nearly_all_at_once": {"mask": (1, 0, 1, 1), "bias": (0, 1, 1, 1), "sinks": True, "softcap": 3.0, "left": 4,
                                      "right": 1, "dropout": 0.2},
    "dropout_and_a_bias": {"bias": (0, 1, 1, 1), "mask": (1, 0, 1, 1), "d": 48, "left": 4, "right": 1, "dropout": 0.4},
    "dropout_in_several_blocks": {"b": 2, "h": 2, "g": 1, "t": 150, "s": 170, "dropout": 0.5},
    "dropout_and_documents": {"b": 1, "h": 1, "g": 1, "t": 200, "s": 200, "documents": 70, "left": 90, "right": 0,
                              "dropout": 0.1},
}  # fmt: skip


def backward(rand, dtype, **options):
    given = operands(rand, dtype, **options)
    out, lse, top = reference_of("attention")(*given)
    return rand(*out.shape, dtype=dtype), *given[:7], out, lse, top, *given[7:12], given[4] is not None, *given[12:]


each_case("attention", SOFTMAX)(operands)
each_case("attention_backward", SOFTMAX)(backward)
