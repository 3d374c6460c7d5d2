"""Autocast switched inside a frame, as by models that compute their rotary tables with it off.

Dynamo's graph holds the switches as calls. Pre-dispatch tracing records those without making them, so everything behind
one would get the dtypes of the region around it; here they are made as well. They stay in the captured graph, as silent
as Dynamo's: what traces it next casts by them again, and `fx.mode_states` keeps passes from reaching across.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from megacpp_compile.fx.copies import copied, in_place_of
from megacpp_compile.fx.mode_states import ENTER, LEAVE, autocast_pairs


def as_real_regions(gm: GraphModule) -> GraphModule:
    """`gm` itself where it never switches autocast, else a copy for tracing that runs its switches as real regions.

    Raises CaptureError for regions that are not closed, or not innermost first: tracing pairs them that way.
    """
    if not autocast_pairs(gm.graph):
        return gm
    graph, copies = copied(gm.graph)
    for node in graph.nodes:
        if node.target is ENTER:
            node.target = _enter
        elif node.target is LEAVE:
            node.target = _leave
    return in_place_of(gm, graph, copies)


def _enter(*args: Any) -> Any:
    """Unlike `torch.amp._enter_autocast`, a real region switches and, under a pre-dispatch tracer, is recorded too."""
    region = torch.autocast(*args)
    region.__enter__()
    return region


def _leave(region: Any) -> None:
    region.__exit__(None, None, None)
