"""Cases of the loss that keeps no logits."""

from __future__ import annotations

import torch

from .agreement import reference_of
from .cases import each_case

IGNORED = -100


def operands(rand, dtype, n=9, h=24, v=40, bias=False, weighted=False, ignored=2, smoothing=0.0, scale=1.0,
             softcap=None, z_loss=0.0, ignore_index=IGNORED, part=0, turned=False):  # fmt: skip
    """(x, w, b, target, weight) and the numbers behind them. part: channels before x's in its buffer; turned: w lies
    column by column."""
    x = rand(n, part + h, dtype=dtype)[:, part:]
    w = rand(h, v, dtype=dtype).t() if turned else rand(v, h, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    target = (rand(n).sigmoid() * v).long().clamp(max=v - 1)
    target[rand(n).argsort()[:ignored]] = ignore_index
    tensors = x, w / h**0.5, rand(v, dtype=dtype) if bias else None, target
    # Of one word the loss has no gradient but the rounding of its logit, which a weight makes larger.
    weight = (rand(n, dtype=wide).sigmoid() if v == 1 else rand(n, dtype=wide).exp()) if weighted else None
    return *tensors, weight, ignore_index, smoothing, scale, softcap, z_loss


ALL = {"bias": True, "weighted": True, "smoothing": 0.1, "scale": 0.5, "softcap": 2.0, "z_loss": 0.01}
LOSSES = {
    "plain": {},
    "bias": {"bias": True},
    "weights": {"weighted": True},
    "smoothing": {"smoothing": 0.1},
    "scale": {"scale": 3.0},
    "softcap": {"softcap": 1.5},
    "z_loss": {"z_loss": 0.1},
    "all": ALL,
    "nothing_ignored": {"ignored": 0},
    "all_ignored": {"ignored": 9, "bias": True, "z_loss": 0.1},
    "a_word_ignored": {"ignore_index": 3},
    "no_token": {"n": 0, **ALL},
    "one_token": {"n": 1, "ignored": 0},
    # Weighted, and so with a gradient of lse in backward: that of the loss is zero. A bias would have one number, a sum
    # that may cancel.
    "one_word": {"v": 1, "weighted": True},
    "odd_sizes": {"h": 23, "v": 37, **ALL},
    "many_words": {"n": 3, "v": 9001, "ignored": 1},
    "many_words_all": {"n": 3, "v": 9001, "ignored": 1, **ALL},
    "channels_of_a_buffer": {"part": 8, "bias": True},
    "columns": {"turned": True},
}


@each_case("linear_cross_entropy", LOSSES)
def summed(rand, dtype, grads=None, **options):
    all_of_them = "xwb" if options.get("bias") else "xw"
    return *operands(rand, dtype, **options), "sum", all_of_them if grads is None else grads


def of_each_row(rand, dtype, **options):
    return *operands(rand, dtype, **options), "none", ""


def backward(rand, dtype, of=("loss",), grads=None, number=False, **options):
    """of: the results that have a gradient. number: it is one for all rows."""
    given = operands(rand, dtype, **options)
    _, lse, *_ = reference_of("linear_cross_entropy")(*given, "none", "")
    seeds = {name: rand(1 if number else len(lse), dtype=lse.dtype).expand(lse.shape) for name in of}
    grads = grads or ("xwb" if options.get("bias") else "xw")
    return seeds.get("loss"), seeds.get("lse"), *given[:5], lse, *given[5:], grads


BACKWARD = {label: {**o, "of": ("loss", "lse") if o.get("weighted") else ("loss",)} for label, o in LOSSES.items()}
BACKWARD |= {"of_lse_alone": {**ALL, "of": ("lse",)}, "gradient_of_a_sum": {"number": True, "grads": "w"}}
each_case("linear_cross_entropy", {f"{label}_of_each_row": options for label, options in LOSSES.items()})(of_each_row)
GRADS = {f"gradients_{grads or 'none'}": {"grads": grads, "bias": True} for grads in ("", "x", "w", "b", "xb")}
each_case("linear_cross_entropy", GRADS)(summed)
each_case("linear_cross_entropy_backward", BACKWARD)(backward)
