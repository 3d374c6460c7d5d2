"""Whether a step is the one before it, a position further on: which of its nodes is which."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.errors._attempts import GivenUp
from megacpp_compile.fx.edit import value
from megacpp_compile.matchers.token_loops.first_step import Zeros, same_sizes
from megacpp_compile.matchers.token_loops.tokens import Read


class Different(GivenUp):
    """Two steps differ."""


class Alignment:
    """Of step i + 1 with step i, by what `align` is given.

    pairs: the nodes of the one with those of the other; entered: the state that enters step i. zeros: of both, where no
    state enters step i, left out. others: what step i hands on beside its state, of which `carried` are read.
    """

    def __init__(
        self, step: Mapping[Node, int], reads: Mapping[Node, Read], i: int, states: list[Node], others: Set[Node],
        zeros: tuple[Zeros, Zeros] | None = None,
    ) -> None:  # fmt: skip
        self.step, self.reads, self.i, self.states, self.others, self.zeros = step, reads, i, states, others, zeros
        self.pairs: dict[Node, Node] = {}
        self.entered = states[i - 1] if i else None
        self.carried: set[Node] = set()

    def align(self, after: Node, before: Node) -> None:
        """Pair `after`, of step i + 1, with `before`, of step i, and all that they are made of."""
        self.pending: list[tuple[Any, Any]] = [(after, before)]
        while self.pending:
            b, a = self.pending.pop()
            if isinstance(b, Node) and isinstance(a, Node):
                self._pair(b, a)
            elif type(a) is not type(b) or a != b:
                raise Different

    def _pair(self, b: Node, a: Node) -> None:
        if b in self.pairs:
            Different.when(self.pairs[b] is not a)
            return
        if self.zeros is not None:
            if self._left_out(b, a, *self.zeros):
                return
        elif b is self.states[self.i]:
            self.entered = a if self.entered is None else self.entered
            Different.when(a is not self.entered)
            return
        if b in self.reads or a in self.reads:
            one, other = Different.unless(self.reads.get(b)), self.reads.get(a)
            Different.when(one.at != self.i + 1 or dataclasses.replace(one, at=self.i) != other)
            self.pairs[b] = a
        elif b is a:
            Different.when(b in self.step)  # of one position, in both steps
            self.pairs[b] = a
        elif b in self.others:
            Different.when(like(a) != like(b) or self.i and self.step.get(a) != self.i - 1)
            self.pairs[b] = a
            self.carried |= {b, a}
        else:
            self._pair_made(b, a)

    def _pair_made(self, b: Node, a: Node) -> None:
        Different.when(a.op != "call_function" or a.target is not b.target or a.kwargs.keys() != b.kwargs.keys())
        of_a, of_b = _arguments(a), _arguments(b)
        Different.when(len(of_a) != len(of_b) or self.zeros is None and like(a) != like(b))
        self.pairs[b] = a
        self.pending.extend(zip(of_b, of_a, strict=True))

    def _left_out(self, b: Node, a: Node, after: Zeros, before: Zeros) -> bool:
        """Whether both are 0, or are paired as what is left of them."""
        if after.zero(b) or before.zero(a):
            if after.zero(b) and before.zero(a):
                return True
            raise Different
        Different.when(not same_sizes(a, b))
        left = after.left(b), before.left(a)
        if left == (b, a):
            return False
        self.pairs[b] = a
        self.pending.append(left)
        return True


def _arguments(node: Node) -> list[Any]:
    flat: list[Any] = []
    for a in [*node.args, *node.kwargs.values()]:
        flat += a if isinstance(a, list | tuple) else [a]
    return flat


def like(node: Node) -> Any:
    """Of what kind of tensors `node` is."""
    fake = value(node)
    return (fake.dtype, fake.dim()) if isinstance(fake, torch.Tensor) else None
