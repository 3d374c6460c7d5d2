"""A stretch of translation that was entered on an assumption, and whether Python's state came out of it as it went in.

What runs in it may set names that nothing reads later, change values that it made itself, and compute tensors; a local
tensor may have become one computed from it, as a sum is that a loop adds to. What the tensors say is for matchers. A
tensor may be another one where both are without rows if the stretch is skipped: `expert(rows) if len(rows) else rows`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch import translator as translation
from megacpp_compile._torch import variables
from megacpp_compile.errors._attempts import GivenUp
from megacpp_compile.frontend.expert_loops import origins
from megacpp_compile.frontend.expert_loops.control_flow import live_names
from megacpp_compile.frontend.expert_loops.empty_experts import same_shapes, same_without_rows
from megacpp_compile.fx import assumptions
from megacpp_compile.fx.edit import called, named_in_place
from megacpp_compile.fx.walks import reached

_LEFT = "what it leaves behind is not what it found"
_LEAVES = ("RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE", "SEND", "RETURN_GENERATOR")


class Refused(GivenUp):
    """The assumption does not do: a sentence without its full stop, about what stands in the way."""


_ON_STACK = ""  # the name of what is left on the stack


@dataclasses.dataclass(frozen=True)
class OtherWay:
    """The way of a branch that is translated behind the one that is entered first: where it starts, and its mark.

    left: what the first way leaves behind in names that are read later, or on the stack.
    """

    start: Any
    op: Any
    condition: Any
    taken: bool
    left: dict[str, Any] = dataclasses.field(default_factory=dict)


class OpenRegion:
    """What was entered and is not yet left.

    translator: of the function it is in. join: the instruction where it ends. at: the graph's node that marks its
    beginning. begins: the place of the loop whose iteration it is; None for a branch. given: whether there is something
    on the stack that an iteration is given, or a branch goes by. other_way: what else to translate from where it began.
    asked: of a branch, the number or truth value that it goes by, and how it was taken. alternatives: what the other
    way of it left behind.
    """

    def __init__(
        self, number: int, translator: Any, join: Any, at: Any, begins: Any = None, given: bool = True,
        other_way: OtherWay | None = None, asked: tuple[Any, bool] | None = None,
        alternatives: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.begins, self.other_way, self._asked = begins, other_way, asked
        self._alternatives = alternatives or {}
        self.branches = begins is None
        self.number, self.translator, self.join, self.at = number, translator, join, at
        self.start = translation.now()
        self._names = dict(translator.symbolic_locals)
        self._stack = _identities(translator.stack[:-1] if given else translator.stack)
        self._state = translation.effects(translator)

    def changes(self, born: int) -> None:
        """Raises Refused for a change of what was there before."""
        Refused.when(born < self.start, "it changes a value of Python's from before it, too")

    def passes(self, translator: Any, inst: Any) -> None:
        """Raises Refused where `inst` leaves the region by another way than its end, or another function goes on."""
        if translator is self.translator:
            Refused.when(
                inst.opname in ("YIELD_VALUE", "SEND"),
                "its entries are handed on by `yield`, as `enumerate` does: loop over the list itself",
            )
            Refused.when(inst.opname in _LEAVES, "a `return` or a `break` leaves it")
        elif translation.born(translator) < self.start:
            raise Refused("it goes on with a generator from before it")

    def close(self) -> None:
        """Raises Refused unless Python's state is that of the beginning."""
        translator = self.translator
        Refused.when(
            any(_counts_in_place(node) for node in self._made()), "it writes to a tensor of numbers or truth values"
        )
        stack, depth = translator.stack, len(self._stack)
        found = _identities(stack[:depth]), translation.effects(translator)
        Refused.when(found != (self._stack, self._state) or len(stack) > depth + 1, _LEFT)
        for left in stack[depth:]:
            Refused.when(not self._leaves(_ON_STACK, None, left), _LEFT)
        read = live_names(translator.instructions, self.join)
        read |= live_names(translator.instructions, self.other_way.start) if self.other_way else frozenset()
        for name in sorted((read | self._alternatives.keys()) - {_ON_STACK}):
            before, after = self._names.get(name), translator.symbolic_locals.get(name)
            if before is after and name not in self._alternatives:
                continue
            if after is not None and self._keeps(name, before, after):
                continue
            raise Refused(f"it sets `{name}`, which is read later")

    def _keeps(self, name: str, before: Any, after: Any) -> bool:
        """Whether `name` may be `after` behind the region, and what it was before where the model skips it."""
        if self.other_way is None and self._leaves(name, before, after):
            return True
        if name in self._alternatives:
            return False
        if before is not None and (self._same(before, after) or self._carries(before, after)):
            return True
        return self.other_way is not None and self._leaves(name, before, after)

    def _leaves(self, name: str, before: Any, after: Any) -> bool:
        """Whether `after` is a tensor that may be left behind: of the first way of two for the second to be held
        against, else the same as what there is without the region, wherever the model skips it."""
        found = variables.tensor(variables.realized(after))
        if found is None:
            return False
        if self.other_way is not None:
            self.other_way.left[name] = after
            return True
        other = self._alternatives.get(name, before)
        held = variables.tensor(variables.realized(other)) if other is not None else None
        if held is None:
            return False
        shown = self._asked is not None and same_without_rows(*self._asked, held[1], found[1])
        if not shown and not (self.branches and same_shapes(held[1], found[1])):
            return False
        variables.emit(self.translator, assumptions.rowless, after, shown, self.number)
        return True

    def seen_in_experts(self) -> bool:
        """Whether it is of a loop over experts, rather than of another branch on data."""
        return self.begins is not None or origins.of_experts(self.at.all_input_nodes, self._made())

    def undo(self) -> dict[str, Any]:
        """Put back what there was before the first way of two; returns what that left behind."""
        left, names = self.other_way.left if self.other_way else {}, self.translator.symbolic_locals
        if _ON_STACK in left:
            self.translator.stack.pop()
        for name in left.keys() - {_ON_STACK}:
            before = self._names.get(name)
            if before is None:
                del names[name]
            else:
                names[name] = before
        return left

    def _made(self) -> Iterator[Node]:
        """The graph's nodes since the beginning."""
        node = self.at.next
        while node.op != "root":
            yield node
            node = node.next

    def _carries(self, before: Any, after: Any) -> bool:
        """Whether a place among slots has become another; that both are the same place where there are no tokens is for
        matchers to show."""
        old, new = variables.realized(before), variables.realized(after)
        was, now_ = variables.place(old), variables.place(new)
        if was is None or now_ is None or type(variables.plain(new)) is int:
            return False
        op = {(False, False): assumptions.carried, (False, True): assumptions.carried_into,
              (True, True): assumptions.carried_tensor}.get((was, now_))  # fmt: skip
        if op is not None:
            variables.emit(self.translator, op, *(variables.plain(v) for v in (old, new)), self.number)
        return op is not None

    def _same(self, before: Any, after: Any) -> bool:
        old, new = variables.realized(before), variables.realized(after)
        if old is new:
            return True
        was, now_ = variables.tensor(old), variables.tensor(new)
        if was is None or now_ is None:
            return False
        return was[0] in reached([now_[0]], lambda node: node.all_input_nodes if node > self.at else ())


def _identities(held: list[Any]) -> list[int]:
    return [id(variables.realized(v)) for v in held]


def _counts_in_place(node: Node) -> bool:
    """Whether `node` writes to a tensor of integers or truth values, which may be what the loop goes by."""
    written = node.kwargs.get("out", node.args[0] if node.args else None)
    in_place = named_in_place(called(node)) or "out" in node.kwargs
    fake = written.meta.get("example_value") if in_place and isinstance(written, Node) else None
    return isinstance(fake, torch.Tensor) and not fake.is_floating_point()
