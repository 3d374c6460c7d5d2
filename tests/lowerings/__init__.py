"""Every semantic op against its contract, and every lowering of it against the reference.

`test_<op>.py` holds an op to its registration (`opcheck`), its gradients, a float64 formula written out here, and to
what it says it keeps for backward. `test_lowerings_agree.py` runs whatever lowerings there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# (interleaved_in, interleaved_out, rope_first), all of them
LAYOUTS = list(itertools.product((False, True), repeat=3))
BOTH = (False, True)


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Combinations of the values of axes that are apart from one another in the code: every two values of two axes stand
    together in one of them."""

    def pairs(combination: tuple[Any, ...]) -> set[tuple[tuple[int, Any], ...]]:
        return set(itertools.combinations(enumerate(combination), 2))

    combinations = list(itertools.product(*axes))
    chosen, missing = [], set().union(*map(pairs, combinations))
    while missing:
        chosen.append(max(combinations, key=lambda c: len(pairs(c) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over norm; unequal shapes, anything that is no number, and infinities in other places are
    infinitely far."""
    if got.shape != want.shape:
        return float("inf")
    got, want = got.detach().double(), want.detach().double()
    if (infinite := want.isinf()).any():
        if not torch.equal(got[infinite], want[infinite]):
            return float("inf")
        got, want = got[~infinite], want[~infinite]
    error = float((got - want).norm() / want.norm().clamp_min(1e-12))
    return error if error == error else float("inf")


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved_in: bool, interleaved_out: bool, inverse: bool) -> Tensor:
    """RoPE by its definition in float64: the matrix that turns one channel pair, for one pair after the other.

    With full-width tables each output channel has an entry of its own, which need not be its partner's.
    """
    r = x.shape[-1]

    def channels(i: int, interleaved: bool) -> tuple[int, int]:
        return (2 * i, 2 * i + 1) if interleaved else (i, i + r // 2)

    x, cos, sin = x.double(), cos.double(), sin.double()
    # matrix[..., o, i]: what channel i of the input gives to channel o of the output
    matrix = x.new_zeros(*torch.broadcast_shapes(cos.shape[:-1], sin.shape[:-1]), r, r)
    for i in range(r // 2):
        (a, b), (c, d) = channels(i, interleaved_in), channels(i, interleaved_out)
        first, second = (i, i) if cos.shape[-1] == r // 2 else (c, d)
        matrix[..., c, a], matrix[..., c, b] = cos[..., first], -sin[..., first]
        matrix[..., d, a], matrix[..., d, b] = sin[..., second], cos[..., second]
    if inverse:
        matrix = matrix.transpose(-1, -2)
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


def saved_by(function, *args) -> set[int]:
    """Addresses of what `function(*args)` keeps for backward."""
    kept: set[int] = set()
    alive = []  # an address says nothing of a tensor that is gone

    def pack(t: Tensor) -> Tensor:
        alive.append(t)
        kept.add(t.untyped_storage().data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = function(*args)
    del out
    return kept


def addresses(*tensors: Tensor) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


# Leading dimensions of the tables beside operands of (B, S, H, channels): each 1 or the operand's.
TABLE_SHAPES = {"by_position": lambda b, s, h: (1, s, 1), "by_row_and_position": lambda b, s, h: (b, s, 1),
                "one_for_all": lambda b, s, h: (1, 1, 1)}
STRIDES = ("transposed", "sliced", "expanded")


def strided(rand, kind: str, *shape: int, **kwargs) -> Tensor:
    """A tensor of `shape` that is not contiguous; "expanded" repeats along the first dimension."""
    first, second, *others = shape
    if kind == "transposed":
        made = rand(second, first, *others, **kwargs).transpose(0, 1)
    elif kind == "sliced":
        made = rand(*shape[:-1], 2 * shape[-1] + 1, **kwargs)[..., 1::2]
    else:
        made = rand(1, *shape[1:], **kwargs).expand(shape)
    assert made.shape == shape
    return made.requires_grad_()
