"""`explain`: the report of a model without running it.

Dynamo traces the model on fake inputs and the passes look at every frame; nothing is lowered and no kernel runs, so a
model on the meta device works, and one too large for this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megacpp_compile import dynamic_outputs, named_rules
from megacpp_compile.backend import analyse, check_torch, refused
from megacpp_compile.config import Config
from megacpp_compile.passes._driver import pass_names
from megacpp_compile.report import Frame, Report, emit_frame, record
from megacpp_compile.targets import resolve_target


def explain(model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Report:
    """What `torch.compile(model, backend="megacpp", options=options)` would fuse in `model(*args, **kwargs)`, what not,
    and why.

    model: a module or function, on any device, meta included. args, kwargs: its inputs; only their shapes, dtypes and
    devices matter. Raises what the model's own forward raises on those shapes, and the errors of bad options and rules.
    """
    check_torch()
    config = Config.from_options(options, pass_names())
    if isinstance(model, torch.nn.Module):
        named_rules.check_model(model, config)

    @dynamic_outputs.marked
    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        began = time.perf_counter()
        result = analyse(gm, example_inputs, config, resolve_target(config.target, example_inputs))
        result.frame.seconds["analysis"] = time.perf_counter() - began - sum(result.frame.seconds.values())
        outcome = result.outcome
        again = refused(gm, result)
        if not again or outcome and outcome.misses:
            emit_frame(result.frame, outcome.sites if outcome else [], outcome.misses if outcome else [])
        if again:
            dynamic_outputs.trace_again()
        return gm.forward  # runs on fake tensors: shapes only

    # With symbols for sizes that only values decide, such as how many tokens an expert has.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def fake(value: Any) -> Any:
        return mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value

    fakes = torch.utils._pytree.tree_map(fake, (args, dict(kwargs)))
    # A code object keeps its compiled frames: start clean, and leave nothing behind that would run on fakes.
    torch._dynamo.reset()
    try:
        with record(pass_names()) as report, fake_state(model, mode), mode:
            try:
                torch.compile(model, backend=backend)(*fakes[0], **fakes[1])
            except Exception as error:
                if not dynamic_outputs.speaks_of_sizes(text := f"{type(error).__name__}: {error}"):
                    raise
                # What follows a graph break runs on fakes too, and cannot where it depends on how many rows there are.
                emit_frame(Frame(captured=False, reason=f"not looked at, nor what follows: {text}"[:300]), [], [])
    finally:
        torch._dynamo.reset()
    return report


class fake_state:
    """A module's parameters and buffers as fake tensors, for the time of a `with`."""

    def __init__(self, model: Any, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
        self.kept: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> None:
        memo: dict[int, Any] = {}  # tied weights stay tied
        for module in self.modules:
            for table in (module._parameters, module._buffers):
                self.kept.append((table, dict(table)))
                for name, value in table.items():
                    if value is not None:
                        if id(value) not in memo:
                            memo[id(value)] = self.mode.from_tensor(value, static_shapes=True)
                        table[name] = memo[id(value)]

    def __exit__(self, *_: object) -> None:
        for table, values in self.kept:
            table.update(values)
