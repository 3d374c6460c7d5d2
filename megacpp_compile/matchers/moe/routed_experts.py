"""What the matchers of this folder return: a layer of routed experts, or experts over sorted rows, and the nodes that
compute it. A layer may end with a gate that multiplies the sum over experts, as where each token has one choice
(arXiv:2101.03961)."""

from __future__ import annotations

import dataclasses
import operator
from typing import TypeVar

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megacpp_compile._torch.ops import aten, torch_check
from megacpp_compile.fx.edit import of_tensors, place, same_shape, same_size, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.walks import near, reached
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.experts import Expert
from megacpp_compile.matchers.moe.gemms import strip_row_views
from megacpp_compile.matchers.numbers import is_number
from megacpp_compile.matchers.views import RESHAPES, is_cast, is_outer_view
from megacpp_compile.reader.links import only_user, onward, through

_ASSERTS = (
    aten._assert_scalar.default,
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
    torch_check,
)
_NEAR = 48  # nodes to look at around one
_NUMBERS = (int, bool, torch.SymInt, torch.SymBool)


@dataclasses.dataclass(frozen=True)
class RoutedExperts:
    """`output = base + sum over a token's choices of gate * expert(x)`.

    Attributes:
        output: the node that holds the sum.
        x: the tokens, [.., d].
        indices: the chosen experts' numbers: [.., k], or [T] for one choice; with `choices` of any shape over slots.
        gates: shaped as `indices`, or with `by_expert` a matrix [.., E] that holds each choice's gate in its column;
            None where all are 1.
        experts: one for every number from `first` on, or one whose weights hold them all.
        first: the number of the first expert.
        base: what the sum is added to; None for nothing.
        choices: how many choices a token has, where the shape of `indices` does not say so.
        by_expert: whether `gates` has a column for every expert rather than for every choice.
        column: the one column of `indices` [T, k] that counts; None for all.
        scaled_input: whether the gate multiplies what the expert reads: `base + sum of expert(gate * x)`.
        above: what of the gates counts: those above zero, or with False those that are not zero; None for all.
        identities: the numbers of experts that return what they read, which `experts` does not hold.
        scales: what the sum is multiplied by, each with the dimensions of `output` that it has.
        matrix: what [.., E] the gates are scattered to, which may be read elsewhere; None where they are not.
        transposed: whether such a matrix, and `gates` with `by_expert`, lies [E, T].
        inputs: what the layer reads; inside: the nodes between these and `output`. Filled in by `bounded`.
    """

    output: Node
    x: Node
    indices: Node
    gates: Node | None
    experts: tuple[Expert, ...]
    first: int = 0
    base: Node | None = None
    choices: int | None = None
    by_expert: bool = False
    column: int | None = None
    scaled_input: bool = False
    above: bool | None = None
    identities: range = range(0)
    scales: tuple[tuple[Node, tuple[int, ...]], ...] = ()
    matrix: Node | None = None
    transposed: bool = False
    inputs: tuple[Node, ...] = ()
    inside: frozenset[Node] = frozenset()

    @property
    def activation(self) -> str:
        return self.experts[0].activation

    @property
    def layout(self) -> str:
        return self.experts[0].layout

    @property
    def operands(self) -> list[Node]:
        others = [n for n in (self.gates, self.base, *(scale for scale, _ in self.scales)) if n is not None]
        return [self.x, self.indices, *_parameters(self.experts), *others]


@dataclasses.dataclass(frozen=True)
class SortedExperts:
    """`output = expert(x)` of rows [R, d] that lie in the order of experts, each row with its own.

    Attributes:
        ends: where each expert's rows end, [E] int32; rows behind the last end are no expert's.
        experts: one, whose weights hold those of all.
        counts: how many rows each expert has, by which biases are repeated; None where there are no biases.
        inputs, inside: as those of `RoutedExperts`.
    """

    output: Node
    x: Node
    ends: Node
    experts: tuple[Expert]
    counts: Node | None = None
    inputs: tuple[Node, ...] = ()
    inside: frozenset[Node] = frozenset()

    @property
    def operands(self) -> list[Node]:
        counts = [] if self.counts is None else [self.counts]
        return [self.x, self.ends, *_parameters(self.experts), *counts]


def _parameters(experts: tuple[Expert, ...]) -> list[Node]:
    return [part.tensor for expert in experts for part in expert.parameters]


_Layer = TypeVar("_Layer", RoutedExperts, SortedExperts)


def bounded(view: GraphView, found: _Layer) -> _Layer | MatchFailure:
    """`found` with its `inputs` and the nodes `inside`, tokens and gates read from a view or a cast that has to stay,
    gates from their matrix where that has to; the first of these that cannot go, as it is read elsewhere or runs under
    another mode."""
    layer = _bounded(view, found)
    if isinstance(layer, MatchFailure) and layer.tag == "escapes":
        kept = layer.node
        source = kept.args[0] if is_cast(kept) or kept.target in RESHAPES and is_outer_view(kept) else None
        for name in ("x", "gates") if is_cast(kept) else ("x",):
            if source is not None and getattr(found, name, None) is source:
                return bounded(view, dataclasses.replace(found, **{name: kept}))
    if isinstance(found, SortedExperts) or found.matrix is None or isinstance(layer, RoutedExperts):
        return layer
    again = _bounded(view, dataclasses.replace(found, gates=found.matrix, by_expert=True, matrix=None))
    return layer if isinstance(again, MatchFailure) else again


@or_failure
def _bounded(view: GraphView, found: _Layer) -> _Layer | MatchFailure:
    output = found.output
    inputs = list(dict.fromkeys(found.operands))
    inside = _between(inputs, output)
    for n in sorted(inside - {output}):
        outside = [u.name for u in n.users if u not in inside and not only_checks_sizes(u)]
        reason = f"an expert's intermediate value is used elsewhere too ({''.join(outside[:1])})"
        refuse_if(outside and not _can_be_kept(n), n, "escapes", reason)
        fake, modes = value(n), view.mode_states
        other = isinstance(fake, torch.Tensor) and fake.is_floating_point() and modes[n] != modes[output]
        refuse_if(other, n, "region", "part of it runs under another grad or autocast mode")
    placed = place(inputs, [output], output, view.mode_states)
    refuse_if(placed is None, output, "region", "a weight is computed under another grad or autocast mode")
    return dataclasses.replace(found, inputs=tuple(inputs), inside=frozenset(inside))


def _between(inputs: list[Node], output: Node) -> set[Node]:
    """All nodes by which `output` is computed from `inputs`, itself among them; not what makes the inputs."""
    def sources(n: Node) -> list[Node]:
        made = n.all_input_nodes if not is_filled(n, 0.0) else []  # zeros take their shape alone
        return [a for a in made if a not in inputs and a.op == "call_function"]

    return set(reached([output], sources)) if output not in inputs and output.op == "call_function" else set()


def _can_be_kept(node: Node) -> bool:
    """Whether `node` says which tokens go where and has a static size, or is a number that depends on no data, such as
    how many choices there are in every layer or the limit of their clamps: other readers may keep it at no great
    cost."""
    fake = value(node)
    if is_number(node):
        return True
    if isinstance(fake, _NUMBERS):
        return not free_unbacked_symbols(fake)
    return isinstance(fake, torch.Tensor) and _is_whole(node) and not free_unbacked_symbols(fake.shape)


def _is_whole(node: Node) -> bool:
    """Whether `node` holds whole numbers, in floating point perhaps, as a histogram does: no gradient passes it."""
    node = through(node, lambda n: value(n).is_floating_point() and n.target in (aten._to_copy.default, aten.to.dtype))
    return not value(node).is_floating_point() or node.target is aten.histc.default


def only_checks_sizes(node: Node) -> bool:
    """Whether `node` and all that reads it serve run-time checks of how many rows there are."""
    if node.target in _ASSERTS:
        return True
    counts = isinstance(value(node), _NUMBERS) or node.target is operator.getitem  # one of the tensors of `nonzero`
    return counts and all(only_checks_sizes(u) for u in node.users)


def around(node: Node) -> set[Node]:
    """The nodes from which `node` is computed in a few steps, and those computed from it in a few more."""
    def before(n: Node) -> list[Node]:
        return [a for a in n.all_input_nodes if a.op == "call_function"]

    def after(n: Node) -> list[Node]:
        return [u for u in n.users if u.op == "call_function"]

    return {*near(node, _NEAR, before)[:_NEAR], *near(node, _NEAR, after)[:_NEAR]}


def gate_after(layer: RoutedExperts) -> RoutedExperts:
    """`layer`, whose gates are 1, up to the product of its output with one gate for each token, if there is one."""
    indices = value(layer.indices)
    one = layer.choices == 1 or indices.dim() == 1
    if not one or layer.base is not None or layer.column is not None:
        return layer
    out = onward(layer.output, is_cast, _keeps_channels)[-1]
    user = only_user(out)
    gate = _gate(user, out) if user is not None and user.target is aten.mul.Tensor and of_tensors(user) else None
    if gate is None or not same_size(value(gate).numel(), indices.numel()):
        return layer
    return dataclasses.replace(layer, output=user, gates=gate, choices=1)


def _keeps_channels(node: Node) -> bool:
    return node.target in RESHAPES and same_size(value(node).shape[-1], value(node.args[0]).shape[-1])


def _gate(product: Node, out: Node) -> Node | None:
    """The gate [.., 1] of every token that `out` is multiplied by."""
    gate = product.args[1] if product.args[0] is out else product.args[0]
    shape, own = value(gate).shape, value(out).shape
    if gate is out or len(shape) != len(own) or not same_size(shape[-1], 1) or not same_shape(product, out):
        return None
    return strip_row_views(gate) if all(map(same_size, shape[:-1], own[:-1])) else None  # type: ignore[arg-type]
