"""A causal convolution of packed documents, written as a sum of taps: each is x some steps earlier, where that step is
of the same document, times a column of the weight.

    y[t] = sum over lags of w[:, k - 1 - lag] * x[t - lag] * (seq_idx[t - lag] == seq_idx[t]),  + bias

Factors stand in any order, masks as a product, `where` or `masked_fill`, time in any of the last two dimensions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.arithmetic import NEGATIONS
from megacpp_compile.fx.edit import same_shape, same_size, value
from megacpp_compile.fx.filled import is_filled, padded_in_front
from megacpp_compile.fx.views import CASTS, IDENTITIES, SQUEEZES, UNSQUEEZE
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse, refuse_narrower
from megacpp_compile.matchers.causal_conv import CausalConv, silu_of
from megacpp_compile.matchers.documents import is_constant
from megacpp_compile.reader.links import chain, through
from megacpp_compile.reader.parts import column_of, part_of

# What nothing shows of positions is that they count from 0 in each document.
POSITIONS = "taps are masked by positions, which may be any: compare numbers of documents, `(position == 0).cumsum(-1)`"
_LIMITS = {aten.ge.Scalar, aten.gt.Scalar, aten.le.Scalar, aten.lt.Scalar}


@dataclasses.dataclass(frozen=True)
class _Term:
    """One summand: x delayed by `lag` along dimension `time`, perhaps masked by documents, times a weight's column."""

    x: Node
    time: int
    lag: int
    weight: Node
    column: int
    seq_idx: Node | None


@or_failure
def match_masked_taps(root: Node) -> CausalConv | MatchFailure | None:
    """The convolution that the sum `root` is; None where no term of it is masked by documents or positions."""
    summands, internal = _flatten(root, aten.add.Tensor)
    factors = [_factors(s)[0] for s in summands] if len(summands) > 1 else []
    if not any(_is_same(f) is not None for product in factors for f in product):
        by_positions = any(any(map(_is_position, p)) and any(_column(f) is not None for f in p) for p in factors)
        return MatchFailure(root, "documents", POSITIONS) if by_positions else None
    bias, terms = None, list[_Term]()
    for node in summands:
        factors, inside, cleared = _factors(node)
        term = _term(factors, cleared)
        if term is not None:
            terms.append(term)
            internal |= inside
        elif bias is None and _is_channels(node, value(root)):
            bias = node
        else:
            return MatchFailure(node, "documents", "a summand is no tap of x, masked by its document, times a weight")
    wrong = _disagreement(terms, bias, root)
    if wrong is not None:
        refuse(root, "documents", wrong)
    end, activation = root, ""
    silu = next((s for user in root.users for s in silu_of(root, user)), None)
    if silu is not None:
        end, activation = silu[0], "silu"
        internal |= silu[1]
    first = terms[0]
    for outside in (u for n in internal - {end} for u in n.users if u not in internal):
        refuse(root, "escapes", f"a part of the sum of taps is read elsewhere, too: {outside.name}")
    refuse_narrower(internal, (first.x, end), "operand and result")
    bias = None if bias is None else _unit_free(bias)
    seq_idx = next(t.seq_idx for t in terms if t.seq_idx is not None)
    time = first.time
    return CausalConv(root, first.x, time, first.weight, bias, activation, end, time, internal, seq_idx)


def _disagreement(terms: list[_Term], bias: Node | None, root: Node) -> str | None:
    """Why these taps are not one convolution, or None."""
    first = terms[0]
    taps = value(first.weight).shape[-1]
    if any((t.x, t.time, t.weight) != (first.x, first.time, first.weight) for t in terms):
        return "the taps are of several tensors or weights"
    if sorted(t.lag for t in terms) != list(range(len(terms))) or taps != len(terms):
        return f"{len(terms)} taps at lags {sorted(t.lag for t in terms)} for a weight of {taps}"
    if any(t.column != taps - 1 - t.lag for t in terms):
        return "the weight's columns are not in the order of the taps"
    numbers = {t.seq_idx for t in terms if t.lag}
    if len(numbers) != 1 or None in numbers or any(t.seq_idx not in (None, *numbers) for t in terms):
        return "not all taps are masked by the same documents"
    channels = value(first.x).shape[3 - first.time]
    if not same_size(value(first.weight).shape[0], channels) or not same_shape(root, first.x):
        return "the weight is not one column of taps for each channel"
    return "the bias does not lie along the channels" if bias is not None and first.time == 2 else None


def _flatten(root: Node, op: Any) -> tuple[list[Node], set[Node]]:
    """(what the tree of `op`s at `root` combines, the tree's nodes); a 0 that a sum begins with is nothing."""
    leaves, tree, pending = [], set[Node](), [root]
    while pending:
        node = pending.pop()
        if node.target is op and not node.kwargs and (node is root or len(node.users) == 1):
            tree.add(node)
            pending += [a for a in node.args if isinstance(a, Node)]
            if any(not isinstance(a, Node) and a != 0 for a in node.args):
                leaves.append(node)
        else:
            leaves.append(node)
    return leaves, tree


def _factors(node: Node) -> tuple[list[Node], set[Node], set[Node]]:
    """(the factors of a product, with masks as factors; the nodes that multiply them; masks of what becomes 0)."""
    factors, inside, cleared, pending = [], set[Node](), set[Node](), [node]
    while pending:
        n = pending.pop()
        arguments: Any = n.args
        if n.target is aten.mul.Tensor and all(isinstance(a, Node) for a in arguments):
            pending += arguments
        elif n.target in (aten.where.self, aten.where.ScalarOther) and _is_zero(arguments[2]):
            pending += arguments[:2]
        elif n.target is aten.masked_fill.Scalar and arguments[2] == 0:
            pending += arguments[:2]
            cleared.add(arguments[1])
        else:
            factors.append(n)
            continue
        inside.add(n)
    return factors, inside, cleared


def _is_zero(node: Any) -> bool:
    return is_filled(node, 0.0) if isinstance(node, Node) else isinstance(node, (int, float)) and node == 0


def _term(factors: list[Node], cleared: set[Node]) -> _Term | None:
    masks = {f: same for f in factors if (same := _is_same(f)) is not None}
    columns = {f: found for f in factors if (found := _column(f)) is not None}
    taps = [f for f in factors if f not in masks and f not in columns]
    if len(taps) != 1 or len(columns) != 1 or len(masks) > 1 or value(taps[0]).dim() != 3:
        return None
    for time in (1, 2):
        x, lag = _delayed(taps[0], time, zeros=True)
        fits = all(
            same.lag == lag and same.differs == (mask in cleared) and _one_wide(mask, 3 - time)
            for mask, same in masks.items()
        )
        if fits and (masks or not lag) and all(_one_wide(column, 0, time) for column in columns):
            return _Term(x, time, lag, *columns.popitem()[1], next((m.seq_idx for m in masks.values()), None))
    return None


def _one_wide(node: Node, *dims: int) -> bool:
    """Whether `node`, beside x [b, t, c] or [b, c, t], is 1 wide in `dims`."""
    shape = value(node).shape
    shape = [1] * (3 - len(shape)) + list(shape)
    return len(shape) == 3 and all(isinstance(shape[d], int) and shape[d] == 1 for d in dims)


@dataclasses.dataclass(frozen=True)
class _Same:
    """Whether a step and the one `lag` before are of one document, or, with `differs`, of two."""

    seq_idx: Node
    lag: int
    differs: bool


@or_none
def _is_same(node: Any) -> _Same | None:
    *steps, node = chain(node, IDENTITIES, CASTS, SQUEEZES, NEGATIONS, UNSQUEEZE)
    NoMatch.when(not isinstance(node, Node) or node.target not in (aten.eq.Tensor, aten.ne.Tensor))
    differs = (node.target is aten.ne.Tensor) != (sum(n.target in NEGATIONS for n in steps) % 2 == 1)
    a, b = node.args
    NoMatch.when(not all(isinstance(n, Node) and _is_numbers(n) for n in (a, b)))
    for earlier, now in ((a, b), (b, a)):
        x, lag = _delayed(earlier, 1, zeros=False)  # type: ignore[arg-type]
        if x is now:
            return _Same(x, lag, differs)
    return None


def _is_position(node: Any) -> bool:
    """Whether a mask says how far into its document each step is, by an input."""
    node = through(node, IDENTITIES, CASTS, SQUEEZES, UNSQUEEZE, NEGATIONS)
    asked = isinstance(node, Node) and node.target in _LIMITS and _is_numbers(node.args[0])
    return asked and not is_constant(node)


def _is_numbers(node: Any) -> bool:
    fake = value(node)
    return not fake.is_floating_point() and not fake.is_complex() and fake.dtype != torch.bool and fake.dim() == 2


def _delayed(node: Node, time: int, zeros: bool) -> tuple[Node, int]:
    """(x, lag) where `node` is x as it was `lag` steps earlier along `time`; before time 0 it is 0, if `zeros` is
    asked. `node` itself and 0 where it is no delay."""
    *cuts, at = chain(node, lambda n: _slice_start(n, time) is not None)
    first, left = sum(_slice_start(n, time) or 0 for n in cuts), 0
    while (padded := padded_in_front(at, time, zeros)) is not None:
        at, left = padded[0], left + padded[1]
    # It may have been cut at its end before it was padded.
    for x in (at, *(at.args[:1] if _slice_start(at, time) == 0 else ())):
        if left >= first and same_size(value(node).shape[time], value(x).shape[time]):
            return x, left - first  # type: ignore[return-value]
    return node, 0


def _slice_start(node: Node, time: int) -> int | None:
    """Where a slice along `time` begins; None for anything else."""
    part = part_of(node) if node.target is aten.slice.Tensor else None
    return part.start if part is not None and part.is_run and part.dim == time and part.start >= 0 else None


def _column(node: Node) -> tuple[Node, int] | None:
    """(weight [c, k] or [c, 1, k], column) where `node` is that column, perhaps with dimensions of size 1."""
    node = _unit_free(node)
    if (one := column_of(node)) is None or value(node).dim() >= value(one[0]).dim():
        return None
    taps = value(one[0]).shape[-1]
    bases = chain(one[0], lambda n: value(n).dim() > 1 and value(n).shape[-1] == taps and _is_unit_view(n))
    shapes = ((base, value(base).shape) for base in bases)
    found = [base for base, s in shapes if s[-1] == taps and (len(s) == 2 or len(s) == 3 and s[1] == 1)]
    return (found[-1], one[1]) if found else None


def _is_unit_view(node: Node) -> bool:
    """Whether `node` is its first argument but for dimensions of size 1."""
    if node.target is aten.select.int:
        return bool(value(node.args[0]).shape[node.args[1]] == 1)
    return node.target in SQUEEZES | IDENTITIES | {UNSQUEEZE}


def _unit_free(node: Node) -> Node:
    """`node` before dimensions of size 1 were put in or dropped."""
    return through(node, SQUEEZES, UNSQUEEZE)


def _is_channels(node: Node, like: torch.Tensor) -> bool:
    shape = value(node).shape
    along = value(_unit_free(node)).dim() == 1 and all(same_size(n, 1) for n in shape[:-1])
    return along and same_size(shape[-1], like.shape[-1])
