"""What `megacpp::attention` is told of an attention: distances, documents, and what stays a tensor."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import uncast
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.softmax_attention.conditions import Distance, Hidden, conditions_of, narrowest
from megacpp_compile.matchers.softmax_attention.parts import Attention, Term
from megacpp_compile.matchers.softmax_attention.prefixes import Prefix
from megacpp_compile.matchers.ssd.atoms import length
from megacpp_compile.reader.products import product_of

MAX_CHANNELS = 256
INF = float("-inf")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the op is told, and what it computes in. added: (term, factor) of each bias; documents: the conditions that
    tell them apart, one or two; prefix: of keys that are seen whatever `right` says."""

    left: Distance | None
    right: Distance | None
    documents: tuple[Hidden, ...]
    hidden: tuple[Hidden, ...]
    added: tuple[tuple[Term, float], ...]
    fill: float
    dtype: torch.dtype
    prefix: Prefix | None = None


def plan_of(found: Attention) -> Plan | MatchFailure:
    softcap = found.scores.softcap
    if softcap is not None and softcap <= 0:
        return MatchFailure(found.softmax, "scores", "scores are capped by a number that is not positive")
    widths = sum(_static(length([*c])) for c in found.channels), _static(length([*found.value_channels]))
    if max(widths) > MAX_CHANNELS or min(widths) < 1:
        reason = f"heads of {widths[0]} and {widths[1]} channels: kernels hold {MAX_CHANNELS}"
        return MatchFailure(found.softmax, "width", reason)
    dtype = _dtype(found)
    if isinstance(dtype, MatchFailure):
        return dtype
    for sizes in (found.heads, found.groups):
        if not isinstance(length([*sizes]), int):
            return MatchFailure(found.softmax, "shape", "the number of heads is symbolic")
    hidden, added = list[Hidden](), list[tuple[Term, float]]()
    for term in found.scores.terms:
        parts = conditions_of(found, term)
        if parts is None:
            added.append((term, term.factor))
        else:
            hidden += parts
    near = [h for h in hidden if h.by_distance]
    if len([h for h in near if h.right is not None]) > 1:  # which a prefix is beside one of
        near = [h for h in near if h.prefix is None]
    ids = [h for h in hidden if h.documents is not None][:2]
    data = [h for h in hidden if h not in near and h not in ids]
    if data or added or not _each_sees_one(found, near, ids):
        # As data where a row may be left without a key: what eager makes of it depends on the number that is written.
        kept = [h for h in (*near, *ids) if h.fill == INF] if data or added else []
        if not _each_sees_one(found, [h for h in kept if h.by_distance], [h for h in kept if not h.by_distance]):
            kept = []
        data += [h for h in (*near, *ids) if h not in kept]
        near, ids = ([h for h in of if h in kept] for of in (near, ids))
    left, right, more = narrowest(near)
    data += more
    prefix = next((h.prefix for h in near if h.prefix is not None), None)
    added += [(h.term, h.term.factor) for h in dict.fromkeys(data) if h.kind == "bias"]
    added = list(dict.fromkeys(added))
    data = [h for h in dict.fromkeys(data) if h.kind != "bias"]
    fills = {h.fill for h in data}
    if len(fills) > 1 or data and added and INF not in fills and _hides_first(found):
        return MatchFailure(data[0].node, "masks", "masks write several numbers, or one before a bias is added")
    return Plan(left, right, tuple(ids), tuple(data), tuple(added), next(iter(fills), INF), dtype, prefix)


def _static(size: Any) -> int:
    return size if isinstance(size, int) else 0


def _hides_first(found: Attention) -> bool:
    """Whether something is added to scores that are masked."""
    kinds = [t.kind for t in found.scores.terms]
    return "bias" in kinds and any(k != "bias" for k in kinds[: len(kinds) - kinds[::-1].index("bias") - 1])


def _dtype(found: Attention) -> torch.dtype | MatchFailure:
    """What the op computes in: the dtype of the product with values."""
    result: torch.dtype = value(found.result).dtype
    if result not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return MatchFailure(found.result, "dtype", f"a result in {result}")
    products = [n for n in found.inside if product_of(n) is not None or n.target is aten.baddbmm.default]
    rounded = all(torch.promote_types(value(n).dtype, result) == result for n in products)
    for q, k, _ in found.scores.products:
        for operand in (q, k):
            given = value(uncast(operand.node)).dtype
            if not given.is_floating_point:
                return MatchFailure(operand.node, "dtype", f"queries or keys in {given}")
            # Under autocast the products round them.
            if not rounded and torch.promote_types(given, result) != result:
                return MatchFailure(operand.node, "precision", f"queries or keys in {given}, a result in {result}")
    return result


def _each_sees_one(found: Attention, near: list[Hidden], documents: list[Hidden]) -> bool:
    """Whether each query is known to see a key by these distances, with documents itself."""
    left, right, more = narrowest(near)
    if more or not found.keys:
        return not near
    if documents:
        return all(side is None or statically_known_true(side.size >= 0) for side in (left, right))
    queries, keys = length([*found.queries]), length([*found.keys])
    asked = [] if right is None else [right.size >= 0]
    asked += [] if left is None else [queries - left.size <= keys]
    asked += [] if left is None or right is None else [left.size + right.size >= 0]
    return all(map(statically_known_true, asked))
