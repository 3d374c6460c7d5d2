"""Puts a few steps in the place of each loop of which Dynamo translated one, at a position that is a symbol.

A step may read a tensor from before the loop at its position, one of as many parts of a dimension as there are steps,
and write there; read any other tensor whole; replace tensors; and leave a tensor for a list. `CannotRepeat` says what
else it does. Where the first step is at the last part, and so on back to the first, the parts are put in the order of
the steps in front of the loop, and those that are written are put back behind it.
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
from megacpp_compile.errors._attempts import GivenUp
from megacpp_compile.frontend.checkpoint import TAGS, inline_checkpoints
from megacpp_compile.frontend.hidden_writes import storage_of, written_tensors
from megacpp_compile.fx import short_loops
from megacpp_compile.fx.edit import all_nodes, dynamo_value

NOT_FROM_AN_END = "a tensor is not read from its first or its last part on, part by part"
# How many steps stand for all: a number that divides no size beside them.
STEPS = (5, 7, 11, 13, 17)


class CannotRepeat(GivenUp):
    """A loop that is to be traced with all steps: a sentence without its full stop. loop: its number, where one is."""

    loop: int | None = None


@dataclasses.dataclass
class _Loop:
    """One loop. position: its node; body: the nodes of its step; results: marks on tensors that the step replaces.

    sources: what is read or written at the position, and along which dimension; written: those that are written to.
    backward: whether the first step is at the last part; None where no step has a part.
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
        self.backward: bool | None = None
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
        try:
            _check(loop, nodes[: place[first]], nodes[place[end] :])
        except CannotRepeat as why:
            why.loop = number
            raise
        yield loop


def _check(loop: _Loop, before: list[Node], after: list[Node]) -> None:
    for node in loop.body:
        _check_node(loop, node)
        leaves = [u for u in node.users if u not in loop.inside and u not in loop.results]
        CannotRepeat.when(
            any(u.target is not short_loops.collected for u in leaves), "a value of its step is read behind it"
        )
    ahead = {s: n for n in before if (s := storage_of(n)) is not None}
    late = set(after)
    changed = {id(n): n for n in loop.body for n in written_tensors(n) if storage_of(n) in ahead}
    for storage in {storage_of(n) for n in changed.values()}:
        of = [n for n in before if storage_of(n) == storage]
        read = [n for n in of if any(u in loop.inside or u in loop.results for u in n.users)]
        CannotRepeat.when(
            len(read) != 1 or any(n.op in ("placeholder", "get_attr") for n in of),
            "it writes to a tensor that others hold",
        )
        others = [n for n in of if n is not read[0] or n not in loop.sources]
        CannotRepeat.when(
            any(u in late for n in others for u in n.users), "it writes to a tensor that has another name behind it"
        )
        if read[0] in loop.sources:
            CannotRepeat.when(
                any(u in loop.inside and not _positioned(loop, u) for u in read[0].users),
                "it writes to a tensor that it also reads whole",
            )
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
    CannotRepeat.when(
        node.op not in ("call_function", "call_method") or isinstance(value, torch.SymBool | torch.SymFloat),
        f"{node.name} is no plain call",
    )
    values = value if isinstance(value, list | tuple) else [value]
    for one in values:
        CannotRepeat.when(
            isinstance(one, torch.Tensor) and any(loop.symbol in _symbols(s) for s in (*one.shape, *one.stride())),
            f"the size of {node.name} depends on its position",
        )
    if not _positioned(loop, node) or isinstance(value, torch.SymInt):
        return
    source: Any = node.args[0] if node.args else None
    CannotRepeat.when(
        not isinstance(source, Node) or source in loop.inside or not isinstance(dynamo_value(source), torch.Tensor),
        f"{node.name} goes by its position otherwise than to read a tensor from before it",
    )
    part = value
    if node.target is operator.setitem:
        part = _part_written(node, source)
    elif storage_of(node) != storage_of(source):
        raise CannotRepeat(f"{node.name} is no part of what it reads at its position")
    dim = _dimension(loop, dynamo_value(source), part)
    CannotRepeat.when(loop.sources.setdefault(source, dim) != dim, f"{source.name} is read along several dimensions")


def _part_written(node: Node, source: Node) -> torch.Tensor:
    whole = dynamo_value(source)
    index = fx.map_arg(node.args[1], dynamo_value)
    with whole.fake_mode, torch.no_grad():
        part: torch.Tensor = whole.detach()[index]
    CannotRepeat.when(
        part.untyped_storage()._cdata != whole.untyped_storage()._cdata, f"{node.name} writes to no part of a tensor"
    )
    return part


def _dimension(loop: _Loop, whole: torch.Tensor, part: torch.Tensor) -> int:
    """The dimension of `whole` of which `part` is one of as many parts as there are steps, in order."""
    offset: Any = part.storage_offset() - whole.storage_offset()
    moved: Any = offset.node.expr.expand() if isinstance(offset, torch.SymInt) else None
    each: Any = moved.coeff(loop.symbol, 1) if moved is not None else None
    CannotRepeat.when(each is None or not each.is_Integer, NOT_FROM_AN_END)
    backward = bool(each < 0)
    first = -each * (loop.count - 1) if backward else 0
    CannotRepeat.when((moved - each * loop.symbol - first).expand() != 0, NOT_FROM_AN_END)
    CannotRepeat.when(loop.backward not in (None, backward), "it reads one tensor forwards and another one backwards")
    loop.backward = backward
    shape, strides = _known(whole.shape), _known(whole.stride())
    found = []
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if not size or not stride or size % loop.count or size == 1:
            continue
        if stride * (size // loop.count) == abs(int(each)):
            found.append(dim)
    unknown = [pair for pair in zip(whole.shape, whole.stride(), strict=True) if None in _known(pair)]
    kept = list(zip(part.shape, part.stride(), strict=True))
    CannotRepeat.when(
        len(found) != 1 or any(not any(_same(pair, other) for other in kept) for pair in unknown),
        "a tensor is not read whole, part by part",
    )
    length = (shape[found[0]] or 0) // loop.count
    own = [s for s, stride in zip(part.shape, part.stride(), strict=True) if stride == whole.stride()[found[0]]]
    CannotRepeat.when(
        length > 1 and length not in own or length == 1 and part.dim() == whole.dim() and part.shape[found[0]] != 1,
        "a tensor is read with gaps or overlaps",
    )
    return found[0]


def _known(sizes: Iterable[Any]) -> list[int | None]:
    """Sizes or strides, of which a guard may have made numbers; None for symbols."""
    return [n if isinstance(n, int) else n.node.maybe_as_int() for n in sizes]


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether two sizes with their strides are the same numbers or symbols; without a guard."""
    return all(a is b or str(a) == str(b) for a, b in zip(one, other, strict=True))


def _steps(graph: Graph) -> int:
    sizes = {s for n in graph.nodes if isinstance(v := dynamo_value(n), torch.Tensor) for s in _known(v.shape)}
    for steps in STEPS:
        if not any(s % steps == 0 for s in sizes if s):
            return steps
    raise CannotRepeat("every number of steps divides a size of the frame")


def _repeat(graph: Graph, env: dict[Node, Any], loop: _Loop, short: int) -> None:
    local: dict[Node, Any] = {}
    tags = {name: loop.position.meta[name] for name in TAGS if name in loop.position.meta}
    for source, dim in loop.sources.items():
        whole = env[source]
        if loop.backward:
            whole = _flipped(graph, whole, dim, loop.count, dynamo_value(source), tags)
        args = (whole, dim, short, loop.count)
        local[source] = _mark(graph, short_loops.shortened, args, dynamo_value(source), tags)
    carried = {r.args[0]: env[r.args[0]] for r in loop.results}
    for at in range(short):
        step: dict[Node, Any] = {loop.position: loop.count - 1 - at if loop.backward else at}
        for node in loop.body:
            _step(graph, env, loop, node, step, local, carried)
        carried = {r.args[0]: step.get(r.args[1], env.get(r.args[1])) for r in loop.results}
        loop.steps.append(step)
    for result in loop.results:
        args = (carried[result.args[0]], -1, short, loop.count)
        env[result] = _mark(graph, short_loops.lengthened, args, dynamo_value(result), tags)
    for source in loop.written:
        dim, fake = loop.sources[source], dynamo_value(source)
        env[source] = _mark(graph, short_loops.lengthened, (local[source], dim, short, loop.count), fake, tags)
        if loop.backward:
            env[source] = _flipped(graph, env[source], dim, loop.count, fake, tags)


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


def _flipped(graph: Graph, node: Node, dim: int, count: int, fake: Any, tags: dict[str, Any]) -> Node:
    """The parts of a tensor in the opposite order."""
    parts = fake.shape[dim] // count
    calls: list[tuple[Any, tuple[Any, ...]]] = [(torch.flip, ([dim],))]
    if parts > 1:
        calls = [(torch.unflatten, (dim, [count, parts])), *calls, (torch.flatten, (dim, dim + 1))]
    for function, args in calls:
        node = graph.call_function(function, (node, *args))
        fake = _fake(lambda x, f=function, given=args: f(x, *given), fake)
        node.meta |= {**tags, "example_value": fake}
    return node


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
