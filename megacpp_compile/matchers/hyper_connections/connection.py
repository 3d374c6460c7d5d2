"""What stands before a block with hyper-connections, from the sum over streams that is the block's input: its weights,
the norm and the linear they come from, and whatever else is made of that linear."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import ALL_PERMUTATIONS, COPIES, FOLDS, RESHAPES, is_cast
from megacpp_compile.fx.walks import reached
from megacpp_compile.matchers._match import MatchFailure, or_failure, or_refuse, refuse, refuse_if
from megacpp_compile.matchers.hyper_connections.affine import Affine
from megacpp_compile.matchers.hyper_connections.maps import Gate, Mixing, bare, match_gate, match_mixing
from megacpp_compile.matchers.hyper_connections.streams import StreamSum, rounded
from megacpp_compile.matchers.linear import match_linear
from megacpp_compile.matchers.rms_norm import match_rms_norm
from megacpp_compile.reader.links import above, through, widens

_FLAT = RESHAPES | FOLDS | COPIES


@dataclasses.dataclass(frozen=True)
class Norm:
    """The norm of the joined streams. gains: of its result, whose numbers multiply the linear's weight."""

    eps: float
    gains: tuple[Node, ...]
    scale: float


@dataclasses.dataclass(frozen=True)
class Connection:
    """`block = sum_i pre_i * streams_i`, and what else comes from the same streams. internal: the nodes of both."""

    block: Node
    streams: Node
    norm: Norm
    pre: Gate
    post: Gate | None
    mixing: Mixing | None
    internal: frozenset[Node]

    @property
    def parts(self) -> list[Gate | Mixing]:
        return [p for p in (self.pre, self.post, self.mixing) if p is not None]


@or_failure
@or_none
def match_connection(total: StreamSum) -> Connection | MatchFailure | None:
    """The connection whose block reads `total`; None for a sum with other weights."""
    tokens = value(total.weights).dim() - 1
    NoMatch.when(total.order != tuple(range(tokens + 1)))
    pre = NoMatch.unless(match_gate(total.weights, tokens))
    NoMatch.when(pre.affine.size != value(total.weights).shape[-1])
    norm = NoMatch.unless(or_refuse(_norm(pre.affine, total.streams)))
    exits, inside = _exits(pre.affine, total)
    found = _sorted_out(exits, inside, pre, total)
    block, behind = rounded(total.node)
    internal = {*total.internal, *inside, *behind}
    return Connection(block, total.streams, norm, pre, *found, frozenset(internal))


def _source(node: Node) -> Node:
    """What `node` is of by reshapes, copies and casts to no fewer bits."""
    return through(node, widens, _FLAT)


@or_failure
@or_none
def _norm(affine: Affine, streams: Node) -> Norm | MatchFailure | None:
    """The norm in front of a linear of the joined streams, or behind it."""
    n, d = value(streams).shape[-2:]
    linear = affine.linear
    joined = isinstance(d, int) and same_size(value(linear.x).shape[-1], n * d)
    if affine.rms is not None:
        x, eps = affine.rms
        NoMatch.when(not joined or _source(x) is not _source(streams) or _source(linear.x) is not _source(streams))
        _refuse_other_streams(x, streams, linear.node)
        return Norm(float(eps), (), 1.0)
    around = bare(linear.x)
    norm = match_rms_norm(around) if isinstance(around, Node) else None
    if isinstance(norm, MatchFailure):
        return norm if joined and _source_of(norm.node, streams) else None
    if norm is None:
        refuse_if(
            joined and _source(linear.x) is _source(streams),
            linear.node, "no-norm", "the joined streams are not normed",
        )
        return None
    NoMatch.when(_source(norm.x) is not _source(streams))
    _refuse_other_streams(norm.x, streams, norm.node)
    return Norm(float(norm.eps), tuple(norm.gains), norm.scale)


def _source_of(node: Node, streams: Node) -> bool:
    """Whether `node`, part of what is no norm, is a few steps from the streams."""
    for _ in range(8):
        if _source(node) is _source(streams):
            return True
        if node.op != "call_function" or not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return False


def _refuse_other_streams(x: Node, streams: Node, at: Node) -> None:
    """Raise Refused where a norm of `x` is none of the joined streams."""
    n, d = value(streams).shape[-2:]
    joined = value(x).dim() in (2, value(streams).dim() - 1)  # tokens are joined, too, or as they are
    alike = same_size(value(x).shape[-1], n * d) and joined
    refuse_if(not alike, at, "norm-axes", "the norm is not over all streams of a token")


def _exits(affine: Affine, total: StreamSum) -> tuple[list[Node], set[Node]]:
    """(what is made of the linears of the normed streams and read elsewhere; all nodes between)."""
    x = _source(total.streams)
    linears = {affine.linear.node, *_siblings(affine.linear.x)}
    region = set(linears)
    dependent = _dependents(linears, value(affine.linear.node).shape[:-1])
    known = dependent | linears
    streams = _dependents({x}, ()) | {x}
    for node in sorted(dependent):
        if node.target in ALL_PERMUTATIONS:  # what is made of the logits is read transposed, not made so
            continue
        others = [a for a in node.all_input_nodes if a not in region]
        if not any(a in known or a in streams and not _is_statistic(a) for a in others):
            region.add(node)
    region.update(above(total.weights, bare(total.weights)))  # from weights of joined tokens
    return [n for n in sorted(region) if any(u not in region and u not in total.internal for u in n.users)], region


def _siblings(x: Node) -> Iterable[Node]:
    for user in x.users:
        linear = match_linear(user)
        if linear is not None and linear.x is x:
            yield user


def _is_statistic(node: Node) -> bool:
    """Whether `node` is one number for each token."""
    held = value(node)
    return isinstance(held, torch.Tensor) and held.dim() > 0 and same_size(held.shape[-1], 1)


def _dependents(start: Iterable[Node], lead: Any) -> set[Node]:
    """What is computed from `start` and has `lead` as its first dimensions, or is several such tensors."""
    def own(node: Node) -> list[Node]:
        return [user for user in node.users if user.op == "call_function" and _leads(user, lead)]

    return set(reached([user for node in start for user in own(node)], own))


def _leads(node: Node, lead: Any) -> bool:
    held = value(node)
    held = held[0] if isinstance(held, (tuple, list)) and held else held
    if not isinstance(held, torch.Tensor):
        return False
    return held.dim() >= len(lead) and all(map(same_size, held.shape[: len(lead)], lead))


def _sorted_out(
    exits: list[Node], region: set[Node], pre: Gate, total: StreamSum
) -> tuple[Gate | None, Mixing | None]:
    """The weights behind the block and the mixing matrix: what is read of the logits, or what that is made of."""
    found: dict[Node, Gate | Mixing] = {}
    maps: dict[Node, Gate | Mixing | None] = {}
    for node in reached(exits, lambda n: filter(region.__contains__, n.all_input_nodes) if maps[n] is None else []):
        maps[node] = one = _map(node, pre, total)
        if one is not None:
            found[one.node] = one
        elif node is pre.node or match_linear(node) is not None:
            refuse(max(exits), "map", "what is made of the logits is no sigmoid and no matrix")
    post = [one for one in found.values() if isinstance(one, Gate)]
    mixing = [one for one in found.values() if isinstance(one, Mixing)]
    if len(post) > 1 or len(mixing) > 1 or any(bare(one.node) is bare(pre.node) for one in post):
        refuse(max(found), "escapes", "more of what is made of the logits is read than the op gives")
    return next(iter(post), None), next(iter(mixing), None)


@or_none
def _map(node: Node, pre: Gate, total: StreamSum) -> Gate | Mixing | None:
    """The weights or the matrix that `node` is a view or a cast of."""
    n, tokens = pre.affine.size, value(pre.affine.linear.node).dim() - 1
    inner = NoMatch.unless(_inner(node, tokens, n))
    square = value(inner).dim() == tokens + 2
    found = match_mixing(inner, tokens) if square else match_gate(inner, tokens)
    if found is None or found.affine.size != (n * n if square else n):
        return None
    return found if _one_norm(found.affine, pre.affine, total.streams) else None


def _inner(node: Node, tokens: int, n: int) -> Node | None:
    """What an exit is a view or a cast of: [tokens..., n] or [tokens..., n, n]."""
    at: Any = node
    for _ in range(8):
        shape = value(at).shape if isinstance(value(at), torch.Tensor) else ()
        if len(shape) in (tokens + 1, tokens + 2) and all(same_size(m, n) for m in shape[tokens:]):
            below = at.args[0] if at.op == "call_function" and at.args else None
            if not (is_cast(at) or at.target in COPIES) or not isinstance(below, Node):
                return at  # type: ignore[no-any-return]
            at = below
        elif bare(at) is at:
            return None
        else:
            at = at.args[0]
    return None


def _one_norm(other: Affine, own: Affine, streams: Node) -> bool:
    """Whether two linears, of one and the same operand, have the same norm behind it, or none."""
    if other.rms is None or own.rms is None:
        return other.rms is own.rms
    return bool(other.rms[1] == own.rms[1]) and _source(other.rms[0]) is _source(streams)
