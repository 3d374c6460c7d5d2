"""What is saved and what is computed again, for one joint graph under one policy.

Three steps. Going forward, every node is given a wish: keep it or compute it again. Under "selective" that goes by what
it would take: a node is worth computing again if the saved values it comes from hold little more than twice its own
bytes, as one fused kernel then reads them instead of it; a sum that runs through all layers is therefore kept every
other time, and the one number a row of a norm's statistics always. Going back from what backward reads, the wishes of
what is really needed are carried out; the rest is nobody's business. Last, a saved value that serves only to compute
one other of no more bytes gives its place to that one.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy as Tag

from megacpp_compile.config.checkpointing import CheckpointingPolicy
from megacpp_compile.errors import PeakUnreachableError
from megacpp_compile.remat import offload
from megacpp_compile.remat.kinds import BlockRef
from megacpp_compile.remat.nodes import (
    base_of,
    beyond_views,
    is_core,
    is_gemm,
    is_pinned,
    is_selection,
    is_view,
    name_of,
    nbytes,
)
from megacpp_compile.remat.peak import ALONE, MARGIN, Liveness, StepContext

# AGAIN: recompute, and save nothing instead.
SAVE, RECOMPUTE, FREE, MUST_RECOMPUTE = "save", "recompute", "free", "again"
# What is read to compute a value again may hold this many times its bytes.
_WORTH = 2.5
_SLIDES = 8


@dataclasses.dataclass(eq=False)
class Plan:
    """`saved` and `recomputed`: forward nodes, in order. `free`: needed nodes the policy leaves to the partitioner."""

    saved: list[Node]
    recomputed: list[Node]
    free: list[Node]

    def saved_bytes(self) -> int:
        return sum(kept_bytes(n) for n in self.saved)


def kept_bytes(node: Node) -> int:
    """Bytes that saving `node` keeps alive; the parts of a structured result are nodes of their own."""
    held = node.meta.get("val")
    return nbytes(held) if isinstance(held, torch.Tensor) else 0


def make(
    forward: Sequence[Node],
    needed: Sequence[Node],
    places: Mapping[Node, BlockRef],
    policy: CheckpointingPolicy,
    device: str = "cpu",
    around: StepContext = ALONE,
) -> Plan:
    """forward: call nodes of the forward in order; needed: those that backward nodes read directly.

    Raises PeakUnreachableError for a `peak_gib` that no plan meets.
    """
    wishes = SaveDecisions(forward, places, policy).of
    if policy.solves():
        from megacpp_compile.remat import solver

        live = Liveness(forward[0].graph)
        passed_on = bool(around.passed_on(forward[0].graph, policy))

        @functools.lru_cache(maxsize=2)  # a plan is looked at when it is made, and when it is taken
        def peak(plan: Plan) -> int:
            return live(plan, set(offload.chosen(plan, places, policy))).of(around.copies, passed_on)

        for kind, fraction in policy.budgets():
            allowed = fraction * solver.read_bytes(needed, forward, places, kind)
            fits = functools.partial(_fits, places=places, kind=kind, allowed=allowed)
            wishes = solver.solve(forward, needed, places, wishes, kind, fits, device, peak)
        if policy.peak_gib is not None:
            limit = int((policy.peak_gib - policy.reserve_gib) * 2**30)
            before = around.before(forward[0].graph)

            def promised(plan: Plan) -> int:
                return before + int(MARGIN * peak(plan))

            wishes = solver.solve(forward, needed, places, wishes, None, lambda plan: promised(plan) <= limit, device,
                                  peak, lowering=True)  # fmt: skip
            if (lowest := promised(settle(forward, needed, wishes))) > limit:
                raise PeakUnreachableError(limit, lowest, before)
    return settle(forward, needed, wishes)


def _fits(plan: Plan, places: Mapping[Node, BlockRef], kind: str | None, allowed: float) -> bool:
    return sum(kept_bytes(n) for n in plan.saved if kind is None or places[n].kind == kind) <= allowed


def settle(forward: Sequence[Node], needed: Sequence[Node], wishes: dict[Node, str]) -> Plan:
    """The wishes carried out, for what `needed` needs."""
    plan = _closure(forward, needed, wishes)
    for _ in range(_SLIDES):
        moves = {n for n in _slides(plan, set(needed)) if wishes[n] != MUST_RECOMPUTE}
        if not moves:
            break
        wishes = {**wishes, **dict.fromkeys(moves, SAVE)}
        plan = _closure(forward, needed, wishes)
    return plan


def _closure(forward: Sequence[Node], needed: Sequence[Node], wishes: Mapping[Node, str]) -> Plan:
    found: dict[str, set[Node]] = {SAVE: set(), RECOMPUTE: set(), FREE: set()}
    todo, seen = list(needed), set(needed)
    while todo:
        node = todo.pop()
        wish = wishes.get(node)
        if wish is None:
            continue  # an input of the graph
        found[RECOMPUTE if wish == MUST_RECOMPUTE else wish].add(node)
        if wish != SAVE:
            new = [a for a in node.all_input_nodes if a not in seen]
            seen.update(new)
            todo.extend(new)
    saved, recomputed, free = ([n for n in forward if n in found[w]] for w in (SAVE, RECOMPUTE, FREE))
    return Plan(saved, recomputed, free)


def _slides(plan: Plan, needed: set[Node]) -> Iterable[Node]:
    """Values to save instead of those that are saved only to compute them."""
    again = set(plan.recomputed)
    free = set(plan.free)
    for node in plan.saved:
        if isinstance(node.meta.get("val"), torch.Tensor):
            readers = _readers(node, again, free, needed)
            if readers is not None and len(readers) == 1:
                (reader,) = readers
                held = reader.meta.get("val")
                if isinstance(held, torch.Tensor) and nbytes(held) <= nbytes(node.meta["val"]):
                    yield reader


def _readers(node: Node, again: set[Node], free: set[Node], needed: set[Node]) -> set[Node] | None:
    """What is computed from `node` in backward; None where backward reads it itself."""
    if node in needed or any(u in free for u in node.users):
        return None
    found: set[Node] = set()
    for user in node.users:
        if user in again:
            if is_view(user):
                inner = _readers(user, again, free, needed)
                if inner is None:
                    return None
                found |= inner
            else:
                found.add(user)
    return found


class SaveDecisions:
    """`of`: forward node -> SAVE, RECOMPUTE or FREE."""

    def __init__(self, forward: Sequence[Node], places: Mapping[Node, BlockRef], policy: CheckpointingPolicy) -> None:
        self.places, self.policy, self.inner = places, policy, set(forward)
        layers = list(dict.fromkeys(p.layer for p in places.values() if p.kind and p.layer))
        self.last = layers[-1] if len(layers) > 1 else None
        self.upward = up_projections(forward, policy.recompute_kv_upproj, policy.recompute_q_upproj)
        self.chosen_from = choices(forward)
        self.entries: dict[str, set[str]] = {}
        for place in set(places.values()):
            if place.kind:
                self.entries.setdefault(place.layer, set()).add(policy.entry(place.kind, place.layer == self.last))
        self.anywhere = set().union(*self.entries.values()) if self.entries else {"selective"}
        self.read_by_full = {a for n in forward if self._entry(n) == "full" for a in _sources(n)}
        self.of: dict[Node, str] = {}
        self.leaves: dict[Node, frozenset[Node]] = {}
        # Layers in which a product or a core is computed again on the way to a node.
        self.heavy: dict[Node, frozenset[str]] = {}
        for node in forward:
            wish = self.of[node] = self._wish(node)
            again = wish == RECOMPUTE
            self.leaves[node] = self._read(node) if again else frozenset({node})
            self.heavy[node] = self._weight(node) if again else frozenset()

    def _entry(self, node: Node) -> str:
        place = self.places[node]
        if place.kind:
            return self.policy.entry(place.kind, place.layer == self.last)
        # Norms and sums between blocks follow the blocks of their layer: any that asks for remat is enough.
        if not self.entries.get(place.layer, self.anywhere) - {"none"}:
            return "none"
        return "never" if place.layer == self.last and "never" in self.entries.get(place.layer, ()) else "between"

    def _wish(self, node: Node) -> str:
        if not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            return SAVE  # a size: no bytes, and never computed again
        if node.target is operator.getitem and not is_view(node.args[0]):  # type: ignore[arg-type]
            return self.of.get(node.args[0], SAVE)  # type: ignore[arg-type]
        if is_view(node) or node.target is operator.getitem:
            # It costs nothing, and its base is what is saved.
            return FREE if self.of.get(base_of(node)) == FREE else RECOMPUTE
        if (asked := checkpointed(node)) is not None:
            return asked
        entry = self._entry(node)
        if is_pinned(node) or node in self.chosen_from:
            return FREE if entry == "none" else SAVE
        if entry == "none":
            return FREE
        place = self.places[node]
        if leaves_layer(node, self.places) and self._weight(node):
            return SAVE  # else one layer's backward would compute the layers before it
        if entry in ("full", "full_plus_norms") and place.kind:
            return RECOMPUTE
        if node in self.read_by_full and place.kind == "":
            return SAVE
        if entry == "expert_gemm_only":
            return RECOMPUTE if is_gemm(node) else SAVE
        if is_core(node):
            return SAVE
        if is_gemm(node):
            return RECOMPUTE if node in self.upward and entry != "never" else SAVE
        if entry == "conv_bc_only" and self._behind_core(node):
            return SAVE
        return RECOMPUTE if self._is_cheap(node) else SAVE

    def _is_cheap(self, node: Node) -> bool:
        return sum(nbytes(n.meta.get("val")) for n in self._read(node)) <= _WORTH * nbytes(node.meta.get("val"))

    def _read(self, node: Node) -> frozenset[Node]:
        """The saved activations a node comes from. Inputs of the graph, such as weights, are alive anyway."""
        return frozenset().union(*(self.leaves[a] for a in node.all_input_nodes if a in self.inner))

    def _weight(self, node: Node) -> frozenset[str]:
        found: set[str] = {self.places[node].layer} if is_gemm(node) or is_core(node) else set()
        for a in node.all_input_nodes:
            if a in self.inner:
                found |= self.heavy[a]
        return frozenset(found)

    def _behind_core(self, node: Node) -> bool:
        block, todo = self.places[node], list(node.all_input_nodes)
        seen: set[Node] = set()
        while todo:
            a = todo.pop()
            if a in seen or a not in self.inner or self.places[a] != block:
                continue
            if is_core(a):
                return True
            seen.add(a)
            todo.extend(a.all_input_nodes)
        return False


def checkpointed(node: Node) -> str | None:
    """What `torch.utils.checkpoint` in the model says of a node; None where it says nothing. What leaves its region is
    saved, as it would be without a policy."""
    tag = node.meta.get("recompute")
    if tag is None or "ac_graph_id" not in node.meta:
        return None
    if tag in (Tag.MUST_SAVE, Tag.PREFER_SAVE):
        return SAVE
    region = node.meta["ac_graph_id"]
    forward = [u for u in beyond_views(node) if "recompute" in u.meta or not _late(u)]
    return RECOMPUTE if all(u.meta.get("ac_graph_id") == region for u in forward) else SAVE


def _late(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward" or node.op == "output"


def _sources(node: Node) -> list[Node]:
    return [base_of(a) for a in node.all_input_nodes]


def leaves_layer(node: Node, places: Mapping[Node, BlockRef]) -> bool:
    """Whether another layer reads it."""
    return any(u in places and places[u].layer != places[node].layer for u in beyond_views(node))


def up_projections(forward: Iterable[Node], kv: bool, q: bool) -> set[Node]:
    """The up-projections of latent attention that are computed again."""
    wanted = {"megacpp::mla_rope_kv": kv, "megacpp::mla_rope_q": q}
    found = set()
    for node in forward:
        if wanted.get(name_of(node)):
            source = base_of(node.args[0])  # type: ignore[arg-type]
            if isinstance(source, Node) and is_gemm(source):
                found.add(source)
    return found


def choices(forward: Iterable[Node]) -> set[Node]:
    """What selections choose from, back to the product that gave the scores."""
    found: set[Node] = set()
    todo = [a for n in forward if is_selection(n) for a in n.all_input_nodes]
    while todo:
        node = todo.pop()
        if node.op != "call_function" or node in found:
            continue
        found.add(node)
        if not is_gemm(node) and not is_core(node):
            todo.extend(node.all_input_nodes)
    return {n for n in found if not is_view(n)}
