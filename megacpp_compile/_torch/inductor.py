"""Inductor: its entry, settings, hooks and workers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacpp_compile._torch._registry import find
from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch._inductor import config, list_mode_options
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads, maybe_warm_pool
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.runtime.compile_tasks import _worker_compile_triton as worker_compile_triton
    from torch.utils._triton import has_triton_package
else:
    __getattr__ = theme(__name__)


@dataclasses.dataclass(frozen=True)
class CudaGraphDecision:
    """Whether Inductor captures the code of a graph as CUDA graphs.

    captured: it does. parts: into how many graphs. reason: why it does not, on one line; "" where it does not say.
    writes: how many inputs it writes to whose addresses may change from call to call.
    """

    captured: bool
    parts: int = 1
    reason: str = ""
    writes: int = 0


def decision_on_cuda_graphs(code: Any, given: Mapping[str, Any]) -> CudaGraphDecision:
    """What Inductor decided on `code`, which `compile_fx_inner` has made. given: the arguments by name that it got, of
    which "cudagraphs" is the box that says whether they are used."""
    if find("torch._inductor.output_code.CompiledFxGraph") is None or not hasattr(code, "cudagraph_info"):
        return CudaGraphDecision(False, reason="it is no code of Inductor's")
    if given.get("cudagraphs"):
        parts = getattr(code, "partition_maps", None)
        moving = set(getattr(code, "mutated_input_idxs", ())) - set(given.get("static_input_idxs") or ())
        return CudaGraphDecision(True, len(parts) if parts else 1, writes=len(moving))
    info, reasons = code.cudagraph_info, getattr(code, "disabled_cudagraphs_reason", None)
    if not reasons and info is not None:
        reasons = ", ".join(info.cudagraph_fail_reasons)
    lines = str(reasons or _said()).strip().splitlines() or [""]  # behind the first comes where in the user's code
    reason = lines[0].removeprefix("skipping cudagraphs due to ").removeprefix("disabling cudagraphs due to ")
    return CudaGraphDecision(False, reason=reason.partition("Found from")[0].strip(" ."))


def _said() -> str:
    """What Inductor noted last, for torch's own telemetry, of the compilation under way."""
    context = find("torch._dynamo.utils.get_metrics_context")
    noted = getattr(context() if context is not None else None, "_metrics", {})
    return str(noted.get("cudagraph_skip_reason", ""))


@contextlib.contextmanager
def attention_left(where: Callable[[Mapping[str, Any]], bool]) -> Iterator[None]:
    """Inductor's patterns of attention leave matches as they are whose operands, by the pattern's names, are such as
    `where` tells. Asked before anything is traced: a pattern traces itself and its replacement anew for each match.
    Patterns of calls that the graph has none of are not tried: there are over a hundred for each view."""
    patterns = find("torch._inductor.fx_passes.joint_graph.patterns")
    apply = getattr(patterns, "apply", None)
    if apply is None or not hasattr(patterns, "patterns"):
        yield
        return

    def check(given: Callable[[Any], bool], match: Any) -> bool:
        attention = {"query", "key", "value"} <= match.kwargs.keys()
        return not (attention and where(match.kwargs)) and given(match)

    def apply_checked(graph: Any) -> Any:  # Inductor registers its patterns when it first applies them
        whole, present = patterns.patterns, {node.target for node in getattr(graph, "graph", graph).nodes}
        begun = {(op, f): entries for (op, f), entries in whole.items() if f in present or op != "call_function"}
        tried = {start: [e for e in entries if _may_match(e.pattern, present)] for start, entries in begun.items()}
        checks = [(entry, entry.extra_check) for entries in tried.values() for entry in entries]
        for entry, given in checks:
            entry.extra_check = functools.partial(check, given)
        patterns.patterns = {start: entries for start, entries in tried.items() if entries}
        try:
            return apply(graph)
        finally:
            patterns.patterns = whole
            for entry, given in reversed(checks):
                entry.extra_check = given

    patterns.apply = apply_checked
    try:
        yield
    finally:
        patterns.apply = apply


def _may_match(pattern: Any, present: AbstractSet[Any]) -> bool:
    """Whether a graph that calls the functions `present` has one for each call of `pattern`."""
    return not any(functions.isdisjoint(present) for functions in _calls(pattern))


@functools.cache
def _calls(pattern: Hashable) -> frozenset[frozenset[Any]]:
    """For each call that a match of `pattern` has, the functions of which it may be a call."""
    parts = [*getattr(pattern, "outputs", ()), *getattr(pattern, "flat_args_kwargs", ((),))[0]]
    parts += [getattr(pattern, name, None) for name in ("pattern", "inner_pattern")]
    own = getattr(pattern, "fns_set", ()) if getattr(pattern, "op", "") == "call_function" else ()
    return frozenset([frozenset(own)] if own else []).union(*(_calls(p) for p in parts if hasattr(p, "pattern_eq")))


def cpp_libraries() -> dict[str, bytes]:
    """Names of files in Inductor's folder -> what is in them: the C++ kernels that this process has loaded, and what
    Inductor told by which instructions this processor has."""
    loaded = find("torch._inductor.codecache.CppPythonBindingsCodeCache.cache") or {}
    if not loaded:
        return {}
    root = Path(find("torch._inductor.runtime.cache_dir_utils.cache_dir")())
    kernels = [root / key[1:3] / f"{key}.main.so" for key in loaded]
    probes = [path.with_suffix(".so") for path in root.glob("*/*.cpp") if path.with_suffix(".so").exists()]
    probes = [so for so in probes if _PROBE in so.with_suffix(".cpp").read_text(errors="replace")]
    return {str(p.relative_to(root)): p.read_bytes() for p in (*kernels, *probes) if p.exists()}


_PROBE = "_chk_kernel"  # in the sources of probes alone


def put_cpp_libraries(files: Mapping[str, bytes]) -> None:
    """Put what `cpp_libraries` gave into Inductor's folder, each file whole, where it has none of that name."""
    if not files:
        return
    root = Path(find("torch._inductor.runtime.cache_dir_utils.cache_dir")())
    for name, content in files.items():
        path = root / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
            partial.write_bytes(content)
            partial.chmod(0o755)
            partial.replace(path)


@contextlib.contextmanager
def without_compilers(patches: Mapping[str, Any]) -> Iterator[None]:
    """Inductor loads code that is compiled already, with CUDA graphs as in `patches`, the settings it was compiled
    with; the header of C++ kernels is not compiled for it."""
    codecache = find("torch._inductor.codecache")
    compile_header = getattr(codecache, "_precompile_header", None)
    if compile_header is not None:
        codecache._precompile_header = lambda *args, **kwargs: ""
    try:
        with find("torch._inductor.config").patch(
            {name: value for name, value in patches.items() if name.startswith("triton.cudagraph")}
        ):
            yield
    finally:
        if compile_header is not None:
            codecache._precompile_header = compile_header


def triton_version() -> str:
    """"3.6.0", or "" where there is no Triton."""
    with contextlib.suppress(ImportError):
        return str(importlib.import_module("triton").__version__)
    return ""
