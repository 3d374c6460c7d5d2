"""The whole compiler, as named stages: capture, normalise, passes, then lowering and handoff.

`torch.compile(model, backend="megacpp")` finds `megacpp` through the entry point group `torch_dynamo_backends`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node

from megacpp_compile import dynamic_outputs, fp8_boundary, handoff, log, openxla, report, saved, torchtpu, verify
from megacpp_compile.capture import Captured, capture
from megacpp_compile.config import Config
from megacpp_compile.effective_precision import answered, asked, unseen
from megacpp_compile.errors import (
    CaptureError,
    MegacppError,
    NotLoweredError,
    PeakUnreachableError,
    RequirementError,
    TorchTooOldError,
    VerificationError,
)
from megacpp_compile.inductor_stages import why_alone
from megacpp_compile.lowerings._registry import choose, semantic_ops
from megacpp_compile.named_rules import check_frame
from megacpp_compile.normalise import normalise
from megacpp_compile.passes._driver import Outcome, enabled_passes, pass_names, run_passes
from megacpp_compile.passes._rule import Match, Pass, Refusal
from megacpp_compile.precision.plan import announce
from megacpp_compile.provenance import module_fqn, outermost_frame, source_line
from megacpp_compile.recognise.heads import activations
from megacpp_compile.recognise.recurrence import NAMES, find_recurrences
from megacpp_compile.remat import authority
from megacpp_compile.remat.kinds import Place, whole
from megacpp_compile.remat.plan import Plan
from megacpp_compile.remat.tagging import describe
from megacpp_compile.report import Frame, Miss, Site
from megacpp_compile.sharding.pinning import Kin, pin_frame
from megacpp_compile.sharding.plan import ShardingPlan
from megacpp_compile.static_launch import start_workers
from megacpp_compile.targets import by_torch_tpu, resolve_target

MINIMUM_TORCH = (2, 9)
_ALONE = "the frame was compiled by Inductor alone"


def megacpp(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """The `torch.compile` backend.

    gm, example_inputs: Dynamo's graph and its inputs. options: fields of `Config`. mode: a `torch.compile` mode, whose
    Inductor settings are used. Raises the errors of `megacpp_compile.errors` for bad options, an unmet `require`, a
    failed verification under `strict`, or a target that is not there.
    """
    check_torch()
    return compile_frame(gm, example_inputs, Config.from_options(options, pass_names()), mode)


def compile_frame(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, mode: str | None, block: str = "", blocks: int = 0,
    kernels: Any = None, kin: Kin | None = None, checked: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """All stages. block: name of the repeated block the frame belongs to; blocks: how many are like it; kernels: what
    makes code of a partitioned graph in Inductor's place; kin: as in `sharding.pinning.pin_frame`;
    checked: whether rules by name have been held against the whole model."""
    patches = {**mode_patches(mode), **config.inductor}
    target = resolve_target(config.target, example_inputs)
    if kernels is None:
        start_workers(target)
    authority.check(gm, config)
    if not checked:
        check_frame(gm, config)
    if config.precision is not None:
        announce(config.precision, target)
    boundary = fp8_boundary.enter(gm, example_inputs)
    gm, example_inputs = boundary.gm, boundary.inputs
    began = time.perf_counter()
    result = analyse(gm, example_inputs, config, target, patches)
    result.notes = boundary.notes + fp8_boundary.widened(gm, config.strict)
    result.frame.block, result.frame.blocks = block, blocks
    result.frame.seconds["analysis"] = time.perf_counter() - began - sum(result.frame.seconds.values())
    if refused(gm, result):
        if result.outcome is not None and result.outcome.misses:
            _publish(result, config)
        dynamic_outputs.trace_again()
    if config.sharding is not None:
        _pin(config.sharding, gm, example_inputs, result, kin)
    compiled = _compile(gm, example_inputs, result, config, patches, kernels)
    # Only now: a frame Inductor can't compile is tried again by Dynamo in pieces, and did not happen.
    _publish(result, config)
    return boundary.adapt(compiled)


def _compile(
    gm: GraphModule, example_inputs: Sequence[Any], result: Analysis, config: Config, patches: dict[str, Any],
    kernels: Any,
) -> Callable[..., Any]:  # fmt: skip
    """Stages 5 and 6. A frame nothing fired in goes to Inductor as it came, and so does one whose rewritten graph
    Inductor refuses (an error under `strict`)."""

    plain, rewritten = _handoff(result.frame.target, example_inputs)
    if rewritten is torchtpu.to_torchtpu and torchtpu.dynamic(gm):
        result.fell_back("sizes that are not known when compiling for torch_tpu: compile with dynamic=False")

    def tell(plan: Plan, where: dict[Node, Place], peak: dict[str, Any]) -> None:
        assert config.policy is not None
        result.frame.remat, result.frame.peak = describe(plan, where, config.policy), peak

    copies = max(result.frame.blocks, 1)
    settings = handoff.Settings(result.frame.target, config, patches, tell, kernels, copies)

    if result.outcome is None or not result.outcome.sites:
        return plain(gm, example_inputs, settings)
    lower = functools.partial(rewritten, result.captured.gm, example_inputs)
    try:
        try:
            return lower(settings)
        except Exception as error:
            if not handoff.from_pattern_matcher(error):
                raise
            log.logger.info("frame %s: one of Inductor's patterns failed, compiled without them", result.frame.name)
            return lower(dataclasses.replace(settings, patches={**patches, "pattern_matcher": False}))
    except (PeakUnreachableError, NotLoweredError):
        raise
    except torch._dynamo.exc.RestartAnalysis:
        raise  # Dynamo's own way back, as when a float turns out to be a constant
    except Exception as error:
        if config.strict:
            raise
        if dynamic_outputs.refuse(gm):
            log.logger.warning("traced again with graph breaks: %s: %s", type(error).__name__, str(error)[:300])
            dynamic_outputs.trace_again()
        compiled = plain(gm, example_inputs, settings)
        result.fell_back(f"Inductor refused the rewritten graph: {type(error).__name__}: {error}"[:300])
        return compiled


def _pin(plan: ShardingPlan, gm: GraphModule, inputs: Sequence[Any], result: Analysis, kin: Kin | None) -> None:
    """Lay out what the frame's parameters are fused into, before anything is compiled for it."""
    outcome = result.outcome
    ops = zip((s.pass_name for s in outcome.sites), outcome.op_nodes, strict=True) if outcome is not None else ()
    pinned, specs = pin_frame(plan, gm, inputs, ops, whole(gm) and kin is None, kin)
    result.frame.sharding = {"mesh": dict(plan.mesh), "pinned": [row.to_dict() for row in pinned]}
    if plan.batch:
        from megacpp_compile.sharding.layout import gather

        for graph in (gm, result.captured.gm) if outcome is not None else (gm,):
            gather(plan, graph, specs)


def _handoff(target: str, example_inputs: Sequence[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What compiles a frame as it came, and what compiles a rewritten one."""
    if target == "tpu" and by_torch_tpu(example_inputs):
        return torchtpu.plain_torchtpu, torchtpu.to_torchtpu
    if target == "tpu":
        return openxla.plain_openxla, openxla.to_openxla
    return handoff.plain_inductor, handoff.to_inductor


def refused(gm: GraphModule, result: Analysis) -> bool:
    """Whether Dynamo has to trace the frame again, with graph breaks, for sizes that are known at run time only. Of the
    result its near misses are left: the frame will not look like this then."""
    if not dynamic_outputs.refuse(result.captured.gm if result.outcome and result.outcome.sites else gm):
        return False
    if result.outcome is not None:
        result.outcome.sites.clear()
    result.not_kept("sizes known at run time only: traced again with graph breaks")
    return True


def check_torch(found: str | None = None) -> None:
    """Raise TorchTooOldError for a torch older than 2.9."""
    found = found or torch.__version__
    if tuple(int(x) for x in found.split(".")[:2]) < MINIMUM_TORCH:
        raise TorchTooOldError(found)


def mode_patches(mode: str | None) -> dict[str, Any]:
    """Inductor's settings of a `torch.compile` mode."""
    if mode in (None, "default"):
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


class Analysis:
    """A frame after the passes: what was captured (None: it fell back), what was done, and the report's frame."""

    def __init__(self, frame: Frame, captured: Any = None, outcome: Outcome | None = None) -> None:
        self.frame, self.captured, self.outcome = frame, captured, outcome
        self.notes: list[Miss] = []  # what is to be reported of the frame, whatever becomes of it

    def fell_back(self, reason: str) -> None:
        """Nothing was rewritten after all."""
        log.logger.warning("frame %s compiled by Inductor alone: %s", self.frame.name, reason)
        self.frame.captured, self.frame.reason, self.outcome = False, reason, None
        self.frame.passes = dict.fromkeys(self.frame.passes, 0)
        for row in self.frame.precision:
            if row["effective"] == row["requested"] != "bf16":
                row["effective"], row["reason"] = "as written", _ALONE

    def not_kept(self, reason: str) -> None:
        """What was found is to be reported, and the frame itself is not compiled as it was looked at."""
        self.frame.captured, self.frame.reason = False, reason
        self.frame.passes = dict.fromkeys(self.frame.passes, 0)


def analyse(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, target: str, patches: dict[str, Any] | None = None
) -> Analysis:
    """Stages 1 to 3. Never changes `gm`. patches: Inductor's settings for the frame; those of `config` when None."""
    grad = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)
    left, config = config, config.on(target)
    frame = Frame(name=_frame_name(gm), nodes=len(gm.graph.nodes), target=target, grad=grad)
    if left is not config:
        frame.chosen = {"keep_latents": config.keep_latents}
    log.graph("dynamo", gm)
    if (nothing := _nothing_to_do(gm, config)) is not None:
        frame.reason, frame.passes = nothing, {p.name: 0 for p in enabled_passes(config)}
        _enforce(config, frame.passes, [])
        return Analysis(frame)
    if target != "tpu" and (off := why_alone(config.inductor if patches is None else patches, config, grad)):
        return _left_to_inductor(frame, gm, config, off)
    began = time.perf_counter()
    try:
        captured = capture(gm, example_inputs)
    except CaptureError as error:
        frame.captured, frame.reason = False, str(error)
        frame.precision = unseen(gm.graph, config.precision, _ALONE)
        log.logger.info("frame not captured, compiled by Inductor alone: %s", error)
        _enforce(config, {}, [])
        return Analysis(frame)
    frame.seconds["capture"] = time.perf_counter() - began
    try:
        outcome = _rewrite(captured, example_inputs, config, frame)
    except MegacppError:
        raise
    except Exception as error:  # a defect of ours must not become the user's
        if config.strict:
            raise
        return _left_to_inductor(frame, gm, config, f"internal error: {type(error).__name__}: {error}"[:300])
    frame.passes, frame.nodes = outcome.counts, len(captured.gm.graph.nodes)
    frame.recognised = _recognised(captured)
    frame.seconds.update(outcome.seconds)
    log.graph("rewritten", captured.gm)
    _enforce(config, outcome.counts, outcome.misses)
    return Analysis(frame, captured, outcome)


def _left_to_inductor(frame: Frame, gm: GraphModule, config: Config, reason: str) -> Analysis:
    result, frame.precision = Analysis(frame), unseen(gm.graph, config.precision, _ALONE)
    result.fell_back(reason)
    _enforce(config, {}, [])
    return result


def _rewrite(captured: Captured, example_inputs: Sequence[Any], config: Config, frame: Frame) -> Outcome:
    normalise(captured.gm.graph, captured.fake_mode)
    captured.gm.recompile()
    log.graph("captured", captured.gm)
    called = [n for n in captured.gm.graph.nodes if n.target in semantic_ops()]
    wanted = asked(captured.gm.graph, captured.weights, config.precision)
    outcome = run_passes(captured, config, _Reviewer(captured, example_inputs, config, frame.grad), log.graph)
    frame.precision = answered(wanted, outcome, config)
    _add_called(outcome, called)
    _choose_lowerings(outcome, captured, frame.target)
    return outcome


def _recognised(captured: Captured) -> list[dict[str, str]]:
    graph = captured.gm.graph
    found = find_recurrences(graph.nodes, activations(graph, captured.weights))
    return [
        {"kind": NAMES[r.kind], "fqn": module_fqn(r.node), "source": source_line(r.node)} for r in found if r.kind
    ]


def _frame_name(gm: GraphModule) -> str:
    """The function the frame compiles and where it stands."""
    for node in gm.graph.nodes:
        place = outermost_frame(node)
        if place:
            return place
    return "(no source known)"


def _nothing_to_do(gm: GraphModule, config: Config) -> str | None:
    """Why no pass can possibly fire: every idiom multiplies, and none fits into a handful of nodes, but for a linear
    under a precision plan."""
    if config.precision is not None:
        return None
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    if any(isinstance(n.target, torch._ops.HigherOrderOperator) or str(n.target).startswith("megacpp.") for n in calls):
        return None  # a checkpointed block is one call here, and an op that a model calls is to be lowered
    return "too small to hold an idiom" if len(calls) < 3 else None


def _enforce(config: Config, counts: Mapping[str, int], misses: list[Any]) -> None:
    for name, wanted in config.require.items():
        if counts.get(name, 0) != wanted:
            near = [m for m in misses if m.pass_name == name]
            raise RequirementError(name, wanted, counts.get(name, 0), near)


def _add_called(outcome: Outcome, called: Sequence[Node]) -> None:
    """Semantic ops that the model itself calls are sites too: they are lowered like those of a pass. What a pass makes
    beside its op, such as the payloads of a linear in float8, belongs to its site."""
    for node in called:
        op = f"{node.target.namespace}::{node.target._opname}"  # type: ignore[union-attr]
        outcome.sites.append(Site("(called)", op, module_fqn(node), source_line(node), "", "", node=node.name))
        outcome.op_nodes.append(node)


def _choose_lowerings(outcome: Outcome, captured: Captured, target: str) -> None:
    for site, node in zip(outcome.sites, outcome.op_nodes, strict=True):
        args = torch.fx.map_arg(node.args, lambda n: n.meta["val"])
        assert node.target in semantic_ops()
        choice = choose(node.target, target, args)
        site.requested, site.effective, site.reason = choice.requested, choice.effective, choice.reason


class _Reviewer:
    """Looks at each rewrite while both versions stand: verifies it if asked to, and counts saved bytes."""

    def __init__(self, captured: Captured, example_inputs: Sequence[Any], config: Config, grad: bool) -> None:
        self.captured, self.inputs, self.config, self.grad = captured, example_inputs, config, grad
        self.count = grad and (report.active() or config.explain)
        self.cache: dict[Any, int | None] = {}

    def __call__(self, p: Pass, match: Match, new: list[Node], site: Site) -> Refusal | None:
        gm = self.captured.gm
        if self.config.verify == "each" and not any(isinstance(x, FakeTensor) for x in self.inputs):
            refusal = self._verify(p, match, new, site)
            if refusal is not None:
                return refusal
        if self.count:
            site.set_saved(self._saved(gm, match.inputs, match.outputs), self._saved(gm, match.inputs, new))
        return None

    def _verify(self, p: Pass, match: Match, new: list[Node], site: Site) -> Refusal | None:
        gm = self.captured.gm
        gm.recompile()
        wanted = set(match.inputs)
        values = verify.border_values(gm, self.inputs, wanted)
        others = [n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr") and n not in values]
        holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        values.update({n: v for n, v in zip(holders, self.inputs, strict=True) if n in others})
        differentiable = activations(gm.graph, self.captured.weights)
        tensor, error, tolerance = verify.compare(gm, match.inputs, match.outputs, new, values, differentiable)
        if error <= tolerance:
            return None
        if self.config.strict:
            raise VerificationError(p.name, site.fqn, site.source, tensor, error, tolerance)
        return Refusal(match.node, "verification", f"{tensor} differs by {error:.2e} (tolerance {tolerance:.0e})")

    def _saved(self, gm: GraphModule, inputs: list[Node], outputs: list[Node]) -> int | None:
        from megacpp_compile.subgraph import between

        module, order = between(gm, inputs, outputs)
        key = (module.code, tuple(str(n.meta.get("val")) for n in order))
        if key not in self.cache:
            self.cache[key] = saved.saved_bytes(gm, inputs, outputs, self.captured.fake_mode)
        return self.cache[key]


def _publish(result: Analysis, config: Config) -> None:
    outcome = result.outcome
    sites, misses = (outcome.sites, outcome.misses + result.notes) if outcome else ([], result.notes)
    report.emit_frame(result.frame, sites, misses)
    log.artifact(result.frame, sites, misses)
    if config.explain:
        own = report.Report(pass_names())
        own.add(result.frame, sites, misses)
        print(own, file=sys.stderr)


class _Backend(ModuleType):
    """This module, callable: `torch.compile(model, backend=megacpp_compile.backend)` means `megacpp`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return megacpp(*args, **kwargs)


sys.modules[__name__].__class__ = _Backend
# `import megacpp_compile` does not come here; asking for the backend does.
for _backend in (megacpp, sys.modules[__name__]):
    dynamic_outputs.marked(_backend)
dynamic_outputs.install()
