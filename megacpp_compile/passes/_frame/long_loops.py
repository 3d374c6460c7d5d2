"""Makes what was put in the place of a few steps of a loop as long as the loop is.

A pass finds the steps that stand for a loop (`fx.short_loops`), and emits an op with views around it, of that many
tokens. The steps' number divides no other size of the frame, so that sizes tell where it went. Only what passes emitted
is made longer: what is left of the steps themselves is not.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors import CaptureError
from megacpp_compile.frontend.capture import Captured
from megacpp_compile.fx import short_loops
from megacpp_compile.fx.edit import replace, value
from megacpp_compile.lowerings._registry import semantic_ops

# Their arguments are sizes.
_SIZED = {aten.unflatten.int: 2, aten.expand.default: 1, aten.view.default: 1, aten.reshape.default: 1}


def lengthen(captured: Captured, given: Set[Node]) -> None:
    """Make what passes put in the place of loops of a few steps as long as these loops are. given: the nodes from
    before the passes. Raises CaptureError where something else is left."""
    graph, long = captured.gm.graph, dict[Node, tuple[int, int]]()
    for node in list(graph.nodes):
        if node.target is short_loops.shortened:
            _, _, short, count = node.args
            users = list(node.users)
            node.replace_all_uses_with(node.args[0])
            long |= dict.fromkeys(users, (short, count))
            graph.erase_node(node)
        elif node.target is short_loops.lengthened:
            CaptureError.when(
                not _alike(value(node.args[0]), value(node)),
                f"{node.name} is not as long as the loop that it stands for",
            )
            replace(node, node.args[0])
        elif node in long:
            CaptureError.when(node in given, f"{node.name} is left of a loop of which a few steps were traced")
            _remake(captured, node, *long[node])
            for user in node.users:
                long.setdefault(user, long[node])
    captured.gm.recompile()


def _alike(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _remake(captured: Captured, node: Node, short: int, count: int) -> None:
    sized = _SIZED.get(node.target)

    def longer(v: Any) -> Any:
        if isinstance(v, list | tuple):
            return type(v)(map(longer, v))
        return v // short * count if type(v) is int and v > 0 and v % short == 0 else v

    if sized is not None:
        node.args = (*node.args[:sized], longer(node.args[sized]), *node.args[sized + 1 :])
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    before = value(node)
    with captured.fake_mode, torch.no_grad():
        made = node.target(*args, **kwargs)  # type: ignore[operator]
    node.meta["val"] = made
    if node.target in semantic_ops():
        return  # it may save a state of every so many tokens; what it is read for is looked at there
    for old, new in zip(_tensors(before), _tensors(made), strict=True):
        wanted = tuple(longer(s) if type(s) is int else s for s in old.shape)
        CaptureError.when(
            tuple(new.shape) != wanted or old.dtype != new.dtype,
            f"{node.name} of all steps has not the size that it is to have",
        )


def _tensors(values: Any) -> list[torch.Tensor]:
    several = values if isinstance(values, list | tuple) else [values]
    return [v for v in several if isinstance(v, torch.Tensor)]
