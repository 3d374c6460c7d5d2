"""One step of a loop while Dynamo translates it, and whether Python's state came out of it as it went in."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from megacpp_compile._torch import positions, variables
from megacpp_compile._torch import translator as translation
from megacpp_compile.errors._attempts import GivenUp
from megacpp_compile.frontend.expert_loops.control_flow import live_names
from megacpp_compile.frontend.hidden_writes import storage_of

_LEAVES = ("RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE", "SEND", "RETURN_GENERATOR")
_SUBSCRIPTS = ("BINARY_SUBSCR", "STORE_SUBSCR")
COMPREHENSION = "a comprehension computes each of its entries for itself; on all of them at once it is one call"
_ADDS = ("LIST_APPEND", "SET_ADD", "MAP_ADD")


class Refused(GivenUp):
    """A step that is not shown to be the same at every position: a sentence without its full stop. told: whether that
    is reported of a step that was only looked at, too."""

    def __init__(self, why: str, told: bool = False) -> None:
        super().__init__(why)
        self.told = told


class Step:
    """A step of the loop whose head is the instruction `head`, and whose iterator has `items` left.

    starts: whether the iterator is about to give it its item. position: the symbol that it is translated at, None where
    it is only looked at. loop: the loop's number then.
    grown: the lists of the frame's own that it appends to, each with the tensor.
    """

    def __init__(self, translator: Any, head: Any, items: Any) -> None:
        self.translator, self.head, self.items, self.starts = translator, head, items, False
        self.place = (translator.f_code, head.offset)
        self.position: positions.Position | None = None
        self.loop = 0
        self.grown: list[tuple[Any, Any]] = []
        self.names = dict(translator.symbolic_locals)
        self.start, self.nodes = translation.now(), len(translator.output.graph.nodes)
        self._stack, self._state = _identities(translator.stack), translation.effects(translator)
        index = {id(inst): i for i, inst in enumerate(translator.instructions)}
        self._inside = range(index[id(head)], index[id(head.target)])

    def passes(self, translator: Any, inst: Any) -> None:
        """Raises Refused where `inst` leaves the step, or goes by what may differ from step to step."""
        if translator is self.translator:
            Refused.when(
                inst.opname in _LEAVES or translator.instruction_pointer not in self._inside,
                "a `return` or a `break` leaves it",
            )
            if inst.opname in _ADDS and len(translator.stack) - 1 - (inst.arg or 0) < len(self._stack):
                raise Refused(COMPREHENSION, told=self._computed(translator.stack[-1]))
        elif translation.born(translator) < self.start:
            raise Refused("it goes on with a generator from before it")
        if inst.opname in _SUBSCRIPTS:
            self._subscript(translator)

    def _subscript(self, translator: Any) -> None:
        """Have the part at a position taken out of a tensor that is indexed by it, among slices and numbers, ahead of
        the rest: torch itself asks for the number."""
        holder, key = (variables.realized(v) for v in translator.stack[-2:])
        if variables.tensor(holder) is None:
            number = type(variables.plain(key)) is int and translator is self.translator
            Refused.when(
                number and self.position is None and variables.python_type(holder) not in (dict, torch.Size, tuple),
                "it indexes a list",
            )
            return
        parts = variables.parts(key)
        entries = [variables.realized(part) for part in (parts if parts is not None else [key])]
        at = [i for i, entry in enumerate(entries) if positions.is_symbol(entry)]
        if not at:
            return
        rest = [e for i, e in enumerate(entries) if i not in at]
        Refused.when(len(at) > 1 or not all(map(_is_basic, rest)), "it indexes a tensor by its position and by more")
        taken = [variables.plain(e) for e in entries]
        # What of the other entries is a number takes its dimension away only afterwards.
        dim = sum(e is not None for e in taken[: at[0]])
        if Ellipsis in taken[: at[0]]:
            dim = -sum(e is not None for e in taken[at[0] :])
        translator.stack[-2] = variables.computed(translator, torch.select, holder, dim, entries[at[0]])
        whole = all(positions.is_slice(e, whole=True) for e in rest)
        translator.stack[-1] = variables.constant(Ellipsis) if whole else variables.row(rest)

    def _computed(self, added: Any) -> bool:
        """Whether the step has made a tensor of its own of what there was before."""
        if (found := variables.tensor(variables.realized(added))) is None or (own := storage_of(found[0])) is None:
            return False
        before = itertools.islice(self.translator.output.graph.nodes, self.nodes)
        return all(storage_of(n) != own for n in before)

    def grows(self, variable: Any, added: Any) -> None:
        """A list from before it is appended to."""
        Refused.when(
            translation.list_born(variable) < 0 or variables.tensor(added) is None or list(variable.items),
            "it appends to a list that is not the frame's own, or not empty before, or no tensor",
        )
        Refused.when(any(one is variable for one, _ in self.grown), "it appends to a list several times")
        self.grown.append((variable, added))

    def carried(self) -> list[str]:
        """At the loop's head again: the names of tensors that the step replaced. Raises Refused for any other change of
        Python's state."""
        translator = self.translator
        Refused.when(
            _identities(translator.stack) != self._stack or translation.effects(translator) != self._state,
            "what it leaves behind is not what it found",
        )
        found = []
        for name in sorted(live_names(translator.instructions, self.head)):
            before, after = (held.get(name) for held in (self.names, translator.symbolic_locals))
            if before is after:
                continue
            Refused.when(before is None or after is None, f"it sets `{name}`, which is read later")
            before, after = variables.realized(before), variables.realized(after)
            if before is after:
                continue
            Refused.when(
                not _alike(before, after),
                f"it sets `{name}`, which is read later, to something else than another tensor like it",
            )
            found.append(name)
        return found


def _is_basic(entry: Any) -> bool:
    """Whether `entry` of an index is a slice, a number, an ellipsis or a new dimension."""
    value = variables.plain(entry)
    return positions.is_slice(entry) or value is None or value is Ellipsis or type(value) is int


def _identities(held: list[Any]) -> list[int]:
    return [id(variables.realized(v)) if hasattr(v, "realize") else id(v) for v in held]


def _alike(before: Any, after: Any) -> bool:
    """Whether both are tensors that only their numbers, whether these have a gradient, and how they lie tell apart: a
    step is traced again on what the first one leaves."""
    one, other = variables.tensor(before), variables.tensor(after)
    if one is None or other is None:
        return False
    a, b = one[1], other[1]
    if type(a) is not type(b) or a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
