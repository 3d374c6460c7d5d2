"""Regions of `torch.compiler.nested_compile_region`, which repeat: Dynamo traces one call and stamps out the others.

Dynamo's graph has a call of the higher-order op `invoke_subgraph` for each call of the region, on one graph that has
the names of the modules of the first. No pass sees into such a graph, so the calls are inlined, each with the names of
its own modules; as blocks that repeat, they are one code again (`frontend.repeated_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from megacpp_compile.fx.inlining import inlined
from megacpp_compile.fx.module_names import renamed
from megacpp_compile.fx.provenance import input_path, local_path, module_fqn

HOP = torch.ops.higher_order.invoke_subgraph
_OPERANDS = 2  # behind the graph and its name
_STACK = "nn_module_stack"


def inline_regions(gm: GraphModule) -> GraphModule:
    """Dynamo's graph `gm` itself where it has no region, or one with options of its own, else a copy without them."""
    if any("nested_region_config" in child.meta for child in gm.modules() if isinstance(child, GraphModule)):
        return gm
    first: dict[int, Node] = {}

    def entering(call: Node, body: GraphModule) -> Callable[[Node, Node], object]:
        return _renames(first.setdefault(id(body), call), call)

    return inlined(gm, HOP, _OPERANDS, entering)


def _renames(first: Node, call: Node) -> Callable[[Node, Node], object]:
    """Gives copies of a region's nodes the modules of `call`, where they have those of its `first` call."""
    if call is first:
        return lambda *_: None
    outside, own = first.meta.get(_STACK) or {}, call.meta.get(_STACK) or {}
    names = _names(first, call)

    def rename(_: Node, copy: Node) -> None:
        inside = {key: entry for key, entry in (copy.meta.get(_STACK) or {}).items() if key not in outside}
        # Keys are numbers of modules, of which those inside are the first call's.
        copy.meta[_STACK] = own | {
            f"{call.name}/{key}": (_renamed(path, names), kind) for key, (path, kind) in inside.items()
        }

    return rename


def _names(first: Node, call: Node) -> dict[str, str]:
    """Name in the first call -> name in this one of modules, by the names of weights and of the calling modules."""
    weights = zip(first.args[_OPERANDS:], call.args[_OPERANDS:], strict=True)
    paths = [(input_path(a)[1], input_path(b)[1]) for a, b in weights if isinstance(a, Node) and isinstance(b, Node)]
    paths.insert(0, (module_fqn(first), module_fqn(call)))
    return dict(_without_end(a, b) for a, b in paths if a != b)


def _without_end(a: str, b: str) -> tuple[str, str]:
    """("layers.0", "layers.3") of "layers.0.norm.weight" and "layers.3.norm.weight"."""
    one, other = a.split("."), b.split(".")
    while one and other and one[-1] == other[-1]:
        one.pop()
        other.pop()
    return ".".join(one), ".".join(other)


def _renamed(path: Any, names: Mapping[str, str]) -> str:
    """The path of a module, as Dynamo has it, with its name in another call."""
    root, name = local_path(str(path))
    new = renamed(name, names)
    return str(path) if new == name else f"L['{root}'].{new}" if root else new
