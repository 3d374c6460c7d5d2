"""A frame looked at: captured, canonicalized, its idioms put in place, and what the report is told of it.

`analyse` changes nothing of what Dynamo handed over; `explain` ends here, and `pipeline.compile_frame` goes on to code.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NoReturn

from torch.fx import GraphModule, Node

from megacpp_compile._torch.ops import HigherOrderOperator
from megacpp_compile.backends._protocol import backend_for
from megacpp_compile.config import effects, rules
from megacpp_compile.config.options import Config
from megacpp_compile.errors import (
    CaptureError,
    MegacppError,
    NotCapturedError,
    TorchInternalsError,
)
from megacpp_compile.frontend import fallbacks, unbacked_shapes
from megacpp_compile.frontend.canonicalize import canonicalize
from megacpp_compile.frontend.capture import Captured, capture
from megacpp_compile.frontend.same_frames import key_of
from megacpp_compile.fx import assumptions, short_loops
from megacpp_compile.fx.differentiated import trains
from megacpp_compile.fx.provenance import is_backward, modules_called, outermost_frame
from megacpp_compile.lowerings._registered import is_added
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.lowerings._traits import traits_of
from megacpp_compile.matchers.recurrences import NAMES, find_recurrences
from megacpp_compile.matchers.rope.activations import activations
from megacpp_compile.nn.attention.switch import require_fa4
from megacpp_compile.passes._driver import Outcome, enabled_passes, recognised, registered, run_passes
from megacpp_compile.passes._frame import assumed, head_widths
from megacpp_compile.passes._frame.attention_sites import as_written, attention_sites, unseen_sites, wanted_by
from megacpp_compile.passes._frame.long_loops import lengthen
from megacpp_compile.passes._frame.precision_rows import answered, asked, mixers_by_rule, unseen
from megacpp_compile.passes._frame.sequence_shards import SequenceShards, sequence_shards
from megacpp_compile.passes._frame.sites import add_called_ops, choose_lowerings
from megacpp_compile.passes._frame.whole_activations import whole_activations
from megacpp_compile.passes._review import Reviewer
from megacpp_compile.remat import conflicts
from megacpp_compile.report import collector, log
from megacpp_compile.report.auto_plan import AutoPlan
from megacpp_compile.report.records import Frame, MissedFusion
from megacpp_compile.targets import TARGETS, Target

ALONE = "the frame was compiled by Inductor alone"
ON_DTENSORS = "a call on DTensors is compiled as it is written"


@dataclasses.dataclass
class Analysis:
    """A frame after the passes.

    frame: its entry in the report. captured: its graph, rewritten; None where it could not be captured. outcome: what
    the passes did; None where nothing is to be rewritten. shown: whether there are loops in it that were traced for all
    experts, and may be. notes: what is to be reported even if the frame falls back. calls_ops: whether semantic ops are
    to be lowered in the frame as it came. swapped: how many attentions FlashAttention-4 was put in place of. again:
    what is to be known where the same graph comes again, if `retrace_needed` says that this one is traced anew. shards:
    how its sequences are sharded.
    """

    frame: Frame
    captured: Captured | None = None
    outcome: Outcome | None = None
    shown: bool = False
    notes: list[MissedFusion] = dataclasses.field(default_factory=list)
    calls_ops: bool = False
    swapped: int = 0
    again: _Left | None = None
    shards: SequenceShards | None = None

    def rewritten_gm(self) -> GraphModule | None:
        """The rewritten graph, or None where no op was put in place."""
        changed = self.outcome is not None and (bool(self.outcome.sites) or self.swapped > 0)
        return self.captured.gm if self.captured is not None and changed else None

    def near_misses(self) -> list[MissedFusion]:
        return (self.outcome.misses if self.outcome is not None else []) + self.notes

    def op_nodes(self) -> list[tuple[str, Node]]:
        """(pass, node) of each op put in place."""
        if self.outcome is None:
            return []
        pairs = zip(self.outcome.sites, self.outcome.op_nodes, strict=True)
        return [(s.pass_name, n) for s, n in pairs if not n._erased]  # else a later site has taken it

    def on_auto(self, found: AutoPlan) -> None:
        """Note what `policy="auto"` chose, at the sites whose latents it keeps too."""
        self.frame.on_auto(found)
        pairs = zip(self.outcome.sites, self.outcome.op_nodes, strict=True) if self.outcome is not None else ()
        keeping = sorted((node, site) for site, node in pairs if traits_of(node).handed_over is not None)
        for place, held in found.latents.get("held", ()):
            site = keeping[place][1] if place < len(keeping) else None
            if site is not None and site.saved_after is not None:
                site.set_saved(site.saved_before, site.saved_after + held)

    def fell_back(self, reason: str, advice: str, lost: bool = True) -> None:
        """Record that the frame is compiled by the backend alone after all. advice: what to do about it. lost: whether
        an idiom may have been in it."""
        self.not_kept(reason)
        self.outcome, self.frame.left_to, self.frame.lost = None, "backend", lost
        fallbacks.tell(self.frame, advice)
        self.frame.attention = [as_written(row) for row in self.frame.attention]
        for row in self.frame.precision:
            if row["effective"] == row["requested"] != "bf16":
                row["effective"], row["reason"] = "as written", ALONE

    def not_kept(self, reason: str) -> None:
        """Record that the frame is not compiled as it was looked at."""
        self.frame.captured, self.frame.reason = False, reason
        self.frame.passes = dict.fromkeys(self.frame.passes, 0)


def analyse(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, target: Target,
    patches: Mapping[str, Any] | None = None,
) -> Analysis:  # fmt: skip
    """Capture a frame, canonicalize it and run the passes. Never changes `gm`. patches: Inductor's settings for the
    frame, by default those of `config`. Raises AttentionError for the option `fa4` on CUDA without its package."""
    effects.warn_of_ineffective(config, target)
    if config.fa4 and target.cublas:
        require_fa4("Install it, or leave out the option 'fa4'.")
    began = time.perf_counter()
    backward = is_backward(gm)
    shards = None if backward else sequence_shards(gm, example_inputs)
    patches = config.inductor if patches is None else patches
    key = _key(gm, example_inputs, config, target, patches) if unbacked_shapes.refuse(gm) and shards is None else None
    if key is not None and _last_left is not None and _last_left.key == key:
        return _last_left.seen_in(gm, time.perf_counter() - began)
    analysis = _analyse(gm, example_inputs, config, target, patches, shards)
    if analysis.frame.grad and not backward:
        analysis.notes += conflicts.overruled(gm, config) + whole_activations(gm)
    if shards is not None:
        analysis.notes += shards.tell(gm, analysis.captured, analysis.outcome, config)
        analysis.shards = shards
    seconds = analysis.frame.seconds
    seconds["analysis"] = time.perf_counter() - began - sum(seconds.values())
    if key is not None:
        analysis.again = _Left(key, analysis)
    return analysis


def _analyse(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, target: Target, patches: Mapping[str, Any],
    shards: SequenceShards | None,
) -> Analysis:  # fmt: skip
    grad = trains(example_inputs)
    left, config = config, config.on(target)
    frame = Frame(name=frame_name(gm), nodes=len(gm.graph.nodes), target=target.name, grad=grad)
    frame.label = rules.announce_target(target.name)
    frame.policy = config.own_policy.to_dict() if config.own_policy is not None else None
    if left is not config:
        frame.chosen = {"keep_latents": config.keep_latents}
    log.graph("dynamo", gm)
    frame.modules = modules_called(gm.graph) if collector.active() else {}
    calls_ops = any(map(_is_own, gm.graph.nodes))
    if is_backward(gm):
        frame.name, frame.reason = "backward (compiled autograd)", "its ops are lowered, and no pass looks at it"
        return Analysis(frame, calls_ops=calls_ops)
    if (nothing := nothing_to_do(gm, config)) is not None:
        frame.reason, frame.passes = nothing, {p.name: 0 for p in enabled_passes(config)}
        frame.attention = unseen_sites(gm.graph, wanted_by(config), frame.grad)
        return Analysis(frame)
    began = time.perf_counter()
    try:
        if refusal := backend_for(target, example_inputs).refusal(gm, patches, config, grad):
            if config.strict:
                raise NotCapturedError(frame.name, refusal)
            return _left_alone(frame, gm, config, refusal, fallbacks.SETTINGS)
        captured = capture(gm, example_inputs)
    except (CaptureError, TorchInternalsError) as error:
        if config.strict:
            raise NotCapturedError(frame.name, str(error)) from error
        analysis = _left_alone(frame, gm, config, str(error), fallbacks.CAPTURE)
        analysis.calls_ops = calls_ops
        return analysis
    frame.seconds["capture"] = time.perf_counter() - began
    try:
        captured = head_widths.fixed(captured, gm, example_inputs, config)
        outcome, shown = _rewrite(captured, example_inputs, config, frame, assumptions.marked(gm), shards)
        frame.attention, swapped = attention_sites(captured, wanted_by(config), frame.grad)
    except Exception as error:  # a defect of ours must not become the user's, nor a change of torch's
        meant = isinstance(error, MegacppError) and not isinstance(error, TorchInternalsError)
        if config.strict or meant:
            raise
        reason = f"internal error: {type(error).__name__}: {error}"[:300]
        return _left_alone(frame, gm, config, reason, fallbacks.DEFECT)
    frame.passes, frame.nodes = outcome.counts, len(captured.gm.graph.nodes)
    frame.recognised = outcome.recognised + _recurrences(captured)
    frame.seconds.update(outcome.seconds)
    log.graph("rewritten", captured.gm)
    return Analysis(frame, captured, outcome, shown, swapped=swapped)


def _left_alone(frame: Frame, gm: GraphModule, config: Config, reason: str, advice: str) -> Analysis:
    """The analysis of a frame that the backend compiles alone."""
    analysis, frame.precision = Analysis(frame), unseen(gm.graph, config.precision, ALONE)
    frame.attention = unseen_sites(gm.graph, wanted_by(config), frame.grad)
    analysis.fell_back(reason, advice, fallbacks.may_hold_idiom(gm))
    return analysis


def _rewrite(
    captured: Captured, example_inputs: Sequence[Any], config: Config, frame: Frame, marks: int,
    shards: SequenceShards | None = None,
) -> tuple[Outcome, bool]:  # fmt: skip
    """What the passes did, and whether anything was assumed, with `marks` in the graph, and all of it may stand."""
    canonicalize(captured.gm.graph, captured.fake_mode)
    found = assumed.show(captured, config, marks, frame.grad) if marks or unbacked_shapes.numbers_assumed() else None
    log.graph("captured", captured.gm)
    called = [n for n in captured.gm.graph.nodes if n.target in semantic_ops()]
    wanted = asked(captured.gm.graph, captured.weights, config.precision)
    for row in mixers_by_rule(captured.gm.graph, wanted):
        effects.warn_of_untested(config, TARGETS[frame.target], row.requested, row.rule)
    count_saved = frame.grad and (collector.active() or config.explain)
    reviewer = Reviewer(captured, example_inputs, config, count_saved, collector.active())
    given = frozenset(captured.gm.graph.nodes)
    outcome = run_passes(captured, config, reviewer if shards is None else shards.refusing(reviewer), log.graph)
    if short_loops.marks(captured.gm.graph):
        lengthen(captured, given)
    outcome.misses += captured.given_up
    if outcome.sites:
        outcome.misses += reviewer.unverified()
    frame.verified = reviewer.verified
    frame.precision = answered(wanted, outcome, config)
    frame.precision += unseen(captured.gm.graph, config.precision, ON_DTENSORS)
    add_called_ops(outcome, called)
    if shards is not None:
        shards.hand_on(captured, outcome)
    choose_lowerings(outcome, frame.target, captured.gm, config)
    left = not marks and unbacked_shapes.unknown_numbers(captured.gm) or assumptions.filled(captured.gm)
    shown = found is not None and found.stands(outcome) and not left
    frame.expert_loops = len(found.outputs or ()) if shown and found is not None else 0
    return outcome, shown


def retrace_needed(gm: GraphModule, analysis: Analysis) -> bool:
    """Whether Dynamo has to trace the frame again, with graph breaks, for sizes that are known at run time only. Of
    `analysis` the near misses are left: the frame will not look like this then."""
    assumed_only = unbacked_shapes.numbers_assumed() and not analysis.shown
    if not assumed_only and not unbacked_shapes.refuse(analysis.rewritten_gm() or gm):
        return False
    if analysis.outcome is not None:
        analysis.outcome.sites.clear()
    analysis.not_kept("sizes known at run time only: traced again with graph breaks")
    analysis.frame.left_to = "pieces"
    global _last_left
    _last_left = analysis.again or _last_left
    return True


class _Left:
    """A frame that is traced again with graph breaks, as the passes found it: with no graph, and no op put in place."""

    def __init__(self, key: Hashable, analysis: Analysis) -> None:
        self.key, self.frame, self.shown = key, copy.deepcopy(analysis.frame), analysis.shown
        self.notes, outcome = list(analysis.notes), analysis.outcome
        self.misses = list(outcome.misses) if outcome is not None else None

    def seen_in(self, gm: GraphModule, seconds: float) -> Analysis:
        """What `analyse` finds of `gm`, which is the same graph."""
        log.graph("dynamo", gm)
        frame = dataclasses.replace(copy.deepcopy(self.frame), name=frame_name(gm), seconds={"analysis": seconds})
        outcome = Outcome([], list(self.misses), dict(frame.passes), {}, []) if self.misses is not None else None
        return Analysis(frame, None, outcome, self.shown, list(self.notes), again=self)


# Dynamo goes from a frame that it gives up to those within.
_last_left: _Left | None = None


def _key(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, target: Target, patches: Mapping[str, Any]
) -> Hashable | None:
    """What two frames have in common whose analyses are the same; None where there may be more to it."""
    if unbacked_shapes.numbers_assumed() or (key := key_of(gm, example_inputs)) is None:
        return None
    return key, target.name, config.cache_key(), str(patches), collector.active()


def retrace(analysis: Analysis) -> NoReturn:
    """Have Dynamo trace the frame again, which `retrace_needed` asked for."""
    told = analysis.outcome is not None and any(miss.pass_name == "moe" for miss in analysis.outcome.misses)
    unbacked_shapes.retrace_without_loops(told)
    unbacked_shapes.retrace()


def _is_own(node: Node) -> bool:
    """Whether the node calls an op that is to be lowered, by whichever of its overloads."""
    return node.op == "call_function" and (str(node.target).startswith("megacpp.") or is_added(node.target))


def _recurrences(captured: Captured) -> list[dict[str, str]]:
    graph = captured.gm.graph
    found = find_recurrences(graph.nodes, activations(graph, captured.weights))
    return [recognised(NAMES[r.kind], r.node) for r in found if r.kind]


def frame_name(gm: GraphModule) -> str:
    """The function the frame compiles and where it stands."""
    return next((place for node in gm.graph.nodes if (place := outermost_frame(node))), "(no source known)")


def nothing_to_do(gm: GraphModule, config: Config) -> str | None:
    """Why no pass can possibly fire: every idiom multiplies, and none fits into a handful of nodes, but for a linear
    under a plan for linears and an attention that is to be another's."""
    if config.precision is not None or config.compress is not None or wanted_by(config):
        return None
    if any(registered(p) for p in enabled_passes(config)):
        return None  # a rule's idiom may be smaller
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    if any(isinstance(n.target, HigherOrderOperator) or _is_own(n) for n in calls):
        return None  # a checkpointed block is one call here, and an op that a model calls is to be lowered
    return "too small to hold an idiom" if len(calls) < 3 else None
