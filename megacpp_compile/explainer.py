"""`explain`: the report of a model without running it.

Dynamo traces the model on fake inputs and the passes look at every frame; nothing is lowered and no kernel runs, so a
model on the meta device works, and one too large for this machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile._torch.pytree import tree_map
from megacpp_compile.analysis import analyse, retrace, retrace_needed
from megacpp_compile.backend import check_torch, raises_own_errors
from megacpp_compile.config import rules
from megacpp_compile.config.options import Config
from megacpp_compile.errors import ForwardError, GraphBreakError, NotAModuleError, wrapped_in
from megacpp_compile.frontend import (
    dropped_outputs,
    graph_breaks,
    nested_regions,
    rolled_loops,
    triangular_buffers,
    unbacked_shapes,
)
from megacpp_compile.frontend.hoisted_input_writes import ahead_of
from megacpp_compile.fx.fake_state import fake_state
from megacpp_compile.passes._driver import pass_names
from megacpp_compile.passes._frame.mixed_documents import if_several, mixed
from megacpp_compile.passes._frame.required import FrameCount
from megacpp_compile.report import stages
from megacpp_compile.report.collector import emit_frame, record
from megacpp_compile.report.records import Frame
from megacpp_compile.report.report import Report
from megacpp_compile.report.user_code import first_line, place_of, user_frame
from megacpp_compile.targets import resolve_target


def explain(
    model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | Config | None = None, **kwargs: Any
) -> Report:
    """What `torch.compile(model, backend="megacpp", options=options)` would fuse in `model(*args, **kwargs)`, what not,
    and why.

    model: a module or function, on any device, meta included. args, kwargs: its inputs; only their shapes, dtypes and
    devices matter.

    Raises NotAModuleError for what cannot be called, ForwardError where the model's own forward raises on those shapes,
    and the errors of bad options and rules.
    """
    check_torch()
    if not callable(model):
        raise NotAModuleError(model)
    config = Config.from_options(options, pass_names())
    if isinstance(model, torch.nn.Module):
        rules.check_model(model, config)

    @unbacked_shapes.traces_unbacked_shapes
    @raises_own_errors
    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if rolled_loops.rolled(gm):
            return unbacked_shapes.with_few_steps(gm, lambda few: backend(few, example_inputs))
        gm = triangular_buffers.as_code(nested_regions.inline_regions(gm), example_inputs)
        before = stages.since_frame_began()
        if (cut := graph_breaks.end_of(gm)) is not None and config.strict:
            raise GraphBreakError(cut.place, cut.reason)
        seen = ahead_of(dropped_outputs.without(gm, example_inputs, config).gm).gm
        result = analyse(seen, example_inputs, config, resolve_target(config.target, example_inputs))
        if before is not None:
            result.frame.seconds["dynamo"] = before
        rolled_loops.check(seen, result.rewritten_gm())
        result.notes += unbacked_shapes.step_by_step()
        result.frame.graph_break = str(cut or "")
        result.notes += if_several(mixed(result.captured, result.near_misses(), True, config))
        outcome = result.outcome
        count, again = FrameCount(gm, config), retrace_needed(gm, result)
        if not again or outcome and outcome.misses:
            emit_frame(result.frame, outcome.sites if outcome else [], result.near_misses())
        if again:
            count.saw(result.near_misses())
            retrace(result)
        count.check(result.frame, result.near_misses())
        return count.counting(gm.forward, result.frame)  # runs on fake tensors: shapes only

    # What Dynamo's translation of the frames goes by. Nothing is compiled here that the process could end on.
    backend.config = dataclasses.replace(config, summary=False)  # type: ignore[attr-defined]
    # With symbols for sizes that only values decide, such as how many tokens an expert has.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    state = fake_state(model, mode)
    fakes = tree_map(state.fake, (args, dict(kwargs)))
    # A code object keeps its compiled frames: start clean, and leave nothing behind that would run on fakes.
    torch.compiler.reset()
    try:
        with record(pass_names()) as report, state, mode:
            try:
                torch.compile(model, backend=backend)(*fakes[0], **fakes[1])
            except Exception as error:
                if (own := wrapped_in(error)) is not None:
                    raise own from None
                if not unbacked_shapes.speaks_of_sizes(f"{type(error).__name__}: {error}"):
                    _run_plain(model, *fakes)
                    raise
                # What follows a graph break runs on fakes too, and cannot where it depends on how many rows there are.
                why = f"not looked at, nor what follows, as it depends on values: {first_line(error)}"[:300]
                emit_frame(Frame(captured=False, reason=why, name=place_of(user_frame(error)), left_to="pieces"))
    finally:
        torch.compiler.reset()
    return report


def _run_plain(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run the model without a compiler, so that an error of its own is raised as such."""
    try:
        model(*args, **kwargs)
    except Exception as error:
        name = getattr(model, "__name__", type(model).__name__)
        raise ForwardError(name, first_line(error), place_of(user_frame(error))) from error
