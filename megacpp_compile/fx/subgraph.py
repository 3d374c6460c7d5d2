"""The part of a graph between some inputs and some outputs, with the autocast switches around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node, map_arg

from megacpp_compile._torch.ops import OpOverload
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.mode_states import autocast_pairs
from megacpp_compile.fx.provenance import input_path
from megacpp_compile.fx.views import values_read
from megacpp_compile.fx.walks import reached

SHOWN = 48  # calls of a part that `described` lists


def inside(inputs: Sequence[Node], outputs: Sequence[Node]) -> set[Node]:
    """The calls that compute `outputs` from `inputs` and from the other graph inputs they need; what is read for its
    shape or dtype alone is given."""
    border = set(inputs)

    def is_inside(node: Node) -> bool:
        return node not in border and node.op not in ("placeholder", "get_attr")

    return set(reached(filter(is_inside, outputs), lambda node: filter(is_inside, values_read(node))))


@dataclasses.dataclass(frozen=True)
class Part:
    """What computes `outputs`: inputs and calls in the order of the graph."""

    inputs: list[Node]
    calls: list[Node]
    outputs: Sequence[Node]

    def module(self) -> GraphModule:
        """It as a module by itself."""
        graph = fx.Graph()
        env = {}
        for node in self.inputs:
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
        for node in self.calls:
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[n] for n in self.outputs))
        return GraphModule(torch.nn.Module(), graph)

    def code(self) -> tuple[Any, ...]:
        """Equal for parts that compute the same of what they are given, whatever their nodes are called."""
        number = {node: f"%{i}" for i, node in enumerate((*self.inputs, *self.calls))}
        named = [map_arg((n.args, n.kwargs), lambda a: _Named(number[a])) for n in self.calls]
        calls = [(n.op, n.target, repr(args)) for n, args in zip(self.calls, named, strict=True)]
        return len(self.inputs), tuple(calls), tuple(number[n] for n in self.outputs)


class _Named(str):
    """A node among arguments: told from a text that is one."""

    __repr__ = str.__str__


def between(gm: GraphModule, inputs: Sequence[Node], outputs: Sequence[Node]) -> Part:
    """What computes `outputs` from `inputs` and from the other graph inputs they need, autocast switches around it."""
    keep, border = inside(inputs, outputs), set(inputs)
    border |= {n for node in (*keep, *outputs) for n in (*node.all_input_nodes, node)} - keep
    for switches in autocast_pairs(gm.graph):
        if any(switches[0] < node < switches[1] for node in keep):
            keep.update(switches)
    return Part(sorted(border), sorted(keep), outputs)


def described(part: Part, readers: Mapping[Node, Sequence[Node]]) -> dict[str, Any]:
    """A part and its neighbours as plain data: "nodes", and how many calls are "left_out" between the first and the
    last half of `SHOWN`. Of each node its "name", "role" ("input", "call", "output" or "reader"), "op" (of an input
    of the graph its name in the model), the names of those of its "inputs" that are shown, and its "value" as dtype
    and shape. readers: who reads the outputs -> which."""
    half, calls = SHOWN // 2, part.calls
    left_out = max(0, len(calls) - SHOWN)
    calls = [*calls[:half], *calls[-half:]] if left_out else calls
    wanted = {n for call in (*calls, *part.outputs) for n in (*call.all_input_nodes, call)}
    roles = {n: "input" for n in part.inputs if n in wanted}
    roles |= {n: "output" if n in part.outputs else "call" for n in calls}
    nodes = [_described(n, role, [a.name for a in n.all_input_nodes if a in roles and role != "input"])
             for n, role in roles.items()]  # fmt: skip
    nodes += [_described(n, "reader", [a.name for a in read]) for n, read in readers.items()]
    return {"nodes": nodes, "left_out": left_out}


def _described(node: Node, role: str, inputs: list[str]) -> dict[str, Any]:
    op = node.op
    if node.op == "placeholder":
        root, path = input_path(node)
        op = path if path and not path.isdecimal() else ".".join(filter(None, (root, path))) or op
    elif node.op == "call_function":
        op = str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", op)
    return {"name": node.name, "role": role, "op": op, "inputs": inputs, "value": _value_text(value(node))}


def _value_text(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}[{', '.join(map(str, x.shape))}]"
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(_value_text, x))})"
    return type(x).__name__ if x is not None else ""
