"""What is saved and what is computed again, for one joint graph under one policy.

Two steps. Going forward, every node is given a wish: keep it or compute it again. Under "selective" that goes by what it
would take: a node is worth computing again if the saved values it comes from hold little more than twice its own bytes, as
one fused kernel then reads them instead of it; a sum that runs through all layers is therefore kept every other time,
and the one number a row of a norm's statistics always. Going back from what backward reads, the wishes of what is really
needed are carried out; the rest is nobody's business.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

from torch.fx import Node

from megacpp_compile.remat.kinds import Place
from megacpp_compile.remat.nodes import is_core, is_pinned, is_product, is_view, nbytes
from megacpp_compile.remat.policy import CheckpointingPolicy

SAVE, RECOMPUTE, FREE = "save", "recompute", "free"
# What is read to compute a value again may hold this many times its bytes.
_WORTH = 2.5


@dataclasses.dataclass
class Plan:
    """`saved` and `recomputed`: forward nodes, in order. `free`: needed nodes the policy leaves to the partitioner."""

    saved: list[Node]
    recomputed: list[Node]
    free: list[Node]

    def saved_bytes(self) -> int:
        return sum(nbytes(n.meta.get("val")) for n in self.saved if not isinstance(n.meta.get("val"), (list, tuple)))


def make(
    forward: Sequence[Node], needed: Sequence[Node], places: dict[Node, Place], policy: CheckpointingPolicy
) -> Plan:
    """forward: call nodes of the forward in order; needed: those that backward nodes read directly."""
    wishes = _wishes(forward, places, policy)
    order = {n: i for i, n in enumerate(forward)}
    saved, recomputed, free = set(), set(), set()
    todo, seen = list(needed), set(needed)
    while todo:
        node = todo.pop()
        if node not in order:
            continue  # an input of the graph
        wish = wishes[node]
        {SAVE: saved, RECOMPUTE: recomputed, FREE: free}[wish].add(node)
        if wish != SAVE:
            new = [a for a in node.all_input_nodes if a not in seen]
            seen.update(new)
            todo.extend(new)
    in_order = lambda nodes: sorted(nodes, key=order.__getitem__)  # noqa: E731
    return Plan(in_order(saved), in_order(recomputed), in_order(free))


def _wishes(forward: Sequence[Node], places: dict[Node, Place], policy: CheckpointingPolicy) -> dict[Node, str]:
    layers = list(dict.fromkeys(p.layer for p in places.values() if p.kind and p.layer))
    last = layers[-1] if len(layers) > 1 else None
    inner = set(forward)
    upward = _upward(forward, policy)
    wishes: dict[Node, str] = {}
    leaves: dict[Node, frozenset[Node]] = {}
    for node in forward:
        wish = _wish(node, places, policy, last, wishes, leaves, inner, upward)
        wishes[node] = wish
        leaves[node] = frozenset({node}) if wish != RECOMPUTE else _leaves(node, leaves, inner)
    return wishes


def _wish(node, places, policy, last, wishes, leaves, inner, upward):  # type: ignore[no-untyped-def]
    if node.target is operator.getitem or is_view(node):
        source = node.args[0]
        if node.target is operator.getitem and not is_view(source):
            return wishes.get(source, SAVE)
        return RECOMPUTE  # costs nothing, and its base is what is saved
    if "ac_graph_id" in node.meta:
        return RECOMPUTE  # the user's own torch.utils.checkpoint
    if is_pinned(node):
        return SAVE
    place = places[node]
    entry = policy.entry(place.kind, place.layer == last) if place.kind else _between(places, policy, last, place)
    if entry == "never":
        return FREE
    if entry == "none":
        return FREE
    if entry in ("full", "full_plus_norms"):
        return RECOMPUTE if place.kind else _cheap(node, leaves, inner)
    if entry == "expert_gemm_only":
        return RECOMPUTE if is_product(node) else SAVE
    if is_core(node):
        return SAVE
    if is_product(node):
        return RECOMPUTE if node in upward and entry == "selective" else SAVE
    if entry == "conv_bc_only":
        return _cheap(node, leaves, inner)
    return _cheap(node, leaves, inner)


def _between(places, policy, last, place):  # type: ignore[no-untyped-def]
    """Norms and sums between blocks follow the blocks of their layer: any that asks for remat is enough."""
    if place.layer == last and last is not None:
        return policy.entry("ablock", True)
    entries = {policy.entry(p.kind, False) for p in places.values() if p.kind and p.layer == place.layer}
    return "selective" if entries - {"none"} else "none"


def _cheap(node: Node, leaves: dict[Node, frozenset[Node]], inner: set[Node]) -> str:
    own = nbytes(node.meta.get("val"))
    read = sum(nbytes(n.meta.get("val")) for n in _leaves(node, leaves, inner))
    return RECOMPUTE if read <= _WORTH * own else SAVE


def _leaves(node: Node, leaves: dict[Node, frozenset[Node]], inner: set[Node]) -> frozenset[Node]:
    """The saved activations a node comes from. Inputs of the graph are alive anyway: they cost no memory, but time."""
    found: set[Node] = set()
    for a in node.all_input_nodes:
        found |= leaves[a] if a in inner else {a}
    return frozenset(found)


def _upward(forward: Sequence[Node], policy: CheckpointingPolicy) -> set[Node]:
    """The up-projections of latent attention that the policy computes again."""
    wanted = {"megacpp::mla_rope_kv": policy.recompute_kv_upproj, "megacpp::mla_rope_q": policy.recompute_q_upproj}
    found = set()
    for node in forward:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and wanted.get(schema.name):
            source = node.args[0]
            while isinstance(source, Node) and (is_view(source) or source.target is operator.getitem):
                source = source.args[0]
            if isinstance(source, Node) and is_product(source):
                found.add(source)
    return found
