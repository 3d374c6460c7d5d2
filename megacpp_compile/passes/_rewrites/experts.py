"""Turns a layer of routed experts, in whatever spelling it was found, into the op `megacpp::moe`, and experts over
sorted rows into `megacpp::moe_sorted`, in the precision that a plan gives the layer.

"fp8_current" needs kernels for grouped float8 GEMMs: on Hopper, for gated experts whose weights lie row by row.
Elsewhere the GEMMs stay in bfloat16; `_frame.precision_rows` says so in the report. "fp8_delayed" is "fp8_current"
here: a scale for each token and row is tighter than one a tensor, but a token is another in every step, without a past.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.config import fp8_gain
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.fx.edit import Builder, same_size, value
from megacpp_compile.fx.provenance import module_fqn
from megacpp_compile.fx.size_nodes import reshaped
from megacpp_compile.lowerings._gemm.float8_support import FP8_GEMM_ALIGNMENT, no_grouped_float8
from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.gemms import Weight
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, SortedExperts, only_checks_sizes
from megacpp_compile.passes._rewrites import weight_casts
from megacpp_compile.passes._rule import Match

RECIPE = "fp8_current"
# Recipes that the layer takes -> why it has RECIPE in their place, "" for itself.
TAKEN = {RECIPE: "", "fp8_delayed": f"{RECIPE}: each token and row has a scale of its own, and none has a past"}
LAYOUTS = ("pair", "gate_up")
# The key of the op node's meta under which the reason of `decide` stands.
REASON = "megacpp_precision_reason"


def to_match(view: GraphView, layer: RoutedExperts | SortedExperts) -> Match:
    """The match that replaces `layer` by one op."""
    if isinstance(layer, SortedExperts):
        rewrite = functools.partial(_rewrite_sorted, view, layer=layer)
        return Match(layer.output, list(layer.inputs), [layer.output], rewrite, layer.ends)
    return Match(layer.output, list(layer.inputs), [layer.output], lambda build: _rewrite(view, build, layer))


def _drop_size_checks(nodes: Set[Node]) -> None:
    """Erase the run-time checks of how many rows an expert has, and the sizes that only they read."""
    pending = [u for n in nodes for u in n.users if u not in nodes and only_checks_sizes(u)]
    order = list(dict.fromkeys(pending))
    for n in order:
        order.extend(u for u in n.users if u not in order)
    for n in sorted(set(order), reverse=True):
        if not n.users:
            n.graph.erase_node(n)


def _rewrite(view: GraphView, build: Builder, layer: RoutedExperts) -> tuple[Node, list[Node]]:
    old = layer.output
    x, indices, gates = _slots(build, layer)
    choices = value(indices).shape[1]
    passed = _passed(build, layer, x, indices, gates) if layer.identities else None
    if layer.scaled_input:  # every choice becomes a row of its own, with one choice
        x = build(aten.mul.Tensor, build(aten.unsqueeze.default, x, 1), build(aten.unsqueeze.default, gates, -1))
        x = build(aten.reshape.default, x, [-1, value(x).shape[-1]])
        indices = build(aten.reshape.default, indices, [-1, 1])
        gates = build(aten.ones_like.default, build(aten.reshape.default, gates, [-1, 1]))
    node = _op(view, build, layer, x, indices, gates)
    y = build.item(node, 0)
    if layer.scaled_input and choices != 1:
        y = build(aten.sum.dim_IntList, build(aten.reshape.default, y, [-1, choices, value(y).shape[-1]]), [1])
    if passed is not None:
        y = build(aten.add.Tensor, y, passed)
    if tuple(value(y).shape) != tuple(value(old).shape):
        y = reshaped(build, y, value(old).shape)
    for scale, dims in layer.scales:
        sizes = [n if d in dims else 1 for d, n in enumerate(value(old).shape)]
        y = build.cast(build(aten.mul.Tensor, y, reshaped(build, scale, sizes)), value(old).dtype)
    if layer.base is not None:
        y = build(aten.add.Tensor, layer.base, y)
    _drop_size_checks(layer.inside)
    return node, [y]


def _passed(build: Builder, layer: RoutedExperts, x: Node, indices: Node, gates: Node) -> Node:
    """What the experts that return what they read add [T, d]: x, times the sum of a token's gates for them."""
    first, last = layer.identities[0] - layer.first, layer.identities[-1] - layer.first
    others = build(aten.logical_or.default, build(aten.lt.Scalar, indices, first), build(aten.gt.Scalar, indices, last))
    gates = build.cast(gates, compute_dtype(value(gates)))
    gates = build(aten.sum.dim_IntList, build(aten.masked_fill.Scalar, gates, others, 0.0), [-1], True)
    return build.cast(build(aten.mul.Tensor, x, gates), value(layer.output).dtype)


def _slots(build: Builder, layer: RoutedExperts) -> tuple[Node, Node, Node]:
    """(x [T, d], indices [T, k], gates [T, k]), the indices counted from the layer's first expert."""
    indices, gates, x = layer.indices, layer.gates, layer.x
    if gates is None:
        gates = build(aten.ones_like.default, indices, dtype=compute_dtype(value(layer.output)))
    if layer.column is not None:
        cut = layer.column, layer.column + 1
        indices = build(aten.slice.Tensor, indices, -1, *cut)
        gates = gates if layer.by_expert else build(aten.slice.Tensor, gates, -1, *cut)
    if layer.by_expert:
        if layer.transposed:
            gates = build(aten.transpose.int, gates, 0, 1)
        if layer.choices is not None:
            indices = build(aten.reshape.default, indices, [-1, layer.choices])
        elif value(indices).dim() == 1:
            indices = build(aten.unsqueeze.default, indices, -1)
        if value(indices).dim() != value(gates).dim():
            indices, gates = (build(aten.reshape.default, n, [-1, value(n).shape[-1]]) for n in (indices, gates))
        gates = build(aten.gather.default, gates, -1, indices)
    width = _width(layer)
    if value(x).dim() != 2 or not same_size(value(x).shape[-1], width):
        x = build(aten.reshape.default, x, [-1, width])
    if layer.choices is not None or value(indices).dim() > 2:
        choices = layer.choices if layer.choices is not None else value(indices).shape[-1]
        indices, gates = (build(aten.reshape.default, n, [-1, choices]) for n in (indices, gates))
    elif value(indices).dim() == 1:
        indices, gates = build(aten.unsqueeze.default, indices, 1), build(aten.unsqueeze.default, gates, 1)
    if layer.first:
        indices = build(aten.sub.Tensor, indices, layer.first)
    if layer.above is not None:
        counts = build(aten.gt.Scalar if layer.above else aten.ne.Scalar, gates, 0)
        gates = build(aten.masked_fill.Scalar, gates, build(aten.logical_not.default, counts), 0.0)
    return x, indices, gates


def _width(layer: RoutedExperts) -> Any:
    """The number of channels that experts read: x may have a dimension behind these, as `bmm` wants it."""
    up = layer.experts[0].ups[0].weight
    return value(up.tensor).shape[-2 if up.transposed else -1]


def _rewrite_sorted(view: GraphView, build: Builder, *, layer: SortedExperts) -> tuple[Node, list[Node]]:
    x = layer.x
    if value(x).dim() != 2:
        x = build(aten.reshape.default, x, [-1, value(x).shape[-1]])
    made = _Parts.of(view, build, layer, x, value(x).shape[0])
    others = made.others()
    node = build(torch.ops.megacpp.moe_sorted.default, made.x, layer.ends, *made.weights, *made.form, *others)
    node.meta[REASON] = made.reason
    _drop_size_checks(layer.inside)
    return node, [build.item(node, 0)]


def _op(view: GraphView, build: Builder, layer: RoutedExperts, x: Node, indices: Node, gates: Node) -> Node:
    """The op's node, in the precision that the plan gives the layer."""
    made, dtype = _Parts.of(view, build, layer, x, value(indices).numel()), value(layer.output).dtype
    args = made.x, indices, gates, *made.weights, *made.form, dtype
    node = build(torch.ops.megacpp.moe.default, *args, *made.others())
    node.meta[REASON] = made.reason
    return node


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What an op of experts is called with: rows, weights, (activation, layout), precision and why it is not what the
    plan asks for, biases, and casts of the weights, none where the call is to make them."""

    x: Node
    weights: tuple[list[Node], list[Node], list[Node]]
    form: tuple[str, str]
    precision: str
    reason: str
    biases: list[Node | None]
    casts: list[Node]

    @classmethod
    def of(cls, view: GraphView, build: Builder, layer: RoutedExperts | SortedExperts, x: Node, slots: Any) -> _Parts:
        expert, experts = layer.experts[0], layer.experts
        dtype = expert.down.dtype
        count = len(expert.ups)
        own = [[gemm.weight for gemm in gemms] for gemms in zip(*((*e.ups, e.down) for e in experts), strict=True)]
        together = all(map(_in_one, own))  # the op takes either form, and the same for all
        *ups, down = [_weights(build, weights, dtype, together) for weights in own]
        x = build.cast(x, dtype)
        weights = ups[0] if count == 2 else [], ups[-1], down
        parts = dict.fromkeys(module_fqn(gemm.node) for e in experts for gemm in (*e.ups, e.down))
        gemms = Gemms(x, slots, weights, expert.layout)
        precision, reason = decide(view.config.precision, module_fqn(layer.output), parts, gemms)
        gemms_of = [[(*e.ups, e.down)[i] for e in experts] for i in range(count + 1)]
        biases = [_biases(build, [gemm.bias for gemm in own], value(own[0].node).dtype) for own in gemms_of]
        form = expert.activation, expert.layout
        casts = list[Node]()
        if precision and view.config.cache_weight_casts:
            in_call = weight_casts.not_cacheable([w for part in weights for w in part])
            casts = [] if in_call else _casts(view, build, weights, layer.output)
            reason = "; ".join(filter(None, (reason, in_call)))
        return cls(x, weights, form, precision, reason, [*([None] if count == 1 else []), *biases], casts)

    def others(self) -> tuple[Any, ...]:
        """The arguments with defaults, from `keep_hidden` on."""
        if self.casts:
            return True, self.precision, *self.biases, *self.casts
        if any(self.biases):
            return True, self.precision, *self.biases
        return (True, self.precision) if self.precision else ()


def _casts(view: GraphView, build: Builder, weights: Sequence[list[Node]], output: Node) -> list[Node]:
    """Payload, transposed and scale of the weights before the activation, and of those behind it."""
    w_gate, w_up, w_down = weights
    trained, found = view.has_backward(output), list[Node]()
    for own, parts in (([*w_gate, *w_up], 2 if w_gate else 1), (w_down, 1)):
        operands = weight_casts.detached(build, own)
        made = build(torch.ops.megacpp.fp8_quantize_experts.default, operands, parts, trained)
        found += [build.item(made, i) for i in range(3)]
    return found


def _biases(build: Builder, biases: list[Weight | None], dtype: torch.dtype) -> Node | None:
    """Every expert's bias [E, n] in `dtype`: the tensor that holds all in order, or a copy."""
    given = [bias for bias in biases if bias is not None]
    if not given:
        return None
    tensors = _weights(build, given, dtype, _in_one(given))
    if given[0].every and value(tensors[0]).dim() > 2:  # with dimensions of one, by which it meets rows
        wide = [n for n in value(tensors[0]).shape if not isinstance(n, int) or n != 1]
        return reshaped(build, tensors[0], wide if len(wide) == 2 else [-1, value(tensors[0]).shape[-1]])
    return tensors[0] if value(tensors[0]).dim() == 2 else build(aten.stack.default, tensors)


def _in_one(weights: list[Weight]) -> bool:
    """Whether one tensor holds `weights` one after the other."""
    first = weights[0]
    return first.every or first.index is not None and all(
        w.tensor is first.tensor and w.transposed == first.transposed and w.index == i
        for i, w in enumerate(weights, first.index)
    )


def _weights(build: Builder, weights: list[Weight], dtype: torch.dtype, together: bool) -> list[Node]:
    """Every expert's weight as [out, in], or bias, in `dtype`: one tensor of all in order, or one each."""
    first = weights[0]
    if together:
        tensor = first.tensor
        if not first.every and len(weights) != value(tensor).shape[0]:
            tensor = build(aten.slice.Tensor, tensor, 0, first.index, first.index + len(weights))  # type: ignore[operator]
        return [_as_out_in(build, tensor, first.transposed, dtype)]
    own = [w.tensor if w.index is None else build(aten.select.int, w.tensor, 0, w.index) for w in weights]
    return [_as_out_in(build, t, w.transposed, dtype) for t, w in zip(own, weights, strict=True)]


def _as_out_in(build: Builder, tensor: Node, transposed: bool, dtype: torch.dtype) -> Node:
    """`tensor` in `dtype`, with its last two dimensions swapped if it is `transposed`."""
    tensor = build.cast(tensor, dtype)
    return build(aten.transpose.int, tensor, -2, -1) if transposed else tensor


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
    reason = _part_refusal(plan, said.recipe, parts) or _float8_refusal(plan, said.recipe, gemms)
    return ("", reason) if reason else (RECIPE, TAKEN[said.recipe])


def _part_refusal(plan: PrecisionPlan, recipe: str, parts: Iterable[str]) -> str:
    """Why the layer cannot have `recipe`, as the plan has another one for one of its `parts`."""
    for part in parts:
        said = plan.decide(part, "experts")
        if said.recipe != recipe:
            why = f"{part} is {said.reason}" if said.exclusion else f"{said.rule} has {said.recipe} for {part}"
            return f"all GEMMs of a layer are in one precision, and {why}"
    return ""


def _float8_refusal(plan: PrecisionPlan, recipe: str, gemms: Gemms) -> str:
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
