"""The axes of a gated sum over experts, or over a token's choices, and the layouts that rows and slots have."""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.moe.factors import Axis, Dims
from megacpp_compile.matchers.moe.gate_matrix import Chosen


@dataclasses.dataclass(frozen=True)
class RouteAxes:
    """`tokens`: the axes of the result but its channels, none for a single token; `routes`: the axis of experts or
    choices that is summed, none for a single choice; `base`: what the sum is added to; `chosen`:
    the choices of a sum that runs over these too, or why they cannot be read; `each`: the axis of choices where experts
    run once for each, which is the last of the tokens' then; `scales`: what multiplies the sum, see `RoutedExperts`."""

    tokens: tuple[Axis, ...]
    routes: tuple[Axis, ...]
    base: Node | None = None
    chosen: Chosen | MatchFailure | None = None
    each: Axis | None = None
    scales: tuple[tuple[Node, tuple[int, ...]], ...] = ()

    @property
    def both(self) -> set[Axis]:
        return {*self.tokens, *self.routes}

    @property
    def choices(self) -> int | None:
        """The number of routes, if it is fixed."""
        size = self.routes[0].size if self.routes else 1
        return size if isinstance(size, int) else None

    @property
    def outer(self) -> Dims:
        return tuple((t,) for t in self.tokens) or ((),)

    def rows(self, *behind: tuple[Axis, ...]) -> list[Dims]:
        """Both layouts of rows: a dimension for each axis of tokens or one for all, then `behind`."""
        return [(*self.outer, *behind), (self.tokens, *behind)]

    def slots(self, *behind: tuple[Axis, ...]) -> list[Dims]:
        """Both layouts of slots: a dimension for each axis of tokens and for routes or one for all, then `behind`."""
        return [(*self.outer, self.routes, *behind), ((*self.tokens, *self.routes), *behind)]
