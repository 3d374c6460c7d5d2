"""Lists that a loop appends experts' outputs to: of an expert without tokens there is no entry, and none is traced.

Their concatenation is the same with an entry of no rows, and so is whether there is any entry. Nothing else may depend
on the entries: how many there are, or which one comes where.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megacpp_compile._torch import translator as translation
from megacpp_compile._torch import watched_lists

_JOINS = (torch.cat, torch.concat, torch.concatenate)
_SKIPS = ("PRECALL", "CACHE", "EXTENDED_ARG", "NOP", "TO_BOOL", "COPY")


class ListAppends:
    """The lists of one translation to which regions have appended.

    read: called with the line (a `FrameSummary`) where such a list is read in another way.
    """

    def __init__(self, read: Callable[[Any], None]) -> None:
        self._read = read
        self._allowed = False
        self._translator: Any = None

    def grow(self, variable: Any) -> None:
        watched_lists.watch_entries(variable, self._told)

    def before(self, translator: Any, inst: Any) -> None:
        """Let the coming instruction read entries if it joins them all, or asks whether there are any."""
        self._translator = translator
        if inst.opname.startswith("CALL"):
            called = translation.callee(translator, inst)
            self._allowed = called in _JOINS or called is len and _asks_for_any(translator.instructions, inst)
        else:
            leaves = inst.opname in ("RETURN_VALUE", "RETURN_CONST") and getattr(translator, "parent", None) is None
            self._allowed = leaves or "JUMP" in inst.opname  # what a frame returns its graph returns

    def _told(self) -> None:
        if not self._allowed:
            self._read(self._translator.frame_summary())


def _asks_for_any(instructions: list[Any], call: Any) -> bool:
    """Whether the number that `call` gives is only compared with zero, for a branch."""
    at = next(i for i, inst in enumerate(instructions) if inst is call)
    rest = [inst for inst in instructions[at + 1 : at + 10] if inst.opname not in _SKIPS]
    if len(rest) > 2 and rest[0].opname.startswith("LOAD_CONST") and rest[1].opname == "COMPARE_OP":
        told = rest[0].argval == 0 and str(rest[1].argval).removeprefix("bool(").removesuffix(")") in (">", "!=", "==")
        rest = rest[2:] if told else []
    return bool(rest) and "JUMP" in rest[0].opname and "_IF_" in rest[0].opname
