"""What tracing assumed of a captured frame, held against what the passes make of it."""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from megacpp_compile.config.options import Config
from megacpp_compile.frontend.capture import Captured
from megacpp_compile.fx import assumptions
from megacpp_compile.fx.edit import drop_dead
from megacpp_compile.fx.size_checks import drop_certain_bounds
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe import assumed
from megacpp_compile.passes._driver import Outcome, missed


@dataclasses.dataclass(frozen=True)
class Verification:
    """What of a frame's assumptions could be shown.

    Attributes:
        outputs: the ends of sums over experts, each of which has to become an op; None where that would not do.
        failure: why not, where a line of the model's can be named.
    """

    outputs: frozenset[Node] | None
    failure: MatchFailure | None = None

    def stands(self, outcome: Outcome) -> bool:
        """Whether the frame may be compiled as it was traced; if not, `outcome` says why."""
        if self.outputs is not None and self.outputs <= outcome.replaced.keys():
            return True
        if self.failure is not None and not any(miss.pass_name == "moe" for miss in outcome.misses):
            outcome.misses.append(missed("moe", self.failure))
        return False


def show(captured: Captured, config: Config, marks: int, grad: bool) -> Verification:
    """What can be shown of `captured`, whose marks of what was assumed are erased. marks: how many there were before
    capture. grad: whether gradients are recorded."""
    gm = captured.gm
    whole = assumptions.marked(gm) == marks
    regions = assumptions.take_regions(gm.graph)
    found = None
    if whole and regions is not None:
        drop_certain_bounds(gm.graph)
        trained = captured.trained if grad else frozenset()
        view = GraphView(gm.graph, captured.fake_mode, captured.weights, config, trained)
        found = assumed.show(view, regions)
    drop_dead(gm.graph)
    return Verification(None, found) if isinstance(found, MatchFailure) else Verification(found)
