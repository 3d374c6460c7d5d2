"""Linears that the precision plan wants in float8 (`precision`; current scaling, arXiv:2209.05433).

Before: `y = linear(x, w, b)`, in any spelling
After:  `x8, sx = megacpp.fp8_quantize(x, "e4m3")`, once for all linears that read x; the same of w;
        `y = megacpp.fp8_linear(x, w, x8, sx, w8, sw, b, "e5m2", dtype)`

Nothing happens without a plan: this is the one pass that changes numerics, and it is asked for. It runs before those
that take linears into ops of their own, so a projection in float8 keeps its payload instead of a latent in bfloat16.
Backward keeps the payload of x, half of bfloat16, and quantises the gradient.
Refused: rows or features that are no multiple of 16; computation in float32; a recipe that has no op; a device without
float8. What the plan leaves in bfloat16 is no near miss, but for the gate by shape, which says what it predicted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.float8 import MULTIPLE, no_float8
from megacpp_compile.graph_edit import Builder, value
from megacpp_compile.passes._rule import GraphView, Match, Refusal
from megacpp_compile.precision.plan import PrecisionPlan
from megacpp_compile.provenance import module_fqn
from megacpp_compile.recognise.linear import Linear, match_linear

name = "linear"
op = "megacpp::fp8_linear"
after = ("moe",)

FORWARD, GRADIENT = "e4m3", "e5m2"


def find(view: GraphView) -> Iterator[Match | Refusal]:
    plan = view.config.precision
    if plan is None:
        return
    payloads: dict[tuple[Node, object], tuple[Node, Node]] = {}
    for node in list(view.graph.nodes):
        linear = match_linear(node)
        if linear is not None and value(linear.x).dim() > 1:
            found = _check(view, plan, linear, payloads)
            if found is not None:
                yield found


def _check(
    view: GraphView, plan: PrecisionPlan, linear: Linear, payloads: dict[tuple[Node, object], tuple[Node, Node]]
) -> Match | Refusal | None:
    node, x = linear.node, value(linear.x)
    rows, k, n = x.numel() // x.shape[-1], x.shape[-1], linear.out_features
    static = all(isinstance(d, int) for d in (rows, k, n))
    decision = plan.decide(module_fqn(node), shape=(rows if isinstance(rows, int) else None, n, k) if static else None)
    if decision.reason:
        return Refusal(node, "gate", decision.reason.removeprefix("gate: "))
    if decision.effective == "bf16":
        return None
    if decision.effective != "fp8_current":
        return Refusal(node, "recipe", f"{decision.effective} has no op in the graph: fp8_current has")
    missing = no_float8(x.device)
    if missing:
        return Refusal(node, "device", missing)
    dtype = value(node).dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return Refusal(node, "dtype", f"computed in {dtype}")
    for what, size in (("in features", k), ("out features", n), ("rows", rows)):
        if not statically_known_true(size % MULTIPLE == 0):
            return Refusal(node, "multiple", f"{size} {what}, not known to be a multiple of {MULTIPLE}")
    inputs = list(dict.fromkeys(i for i in (linear.x, linear.w, linear.b) if i is not None))
    return Match(node, inputs, [node], lambda: _rewrite(view, linear.node, payloads))


def _rewrite(
    view: GraphView, node: Node, payloads: dict[tuple[Node, object], tuple[Node, Node]]
) -> tuple[Node, list[Node]]:
    linear = match_linear(node)  # again: what it reads may have been another linear's result
    assert linear is not None
    build = Builder(view.graph, view.fake_mode, node, node, view.regions)
    dtype = value(node).dtype

    def payload(t: Node) -> tuple[Node, Node]:
        key = (t, view.regions[node])
        if key not in payloads:
            quantised = build(torch.ops.megacpp.fp8_quantize.default, build(torch.ops.aten.detach.default, t), FORWARD)
            payloads[key] = build.item(quantised, 0), build.item(quantised, 1)
        return payloads[key]

    x, w = build.cast(linear.x, dtype), linear.weight(build)
    new = build(
        torch.ops.megacpp.fp8_linear.default, x, w, *payload(x), *payload(w), linear.b, GRADIENT, dtype
    )
    node.replace_all_uses_with(new)
    return new, [new]
