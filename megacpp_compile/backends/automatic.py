"""`policy="auto"` in the place of a partitioner: torch's own cut of the joint graph, or a plan where that is better.

The partitioner begins with the graph, as without a policy: what the plan is compared with is what would run, and where
that stands the partitioner goes on (`first_cut.py`). A plan is made of a copy: whatever goes wrong on the way to it
leaves the graph to the partitioner, too. The rule is in `remat/automatic.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from megacpp_compile._torch.functorch import config as functorch_config
from megacpp_compile._torch.inductor import CustomPartitionerFn
from megacpp_compile._torch.inductor import config as inductor_config
from megacpp_compile.backends._lower import expand
from megacpp_compile.backends._protocol import Settings
from megacpp_compile.backends.first_cut import Cut, FirstCut, Halves
from megacpp_compile.fx.copies import copied, module_like
from megacpp_compile.fx.inductor_pass import source_hash
from megacpp_compile.remat import latents, overwritten
from megacpp_compile.remat.automatic import (
    LEAST_READ,
    SELECTIVE,
    Ladder,
    Latents,
    Predicted,
    latents_of,
    read_by_backward,
    worth_taking,
)
from megacpp_compile.remat.joint_graph import joint
from megacpp_compile.remat.kinds import blocks_of
from megacpp_compile.remat.peak import PeakModel
from megacpp_compile.remat.plan import Plan, StepContext
from megacpp_compile.remat.tagging import predicted, tag
from megacpp_compile.remat.times import StepTime
from megacpp_compile.report import log, stages
from megacpp_compile.report.auto_plan import SMALL, AutoPlan
from megacpp_compile.targets.rates import rates


@dataclasses.dataclass
class Automatic:
    """What one frame's plan is made from, and what came of it.

    settings: the frame's; its `on_auto` and `on_plan` are not called where code comes from a cache. taken: whether
    there is a plan, so that the partitioner's cut was not used.
    """

    settings: Settings
    taken: bool = False

    @classmethod
    def of(cls, settings: Settings) -> Automatic | None:
        """For the frame of `settings`, None where it is not to be planned."""
        return None if settings.on_auto is None else cls(settings)

    def without_reuse(self, inner_compile: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make code as Inductor does; under a plan without its `allow_buffer_reuse`, as under every policy: it holds
        dead buffers until something of their size comes along."""
        if not self.taken:
            return inner_compile(*args, **kwargs)
        with inductor_config.patch(allow_buffer_reuse=False):
            return inner_compile(*args, **kwargs)

    def key(self) -> tuple[Any, ...]:
        s, kinds = self.settings, tuple(sorted(self.settings.config.block_kinds.items()))
        return rates(s.target.name), s.copies, s.auto_time, s.config.keep_latents, kinds

    def divide(self, gm: GraphModule, cut: Cut, outputs: int) -> Halves:
        """Both halves of the joint graph `gm`, which is edited. cut: torch's partitioner; outputs: how many of the
        forward's results are the model's own."""
        _, needed = joint(gm.graph)
        if self.settings.copies * read_by_backward(needed) < LEAST_READ:
            self._say(AutoPlan(reason=f"{SMALL} {LEAST_READ >> 20} MiB of the forward"))
            return cut(gm)
        first = None
        try:
            with stages.stage("plan"):
                first = FirstCut(cut, gm, outputs)
            return self._plan(gm, cut, first)
        except Exception as error:  # a defect of ours must not become the user's: what torch makes is there
            log.logger.info("policy='auto': left to torch's partitioner: %s", error, exc_info=True)
            self._say(AutoPlan(reason=f"internal error: {type(error).__name__}: {error}"[:300]))
            return cut(gm) if first is None else first.halves()

    def _plan(self, gm: GraphModule, cut: Cut, first: FirstCut) -> Halves:
        chosen: list[_Choice] = []

        def stands(none: Plan) -> bool:
            chosen.append(self._choose(gm, none))
            return chosen[0].edited is None

        halves = first.where(stands)
        (choice,) = chosen
        if choice.edited is not None:
            with functorch_config.patch(cse=functorch_config.cse and choice.new_ops):
                halves = cut(choice.edited)
        assert halves is not None
        self.taken = self.taken or choice.reported.taken
        self._say(choice.reported)
        return halves

    @stages.stage("plan")
    def _choose(self, gm: GraphModule, none: Plan) -> _Choice:
        """What becomes of `gm`. none: the plan that the partitioner makes of it as it is."""
        config, target, graph = self.settings.config, self.settings.target, gm.graph
        speed = rates(target.name)
        base = self._of(PeakModel(graph), none)
        keeping, found = latents_of(graph, speed) if config.keep_latents == "auto" else ([], Latents())
        edited = None
        if keeping:
            latents.pass_on(graph, keeping)
            edited = module_like(gm, copied(graph)[0])
            traced: dict[Any, GraphModule] = {}
            for op in keeping:
                none = none.with_replaced(expand(graph, op, target, traced))
        kept = overwritten.keep(graph)
        forward, needed = joint(graph)
        model, blocks = PeakModel(graph), blocks_of(forward, dict(config.block_kinds))
        # Of one graph, latents in it: an op and what it is made of are not predicted to take the same.
        ladder = Ladder(forward, needed, blocks, none, StepTime(model, none, speed))
        begin = ladder.seconds(ladder.begin)

        def again(plan: Plan) -> float:
            return ladder.seconds(plan) - begin

        def judged(plan: Plan) -> Predicted:
            return dataclasses.replace(self._of(model, plan), more=again(plan) - found.seconds)

        time = begin + found.seconds
        plan = ladder.within(again, self.settings.auto_time * time)
        planned = judged(plan)
        taken = worth_taking(planned, base)
        if taken:
            tag(graph, plan, kept)
            if (report := self.settings.on_plan) is not None:
                report(plan, blocks, predicted(graph, plan, {}, SELECTIVE, StepContext(self.settings.copies)))
        reported = AutoPlan.of(taken, planned, base, judged(ladder.selective()), time, found, speed.label)
        reported.given_up = ladder.given_up_by(plan)
        return _Choice(gm if taken else edited, reported, bool(keeping))

    def _of(self, model: PeakModel, plan: Plan) -> Predicted:
        peak = model(plan)
        count = sum(n in model.facts.pieces for n in plan.recomputed)
        return Predicted(peak.saved - peak.outputs, peak.of(self.settings.copies), count)

    def _say(self, found: AutoPlan) -> None:
        if self.settings.on_auto is not None:
            found.allowed = self.settings.auto_time
            self.settings.on_auto(found)


@dataclasses.dataclass(frozen=True)
class _Choice:
    """edited: the graph to divide, None for the graph as it came. reported: what is said of it. new_ops: whether there
    are others in it than the graph had, of which some may compute the same."""

    edited: GraphModule | None
    reported: AutoPlan
    new_ops: bool


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
        s = self.automatic.settings
        kept = Settings(s.target, s.config, {}, copies=s.copies, auto_time=s.auto_time)
        return AutomaticPartitioner, (Automatic(kept),)
