"""Cases of the loss that keeps no logits."""

from __future__ import annotations

import torch

from .agreement import reference_of
from .cases import case

IGNORED = -100


def operands(
    rand, dtype, n=9, h=24, v=40, bias=False, weighted=False, ignored=2, smoothing=0.0, scale=1.0, softcap=None,
    z_loss=0.0, ignore_index=IGNORED, part=0, turned=False,
):  # fmt: skip
    """(x, w, b, target, weight) and the numbers behind them. part: channels before x's in its buffer; turned: w lies
    column by column."""
    x = rand(n, part + h, dtype=dtype)[:, part:]
    w = rand(h, v, dtype=dtype).t() if turned else rand(v, h, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    target = (rand(n).sigmoid() * v).long().clamp(max=v - 1)
    target[rand(n).argsort()[:ignored]] = ignore_index
    tensors = x, w / h**0.5, rand(v, dtype=dtype) if bias else None, target
    weight = rand(n, dtype=wide).exp() if weighted else None
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
    # Weighted, and so with a gradient of lse in backward: that of the loss is zero.
    "one_word": {"v": 1, "bias": True, "weighted": True},
    "odd_sizes": {"h": 23, "v": 37, **ALL},
    "many_words": {"n": 3, "v": 9001, "ignored": 1},
    "many_words_all": {"n": 3, "v": 9001, "ignored": 1, **ALL},
    "channels_of_a_buffer": {"part": 8, "bias": True},
    "columns": {"turned": True},
}
for label, options in LOSSES.items():

    @case("linear_cross_entropy", label)
    def _(rand, dtype, options=options):
        return *operands(rand, dtype, **options), "sum", "xwb" if options.get("bias") else "xw"

    @case("linear_cross_entropy", label + "_of_each_row")
    def _(rand, dtype, options=options):
        return *operands(rand, dtype, **options), "none", ""

    @case("linear_cross_entropy_backward", label)
    def _(rand, dtype, options=options):
        given = operands(rand, dtype, **options)
        _, lse, *_ = reference_of("linear_cross_entropy")(*given, "none", "")
        grads = "xwb" if options.get("bias") else "xw"
        dlse = rand(*lse.shape, dtype=lse.dtype) if options.get("weighted") else None
        return rand(*lse.shape, dtype=lse.dtype), dlse, *given[:5], lse, *given[5:], grads


for grads in ("", "x", "w", "b", "xb"):

    @case("linear_cross_entropy", f"gradients_{grads or 'none'}")
    def _(rand, dtype, grads=grads):
        return *operands(rand, dtype, bias=True), "sum", grads


@case("linear_cross_entropy_backward", "of_lse_alone")
def _(rand, dtype):
    given = operands(rand, dtype, **ALL)
    _, lse, *_ = reference_of("linear_cross_entropy")(*given, "none", "")
    return None, rand(*lse.shape, dtype=lse.dtype), *given[:5], lse, *given[5:], "xwb"


@case("linear_cross_entropy_backward", "gradient_of_a_sum")
def _(rand, dtype):
    given = operands(rand, dtype)
    _, lse, *_ = reference_of("linear_cross_entropy")(*given, "none", "")
    return rand(1, dtype=lse.dtype).expand(lse.shape), None, *given[:5], lse, *given[5:], "w"
