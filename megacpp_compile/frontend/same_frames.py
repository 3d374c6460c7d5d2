"""Tells whether two frames of Dynamo are the same graph, of the same lines on values that are alike.

Where Dynamo gives a frame up, it goes on with the functions that this calls, and those of which one does nothing but
call the next, as wrappers around a model's forward do, are the same graph each time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node

from megacpp_compile._torch import modes
from megacpp_compile._torch.dispatch import is_traceable_wrapper_subclass
from megacpp_compile.frontend.hidden_writes import storage_id
from megacpp_compile.fx.edit import dynamo_value
from megacpp_compile.fx.provenance import module_fqn, source_line

_SYMBOL = re.compile(r"\bz?[suf]+\d+\b")
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def key_of(gm: GraphModule, example_inputs: Sequence[Any]) -> Hashable | None:
    """Equal for frames that are the same graph under the same modes, by whichever names the graph and Dynamo's symbols
    have. None where that cannot be told: of a graph that holds tensors or calls other graphs, and of tensors that have
    a class of their own."""
    nodes = list(gm.graph.nodes)
    values = [dynamo_value(n) for n in nodes]
    if any(n.op in ("get_attr", "call_module") for n in nodes) or any(map(_has_class, _flat([values, example_inputs]))):
        return None
    places = {node: f"<{i}>" for i, node in enumerate(nodes)}
    lines: list[tuple[str, ...]] = [
        (n.op, str(fx.map_arg((n.args, n.kwargs), places.__getitem__)), _described(value), *_place(n))
        for n, value in zip(nodes, values, strict=True)
    ]
    memory: dict[Any, int] = {}
    for x in example_inputs:
        kept = isinstance(x, torch.nn.Parameter), memory.setdefault(storage_id(x), len(memory))
        lines.append((*map(str, kept), _described(x)))
    symbols: dict[str, str] = {}
    text = _SYMBOL.sub(lambda found: symbols.setdefault(found[0], f"%{len(symbols)}"), "\n".join(map(str, lines)))
    targets = tuple(n.target for n in nodes if n.op != "placeholder")
    return hashlib.sha256(text.encode()).hexdigest(), targets, torch.is_grad_enabled(), str(modes.autocast_state())


def _place(node: Node) -> tuple[str, str]:
    """Where in the model a call is. Of an input Dynamo says at which line of the frame it has it."""
    return (module_fqn(node), source_line(node)) if node.op != "placeholder" else ("", "")


def _described(value: Any) -> str:
    """A value but for the numbers in it."""
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_described, value))})"
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}" if isinstance(value, _NUMBERS) else repr(value)
    laid_out = str(value.stride()) + str(value.storage_offset()) if value.layout is torch.strided else ""
    about = (value.dtype, value.device, value.layout, value.requires_grad, value.is_leaf)
    return f"{tuple(value.shape)} {laid_out} {about}"


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        yield from _flat(value) if isinstance(value, (list, tuple)) else (value,)


def _has_class(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)
