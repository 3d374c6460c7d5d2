"""What `require` asks of a model: how often a pass fires in one call of it.

A frame that is the whole model is held against it when it is compiled. Where a call is cut into frames, each adds what
fired in it whenever it runs, so that a frame which serves several layers counts for each of them, and one that other
shapes or evaluation were compiled for counts only where it runs. Too many are an error at once, too few when the call
ends. Calls count until one has met the requirement, and again once something is compiled anew.
"""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from megacpp_compile._torch import autograd, calls
from megacpp_compile._torch.guards import TracingContext
from megacpp_compile.config.options import Config
from megacpp_compile.errors import RequirementError
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.provenance import breaks_around, is_whole
from megacpp_compile.report.records import Frame, MissedFusion

# torch's object for a `torch.compile` -> what is required in each of its calls.
_known: weakref.WeakKeyDictionary[Any, Requirement] = weakref.WeakKeyDictionary()


class Requirement:
    """What has fired in the calls of one model that are running now. require: pass name -> count."""

    def __init__(self, require: Mapping[str, int]) -> None:
        self.require = dict(require)
        self.met = True  # until something is compiled
        self.running: dict[int, Counter[tuple[str, str]]] = {}  # thread -> (frame, pass) -> times fired
        self.misses: list[MissedFusion] = []
        self.breaks: list[str] = []

    def began(self, *_: Any) -> None:
        """A call of the model begins; a hook in front of its forward."""
        self.running[threading.get_ident()] = Counter()

    def ended(self, *_: Any) -> None:
        """The call has ended well: raise RequirementError where too little fired in it. A hook behind its forward."""
        fired = self.running.pop(threading.get_ident(), Counter())
        if self.met:
            return
        for name, wanted in self.require.items():
            self._check(name, wanted, fired, operator.ne)
        self.met, self.misses, self.breaks = True, [], []

    def enter(self) -> Callable[[], None]:
        """`began`, for a call of torch's; what is returned it calls at the end, however that came."""
        self.began()
        return self.leave

    def leave(self) -> None:
        trace = sys.exc_info()[2]
        if trace is None or trace.tb_frame is not sys._getframe(1):  # else torch is on its way out of an error
            self.ended()

    def saw(self, gm: GraphModule, misses: Sequence[MissedFusion]) -> None:
        """A frame is compiled in the call that is running. misses: its near misses."""
        self.met = False
        self.misses += [miss for miss in misses if miss not in self.misses]
        self.breaks += [line for line in breaks_around(gm) if line not in self.breaks]

    def add(self, frame: str, passes: Mapping[str, int]) -> None:
        """A frame runs; `passes` fired in it. Raises RequirementError where that is more than is wanted. Where backward
        runs a frame again, for a checkpoint, it does not count."""
        fired = self.running.get(threading.get_ident())
        if fired is None or autograd.current_graph_task_id() != -1:
            return
        for name, wanted in self.require.items():
            fired[frame, name] += passes.get(name, 0)
            self._check(name, wanted, fired, operator.gt)

    def _check(
        self, name: str, wanted: int, fired: Mapping[tuple[str, str], int], wrong: Callable[[int, int], bool]
    ) -> None:
        by_frame = {frame: n for (frame, by), n in fired.items() if by == name}
        if wrong(count := sum(by_frame.values()), wanted):
            near = [miss for miss in self.misses if miss.pass_name == name]
            raise RequirementError(name, wanted, count, near, by_frame, self.breaks)


class FrameCount:
    """Holds one frame against `require`: by itself where it is the whole model, else with the others of the call."""

    def __init__(self, gm: GraphModule, config: Config, of_model: Requirement | None = None) -> None:
        """of_model: where not torch's call but a call of the model that the frame belongs to is what counts."""
        self.gm, self.require = gm, config.require
        self.alone = of_model is None and (not config.require or is_whole(gm))
        self.model = of_model or (requirement_of_call(config) if config.require else None)

    def saw(self, misses: Sequence[MissedFusion]) -> None:
        """Note the near misses of a frame that is traced again, in pieces."""
        if self.model is not None:
            self.model.saw(self.gm, misses)

    def check(self, frame: Frame, misses: Sequence[MissedFusion]) -> None:
        """Raise RequirementError where it is known already that the requirement is not met."""
        if self.alone:
            for name, wanted in self.require.items():
                if (count := frame.passes.get(name, 0)) != wanted:
                    near = [miss for miss in misses if miss.pass_name == name]
                    raise RequirementError(name, wanted, count, near, {frame.name: count})
        else:
            self.saw(misses)

    def counting(self, compiled: Callable[..., Any], frame: Frame) -> Callable[..., Any]:
        """`compiled`, which counts what fired in the frame whenever it runs."""
        if self.alone or self.model is None:
            self.check(frame, [])  # the backend may have refused what the passes made
            return compiled
        model, name, passes = self.model, frame.name, frame.passes

        def run(*args: Any) -> Any:
            if TracingContext.try_get() is None:  # else DDP's optimizer asks for the shapes of what it has compiled
                model.add(name, passes)
            return compiled(*args)

        return run


@or_none
def requirement_of_call(config: Config) -> Requirement | None:
    """What is required of the call that a frame is being compiled in; None where torch does not let it be found."""
    call = NoMatch.unless(calls.current())
    if call.context not in _known:
        _known[call.context] = found = Requirement(config.require)
        call.enter.append(found.enter)
        call.leave.append(found.enter())
    return _known[call.context]
