"""One expert: its products, its activation and its gate, whatever multiplies by the weights.

A feed-forward block over rows: `down(f(gate(r)) * up(r))`, `down(f(up(r)))`, or with gate and up in one product whose
halves are taken apart. Biases, other activations, and anything between are refused, and named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.matchers.linear import match_linear
from megacpp_compile.matchers.views import is_cast, is_outer_view, lane_slice

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Weight:
    """`tensor` as [out, in] after `transposed`, or with `index` that entry of it; `every`: all experts' in one tensor,
    chosen by row."""

    tensor: Node
    transposed: bool = False
    index: int | None = None
    every: bool = False


@dataclasses.dataclass(frozen=True)
class Product:
    """`node = x @ weight.T` over rows."""

    node: Node
    x: Node
    weight: Weight


@dataclasses.dataclass(frozen=True)
class Expert:
    """`down(activation(gate) * up)`; `ups` holds the products of gate and up, or the one of both."""

    node: Node
    x: Node
    ups: tuple[Product, ...]
    down: Product
    activation: str
    layout: str


@dataclasses.dataclass(frozen=True)
class NoExpert:
    node: Node
    tag: str
    reason: str


Multiply = Callable[[Node], "Product | NoExpert | None"]
_BIAS = "an expert's projection has a bias, which the op does not add"
_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.hardtanh.default,
           aten.minimum.default, aten.maximum.default)  # fmt: skip
_ROWS = (aten.index.Tensor, aten.index_select.default, aten.embedding.default, aten.select.int)


def linear_product(node: Node) -> Product | NoExpert | None:
    """A product with one expert's own weight."""
    found = match_linear(node)
    if found is None:
        return None
    if found.b is not None:
        return NoExpert(node, "bias", _BIAS)
    w, transposed = found.w, found.transposed
    while True:
        if is_cast(w) or w.target in (aten.alias.default, aten.clone.default, aten.contiguous.default):
            w = w.args[0]  # type: ignore[assignment]
        elif w.target is aten.t.default or (
            w.target is aten.transpose.int and {d % 2 for d in w.args[1:3]} == {0, 1}  # type: ignore[operator]
        ) or (w.target is aten.permute.default and [d % 2 for d in w.args[1]] == [1, 0]):  # type: ignore[union-attr]
            w, transposed = w.args[0], not transposed  # type: ignore[assignment]
        else:
            break
    if w.target is aten.select.int and value(w.args[0]).dim() == 3:
        stack, dim, index = w.args
        if dim % 3 == 0 and isinstance(index, int) and isinstance(value(stack).shape[0], int):  # type: ignore[operator]
            return Product(node, found.x, Weight(stack, transposed, index % value(stack).shape[0]))  # type: ignore[arg-type]
    if str(w.target) == "<built-in function getitem>" and isinstance(w.args[0], Node):
        parts, index = w.args
        if parts.target is aten.unbind.int and value(parts.args[0]).dim() == 3:
            if ([*parts.args, 0][1] or 0) % 3 == 0:  # type: ignore[operator]
                return Product(node, found.x, Weight(parts.args[0], transposed, index))  # type: ignore[arg-type]
    return Product(node, found.x, Weight(w, transposed))


def over_rows(node: Node) -> Node:
    """`node` without casts, and without views that leave rows and lanes as they are."""
    while is_cast(node) or (is_outer_view(node) and _rows_kept(node)):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _rows_kept(view: Node) -> bool:
    """A view of rows [.., R, d] with no more than one dimension that is not 1: nothing can change places."""
    return sum(not (isinstance(n, int) and n == 1) for n in value(view.args[0]).shape[:-1]) <= 1


def _activation(node: Node) -> tuple[str, Node] | None:
    """(name, its argument) of the function of one tensor that `node` computes."""
    node = over_rows(node)
    target, args = node.target, node.args
    if target is aten.silu.default:
        return "silu", args[0]  # type: ignore[return-value]
    if target is aten.gelu.default:
        kind = node.kwargs.get("approximate", args[1] if len(args) > 1 else "none")
        return "gelu" if kind == "none" else "gelu_tanh", args[0]  # type: ignore[return-value]
    if target is aten.relu.default:
        return "relu", args[0]  # type: ignore[return-value]
    squared = None
    if target is aten.pow.Tensor_Scalar and args[1] == 2 or target is aten.square.default:
        squared = args[0]
    elif target is aten.mul.Tensor and args[0] is args[1]:
        squared = args[0]
    if isinstance(squared, Node) and over_rows(squared).target is aten.relu.default:
        return "relu2", over_rows(squared).args[0]  # type: ignore[return-value]
    if target is aten.mul.Tensor and of_tensors(node):
        for h, s in (args, args[::-1]):
            s = over_rows(s)  # type: ignore[arg-type]
            if s.target is aten.sigmoid.default and over_rows(s.args[0]) is over_rows(h):  # type: ignore[arg-type]
                return "silu", h  # type: ignore[return-value]
    return None


def match_expert(node: Node, multiply: Multiply) -> Expert | NoExpert | None:
    """The expert whose output is `node`; None where it does not even end in a product."""
    node = over_rows(node)
    if (plain := before_bias(node, multiply)) is not None:
        return biased(node, expert_into(plain, multiply))
    down = multiply(node)
    return expert_into(down, multiply) if isinstance(down, Product) else down


def before_bias(node: Node, multiply: Multiply) -> Product | None:
    """The product to which `node` adds a bias: one row for all rows, or one of its own expert's for each."""
    if node.target is not aten.add.Tensor or not of_tensors(node):
        return None
    for a, b in (node.args, node.args[::-1]):
        bias = over_rows(b)  # type: ignore[arg-type]
        if bias.target in _ROWS or all(isinstance(n, int) and n == 1 for n in value(bias).shape[:-1]):
            found = multiply(over_rows(a))  # type: ignore[arg-type]
            if isinstance(found, Product):
                return found
    return None


def biased(node: Node, rest: object = None) -> NoExpert:
    """The refusal of a bias, and of what else is in the way in the `rest` of the expert."""
    others = rest.reason.removeprefix(_BIAS).removeprefix("; and ") if isinstance(rest, NoExpert) else ""
    return NoExpert(node, "bias", f"{_BIAS}; and {others}" if others else _BIAS)


def expert_into(down: Product, multiply: Multiply) -> Expert | NoExpert:
    """The expert whose last product is `down`."""
    node, inner = down.node, over_rows(down.x)
    found = _activation(inner)
    if found is not None:
        up = multiply(over_rows(found[1]))
        if isinstance(up, Product):
            return Expert(node, up.x, (up,), down, found[0], "single")
        if isinstance(up, NoExpert):
            return up
    if inner.target is not aten.mul.Tensor or not of_tensors(inner):
        return _in_the_way(inner, multiply)
    for gate, up_side in (inner.args, inner.args[::-1]):
        found = _activation(gate)  # type: ignore[arg-type]
        if found is not None:
            return _gated(node, inner, found, over_rows(up_side), down, multiply)  # type: ignore[arg-type]
    return _in_the_way(inner, multiply)


def _in_the_way(inner: Node, multiply: Multiply) -> NoExpert:
    """All that stands between `inner`, the last product's operand, and the first products."""
    ways, others, order = dict[str, tuple[Node, str]](), dict[str, None](), [inner]
    for node in order:
        found, cut = multiply(node), lane_slice(node)
        if isinstance(found, Product):
            continue
        if isinstance(found, NoExpert) and found.tag == "bias" or before_bias(node, multiply) is not None:
            ways.setdefault("bias", (node, _BIAS))
            continue
        if node.target in _CLAMPS:
            ways.setdefault("clamp", (node, "gate or up is clamped, which no activation of the op does"))
        elif node.target is aten.slice.Tensor and cut is None:
            ways.setdefault("halves", (node, "gate and up are every other lane of a projection, not its halves"))
        elif cut is None:
            others[str(node.target).removeprefix("aten.").split(".")[0]] = None
        below = map(over_rows, [cut[0]] if cut is not None else node.all_input_nodes)
        order += [n for n in below if n not in order and _computed(n)] if len(order) < 24 else []
    known = inner.target is aten.mul.Tensor and any(_activation(a) for a in inner.args if isinstance(a, Node))
    if not known and _activation(inner) is None:
        others_named = f" ({', '.join(others)})" if others else ""
        ways["activation"] = inner, f"its activation is none that is known{others_named}"
    elif not ways:
        ways["projections"] = inner, "the activation's operands are no projections of the expert's rows"
    tag = min(ways, key=["bias", "clamp", "halves", "activation", "projections"].index)
    return NoExpert(ways[tag][0], tag, "; and ".join(reason for _, reason in ways.values()))


def _computed(node: Node) -> bool:
    """Whether `node` is computed here and has lanes."""
    fake = value(node)
    computed = node.op == "call_function" and isinstance(fake, torch.Tensor)
    return computed and fake.is_floating_point() and fake.dim() > 1


def _gated(
    node: Node, inner: Node, found: tuple[str, Node], up_node: Node, down: Product, multiply: Multiply
) -> Expert | NoExpert:
    activation, gate_node = found[0], over_rows(found[1])
    gate, up = _lanes(gate_node, multiply), _lanes(up_node, multiply)
    for part in (gate, up):
        if isinstance(part, NoExpert):
            return part
    if gate is None or up is None or isinstance(gate, NoExpert) or isinstance(up, NoExpert):
        return _in_the_way(inner, multiply)
    if gate[0].node is up[0].node:
        total, half = value(gate[0].node).shape[-1], gate[2]
        places = (gate[1], up[1])
        if gate[2] != up[2] or total != 2 * half or sorted(places) != [0, half]:
            return NoExpert(inner, "halves", "gate and up are not the halves of one projection")
        layout = "gate_up" if places[0] == 0 else "up_gate"
        return Expert(node, gate[0].x, (gate[0],), down, activation, layout)
    if any(part[1] or part[2] != value(part[0].node).shape[-1] for part in (gate, up)):
        return NoExpert(inner, "halves", "gate and up are parts of two projections")
    if over_rows(gate[0].x) is not over_rows(up[0].x):
        return NoExpert(inner, "inputs", "gate and up are projections of two different inputs")
    return Expert(node, gate[0].x, (gate[0], up[0]), down, activation, "pair")


def _lanes(node: Node, multiply: Multiply) -> tuple[Product, int, Any] | NoExpert | None:
    """(product, first lane, lanes) that `node` is a run of."""
    start, size = 0, value(node).shape[-1]
    while (cut := lane_slice(node)) is not None:
        node, start = over_rows(cut[0]), start + cut[1]
    found = multiply(node)
    return (found, start, size) if isinstance(found, Product) else found


def agree(experts: list[Expert]) -> Node | None:
    """The first expert that is not built like the others; None where all are."""
    first = experts[0]
    for other in experts[1:]:
        same = (other.activation, other.layout) == (first.activation, first.layout)
        for a, b in zip((*first.ups, first.down), (*other.ups, other.down), strict=False):
            shapes = zip(_shape(a.weight), _shape(b.weight), strict=True)
            same = same and all(map(same_size, *zip(*shapes, strict=True)))
            same = same and value(a.node).dtype == value(b.node).dtype
        if not same:
            return other.node
    return None


def _shape(w: Weight) -> tuple[Any, Any]:
    a, b = value(w.tensor).shape[-2:]
    return (b, a) if w.transposed else (a, b)
