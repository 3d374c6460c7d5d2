"""The operands of a loop over tokens as whole tensors: what a step reads one position of, or the steps' own stacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, same_size, value
from megacpp_compile.fx.views import CASTS, IDENTITIES
from megacpp_compile.matchers.filled import is_filled
from megacpp_compile.matchers.ssd.axes import Atom, flat
from megacpp_compile.matchers.ssd.roles import Leaf
from megacpp_compile.matchers.ssd.tensor_ops import REPEATS, VIEWS
from megacpp_compile.matchers.token_loops.proof import TokenLoop
from megacpp_compile.passes._arrange import arrange, leading

aten = torch.ops.aten
Dims = tuple[tuple[Any, ...], ...]
_SHAPED = VIEWS | REPEATS | IDENTITIES | CASTS
# What a decay may be of something, and the logarithm of that.
_LOGARITHMS = {aten.exp.default: None, aten.sigmoid.default: aten.log_sigmoid.default}


class Operands:
    """b, t, h, k, v: the atoms of each dimension of the op."""

    def __init__(self, found: TokenLoop) -> None:
        self.found, self.loop = found, found.loop
        self.t: tuple[Any, ...] = (Atom(found.loop.count),)
        self.b, self.h, self.k, self.v = (tuple(flat(d)) for d in (found.b, found.h, found.k, found.v))

    def problem(self) -> tuple[str, str] | None:
        """(tag, reason) where there is no op with these operands."""
        g = self.found.operands.get("g")
        if g is not None and self.found.decay and _chain(self._source(g) if self._is_read(g) else g.node) is None:
            return "decay", "a decay that is no exponential or sigmoid may have no logarithm"
        entering, initial = value(self.found.initial.node), value(self.loop.initial)
        if entering.dim() != initial.dim() or not all(map(same_size, entering.shape, initial.shape)):
            return "state", "the first state has another shape than those behind it"
        return None

    def read(self) -> Iterator[Node]:
        """What the op is computed from."""
        yield self.loop.initial
        for role, leaf in self.found.operands.items():
            nodes = [self._source(leaf)] if self._is_read(leaf) else self._steps(leaf)
            for node in nodes:
                chain = _chain(node) if role == "g" and self.found.decay else None
                yield node if chain is None else chain[-1].args[0]  # type: ignore[misc]

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
        if is_filled(self.loop.initial, 0.0):
            return None
        return arrange(build, Leaf(self.loop.initial, self.found.initial.dims), target)

    def output(self) -> Dims:
        """The dimensions of all outputs put together."""
        return self._with_tokens(self.found.output.dims, self.loop.outputs.dim, self.loop.outputs.kept)

    def groups(self) -> tuple[Any, ...]:
        """The atoms of the heads that queries and keys differ in, if those lead: one head for each; else all."""
        return leading([self.found.operands["q"], self.found.operands["k"]], self.h)

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

    def _each_token(self, leaf: Leaf) -> bool:
        return self._is_read(leaf) or leaf.node in self.loop.inside

    def _source(self, leaf: Leaf) -> Node:
        return self.loop.reads[leaf.node].source

    def _steps(self, leaf: Leaf) -> list[Node]:
        return self.loop.everywhere(leaf.node) if leaf.node in self.loop.inside else [leaf.node]

    def _with_tokens(self, dims: Sequence[Any], at: int, kept: bool) -> Dims:
        return (*dims[:at], self.t, *dims[at + kept :])

    def _whole(self, build: Builder, role: str) -> Leaf:
        leaf = self.found.operands[role]

        def taken(node: Node) -> Node:
            return _logarithm(build, node) if role == "g" and self.found.decay else node

        if self._is_read(leaf):
            read = self.loop.reads[leaf.node]
            return Leaf(taken(read.source), self._with_tokens(leaf.dims, read.dim, read.kept))
        nodes = [taken(n) for n in self._steps(leaf)]
        if not self._each_token(leaf):
            return Leaf(nodes[0], leaf.dims)
        return Leaf(build(aten.stack.default, nodes, 0), (self.t, *leaf.dims))


def _chain(decay: Node) -> list[Node] | None:
    """`decay`, views and casts behind it, and the exponential or sigmoid whose view it is."""
    chain = [decay]
    while chain[-1].target in _SHAPED and isinstance(chain[-1].args[0], Node):
        chain.append(chain[-1].args[0])
    return chain if chain[-1].target in _LOGARITHMS else None


def _logarithm(build: Builder, decay: Node) -> Node:
    chain = _chain(decay)
    assert chain is not None
    *views, made = chain
    node, logarithm = made.args[0], _LOGARITHMS[made.target]
    if logarithm is not None:
        node = build(logarithm, node)
    for view in reversed(views):
        node = build(view.target, node, *view.args[1:], **view.kwargs)
    return node  # type: ignore[return-value]
