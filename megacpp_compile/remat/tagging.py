"""The policy as a pass over the joint graph: Inductor's `joint_custom_post_pass`, the last one before partitioning.

Torch's partitioner obeys the tags that `torch.utils.checkpoint` puts on nodes, orders recomputation the way autograd
would run, and makes random numbers come out the same; so the plan is handed over as those tags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy as Tag

from megacpp_compile.remat import latents
from megacpp_compile.remat import plan as planning
from megacpp_compile.remat.kinds import Place, places
from megacpp_compile.remat.nodes import is_view
from megacpp_compile.remat.policy import CheckpointingPolicy

# One region for the whole graph: torch would save what lies on the border of two.
_REGION = 1 << 19

# Told the plan and where the nodes are.
Tell = Callable[[planning.Plan, dict[Node, Place]], None]


class TagForRemat(CustomGraphPass):
    """Tag forward nodes MUST_SAVE or MUST_RECOMPUTE as `policy` has it.

    tell: given the plan and the places of the nodes; not called where the compiled code comes from a cache.
    """

    def __init__(
        self,
        policy: CheckpointingPolicy,
        block_kinds: dict[str, str],
        before: Any = None,
        tell: Tell | None = None,
    ) -> None:
        self.policy, self.block_kinds, self.before, self.tell = policy, block_kinds, before, tell

    def __call__(self, graph: fx.Graph) -> None:
        for earlier in _passes(self.before):
            earlier(graph)
        forward, needed = joint(graph)
        if not needed:
            return  # inference, or nothing to differentiate
        where = places(forward, self.block_kinds)
        plan = planning.make(forward, needed, where, self.policy, _device(forward))
        added = latents.pass_on(graph, plan.recomputed)
        for node in plan.saved:
            if isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
                node.meta["recompute"] = Tag.MUST_SAVE
        for node in [*plan.recomputed, *added]:
            node.meta["recompute"], node.meta["ac_graph_id"] = Tag.MUST_RECOMPUTE, _REGION
        if self.tell is not None:
            self.tell(plan, where)

    def uuid(self) -> Any:
        from megacpp_compile.handoff import source_hash

        inner = tuple(p.uuid() if hasattr(p, "uuid") else repr(p) for p in _passes(self.before))
        return ("megacpp_remat", source_hash(), repr(self.policy), tuple(sorted(self.block_kinds.items())), inner)

    def __reduce__(self) -> Any:
        return TagForRemat, (self.policy, self.block_kinds, self.before)


def recompute_views(graph: fx.Graph) -> None:
    """Tag a joint graph so that backward reads views anew from what they are views of, and all else as it was. A graph
    with a checkpointed block has its tags, and is left to them."""
    forward, _ = joint(graph)
    if any("recompute" in node.meta for node in forward):
        return
    for node in forward:
        if is_view(node):
            node.meta["recompute"], node.meta["ac_graph_id"] = Tag.MUST_RECOMPUTE, _REGION
        elif isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            node.meta["recompute"] = Tag.MUST_SAVE


def describe(plan: planning.Plan, where: dict[Node, Place], policy: CheckpointingPolicy) -> dict[str, dict[str, Any]]:
    """The plan in numbers, by kind of block; "" for what lies between blocks. See `report.Frame.remat`."""
    found: dict[str, dict[str, Any]] = {}
    blocks: dict[str, set[tuple[str, str | None]]] = {}
    for place in where.values():
        blocks.setdefault(place.kind, set()).add((place.layer, place.block))
    layered = len({p.layer for p in where.values() if p.kind and p.layer}) > 1
    for kind in (k for k in ("ablock", "mblock", "eblock", "rblock", "") if k in blocks):
        entries = [policy.asked(kind, False), *([policy.asked(kind, True)] if layered else [])] if kind else []
        saved = [n for n in plan.saved if where[n].kind == kind]
        found[kind] = {
            "entries": list(dict.fromkeys(map(str, entries))),
            "blocks": len(blocks[kind]) if kind else 0,
            "saved": sum(map(planning.kept_bytes, saved)),
            "recomputed": sum(where[n].kind == kind and not is_view(n) for n in plan.recomputed),
        }
    return found


def joint(graph: fx.Graph) -> tuple[list[Node], list[Node]]:
    """The forward's call nodes, and those of them that backward nodes read; nothing where there is no backward."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    backward = _backward(graph)
    forward = [n for n in calls if n not in backward]
    inner = set(forward)
    read = dict.fromkeys(a for n in calls if n in backward for a in n.all_input_nodes if a in inner)
    return forward, list(read)


def _backward(graph: fx.Graph) -> set[Node]:
    """What depends on a tangent, or was traced for backward only."""
    found: set[Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangents" in str(node.target)
        late = tangent or node.meta.get("partitioner_tag") == "is_backward"
        if node.op != "output" and (late or any(a in found for a in node.all_input_nodes)):
            found.add(node)
    return found


def _device(forward: list[Node]) -> str:
    held = (n.meta.get("val") for n in reversed(forward))
    return next((v.device.type for v in held if isinstance(v, torch.Tensor)), "cpu")


def _passes(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)
