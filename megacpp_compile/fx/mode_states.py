"""The modes a node runs under: whether gradients are recorded, and what autocast casts to."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx
from torch.fx import Node

from megacpp_compile._torch.autocast import enter_autocast, exit_autocast
from megacpp_compile._torch.ops import set_grad_enabled
from megacpp_compile.errors import CaptureError

ENTER, LEAVE = enter_autocast, exit_autocast


class ModeState(NamedTuple):
    """Modes as the frame's own switches leave them. autocast: (device, dtype) by device, the dtype None where autocast
    is switched off; a device the frame never switches is not in it."""

    grad: bool
    autocast: frozenset[Any]


ModeStates = dict[Node, ModeState]


def mode_states(graph: fx.Graph) -> ModeStates:
    """The modes that every node runs under.

    Two nodes may be merged, or one moved beside the other, only where these agree.
    """
    states: ModeStates = {}
    grad, autocast, stack = True, dict[Any, Any](), list[dict[Any, Any]]()
    for node in graph.nodes:
        states[node] = ModeState(grad, frozenset(autocast.items()))  # a switch itself still runs under what it ends
        if node.target is set_grad_enabled:
            grad = bool(node.args[0])
        elif node.target is ENTER:
            stack.append(autocast)
            device, dtype, enabled, _ = node.args
            autocast = {**autocast, device: dtype if enabled else None}
        elif node.target is LEAVE:
            autocast = stack.pop()
    return states


def autocast_pairs(graph: fx.Graph) -> list[tuple[Node, Node]]:
    """(entry, exit) of every autocast context, in the order of the exits.

    Raises CaptureError for a context that is not closed, or not innermost first.
    """
    found, opened = [], list[Node]()
    for node in sorted(n for switch in (ENTER, LEAVE) for n in graph.find_nodes(op="call_function", target=switch)):
        if node.target is ENTER:
            opened.append(node)
        elif node.target is LEAVE:
            CaptureError.when(not opened or node.args[0] is not opened[-1], "autocast regions of the frame overlap")
            found.append((opened.pop(), node))
    CaptureError.when(opened, "an autocast region of the frame is not closed in it")
    return found
