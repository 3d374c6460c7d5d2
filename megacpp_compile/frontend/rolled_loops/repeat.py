"""Puts a few steps in the place of each loop of which Dynamo translated one, at a position that is a symbol.

A step may read a tensor from before the loop at its position, one of as many parts of a dimension as there are steps,
and write there; read any other tensor whole; replace tensors; and leave a tensor for a list. `CannotRepeat` says what
else it does.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx import Graph, GraphModule, Node

from megacpp_compile._torch.fakes import FakeTensor
from megacpp_compile.frontend.checkpoint import TAGS, inline_checkpoints
from megacpp_compile.frontend.hidden_writes import storage_of, written_tensors
from megacpp_compile.fx import short_loops
from megacpp_compile.fx.edit import all_nodes, dynamo_value

# How many steps stand for all: a number that divides no size beside them.
STEPS = (5, 7, 11, 13, 17)


class CannotRepeat(Exception):
    """A loop that is to be traced with all steps: a sentence without its full stop."""


@dataclasses.dataclass
class _Loop:
    """One loop. position: its node; body: the nodes of its step; results: marks on tensors that the step replaces.

    sources: what is read or written at the position, and along which dimension; written: those that are written to.
    steps: the nodes of each step that is repeated, by those of `body`.
    """

    number: int
    count: int
    position: Node
    body: list[Node]
    results: list[Node]
    end: Node

    def __post_init__(self) -> None:
        self.symbol: Any = dynamo_value(self.position).node.expr
        self.inside = {*self.body, self.position}
        self.sources: dict[Node, int] = {}
        self.written: list[Node] = []
        self.steps: list[dict[Node, Any]] = []


def rolled(gm: GraphModule) -> bool:
    """Whether the graph has a loop of which it holds one step."""
    return any(n.target is short_loops.position for n in all_nodes(gm))


def short(gm: GraphModule) -> list[Node]:
    """The marks of loops in `gm` of which it holds a few steps."""
    return short_loops.marks(gm.graph)


def check(gm: GraphModule, rewritten: GraphModule | None) -> None:
    """Raises CannotRepeat where loops of `gm` that are not as long as they are to be are left in `rewritten`."""
    if short(gm) and (left := short_loops.marks((rewritten or gm).graph)):
        raise CannotRepeat(f"nothing was put in the place of a loop ({left[0].name})")


def repeated(gm: GraphModule) -> GraphModule:
    """`gm`, of whose loops a few steps are repeated, with marks on what they take and leave. Raises CannotRepeat."""
    whole = gm
    fakes = (v for n in gm.graph.nodes if isinstance(v := dynamo_value(n), FakeTensor))
    if (fake := next(fakes, None)) is not None:
        gm = inline_checkpoints(gm, fake.fake_mode)  # loops are put into the frame's own graph
    loops = list(_loops(gm.graph))
    short = _steps(gm.graph)
    by_position = {loop.position: loop for loop in loops}
    graph, env = Graph(), dict[Node, Any]()
    inside = {n for loop in loops for n in (*loop.inside, *loop.results, loop.end)}
    for node in gm.graph.nodes:
        if node in by_position:
            _repeat(graph, env, by_position[node], short)
        elif node.target is short_loops.collected:
            loop = next(x for x in loops if x.number == node.args[-1])
            _collect(graph, env, node, loop, short)
        elif node not in inside:
            _copy(graph, env, node, env)
    new = GraphModule(gm, graph)
    new.meta.update(gm.meta)
    for name in ("compile_subgraph_reason", "_param_name_to_source"):
        if hasattr(whole, name):
            setattr(new, name, getattr(whole, name))
    return new


def _copy(graph: Graph, env: dict[Node, Any], node: Node, into: dict[Node, Any]) -> None:
    new = graph.node_copy(node, lambda n: env[n])
    if hasattr(node, "_dynamo_source"):
        new._dynamo_source = node._dynamo_source
    into[node] = new


def _loops(graph: Graph) -> Iterator[_Loop]:
    nodes = list(graph.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    for first in graph.find_nodes(op="call_function", target=short_loops.position):
        number, count = first.args
        end = next(n for n in graph.find_nodes(op="call_function", target=short_loops.end) if n.args[0] == number)
        between = nodes[place[first] + 1 : place[end]]
        results = [n for n in between if n.target is short_loops.result]
        loop = _Loop(number, count, first, [n for n in between if n not in results], results, end)
        _check(loop, nodes[: place[first]], nodes[place[end] :])
        yield loop


def _check(loop: _Loop, before: list[Node], behind: list[Node]) -> None:
    for node in loop.body:
        _check_node(loop, node)
        leaves = [u for u in node.users if u not in loop.inside and u not in loop.results]
        if any(u.target is not short_loops.collected for u in leaves):
            raise CannotRepeat("a value of its step is read behind it")
    ahead = {s: n for n in before if (s := storage_of(n)) is not None}
    late = set(behind)
    changed = {id(n): n for n in loop.body for n in written_tensors(n) if storage_of(n) in ahead}
    for storage in {storage_of(n) for n in changed.values()}:
        of = [n for n in before if storage_of(n) == storage]
        read = [n for n in of if any(u in loop.inside or u in loop.results for u in n.users)]
        if len(read) != 1 or any(n.op in ("placeholder", "get_attr") for n in of):
            raise CannotRepeat("it writes to a tensor that others hold")
        others = [n for n in of if n is not read[0] or n not in loop.sources]
        if any(u in late for n in others for u in n.users):
            raise CannotRepeat("it writes to a tensor that has another name behind it")
        if read[0] in loop.sources:
            if any(u in loop.inside and not _positioned(loop, u) for u in read[0].users):
                raise CannotRepeat("it writes to a tensor that it also reads whole")
            loop.written.append(read[0])
        elif not any(r.args[0] is read[0] for r in loop.results):
            raise CannotRepeat("it writes to a tensor from before it")


def _symbols(value: Any) -> set[Any]:
    return value.node.expr.free_symbols if isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat) else set()


def _positioned(loop: _Loop, node: Node) -> bool:
    """Whether a number that the position makes is an argument of `node`."""
    return any(loop.symbol in _symbols(dynamo_value(a)) for a in node.all_input_nodes)


def _check_node(loop: _Loop, node: Node) -> None:
    value = dynamo_value(node)
    if node.op not in ("call_function", "call_method") or isinstance(value, torch.SymBool | torch.SymFloat):
        raise CannotRepeat(f"{node.name} is no plain call")
    values = value if isinstance(value, list | tuple) else [value]
    for one in values:
        if isinstance(one, torch.Tensor) and any(loop.symbol in _symbols(s) for s in (*one.shape, *one.stride())):
            raise CannotRepeat(f"the size of {node.name} depends on its position")
    if not _positioned(loop, node) or isinstance(value, torch.SymInt):
        return
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or source in loop.inside or not isinstance(dynamo_value(source), torch.Tensor):
        raise CannotRepeat(f"{node.name} goes by its position otherwise than to read a tensor from before it")
    part = value
    if node.target is operator.setitem:
        part = _part_written(node, source)
    elif storage_of(node) != storage_of(source):
        raise CannotRepeat(f"{node.name} is no part of what it reads at its position")
    dim = _dimension(loop, dynamo_value(source), part)
    if loop.sources.setdefault(source, dim) != dim:
        raise CannotRepeat(f"{source.name} is read along several dimensions")


def _part_written(node: Node, source: Node) -> torch.Tensor:
    whole = dynamo_value(source)
    index = fx.map_arg(node.args[1], dynamo_value)
    with whole.fake_mode, torch.no_grad():
        part: torch.Tensor = whole.detach()[index]
    if part.untyped_storage()._cdata != whole.untyped_storage()._cdata:
        raise CannotRepeat(f"{node.name} writes to no part of a tensor")
    return part


def _dimension(loop: _Loop, whole: torch.Tensor, part: torch.Tensor) -> int:
    """The dimension of `whole` of which `part` is one of as many parts as there are steps, in order."""
    offset: Any = part.storage_offset() - whole.storage_offset()
    moved = offset.node.expr.expand() if isinstance(offset, torch.SymInt) else None
    each = moved.coeff(loop.symbol, 1) if moved is not None else None
    if each is None or not each.is_Integer or (moved - each * loop.symbol).expand() != 0:
        raise CannotRepeat("a tensor is not read from its beginning on, part by part")
    found = []
    for dim, (size, stride) in enumerate(zip(_numbers(whole.shape), _numbers(whole.stride()), strict=True)):
        if not stride or size % loop.count or size == 1:
            continue
        if stride * (size // loop.count) == int(each):
            found.append(dim)
    if len(found) != 1:
        raise CannotRepeat("a tensor is not read whole, part by part")
    length = _numbers(whole.shape)[found[0]] // loop.count
    own = [s for s, stride in zip(part.shape, part.stride(), strict=True) if stride == whole.stride()[found[0]]]
    if length > 1 and length not in own or length == 1 and part.dim() == whole.dim() and part.shape[found[0]] != 1:
        raise CannotRepeat("a tensor is read with gaps or overlaps")
    return found[0]


def _numbers(sizes: Iterable[Any]) -> list[int]:
    """Sizes or strides, of which a guard may have made numbers."""
    found = [n if isinstance(n, int) else n.node.maybe_as_int() for n in sizes]
    if None in found:
        raise CannotRepeat("a size is not known before the frame runs")
    return found


def _steps(graph: Graph) -> int:
    whole = {s for n in graph.nodes if isinstance(v := dynamo_value(n), torch.Tensor) for s in _numbers(v.shape)}
    for steps in STEPS:
        if not any(s % steps == 0 for s in whole if s):
            return steps
    raise CannotRepeat("every number of steps divides a size of the frame")


def _repeat(graph: Graph, env: dict[Node, Any], loop: _Loop, short: int) -> None:
    local: dict[Node, Any] = {}
    tags = {name: loop.position.meta[name] for name in TAGS if name in loop.position.meta}
    for source, dim in loop.sources.items():
        args = (env[source], dim, short, loop.count)
        local[source] = _mark(graph, short_loops.shortened, args, dynamo_value(source), tags)
    carried = {r.args[0]: env[r.args[0]] for r in loop.results}
    for at in range(short):
        step: dict[Node, Any] = {loop.position: at}
        for node in loop.body:
            _step(graph, env, loop, node, step, local, carried)
        carried = {r.args[0]: step.get(r.args[1], env.get(r.args[1])) for r in loop.results}
        loop.steps.append(step)
    for result in loop.results:
        args = (carried[result.args[0]], -1, short, loop.count)
        env[result] = _mark(graph, short_loops.lengthened, args, dynamo_value(result), tags)
    for source in loop.written:
        args = (local[source], loop.sources[source], short, loop.count)
        env[source] = _mark(graph, short_loops.lengthened, args, dynamo_value(source), tags)


def _step(
    graph: Graph, env: dict[Node, Any], loop: _Loop, node: Node, step: dict[Node, Any], local: dict[Node, Any],
    carried: dict[Any, Any],
) -> None:  # fmt: skip
    positioned = _positioned(loop, node)

    def mapped(n: Node) -> Any:
        if n in step:
            return step[n]
        if n in carried:
            return carried[n]
        return local[n] if positioned and n in local and n is node.args[0] else env[n]

    if isinstance(dynamo_value(node), torch.SymInt) and positioned:
        args = fx.map_arg(node.args, mapped)
        step[node] = node.target(*args)  # type: ignore[operator]
        return
    new = graph.create_node(
        node.op, node.target, fx.map_arg(node.args, mapped), fx.map_arg(node.kwargs, mapped), type_expr=node.type
    )
    new.meta = dict(node.meta)
    step[node] = new


def _collect(graph: Graph, env: dict[Node, Any], node: Node, loop: _Loop, short: int) -> None:
    each: Any
    each, dim, _, joined, _ = node.args
    parts = [step.get(each, env.get(each)) for step in loop.steps]
    made = graph.call_function(torch.cat if joined else torch.stack, (parts, dim))
    made.meta = dict(node.meta)
    fake = dynamo_value(node)
    made.meta["example_value"] = _fake(short_loops.resized, fake, dim, loop.count, short)
    tags = {name: node.meta[name] for name in TAGS if name in node.meta}
    env[node] = _mark(graph, short_loops.lengthened, (made, dim, short, loop.count), fake, tags)


def _mark(graph: Graph, op: Any, args: tuple[Any, ...], whole: torch.Tensor, tags: dict[str, Any]) -> Node:
    """tags: of a checkpointed block around it."""
    node = graph.call_function(op, args)
    node.meta |= tags
    _, dim, short, count = args
    long = op is short_loops.lengthened
    node.meta["example_value"] = _fake(short_loops.resized, whole, dim, count, count if long else short)
    return node


def _fake(function: Any, fake: Any, *args: Any) -> torch.Tensor:
    with fake.fake_mode, torch.no_grad():
        found: torch.Tensor = function(fake, *args)
    return found.requires_grad_(fake.requires_grad)
