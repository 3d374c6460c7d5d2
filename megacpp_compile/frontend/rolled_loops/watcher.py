"""Watches Dynamo translate a frame, and has one step of a loop translated in the place of all, at a position that is
a symbol.

What a step does depends on its position where Dynamo has to know it: to index a list, to branch, to count. Then there
is a guard on the symbol, or an error, and the frame is translated anew with all steps. So it is where Python's state is
not as it was before the step, but for tensors that it replaces by tensors of the same kind, and lists of the frame's
own that it appends a tensor to. The first step is only looked at: a loop over layers costs nothing.

Parts that a tensor is cut into are not put in the graph until something other than such a loop looks at them; then the
frame is translated anew with all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from megacpp_compile._torch import iterators, positions, variables, watched_lists
from megacpp_compile._torch import translator as translation
from megacpp_compile._torch.dynamo import RestartAnalysis
from megacpp_compile.frontend import checkpoint
from megacpp_compile.frontend.rolled_loops.step import Refused, Step
from megacpp_compile.fx import short_loops
from megacpp_compile.report import log

Result = TypeVar("Result")
# Loops of fewer steps are translated step by step.
LEAST = 16


class RolledLoops:
    """The loops of one frame. restart: leaves the translation, to begin it anew. never: why no loop is translated once,
    "" where it may be. refused: why loops were left as they are, each with its line (a `FrameSummary`)."""

    def __init__(self, restart: Callable[[], NoReturn], never: str = "") -> None:
        self.restart, self.never, self.enabled, self._cuts = restart, never, True, not never
        self.refused: list[tuple[str, Any]] = []
        self._left, self._rolls = set[Any](), dict[Any, Any]()  # places of loops; with the lines of those
        self._numbers: dict[int, Any] = {}  # places by the loops' numbers
        self._number = 0
        self._output: Any = None
        self._open: Step | None = None
        self._lists: dict[int, tuple[Any, Any, Step]] = {}  # what loops have appended to
        self._appends = False
        self._forget: Callable[[], None] = lambda: None

    def give_up(self, why: str) -> NoReturn:
        """Have the frame translated anew with all steps of its loops."""
        log.logger.info("loops are traced step by step: %s", why)
        self.enabled = False
        self._restart()

    def leave(self, why: str, number: int | None = None) -> NoReturn:
        """Have the frame translated anew with all steps of the loop of this number, or of every loop."""
        places = [p for p in self._rolls if p not in self._left] if number is None else [self._numbers[number]]
        log.logger.info("a loop is traced step by step: %s", why)
        self.refused += [(why, self._rolls[place]) for place in places]
        self._left.update(places)
        self._restart()

    def _restart(self) -> NoReturn:
        self._forget()
        self.restart()

    def _refuse(self, why: str, told: bool = False) -> None:
        """Have the open step's loop translated step by step, from its beginning if anything was assumed."""
        step, self._open = self._open, None
        assert step is not None
        self._left.add(step.place)
        if step.items.unread and step.position is None:
            self._uncut()
        if step.position is not None or told:
            log.logger.info("a loop is traced step by step: %s", why)
            self.refused.append((why, step.translator.frame_summary()))
        if step.position is not None:
            self._restart()

    def _try(self, part: Callable[..., Result | None], *args: Any) -> Result | None:
        """A defect here, or a Dynamo that is built otherwise, must not become the user's error."""
        try:
            return part(*args)
        except RestartAnalysis:
            raise
        except Refused as why:
            self._refuse(str(why), why.told)
            return None
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {error}")

    def _uncut(self) -> None:
        """Have the frame translated anew with the parts of all tensors in the graph."""
        if self.enabled and self._cuts:
            self._cuts = False
            self._restart()

    def step(self, translator: Any, proceed: Callable[[], bool]) -> bool:
        if not self.enabled or translator.instruction_pointer is None:
            return proceed()
        if translator.output is not self._output:  # a new attempt at the frame
            self._output, self._open, self._number, self._lists = translator.output, None, 0, {}
            self._forget = translator.speculation_log.clear  # of instructions that may not be met again
        inst = translator.instructions[translator.instruction_pointer]
        if self._open is None and inst.opname != "FOR_ITER":
            return proceed()
        done = self._try(self._before, translator, inst)
        if done is not None:
            return done
        if self._open is not None and self._open.starts:  # a step of its iterator's own is no part of it
            step, self._open = self._open, None
            goes_on = proceed()
            self._open, step.starts = step, False
            return goes_on
        if self._open is None or self._open.position is None:
            return proceed()
        try:
            return proceed()
        except RestartAnalysis:
            raise
        except Exception as error:  # of what needs to know the position
            if self._open is not None:
                self._refuse(f"{type(error).__name__}: {error}".splitlines()[0][:200])
            raise

    def _before(self, translator: Any, inst: Any) -> bool | None:
        """Whether the translation goes on, where the coming instruction was done here."""
        step = self._open
        if step is None:
            return self._enter(translator, inst)
        if translator is not step.translator or inst is not step.head:
            step.passes(translator, inst)
        elif step.position is not None:
            self._close(step, step.position)
        elif len(translator.output.graph.nodes) == step.nodes or not step.carried() and not step.grown:
            raise Refused("it computes nothing that it hands on")
        elif self.never:
            raise Refused(self.never, told=True)
        else:
            self._rolls[step.place] = translator.frame_summary()
            self._restart()
        return None

    def _enter(self, translator: Any, head: Any) -> bool | None:
        left = translation.hands_on(translator) or (translator.f_code, head.offset) in self._left
        if left or not translation.inlined(translator, checkpoint.HOP):
            return None
        items = iterators.left(translator.stack[-1])
        if items is None or not LEAST <= items.count < iterators.ENDLESS:
            return None
        self._open = step = Step(translator, head, items)
        at: Any = 0
        if step.place in self._rolls:
            self._number += 1
            step.loop = self._number
            self._numbers[step.loop] = step.place
            step.position, at = positions.position(translator, short_loops.position, step.loop, items.count)
        elif not items.unread:
            step.starts = True
            return None
        translator.stack.append(items.at(translator, at))
        translation.go_to(translator, translator.instructions[translator.instruction_pointer + 1])
        return True

    def _close(self, step: Step, position: positions.Position) -> None:
        """Go on behind the loop, with what its last step leaves."""
        translator, carried = step.translator, step.carried()
        Refused.when(not positions.unknown(translator, position), "what it does depends on its position")
        for name in carried:
            pair = (variables.realized(held[name]) for held in (step.names, translator.symbolic_locals))
            left = variables.computed(translator, short_loops.result, *pair, step.loop)
            translator.symbolic_locals[name] = left
        for variable, each in step.grown:
            self._lists[id(variable)] = (variable, each, step)
            watched_lists.watch_entries(variable, functools.partial(self._entries_read, step.loop))
        variables.emit(translator, short_loops.end, step.loop)
        for name in translator.symbolic_locals.keys() - step.names.keys():
            del translator.symbolic_locals[name]  # nothing reads them
        iterators.exhaust(translator.stack[-1])
        self._open = None

    def changes(self, born: int) -> None:
        if self.enabled and self._open is not None and born < self._open.start and not self._appends:
            self._try(_refuses, "it changes a value of Python's from before it, too")

    def read(self, translator: Any, variable: Any, proceed: Callable[[], Any]) -> Any:
        return proceed()

    def append(self, variable: Any, added: Any, proceed: Callable[[], Any]) -> Any:
        step = self._open
        if not self.enabled or step is None or translation.list_born(variable) >= step.start:
            return proceed()
        self._try(step.grows, variable, variables.realized(added))
        self._appends = True
        try:
            return proceed()
        finally:
            self._appends = False

    def _entries_read(self, number: int) -> None:
        if self.enabled:
            self.leave("more is done with a list that it appends to than to stack or concatenate it", number)

    def call(self, translator: Any, function: Any, args: Any, kwargs: Any, proceed: Callable[[], Any]) -> Any:
        if not self.enabled:
            return proceed()
        if function in (torch.unbind, torch.split, torch.chunk):
            parts = self._try(_cut, function, args, kwargs) if self._cuts else None
            if parts is None:
                return proceed()
            made = variables.row([])
            made.items = iterators.Cut(parts, self._uncut)
            return made
        held = self._lists.get(id(variables.realized(args[0]))) if args else None
        return proceed() if held is None else self._collected(translator, function, args, kwargs, *held[1:])

    def _collected(self, translator: Any, function: Any, args: Any, kwargs: Any, each: Any, step: Step) -> Any:
        """What stands in the place of a list that a loop collects, and that is stacked or concatenated."""
        given = [*args[1:], *kwargs.values()]
        dim = variables.plain(variables.realized(given[0])) if given else 0
        if len(given) > 1 or type(dim) is not int or not kwargs.keys() <= {"dim", "axis"}:
            self.leave("a list that it appends to is joined in another way than by a dimension", step.loop)
        joined, rank = function is not torch.stack, variables.tensor(each)[1].dim()  # type: ignore[index]
        dim %= rank + (not joined)
        return variables.computed(translator, short_loops.collected, each, dim, step.items.count, joined, step.loop)


def _cut(function: Any, args: Any, kwargs: Any) -> iterators.Parts | None:
    return iterators.cut(function, args, kwargs, LEAST)


def _refuses(why: str) -> NoReturn:
    raise Refused(why)
