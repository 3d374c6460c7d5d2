"""What each ATen view, copy and cast does: one table of sets, in which every overload stands once.

Sites that accept fewer ops than a set, or more, say so by union and difference. Two kinds of graph are read: the
captured one, pre-dispatch, which has every spelling, and those behind autograd, where composite ops (`reshape`,
`flatten`, `chunk`, `contiguous`, `to`, ...) are decomposed already.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import value

# The elements in the same order, under the shape in args[1].
RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
# The same, told by the dimensions to merge or split.
FOLDS = frozenset({aten.flatten.using_ints, aten.unflatten.int})
# Dimensions of size 1 dropped or inserted.
SQUEEZES = frozenset({aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims})
UNSQUEEZE = aten.unsqueeze.default
UNIT_DIMS = SQUEEZES | {UNSQUEEZE}
# The dimensions in another order: autograd's ops, and what is decomposed to them.
PERMUTATIONS = frozenset({aten.transpose.int, aten.permute.default, aten.t.default})
COMPOSITE_PERMUTATIONS = frozenset(
    {aten.mT.default, aten.numpy_T.default, aten.movedim.int, aten.movedim.intlist}
)
ALL_PERMUTATIONS = PERMUTATIONS | COMPOSITE_PERMUTATIONS
# Elements repeated: as a view with stride 0, or in memory.
EXPANSIONS = frozenset({aten.expand.default, aten.broadcast_to.default})
REPETITIONS = frozenset({aten.repeat.default, aten.repeat_interleave.self_int})
# Parts: one, or a list of parts that make the whole.
PADS = frozenset({aten.pad.default, aten.constant_pad_nd.default})
PARTS = frozenset({aten.slice.Tensor, aten.select.int, aten.unbind.int})
SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default})
# Views by strides.
STRIDED = frozenset({aten.as_strided.default, aten.diagonal.default, aten.unfold.default})
# The same values in the same shape, gradient and all; `lift_fresh_copy` is such a copy of a constant.
COPIES = frozenset({aten.alias.default, aten.clone.default, aten.contiguous.default})
IDENTITIES = COPIES | {aten.lift_fresh_copy.default}
# The same values, without a gradient: no identity to what matches before autograd.
DETACH = aten.detach.default
# The same shape, perhaps in another dtype or on another device; see `is_cast`.
CASTS = frozenset({aten._to_copy.default, aten.to.dtype, aten.type_as.default})
# Of the second tensor, these read the shape or dtype.
LIKE = frozenset({aten.type_as.default, aten.expand_as.default, aten.view_as.default, aten.reshape_as.default})
# Of any tensor, these do.
SHAPE_ONLY = frozenset({
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.empty_like.default,
    aten.zeros_like.default, aten.ones_like.default, aten.new_full.default, aten.full_like.default,
    aten.new_empty_strided.default, aten.sym_size.int,
})  # fmt: skip

# The same values in the same shape.
SAME_VALUES = IDENTITIES | CASTS

# What has elements of its first operand alone, perhaps not all of them, in another place, several times or cast.
REARRANGEMENTS = (
    RESHAPES | FOLDS | UNIT_DIMS | PERMUTATIONS | EXPANSIONS | REPETITIONS | PARTS | SPLITS | IDENTITIES | CASTS
)

# What computes the same in any autocast region: none keeps it from standing in another.
AUTOCAST_BLIND = (
    REARRANGEMENTS | COMPOSITE_PERMUTATIONS
    | {operator.getitem, DETACH, aten.neg.default, aten.mul.Tensor, aten.mul.Scalar}
    | {aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.div.Scalar}
)  # fmt: skip

# Packets of what shares its operand's memory in graphs behind autograd.
_MEMORY_VIEWS = frozenset(
    op.overloadpacket
    for op in RESHAPES | UNIT_DIMS | PERMUTATIONS | EXPANSIONS | PARTS | SPLITS | STRIDED | {aten.alias.default, DETACH}
    if op not in (aten.broadcast_to.default, aten.chunk.default)  # composite
)


def values_read(node: Node) -> list[Node]:
    """The operands whose values `node` computes with, not their shape or dtype alone."""
    if node.target in SHAPE_ONLY:
        return []
    return [a for a in node.args[:1] if isinstance(a, Node)] if node.target in LIKE else node.all_input_nodes


def is_reshape(node: Node) -> bool:
    """Whether `node` is its first argument under the shape in its second."""
    return node.target in RESHAPES


def is_identity(node: Node) -> bool:
    """Whether `node` is its first argument, copied or not, with its gradient."""
    return node.target in IDENTITIES


def is_cast(node: Node) -> bool:
    """Whether `node` changes the floating dtype of its first argument and nothing else."""
    if node.target not in CASTS:
        return False
    here, there = value(node), value(node.args[0])
    return here.is_floating_point() and there.is_floating_point() and here.device == there.device


def is_elementwise(node: Node) -> bool:
    """Whether an op on numbers makes `node`, one by one."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def uncast(node: Any) -> Any:
    """`node` before casts; what is no node is itself."""
    while isinstance(node, Node) and is_cast(node):
        node = node.args[0]
    return node


def is_view(node: Node) -> bool:
    """Whether `node`, of a graph behind autograd, is a view, or several, of its first argument's memory."""
    return getattr(node.target, "overloadpacket", None) in _MEMORY_VIEWS
