"""The stages of compiling a frame, and which pieces of them cost the most, and what would avoid each.

A frame's seconds are wall-clock seconds of the thread that compiles it, and each is in one piece: what Inductor's
workers do beside it counts as far as it is waited for.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megacpp_compile.report.records import Collected, Frame

# Beside these a pass has a stage of its own, by its name.
STAGES = {
    "dynamo": "what ran from Dynamo's beginning with the frame until it asked for code",
    "capture": "tracing the frame to ATen",
    "analysis": "what else is done to rewrite it",
    "plan": "deciding what backward recomputes",
    "lowering": "putting lowerings in the place of ops",
    "code": "Inductor's passes over forward and backward, its code, and the compilers it calls",
    "torch": "the rest: tracing the gradient, torch's passes over the joint graph, its partitioner and caches; and all "
    "of Inductor where nothing fired",
}

MOST = 10  # that a report names
LEAST = 0.01  # seconds of a piece that it names
_FEW = 4  # equal modules in a row from which they are layers

# Kinds of pieces that are not what is left of a stage.
KERNEL, CPP, OP, SEARCH, IMPORTS = (
    "waiting for a kernel", "C++ compiler", "lowering an op", "search of a GEMM's kernel", "imports")  # fmt: skip
_TRACING, _CUTTING, _PASSES = "tracing the gradient", "dividing forward and backward", "Inductor's graph passes"
_LOOPS, _FUSING, _WRITING, _LOADING = "lowering to loops", "fusing kernels", "generating code", "loading code"
_TUNING, _KEYS, _CACHED = "autotuning", "keys of caches", "loading from a cache"

# What of torch's a C++ compiler makes -> where.
BUILT = {
    "headers": "torch's headers", "key": "a key for torch's headers", "kernel": "a kernel",
    "probe": "a probe of the processor's instructions",
}  # fmt: skip

# Phases of torch's -> their kind; others belong to the one around them.
_EVENTS = {
    "aot_collect_metadata": _TRACING, "aot_trace_joint_graph": _TRACING, "invoke_subgraph_trace_joint_graph": _TRACING,
    "min_cut_rematerialization_partition": _CUTTING, "AutomaticPartitioner": _CUTTING,
    "_recursive_pre_grad_passes": _PASSES, "_recursive_joint_graph_passes": _PASSES,
    "_recursive_post_grad_passes": _PASSES, "GraphLowering.run": _LOOPS, "Scheduler.__init__": _FUSING,
    "benchmark_fused_nodes": _TUNING, "GraphLowering.compile_to_fn": _WRITING, "code_gen": _WRITING,
    "PyCodeCache.load_by_key_path": _LOADING, "async_compile.wait": _LOADING, "TritonBundler.read_and_emit": _CACHED,
    "AOTAutogradCache.inductor_load": _CACHED, "CacheBase.get_system.triton_key": _KEYS,
    "inductor_codecache_torch_key": _KEYS, "inductor_import": IMPORTS,
}  # fmt: skip
_TUNES = re.compile(r"(.+)_template_(?:autotuning|precompiling)$")
_PASS = re.compile(r"pass\.(?:\w+\.)?(\w+)$")
# Phases that are of one half of a frame.
HALVES = {"compile_fx.<locals>.fw_compiler_base": "forward", "compile_fx.<locals>.bw_compiler": "backward"}

# What is left of a stage -> its kind.
_REST = {
    "dynamo": "Dynamo's translation", "capture": "capturing the frame", "analysis": "analysis", "plan": "remat plan",
    "lowering": "lowering ops", "code": "Inductor, the rest", "torch": "AOTAutograd and the rest",
}  # fmt: skip
PASS, AGAIN, IN_VAIN = "pass", "compiled again", "traced in vain"

_KEPT = "a cache that lasts (`TORCHINDUCTOR_CACHE_DIR`)"
_FILE = "a graph in a file (`megacpp compile -o`)"
_FILES = "Dynamo's own cache (`torch._dynamo.config.caching_precompile`)"  # for frames that are no graph alone
_BLOCKS = "equal layers compiled once (`megacpp_compile.compile`, `repeated_blocks`)"
_ONCE = "once a process"
# Kind -> what avoids it. Of the others a cache spares what backends do, and a file what comes before.
_AVOID = {
    CPP: _KEPT, KERNEL: _KEPT, OP: _KEPT, IMPORTS: _ONCE, _KEYS: _ONCE, _LOADING: "nothing: each process loads it",
    SEARCH: "its choice is kept in `TORCHINDUCTOR_CACHE_DIR`; `autotune_gemms=False` takes torch's",
    _TUNING: f"a `mode` without max-autotune; {_KEPT}",
    _REST["plan"]: f"{_KEPT}; `policy=\"none\"` plans nothing",
}  # fmt: skip
# Of what layer after layer adds to.
_GROWS = {
    _TRACING, _CUTTING, _PASSES, _LOOPS, _FUSING, _WRITING,
    *(_REST[stage] for stage in ("dynamo", "capture", "code", "torch")),
}  # fmt: skip
_BEFORE = ("dynamo", "capture", "analysis")  # stages that no cache of torch's spares

# What was said of a frame that is compiled again -> what avoids it.
_CHANGES = (
    (r".* has size (?:[01] |\d+ in dimension \d+, and had [01]$)", "nothing: sizes 0 and 1 take a compilation each"),
    (r"(.*) has size \d+ in dimension (\d+)",
     r"`torch._dynamo.mark_dynamic(\1, \2)` ahead of the first call, or `dynamic=True`"),
    (r"(.*) has stride", r"\1 laid out alike in all calls"),
    (r"(.*) has \d+ dimensions", r"\1 with as many dimensions in all calls"),
    (r"(.*) requires (?:no|a) gradient", r"\1 frozen, or not, before the first call"),
    (r"(.*) is no longer None", r"\1 in every call, or in none"),
    (r"`.*\.training ==", "nothing: train() and eval() take one each"),
    (r"`", "nothing, once for each value; what changes from step to step belongs in a tensor"),
    (r"(.*) has changed", r"calls under the same \1"),
    (r"(.*) is \w+, and was", r"\1 of one kind in all calls"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cost:
    """A piece of compiling.

    Attributes:
        seconds: wall-clock, of the thread that compiled.
        frame: index of the frame within its report.
        kind: what was done.
        where: the kernel, pass, op with its module, or half of the frame that it was done for; the frame's name where
            it was for all of it.
        avoid: what would avoid it the next time.
    """

    seconds: float
    frame: int
    kind: str
    where: str
    avoid: str


def of_event(event: str) -> tuple[str, str] | None:
    """(kind, where) of a phase of torch's; None for one that is of the piece around it."""
    if (kind := _EVENTS.get(event)) is not None:
        return kind, ""
    if found := _TUNES.match(event):
        return _TUNING, found[1]
    return (_PASSES, found[1]) if (found := _PASS.match(event)) else None


def costs(report: Collected) -> list[Cost]:
    """Every piece that took time, the costliest first; of each frame they add up to its seconds. A frame that need not
    have been compiled, as it was compiled before or came to nothing, is one piece."""
    found = [cost for frame in report.frames for cost in _of_frame(report, frame)]
    return sorted((cost for cost in found if cost.seconds > 0), key=lambda cost: -cost.seconds)


def _of_frame(report: Collected, frame: Frame) -> Iterator[Cost]:
    name = frame.name + (f", {frame.block}" if frame.block else "")
    whole = sum(frame.seconds.values())
    if frame.recompiled:
        yield Cost(whole, frame.index, AGAIN, name, f"{_unchanged(frame.recompiled)} ({frame.recompiled})")
        return
    if frame.left_to == "pieces":
        yield Cost(whole, frame.index, IN_VAIN, name, frame.reason)
        return
    layers = not report.regions and not frame.block and _repeats(frame.modules)
    file = _FILES if any(other.graph_break for other in report.frames) else _FILE
    avoids = functools.partial(_avoids, layers=layers, file=file)
    left = Counter(frame.seconds)
    for found in frame.pieces:
        kind, where = found["kind"], found["where"]
        left[found["stage"]] -= found["seconds"]
        yield Cost(found["seconds"], frame.index, kind, where or name, avoids(kind, where, found["stage"]))
    loops = [m.source.partition(",")[0] for m in report.misses if m.frame == frame.index and m.tag == "step-by-step"]
    for stage, seconds in left.items():
        kind = _REST.get(stage, PASS)
        if kind == PASS:
            sites = frame.passes.get(stage, 0)
            avoid = f"`disable=({stage!r},)`: " + (f"it put {sites} ops here" if sites else "it did not fire here")
            yield Cost(seconds, frame.index, kind, stage, avoid)
            continue
        if frame.cached and stage in ("code", "torch"):
            kind = _CACHED
        avoid = avoids(kind, "", stage)
        if loops and stage in _BEFORE:
            avoid = f"a step that is one at every position, of the loop at {', '.join(loops)} (`step-by-step`); {avoid}"
        yield Cost(seconds, frame.index, kind, name, avoid)


def _avoids(kind: str, where: str, stage: str, *, layers: bool, file: str) -> str:
    if kind == CPP and where.startswith(BUILT["probe"]):
        return "`TORCHINDUCTOR_VEC_ISA_OK=1`, which trusts what the processor says it has"
    if kind == CPP and where.startswith(BUILT["key"]):
        return _ONCE
    if kind == _CACHED:
        return f"it is loaded; {file}"
    avoid = _AVOID.get(kind) or (file if stage in _BEFORE else _KEPT)
    return f"{_BLOCKS}; {avoid}" if layers and kind in _GROWS else avoid


def _repeats(modules: Mapping[str, str]) -> bool:
    """Whether there are layers among the modules of these names -> classes."""
    split = [(*name.rpartition("."), kind) for name, kind in modules.items()]
    rows = Counter((parent, kind) for parent, _, last, kind in split if last.isdecimal())
    return any(count >= _FEW for count in rows.values())


def _unchanged(said: str) -> str:
    """What keeps a frame from being compiled again, of what `Frame.recompiled` says."""
    for pattern, avoid in _CHANGES:
        if found := re.match(pattern, said):
            return found.expand(avoid)
    return "the same guards in all calls"
