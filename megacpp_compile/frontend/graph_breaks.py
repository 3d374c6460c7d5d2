"""Graph breaks in frames of this backend: where the model's code cuts its graph, and why, for the report and `strict`.

Dynamo tells a backend why its graph ends. Of a frame that it breaks before the first op, or gives up whole, a backend
never hears: `watched` looks at what Dynamo did with a frame, and is put around it by `unbacked_shapes.install`. Dynamo
gives a frame up, to run in eager, where the graph breaks inside of a loop or of a block it cannot resume, at its limit
of recompilations, and at any error under `suppress_errors`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from torch.fx import GraphModule

from megacpp_compile._torch import translator
from megacpp_compile._torch.dynamo import Unsupported, graph_break_reasons
from megacpp_compile._torch.dynamo import config as dynamo_config
from megacpp_compile.config.options import Config
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.errors import GraphBreakError
from megacpp_compile.fx.provenance import in_torch
from megacpp_compile.report import collector, log
from megacpp_compile.report.records import Frame
from megacpp_compile.report.user_code import first_line, is_users, place_of

_MARK = "_megacpp_reported"
_LIMIT = re.compile(r"\b(accumulated_)?(recompile|cache_size)_limit\b")
# Dynamo's names for what it stopped at, in the user's words.
_JUMP = "generic_jump"
_WORDS = {_JUMP: "a branch on a value that is known at run time only"}


@dataclasses.dataclass(frozen=True)
class GraphBreak:
    """place: "file.py:12, in forward: `code`". reason: a sentence without its full stop."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


# Where DDP's optimizer cuts a graph, of which it says that it stands in a file of its own.
BUCKETS = GraphBreak("the end of a bucket of DDP", "torch._dynamo.config.optimize_ddp = False has no such graph breaks")


def graph_break(reason: str, stack: Sequence[Any]) -> GraphBreak:
    """What Dynamo says in `reason` about the innermost line of `stack` outside torch."""
    if "DDPOptimizer" in reason:
        return BUCKETS
    at = _line(stack)
    title, *rest = (line.strip() for line in reason.strip().splitlines() or ["no reason known"])
    told = next((line for line in rest if line.startswith("Explanation:")), title).removeprefix("Explanation:").strip()
    known = next((words for name, words in _WORDS.items() if title.startswith(name)), None)
    return GraphBreak(place_of(at) or "an unknown line", known or re.split(r"\.(?:\s|$)", told, maxsplit=1)[0][:200])


def _line(stack: Sequence[Any]) -> Any:
    """The innermost line of `stack` outside of what in torch runs a model's code; None for an empty one."""
    return next((f for f in reversed(stack) if not in_torch(f.filename)), stack[-1] if stack else None)


def end_of(gm: GraphModule) -> GraphBreak | None:
    """The graph break that Dynamo's graph `gm` ends at; None where its function ends, or where nobody says."""
    why: Any = getattr(gm, "compile_subgraph_reason", None)
    if not getattr(why, "graph_break", False):
        return None
    setattr(why, _MARK, True)
    return graph_break(why.reason, why.user_stack)


def watched(compile_frame: Callable[[], Any], backend: Any, fullgraph: bool, code: CodeType | None = None) -> Any:
    """`compile_frame()`, by which Dynamo compiles a frame of `backend`; what breaks it is reported, and whether it
    runs in eager. code: the frame's.

    Raises GraphBreakError under `strict`. With `fullgraph` a break is Dynamo's own error, and goes by.
    """
    seen = len(graph_break_reasons)
    try:
        with translator.noting_skips() as left:
            result = compile_frame()
    except Exception as error:
        if not fullgraph:
            _given_up(error, getattr(error, "real_stack", None) or (), backend, code)
        raise
    if left and getattr(result, "guarded_code", result) is None:
        cause, line = left[-1]
        _given_up(cause or Unsupported(_JUMP), getattr(cause, "real_stack", None) or (line,), backend, code)
    for why in graph_break_reasons[seen:]:
        if not hasattr(why, _MARK):
            _report(graph_break(why.reason, why.user_stack), backend)
    return result


def _report(found: GraphBreak, backend: Any) -> None:
    if option(backend, "strict"):
        raise GraphBreakError(found.place, found.reason)
    log.logger.info("nothing compiled before the graph break at %s", found)
    reason = "nothing to compile before the graph break"
    collector.emit_frame(
        Frame(captured=False, reason=reason, name=found.place, graph_break=str(found), left_to="pieces")
    )


_NO_HANDLER = "no exception handler"  # what Dynamo says of code that raises
_RAISES = "Dynamo saw it raise: where it does so in eager, too, the error says what is asked for."


def _given_up(error: BaseException, stack: Sequence[Any], backend: Any, code: CodeType | None) -> None:
    """Report a frame that Dynamo runs in eager because of `error`, which the innermost line of `stack` met, and warn of
    it where Dynamo itself does not."""
    name = f"{code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else "(no source known)"
    frame, advice = Frame(captured=False, name=name, left_to="eager"), ""
    if isinstance(error, Unsupported) and (limit := _LIMIT.search(str(error))):
        frame.reason = (
            f"{limit[0]} reached, other inputs than those it was compiled for run in eager: mark what varies "
            f"(torch._dynamo.mark_dynamic), or raise torch._dynamo.config.{limit[0]}"
        )
        found = GraphBreak(name, f"{limit[0]} reached")
    elif isinstance(error, Unsupported):
        found = graph_break(str(error), stack)
        frame.reason, frame.graph_break = "the graph breaks where Dynamo cannot resume it", str(found)
        advice = _RAISES if _NO_HANDLER in str(error) else (
            "Move that line out of the loop, `try` or `with` around it, or out of the compiled code. Your functions "
            "that are called from there are compiled by themselves."
        )
    elif getattr(dynamo_config, "suppress_errors", False):
        hidden = getattr(error, "inner_exception", error)  # of what Dynamo wraps
        frame.reason, found = f"torch._dynamo.config.suppress_errors hid {first_line(hidden)}"[:300], None
    else:
        return  # the user meets the error itself
    if found is not None and option(backend, "strict"):
        raise GraphBreakError(found.place, found.reason)
    # Hooks of FSDP break the graph of what loops over layers, for one: nobody can help it, and each layer is a frame.
    files = [code.co_filename if code else "", *(f.filename for f in [_line(stack)] if f)]
    frame.lost = all(map(is_users, files))
    log.logger.info("frame %s runs in eager: %s", name, frame.reason)
    if frame.lost and advice:
        warn_once(f"{name} runs in eager: {frame.reason}: {frame.graph_break}. {advice}")
    collector.emit_frame(frame, at_exit=option(backend, "summary"))


def option(backend: Any, name: str) -> Any:
    """The setting `name` of a backend as Dynamo has it."""
    for layer in _layers(backend):
        if isinstance(config := getattr(layer, "config", None), Config):
            return getattr(config, name)
        given = getattr(layer, "kwargs", None) or getattr(layer, "keywords", None)
        options = given.get("options") if isinstance(given, Mapping) else None
        if isinstance(options, Config):
            return getattr(options, name)
        if isinstance(options, Mapping):
            return getattr(Config.from_options({k: v for k, v in options.items() if k == name}, ()), name)
    return getattr(Config.from_options(None, ()), name)


def _layers(backend: Any) -> Iterator[Any]:
    """A backend as Dynamo has it and what it is wrapped around, the outermost first."""
    while backend is not None:
        yield backend
        names = ("_torchdynamo_orig_backend", "compiler_fn", "func")
        backend = next((inner for name in names if (inner := getattr(backend, name, None)) is not None), None)
