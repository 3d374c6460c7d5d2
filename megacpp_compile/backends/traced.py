"""A frame within a trace by `make_fx`: its graph, ops and all, runs for the trace to record. No code is made.

The trace differentiates: it records an op's forward where the graph calls it, and its backward where autograd does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.fx.traceback as fx_traceback
from torch.fx import GraphModule, Interpreter

from megacpp_compile._torch import modes
from megacpp_compile.backends._protocol import Settings
from megacpp_compile.config.options import Config


def compile_plain(gm: GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
    return functools.partial(_record, gm)


compile_lowered = compile_plain


def refusal(gm: GraphModule, patches: Mapping[str, Any], config: Config, grad: bool) -> str:
    return ""


def _record(gm: GraphModule, *args: Any) -> Any:
    # Node by node, so that the trace has the modules, lines and annotations of each.
    with modes.trace_resumed(), fx_traceback.preserve_node_meta():
        return Interpreter(gm).run(*args)
