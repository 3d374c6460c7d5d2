"""How the kernels of a CUDA frame are compiled and launched: by torch's own launcher, which no C compiler has to build.

For a kernel that Inductor did not write itself Triton has a launcher compiled, 0.2 s each and one after the other.
Torch has one that is ready, uses it for all it writes, and for others only where `SETTING` says so, as it knows nothing
of what they take (`can_statically_launch` in torch/_inductor/runtime/triton_heuristics.py). Ours take pointers, numbers
and constants. Kernels of the user's own may take more, tensor descriptors, over which torch 2.9 to 2.13 fail instead of
declining: a frame that has any is left as it is.

Kernels are compiled in worker processes, which torch does not tell the setting. They could read it from the
environment as they start, but would keep it then for whatever the process compiles next. So each task is told instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule

from megacpp_compile._torch.fakes import detect_fake_mode
from megacpp_compile._torch.inductor import config as inductor_config
from megacpp_compile._torch.inductor import has_triton_package
from megacpp_compile._torch.pytree import tree_map
from megacpp_compile.fx.edit import all_nodes, value
from megacpp_compile.fx.numbers_for_symbols import with_numbers
from megacpp_compile.lowerings._kernels.trace_options import compiling_ahead
from megacpp_compile.lowerings._op import KERNEL_OPS
from megacpp_compile.report import log
from megacpp_compile.targets import CUDA, Target

# A patch does not move it where TORCHINDUCTOR_STATIC_LAUNCH_USER_DEFINED_TRITON_KERNELS is in the environment.
SETTING = "static_launch_user_defined_triton_kernels"


def start_workers(target: Target) -> None:
    """Start Inductor's compile workers, as `backend="inductor"` does before all else: seconds that pass while a model
    is set up or a frame looked at. Only for CUDA: there is nothing for them to do on CPU."""
    if target is not CUDA:
        return
    try:
        from megacpp_compile._torch.inductor import maybe_warm_pool

        maybe_warm_pool()
    except Exception as error:  # Inductor starts them itself, and has more to say of it
        log.logger.info("compile workers were not started ahead: %s: %s", type(error).__name__, error)


def start_workers_for_gpus() -> None:
    """`start_workers` where this process uses a GPU already: before it is known what the frame to be translated is
    for. The first worker is ready some ten seconds after it is asked for, as it imports torch."""
    if torch.cuda.is_initialized():
        start_workers(CUDA)


def compile_ahead(graph: fx.Graph) -> None:
    """Begin to compile, in threads, what ops of ours in a lowered graph will launch: Inductor takes them for calls, and
    would have each kernel compiled where it first runs, one after the other."""
    from megacpp_compile._torch.inductor import get_compile_threads

    ops = [node for node in graph.nodes if node.target in KERNEL_OPS]
    if not ops or get_compile_threads() <= 1 or not has_triton_package():
        return
    seen = set()
    for node in ops:
        args, named = fx.map_arg((node.args, node.kwargs), value)
        call = str(node.target), repr(args), repr(named)
        if call in seen:
            continue
        seen.add(call)
        try:
            mode = detect_fake_mode((args, named))
            assert mode is not None, "no operand is a fake tensor"
            with mode, torch.no_grad(), compiling_ahead():
                # With the sizes of the first call nothing is guarded.
                args, named = tree_map(lambda v: with_numbers(v, lambda n: n.node.hint), (args, named))
                KERNEL_OPS[node.target](*args, **named)
        except Exception as error:  # it will be compiled when it is launched, and what is wrong is said then
            log.logger.info("the kernels of %s were not begun ahead: %s: %s", node.target, type(error).__name__, error)


def patches(gm: GraphModule, target: Target, given: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for the launches of a rewritten frame; `given`, what the user has set for it, goes before."""
    try:
        if not _ours_to_set(target):
            return {}
        if SETTING not in given and _has_kernels(gm):
            log.logger.info("Triton launches the kernels of this frame, which has some of its own beside ours")
            return {}
        _tell_workers()
        return {SETTING: True}
    except Exception as error:  # torch's internals: without them the same code takes longer to compile
        log.logger.info("Triton launches the kernels: %s: %s", type(error).__name__, error)
        return {}


def _ours_to_set(target: Target) -> bool:
    there = target is CUDA and torch.version.hip is None and has_triton_package()
    return there and hasattr(inductor_config, SETTING)


def _has_kernels(gm: GraphModule) -> bool:
    """Whether there are Triton kernels in a graph that none of ours is in yet."""
    return any("triton_kernel_wrapper" in str(node.target) for node in all_nodes(gm))


class _Submit:
    """A pool's `submit` under which a kernel is compiled with this process's `SETTING`, patched or not, as torch has it
    for `use_static_triton_launcher`. Of no effect on what is compiled without the setting."""

    def __init__(self, submit: Callable[..., Any], compiles: Callable[..., Any]) -> None:
        self.submit, self.compiles = submit, compiles

    def __call__(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if job is self.compiles and len(args) == 3:
            load, environment, settings = args
            args = load, environment, {**settings, SETTING: getattr(inductor_config, SETTING)}
        return self.submit(job, *args, **kwargs)


def _tell_workers() -> None:
    from megacpp_compile._torch.inductor import AsyncCompile, get_compile_threads, worker_compile_triton

    if list(inspect.signature(worker_compile_triton).parameters) != ["load_kernel", "extra_env", "extra_config"]:
        log.logger.info("this torch's compile workers take other arguments: Triton launches what they compile")
        return
    if get_compile_threads() <= 1:
        return
    AsyncCompile.use_process_pool()  # starts it, as `compile_fx` is about to
    if not AsyncCompile.process_pool.cache_info().currsize:
        return
    pool = AsyncCompile.process_pool()
    if not isinstance(pool.submit, _Submit):
        pool.submit = _Submit(pool.submit, worker_compile_triton)  # type: ignore[method-assign]
