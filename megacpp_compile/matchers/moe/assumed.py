"""Shows that what tracing assumed of loops over experts makes no difference: an expert without tokens adds nothing.

A region may be traced as if it ran although the model would skip it, if whatever is read behind it comes from the sum
of routed experts, and the model skips it only where the sum gets nothing from it: no token chose its expert.

The way that a branch takes for an expert without tokens may only give its parameters a gradient:

    if mask.any(): ...                                  out = expert(x[mask])
    else: y[0, 0] += 0 * sum(p.sum() for p in own)      y[mask] = out if len(out) else out + 0 * sum(...)

A product with 0 adds nothing, whatever the parameters are as long as they are finite; what is written back as it was
read, or written over in the same places, changes nothing either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import HigherOrderOperator, aten, set_grad_enabled
from megacpp_compile.fx import assumptions
from megacpp_compile.fx.assumptions import Region
from megacpp_compile.fx.edit import has_effects, same_shape, same_size, value
from megacpp_compile.fx.mode_states import ENTER, LEAVE
from megacpp_compile.fx.size_checks import same_value
from megacpp_compile.fx.views import CASTS
from megacpp_compile.fx.walks import ancestors
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe import find_layers, loop
from megacpp_compile.matchers.moe.iterations import RowUpdate, chains, row_updates
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, only_checks_sizes
from megacpp_compile.matchers.moe.routing import Mask
from megacpp_compile.matchers.moe.sorted_slots import before, expert_without, sorted_by
from megacpp_compile.matchers.moe.token_counts import (
    match_empty,
    match_hits,
    none_counted,
    number_chosen_from,
    number_listed,
)
from megacpp_compile.matchers.views import RESHAPES
from megacpp_compile.reader.links import through

_SUMS = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default)
_READ_BY: dict[Any, Any] = {  # what writes a part back -> what reads it
    aten.select_scatter.default: aten.select.int, aten.slice_scatter.default: aten.slice.Tensor,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Zeros:
    """Parameters that a way gives a gradient of zeros."""

    way: Region
    parameters: frozenset[Node]


def without_zero_grad_branches(view: GraphView, regions: Sequence[Region]) -> tuple[list[Region], list[Zeros]]:
    """(`regions` without what adds nothing, which is erased; what it gives zeros as a gradient)."""
    zeros = list[Zeros]()
    for region in regions:
        given = set[Node]()
        for node in sorted(region.nodes):
            kept = _kept(node)
            if kept is None or kept[0] is node:
                continue
            source, added = kept
            if added is not None and node.users and view.mode_states[node].grad:
                given |= _read_by(added) & view.trained
            node.replace_all_uses_with(source)
        if given:
            zeros.append(Zeros(region, frozenset(given)))
    asked = {n for region in regions if isinstance(region.condition, Node) for n in _read_by(region.condition)}
    for node in sorted({n for region in regions for n in region.nodes} - asked, reverse=True):
        if not node.users and node.op == "call_function" and not has_effects(node):
            view.graph.erase_node(node)
    left = set(view.graph.nodes)
    return [dataclasses.replace(region, nodes=region.nodes & left) for region in regions], zeros


def _kept(node: Node) -> tuple[Node, Node | None] | None:
    """(what `node` is the same as, what it adds to that, which is zero); None where it is something of its own."""
    target, args = node.target, node.args
    if target is aten.add.Tensor and not node.kwargs:
        for source, added in (args, args[::-1]):
            if isinstance(source, Node) and isinstance(added, Node) and _is_zero(added) and _alike(source, node):
                return source, added
    if target in _READ_BY and _alike(args[0], node):  # type: ignore[arg-type]
        part: Any = args[1]
        read = part.target is _READ_BY[target] and same_value(part.args[0], args[0]) and part.args[1:] == args[2:]
        return (args[0], None) if read else None  # type: ignore[return-value]
    if target is aten.index_put.default and not any(args[3:]):
        before: Any = args[0]
        if before.target is target and not any(before.args[3:]) and same_value(before.args[1], args[1]):
            node.update_arg(0, before.args[0])
    return None


def _is_zero(node: Node) -> bool:
    """Whether `node` is zero wherever what it is computed from is finite."""
    node = through(node, _SUMS, CASTS, RESHAPES)
    if node.target in (aten.mul.Tensor, aten.mul.Scalar):
        return any(not isinstance(factor, Node) and factor == 0 for factor in node.args)
    return node.target is aten.add.Tensor and all(isinstance(n, Node) and _is_zero(n) for n in node.args)


def _alike(source: Node, node: Node) -> bool:
    return value(source).dtype == value(node).dtype and same_shape(source, node)


def _read_by(node: Node) -> set[Node]:
    """All that `node` is computed from."""
    return set(ancestors([node]))


_TAG = "loop-over-data"
_NO_GRADIENT = (
    "an expert that the loop skips has no gradient, and one of zeros in a graph, which optimizers with momentum or "
    'weight decay tell apart; options={"expert_loops": True} takes that, and so do weights of all experts in one tensor'
)
_ONLY = "the loop runs for some experts alone"
_NO_SUM = (
    f"{_ONLY}, and no sum over each token's choices is seen that their outputs go to: the sort, the counts and the "
    "gates of choices that come from `topk` have to be in one graph with the loop"
)


@or_failure
def show(view: GraphView, regions: Sequence[Region]) -> frozenset[Node] | MatchFailure:
    """The ends of sums of which nothing but these has to be computed from `regions`, and from all of them alike; or the
    first thing that is in the way."""
    regions, zeros = without_zero_grad_branches(view, regions)
    found = [one for one in find_layers(view)[0] if isinstance(one, RoutedExperts)]
    summed, of = dict[Node, RowUpdate](), dict[Node, RoutedExperts]()
    for chain in chains(row_updates(view)):
        layer = next((one for one in found if chain[-1].node in one.inside), None)
        if layer is not None:
            summed |= {update.node: update for update in chain}
            of |= dict.fromkeys((update.node for update in chain), layer)
    for layer in found:
        written = {update.node: update for update in loop.writes(layer)}
        summed, of = written | summed, dict.fromkeys(written, layer) | of
    needed = set[Node]()
    for region in regions:
        _refuse_moves(region, summed)
        places = {after for _, after in region.carried}
        skipped, switches = _skipped_for(region), _passing_switches(view, region)
        for node in sorted(region.nodes - switches):
            _refuse_effect(node)
            outside = [u for u in node.users if u not in region.nodes and not only_checks_sizes(u)]
            if not outside or node in places or _same_anyway(node, region):
                continue
            without_rows = node in region.rowless or node in region.alike and _goes_with(node, region, summed, skipped)
            if without_rows and (layer := _layer_of(region, found)) is not None:
                needed.add(layer.output)
                continue
            update = _sum_of(node, summed)
            if update is None:
                refuse(node, _TAG, f"{_ONLY}, and more than their sum is used later")
            needed.add(of[update.node].output)
        some = not _listed_whole(region, regions)
        refuse_if(some, region.condition, _TAG, f"{_ONLY}, and these are not all that tokens choose from")
        for node in region.nodes & summed.keys():
            token, base = summed[node].token, summed[node].previous
            other = base in region.nodes and base not in summed
            refuse_if(other, base, _TAG, f"{_ONLY}, and more than their sum is used later")
            unseen = not _has_none(token, region, skipped)
            refuse_if(unseen, node, _TAG, f"{_ONLY}, and it is not seen that the others have no tokens")
    skipping = (layer for layer in found if layer.output in needed and _skips_weights(view, layer, regions, zeros))
    own = min((layer.output for layer in skipping), default=None)
    if own is not None and view.config.expert_loops is not True:
        refuse(own, _TAG, _NO_GRADIENT)
    return frozenset(needed)


def _has_none(token: Mask, region: Region, skipped: Mask | None) -> bool:
    """Whether there are no rows of `token` wherever the model skips `region`, and there are none of `skipped`."""
    return skipped is not None and _covers(skipped, token) or _skips_part(region, token)


def _goes_with(node: Node, region: Region, summed: dict[Node, RowUpdate], skipped: Mask | None) -> bool:
    """Whether `node` has as many rows as are added to a sum that gets none wherever the model skips `region`."""
    rows = value(node).shape[0]
    updates = (u for u in summed.values() if isinstance(u.added, Node) and same_size(value(u.added).shape[0], rows))
    return any(_has_none(update.token, region, skipped) for update in updates)


def _layer_of(region: Region, found: Sequence[RoutedExperts]) -> RoutedExperts | None:
    """The layer one of whose experts `region` computes."""
    return next((layer for layer in found if any(expert.node in region.nodes for expert in layer.experts)), None)


def _refuse_moves(region: Region, summed: dict[Node, RowUpdate]) -> None:
    """Raise Refused where a place among slots that `region` leaves behind may be another where the model skips it."""
    tokens = [summed[node].token for node in region.nodes & summed.keys()]
    for old, new in region.carried:
        at = new if isinstance(new, Node) else region.condition
        reason = f"{_ONLY}, and a number that it changes is used later" if tokens else _NO_SUM
        refuse_if(not any(_moves_by(token, old, new) for token in tokens), at, _TAG, reason)


def _moves_by(token: Mask, old: Any, new: Any) -> bool:
    """Whether as many slots lie from the place `old` to `new` as `token`, in the order of experts, has."""
    ids = None if token.order is None else sorted_by(token.order)
    return ids is not None and before(ids, old) == token.expert and before(ids, new) == (token.expert or 0) + 1


def _same_anyway(node: Node, region: Region) -> bool:
    """Whether `node` is a number read outside of `region`, too: tracing reads each only once."""
    return not isinstance(value(node), torch.Tensor) and region.nodes.isdisjoint(node.all_input_nodes)


def _skips_weights(
    view: GraphView, layer: RoutedExperts, regions: Sequence[Region], zeros: Sequence[Zeros]
) -> bool:
    """Whether a weight of an expert is a parameter of its own, which has no gradient where the expert is skipped."""
    if len(layer.experts) < 2 or not view.trained or not view.mode_states[layer.output].grad:
        return False
    for expert in layer.experts:
        ways = [region for region in regions if expert.node in region.nodes]
        given = {p for other in zeros if any(_is_other_way(way, other.way) for way in ways) for p in other.parameters}
        own = [w.tensor for w in expert.parameters if w.index is None and not w.every and view.needs_grad(w.tensor)]
        if ways and not given.issuperset(own):
            return True
    return False


def _is_other_way(way: Region, other: Region) -> bool:
    """Whether one of both runs wherever the other does not."""
    return way.number is other.number is None and way.condition is other.condition and way.taken != other.taken


def _skipped_for(region: Region) -> Mask | None:
    """The choices of which there are none wherever the model skips `region`."""
    if region.number is None:
        return match_empty(region.condition, not region.taken)
    mask = match_hits(region.condition)
    return dataclasses.replace(mask, expert=region.number) if mask is not None else None


def _skips_part(region: Region, token: Mask) -> bool:
    """Whether `token`, in the order of experts, has no slots wherever the model skips `region`."""
    ids = None if token.order is None else sorted_by(token.order)
    if ids is None or region.number is None:
        nones = none_counted(region.condition, not region.taken)
        return ids is not None and any(expert_without(ids, none) == token.expert for none in nones)
    short: Any = region.condition  # counts that end with the last expert chosen
    is_short = short.target is assumptions.filled_counts and region.number == token.expert
    return is_short and ids.counted_by(short, short.args[1])


def _listed_whole(region: Region, regions: Sequence[Region]) -> bool:
    """Whether every expert that tokens can choose has its iteration, where `region` is one over a list."""
    listed = region.condition
    if isinstance(listed, Node) and listed.target is assumptions.filled_counts:
        count = number_chosen_from(listed.args[0])
        return count is not None and count <= int(listed.args[1])  # type: ignore[arg-type]
    count = None if region.number is None else number_listed(listed)
    return count is None or {r.number for r in regions if r.condition is region.condition} >= set(range(count))


def _covers(skipped: Mask, read: Mask) -> bool:
    """Whether `read` holds nowhere if `skipped` does not."""
    alike = _plain(skipped.indices) is _plain(read.indices) and skipped.expert == read.expert
    alike = alike and skipped.above in (None, read.above)
    return alike and (skipped.choice is None or skipped.choice == read.choice and not read.any)


def _plain(indices: Node) -> Node:
    return through(indices, RESHAPES, torch.ops.aten.clone.default, torch.ops.aten.alias.default)


def _passing_switches(view: GraphView, region: Region) -> frozenset[Node]:
    """The switches of modes in `region`, where behind it modes are as they were before."""
    switches = frozenset(n for n in region.nodes if n.target in (set_grad_enabled, ENTER, LEAVE))
    if not switches:
        return switches
    left = {n.args[0] for n in switches if n.target is LEAVE}
    paired = left == {n for n in switches if n.target is ENTER}
    before, behind = view.mode_states[min(region.nodes)], view.mode_states[max(region.nodes).next]
    return switches if paired and before == behind else frozenset()


def _refuse_effect(node: Node) -> None:
    """Raise Refused where `node` cannot be left out even if nobody reads it."""
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    refuse_if(draws, node, _TAG, f"{_ONLY}, and draws random numbers")
    more = isinstance(node.target, HigherOrderOperator) or node.is_impure() and not only_checks_sizes(node)
    refuse_if(more, node, _TAG, f"{_ONLY}, and does more than to add to their sum")


def _sum_of(node: Node, summed: dict[Node, RowUpdate]) -> RowUpdate | None:
    """The update of a sum that `node` is, or is another view of."""
    current: Any = through(node, lambda n: n not in summed and n.target in RESHAPES)
    return summed.get(current)
