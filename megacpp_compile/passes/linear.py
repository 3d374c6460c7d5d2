"""Linears that the precision plan wants in float8 (`precision`): with one scale a tensor from the values it has now
(arXiv:2209.05433), or one for every block of 128 (arXiv:2412.19437).

Before: `y = linear(x, w, b)`, in any spelling
After, under "fp8_current":
        `x8, sx = megacpp.fp8_quantize(x, "e4m3")`, once for all linears that read x; the same of w;
        `y = megacpp.fp8_linear(x, w, x8, sx, w8, sw, b, "e4m3", dtype)`
After, under "fp8_block":
        `x8, sx = megacpp.fp8_quantize_tiles(x, 1)`, `w8, sw = megacpp.fp8_quantize_tiles(w, 128)`;
        `y = megacpp.fp8_block_linear(x, w, x8, sx, w8, sw, b, dtype)`

Safe only where the user asks for float8: this is the one pass that changes numerics; without a plan it does nothing. It
runs before the passes that take linears into ops of their own, so a projection in float8 saves its payload instead
of a latent in bfloat16. Backward keeps the payload of x, half of bfloat16, and quantises the gradient.
Refused: rows or features that are no multiple of 16 (of 128 under "fp8_block"); computation in float32; a device
without float8 GEMMs. `Config` refuses "fp8_delayed" before any pass runs. A linear that the plan leaves in bfloat16 is
no near miss, unless the gate by shape did so: its prediction is the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile._torch.ops import OpOverload
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.config.rules import role_at
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.provenance import module_fqn
from megacpp_compile.lowerings._gemm.float8_support import MULTIPLE, no_block_scales, no_float8
from megacpp_compile.lowerings._kernels.fp8 import SCALE_BLOCK
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.linear import Linear, match_linear
from megacpp_compile.passes._rule import Match

name = "linear"
op = "megacpp::fp8_linear"
after = ("moe",)

# Gradients too are in e4m3: scaled by the values they have now they need no wider range, and they are rounded by half
# as much as in e5m2 (measured: docs/precision.md).
FORWARD, GRADIENT = "e4m3", "e4m3"
# Recipe -> what every side of a GEMM is a multiple of.
MULTIPLES = {"fp8_current": MULTIPLE, "fp8_block": SCALE_BLOCK}

Payloads = dict[tuple[Node, object, object], tuple[Node, Node]]  # (tensor, region, how it is rounded)


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    plan = view.config.precision
    if plan is None:
        return
    payloads: Payloads = {}
    for node in list(view.graph.nodes):
        linear = match_linear(node)
        if linear is not None and value(linear.x).dim() > 1:
            found = _check(view, plan, linear, payloads)
            if found is not None:
                yield found


def _check(view: GraphView, plan: PrecisionPlan, linear: Linear, payloads: Payloads) -> Match | MatchFailure | None:
    node, x = linear.node, value(linear.x)
    rows, k, n = x.numel() // x.shape[-1], x.shape[-1], linear.out_features
    static = all(isinstance(d, int) for d in (rows, k, n))
    shape = (rows if isinstance(rows, int) else None, n, k) if static else None
    decision = plan.decide(module_fqn(node), role_at(node), shape)
    if (recipe := decision.requested) == "bf16":
        return None
    if missing := _no_device_for(recipe)(x.device):
        return MatchFailure(node, "device", missing)
    if decision.reason:
        return MatchFailure(node, "gate", decision.reason.removeprefix("gate: "))
    dtype = value(node).dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return MatchFailure(node, "dtype", f"computed in {dtype}")
    for what, size in (("in features", k), ("out features", n), ("rows", rows)):
        if not statically_known_true(size % MULTIPLES[recipe] == 0):
            return MatchFailure(node, "multiple", f"{size} {what}, not known to be a multiple of {MULTIPLES[recipe]}")
    inputs = list(dict.fromkeys(i for i in (linear.x, linear.w, linear.b) if i is not None))
    return Match(node, inputs, [node], lambda build: _rewrite(view, build, linear, recipe, payloads))


def _no_device_for(recipe: str) -> Callable[[torch.device], str]:
    return no_block_scales if recipe == "fp8_block" else no_float8


def _rewrite(
    view: GraphView, build: Builder, linear: Linear, recipe: str, payloads: Payloads
) -> tuple[Node, list[Node]]:
    build.anchor = linear.node  # a linear stays where it is, behind those that it shares payloads with
    dtype = value(linear.node).dtype

    def payload(t: Node, op: OpOverload, how: object) -> tuple[Node, Node]:
        key = (t, view.mode_states[linear.node], how)
        if key not in payloads:
            quantised = build(op, build(torch.ops.aten.detach.default, t), how)
            payloads[key] = build.item(quantised, 0), build.item(quantised, 1)
        return payloads[key]

    ops = torch.ops.megacpp
    x, w = build.cast(linear.x, dtype), linear.weight(build)
    if recipe == "fp8_block":
        tiles = ops.fp8_quantize_tiles.default
        parts = (*payload(x, tiles, 1), *payload(w, tiles, SCALE_BLOCK))
        new = build(ops.fp8_block_linear.default, x, w, *parts, linear.b, dtype)
    else:
        one = ops.fp8_quantize.default
        parts = (*payload(x, one, FORWARD), *payload(w, one, FORWARD))
        new = build(ops.fp8_linear.default, x, w, *parts, linear.b, GRADIENT, dtype)
    return new, [new]
