"""The table of torch's private symbols: each once, what it is for, and what happens where this torch lacks it.

To take another one: a row here, its name under `TYPE_CHECKING` in the module of its theme, and a canary in
`tests/_torch/test_canaries.py` where more is relied on than that it exists.
"""

from __future__ import annotations

import collections
from typing import Any

import torch

from megacpp_compile._torch._registry import Symbol

# What becomes of a frame that needs a symbol this torch lacks; the reason is in the report.
ALONE = "the frame is compiled by Inductor alone"
# There is nothing to fall back on: whoever asked for it meets TorchInternalsError.
RAISES = "nothing serves in its place"
_BREAKS = "loops over the experts that have tokens break the graph"


def _nothing(*_: Any, **__: Any) -> None:
    return None


class _NeverRaised(Exception):
    """In the place of an exception this torch does not have, and so never raises."""


class _NoInstance:
    """In the place of a class this torch does not have, and so has no instance of."""


_ROWS = (
    # --- fakes
    Symbol("fakes.FakeTensor", "torch._subclasses.FakeTensor", "tensors without data", ALONE),
    Symbol("fakes.FakeTensorMode", "torch._subclasses.FakeTensorMode", "computing shapes alone", ALONE),
    Symbol("fakes.is_fake", "torch._subclasses.fake_tensor.is_fake", "telling tensors without data", ALONE),
    Symbol("fakes.detect_fake_mode", "torch._guards.detect_fake_mode", "the fake mode of a frame", ALONE),
    Symbol("fakes.DataDependentOutputException", "torch._subclasses.fake_tensor.DataDependentOutputException",
           "naming why an estimate failed", "the estimate raises torch's own error", instead=lambda: _NeverRaised),
    Symbol("fakes.DynamicOutputShapeException", "torch._subclasses.fake_tensor.DynamicOutputShapeException",
           "naming why an estimate failed", "the estimate raises torch's own error", instead=lambda: _NeverRaised),
    # --- guards
    Symbol("guards.TracingContext", "torch._guards.TracingContext", "the sizes Dynamo gave a frame's inputs", ALONE),
    Symbol("guards.tracing", "torch._guards.tracing", "compiling a half of a frame for torch_tpu", RAISES),
    # --- ops
    Symbol("ops.OpOverload", "torch._ops.OpOverload", "telling operators", "the class of a known operator serves",
           instead=lambda: type(torch.ops.aten.clone.default)),
    Symbol("ops.HigherOrderOperator", "torch._ops.HigherOrderOperator", "telling calls that hold a graph",
           "no call is taken for one, and a small frame around one is left to Inductor", instead=lambda: _NoInstance),
    Symbol("ops.scaled_mm", "torch._scaled_mm", "GEMMs in float8", ALONE),
    Symbol("ops.grouped_mm", "torch._grouped_mm", "grouped GEMMs of experts", "Triton's grouped GEMMs serve"),
    Symbol("ops.collectives", "torch.ops._c10d_functional", "sums of gradients over ranks", ALONE),
    Symbol("ops.nn_linear", "torch._C._nn.linear", "`F.linear` as Dynamo has it", "wrapped weights stay wrapped"),
    Symbol("ops.set_grad_enabled", "torch._C._set_grad_enabled", "grad regions of a graph",
           "a graph has no such calls either"),
    Symbol("ops.assert_async", "torch._assert_async",
           "an index that is no expert or no word, without waiting for the device",
           "it is not looked for in compiled code and on GPUs", instead=lambda: _nothing),
    Symbol("ops.torch_check", "torch._check", "assertions in a graph", "a graph has no such calls either"),
    # --- autocast
    Symbol("autocast.enter_autocast", "torch.amp._enter_autocast", "autocast regions of a graph",
           "a graph has no such calls either"),
    Symbol("autocast.exit_autocast", "torch.amp._exit_autocast", "autocast regions of a graph",
           "a graph has no such calls either"),
    Symbol("autocast.DisableAutocast", "torch._C._DisableAutocast", "replaying a site's backward", ALONE),
    Symbol("autocast.supported_devices", "torch._C._autocast_supported_devices", "keeping autocast around a trace",
           ALONE),
    # --- dispatch
    Symbol("dispatch.TorchDispatchMode", "torch.utils._python_dispatch.TorchDispatchMode", "watching ops as they run",
           RAISES),
    Symbol("dispatch.disable_current_modes", "torch.utils._python_dispatch._disable_current_modes",
           "running a kernel while a graph is traced", ALONE),
    Symbol("dispatch.is_traceable_wrapper_subclass", "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
           "telling inputs that hold tensors", ALONE),
    Symbol("dispatch.AsyncCollectiveTensor", "torch.distributed._functional_collectives.AsyncCollectiveTensor",
           "telling what a collective under way returns", "frames that take such are left to Inductor",
           instead=lambda: _NoInstance),
    Symbol("dispatch.enable_python_dispatcher", "torch._dispatch.python.enable_python_dispatcher",
           "counting what a site saves", ALONE),
    Symbol("dispatch.set_runs_compiled", "torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals",
           "compiled code under a Sentinel", "a compiled model runs in eager under a Sentinel", seen="2.11-2.15"),
    Symbol("dispatch.SelectiveContext", "torch.utils.checkpoint._CachingTorchDispatchMode",
           "what a checkpoint region saves", ALONE),
    # --- pytree
    Symbol("pytree.tree_map", "torch.utils._pytree.tree_map", "nested arguments", RAISES),
    Symbol("pytree.tree_leaves", "torch.utils._pytree.tree_leaves", "nested arguments", ALONE),
    # --- autograd
    Symbol("autograd.get_sequence_nr", "torch.autograd._get_sequence_nr", "naming modules in backward",
           "modules are named in forward only", instead=lambda: lambda: 0),
    Symbol("autograd.current_autograd_node", "torch._C._current_autograd_node", "naming modules in backward",
           "modules are named in forward only", instead=lambda: _nothing),
    Symbol("autograd.current_graph_task_id", "torch._C._current_graph_task_id", "telling a second forward",
           "torch's reentrant checkpoint around fp8 goes unnoticed", instead=lambda: lambda: -1),
    Symbol("autograd.top_saved_tensors_default_hooks", "torch._C._autograd._top_saved_tensors_default_hooks",
           "telling a checkpointed forward", "torch's checkpoint around fp8 goes unnoticed", instead=lambda: _nothing),
    Symbol("autograd.CompiledAutogradOp", "torch._dynamo.compiled_autograd.Op",
           "telling a backward of compiled autograd", "it is captured as any frame, or falls back",
           instead=lambda: _NoInstance),
    # --- dynamo
    Symbol("dynamo.config", "torch._dynamo.config", "Dynamo's settings", ALONE),
    Symbol("dynamo.OptimizedModule", "torch._dynamo.OptimizedModule", "telling compiled modules",
           "compiling twice goes unnoticed", instead=lambda: _NoInstance),
    Symbol("dynamo.skips", "torch._dynamo.trace_rules.check", "telling modules whose code Dynamo skips",
           "modules of torch's own classes stay in eager", instead=lambda: lambda *_: False),
    Symbol("dynamo.RestartAnalysis", "torch._dynamo.exc.RestartAnalysis", "letting Dynamo trace a frame again", ALONE,
           instead=lambda: _NeverRaised),
    Symbol("dynamo.TensorifyScalarRestartAnalysis", "torch._dynamo.exc.TensorifyScalarRestartAnalysis",
           "having Dynamo trace a frame again", "frames break at sizes known at run time only",
           instead=lambda: _NeverRaised),
    Symbol("dynamo.Unsupported", "torch._dynamo.exc.Unsupported", "telling frames that Dynamo gives up",
           "the report does not list them", instead=lambda: _NeverRaised),
    Symbol("dynamo.InvalidBackend", "torch._dynamo.exc.InvalidBackend", "telling that torch_tpu is not there",
           "the error is torch's own", instead=lambda: _NeverRaised),
    Symbol("dynamo.graph_break_reasons", "torch._dynamo.utils.graph_break_reasons", "why a frame broke",
           "the report has no reasons of Dynamo's", instead=list),
    Symbol("dynamo.counters", "torch._dynamo.utils.counters",
           "telling code from a cache",
           "no code counts as cached",
           instead=lambda: collections.defaultdict(collections.Counter)),
    Symbol("dynamo.AttrSource", "torch._dynamo.source.AttrSource", "the parts of a wrapped input", ALONE),
    Symbol("dynamo.TensorProperty", "torch._dynamo.source.TensorProperty", "guards on offsets for torch_tpu", RAISES),
    Symbol("dynamo.TensorPropertySource", "torch._dynamo.source.TensorPropertySource",
           "guards on offsets for torch_tpu", RAISES),
    Symbol("dynamo.GuardBuilder", "torch._dynamo.guards.GuardBuilder", "guards on offsets for torch_tpu", RAISES),
    Symbol("dynamo.install_guard", "torch._dynamo.guards.install_guard", "guards on offsets for torch_tpu", RAISES),
    Symbol("dynamo.mark_static_address", "torch._dynamo.mark_static_address", "caches that CUDA graphs may write to",
           "Inductor leaves out CUDA graphs for steps that write to a cache", instead=lambda: _nothing),
    Symbol("dynamo.lookup_backend", "torch._dynamo.backends.registry.lookup_backend", "torch_tpu's backend", RAISES),
    Symbol("dynamo.aot_autograd", "torch._dynamo.backends.common.aot_autograd", "both halves of a frame on XLA",
           RAISES),
    Symbol("dynamo.openxla_eval_boxed", "torch._dynamo.backends.torchxla.openxla_eval_boxed", "programs of XLA",
           RAISES),
    Symbol("", "torch._dynamo.convert_frame._compile", "settings for the frames of this backend alone",
           "frames break at sizes known at run time only"),
    Symbol("", "torch._dynamo.config.capture_dynamic_output_shape_ops", "sizes known at run time only",
           "frames break at them"),
    Symbol("", "torch._dynamo.symbolic_convert.InstructionTranslatorBase", "watching a frame's translation", _BREAKS),
    Symbol("", "torch._dynamo.exc.SkipFrame", "telling frames that torch 2.9 leaves to Python",
           "the report does not list them"),
    Symbol("", "torch._dynamo.side_effects.SideEffects", "telling what a loop over experts changes", _BREAKS),
    Symbol("", "torch._dynamo.variables.base.MutationType", "telling when a value was made", _BREAKS),
    Symbol("", "torch._dynamo.variables.TensorVariable", "telling tensors in a translation", _BREAKS),
    Symbol("", "torch._dynamo.variables.SymNodeVariable", "telling numbers in a translation", _BREAKS),
    Symbol("", "torch._dynamo.variables.ConstantVariable", "numbers of experts in a translation", _BREAKS),
    Symbol("", "torch._dynamo.variables.TupleVariable", "lists of experts in a translation", _BREAKS),
    Symbol("", "torch._dynamo.variables.builder.wrap_fx_proxy", "entries of lists of experts", _BREAKS),
    Symbol("", "torch._dynamo.exc.TorchDynamoException", "telling a translation's failures from its ways", _BREAKS),
    Symbol("", "torch._dynamo.exc.TorchRuntimeError", "telling a translation's failures from its ways", _BREAKS),
    Symbol("", "torch._dynamo.exc.ShortenTraceback", "errors of this package by their own class",
           "Dynamo wraps them in BackendCompilerFailed"),
    Symbol("", "torch._dynamo.config.suppress_errors", "telling errors that Dynamo hides",
           "frames that ran in eager for one are not in the report"),
    Symbol("", "torch._dynamo.config.verbose", "whole tracebacks where they are asked for", "they are always short"),
    Symbol("", "torch._dynamo.backends.registry._COMPILER_FNS", "a first use from several threads at once",
           "all but one of them fail"),
    Symbol("", "torch._dynamo.eval_frame.get_compiler_fn", "checking options when they are given",
           "they are checked when the first frame is compiled"),
    Symbol("", "torch._dynamo.config.recompile_limit", "as many variants as blocks", RAISES),
    Symbol("dynamo.memory_budget_of", "torch.fx.traceback._get_memory_budget_annotation",
           "telling the memory budget of a region", "no region's budget is seen", seen="2.13-2.15",
           instead=lambda: _nothing),
    Symbol("ddp.DDPOptimizer", "torch._dynamo.backends.distributed.DDPOptimizer", "telling where DDP cuts a graph",
           "the report does not say which sites are cut", instead=lambda: None),
    Symbol("dynamo.CatchErrorsWrapper", "torch._dynamo.convert_frame.CatchErrorsWrapper",
           "finding the call that a frame is compiled for", "every frame counts as a whole model",
           instead=lambda: _NoInstance),
    Symbol("dynamo.eval_frame", "torch._dynamo.eval_frame", "finding the call that a frame is compiled for",
           "every frame counts as a whole model", instead=lambda: None),
    # --- modules
    Symbol("modules.checkpoint_wrapped",
           "torch.distributed.algorithms._checkpoint.checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE",
           "names behind `checkpoint_wrapper`", "torch's usual name for it serves",
           instead=lambda: "_checkpoint_wrapped_module"),
    Symbol("modules.fsdp_wrapped", "torch.distributed.fsdp._common_utils.FSDP_WRAPPED_MODULE", "names behind FSDP",
           "torch's usual name for it serves", instead=lambda: "_fsdp_wrapped_module"),
    # --- functorch
    Symbol("functorch.config", "torch._functorch.config", "AOTAutograd's settings", RAISES),
    Symbol("functorch.aot_export_module", "torch._functorch.aot_autograd.aot_export_module", "tracing a frame", ALONE),
    Symbol("functorch.make_boxed_func", "torch._functorch.aot_autograd.make_boxed_func", "a graph as its own code",
           RAISES),
    Symbol("functorch.default_partition", "torch._functorch.partitioners.default_partition",
           "both halves of a frame on XLA", RAISES),
    Symbol("functorch.min_cut_rematerialization_partition",
           "torch._functorch.partitioners.min_cut_rematerialization_partition", "offloading", RAISES),
    Symbol("functorch.temporarily_clear_interpreter_stack",
           "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
           "running a kernel while a graph is traced", ALONE),
    Symbol("functorch.layers", "torch._C._functorch.get_dynamic_layer_stack_depth", "keeping vmap around a trace",
           ALONE),
    Symbol("functorch.is_functorch_wrapped_tensor", "torch._C._functorch.is_functorch_wrapped_tensor",
           "values that leave a `torch.func` transform wrapped", ALONE),
    Symbol("functorch.undo_to_layer", "torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth",
           "keeping vmap around a trace", ALONE),
    Symbol("", "torch._functorch.config.force_non_lazy_backward_lowering", "lowering a backward with its forward",
           "a backward is lowered at its first run, where nothing falls back", seen="2.10-2.15"),
    Symbol("", "torch._functorch._aot_autograd.schemas.ViewAndMutationMeta.bw_donated_idxs",
           "a backward that may run twice", "retain_graph=True is an error of torch's"),
    Symbol("", "torch._functorch.config.activation_memory_budget", "telling a second policy", "no other is seen"),
    Symbol("", "torch._functorch.config.enable_autograd_cache", "estimating what a compiled model saves", RAISES),
    # --- inductor
    Symbol("inductor.config", "torch._inductor.config", "Inductor's settings", ALONE),
    Symbol("inductor.compile_fx", "torch._inductor.compile_fx.compile_fx", "code for a graph",
           "nothing can be compiled"),
    Symbol("inductor.list_mode_options", "torch._inductor.list_mode_options", "the settings of a mode", RAISES),
    Symbol("inductor.select_decomp_table", "torch._inductor.decomposition.select_decomp_table", "lowering an op",
           ALONE),
    Symbol("inductor.get_device_tflops", "torch._inductor.utils.get_device_tflops", "the rates of a GPU",
           "constants stand for them"),
    Symbol("inductor.get_gpu_dram_gbps", "torch._inductor.utils.get_gpu_dram_gbps", "the rates of a GPU",
           "constants stand for them"),
    Symbol("inductor.CustomGraphPass", "torch._inductor.custom_graph_pass.CustomGraphPass",
           "passes among Inductor's own", ALONE),
    Symbol("inductor.CustomPartitionerFn", "torch._inductor.custom_graph_pass.CustomPartitionerFn", "offloading",
           RAISES),
    Symbol("inductor.AsyncCompile", "torch._inductor.async_compile.AsyncCompile", "torch's launcher for our kernels",
           "Triton launches them"),
    Symbol("inductor.get_compile_threads", "torch._inductor.async_compile.get_compile_threads",
           "torch's launcher for our kernels", "Triton launches them"),
    Symbol("inductor.maybe_warm_pool", "torch._inductor.async_compile.maybe_warm_pool", "workers started ahead",
           "Inductor starts them when it needs them"),
    Symbol("inductor.worker_compile_triton", "torch._inductor.runtime.compile_tasks._worker_compile_triton",
           "torch's launcher for our kernels", "Triton launches them"),
    Symbol("inductor.has_triton_package", "torch.utils._triton.has_triton_package", "torch's launcher for our kernels",
           "Triton launches them"),
    Symbol("", "torch._inductor.config.post_grad_custom_pre_pass", "lowering the semantic ops", ALONE),
    Symbol("", "torch._inductor.config.post_grad_custom_post_pass", "choosing GEMM kernels by measurement", ALONE),
    Symbol("", "torch._inductor.config.joint_custom_post_pass", "a policy", RAISES),
    Symbol("", "torch._inductor.config.custom_partitioner_fn", "offloading", RAISES),
    Symbol("", "torch._inductor.config.allow_buffer_reuse", "a policy", RAISES),
    Symbol("", "torch._inductor.config.pattern_matcher", "a frame one of Inductor's patterns fails on", ALONE),
    Symbol("", "torch._inductor.config.max_autotune", "leaving GEMMs to Inductor's own choice", ALONE),
    Symbol("", "torch._inductor.config.max_autotune_gemm", "leaving GEMMs to Inductor's own choice", ALONE),
    Symbol("", "torch._inductor.config.static_launch_user_defined_triton_kernels", "torch's launcher for our kernels",
           "Triton launches them"),
    Symbol("", "torch._inductor.pattern_matcher", "telling errors of Inductor's patterns", ALONE),
    # --- logging
    Symbol("logging.trace_structured", "torch._logging.trace_structured", "artifacts in TORCH_TRACE",
           "TORCH_TRACE has none", instead=lambda: _nothing),
    # --- attributes of torch's objects
    Symbol("", "torch._subclasses.FakeTensorMode.dispatch", "sizes in the place of values", RAISES),
    Symbol("", "torch.nn.Module._compiled_call_impl", "blocks compiled in place", RAISES),
    Symbol("", "torch.nn.Module._call_impl", "blocks of torch's own classes compiled in place", RAISES),
    Symbol("", "torch.Tensor._version", "telling whether a step has run", RAISES),
    Symbol("", "torch.UntypedStorage._cdata", "telling storages", ALONE),
)  # fmt: skip

# By name where there is one, else by path.
SYMBOLS: dict[str, Symbol] = {row.name or row.path: row for row in _ROWS}
