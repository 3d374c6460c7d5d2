"""Hidden writes to a frame's inputs that nothing has read yet: `self.weight.data.clamp_(-c, c)` where a forward begins,
a weight that is normalised under `no_grad` before it is used. They run ahead of the frame, as they are written.

Autograd does not see them (`hidden_writes.py`), so that no functional graph can hold them. Ahead of the frame they are
what they were: what the frame reads of such an input, or of memory it shares, it reads behind the last write, and what
the writes read nobody else in the frame writes. What they compute goes into the writes alone, draws nothing random, and
no autocast region has begun. Numbers that are computed of inputs, as every float is one under `dynamic=True`, are
computed in both where both read them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node

from megacpp_compile.frontend.hidden_writes import has_gradient, hidden_write, storage_id, storage_of, written_tensors
from megacpp_compile.fx.copies import in_place_of
from megacpp_compile.fx.edit import called, dynamo_value
from megacpp_compile.fx.walks import ancestors, reached

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_DETACHED = ("detach", "_get_data_attr")
RANDOM = re.compile("rand|normal_?$|uniform|dropout|bernoulli|multinomial|exponential|cauchy|geometric|poisson|seed")
# An autocast or a transform that begins: ahead of it writes would be others.
_MODE = re.compile("_enter_|.*_increment_nesting$")


class EarlyWrites:
    """A frame without the writes that it begins with. `gm` is the frame's own, `whole`, where there are none, else a
    copy; `writes` takes the frame's arguments and makes them, to those at the places `written`."""

    def __init__(self, whole: GraphModule, early: Set[Node] = frozenset()) -> None:
        self.whole, self.gm = whole, _without(whole, early) if early else whole
        self.writes = _alone(whole, early) if early else None
        inputs = [storage_of(n) for n in whole.graph.find_nodes(op="placeholder")]
        memory = {storage_of(w) for node in early for w in written_tensors(node)} - {None}
        self.written = [i for i, storage in enumerate(inputs) if storage in memory]

    def adapt(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`, behind the writes. A call whose other arguments share the written memory, where the frame was
        compiled for one that has it to itself, runs in eager."""
        if self.writes is None:
            return compiled
        return functools.partial(_call_after, compiled, self.writes, self.whole, self.written)


def _call_after(
    compiled: Callable[..., Any], writes: GraphModule, whole: GraphModule, places: list[int], *args: Any
) -> Any:
    written = {storage_id(args[i]) for i in places}
    if any(storage_id(a) in written for i, a in enumerate(args) if i not in places and torch.is_tensor(a)):
        return whole(*args)
    with torch.no_grad():
        writes(*args)
    return compiled(*args)


def ahead_of(gm: GraphModule) -> EarlyWrites:
    """Dynamo's graph `gm` without the hidden writes that can run ahead of it. Never changes `gm`."""
    if hidden_write(gm) is None:
        return EarlyWrites(gm)
    early = _early(gm)
    if not early:
        return EarlyWrites(gm)
    found = EarlyWrites(gm, early)
    return found if hidden_write(found.gm) is None else EarlyWrites(gm)


def _early(gm: GraphModule) -> set[Node]:
    """The nodes that are to run ahead of the others; none where they cannot."""
    places = {node: i for i, node in enumerate(gm.graph.nodes)}
    apart = _apart(gm)
    inputs = {storage_of(n) for n in gm.graph.find_nodes(op="placeholder")} - {None}
    writes = [n for n in apart if any(storage_of(w) in inputs for w in written_tensors(n))]
    early = _with_ancestors(writes, apart)
    latest = max((places[node] for node in early), default=0)
    if any(user not in early for node in early for user in node.users):
        return set()
    if any(_MODE.match(called(node)) and place < latest for node, place in places.items()):
        return set()
    last = {storage_of(w): place for node, place in places.items() if node in early for w in written_tensors(node)}
    numbers = _numbers_of(early)
    if any(storage_of(a) in last.keys() - {None} for number in numbers for a in number.all_input_nodes):
        return set()
    read = {storage_of(a) for node in early | numbers for a in node.all_input_nodes} - {None}
    for node in places:
        if node in early or node.op not in ("call_function", "call_method", "call_module"):
            continue
        unwritten = any(places[node] < last.get(storage_of(a), -1) for a in node.all_input_nodes)
        if unwritten or any(storage_of(w) in read for w in written_tensors(node)):
            return set()
    return early


def _apart(gm: GraphModule) -> set[Node]:
    """Calls of which autograd sees nothing and that depend on inputs alone, through such calls."""
    recording, apart = torch.is_grad_enabled(), set[Node]()
    given = set(gm.graph.find_nodes(op="placeholder"))  # and numbers of such alone
    for node in gm.graph.nodes:
        if called(node) == "_set_grad_enabled":
            recording = bool(node.args[0])
        elif isinstance(dynamo_value(node), _NUMBERS) and given.issuperset(node.all_input_nodes):
            given.add(node)
        elif node.op in ("call_function", "call_method") and not RANDOM.search(called(node)):
            sources = node.all_input_nodes
            begins = given.issuperset(sources) and (not recording or called(node) in _DETACHED)
            goes_on = any(a in apart for a in sources) and all(
                a in apart or a in given and not (recording and has_gradient(a)) for a in sources
            )
            if sources and (begins or goes_on):
                apart.add(node)
    return apart


def _with_ancestors(writes: list[Node], apart: set[Node]) -> set[Node]:
    """The writes, what they are computed from, and whatever else is written to that."""
    return set(reached(writes, lambda node: [
        *(a for a in node.all_input_nodes if a in apart),
        *(user for user in node.users if user in apart and node in written_tensors(user)),
    ]))  # fmt: skip


def _numbers_of(early: Set[Node]) -> set[Node]:
    """The numbers that the `early` nodes read, and those that these are computed from."""
    return set(ancestors(early, lambda node: node.op != "placeholder")) - early


def _without(gm: GraphModule, early: Set[Node]) -> GraphModule:
    graph, copies = fx.Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        if node not in early:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    numbers = _numbers_of(early)
    for number in reversed(gm.graph.nodes):
        if number in numbers and not copies[number].users:
            graph.erase_node(copies.pop(number))
    return in_place_of(gm, graph, copies)


def _alone(gm: GraphModule, early: Set[Node]) -> GraphModule:
    graph, copies = fx.Graph(), dict[Node, Node]()
    wanted = early | _numbers_of(early)
    for node in gm.graph.nodes:
        if node in wanted or node.op == "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(())
    return GraphModule(gm, graph)
