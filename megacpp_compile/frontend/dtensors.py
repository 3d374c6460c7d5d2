"""DTensors inside a frame: what of it is theirs, and the rest, which is captured as on one device.

Tensor parallelism wraps single layers: `from_local`, a linear on DTensors, `redistribute`, `to_local`. Which of them
communicate, forward and backward, is for DTensor's own dispatch to say, while AOTAutograd traces them. So calls on
DTensors stay as Dynamo wrote them, and `opaque_ops` carries them around capture like other calls that tracing may not
enter; their local results are inputs of what the passes see.

Capture before autograd cannot see through them: local ops would be differentiated without the gradients' sums over
ranks, and `aot_export_module` takes no tensor subclasses.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from megacpp_compile._torch.dispatch import is_traceable_wrapper_subclass
from megacpp_compile.errors import CaptureError
from megacpp_compile.fx.edit import called, dynamo_value, named_in_place
from megacpp_compile.fx.provenance import source_line

_WRITERS = frozenset(
    {operator.setitem, operator.delitem}
    | {
        getattr(operator, f"i{n}")
        for n in "add sub mul truediv floordiv mod pow and or xor matmul lshift rshift".split()
    }
)
_NUMBERS = (int, float, complex, bool, str, torch.SymInt, torch.SymFloat, torch.SymBool, type(None))


def dtensor_type() -> type | None:
    """DTensor, or None in a process that has not imported it and so has none."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_dtensor(value: Any) -> bool:
    kind = dtensor_type()
    return kind is not None and isinstance(value, kind)


def activations_in(value: Any) -> Iterator[Any]:
    """The DTensors in `value` that have tokens and channels."""
    return (leaf for leaf in leaves(value) if is_dtensor(leaf) and leaf.dim() > 2)


def calls_on_dtensors(gm: GraphModule, example_inputs: Sequence[Any]) -> frozenset[Node]:
    """Placeholders that are DTensors, or what describes them (a mesh), and calls that take or return either; empty for
    a frame without.

    Raises CaptureError where a call writes to a DTensor or to memory that one shares with a plain tensor: the passes
    see values, and would not see that the other changed. An input that the frame only writes to has no other.
    """
    kind = dtensor_type()
    if kind is None:
        return frozenset()
    holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    given = dict(zip(holders, example_inputs, strict=True))
    if not any(isinstance(v, kind) for v in example_inputs) and not any(
        any(isinstance(v, kind) for v in leaves(dynamo_value(n))) for n in gm.graph.nodes
    ):
        return frozenset()
    found: set[Node] = set()
    shared: set[Any] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if isinstance(given[node], kind) or not isinstance(given[node], (Tensor, *_NUMBERS)):
                found.add(node)
                shared.update(_storages([dynamo_value(node)]))
            continue
        if node.op == "output":
            continue
        operands = node.all_input_nodes
        own = any(isinstance(v, kind) for v in leaves(dynamo_value(node)))
        own = own or any(a in found and not crosses(a) for a in operands)
        if (
            writes(node)
            and not _only_written(node, holders)
            and (own or shared.intersection(_storages(map(dynamo_value, _written(node)))))
        ):
            name = getattr(node.target, "__name__", node.target)
            raise CaptureError(
                f"`{name}` writes to a DTensor or to memory that one shares ({source_line(node)}); compute a new "
                "tensor there, and the passes see the frame"
            )
        if own:
            found.add(node)
            shared.update(_storages(map(dynamo_value, (node, *operands))))
    return frozenset(found)


def _only_written(node: Node, holders: Sequence[Node]) -> bool:
    """Whether the call writes to a DTensor among the frame's inputs whose memory nothing else in the frame reads, such
    as a counter (`self.tokens_per_expert.add_(...)`)."""
    held = node.args[0] if node.args else None
    if node.op != "call_method" or node.users or not isinstance(held, Node) or held not in holders:
        return False
    if set(held.users) != {node}:
        return False
    if held in (*node.args[1:], *node.kwargs.values()):
        return False
    memory = _storages([dynamo_value(held)])
    return is_dtensor(dynamo_value(held)) and memory.isdisjoint(
        _storages(dynamo_value(h) for h in holders if h is not held)
    )


def crosses(node: Node) -> bool:
    """Whether the result of a call on DTensors is something that what is captured can take as an input."""
    value = dynamo_value(node)
    return isinstance(value, torch.SymInt) or isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)


def described(node: Node) -> str:
    """A call on DTensors in the words of a report, with how its DTensors are placed."""
    placed = [v.placements for a in node.all_input_nodes for v in leaves(dynamo_value(a)) if is_dtensor(v)]
    where = ", ".join(f"({', '.join(map(str, p))})" for p in placed)
    return f"a DTensor's {getattr(node.target, '__name__', node.target)} of tensors placed {where}"


def writes(node: Node) -> bool:
    """Whether Dynamo's call writes to a tensor it is given."""
    if node.op not in ("call_function", "call_method"):
        return False
    if "out" in node.kwargs or node.target in _WRITERS:
        return True
    if isinstance(node.target, FunctionType):
        with contextlib.suppress(TypeError, ValueError):  # no signature, or another one
            if inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get("inplace") is True:
                return True
    if (schema := getattr(node.target, "_schema", None)) is not None:
        return bool(schema.is_mutable)
    name = called(node)
    return named_in_place(name) or name in ("__setitem__", "__iadd__", "__imul__")


def _written(node: Node) -> Sequence[Node]:
    """The operands that a call may write to: of methods and operators the first, which others are read beside."""
    first = node.args[0] if node.args else None
    alone = "out" not in node.kwargs and (node.op == "call_method" or node.target in _WRITERS)
    return [first] if alone and isinstance(first, Node) else node.all_input_nodes


def leaves(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _storages(values: Iterable[Any]) -> set[Any]:
    """The memory of tensors, a DTensor's being that of its local tensor."""
    found = set()
    for leaf in (leaf for value in values for leaf in leaves(value)):
        if is_dtensor(leaf):
            found |= _storages(getattr(leaf, name) for name in leaf.__tensor_flatten__()[0])
        elif isinstance(leaf, Tensor) and not is_traceable_wrapper_subclass(leaf):
            found.add(leaf.untyped_storage()._cdata)
    return found
