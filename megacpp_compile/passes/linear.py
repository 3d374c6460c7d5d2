"""Linears that the precision plan wants in float8 (`precision`): with one scale a tensor, from the values it has now
or those of past steps (arXiv:2209.05433), or one for every block of 128 (arXiv:2412.19437).

Before: `y = linear(x, w, b)`, in any spelling
After, under "fp8_current":
        `x8, x8t, sx = megacpp.fp8_quantize_transposed(x, "e4m3")`, once for all linears that read x; backward keeps
        x8t, which it multiplies. `w8, sw = megacpp.fp8_quantize(w, "e4m3")`; of x, too, if w is not trained;
        `y, = megacpp.fp8_linear(x, [w], x8, sx, w8, sw, [b], "e4m3", dtype, None, None, x8t)`
        and of linears that share x, where some are too narrow to gain alone (MLA's two down-projections):
        `y0, y1 = megacpp.fp8_linear(x, [w0, w1], x8, sx, w8, sw, [], "e4m3", dtype, None, None, x8t)`
After, under "fp8_delayed", the same with
        `x8, x8t, sx, seen = megacpp.fp8_quantize_delayed(x, largest, "e4m3", transposed)`, where `largest` is 0, that
        of a first step; the compiled frame has the history in its place (`backends/delayed_scaling.py`)
After, under "fp8_block":
        `x8, sx = megacpp.fp8_quantize_tiles(x, 1)`, `w8, sw = megacpp.fp8_quantize_tiles(w, 128)`;
        `y = megacpp.fp8_block_linear(x, w, x8, sx, w8, sw, b, dtype)`
With `cache_weight_casts`, but for "fp8_block", of weights that are parameters, or views or casts of one:
        `w8, wt, sw = megacpp.fp8_quantize_weights([w], True)`; `fp8_linear(x, [w], x8, sx, w8, sw, ..., wt)`, and the
        frame is called with these three (`backends/weight_casts.py`)
Where the weight's gradient is to be in float32 (`_rewrites/float32_gradients.py`), each has `float32` behind its other
arguments, and linears share a GEMM only with such.

Safe only where the user asks for float8: this is the one pass that changes numerics; without a plan it does nothing. It
runs before the passes that take linears into ops of their own, so a projection in float8 saves its payload instead
of a latent in bfloat16. Backward keeps the payload of x, half of bfloat16, and quantises the gradient.
Refused: rows or features that are no multiple of 16 (of 128 under "fp8_block"); computation in float32; a device
without float8 GEMMs. A linear that the plan leaves in bfloat16 is no near miss, unless the gate by shape did so: its
prediction is the reason. A linear too small for fp8 alone is merged with one that shares its input, whose cast is
already paid for. Those that gain alone join where putting their gradients side by side moves less than the
sum of x's gradients, as with queries, keys and values of few heads; gate and up stay two. Where nothing is trained, and
where a weight is no parameter, or computed of one and not only moved (`_rewrites/delayed_scaling.py`), "fp8_delayed" is
"fp8_current": there are no steps to remember, or nothing to remember them by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile._torch.ops import OpOverload
from megacpp_compile.config import fp8_gain
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.config.rules import role_at
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.groups import by_key
from megacpp_compile.fx.provenance import module_fqn
from megacpp_compile.lowerings._gemm.float8_support import FP8_GEMM_ALIGNMENT, no_block_scales, no_float8
from megacpp_compile.lowerings._kernels.fp8 import SCALE_BLOCK
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.linear import Linear, match_linear
from megacpp_compile.passes._rewrites import weight_casts
from megacpp_compile.passes._rewrites.delayed_scaling import initial_amax, no_parameter
from megacpp_compile.passes._rewrites.float32_gradients import has_float32_gradient
from megacpp_compile.passes._rule import Match

name = "linear"
op = "megacpp::fp8_linear"
after = ("moe",)

# Gradients too are in e4m3: scaled by the values they have now they need no wider range, and they are rounded by half
# as much as in e5m2 (measured: docs/precision.md).
FORWARD, GRADIENT = "e4m3", "e4m3"
# Recipe -> what every side of a GEMM is a multiple of.
MULTIPLES = {"fp8_current": FP8_GEMM_ALIGNMENT, "fp8_delayed": FP8_GEMM_ALIGNMENT, "fp8_block": SCALE_BLOCK}

Payloads = dict[tuple[Node, object, object], Node]  # (tensor, region, how it is rounded) -> the op that does it


@dataclasses.dataclass(frozen=True)
class Fp8Candidate:
    """A linear that can be in float8. recipe: what it runs in. shape: as the gate has it, None where sizes are not
    fixed. gate: why it does not pay alone, "" where it does. note: why it does not run in the recipe of the plan.
    wide: whether its weight's gradient is written in float32."""

    linear: Linear
    recipe: str
    shape: fp8_gain.Shape | None
    gate: str
    note: str = ""
    wide: bool = False


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    plan = view.config.precision
    if plan is None:
        return
    found: list[Fp8Candidate | MatchFailure] = []
    for node in view.graph.nodes:
        linear = match_linear(node)
        if linear is not None and value(linear.x).dim() > 1:
            one = _check(view, plan, linear)
            if one is not None:
                found.append(one)
    together = _together(view, [one for one in found if isinstance(one, Fp8Candidate)])
    payloads: Payloads = {}
    for one in found:
        if isinstance(one, MatchFailure):
            yield one
        elif group := together.get(one.linear.node):
            if group[0] is one:
                yield _match(view, group, payloads)
        elif one.gate:
            yield MatchFailure(one.linear.node, "gate", one.gate)
        else:
            yield _match(view, [one], payloads)


@or_failure
def _check(view: GraphView, plan: PrecisionPlan, linear: Linear) -> Fp8Candidate | MatchFailure | None:
    node, x = linear.node, value(linear.x)
    rows, k, n = x.numel() // x.shape[-1], x.shape[-1], linear.out_features
    static = all(isinstance(d, int) for d in (rows, k, n))
    shape = (rows if isinstance(rows, int) else None, n, k) if static else None
    decision = plan.decide(module_fqn(node), role_at(node), shape)
    refuse_if(decision.exclusion, node, "excluded", decision.exclusion)
    if (recipe := decision.recipe) == "bf16":
        return None
    if missing := _no_device_for(recipe)(x.device):
        return MatchFailure(node, "device", missing)
    gate = decision.reason.removeprefix("gate: ")
    note = _without_past(view, linear) if recipe == "fp8_delayed" else ""
    if note:  # whose casts cost more than those that the plan was asked about
        recipe = "fp8_current"
        gate = fp8_gain.refusal(recipe, shape) if plan.gate and shape is not None else ""
        gate = gate and f"{gate} ({note})"
    misfit = _misfit(value(node).dtype, recipe, k, n, rows)
    if misfit is not None:
        return MatchFailure(node, *(("gate", gate) if gate else misfit))
    wide = view.recorded(node) and has_float32_gradient(linear.w)
    return Fp8Candidate(linear, recipe, shape, gate, note, wide)


def _without_past(view: GraphView, linear: Linear) -> str:
    """Why there is no past that could scale the tensors of `linear`, "" where there is."""
    if not view.has_backward(linear.node):
        return "fp8_current: nothing is trained here"
    return f"fp8_current: {why}, so it has no past" if (why := no_parameter(linear.w)) else ""


def _misfit(dtype: torch.dtype, recipe: str, k: object, n: object, rows: object) -> tuple[str, str] | None:
    """(tag, reason) where no GEMM of `recipe` takes a linear of `rows` x `k` to `n`, computed in `dtype`."""
    if dtype not in (torch.bfloat16, torch.float16):
        return "dtype", f"computed in {dtype}"
    for what, size in (("in features", k), ("out features", n), ("rows", rows)):
        if not statically_known_true(size % MULTIPLES[recipe] == 0):  # type: ignore[operator]
            return "multiple", f"{size} {what}, not known to be a multiple of {MULTIPLES[recipe]}"
    return None


def _together(view: GraphView, wanted: Sequence[Fp8Candidate]) -> dict[Node, list[Fp8Candidate]]:
    """Of linears that share a GEMM: plain node -> all that do, in graph order."""
    def kind(one: Fp8Candidate) -> tuple[object, ...]:
        linear = one.linear
        own = linear.x, one.recipe, view.mode_states[linear.node], value(linear.node).dtype, linear.b is None
        return *own, value(linear.w).dtype, view.needs_grad(linear.w), one.wide

    plain = [one for one in wanted if one.recipe != "fp8_block" and type(one.linear) is Linear]
    sharing = by_key((kind(one), one) for one in plain if one.shape is not None)
    groups = (_group([o for o in own if _before(o, own[0])]) for own in sharing.values())
    return {one.linear.node: group for group in groups for one in group}


def _before(one: Fp8Candidate, first: Fp8Candidate) -> bool:
    """Whether the weights of `one` are there where `first` stands."""
    return all(t is None or t < first.linear.node for t in (one.linear.w, one.linear.b))


def _group(sharing: list[Fp8Candidate]) -> list[Fp8Candidate]:
    """Those of linears with the same input that gain in one GEMM; none where each does what it does alone."""
    narrow = [one for one in sharing if one.gate]
    alone = [one for one in sharing if not one.gate]
    if alone:
        joining = [o for o in narrow if fp8_gain.joining_gain(o.recipe, o.shape) >= fp8_gain.LEAST_GAIN]  # type: ignore[arg-type]
        together = fp8_gain.joining_moves_less([o.shape for o in alone])  # type: ignore[misc]
        group = [*(alone if together else alone[:1]), *joining]
    else:
        group = narrow
        if narrow:
            m, _, k = narrow[0].shape  # type: ignore[misc]
            wide = m, sum(o.linear.out_features for o in narrow), k
            group = narrow if fp8_gain.gain(narrow[0].recipe, wide) >= fp8_gain.LEAST_GAIN else []
    return [one for one in sharing if one in group] if len(group) > 1 else []


def _match(view: GraphView, group: Sequence[Fp8Candidate], payloads: Payloads) -> Match:
    linears = [one.linear for one in group]
    outputs = [linear.node for linear in linears]
    inputs = list(dict.fromkeys(i for one in linears for i in (one.x, one.w, one.b) if i is not None))
    notes = [f"{len(group)} linears, one in backward"] if len(group) > 1 else []
    notes += dict.fromkeys(one.note for one in group if one.note)
    if wide := group[0].wide:
        notes.append("weights' gradients in float32" if len(group) > 1 else "its weight's gradient in float32")
    if view.config.cache_weight_casts:
        notes.append(_in_every_call(group[0].recipe, linears) or weight_casts.NOTE)
    rewrite = lambda build: _rewrite(view, build, linears, group[0].recipe, payloads, wide)  # noqa: E731
    return Match(outputs[0], inputs, outputs, rewrite, note="; ".join(notes))


def _in_every_call(recipe: str, linears: Sequence[Linear]) -> str:
    """Why the weights are cast in every call all the same, "" where they need not be."""
    if recipe == "fp8_block":
        return "cast in every call, as blocks have no shared casts"
    return weight_casts.not_cacheable([linear.w for linear in linears])


def _no_device_for(recipe: str) -> Callable[[torch.device], str]:
    return no_block_scales if recipe == "fp8_block" else no_float8


def _rewrite(
    view: GraphView, build: Builder, linears: Sequence[Linear], recipe: str, payloads: Payloads, wide: bool
) -> tuple[Node, list[Node]]:
    first = linears[0]
    build.anchor = first.node  # a linear stays where it is, behind those that it shares payloads with
    dtype = value(first.node).dtype

    def payload(t: Node, op: OpOverload, *how: object) -> Node:
        key = (t, view.mode_states[first.node], (op, *how))
        if key not in payloads:
            past = [initial_amax(build, t)] if recipe == "fp8_delayed" else []
            payloads[key] = build(op, build(torch.ops.aten.detach.default, t), *past, *how)
        return payloads[key]

    def parts(quantised: Node, *which: int) -> list[Node]:
        made = {n.args[1]: n for n in quantised.users}
        return [made.get(i) or build.item(quantised, i) for i in which]

    ops = torch.ops.megacpp
    x, weights = build.cast(first.x, dtype), [linear.weight(build) for linear in linears]
    if recipe == "fp8_block":
        tiles = ops.fp8_quantize_tiles.default
        quantised = [*parts(payload(x, tiles, 1), 0, 1), *parts(payload(weights[0], tiles, SCALE_BLOCK), 0, 1)]
        of_gradient = [torch.float32] if wide else []
        new = build(ops.fp8_block_linear.default, x, weights[0], *quantised, first.b, dtype, *of_gradient)
        return new, [new]
    biases = [linear.b for linear in linears if linear.b is not None]
    delayed = recipe == "fp8_delayed"
    one, scale = (ops.fp8_quantize_delayed.default, 2) if delayed else (ops.fp8_quantize.default, 1)
    transposed = view.recorded(first.node) and any(view.needs_grad(linear.w) for linear in linears)
    of_x, of_w = ([transposed], [False]) if delayed else ([], [])
    if transposed and not delayed:
        x8, *columns, x_scale = parts(payload(x, ops.fp8_quantize_transposed.default, FORWARD), 0, 1, 2)
    else:
        x8, *columns, x_scale = parts(payload(x, one, FORWARD, *of_x), *([0, 1, scale] if transposed else [0, scale]))
    w_columns: list[Node] = []
    if view.config.cache_weight_casts and not _in_every_call(recipe, linears):
        trained = any(view.has_backward(linear.node) for linear in linears)
        made = build(ops.fp8_quantize_weights.default, weight_casts.detached(build, weights), trained)
        w8, w_scale = parts(made, 0, 2)
        w_columns = parts(made, 1) if trained else []
    else:
        w = build.joined(weights)
        w8, w_scale = parts(payload(w, one, FORWARD, *of_w), 0, scale)
    quantised = [x8, x_scale, w8, w_scale]
    # None stands for what is not there in front of what is.
    past = [None, None, *columns] if transposed else []
    past += [*[None] * (3 - len(past)), torch.float32 if wide else None, *w_columns] if wide or w_columns else []
    new = build(ops.fp8_linear.default, x, weights, *quantised, biases, GRADIENT, dtype, *past)
    return new, [build.item(new, i) for i in range(len(linears))]
