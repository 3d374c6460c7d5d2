"""What is known of a result of the forward: the plain type that fields of an estimate are told by."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

# Streams of a residual, and rows of the matrices that mix them, are few (remat/nodes.py has the same).
FEW = 8


@dataclasses.dataclass(eq=False)
class Made:
    """One result of an op, or a tensor that came from outside.

    Attributes:
        field: of `fields.FIELDS`.
        parents: what it was made of, without views.
        gemm: whether a GEMM made it.
        choice: whether it says who goes where, or with which weight.
        rows: whether it holds rows in the order of a choice.
        softmax: whether it is a softmax's result, or an elementwise function of one.
        summed: whether it is a running sum, a function of such alone, or the exponential of one.
        product: whether it is a GEMM's of two activations, as scores are.
        few: whether it is a GEMM's with a matrix as small as those that mix streams.
        mixes: whether tokens mix in it.
        hash: 1 for whole numbers times whole numbers, 2 for what a xor or a remainder makes of such.
        memory: whether it is rows read by hashes, or made of them.
        written: of an outer product of what a block has computed and weights for a few streams, the elements of the
            former; else 0.
        op: the op's name.
        numel: elements of the op's first result.
        computed: whether there is a GEMM or a convolution behind it.
        calls: the modules whose calls it was made in, the outermost first, with the number of the call.
    """

    field: str = "inputs"
    parents: tuple[Made, ...] = ()
    gemm: bool = False
    choice: bool = False
    rows: bool = False
    softmax: bool = False
    summed: bool = False
    product: bool = False
    few: bool = False
    mixes: bool = False
    hash: int = 0
    memory: bool = False
    written: int = 0
    op: str = ""
    numel: int = 0
    computed: bool = False
    calls: Mapping[str, int] = dataclasses.field(default_factory=dict)


def mixes_few(operands: Sequence[Tensor]) -> bool:
    """Whether a GEMM of these multiplies by matrices as small as those that mix streams."""
    a, b = (t.shape for t in operands[-2:])
    outer = [size <= FEW for size in (a[-2], b[-1])]
    return a[-1] <= FEW and any(outer) and not all(outer)


def written(operands: Sequence[Tensor], computed: Sequence[bool], numel: int) -> int:
    """`Made.written` of a product with `numel` elements."""
    if len(operands) != 2:
        return 0
    (weights, _), (block, known) = sorted(
        ((t.numel(), c) for t, c in zip(operands, computed, strict=True)), key=lambda pair: pair[0]
    )
    if not known or not weights or numel % block or numel // weights <= FEW:
        return 0
    return block if 1 < numel // block <= FEW else 0
