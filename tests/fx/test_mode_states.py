"""The modes a node runs under, and the places where an op may stand between nodes of other modes."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from megacpp_compile.errors import CaptureError
from megacpp_compile.fx.edit import place
from megacpp_compile.fx.mode_states import ENTER, LEAVE, ModeState, autocast_pairs, mode_states
from megacpp_compile.fx.views import AUTOCAST_BLIND

aten = torch.ops.aten
BF16 = frozenset({("cpu", torch.bfloat16)})
OFF = frozenset({("cpu", None)})


def frame(*calls):
    """A graph of `calls`: "sin" nodes in a row on the input, and switches; (nodes in order, the graph)."""
    graph = fx.Graph()
    last, opened, nodes = graph.placeholder("x"), [], []
    for call in calls:
        if call == "sin":
            last = graph.call_function(aten.sin.default, (last,))
            nodes.append(last)
        elif call == "leave":
            nodes.append(graph.call_function(LEAVE, (opened.pop(),)))
        elif isinstance(call, bool):
            nodes.append(graph.call_function(torch._C._set_grad_enabled, (call,)))
        else:
            opened.append(graph.call_function(ENTER, ("cpu", torch.bfloat16, call == "on", True)))
            nodes.append(opened[-1])
    graph.output(last)
    return nodes, graph


def test_switches_nest_and_end():
    nodes, graph = frame("sin", "on", "sin", "off", "sin", "leave", "sin", "leave", "sin")
    states = mode_states(graph)
    assert [states[n].autocast for n in nodes if n.target is aten.sin.default] == [frozenset(), BF16, OFF, BF16, frozenset()]
    assert autocast_pairs(graph) == [(nodes[3], nodes[5]), (nodes[1], nodes[7])]


def test_gradients_are_a_mode_too():
    nodes, graph = frame("sin", False, "sin", True, "sin")
    states = mode_states(graph)
    assert states[nodes[0]] == states[nodes[4]] == ModeState(True, frozenset())
    assert states[nodes[2]] == ModeState(False, frozenset())


def test_overlapping_and_open_contexts_are_no_pairs():
    with pytest.raises(CaptureError, match="not closed"):
        autocast_pairs(frame("on", "sin")[1])
    nodes, graph = frame("on", "off", "sin", "leave", "leave")
    nodes[3].args, nodes[4].args = nodes[4].args, nodes[3].args
    with pytest.raises(CaptureError, match="overlap"):
        autocast_pairs(graph)


def test_an_op_stands_where_its_modes_are():
    """Its input is computed before autocast is switched on, what it replaces behind."""
    nodes, graph = frame("sin", "on", "sin", "sin", "leave")
    x, _, first, second, _ = nodes
    states = mode_states(graph)
    assert place([x], [first], first, states) == (first, [])
    assert place([x], [first], x, states)[0].target is ENTER, "a switch still runs under what it ends"
    assert place([second], [], x, states) is None


def test_an_op_that_no_autocast_changes_stands_in_any_region():
    nodes, graph = frame("sin", "on", "sin", "leave", "sin", False, "sin", True)
    x, _, inside, _, behind, _, unrecorded, _ = nodes
    states = mode_states(graph)
    assert place([inside], [], x, states) == (behind, [])
    anchor, moved = place([inside], [], x, states, AUTOCAST_BLIND)
    assert anchor.target is LEAVE and not moved
    assert place([unrecorded], [], x, states, AUTOCAST_BLIND) is None, "gradients are recorded on neither side of it"


@pytest.mark.parametrize(("target", "moves"), [(aten.neg.default, True), (aten.sin.default, False)])
def test_what_moves_into_another_region_is_nothing_that_autocast_changes(target, moves):
    """`reader` reads an output before the last input, which is computed in a region, is there."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    output = graph.call_function(aten.sin.default, (x,))
    reader = graph.call_function(target, (output,))
    region = graph.call_function(ENTER, ("cpu", torch.bfloat16, True, True))
    late = graph.call_function(aten.cos.default, (x,))
    last = graph.call_function(aten.neg.default, (late,))
    graph.call_function(LEAVE, (region,))
    graph.output((reader, last))
    where = place([late], [output], output, mode_states(graph), AUTOCAST_BLIND)
    assert where == ((last, [reader]) if moves else None)
