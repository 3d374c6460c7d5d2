"""Watches Dynamo translate a frame, and answers for it what depends on which experts have tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from megacpp_compile._torch import translator as translation
from megacpp_compile._torch import variables
from megacpp_compile._torch.dynamo import RestartAnalysis
from megacpp_compile.frontend.expert_loops import expert_numbers, origins
from megacpp_compile.frontend.expert_loops.control_flow import meeting, skipped
from megacpp_compile.frontend.expert_loops.list_appends import ListAppends
from megacpp_compile.frontend.expert_loops.negations import negate
from megacpp_compile.frontend.expert_loops.regions import OpenRegion, OtherWay, Refused
from megacpp_compile.frontend.expert_loops.truncated_counts import TruncatedCounts
from megacpp_compile.fx import assumptions
from megacpp_compile.report import log

_SUBSCRIPTS = ("BINARY_SUBSCR",)
_SLICES = ("BUILD_SLICE", "BINARY_SLICE")
# Most of what a frame is made of: none of these reads an entry, asks for a value, or leaves its place.
_QUIET = frozenset(
    "CACHE NOP RESUME PRECALL KW_NAMES PUSH_NULL COPY SWAP POP_TOP LOAD_CONST LOAD_FAST STORE_FAST".split()
)


class ExpertLoopTracer:
    """The loops of one frame.

    restart: leaves the translation, to begin it anew. refused: why loops were left as they are, each with its line (a
    `FrameSummary`).
    """

    def __init__(self, restart: Callable[[], NoReturn]) -> None:
        self.restart = restart
        self.enabled = self._fills = True
        self.refused: list[tuple[str, Any]] = []
        self._left = set[Any]()  # the places (code, instruction) of loops that were refused
        self._lists = dict[Any, Any]()  # the place of the loop over each list of experts, by the list's node
        self._output: Any = None
        self._open: list[OpenRegion] = []
        self._regions = self._reads = 0
        self._grown, self._short = ListAppends(self._entries_read), TruncatedCounts()
        self._appends = False

    @property
    def assumed(self) -> bool:
        """Whether anything was assumed for the graph that is being made."""
        return self.enabled and self._regions + self._reads > 0

    def give_up(self) -> NoReturn:
        """Have the frame translated anew as it is written; first with counts as long as they are, if only that."""
        self.enabled, self._fills = self.enabled and self._fills and bool(self._short), False
        self.restart()

    def _refuse(self, region: OpenRegion, why: Refused) -> NoReturn:
        """Have the frame translated anew, with a loop over a list as it is written, and all others of the same code;
        with everything so for a branch, which may go by numbers that were read for other branches too."""
        if region.seen_in_experts():
            self.refused.append((str(why), self._open[-1].translator.frame_summary()))
        if region.begins is None or region.begins in self._left:
            self.give_up()
        self._left.add(region.begins)
        self.restart()

    def changes(self, born: int) -> None:
        if self.enabled and self._open and not self._appends:
            self._held_to(lambda region: region.changes(born))

    def append(self, variable: Any, added: Any, proceed: Callable[[], Any]) -> Any:
        born = translation.list_born(variable)
        grows = self.enabled and any(region.start > born for region in self._open)
        if not grows or born < 0 or variables.tensor(variables.realized(added)) is None:
            return proceed()
        self._appends = True
        try:
            return proceed()
        finally:
            self._appends = False
            self._grown.grow(variable)

    def _appending(self, translator: Any, inst: Any, proceed: Callable[[], bool]) -> bool:
        """As `append` has it where a comprehension makes a list."""
        if inst.opname != "LIST_APPEND" or not self._open:
            return proceed()
        grown = variables.realized(translator.stack[-1 - inst.arg])
        return bool(self.append(grown, translator.stack[-1], proceed))

    def _entries_read(self, at: Any) -> None:
        if self.enabled:
            self.refused.append(("it appends to a list that more is done with than `torch.cat`", at))
            self.give_up()

    def step(self, translator: Any, proceed: Callable[[], bool]) -> bool:
        if not self.enabled or translator.instruction_pointer is None:
            return proceed()
        inst = translator.instructions[translator.instruction_pointer]
        if inst.opname in _QUIET and not self._open:
            return proceed()
        self._try(self._before, translator, inst)
        inst = translator.instructions[translator.instruction_pointer]
        try:
            with self._slicing(translator, inst):
                goes_on = negate(translator, inst) or self._appending(translator, inst, proceed)
        except Exception as error:
            if self._open and translation.is_failure(error):  # of what an expert without tokens would not have run
                self.give_up()
            raise
        if goes_on:
            self._try(self._after, translator, inst)
        return goes_on

    def _try(self, part: Callable[[Any, Any], None], translator: Any, inst: Any) -> None:
        """A defect here, or a Dynamo that is built otherwise, must not become the user's error."""
        try:
            part(translator, inst)
        except RestartAnalysis:
            raise
        except Exception as error:
            log.logger.info("loops over experts are left as they are: %s: %s", type(error).__name__, error)
            self.give_up()

    def _before(self, translator: Any, inst: Any) -> None:
        if translator.output is not self._output:  # a new attempt at the frame
            self._output, self._open, self._regions, self._reads, self._lists = translator.output, [], 0, 0, {}
            self._short = TruncatedCounts()
        while self._open and self._open[-1].translator is translator and self._open[-1].join is inst:
            closed = self._close()  # an iteration may end with a branch in it
            if closed.other_way is not None:
                self._go_back(translator, closed)
                return self._before(translator, closed.other_way.start)
        self._grown.before(translator, inst)
        if self._open:
            self._held_to(lambda region: region.passes(translator, inst))
        if inst.opname == "WITH_EXCEPT_START" and self.assumed:  # which `live_names` leaves out
            self.give_up()
        expert_numbers.list_arrays(translator, inst, self._short)
        if inst.opname == "GET_ITER":
            self._iterate(translator, (translator.f_code, inst.offset))
        elif inst.opname in _SUBSCRIPTS:
            expert_numbers.subscript(translator)
        elif "JUMP" in inst.opname and "_IF_" in inst.opname and "NONE" not in inst.opname:
            self._branch(translator, inst)
        if self._short and self._short.asked(translator, inst):
            self.give_up()

    def _after(self, translator: Any, inst: Any) -> None:
        if inst.opname == "FOR_ITER" and (entry := expert_numbers.entry(translator)) is not None:
            hits = variables.tensor(entry)[0].args[0]  # type: ignore[index]
            self._enter(translator, inst, assumptions.iteration, entry, begins=self._lists.get(hits))
        elif inst.opname == "FOR_ITER" and self._short and translator.stack and not translation.hands_on(translator):
            if (of := self._short.iteration(variables.seen(translator.stack[-1]))) is not None:
                expert = variables.computed(translator, assumptions.expert, *of)
                self._enter(translator, inst, assumptions.iteration, expert)
        elif inst.opname.startswith("CALL"):
            self._counted(translator)

    def read(self, translator: Any, variable: Any, proceed: Callable[[], Any]) -> Any:
        if not self.enabled:
            return proceed()
        if variables.known(variable) is None:
            found = variables.tensor(variable)
            if found is None or not origins.about_tokens(found[0]):
                return proceed()
            self._reads += 1
        with translation.reading(translator):
            return proceed()

    def call(self, translator: Any, function: Any, args: Any, kwargs: Any, proceed: Callable[[], Any]) -> Any:
        return proceed()

    def _slicing(self, translator: Any, inst: Any) -> AbstractContextManager[None]:
        """Let an instruction read the places among slots that a slice is made of."""
        if inst.opname not in _SLICES:
            return nullcontext()
        ends = translator.stack[-(inst.arg or 2) :]
        found = [variables.tensor(variables.seen(end)) for end in ends]
        if not any(end is not None and origins.about_tokens(end[0]) for end in found):
            return nullcontext()
        self._reads += 1
        return translation.reading(translator)

    def _held_to(self, rule: Callable[[OpenRegion], None]) -> None:
        for region in self._open:
            try:
                rule(region)
            except Refused as why:
                self._refuse(region, why)

    def _enter(self, translator: Any, join: Any, op: Any, *args: Any, **kwargs: Any) -> None:
        self._regions += 1
        node = variables.emit(translator, op, *args, self._regions)
        self._open.append(OpenRegion(self._regions, translator, join, node, **kwargs))

    def _close(self) -> OpenRegion:
        region = self._open[-1]
        self._held_to(lambda open_: open_.close() if open_ is region else None)
        self._open.pop()
        variables.emit(region.translator, assumptions.end, region.number)
        return region

    def _go_back(self, translator: Any, region: OpenRegion) -> None:
        """Have the other way of a branch translated, too, of which `region` was one."""
        way = region.other_way
        assert way is not None
        left = region.undo()
        translation.go_to(translator, way.start)
        given = {"given": False, "asked": _asked(way.condition, way.taken), "alternatives": left}
        self._enter(translator, region.join, way.op, way.condition, way.taken, **given)

    def _iterate(self, translator: Any, place: Any) -> None:
        """Put all experts in the place of a list of those that have tokens."""
        if place in self._left:
            return
        hits = variables.seen(translator.stack[-1])
        found = variables.tensor(hits)
        experts = origins.listed(*found) if found is not None else None
        if found is None or experts is None:
            return
        self._lists[found[0]] = place
        translator.stack[-1] = expert_numbers.all_of(translator, hits, experts)

    def _counted(self, translator: Any) -> None:
        """Let a count of choices have as many entries as there are experts, which torch knows at run time only."""
        counts = variables.seen(translator.stack[-1]) if translator.stack else None
        found = variables.tensor(counts)
        if found is not None and (experts := origins.bins(*found)) is not None:
            self._reads += 1
            if origins.minlength(found[0]):
                translator.stack[-1] = variables.computed(translator, assumptions.counts, counts, experts)
            elif self._fills:
                translator.stack[-1] = self._short.fill(translator, counts, experts)

    def _branch(self, translator: Any, jump: Any) -> None:
        """Take the way of an expert that has tokens."""
        condition = variables.seen(translator.stack[-1])
        if (found := variables.tensor(condition)) is not None:
            if (known := variables.known(condition)) is not None:
                translator.stack[-1] = variables.constant(bool(known))
                return
            node, op = found[0], assumptions.branch
        elif (number := variables.number(condition)) is not None:
            node, op = number[0], _op_for(number[1])
        else:
            return
        if op is None or not origins.about_tokens(node):
            return
        way = skipped(translator.instructions, jump)
        if way is None:
            self._both_ways(translator, jump, op, condition, origins.some_when(node, variables.number(condition)))
            return
        join, by_jump = way
        taken = by_jump == ("IF_FALSE" in jump.opname)
        self._enter(translator, join, op, condition, taken, asked=_asked(condition, taken))
        translator.stack[-1] = variables.constant(taken)

    def _both_ways(self, translator: Any, jump: Any, op: Any, condition: Any, some: bool) -> None:
        """Take the way of an expert without tokens, then, from where it meets the other, that of one that has some.

        some: what `condition` is where there are tokens.
        """
        join = meeting(translator.instructions, jump)
        if join is None:
            return
        jumps = some != ("IF_FALSE" in jump.opname)
        start = jump.target if jumps else translator.instructions[translator.instruction_pointer + 1]
        self._enter(translator, join, op, condition, not some, other_way=OtherWay(start, op, condition, some))
        translator.stack[-1] = variables.constant(not some)


def _asked(condition: Any, taken: bool) -> tuple[Any, bool] | None:
    """The number or truth value that a branch goes by, and whether it was taken to hold."""
    number = variables.number(condition)
    return None if number is None else (number[1], taken)


def _op_for(value: Any) -> Any:
    """The mark for a branch on a number or a truth value; None where it is known while tracing."""
    if not isinstance(value, (torch.SymInt, torch.SymBool)) or not free_unbacked_symbols(value):
        return None
    truth = value if isinstance(value, torch.SymBool) else value != 0
    if statically_known_true(truth) or statically_known_true(torch.sym_not(truth)):
        return None
    return assumptions.truth_branch if isinstance(value, torch.SymBool) else assumptions.size_branch
