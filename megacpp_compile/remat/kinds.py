"""Which block of the model a forward node belongs to, and of what kind that block is.

Layers are the numbered modules ("layers.3") that repeat; a block is a direct child of a layer, or of the frame where a
layer is compiled by itself, with the norm in front of it. A block is told by what it computes: attention ("ablock"), a
scan or a causal convolution ("mblock"), other matrix products ("eblock"), and by the user's own patterns before that.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.fx import Node

from megacpp_compile.provenance import module_fqn
from megacpp_compile.remat.nodes import is_core, is_product

_RECURRENT = ("gru", "lstm", "rnn")


@dataclasses.dataclass(frozen=True)
class Place:
    """`layer`: its FQN, "" for the frame itself; `block`: the FQN of the block, None between blocks; `kind`: one of
    `policy.KINDS`, or "" where none is known."""

    layer: str
    block: str | None
    kind: str


def split(fqn: str) -> tuple[str, str | None]:
    """("model.layers.3", "self_attn") of "model.layers.3.self_attn.q_proj"; no number: ("", first part)."""
    parts = [p for p in fqn.split(".") if p]
    numbers = [i for i, p in enumerate(parts) if p.isdigit()]
    depth = numbers[0] + 1 if numbers else 0
    return ".".join(parts[:depth]), parts[depth] if len(parts) > depth else None


def places(forward: Sequence[Node], patterns: Mapping[str, str]) -> tuple[dict[Node, Place], set[str]]:
    """The place of every forward node, and the patterns that hit something."""
    fqns: dict[Node, str] = {}
    last = ""
    for node in forward:  # what a pattern of Inductor's put in place has no module: it is where its neighbours are
        last = fqns[node] = module_fqn(node) or _through(node, fqns) or last
    blocks: dict[tuple[str, str | None], list[Node]] = {}
    for node in forward:
        blocks.setdefault(split(fqns[node]), []).append(node)
    hit: set[str] = set()
    kinds: dict[tuple[str, str | None], str] = {}
    for (layer, child), nodes in blocks.items():
        name = f"{layer}.{child}".strip(".") if child else layer
        chosen = next((p for p in patterns if fnmatch.fnmatchcase(name, p)), None)
        if chosen is not None:
            hit.add(chosen)
        kinds[layer, child] = patterns[chosen] if chosen is not None else kind_of(nodes) if child else ""
    found: dict[Node, Place] = {}
    for node in forward:
        layer, child = split(fqns[node])
        kind = kinds[layer, child]
        found[node] = Place(layer, child if kind else None, kind)
    return found, hit


def _through(node: Node, fqns: Mapping[Node, str]) -> str:
    return next((fqns[a] for a in node.all_input_nodes if fqns.get(a)), "")


def kind_of(nodes: Iterable[Node]) -> str:
    """The kind of a block by its operations; "" for one that multiplies no matrices, such as a norm."""
    names = {str(n.target) for n in nodes}
    stack = {str(t).lower() for n in nodes for t in _types(n)}
    if any("ssd_scan" in n or "causal_conv1d" in n or "conv1d" in n for n in names) or any(
        n.target is torch.ops.aten.convolution.default for n in nodes
    ):
        return "mblock"
    if any(is_core(n) for n in nodes) or any("mla_rope" in n or "rope_qk" in n for n in names):
        return "ablock"
    if any("softmax" in n for n in names) and sum("bmm" in str(n.target) for n in nodes) > 1:
        return "ablock"
    if any(word in t for t in stack for word in _RECURRENT):
        return "rblock"
    return "eblock" if any(is_product(n) for n in nodes) else ""


def _types(node: Node) -> list[str]:
    stack = node.meta.get("nn_module_stack") or {}
    return [getattr(e[1], "__name__", str(e[1]).rsplit(".", 1)[-1]) for e in stack.values() if isinstance(e, tuple)]
