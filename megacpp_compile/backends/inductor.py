"""The Inductor backend, for CPU and CUDA.

Semantic ops are lowered as Inductor's `post_grad_custom_pre_pass`, remat is planned as its `joint_custom_post_pass`.
Both travel as config patches of this compilation; no global state is touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from megacpp_compile._torch.functorch import backward_with_forward, floats_of_the_frame, keep_saved_tensors
from megacpp_compile._torch.inductor import attention_left
from megacpp_compile._torch.inductor import config as inductor_config
from megacpp_compile._torch.triton_kernels import kernels_begun_when_written, kernels_read_once
from megacpp_compile.backends import cuda_graphs, static_launch
from megacpp_compile.backends._lower import LowerSemanticOps, expand_ahead
from megacpp_compile.backends._protocol import Settings
from megacpp_compile.backends.automatic import Automatic, AutomaticPartitioner
from megacpp_compile.backends.float32_gradients import KeepFloat32
from megacpp_compile.backends.inductor_stages import why_alone
from megacpp_compile.config.options import Config
from megacpp_compile.frontend.capture import fake_inputs
from megacpp_compile.frontend.checkpoint import checkpoint_tags, has_regions
from megacpp_compile.fx.edit import value
from megacpp_compile.lowerings._gemm.autotune import AutotuneGemms, BeginSearch
from megacpp_compile.lowerings._gemm.cublaslt import searches_end
from megacpp_compile.lowerings._gemm.outer_products import MultiplyOuterProducts
from megacpp_compile.remat.offload import Offload
from megacpp_compile.remat.plan import StepContext
from megacpp_compile.remat.tagging import KeepChoices, TagForRemat
from megacpp_compile.report import log, stages
from megacpp_compile.report.pieces import IMPORTS


def refusal(gm: GraphModule, patches: Mapping[str, Any], config: Config, grad: bool) -> str:
    """Why Inductor compiles the frame alone: its settings switch off a stage that lowers ops or plans remat."""
    return why_alone(patches, config, grad)


@searches_end()
def compile_lowered(gm: GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
    """Compile a rewritten frame, its backward included; without Inductor's own patterns where one of these fails on it.

    Inductor by itself lowers a backward when that first runs, and what fails there has nothing to fall back to. So a
    rewritten frame's is lowered with the forward: no time is lost where it runs at all, and one that never does costs
    its compilation. It leaves saved tensors as they are where Inductor would write into some that are dead, which costs
    up to 2 % of a step's peak without a policy (docs/limits.md).
    """
    expand_ahead(gm.graph, settings.target)
    user = settings.patches.get("post_grad_custom_pre_pass", inductor_config.post_grad_custom_pre_pass)
    lower = LowerSemanticOps(settings.target, settings.config, user, checkpoint_tags(gm.graph), settings.on_backward)
    launches = static_launch.patches(gm, settings.target, settings.patches) if settings.inner_compile is None else {}
    patches = {**launches, **gemm_patches(settings), "post_grad_custom_pre_pass": lower}
    with _errors_held_back() as said:
        try:
            return _compile(gm, example_inputs, dataclasses.replace(settings, patches=patches), with_backward=True)
        except Exception as error:
            if not from_pattern_matcher(error):
                raise
            said.clear()  # nothing has failed that is not made good below
            log.logger.info("one of Inductor's patterns failed, compiled without them: %s", error)
    patches["pattern_matcher"] = False
    return _compile(gm, example_inputs, dataclasses.replace(settings, patches=patches), with_backward=True)


@contextlib.contextmanager
def _errors_held_back() -> Iterator[list[logging.LogRecord]]:
    """What torch logs of fake tensors, which tell a failure before anyone can catch it, is logged at the end; but for
    records that were taken out of the list."""
    logger, held = logging.getLogger("torch._subclasses.fake_tensor"), list[logging.LogRecord]()

    def hold(record: logging.LogRecord) -> bool:
        held.append(record)
        return False

    logger.addFilter(hold)
    try:
        yield held
    finally:
        logger.removeFilter(hold)
        for record in held:
            logger.handle(record)


def gemm_patches(settings: Settings) -> dict[str, Any]:
    """The patches, and where large GEMMs are cuBLAS's the passes around Inductor's own: those over one channel become
    multiplications, and unless the option says otherwise, candidates for the others are timed."""
    if not settings.target.cublas:
        return settings.patches
    joint, late = (
        settings.patches.get(name, getattr(inductor_config, name))
        for name in ("joint_custom_pre_pass", "post_grad_custom_post_pass")
    )
    joint = MultiplyOuterProducts(joint)
    if not settings.config.autotune_gemms:
        return {**settings.patches, "joint_custom_pre_pass": joint}
    passes = {"joint_custom_pre_pass": BeginSearch(joint), "post_grad_custom_post_pass": AutotuneGemms(late)}
    return {**settings.patches, **passes}


def compile_plain(gm: GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
    """Compile a frame exactly as `backend="inductor"` would, but for the policy, if there is one; where it is one of
    several that Dynamo's is made of, its backward with it, as Dynamo keeps of the last alone what a backward that is
    compiled later needs."""
    return _compile(gm, example_inputs, settings, with_backward=settings.in_pieces)


def _compile(
    gm: GraphModule, example_inputs: Sequence[Any], settings: Settings, with_backward: bool = False
) -> Callable[..., Any]:
    with stages.piece(IMPORTS, "Inductor"):
        from megacpp_compile._torch.inductor import compile_fx

    patches = _with_policy(settings, gm, example_inputs)
    automatic = Automatic.of(settings)
    if automatic is not None:
        patches = {**patches, "custom_partitioner_fn": AutomaticPartitioner(automatic)}
    inputs, inner = _inner(settings.inner_compile, example_inputs)
    usual = inspect.signature(compile_fx).parameters.get("inner_compile")
    if (report := settings.on_cuda_graph) is not None and cuda_graphs.asked(patches):
        there = cuda_graphs.is_for_cuda(example_inputs)
        report(cuda_graphs.UNTOLD if there else cuda_graphs.ELSEWHERE)
        if there and (made := inner.get("inner_compile", usual and usual.default)):
            inner = {"inner_compile": cuda_graphs.Watched(made, report)}
    if automatic is not None and (made := inner.get("inner_compile", usual and usual.default)):
        inner = {"inner_compile": functools.partial(automatic.without_reuse, made)}
    if not with_backward:
        with stages.heard():
            return compile_fx(gm, inputs, config_patches=patches or None, **inner)  # type: ignore[arg-type,return-value]
    if own := inner.get("inner_compile", usual and usual.default):
        inner = {"inner_compile": functools.partial(_keeping_saved_tensors, own)}
    with (
        stages.heard(),
        backward_with_forward(),
        kernels_read_once(),
        kernels_begun_when_written(),
        floats_of_the_frame(),
        attention_left(_no_kernel_serves),
    ):
        return compile_fx(gm, inputs, config_patches=patches or None, **inner)  # type: ignore[arg-type,return-value]


def _no_kernel_serves(operands: Mapping[str, Any]) -> bool:
    """Whether torch multiplies attention out on CPU, as where values have other channels than keys: Inductor's pattern
    of what torch's op then comes to would put the very same in its place, and would trace it for each layer."""
    from megacpp_compile.lowerings.attention._sdpa_calls import chosen
    from megacpp_compile.lowerings.attention._sdpa_choice import UNFUSED

    q, v = value(operands["query"]), value(operands["value"])
    if q.device.type != "cpu" or q.dim() != 4:
        return False
    # By the heads' widths alone: the pattern takes an axis of length one for another, and fails on what it then traces.
    return chosen(q, q, q.new_empty((*q.shape[:-1], v.shape[-1])), causal=False) == UNFUSED


@stages.stage("code")
def _keeping_saved_tensors(inner_compile: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    keep_saved_tensors()
    return inner_compile(*args, **kwargs)


def from_pattern_matcher(error: BaseException) -> bool:
    """Whether Inductor failed inside its pattern matcher, as where a pattern takes an axis of length one for another
    and traces a replacement that can't be."""
    modules = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__))
    return "torch._inductor.pattern_matcher" in modules


def _with_policy(settings: Settings, gm: GraphModule, example_inputs: Sequence[Any]) -> dict[str, Any]:
    config, patches = settings.config, settings.patches
    user = patches.get("joint_custom_post_pass", inductor_config.joint_custom_post_pass)
    policy = config.own_policy
    if policy is not None or settings.on_auto is not None:
        user = KeepFloat32(user)
        patches = {**patches, "joint_custom_post_pass": user}
    if policy is None:
        return {**patches, "joint_custom_post_pass": KeepChoices(user)} if has_regions(gm) else patches
    inputs = tuple(
        i for i, x in enumerate(example_inputs)
        if isinstance(x, torch.Tensor) and x.requires_grad and not isinstance(x, torch.nn.Parameter)
    )  # fmt: skip
    around = StepContext(settings.copies, settings.allocated, inputs, len(example_inputs))
    tags = TagForRemat(policy, dict(config.block_kinds), user, settings.on_plan, around)
    # To use a dead buffer again Inductor holds it until then: memory that a policy is there to save, and that the
    # device's own allocator hands out again at once.
    patches = {"allow_buffer_reuse": False, **patches, "joint_custom_post_pass": tags}
    if policy.offload != "none":
        partitioner = patches.get("custom_partitioner_fn", inductor_config.custom_partitioner_fn)
        patches["custom_partitioner_fn"] = Offload(partitioner)
    return patches


def _inner(inner_compile: Any, example_inputs: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """(inputs, arguments) of a compilation. Without kernels a model may run on fake tensors, which torch 2.9 does not
    take for its own where they are of another mode than the frame's."""
    if inner_compile is None:
        return example_inputs, {}
    return fake_inputs(example_inputs)[1], {"inner_compile": inner_compile}


def without_codegen(gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """In the place of Inductor's code generation: the graph itself, semantic ops and all. Enough for shapes, and for
    what the partitioner saves."""
    from megacpp_compile._torch.functorch import make_boxed_func

    return make_boxed_func(gm.forward)  # type: ignore[no-any-return]
