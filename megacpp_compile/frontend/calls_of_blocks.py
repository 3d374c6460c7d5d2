"""Reads Dynamo's graph call by call: which neighbouring calls are a block, and whether two such runs are equal."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols

from megacpp_compile._torch.dispatch import is_traceable_wrapper_subclass
from megacpp_compile._torch.dynamo import memory_budget_of
from megacpp_compile.errors import CaptureError
from megacpp_compile.frontend.opaque_ops import is_body
from megacpp_compile.fx.edit import attribute_of, dynamo_value
from megacpp_compile.fx.mode_states import mode_states
from megacpp_compile.fx.provenance import local_path

# A call of a piece costs what so many more calls in a compiled graph do.
CALL = 16
_SOURCES = ("placeholder", "get_attr", "output")
_PLAIN = (int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout,
          torch.memory_format, enum.Enum)  # fmt: skip
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# What rules over names say of a block: of its name, and of the names of the modules in it.
Rules = Callable[[str, Sequence[str]], Hashable]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Neighbouring calls of a graph.

    name, module: of the block's module in the model, and its class; "" between blocks. calls: in the graph's order.
    inputs: what they read from outside, by first use, and then the symbols of its sizes. outputs: what is read outside.
    kind: equal for pieces that are one graph.
    """

    name: str
    module: str
    calls: Sequence[Node]
    inputs: Sequence[Node]
    outputs: Sequence[Node]
    kind: Hashable

    def names_in(self, other: Piece, gm: GraphModule) -> dict[str, str]:
        """Name of each module of its calls -> name of that module in a piece that is equal to it."""
        found: dict[str, str] = {}
        for one, like in zip(all_calls(self.calls, gm), all_calls(other.calls, gm), strict=False):
            for (_, name, _), (_, new, _) in zip([*_modules(one)][::-1], [*_modules(like)][::-1], strict=False):
                found.setdefault(name, new)
        return found

    def joined(self, behind: Piece) -> Piece:
        """It and the piece right behind it, as one."""
        calls = dict.fromkeys((*self.calls, *behind.calls))
        inputs = dict.fromkeys((*self.inputs, *(n for n in behind.inputs if n not in calls)))
        outputs = [n for n in calls if any(user not in calls for user in n.users)]
        return Piece("", "", [*calls], [*inputs], outputs, (self.kind, behind.kind))

    def graph_of(self, gm: GraphModule) -> GraphModule:
        """It as a graph by itself, which returns a tuple."""
        graph, env = fx.Graph(), dict[Node, Node]()
        for node in self.inputs:
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
            if hasattr(node, "_dynamo_source"):
                env[node]._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
        for node in self.calls:
            for body in node.all_input_nodes:
                if body.op == "get_attr" and body not in env:
                    env[body] = graph.node_copy(body)
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[n] for n in self.outputs))
        piece = GraphModule(gm, graph)
        piece.meta.update(gm.meta)
        return piece


class NotCut(Exception):
    """Why a graph is left whole, in words. few: as there is next to nothing to spare."""

    def __init__(self, why: str, few: bool = False) -> None:
        super().__init__(why)
        self.few = few


@dataclasses.dataclass(frozen=True)
class Run:
    """The calls `first` to before `end`."""

    name: str
    module: str
    first: int
    end: int


class Reader:
    """A graph read call by call."""

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        self.gm = gm
        self.calls = [n for n in gm.graph.nodes if n.op not in _SOURCES]
        # Switches of modes belong to no module, wherever they stand.
        self.nobodys = [not n.meta.get("nn_module_stack") for n in self.calls]
        self.place = {n: i for i, n in enumerate(self.calls)}
        self.modules = {n: list(_modules(n)) for n in self.calls}
        self.held = {n: _bodies(n, gm) for n in self.calls}
        inputs = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
        self.given = {
            n: (_described(dynamo_value(n)), isinstance(x, torch.nn.Parameter), _other_gradient(x)) for n, x in inputs
        }
        self.read: list[list[Node]] = []
        try:
            self.states = mode_states(gm.graph)
        except (CaptureError, IndexError) as error:
            raise NotCut("an autocast region is not closed") from error
        self.ambient = self.states[next(iter(gm.graph.nodes))]
        self.codes: dict[Hashable, int] = {}
        self.own = [self._code(self._call(n, self.gm)) for n in self.calls]
        self.sizes = [1 + sum(len(b.graph.nodes) for b in self.bodies(n)) for n in self.calls]
        self.symbols = {str(v.node.expr): n for n in self.given if isinstance(v := dynamo_value(n), torch.SymInt)}

    def runs(self) -> Iterator[Run]:
        """The calls of each call of a module, and of each checkpoint region or other op that holds a graph, where they
        are neighbours."""
        first, last, count = dict[str, int](), dict[str, int](), Counter[str]()
        about: dict[str, tuple[str, str]] = {}
        for i, node in enumerate(self.calls):
            for key, path, module in self.modules[node]:
                first.setdefault(key, i)
                about.setdefault(key, (path, module))
                last[key] = i
                count[key] += 1
        nobodys = [0, *itertools.accumulate(self.nobodys)]
        for key, begin in first.items():
            end = last[key] + 1
            if count[key] + nobodys[end] - nobodys[begin] == end - begin < len(self.calls):
                yield self._closed(Run(*about[key], begin, self._after_parts(last[key])))
        for i, node in enumerate(self.calls):
            around = {key for key, _, _ in self.modules[node]}
            inside = (m for body in self.bodies(node) for n in body.graph.nodes for m in _modules(n))
            if (own := next((m for m in inside if m[0] not in around), None)) is not None:
                yield Run(own[1], own[2], i, self._after_parts(i))

    def _after_parts(self, last: int) -> int:
        """The first call behind `last` that takes no part of a tuple made there."""
        end = last + 1
        while end < len(self.calls) and self.calls[end].target is operator.getitem and (
            self.place.get(self.calls[end].args[0], -1) >= last  # type: ignore[arg-type]
        ):  # fmt: skip
            end += 1
        return end

    def _closed(self, run: Run) -> Run:
        """`run` with the switches of modes right around it that it runs between."""
        first, end = run.first, run.end
        while first and self.nobodys[first - 1] and self.states[self.calls[first]] != self.ambient:
            first -= 1
        while end < len(self.calls) and self.nobodys[end] and self.states[self.calls[end]] != self.ambient:
            end += 1
        return dataclasses.replace(run, first=first, end=end)

    def saved(self, runs: Sequence[Run]) -> int:
        """How many calls fewer there are to compile where `runs` are one graph."""
        size = sum(self.sizes[runs[0].first : runs[0].end]) if runs else 0
        return (len(runs) - 1) * size - CALL * len(runs)

    def kind_of(self, run: Run, rules: Rules = lambda *_: None) -> Hashable:
        """Equal for runs that are equal."""
        number: dict[Node, int] = {}
        lines: list[Hashable] = []
        for i in range(run.first, run.end):
            reads = []
            for node in self.read[i]:
                if node not in number:
                    number[node] = len(number)
                    lines.append(self._given(node))
                reads.append(number[node])
            number[self.calls[i]] = len(number)
            lines.append((self.own[i], tuple(reads)))
        lines.append(tuple(number[n] for n in self._outputs(run)))
        names = {path for n in self.calls[run.first : run.end] for _, path, _ in self._all_modules(n)}
        return tuple(lines), rules(run.name, sorted(n for n in names if f"{n}.".startswith(f"{run.name}.")))

    def piece(self, run: Run, kind: Hashable = None) -> Piece:
        calls = self.calls[run.first : run.end]
        inputs = dict.fromkeys(n for i in range(run.first, run.end) for n in self.read[i] if not self._inside(n, run))
        sized = (*inputs, *calls) if self.symbols else ()
        wanted = {s for n in sized for s in symbols_of(dynamo_value(n))}
        inputs |= dict.fromkeys(n for symbol, n in self.symbols.items() if symbol in wanted)
        kind = self.kind_of(run) if kind is None else kind
        return Piece(run.name, run.module, calls, list(inputs), self._outputs(run), kind)

    def _inside(self, node: Node, run: Run) -> bool:
        return run.first <= self.place.get(node, -1) < run.end

    def _outputs(self, run: Run) -> list[Node]:
        return [n for n in self.calls[run.first : run.end] if any(not self._inside(u, run) for u in n.users)]

    def _given(self, node: Node) -> Hashable:
        """A value that comes from outside."""
        if node.op == "get_attr":
            return _described(attribute_of(self.gm, node.target))
        return self.given.get(node) or (_described(dynamo_value(node)), False, False)

    def _call(self, node: Node, owner: GraphModule) -> Hashable:
        """A call of the graph but for what it reads, which is noted."""
        read: list[Node] = []
        self.read.append(read)
        return self._line(node, owner, read)

    def _line(self, node: Node, owner: GraphModule, read: list[Node]) -> Hashable:
        said = (self._argument(node.args, owner, read), self._argument(node.kwargs, owner, read))
        target = node.target
        if node.op == "call_module":
            target = self._body(attribute_of(owner, node.target))  # type: ignore[assignment]
        more = (str(node.meta.get("custom") or ""), str(memory_budget_of(node)))
        return node.op, target, said, _described(dynamo_value(node)), more

    def _argument(self, a: Any, owner: GraphModule, read: list[Node]) -> Hashable:
        if isinstance(a, Node):
            if is_body(owner, a):
                return "body", self._body(attribute_of(owner, a.target))
            read.append(a)
            return Node
        if isinstance(a, (list, tuple)):
            return type(a), tuple(self._argument(x, owner, read) for x in a)
        if isinstance(a, dict):
            return dict, tuple((k, self._argument(v, owner, read)) for k, v in a.items())
        if isinstance(a, slice):
            return slice, tuple(self._argument(x, owner, read) for x in (a.start, a.stop, a.step))
        if isinstance(a, (*_PLAIN, *_NUMBERS)):
            return type(a), str(a)
        return "object", id(a)

    def _body(self, module: Any) -> Hashable:
        """A graph that is called; another module is equal to itself alone."""
        if not isinstance(module, GraphModule):
            return "module", id(module)
        number, lines = dict[Node, int](), list[Hashable]()
        for node in module.graph.nodes:
            number[node] = len(number)
            read: list[Node] = []
            if node.op == "get_attr" and not is_body(module, node):
                lines.append(("object", id(attribute_of(module, node.target))))
            elif node.op == "placeholder":
                lines.append(_described(dynamo_value(node)))
            elif node.op != "get_attr":
                lines.append((self._line(node, module, read), tuple(number[n] for n in read)))
        return tuple(lines), _function(module.meta.get("_checkpoint_context_fn"))

    def _code(self, what: Hashable) -> int:
        return self.codes.setdefault(what, len(self.codes))

    def bodies(self, node: Node) -> list[GraphModule]:
        return self.held.get(node, [])

    def _all_modules(self, node: Node) -> Iterator[tuple[str, str, str]]:
        yield from self.modules[node]
        for body in self.bodies(node):
            for inner in body.graph.nodes:
                yield from _modules(inner)


def _bodies(node: Node, gm: GraphModule) -> list[GraphModule]:
    """The graphs that a call of Dynamo's graph `gm` is given."""
    held = [attribute_of(gm, n.target) for n in node.all_input_nodes if is_body(gm, n)]
    return [body for body in held if isinstance(body, GraphModule)]


def all_calls(calls: Iterable[Node], gm: GraphModule) -> Iterator[Node]:
    """`calls`, each before those of the graphs that it is given."""
    for node in calls:
        yield node
        for body in _bodies(node, gm):
            yield from (inner for inner in body.graph.nodes if inner.op != "get_attr")


def _modules(node: Node) -> Iterator[tuple[str, str, str]]:
    """(call of the module, its name in the model, its class) for each module around `node`, the outermost first."""
    for key, entry in (node.meta.get("nn_module_stack") or {}).items():
        if isinstance(entry, tuple):
            path = str(entry[0])  # one module that a list holds twice has one key
            yield f"{key} {path}", local_path(path)[1], str(getattr(entry[1], "__name__", entry[1])).rpartition(".")[2]


def _other_gradient(x: Any) -> bool:
    """Whether the gradient of an input has a dtype of its own."""
    return isinstance(x, torch.Tensor) and x.is_leaf and getattr(x, "grad_dtype", None) not in (None, x.dtype)


def _function(f: Any) -> Hashable:
    """What decides in a checkpoint region: equal for one function of the same arguments."""
    if (inner := getattr(f, "func", None)) is not None and not f.keywords and all(map(callable, f.args)):
        return id(inner), tuple(map(id, f.args))
    return id(f)


def _described(value: Any) -> Hashable:
    """A value but for the numbers in it."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_described, value))
    if not isinstance(value, torch.Tensor):
        return type(value), str(value)
    strided = value.layout is torch.strided and not is_traceable_wrapper_subclass(value)
    laid_out = (str(value.stride()), str(value.storage_offset())) if strided else id(value)
    return str(tuple(value.shape)), laid_out, value.dtype, value.device, value.layout, value.requires_grad


def symbols_of(value: Any) -> set[str]:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return {str(s) for v in values if isinstance(v, (torch.Tensor, *_NUMBERS)) for s in free_symbols(v)}
