"""The policy as a pass over the joint graph: Inductor's `joint_custom_post_pass`, the last one before partitioning.

Torch's partitioner obeys the tags that `torch.utils.checkpoint` puts on nodes, orders recomputation the way autograd
would run, and makes random numbers come out the same; so the plan is handed over as those tags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy as Tag

from megacpp_compile.remat import plan as planning
from megacpp_compile.remat.kinds import Place, places
from megacpp_compile.remat.policy import CheckpointingPolicy

# One region for the whole graph: torch would save what lies on the border of two.
_REGION = 1 << 19


class TagForRemat(CustomGraphPass):
    """Tag forward nodes MUST_SAVE or MUST_RECOMPUTE as `policy` has it.

    tell: given the plan and the places of the nodes; not called where the compiled code comes from a cache.
    """

    def __init__(
        self,
        policy: CheckpointingPolicy,
        block_kinds: dict[str, str],
        before: Any = None,
        tell: Callable[[planning.Plan, dict[Node, Place], set[str]], None] | None = None,
    ) -> None:
        self.policy, self.block_kinds, self.before, self.tell = policy, block_kinds, before, tell

    def __call__(self, graph: fx.Graph) -> None:
        for earlier in _passes(self.before):
            earlier(graph)
        forward, needed = joint(graph)
        if not needed:
            return  # inference, or nothing to differentiate
        where, hit = places(forward, self.block_kinds)
        plan = planning.make(forward, needed, where, self.policy)
        for node in plan.saved:
            node.meta["recompute"] = Tag.MUST_SAVE
        for node in plan.recomputed:
            node.meta["recompute"] = Tag.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", _REGION)
        if self.tell is not None:
            self.tell(plan, where, hit)

    def uuid(self) -> Any:
        from megacpp_compile.handoff import source_hash

        inner = tuple(p.uuid() if hasattr(p, "uuid") else repr(p) for p in _passes(self.before))
        return ("megacpp_remat", source_hash(), repr(self.policy), tuple(sorted(self.block_kinds.items())), inner)

    def __reduce__(self) -> Any:
        return TagForRemat, (self.policy, self.block_kinds, self.before)


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
        if tangent or node.meta.get("partitioner_tag") == "is_backward" or any(a in found for a in node.all_input_nodes):
            if node.op != "output":
                found.add(node)
    return found


def _passes(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)
