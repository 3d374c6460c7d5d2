"""Attention's core in any spelling: torch's op, or products, a softmax, and what is done to scores between."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.arithmetic import FILLS, SOFTMAXES
from megacpp_compile.fx.edit import attribute_of, same_size, value
from megacpp_compile.fx.filled import fill_of
from megacpp_compile.fx.views import COPIES, DETACH, is_cast
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.reader.links import only_user, onward
from megacpp_compile.reader.products import BROADCAST, CONTRACTED, Factor, product_of

SDPA = aten.scaled_dot_product_attention.default
WHERES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor whose dimensions are `axes`: "b", "h", "t" (queries), "s" (rows), "c" (channels); None of size 1."""

    node: Node
    axes: tuple[str | None, ...]

    def size(self, axis: str) -> Any:
        """The size along `axis`, 1 where there is none."""
        return value(self.node).shape[self.axes.index(axis)] if axis in self.axes else 1


@dataclasses.dataclass(frozen=True)
class Mask:
    """What keeps a query from a row. kind: "added" to scores; "seen", where a row is seen; "hidden"."""

    node: Node
    kind: str


@dataclasses.dataclass(frozen=True)
class Core:
    """`result = softmax(scale * sum(q . k) + masks) v`.

    scores: pairs (queries, keys), whose products are added up. result: its node, with "c" for the values' channels.
    scores_axes: the axes of the scores that masks are broadcast to. causal: query i sees the rows up to i.
    """

    result: Operand
    scores: tuple[tuple[Operand, Operand], ...]
    values: Operand
    scale: float
    masks: tuple[Mask, ...]
    scores_axes: tuple[str, ...]
    causal: bool = False


def cores(graph: fx.Graph) -> Iterator[Core]:
    """Every attention of `graph` over heads, one for each way to tell batch from heads."""
    for node in graph.nodes:
        if node.target is SDPA:
            yield from _of_op(node)
        elif node.target in SOFTMAXES:
            yield from _of_softmax(node)


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of a call of torch's op by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    usual: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None,
                             "enable_gqa": False}  # fmt: skip
    return usual | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _of_op(node: Node) -> Iterator[Core]:
    given = arguments_of(node)
    q, k, v, mask, scale = (given[name] for name in ("query", "key", "value", "attn_mask", "scale"))
    if any(value(t).dim() != 4 for t in (q, k, v)) or isinstance(scale, Node) or given["dropout_p"] != 0.0:
        return
    if not all(same_size(value(t).shape[1], value(q).shape[1]) for t in (k, v)):
        return
    channels = value(q).shape[-1]
    if not isinstance(channels, int):
        return
    masks = () if mask is None else (Mask(mask, "seen" if value(mask).dtype == torch.bool else "added"),)  # type: ignore[arg-type]
    yield Core(
        Operand(node, tuple("bhtc")), ((Operand(q, tuple("bhtc")), Operand(k, tuple("bhsc"))),),  # type: ignore[arg-type]
        Operand(v, tuple("bhsc")), channels**-0.5 if scale is None else float(scale), masks, tuple("bhts"),  # type: ignore[arg-type]
        bool(given["is_causal"]),
    )  # fmt: skip


@dataclasses.dataclass
class _Scores:
    """What stands in front of a softmax."""

    products: list[tuple[Factor, ...]]
    scale: float
    masks: list[Mask]


def _of_softmax(softmax: Node) -> Iterator[Core]:
    rank = value(softmax).dim()
    rows = softmax.args[1] % rank  # type: ignore[operator]
    scores, result = _scores(softmax.args[0]), _result(softmax, rows)
    if scores is None or result is None:
        return
    node, weights, values = result
    # Batch and heads are the dimensions that the values have, too.
    shared = [d for d in range(rank) if d != rows and weights.dims[d] in values.dims]
    queries = [d for d in range(rank) if d != rows and d not in shared]
    if len(shared) != 2 or len(queries) > 1:
        return
    for batch, heads in (shared, shared[::-1]):
        names = {rows: "s", batch: "b", heads: "h", **dict.fromkeys(queries, "t")}
        out = {weights.dims[d]: name for d, name in names.items() if d != rows}
        pairs = [_pair(product, names) for product in scores.products]
        if any(pair is None for pair in pairs):
            continue
        result_axes = tuple(out.get(d, "c") for d in range(value(node).dim()))
        values_axes = tuple(
            "s" if d == CONTRACTED else None if d == BROADCAST else out.get(d, "c") for d in values.dims
        )
        if result_axes.count("c") != 1 or values_axes.count("c") != 1:
            continue
        yield Core(
            Operand(node, result_axes), tuple(pair for pair in pairs if pair is not None),
            Operand(values.node, values_axes), scores.scale, tuple(scores.masks),
            tuple(names[d] for d in range(rank)),
        )  # fmt: skip


def _pair(product: tuple[Factor, ...], names: dict[int, str]) -> tuple[Operand, Operand] | None:
    """(queries, keys) of a product of scores."""
    named = {**names, CONTRACTED: "c", BROADCAST: None}
    both = [Operand(factor.node, tuple(named[d] for d in factor.dims)) for factor in product]
    if "s" in both[0].axes:
        both.reverse()
    queries, keys = both
    if "s" in queries.axes or "s" not in keys.axes or "t" in keys.axes or not {"b", "h"} <= set(queries.axes):
        return None
    return queries, keys


def _scores(node: Any) -> _Scores | None:
    """Scores behind scalings, casts and masks, which are products of the same shape, or sums of such."""
    found, scale = _Scores([], 1.0, []), 1.0
    shape = value(node).shape
    while isinstance(node, Node) and node.op == "call_function":
        if node.target in COPIES or is_cast(node):
            node = node.args[0]
        elif (factor := _scaled_by(node)) is not None:
            node, scale = node.args[0], scale * factor
        elif node.target in FILLS and is_low(node.args[2]):
            found.masks.append(Mask(node.args[1], "hidden"))  # type: ignore[arg-type]
            node = node.args[0]
        elif node.target in WHERES and (chosen := _masked(node)) is not None:
            mask, node = chosen
            found.masks.append(mask)
        elif node.target is aten.add.Tensor and not node.kwargs:
            return _sum(node, found, scale)
        else:
            break
    product = product_of(node) if isinstance(node, Node) else None
    if product is None or not all(map(same_size, value(node).shape, shape)) or value(node).dim() != len(shape):
        return None
    found.products.append(product.factors)
    found.scale = scale
    return found


def _sum(node: Node, found: _Scores, scale: float) -> _Scores | None:
    """Scores and a mask that is added, or scores of two parts, scaled alike."""
    a, b = node.args[:2]
    left, right = (_scores(x) if isinstance(x, Node) and isinstance(value(x), torch.Tensor) else None for x in (a, b))
    whole = value(node).shape
    if left is not None and right is not None and left.scale == right.scale:
        products = left.products + right.products
        return _Scores(products, scale * left.scale, found.masks + left.masks + right.masks)
    for scores, of, mask in ((left, a, b), (right, b, a)):
        if scores is not None and isinstance(mask, Node) and all(map(same_size, value(of).shape, whole)):
            # A mask hides or adds nothing, so that a scaling behind it changes nothing.
            masks = [*found.masks, *scores.masks, Mask(mask, "added")]
            return _Scores(scores.products, scale * scores.scale, masks)
    return None


def _scaled_by(node: Node) -> float | None:
    """The number that `node` multiplies by."""
    if node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar) and len(node.args) == 2:
        number = None if node.kwargs else number_of(node.args[1])
        if number:
            return number if "mul" in str(node.target) else 1 / number
    return None


def _masked(node: Node) -> tuple[Mask, Node] | None:
    condition, a, b = node.args
    if is_low(b):
        return Mask(condition, "seen"), a  # type: ignore[arg-type,return-value]
    return (Mask(condition, "hidden"), b) if is_low(a) else None  # type: ignore[arg-type,return-value]


def is_low(x: Any) -> bool:
    """Whether `x` is the number that leaves a score without weight: -inf, or the lowest of a dtype."""
    number = constant(x)
    return number is not None and number <= -60000


def constant(x: Any) -> float | None:
    """The number that `x` is, or that fills it, perhaps a float of the model; None where it is something else."""
    while isinstance(x, Node):
        if (fill := fill_of(x)) is not None:
            x = fill
        elif x.target is aten.lift_fresh_copy.default:
            x = _literal(x.args[0])
        elif x.target in COPIES or x.target is DETACH or is_cast(x):
            x = x.args[0]
        else:
            return number_of(x)
    return float(x) if isinstance(x, bool | int | float) else None


def _literal(node: Any) -> float | None:
    """The number that a frame writes as a tensor."""
    if node.op != "get_attr":
        return None
    held = attribute_of(node.graph.owning_module, node.target)
    return held.item() if type(held) is torch.Tensor and held.numel() == 1 else None


@or_none
def _result(softmax: Node, rows: int) -> tuple[Node, Factor, Factor] | None:
    """(node, probabilities, values) of the product with the values, which alone reads the probabilities."""
    node = onward(softmax, COPIES, is_cast)[-1]
    user = only_user(node)
    product = NoMatch.unless(product_of(user) if user is not None else None)
    first, second = product.factors
    if first.node is not node:
        first, second = second, first
    NoMatch.when(first.node is not node or second.node is node or first.dims[rows] != CONTRACTED)
    return product.node, first, second
