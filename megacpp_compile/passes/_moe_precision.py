"""Which precision a plan gives the products of routed experts, and why not the one it asks for.

"fp8_current" is there where kernels multiply float8 by groups: on Hopper, for experts with a gate whose weights lie row
by row. Elsewhere they stay in bfloat16; `effective_precision` tells the report so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megacpp_compile.config import fp8_gain
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.fx.edit import value
from megacpp_compile.lowerings._gemm.float8_support import MULTIPLE, no_grouped_float8

RECIPE = "fp8_current"
LAYOUTS = ("pair", "gate_up")
# Where the op's node has what `decide` says against what the plan asks for.
REASON = "megacpp_precision_reason"


def decide(plan: PrecisionPlan | None, fqn: str, parts: Iterable[str], args: Sequence[Any]) -> tuple[str, str]:
    """(the op's argument `precision`, why it is not what the plan asks for) for the layer of experts `fqn`.

    parts: names of the modules that multiply within it. args: those of `megacpp::moe`, from x to layout, as nodes.
    """
    requested = "bf16" if plan is None else plan.decide(fqn, "experts").requested
    if plan is None or requested == "bf16":
        return "", ""
    reason = _against_parts(plan, requested, parts) or _against(plan, requested, args)
    return ("", reason) if reason else (RECIPE, "")


def _against_parts(plan: PrecisionPlan, requested: str, parts: Iterable[str]) -> str:
    for part in parts:
        said = plan.decide(part, "experts")
        if said.requested != requested:
            return f"all products of a layer are in one precision, and {said.rule} has {said.requested} for {part}"
    return ""


def _against(plan: PrecisionPlan, requested: str, args: Sequence[Any]) -> str:
    if requested != RECIPE:
        return f"grouped products of experts have no {requested} op in the graph"
    x, indices, down, layout = value(args[0]), value(args[1]), value(args[5][0]), args[7]
    if missing := no_grouped_float8(x.device):
        return missing
    if x.dtype != torch.bfloat16:
        return f"computed in {x.dtype}"
    if layout not in LAYOUTS:
        return f"float8 products are there for experts of the layouts {' and '.join(LAYOUTS)}, not {layout}"
    if any(value(w).stride(-1) != 1 for ws in args[3:6] for w in ws):
        return "a weight lies [in, out], of which every call would make a copy"
    d, n = down.shape[-2:]
    if any(not isinstance(side, int) or side % MULTIPLE for side in (d, n)):
        return f"experts of {n}x{d}, which are no multiples of {MULTIPLE}"
    if not plan.gate:
        return ""
    experts = down.shape[0] if down.dim() == 3 else len(args[5])
    tokens, slots = (size if isinstance(size, int) else None for size in (x.shape[0], indices.numel()))
    against = fp8_gain.experts_refusal(tokens, slots, experts, d, n)
    return against and f"gate: {against}"
