"""From decisions to a plan: what backward really needs of them, and where saving another value is as cheap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.fx import Node

from megacpp_compile.fx.sizes import nbytes
from megacpp_compile.fx.views import REARRANGEMENTS, is_view
from megacpp_compile.fx.walks import reached
from megacpp_compile.lowerings._traits import FUSIBLE, traits_of
from megacpp_compile.remat.plan import FREE, MUST_RECOMPUTE, RECOMPUTE, SAVE, Plan

_ROUNDS = 8


def settle(forward: Sequence[Node], needed: Sequence[Node], decisions: dict[Node, str]) -> Plan:
    """The plan that carries out `decisions`, of all forward nodes, for what backward needs.

    A saved value that serves only to recompute one other value of no more bytes is recomputed, and the other is saved
    instead. One of as many bytes, which a fused kernel computes from it alone, is not where saving it would round it.

    forward: the forward's nodes in graph order; needed: those of them that backward reads directly.
    """
    plan = _closure(forward, needed, decisions)
    for _ in range(_ROUNDS):
        instead = {n for n in _saved_instead(plan, set(needed)) if decisions[n] != MUST_RECOMPUTE}
        if not instead:
            break
        decisions = {**decisions, **dict.fromkeys(instead, SAVE)}
        plan = _closure(forward, needed, decisions)
    return plan


def _closure(forward: Sequence[Node], needed: Sequence[Node], decisions: Mapping[Node, str]) -> Plan:
    """The decisions of what backward reads, and of what it takes to recompute that."""
    decided = decisions.get  # of an input of the graph nothing is
    way = set(reached(needed, lambda n: n.all_input_nodes if decided(n) not in (None, SAVE) else []))
    kinds = ((SAVE,), (RECOMPUTE, MUST_RECOMPUTE), (FREE,))
    return Plan(*([n for n in forward if n in way and decided(n) in kind] for kind in kinds))


def _saved_instead(plan: Plan, needed: set[Node]) -> Iterable[Node]:
    """Recomputed values, each the only one that some saved value serves, and of fewer bytes than that one, or of as
    many that hold it exactly."""
    recomputed, free = set(plan.recomputed), set(plan.free)
    for node in plan.saved:
        if isinstance(node.meta.get("val"), torch.Tensor):
            readers = _recomputed_from(node, recomputed, free, needed)
            if readers is not None and len(readers) == 1:
                (reader,) = readers
                held = reader.meta.get("val")
                if isinstance(held, torch.Tensor):
                    own, others = nbytes(held), nbytes(node.meta["val"])
                    if own < others or own == others and not _rounds(reader):
                        yield reader


def _rounds(node: Node) -> bool:
    """Whether saving `node` rounds what a fused kernel computes of one tensor in float32: its bytes are as soon read.

    The forward goes on with what it computed, rounded or not as kernels are fused, and backward then differs from it:
    a scaled embedding or a cap on logits saved in bfloat16 made gradients' errors 1.1 to 1.9 times as large.
    """
    held = node.meta["val"]
    fused = traits_of(node).kernel in FUSIBLE and node.target not in REARRANGEMENTS
    if not fused or not held.is_floating_point() or held.itemsize >= torch.float32.itemsize:
        return False
    return sum(nbytes(a.meta.get("val")) >= nbytes(held) for a in node.all_input_nodes) == 1


def _recomputed_from(node: Node, recomputed: set[Node], free: set[Node], needed: set[Node]) -> set[Node] | None:
    """The values that backward recomputes from `node` or a view of it; None where backward reads it itself."""
    views = list(reached([node], lambda n: [u for u in n.users if u in recomputed and is_view(u)]))
    users = {u for n in views for u in n.users}
    return None if not needed.isdisjoint(views) or users & free else users & recomputed - set(views)
