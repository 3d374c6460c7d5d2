"""Tracing through ops with data-dependent output shapes (`nonzero`, `where`), for frames of this backend alone.

Dynamo breaks the graph at these unless `torch._dynamo.config.capture_dynamic_output_shape_ops` is set, and a loop over
experts, each of which takes its rows that way, then runs without a compiler at all. A backend is asked only after
tracing, so `install` wraps the function that compiles a frame, and makes the setting while Dynamo compiles one whose
backend is marked by `traces_unbacked_shapes`; other backends' frames are not affected.

A frame traced that way in which no idiom is found is retraced with graph breaks, as without the setting (`refuse`).
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megacpp_compile._torch import ddp, positions, translator
from megacpp_compile._torch.dynamo import (
    RestartAnalysis,
    TensorifyScalarRestartAnalysis,
    counters,
    failed_guard,
    frame_compiler,
    graph_break_reasons,
    set_frame_compiler,
)
from megacpp_compile._torch.dynamo import config as dynamo_config
from megacpp_compile.frontend import graph_breaks, mask_frames
from megacpp_compile.frontend.expert_loops import ExpertLoopTracer
from megacpp_compile.frontend.garbage import no_full_collections
from megacpp_compile.frontend.loop_advice import advice
from megacpp_compile.frontend.rolled_loops import CannotRepeat, RolledLoops, repeated
from megacpp_compile.fx.edit import dynamo_value
from megacpp_compile.fx.held import held
from megacpp_compile.report import collector, stages
from megacpp_compile.report.guards import in_words
from megacpp_compile.report.records import Frame, MissedFusion
from megacpp_compile.report.user_code import place_of

Backend = TypeVar("Backend")
Compiled = TypeVar("Compiled")
SETTING = "capture_dynamic_output_shape_ops"
_asked: contextvars.ContextVar[bool] = contextvars.ContextVar("megacpp_dynamic_outputs", default=False)
# Whether the frame being compiled was traced whole and then left to break: whatever the passes said of it stands.
_retraced: contextvars.ContextVar[bool] = contextvars.ContextVar("megacpp_retraced", default=False)
# Torch's own count of graph breaks, as it was before the frame being compiled.
_counted: contextvars.ContextVar[Mapping[str, int]] = contextvars.ContextVar("megacpp_counted")
# Tells the guard that failed, as Dynamo says it, where the frame being compiled was compiled before.
_failed: contextvars.ContextVar[Callable[[], str] | None] = contextvars.ContextVar("megacpp_failed", default=None)
_loops: contextvars.ContextVar[ExpertLoopTracer | None] = contextvars.ContextVar("megacpp_expert_loops", default=None)
_rolled: contextvars.ContextVar[RolledLoops | None] = contextvars.ContextVar("megacpp_rolled_loops", default=None)
IN_PIECES = (
    "DDP's optimizer cuts the graph, and would part a loop from its step; with `torch._dynamo.config.optimize_ddp` set "
    "to False or 'python_reducer' nothing is cut"
)
_MARK = "_megacpp_compile"
_OURS = "_megacpp_traces_sizes"


class Retrace(TensorifyScalarRestartAnalysis):
    """Dynamo's way out of a backend: trace the frame anew, now that a setting has changed."""


def traces_unbacked_shapes(backend: Backend) -> Backend:
    """`backend`, for whose frames the setting is made; it has to ask `refuse` about each. A class: of its instances."""
    setattr(backend, _OURS, True)
    return backend


def install(at_first: Callable[[], None] = lambda: None) -> None:
    """See to frames of backends that are marked, `at_first` being called before such a frame is translated. Where
    Dynamo is built otherwise, nothing is done."""
    original = frame_compiler()
    if original is None or hasattr(original, _MARK) or "compiler_fn" not in inspect.signature(original).parameters:
        return
    signature = inspect.signature(original)
    watches = translator.install()

    @functools.wraps(original)
    def compile_frame(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs).arguments
        compiler = given.get("compiler_fn")
        if not getattr(_innermost(compiler), _OURS, False):
            watched = watches and getattr(_innermost(ddp.cuts_for(compiler)), _OURS, False)
            return (_in_pieces if watched else original)(*args, **kwargs)
        if (eager := mask_frames.in_eager(given)) is not None:
            return eager
        at_first()
        seen = len(graph_break_reasons)
        traced = functools.partial(_traced_whole, original, args, kwargs)
        watched = watches and graph_breaks.option(given["compiler_fn"], "expert_loops")
        loops = ExpertLoopTracer(_restart) if watched else None
        option = functools.partial(graph_breaks.option, given["compiler_fn"])
        # A site of a few steps cannot be run for what verifies it.
        rolls = option("rolled_loops") and option("verify") == "off" and watches and positions.installable()
        rolled = RolledLoops(_restart) if rolls else None
        with held(_retraced, False):
            try:
                with (
                    held(_failed, functools.partial(failed_guard, given)),
                    held(_loops, loops),
                    held(_rolled, rolled),
                    no_full_collections(),
                    translator.watching(translator.together(loops, rolled)),
                    stages.frame_begins(),
                ):
                    return graph_breaks.watched(
                        traced, given["compiler_fn"], bool(given.get("one_graph")), given.get("code")
                    )
            finally:
                for why, at in loops.refused if loops is not None else ():
                    _report_refused(why, at)
                for found in graph_break_reasons[seen:]:
                    if speaks_of_sizes(found.reason):
                        _report(found.reason, found.user_stack)

    def _in_pieces(*args: Any, **kwargs: Any) -> Any:
        """A frame whose graph DDP's optimizer cuts: its loops are looked at for the report."""
        compiler = ddp.cuts_for(signature.bind_partial(*args, **kwargs).arguments["compiler_fn"])
        looks = graph_breaks.option(compiler, "rolled_loops") and positions.installable()
        loops = RolledLoops(_restart, never=IN_PIECES) if looks else None
        with held(_rolled, loops), translator.watching(loops):
            return original(*args, **kwargs)

    setattr(compile_frame, _MARK, True)
    set_frame_compiler(compile_frame)


def what_changed() -> str:
    """Why the frame under way is compiled again, in words; "" at the first time, and where Dynamo does not say."""
    failed = _failed.get()
    try:
        said = failed() if failed is not None else ""
    except Exception as error:  # guards evaluate what the user's classes define
        return f"its guards cannot be asked: {type(error).__name__}"
    return in_words(said) if said else ""


def _traced_whole(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if getattr(dynamo_config, SETTING):
        return original(*args, **kwargs)
    with held(_asked, True), held(_counted, dict(counters["graph_break"])):
        try:
            with dynamo_config.patch({SETTING: True}):
                return original(*args, **kwargs)
        except Exception as error:
            text = f"{type(error).__name__} {error} {error.__cause__}"
            if not speaks_of_sizes(text):
                raise
            _report(text, getattr(error, "real_stack", None) or ())
    return original(*args, **kwargs)  # as if nobody had asked


def speaks_of_sizes(text: str) -> bool:
    """Whether tracing may have stopped only because of a value that is known at run time."""
    words = ("data-dependent", "data dependent", "unbacked", "for/while loop", "tensor.item()")
    return any(word in text.lower() for word in words)


def _innermost(backend: Any) -> Any:
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return getattr(backend, "compiler_fn", backend)


def unknown_sizes(gm: GraphModule) -> bool:
    """Whether a tensor in the graph has a size that is known at run time only."""
    return any(isinstance(v, torch.Tensor) and free_unbacked_symbols(v.shape) for v in _values(gm))


def unknown_numbers(gm: GraphModule) -> bool:
    """Whether a number or a tensor's size in the graph is known at run time only."""
    return unknown_sizes(gm) or numbers_of(gm)


def numbers_of(gm: GraphModule) -> bool:
    """Whether a number in the graph, tensors' sizes aside, is known at run time only."""
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return any(isinstance(v, numbers) and free_unbacked_symbols(v) for v in _values(gm))


def _values(gm: GraphModule) -> Iterator[Any]:
    for node in gm.graph.nodes:
        values = dynamo_value(node)
        yield from values if isinstance(values, (list, tuple)) else (values,)


def refuse(gm: GraphModule) -> bool:
    """Whether `gm`, not rewritten, was traced through sizes nobody asked for but this backend: `retrace` then."""
    return _asked.get() and getattr(dynamo_config, SETTING) and unknown_sizes(gm)


def retrace() -> NoReturn:
    """Leave the backend and have Dynamo trace the frame as it would have without it."""
    _retraced.set(True)
    counters["graph_break"].clear()  # of what is traced again: it would count what it breaks at behind the sizes too
    counters["graph_break"].update(_counted.get())
    setattr(dynamo_config, SETTING, False)  # the patch around the frame puts back what was
    raise Retrace(restart_reason="megacpp: sizes known at run time only, and no idiom they belong to")


def _restart() -> NoReturn:
    raise Retrace(restart_reason="megacpp: a loop over some experts that cannot be one over all")


def numbers_assumed() -> bool:
    """Whether the graph that was made rests on what loops over experts depend on."""
    loops = _loops.get()
    return loops is not None and loops.assumed


def retrace_without_loops(told: bool) -> None:
    """Leave the backend and have Dynamo trace the frame without assuming what loops over experts depend on, if it did.
    told: whether the report says what is wrong with them."""
    if (loops := _loops.get()) is not None and loops.assumed:
        _retraced.set(told)
        loops.give_up()


def step_by_step() -> list[MissedFusion]:
    """A row for each loop of the frame whose steps are not shown to be one."""
    loops = _rolled.get()
    refused = loops.refused if loops is not None else []
    if loops is not None and loops.never:
        loops.refused = []  # of all pieces of the frame, once
    return [MissedFusion("token_loop", "", place_of(at), "", "step-by-step", why) for why, at in refused]


def with_few_steps(gm: GraphModule, compile_graph: Callable[[GraphModule], Compiled]) -> Compiled:
    """What `compile_graph` makes of `gm` with a few steps of each loop of which Dynamo translated one. Where that fails
    it leaves the backend, and has Dynamo trace the frame with all steps."""
    loops = _rolled.get()
    assert loops is not None
    try:
        few = repeated(gm)
    except CannotRepeat as why:
        loops.leave(str(why), why.loop)
    except Exception as error:
        loops.give_up(f"{type(error).__name__}: {error}"[:300])
    try:
        return compile_graph(few)
    except RestartAnalysis:
        raise
    except Exception as error:
        loops.give_up(f"{type(error).__name__}: {error}"[:300])


def _report(why: str, stack: Sequence[Any]) -> None:
    """A loop over experts that Dynamo could not trace is a near miss, with what would let it match."""
    if not stack or not collector.active() or _retraced.get():
        return
    at = stack[-1]
    if not (found := advice(why, at)):
        return
    source = place_of(at)
    reason = why.strip().split("\n")[0][:200]
    frame = Frame(captured=False, reason=reason, name=source, left_to="pieces")
    miss = MissedFusion("moe", "", source, "", "graph-break", found)
    if not collector.reported([miss]):  # Dynamo may try a frame twice
        collector.emit_frame(frame, [], [miss])


def _report_refused(why: str, at: Any) -> None:
    """A loop over those experts that have tokens, which is no loop over all, is a near miss."""
    if not collector.active() or not (source := place_of(at)):
        return
    why = f"the loop runs for some experts alone: {why}"
    miss = MissedFusion("moe", "", source, "", "loop-over-data", why)
    if not collector.reported([miss]):
        collector.emit_frame(Frame(captured=False, reason=why, name=source, left_to="pieces"), [], [miss])
    _retraced.set(True)
