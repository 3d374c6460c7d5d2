"""What a joint graph saves for backward and what backward recomputes, under one policy.

Three steps: `SaveDecisions` decides every forward node by the policy's entries; `solve` turns decisions from saving to
recomputing until budgets and a limit on the peak are met; `settle` carries out the decisions that backward needs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from torch.fx import Node

from megacpp_compile.config.checkpointing import CheckpointingPolicy
from megacpp_compile.errors import PeakUnreachableError
from megacpp_compile.remat import conflicts
from megacpp_compile.remat.closure import settle
from megacpp_compile.remat.decisions import SaveDecisions
from megacpp_compile.remat.offload import offloaded
from megacpp_compile.remat.peak import MARGIN, PeakModel
from megacpp_compile.remat.plan import ALONE, BlockRef, Plan, StepContext, kept_bytes
from megacpp_compile.remat.solver import read_bytes, solve


def make_plan(
    forward: Sequence[Node],
    needed: Sequence[Node],
    blocks: Mapping[Node, BlockRef],
    policy: CheckpointingPolicy,
    device: str = "cpu",
    around: StepContext = ALONE,
) -> Plan:
    """The plan of `policy` for one joint graph.

    forward: call nodes of the forward in graph order; needed: those of them that backward nodes read directly; blocks:
    the block of every forward node; device: the type of the device whose rates costs go by ("cuda"); around: what the
    graph shares the device with, for a limit on the peak.

    Raises PeakUnreachableError for a `peak_gib` that no plan meets, and the TwoPoliciesError of `conflicts`.
    """
    decisions = SaveDecisions(forward, blocks, policy).of
    if policy.solves():
        graph = forward[0].graph
        live = PeakModel(graph)
        passed_on = bool(around.passed_on(graph, policy))

        @functools.lru_cache(maxsize=2)  # a plan is looked at when it is made, and when it is taken
        def peak(plan: Plan) -> int:
            return live(plan, offloaded(plan, blocks, policy)).of(around.copies, passed_on)

        for kind, fraction in policy.budgets():
            allowed = fraction * read_bytes(needed, forward, blocks, kind)
            fits = functools.partial(_fits, blocks=blocks, kind=kind, allowed=allowed)
            decisions = solve(forward, needed, blocks, decisions, kind, fits, device, peak)
        if policy.peak_gib is not None:
            limit = int((policy.peak_gib - policy.reserve_gib) * 2**30)
            before = around.before(graph)

            def promised(plan: Plan) -> int:
                return before + int(MARGIN * peak(plan))

            def meets_limit(plan: Plan) -> bool:
                return promised(plan) <= limit

            decisions = solve(forward, needed, blocks, decisions, None, meets_limit, device, peak, lowering=True)
            if (lowest := promised(settle(forward, needed, decisions))) > limit:
                raise PeakUnreachableError(limit, lowest, before)
    conflicts.check_decisions(decisions)
    return settle(forward, needed, decisions)


def _fits(plan: Plan, blocks: Mapping[Node, BlockRef], kind: str | None, allowed: float) -> bool:
    """Whether blocks of `kind`, or all with None, save at most `allowed` bytes."""
    return sum(kept_bytes(n) for n in plan.saved if kind is None or blocks[n].kind == kind) <= allowed
