"""Watches Dynamo translate a frame, and has one step of a loop translated in the place of all, at a position that is
a symbol.

What a step does depends on its position where Dynamo has to know it: to index a list, to branch, to count. Then there
is a guard on the symbol, or an error, and the frame is translated anew with all steps. So it is where Python's state is
not as it was before the step, but for tensors that it replaces by tensors of the same kind, and lists of the frame's
own that it appends a tensor to. The first step is only looked at: a loop over layers costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from megacpp_compile._torch import positions, variables
from megacpp_compile._torch import translator as translation
from megacpp_compile._torch.dynamo import RestartAnalysis
from megacpp_compile.frontend.rolled_loops.step import Refused, Step
from megacpp_compile.fx import short_loops
from megacpp_compile.report import log

# Loops of fewer steps are translated step by step.
LEAST = 16


class RolledLoops:
    """The loops of one frame. restart: leaves the translation, to begin it anew. refused: why loops were left as they
    are, each with its line (a `FrameSummary`)."""

    def __init__(self, restart: Callable[[], NoReturn]) -> None:
        self.restart, self.enabled = restart, True
        self.refused: list[tuple[str, Any]] = []
        self._left, self._rolls = set[Any](), set[Any]()  # places of loops
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

    def _restart(self) -> NoReturn:
        self._forget()
        self.restart()

    def _refuse(self, why: str) -> None:
        """Have the open step's loop translated step by step, from its beginning if anything was assumed."""
        step, self._open = self._open, None
        assert step is not None
        self._left.add(step.place)
        if step.position is not None:
            log.logger.info("a loop is traced step by step: %s", why)
            self.refused.append((why, step.translator.frame_summary()))
            self._restart()

    def _try(self, part: Callable[..., bool | None], *args: Any) -> bool | None:
        """A defect here, or a Dynamo that is built otherwise, must not become the user's error."""
        try:
            return part(*args)
        except RestartAnalysis:
            raise
        except Refused as why:
            self._refuse(str(why))
            return None
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {error}")

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
        if done is not None or self._open is None or self._open.position is None:
            return proceed() if done is None else done
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
        else:
            self._rolls.add(step.place)
            self._restart()
        return None

    def _enter(self, translator: Any, head: Any) -> bool | None:
        found = positions.range_of(translator.stack[-1])
        nested = translator.output.current_tracer.parent is not None  # the graph of a checkpointed block
        if found is None or found[2] < LEAST or nested or translation.hands_on(translator):
            return None
        start, stride, count = found
        step = Step(translator, head, count)
        if step.place in self._left:
            return None
        self._open = step
        if step.place not in self._rolls:
            return None
        self._number += 1
        step.loop = self._number
        step.position, at = positions.position(translator, short_loops.position, step.loop, start, stride, count)
        translator.stack.append(at)
        translation.go_to(translator, translator.instructions[translator.instruction_pointer + 1])
        return True

    def _close(self, step: Step, position: positions.Position) -> None:
        """Go on behind the loop, with what its last step leaves."""
        translator, carried = step.translator, step.carried()
        if not positions.unknown(translator, position):
            raise Refused("what it does depends on its position")
        for name in carried:
            pair = (variables.realized(held[name]) for held in (step.names, translator.symbolic_locals))
            left = variables.computed(translator, short_loops.result, *pair, step.loop)
            translator.symbolic_locals[name] = left
        for variable, each in step.grown:
            self._lists[id(variable)] = (variable, each, step)
            translation.watch_entries(variable, self._entries_read)
        variables.emit(translator, short_loops.end, step.loop)
        for name in translator.symbolic_locals.keys() - step.names.keys():
            del translator.symbolic_locals[name]  # nothing reads them
        positions.exhaust(translator.stack[-1])
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

    def _entries_read(self) -> None:
        if self.enabled:
            self.give_up("more is done with a list that a loop appends to than to stack or concatenate it")

    def join(self, translator: Any, function: Any, args: Any, kwargs: Any, proceed: Callable[[], Any]) -> Any:
        """Put what a loop collects in the place of a list that is stacked or concatenated."""
        held = self._lists.get(id(variables.realized(args[0]))) if self.enabled and args else None
        if held is None:
            return proceed()
        _, each, step = held
        given = [*args[1:], *kwargs.values()]
        dim = variables.plain(variables.realized(given[0])) if given else 0
        if len(given) > 1 or type(dim) is not int or not kwargs.keys() <= {"dim", "axis"}:
            self.give_up("a list that a loop appends to is joined in another way than by a dimension")
        joined, rank = function is not torch.stack, variables.tensor(each)[1].dim()  # type: ignore[index]
        dim %= rank + (not joined)
        return variables.computed(translator, short_loops.collected, each, dim, step.count, joined, step.loop)


def _refuses(why: str) -> NoReturn:
    raise Refused(why)
