"""What tracing assumed of a captured frame, held against what the passes make of it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.config.options import Config
from megacpp_compile.frontend.capture import Captured
from megacpp_compile.fx import assumptions
from megacpp_compile.fx.edit import drop_dead, value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe import assumed
from megacpp_compile.passes._driver import Outcome, missed


@dataclasses.dataclass(frozen=True)
class Shown:
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


def show(captured: Captured, config: Config, marks: int) -> Shown:
    """What can be shown of `captured`, whose marks of what was assumed are erased. marks: how many there were before
    capture."""
    gm = captured.gm
    whole = assumptions.marked(gm) == marks
    regions = assumptions.take_regions(gm.graph)
    found = None
    if whole and regions is not None:
        _drop_bounds(regions)
        view = GraphView(gm.graph, captured.fake_mode, captured.weights, config, captured.trained)
        found = assumed.show(view, regions)
    drop_dead(gm.graph)
    return Shown(None, found) if isinstance(found, MatchFailure) else Shown(found)


aten = torch.ops.aten
_BOUNDS: dict[Any, Any] = {operator.ge: lambda n, _: n <= 0, operator.le: lambda n, experts: n >= experts}


def _drop_bounds(regions: Sequence[assumptions.Region]) -> None:
    """Erase checks that a list of experts is no longer than there are experts: they would keep it."""
    for hits in {region.condition for region in regions if region.number is not None}:
        experts = 1 + max(region.number or 0 for region in regions if region.condition is hits)
        for size in [u for n in _behind(hits) for u in n.users if u.target is aten.sym_size.int]:
            for bound in list(size.users):
                always = bound.target in _BOUNDS and isinstance(bound.args[1], int)
                if always and _BOUNDS[bound.target](bound.args[1], experts):
                    for check in [u for u in bound.users if u.target is aten._assert_scalar.default]:
                        check.graph.erase_node(check)


def _behind(node: Any) -> list[Node]:
    """`node` and the values it is a view of, as far as they have a size of its own."""
    found = list[Node]()
    while isinstance(node, Node) and isinstance(value(node), torch.Tensor) and not isinstance(value(node).shape[0], int):
        found.append(node)
        node = node.args[0]
    return found
