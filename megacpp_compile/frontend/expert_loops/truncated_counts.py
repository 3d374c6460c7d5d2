"""Counts of choices that end with the last expert chosen (`torch.bincount(indices)`): of which length is not known.

They are traced with an entry for each expert, so that a loop over them has iterations that the model may not have. Each
of these is a region of its own, as one for an expert without tokens is. Nothing else may depend on the length: a frame
that asks for it is translated with the counts as they are.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch import translator as translation
from megacpp_compile._torch import variables
from megacpp_compile.fx import assumptions
from megacpp_compile.fx.walks import nearest

# What is asked of counts, or computed from them, without their length, or into something as long.
_ALLOWED = ("cumsum", "cpu", "numpy", "to", "long", "int", "detach", "clone", "contiguous", "view", "reshape",
            "flatten", "item", "dtype", "device")  # fmt: skip
_NEAR = 24  # nodes to look at


def _keeps(function: Any) -> bool:
    """Whether `function` is one whose result is as long as its argument, or one of the model's, which is translated."""
    own = isinstance(function, types.FunctionType) and not str(function.__module__).startswith("torch")
    return own or getattr(function, "__name__", "") in _ALLOWED


class TruncatedCounts:
    """The counts of one translation that were given more entries than they may have."""

    def __init__(self) -> None:
        self._counts = dict[Node, Any]()
        self._entries = dict[int, tuple[Any, Any, int]]()

    def __bool__(self) -> bool:
        return bool(self._counts)

    def fill(self, translator: Any, counts: Any, experts: int) -> Any:
        """What Dynamo holds for `counts` with zeros for the experts behind the last that was chosen."""
        filled = variables.computed(translator, assumptions.filled_counts, counts, experts)
        self._counts[filled.as_proxy().node] = filled
        return filled

    def listed(self, array: Any, entries: list[Any]) -> None:
        """`entries` are those of `array`, which are looped over."""
        found = variables.tensor(array)
        if found is not None and (counts := self._counts_of(found[0])) is not None:
            self._entries |= {id(entry): (entry, counts, i) for i, entry in enumerate(entries)}

    def iteration(self, given: Any) -> tuple[Any, int] | None:
        """(counts, expert) where what an iteration is given is an entry of theirs, or has one among its parts."""
        if (found := self._entries.get(id(given))) is not None:
            return found[1:]
        parts = variables.parts(given) or ()
        return next((of for part in parts if (of := self.iteration(variables.seen(part))) is not None), None)

    def asked(self, translator: Any, inst: Any) -> bool:
        """Whether the coming instruction may ask how long counts are."""
        stack, name = translator.stack, inst.opname
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            return inst.argval not in _ALLOWED and self._is_short(stack[-1])
        if name == "BINARY_SUBSCR":
            index = variables.plain(variables.seen(stack[-1]))
            return self._is_short(stack[-2]) and not (type(index) is int and index >= 0)
        if name.startswith("CALL"):
            given = [part for v in stack[-(inst.arg or 1) :] for part in (v, *(variables.parts(v) or ()))]
            return not _keeps(translation.callee(translator, inst)) and any(map(self._is_short, given))
        reads = name in ("GET_ITER", "CONTAINS_OP", "LIST_EXTEND", "BINARY_SLICE", "COMPARE_OP")
        return (reads or name.startswith("UNPACK")) and any(map(self._is_short, stack[-2:]))

    def _is_short(self, variable: Any) -> bool:
        """Whether `variable` has as many entries as counts that were given more."""
        found = variables.tensor(variables.seen(variable)) if hasattr(variable, "is_realized") else None
        return found is not None and found[1].dim() > 0 and self._counts_of(found[0]) is not None

    def _counts_of(self, node: Node) -> Any:
        """The counts that `node`, a tensor of some length, is computed from, not far back."""
        way = nearest([node], _NEAR, lambda n: filter(_has_dims, n.all_input_nodes))
        return next((self._counts[n] for n in way if n in self._counts), None)


def _has_dims(node: Node) -> bool:
    fake = node.meta.get("example_value")
    return isinstance(fake, torch.Tensor) and fake.dim() > 0
