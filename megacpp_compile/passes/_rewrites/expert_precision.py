"""Decides the precision of the GEMMs of routed experts, and says why it is not the one that the plan asks for.

"fp8_current" needs kernels for grouped float8 GEMMs: on Hopper, for gated experts whose weights lie row by row.
Elsewhere the GEMMs stay in bfloat16; `_frame.precision_rows` says so in the report. "fp8_delayed" is "fp8_current"
here: a scale for each token and row is tighter than one a tensor, but a token is another in every step, without a past.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.config import fp8_gain
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.fx.edit import value
from megacpp_compile.lowerings._gemm.float8_support import FP8_GEMM_ALIGNMENT, no_grouped_float8

RECIPE = "fp8_current"
# Recipes that the layer takes -> why it has RECIPE in their place, "" for itself.
TAKEN = {RECIPE: "", "fp8_delayed": f"{RECIPE}: each token and row has a scale of its own, and none has a past"}
LAYOUTS = ("pair", "gate_up")
# The key of the op node's meta under which the reason of `decide` stands.
REASON = "megacpp_precision_reason"


@dataclasses.dataclass(frozen=True)
class Gemms:
    """What the GEMMs of a layer multiply: rows of `x`, `slots` of them, by `weights`, the last of which are those of
    the down-projection; as nodes."""

    x: Node
    slots: Any
    weights: Sequence[Sequence[Node]]
    layout: str


def decide(plan: PrecisionPlan | None, fqn: str, parts: Iterable[str], gemms: Gemms) -> tuple[str, str]:
    """(the op's argument `precision`, why it is not what the plan asks for) for the layer of experts `fqn`.

    parts: names of the modules whose GEMMs it has.
    """
    if plan is None or (said := plan.decide(fqn, "experts")).recipe == "bf16":
        return "", "" if plan is None else said.exclusion
    reason = _part_refusal(plan, said.recipe, parts) or _refusal(plan, said.recipe, gemms)
    return ("", reason) if reason else (RECIPE, TAKEN[said.recipe])


def _part_refusal(plan: PrecisionPlan, recipe: str, parts: Iterable[str]) -> str:
    """Why the layer cannot have `recipe`, as the plan has another one for one of its `parts`."""
    for part in parts:
        said = plan.decide(part, "experts")
        if said.recipe != recipe:
            why = f"{part} is {said.reason}" if said.exclusion else f"{said.rule} has {said.recipe} for {part}"
            return f"all GEMMs of a layer are in one precision, and {why}"
    return ""


def _refusal(plan: PrecisionPlan, recipe: str, gemms: Gemms) -> str:
    """Why the op cannot compute in `recipe`, or would not gain by it; "" where it can."""
    if recipe not in TAKEN:
        return f"grouped GEMMs of experts have no {recipe} op in the graph"
    x, down, layout = value(gemms.x), value(gemms.weights[-1][0]), gemms.layout
    if missing := no_grouped_float8(x.device):
        return missing
    if x.dtype != torch.bfloat16:
        return f"computed in {x.dtype}"
    if layout not in LAYOUTS:
        return f"float8 GEMMs are there for experts of the layouts {' and '.join(LAYOUTS)}, not {layout}"
    if any(value(w).stride(-1) != 1 for ws in gemms.weights for w in ws):
        return "a weight lies [in, out], of which every call would make a copy"
    d, n = down.shape[-2:]
    if any(not isinstance(side, int) or side % FP8_GEMM_ALIGNMENT for side in (d, n)):
        return f"experts of {n}x{d}, which are no multiples of {FP8_GEMM_ALIGNMENT}"
    if not plan.gate:
        return ""
    experts = down.shape[0] if down.dim() == 3 else len(gemms.weights[-1])
    tokens, slots = (size if isinstance(size, int) else None for size in (x.shape[0], gemms.slots))
    against = fp8_gain.experts_refusal(tokens, slots, experts, d, n)
    return against and f"gate: {against}"
