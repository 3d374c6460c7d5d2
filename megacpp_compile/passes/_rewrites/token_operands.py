"""The operands of a loop over tokens as whole tensors: what a step reads one position of, or the steps' own stacked."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx import short_loops
from megacpp_compile.fx.edit import Builder, same_size, same_sizes, value
from megacpp_compile.fx.filled import is_filled, padded_with
from megacpp_compile.fx.views import CASTS, IDENTITIES, PADS, PARTS, SPLITS
from megacpp_compile.fx.walks import ancestors
from megacpp_compile.matchers.linear import is_projection
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.matchers.ssd.atoms import Atom, flat
from megacpp_compile.matchers.ssd.roles import Leaf
from megacpp_compile.matchers.ssd.tensor_ops import REPEATS, VIEWS
from megacpp_compile.matchers.token_loops.constants import is_positive
from megacpp_compile.matchers.token_loops.proof import TokenLoop
from megacpp_compile.matchers.token_loops.resets import cleared_by_flags
from megacpp_compile.passes._rewrites.arrange import arrange, leading
from megacpp_compile.reader.links import chain

Dims = tuple[tuple[Any, ...], ...]
_SHAPED = VIEWS | REPEATS - PADS | IDENTITIES | CASTS
_PARTS = _SHAPED | PARTS | SPLITS | {operator.getitem}
# What a decay may be of something, and the logarithm of that.
_LOGARITHMS = {aten.exp.default: None, aten.sigmoid.default: aten.log_sigmoid.default}
# What stands for the logarithm of 0: its exponential is 0 in every dtype, and sums of it are exact enough.
_NOTHING = -1000.0


class Operands:
    """b, t, h, k, v: the atoms of each dimension of the op."""

    def __init__(self, found: TokenLoop) -> None:
        self.found, self.loop = found, found.loop
        self.t: tuple[Any, ...] = (Atom(found.loop.count),)
        self.b, self.h, self.k, self.v = (tuple(flat(d)) for d in (found.b, found.h, found.k, found.v))

    def problem(self) -> tuple[str, str] | None:
        """(tag, reason) where there is no op with these operands."""
        g = self.found.operands.get("g")
        if g is not None and self.found.decay and not all(_has_own(n) for n in self._whole_nodes(g)):
            return "decay", "a decay that is no exponential, sigmoid or known number may have no logarithm"
        if self.loop.initial is None:
            own = [leaf.node for role, leaf in self.found.operands.items() if role != "g" and self._is_stacked(leaf)]
            if any(map(self.loop.lacks_first, own)):
                return "steps", "what the first step is made of is not what the others are made of"
            return None
        entering, initial = value(self.found.initial.node), value(self.loop.initial)
        if not same_sizes(entering.shape, initial.shape):
            return "state", "the first state has another shape than those behind it"
        return None

    def read(self) -> Iterator[Node]:
        """What the op is computed from."""
        if self.loop.initial is not None:
            yield self.loop.initial
        for role, leaf in self.found.operands.items():
            for node in self._whole_nodes(leaf):
                way = _chain(node) if role == "g" and self.found.decay else None
                yield node if way is None else way[-1].args[0]  # type: ignore[misc]
                yield from (cleared.flags for n in way or () if (cleared := cleared_by_flags(n)) is not None)

    def arranged(self, build: Builder, role: str, target: Dims) -> Node:
        """The operand with all dimensions of `target`, repeated where it does not have them."""
        return arrange(build, self._whole(build, role), target)

    def spread(self, build: Builder, role: str, target: Dims, values: Node) -> Node | None:
        """The operand, which may lack dimensions of `target`, as large as `values` has them."""
        if role not in self.found.operands:
            return None
        leaf, own = self._whole(build, role), set(self._atoms(role))
        if self._each_token(self.found.operands[role]):
            own |= set(self.t)
        if all(set(d) <= own for d in target):
            return arrange(build, leaf, target)
        short = arrange(build, leaf, tuple(d if set(d) <= own else () for d in target))
        like = build(aten.select.int, values, 3, 0)
        if len(target) == 4:
            return build(aten.add.Tensor, short, build(aten.unsqueeze.default, build(aten.zeros_like.default, like), 3))
        return build(aten.expand_as.default, short, like)

    def initial(self, build: Builder, target: Dims) -> Node | None:
        if self.loop.initial is None or is_filled(_seen_through(self.loop.initial)[-1], 0.0):
            return None
        return arrange(build, Leaf(self.loop.initial, self.found.initial.dims), target)

    def output(self) -> Dims:
        """The dimensions of all outputs put together; tokens first where each step makes more of its own."""
        if self.loop.read is not None:
            return (self.t, *self.found.output.dims)
        dims, made = self.found.output.dims, self.loop.outputs
        if made.merged:
            return (*dims[: made.dim], (*self.t, *dims[made.dim]), *dims[made.dim + 1 :])
        return self._with_tokens(dims, made.dim, made.kept)

    def groups(self) -> tuple[Any, ...]:
        """The atoms of the heads that queries and keys differ in, if those lead: one head for each; else all."""
        names = ("B", "C") if self.found.scan else ("q", "k")
        return leading([self.found.operands[name] for name in names], self.h)

    def one_rate(self) -> bool:
        """Whether there is no gate, or one of each head that no token changes."""
        g = self.found.operands.get("g")
        return g is None or not self._each_token(g) and set(self._atoms("g")) <= set(self.h)

    def by_channel(self) -> bool:
        return "g" in self.found.operands and bool(set(self._atoms("g")) & set(self.k))

    def _atoms(self, role: str) -> list[Any]:
        return [a for d in self.found.operands[role].dims for a in d]

    def _is_read(self, leaf: Leaf) -> bool:
        return leaf.node in self.loop.reads

    def _has_tokens(self, leaf: Leaf) -> bool:
        """Whether `leaf` is of all tokens itself: what is made of it in front of the loop is read."""
        return any(set(d) & self.found.tokens for d in leaf.dims)

    def _each_token(self, leaf: Leaf) -> bool:
        return self._has_tokens(leaf) or self._is_read(leaf) or leaf.node in self.loop.inside

    def _is_stacked(self, leaf: Leaf) -> bool:
        return leaf.node in self.loop.inside and not self._has_tokens(leaf) and not self._is_read(leaf)

    def _whole_nodes(self, leaf: Leaf) -> list[Node]:
        """What `leaf` of all tokens is: one tensor, or one of each step."""
        if self._has_tokens(leaf):
            return [leaf.node]
        if self._is_read(leaf):
            return [self.loop.reads[leaf.node].source]
        return self.loop.everywhere(leaf.node) if leaf.node in self.loop.inside else [leaf.node]

    def _with_tokens(self, dims: Sequence[Any], at: int, kept: bool) -> Dims:
        return (*dims[:at], self.t, *dims[at + kept :])

    def _whole(self, build: Builder, role: str) -> Leaf:
        leaf = self.found.operands[role]
        logarithms = role == "g" and self.found.decay
        nodes = [_logarithm(build, n) if logarithms else n for n in self._whole_nodes(leaf)]
        nodes = [_bounded(build, n) for n in nodes] if role == "g" else nodes
        if self._has_tokens(leaf):
            node = self._of_steps(build, nodes[0], leaf)
            return Leaf(node, tuple(self.t if set(d) & self.found.tokens else d for d in leaf.dims))
        if self._is_read(leaf):
            read = self.loop.reads[leaf.node]
            return Leaf(nodes[0], self._with_tokens(leaf.dims, read.dim, read.kept))
        if not self._each_token(leaf):
            return Leaf(nodes[0], leaf.dims)
        if self.loop.initial is None and self.loop.lacks_first(leaf.node):
            nodes.insert(0, build(aten.zeros_like.default, nodes[0]))  # no state decays in the first step
        return Leaf(build(aten.stack.default, nodes, 0), (self.t, *leaf.dims))

    def _of_steps(self, build: Builder, node: Node, leaf: Leaf) -> Node:
        """`node`, of all tokens, or the part of it that the loop's few steps take."""
        at = next(i for i, d in enumerate(leaf.dims) if set(d) & self.found.tokens)
        size = value(node).shape[at]
        if self.loop.tokens == self.loop.count or same_size(size, self.loop.count):
            return node
        return build(short_loops.shortened, node, at, self.loop.count, size)


def _seen_through(node: Node) -> list[Node]:
    """`node`, what it is a view or a cast of, and so on."""
    return chain(node, _SHAPED)


def _chain(decay: Node, clears: bool = True) -> list[Node] | None:
    """`decay`, views, parts and casts behind it, what it is padded from with numbers above 0 or, with `clears`, set to
    0 in, and the exponential or sigmoid that it is of."""
    way = chain(decay, _PARTS, lambda n: (_padding(n) or 0.0) > 0, _cleared if clears else ())
    return way if way[-1].target in _LOGARITHMS else None


def _cleared(node: Node) -> Node | None:
    found = cleared_by_flags(node)
    return found and found.node


def _padding(node: Node) -> float | None:
    """The number that `node` pads its first argument with; None for another node, or one that pads otherwise."""
    given = padded_with(node)
    return None if given is None else number_of(given)


def has_logarithm(decay: Node) -> bool:
    return _chain(decay, False) is not None or is_positive(decay)


def _has_own(decay: Node) -> bool:
    """Whether `_logarithm` can be made of `decay`."""
    return _chain(decay) is not None or is_positive(decay)


def _bounded(build: Builder, logarithm: Node) -> Node:
    """A decay's logarithm that is no infinity, as one is where a document begins, and no sum of which becomes one."""
    for node in itertools.islice(ancestors([logarithm], lambda a: not is_projection(a)), 200):
        fills = [number_of(a) for a in node.args if not isinstance(a, (Node, list, tuple)) and a is not None]
        low = any(fill is not None and fill < _NOTHING for fill in fills)
        if node.target is aten.log.default or low and isinstance(value(node), torch.Tensor):
            return build(aten.clamp_min.default, logarithm, _NOTHING)
    return logarithm


def _logarithm(build: Builder, decay: Node) -> Node:
    way = _chain(decay)
    if way is None:  # of numbers above 0
        return build(aten.log.default, build.cast(decay, torch.promote_types(value(decay).dtype, torch.float32)))
    *views, made = way
    node, logarithm = made.args[0], _LOGARITHMS[made.target]
    if logarithm is not None:
        node = build(logarithm, node)
    for view in reversed(views):
        if (padded := _padding(view)) is not None:
            node = build(aten.constant_pad_nd.default, node, view.args[1], math.log(padded))
        elif (cleared := cleared_by_flags(view)) is not None:
            flags = cleared.flags if cleared.kept else build(aten.logical_not.default, cleared.flags)
            flags = flags if value(flags).dtype is torch.bool else build(aten.ne.Scalar, flags, 0)
            node = build(aten.where.ScalarOther, flags, node, _NOTHING)
        elif view.target is operator.getitem:
            node = build.item(node, view.args[1])  # type: ignore[arg-type]
        else:
            node = build(view.target, node, *view.args[1:], **view.kwargs)
    return node  # type: ignore[return-value]
