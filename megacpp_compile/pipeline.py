"""The whole compiler, for one frame: `compile_frame` is the data flow, and each line of it names a package.

Dynamo's graph is captured and canonicalized (`frontend`), idioms become semantic ops (`passes`, which ask `matchers`):
that is `analysis`. A backend (`backends`) differentiates the result, plans what a training step keeps (`remat`), lowers
the ops (`lowerings`) and generates code. `report` records all of it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from megacpp_compile._torch.dynamo import RestartAnalysis
from megacpp_compile.analysis import Analysis, analyse, frame_name, nothing_to_do, retrace, retrace_needed
from megacpp_compile.backends import stitched
from megacpp_compile.backends._protocol import Backend, Settings, backend_for
from megacpp_compile.backends.agreement import Meeting, Outcome, form_of, meeting_of, tells_failures
from megacpp_compile.backends.cache_hits import cache_hits
from megacpp_compile.backends.delayed_scaling import thread_amax_history
from megacpp_compile.backends.serialized import serializable, wanted
from megacpp_compile.backends.weight_casts import take_casts
from megacpp_compile.config import rules
from megacpp_compile.config.options import Config
from megacpp_compile.errors import GraphBreakError, NotLoweredError, PeakUnreachableError, TwoPoliciesError
from megacpp_compile.frontend import (
    dropped_outputs,
    fallbacks,
    fixed_floats,
    graph_breaks,
    nested_regions,
    rolled_loops,
    tensor_subclasses,
    triangular_buffers,
    unbacked_shapes,
)
from megacpp_compile.frontend.calls_of_blocks import NotCut
from megacpp_compile.frontend.hoisted_input_writes import ahead_of
from megacpp_compile.frontend.later_gradients import LaterGradients, places_of
from megacpp_compile.frontend.sdpa_regions import restore_sdpa_regions
from megacpp_compile.fx.differentiated import trains
from megacpp_compile.fx.provenance import is_backward, is_whole
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.passes._driver import pass_names
from megacpp_compile.passes._frame import mixed_documents
from megacpp_compile.passes._frame.buckets import cut_sites, follow_sites
from megacpp_compile.passes._frame.required import FrameCount, Requirement
from megacpp_compile.passes._frame.sequence_shards import watching
from megacpp_compile.remat import conflicts
from megacpp_compile.remat.across_ranks import allocated_under
from megacpp_compile.remat.tagging import noted_in
from megacpp_compile.report import collector, equal_calls, log, stages
from megacpp_compile.report.records import Frame, MissedFusion, Site
from megacpp_compile.sharding.frames import pin_for_frame
from megacpp_compile.sharding.pinning import SiblingParams
from megacpp_compile.targets import Target, resolve_target


@dataclasses.dataclass(frozen=True)
class Block:
    """The repeated block that a frame belongs to.

    name: of the first such block in the model, "" for a frame that is none. copies: how many run its artifact.
    sibling_params: as in `sharding.pinning.pin_frame`. checked: whether rules by name were held against the model.
    required: what `require` asks of the model that the frame is a piece of, None where the frame's own call counts.
    publish: takes what is to be reported of the frame, where it is one of the pieces that one of Dynamo's was cut into.
    others: names of modules in each further call of such a piece, as in `report.equal_calls`.
    model: the whole model, where the frame is known to be a part of it. backend: in the place of the target's.
    all_gradients: whether what is beside a loss is differentiated with it (`frontend.later_gradients`).
    """

    name: str = ""
    copies: int = 0
    sibling_params: SiblingParams | None = None
    checked: bool = False
    required: Requirement | None = None
    publish: Callable[[Analysis], None] | None = None
    others: Sequence[equal_calls.Names] = ()
    model: Any = None
    backend: Backend | None = None
    all_gradients: bool = False


WHOLE = Block()
# The settings that compiled autograd's frames have no use for: what a forward returns and saves, how it is rewritten.
_OF_FORWARD = ("require", "drop_outputs", "policy", "block_kinds", "precision", "cache_weight_casts", "compress",
               "sharding")  # fmt: skip


@tells_failures
def compile_frame(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, patches: dict[str, Any], block: Block = WHOLE,
    inner_compile: Any = None,
) -> Callable[..., Any]:  # fmt: skip
    """Compile Dynamo's graph `gm`, called with `example_inputs`; returns the callable that Dynamo runs in its place.

    patches: Inductor's settings. inner_compile: makes code of a partitioned graph in Inductor's place. Raises the
    errors of `megacpp_compile.errors` for unmet demands of the user's; a frame that cannot be rewritten, or not on all
    ranks that communicate in it, is compiled by the backend alone, with the reason in the report.
    """
    if is_backward(gm):  # what is asked of a model was held against its forward
        config = dataclasses.replace(config, **{name: getattr(Config(), name) for name in _OF_FORWARD})
    if rolled_loops.rolled(gm):
        return unbacked_shapes.with_few_steps(
            gm, lambda few: compile_frame(few, example_inputs, config, patches, block, inner_compile)
        )
    if (regions := nested_regions.inline_regions(gm)) is not gm:
        config = dataclasses.replace(config, repeated_blocks=True)
        return compile_frame(regions, example_inputs, config, patches, block, inner_compile)
    follow_sites(gm, config)
    whole, gm = gm, gm if wanted() else triangular_buffers.as_code(gm, example_inputs)
    before = stages.since_frame_began()
    target = resolve_target(config.target, example_inputs)
    given, config = config, config.without_auto()
    if (cut := graph_breaks.end_of(gm)) is not None and config.strict:
        raise GraphBreakError(cut.place, cut.reason)
    outputs = dropped_outputs.without(gm, example_inputs, config)
    later = _later(outputs.gm, example_inputs, given, patches, block, inner_compile)
    gm = (early := ahead_of(later.gm)).gm
    conflicts.check(gm, config)
    if not block.checked:
        rules.check_frame(gm, config)
    if config.precision is not None:
        rules.announce(config.precision, target.name)
    if given.repeated_blocks and block.publish is None:
        pieces = _in_pieces(gm, example_inputs, given, target, patches, block, inner_compile)
        if pieces is not None:
            return serializable(outputs.adapt(later.adapt(early.adapt(pieces))), whole, given, patches)
    ranks = meeting_of(gm, frame_name(gm), trains(example_inputs), config) if inner_compile is None else None
    boundary = tensor_subclasses.enter(gm, example_inputs, config.strict)
    analysis = analyse(boundary.gm, boundary.inputs, config, target, patches)
    rolled_loops.check(boundary.gm, analysis.rewritten_gm())
    analysis.notes += unbacked_shapes.step_by_step()
    analysis.notes += boundary.notes + tensor_subclasses.widened(boundary.gm, config.strict)
    analysis.frame.block, analysis.frame.blocks = block.name, block.copies
    alone = is_whole(gm) and not block.name and block.publish is None
    documents = mixed_documents.mixed(analysis.captured, analysis.near_misses(), alone, config)
    if documents is not None:
        documents.across = equal_calls.records(documents.across, block.others)
    if before is not None:
        analysis.frame.seconds["dynamo"] = before
    rewritten = analysis.rewritten_gm()
    if rewritten is not None and analysis.captured is not None:
        fixed_floats.trace_again(rewritten, analysis.captured.fake_mode.shape_env)
    analysis.frame.auto = conflicts.auto_for(gm, rewritten, example_inputs, given, patches)
    analysis.frame.graph_break = str(cut or "")
    analysis.frame.recompiled = unbacked_shapes.what_changed()
    analysis.notes += cut_sites(gm, analysis.outcome.sites if analysis.outcome else [], config)
    count = FrameCount(gm, config, block.required)
    if retrace_needed(boundary.gm, analysis):
        count.saw(analysis.near_misses())
        # What is left of a loop behind a graph break would say the same again.
        if analysis.outcome and analysis.outcome.misses and not collector.reported(analysis.outcome.misses):
            publish(analysis, config, block.others)
        if ranks is not None:
            ranks.report(Outcome(again="sizes are known at run time only"))
        retrace(analysis)
    count.check(analysis.frame, analysis.near_misses())
    if config.sharding is not None:
        analysis.frame.sharding = pin_for_frame(
            config.sharding, boundary.gm, boundary.inputs, analysis.op_nodes(), analysis.rewritten_gm(),
            is_whole(boundary.gm), block.sibling_params,
        )  # fmt: skip
    served = cache_hits()
    with stages.timed(analysis.frame.seconds, "torch", analysis.frame.pieces):
        compiled = _hand_to_backend(boundary.gm, boundary.inputs, analysis, config, target, patches, inner_compile,
                                    block, ranks)  # fmt: skip
    analysis.frame.cached = cache_hits() > served
    compiled = compiled if ranks is None else ranks.counting(compiled)
    compiled = watching(count.counting(compiled, analysis.frame), analysis.op_nodes(), analysis.shards, config)
    compiled = mixed_documents.watching(compiled, documents, analysis.frame, config, block.model)
    # Only now: a frame Inductor cannot compile is tried again by Dynamo in pieces, and did not happen.
    publish(analysis, config) if block.publish is None else block.publish(analysis)
    compiled = outputs.adapt(later.adapt(early.adapt(boundary.adapt(compiled))))
    return compiled if block.publish is not None else serializable(compiled, whole, given, patches)


def _later(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, patches: dict[str, Any], block: Block,
    inner_compile: Any,
) -> LaterGradients:  # fmt: skip
    """The frame `gm` without gradients of what is seldom asked for any, and what it is compiled by where they are."""
    whose = dataclasses.replace(block, all_gradients=True)

    def again(graph: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        return compile_frame(graph, examples, config, patches, whose, inner_compile)

    none = block.all_gradients or block.publish is not None or wanted()
    return LaterGradients(gm, [] if none else places_of(gm, example_inputs), again)


def _in_pieces(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, target: Target, patches: dict[str, Any],
    block: Block, inner_compile: Any,
) -> Callable[..., Any] | None:  # fmt: skip
    """Code for a frame whose blocks repeat, of which each kind is compiled once; None where it is to be one graph, with
    the reason in the report."""
    later: list[tuple[Analysis, stitched.Served]] = []
    count = FrameCount(gm, config, block.required)
    required = None if count.alone else count.model
    if count.alone and config.require:
        config = dataclasses.replace(config, require={})  # which all pieces meet together

    def compile_piece(graph: GraphModule, examples: Sequence[Any], piece: stitched.Served) -> Callable[..., Any]:
        if not piece.name and nothing_to_do(graph, piece.config) is not None:
            return graph.forward  # no more than a call or two is not worth a graph
        done: Callable[[Analysis], None] = lambda analysis: later.append((analysis, piece))  # noqa: E731
        whose = Block(piece.name, piece.blocks, None, True, required, done, piece.others)
        try:
            return compile_frame(graph, examples, piece.config, patches, whose, inner_compile)
        finally:
            stages.frame_goes_on()

    def fires(graph: GraphModule, examples: Sequence[Any], settings: Config) -> Counter[str]:
        return Counter(analyse(graph, examples, settings.without_auto(), target, patches).frame.passes)

    try:
        if block.name or not count.alone and required is None:
            why = "it is a block that is compiled by itself" if block.name else "'require' counts in it"
            raise NotCut(why, few=bool(block.name))
        compiled, regions = stitched.compile_blocks(gm, example_inputs, config, target, patches, compile_piece, fires)
    except NotCut as why:
        log.logger.info("repeated_blocks: compiled as one graph: %s", why)
        if config.repeated_blocks is True or not why.few:
            collector.emit_regions([stitched.whole(gm, str(why))])
        return None
    for analysis, _ in later[1:]:
        analysis.frame.recompiled = ""  # Dynamo's frame was, once
    if later:
        later[-1][0].frame.graph_break = str(graph_breaks.end_of(gm) or "")
    if count.alone:
        found = [reported(analysis, piece.others) for analysis, piece in later]
        fired = sum((Counter(frame.passes) for frame, *_ in found), Counter[str]())
        count.check(Frame(name=frame_name(gm), passes=fired), [miss for *_, misses in found for miss in misses])
    collector.emit_regions(regions)
    for analysis, piece in later:
        publish(analysis, piece.config, piece.others)
    return compiled


def _hand_to_backend(
    gm: GraphModule, example_inputs: Sequence[Any], analysis: Analysis, config: Config, target: Target,
    patches: dict[str, Any], inner_compile: Any, block: Block, ranks: Meeting | None,
) -> Callable[..., Any]:  # fmt: skip
    """Code for a frame. One that nothing fired in goes to the backend as it came, and so does one whose rewritten
    graph, or whose backward's, the backend refuses, here or on another rank that communicates in it; without the policy
    where that fails. Both are errors under `strict`; what Inductor refuses of the plain frame too is its own error."""
    backend = block.backend or backend_for(target, example_inputs)
    frame = analysis.frame
    planned = frame.auto is not None and not frame.auto["reason"]
    settings = Settings(
        target, config, patches, noted_in(frame, config.own_policy), inner_compile,
        max(frame.blocks, 1 + len(block.others)),
        frame.on_cuda_graph, analysis.on_auto if planned else None, frame.on_backward,
        (frame.auto or {}).get("allowed", 0.0), block.publish is not None,
        allocated_under(config.own_policy, example_inputs),
    )  # fmt: skip
    rewritten = analysis.rewritten_gm()
    if rewritten is None and analysis.calls_ops:
        rewritten = gm
    compiled, refused = None, ranks.left if ranks is not None else ""
    known = bool(refused)
    own = Outcome(form_of(rewritten, semantic_ops()), frame.reason if frame.left_to == "backend" else "")
    if rewritten is not None and not known:
        try:
            compiled = _rewritten(backend, rewritten, example_inputs, analysis, settings)
        except _MEANT:
            raise
        except Exception as error:
            if config.strict:
                raise
            refused = f"Inductor refused the rewritten graph: {type(error).__name__}: {error}"[:300]
            if analysis.shown or unbacked_shapes.refuse(gm):
                own = Outcome(again=refused)
            else:
                own = dataclasses.replace(own, left=refused)
    advice = fallbacks.REFUSED if refused and not known else fallbacks.RANKS
    if ranks is not None and not own.again:
        own = ranks.settle(own, config.strict)
        refused = refused or (own.left if compiled is not None else "")
    elif ranks is not None:
        ranks.report(own)
    if own.again:
        log.logger.warning("traced again with graph breaks: %s", own.again)
        retrace(analysis)
    if compiled is not None and not refused:
        return compiled
    compiled = _plain(backend, gm, example_inputs, analysis, settings)
    if refused and rewritten is not None:
        analysis.fell_back(refused, advice)
    return compiled


def _rewritten(
    backend: Backend, rewritten: GraphModule, example_inputs: Sequence[Any], analysis: Analysis, settings: Settings
) -> Callable[..., Any]:
    """Code for a rewritten frame."""
    restore_sdpa_regions(rewritten)
    casts = take_casts(rewritten)
    past = thread_amax_history(rewritten, analysis.captured)
    extra_inputs = [*casts.fakes, *past.fakes]
    return casts.adapt(past.adapt(backend.compile_lowered(rewritten, [*example_inputs, *extra_inputs], settings)))


# Errors that are meant to be seen; and Dynamo's own way back, as when a float turns out to be a constant.
_MEANT = (NotLoweredError, PeakUnreachableError, RestartAnalysis, TwoPoliciesError)


def _plain(
    backend: Backend, gm: GraphModule, example_inputs: Sequence[Any], analysis: Analysis, settings: Settings
) -> Callable[..., Any]:
    """Code for a frame as it came, with the policy as far as that can be applied."""
    try:
        return backend.compile_plain(gm, example_inputs, settings)
    except _MEANT:
        raise
    except Exception as error:
        if settings.config.strict or settings.config.own_policy is None:
            raise
        without = dataclasses.replace(settings, config=dataclasses.replace(settings.config, policy=None))
        compiled = backend.compile_plain(gm, example_inputs, without)
        analysis.frame.remat = analysis.frame.peak = None
        analysis.fell_back(f"the policy cannot be applied: {type(error).__name__}: {error}"[:300], fallbacks.POLICY)
        return compiled


def publish(analysis: Analysis, config: Config, others: Sequence[equal_calls.Names] = ()) -> None:
    """Report the frame to every open `record()`, to the structured log, and on stderr where `explain` asks for it."""
    frame, sites, misses = reported(analysis, others)
    collector.emit_frame(frame, sites, misses, at_exit=config.summary)
    log.artifact(frame, sites, misses)
    if config.explain:
        own = collector.Report(pass_names())
        own.add(frame, sites, misses)
        print(own, file=sys.stderr)


def reported(
    analysis: Analysis, others: Sequence[equal_calls.Names] = ()
) -> tuple[Frame, list[Site], list[MissedFusion]]:
    """What is to be reported of a frame. others: as in `Block`."""
    sites = analysis.outcome.sites if analysis.outcome else []
    return equal_calls.of_all(analysis.frame, sites, analysis.near_misses(), others)
