"""`policy="auto"` in the place of a partitioner: torch's own cut of the joint graph, or a plan where that is better.

The partitioner divides a copy of the graph first, as it would without a policy, so that what the plan is compared with
is what would have run, and so that it is there to be returned. Whatever goes wrong on the way to a plan returns it too.
The rule is in `remat/automatic.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from megacpp_compile._torch.functorch import fx_graph_cse
from megacpp_compile._torch.inductor import CustomPartitionerFn
from megacpp_compile._torch.inductor import config as inductor_config
from megacpp_compile.backends._lower import expand
from megacpp_compile.backends._protocol import Settings
from megacpp_compile.config.options import Config
from megacpp_compile.fx.copies import copied
from megacpp_compile.fx.inductor_pass import source_hash
from megacpp_compile.remat import latents, overwritten
from megacpp_compile.remat.automatic import (
    LEAST_READ,
    MOST,
    SELECTIVE,
    Ladder,
    Latents,
    Predicted,
    as_partitioned,
    latents_of,
    read_by_backward,
    worth_taking,
)
from megacpp_compile.remat.joint_graph import joint
from megacpp_compile.remat.kinds import blocks_of
from megacpp_compile.remat.peak import PeakModel
from megacpp_compile.remat.plan import Plan, StepContext
from megacpp_compile.remat.tagging import OnPlan, predicted, tag
from megacpp_compile.remat.times import step_time
from megacpp_compile.report import log
from megacpp_compile.report.auto_plan import SMALL, AutoPlan
from megacpp_compile.targets import Target
from megacpp_compile.targets.rates import rates

Halves = tuple[GraphModule, GraphModule]
Cut = Callable[[GraphModule], Halves]


@dataclasses.dataclass
class Automatic:
    """What one frame's plan is made from, and what came of it.

    tell: called with what was chosen, and with a plan that is taken as `TagForRemat.on_plan` is. Neither where the code
    comes from a cache. taken: whether there is a plan, so that the partitioner's cut was not used.
    """

    target: Target
    config: Config
    around: StepContext
    tell: Callable[[AutoPlan], None] | None = None
    on_plan: OnPlan | None = None
    taken: bool = False

    @classmethod
    def of(cls, settings: Settings) -> Automatic | None:
        """For the frame of `settings`, None where it is not to be planned."""
        if settings.on_auto is None:
            return None
        around = StepContext(settings.copies)
        return cls(settings.target, settings.config, around, settings.on_auto, settings.on_plan)

    def without_reuse(self, inner_compile: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make code as Inductor does; under a plan without its `allow_buffer_reuse`, as under every policy: it holds
        dead buffers until something of their size comes along."""
        if not self.taken:
            return inner_compile(*args, **kwargs)
        with inductor_config.patch(allow_buffer_reuse=False):
            return inner_compile(*args, **kwargs)

    def key(self) -> tuple[Any, ...]:
        kinds = tuple(sorted(self.config.block_kinds.items()))
        return rates(self.target.name), self.around.copies, self.config.keep_latents, kinds

    def divide(self, gm: GraphModule, cut: Cut, outputs: int) -> Halves:
        """Both halves of the joint graph `gm`, which is edited. cut: torch's partitioner; outputs: how many of the
        forward's results are the model's own."""
        forward, needed = joint(gm.graph)
        if read_by_backward(needed) < LEAST_READ:
            self._say(AutoPlan(reason=f"{SMALL} {LEAST_READ >> 20} MiB of the forward"))
            return cut(gm)
        cuts = None
        try:
            cuts = _Cuts(cut, gm)
            return self._plan(gm, cuts, outputs)
        except Exception as error:  # a defect of ours must not become the user's: what torch made is there
            log.logger.info("policy='auto': left to torch's partitioner: %s", error, exc_info=True)
            self._say(AutoPlan(reason=f"internal error: {type(error).__name__}: {error}"[:300]))
            return cut(gm) if cuts is None else cuts.as_it_came()

    def _plan(self, gm: GraphModule, cuts: _Cuts, outputs: int) -> Halves:
        gm.graph = fx_graph_cse(gm.graph)  # as the partitioner does: what layers compute alike, its halves compute once
        graph, speed = gm.graph, rates(self.target.name)
        none = as_partitioned(joint(graph)[0], cuts.as_it_came(), outputs)
        base = self._of(PeakModel(graph), none)
        keeping, found = latents_of(graph, speed) if self.config.keep_latents == "auto" else ([], Latents())
        if keeping:
            latents.pass_on(graph, keeping)
            cuts = _Cuts(cuts.cut, gm)
            for op in keeping:
                none = none.with_replaced(expand(graph, op, self.target))
        kept = overwritten.keep(graph)
        forward, needed = joint(graph)
        model, blocks = PeakModel(graph), blocks_of(forward, dict(self.config.block_kinds))
        ladder = Ladder(forward, needed, blocks, none)
        # Of one graph, latents in it: an op and what it is made of are not predicted to take the same.
        begin = step_time(model, ladder.plan(0), speed)
        time = begin + found.seconds

        def more(plan: Plan) -> float:
            return step_time(model, plan, speed) - begin - found.seconds

        plan = ladder.within(more, MOST * time)
        planned = dataclasses.replace(self._of(model, plan), more=more(plan))
        taken = worth_taking(planned, base)
        if taken:
            tag(graph, plan, kept)
            if self.on_plan is not None:
                self.on_plan(plan, blocks, predicted(graph, plan, {}, SELECTIVE, self.around))
        halves = cuts.cut(gm) if taken else cuts.as_it_came()
        self.taken = self.taken or taken
        self._say(AutoPlan.of(taken, planned, base, time, found, speed.label))
        return halves

    def _of(self, model: PeakModel, plan: Plan) -> Predicted:
        peak = model(plan)
        count = sum(n in model.facts.pieces for n in plan.recomputed)
        return Predicted(peak.saved - peak.outputs, peak.of(self.around.copies), count)

    def _say(self, found: AutoPlan) -> None:
        if self.tell is not None:
            self.tell(found)


class _Cuts:
    """torch's cut of the graph of `gm` as it is now, made of a copy when it is first asked for."""

    def __init__(self, cut: Cut, gm: GraphModule) -> None:
        self.cut, self.copy = cut, GraphModule(gm, copied(gm.graph)[0])
        self.copy.meta.update(gm.meta)
        self.made: Halves | None = None

    def as_it_came(self) -> Halves:
        if self.made is None:
            self.made = self.cut(self.copy)
        return self.made


class AutomaticPartitioner(CustomPartitionerFn):
    """`Automatic` over torch's partitioner, for Inductor."""

    def __init__(self, automatic: Automatic) -> None:
        self.automatic = automatic

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Halves:
        from megacpp_compile._torch.functorch import min_cut_rematerialization_partition

        def cut(graph: GraphModule) -> Halves:
            return min_cut_rematerialization_partition(graph, joint_inputs, **kwargs)  # type: ignore[no-any-return]

        return self.automatic.divide(gm, cut, kwargs["num_fwd_outputs"])

    def uuid(self) -> Any:
        return ("megacpp_auto", source_hash(), *self.automatic.key())

    def __reduce__(self) -> Any:
        mine = self.automatic
        return AutomaticPartitioner, (Automatic(mine.target, mine.config, mine.around),)
