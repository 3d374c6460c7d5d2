"""Attention that a model spells out, or that torch's op is handed a mask of places for.

Before: `softmax(q @ k.transpose(-1, -2) * scale + mask, -1) @ v` in any spelling: products of any kind, or sums of two;
        grouped heads; scores divided, capped, biased and masked; a column more for sinks; a softmax by exponentials
After:  `out, lse, top = megacpp.attention(q, k, v, mask, bias, sinks, documents, scale, softcap, left, right, fill)`,
        with dropout of the probabilities, or a prefix, `megacpp.attention(..., fill, words, p, prefix)`

Safe because the op computes the same function in at least the same precision, and nothing else reads scores or
probabilities. It saves q, k, v, the result and two numbers a row at most in place of both.
Masks that compare places are told to the op as distances (`left`, `right`) and prefixes (`(j <= i) | (j < prefix)`), so
that kernels skip what they hide; each query has to see a key by them, as a query that sees none is NaN or the mean of
the values in eager, by how it is written. Where that is not known, and where a mask is data, it stays a tensor that the
op reads, with the number that it writes. Probabilities that a mask hides and then sets to 0 are of a row without a key
0, too, as of torch's op. Torch's op with such a mask stays torch's: its kernels read masks as well.
Heads that a model computes one after another (`torch.cat([head(x) for head in heads], -1)`) are one site, where they
differ in what they read alone; what is no piece of one tensor is stacked. So are queries in chunks (`for i in range(0,
t, n)`) whose masks are rows of one, on GPUs, and on CPU where torch's kernel serves. Others are a site each.
For dropout torch draws a word for each row and key, by which the op drops probabilities: others than eager, with the
same probability, and the same ones in backward.
Refused: probabilities that something else reads (`weights-kept`) or changes (`weights-changed`), or drops a second
time, or as eager would (`dropout`); exponentials that are normalised, but by no softmax (`softmax`); scores that
another op changes (`scores`) or reads (`scores-kept`); calls on DTensors between that move what they read, as of a
bias that heads' shards have whole (`dtensor`); queries in a wider dtype than the products' (`precision`);
heads of more channels than kernels hold (`width`); masks that write several numbers (`masks`); columns more that
are no sinks (`sinks`). The plain body of `megacpp_compile.attention` is such code, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch import inductor
from megacpp_compile._torch.ops import aten
from megacpp_compile.frontend.dtensors import described, is_dtensor
from megacpp_compile.frontend.sdpa_regions import choice_of
from megacpp_compile.fx.edit import Builder, place, same_size, value
from megacpp_compile.fx.size_nodes import size_node
from megacpp_compile.fx.views import COPIES, PERMUTATIONS, UNIT_DIMS, uncast
from megacpp_compile.fx.walks import descendants
from megacpp_compile.lowerings.attention._dropout import WORDS
from megacpp_compile.lowerings.attention._sdpa_calls import chosen
from megacpp_compile.lowerings.attention._sdpa_choice import UNFUSED
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.latent_attention.core import SDPA, arguments_of
from megacpp_compile.matchers.softmax_attention.joined import joined
from megacpp_compile.matchers.softmax_attention.parts import Attention, Groups
from megacpp_compile.matchers.softmax_attention.plan import Plan, plan_of
from megacpp_compile.matchers.softmax_attention.whole import Site
from megacpp_compile.matchers.ssd.atoms import length
from megacpp_compile.passes._rewrites.arrange import arrange
from megacpp_compile.passes._rule import REGION, Match, in_other_modes

name = "attention"
op = "megacpp::attention"
after: tuple[str, ...] = ("mla_decode", "sparse_mla", "rope_qk")

NO_KEY = -1e30


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    found = list(_found(view))
    sites = joined([one for one in found if isinstance(one, Site)], _fits)
    at = {one.node: one for one in found if isinstance(one, MatchFailure)} | {s.attention.softmax: s for s in sites}
    for node in sorted(at):
        one = at[node]
        yield _decide(view, one) if isinstance(one, Site) else one


def _found(view: GraphView) -> Iterator[Site | MatchFailure]:
    for found in view.attentions:
        if isinstance(found, MatchFailure):
            yield _on_dtensors(found)
            continue
        plan = plan_of(found)
        if found.softmax.target is SDPA and not _gains(view, found, plan):
            continue
        if found.dropout is not None and _as_eager(view):
            reason = "probabilities are dropped at random, and `fallback_random` asks for eager's own random numbers"
            yield MatchFailure(found.dropout.node, "dropout", reason)
        elif isinstance(plan, MatchFailure):
            yield plan
        else:
            yield Site(found, plan, draws=() if found.dropout is None else (found.dropout.node,))


def _on_dtensors(failure: MatchFailure) -> MatchFailure:
    """`failure`, with the reason where it is a call on DTensors that no rank makes of its own part alone."""
    if failure.tag != "scores" or not is_dtensor(value(failure.node)):
        return failure
    made = all(is_dtensor(v) for a in failure.node.all_input_nodes if isinstance(v := value(a), torch.Tensor))
    call = failure.node if made else next(iter(failure.node.users))
    reason = f"{described(call)} stands between the products of queries with keys and the softmax"
    return MatchFailure(failure.node, "dtensor", reason)


def _fits(site: Site) -> bool:
    """Whether queries in chunks are better as one: not where all their scores would be in memory, those of one chunk in
    the model."""
    found, plan = site.attention, site.plan
    device = value(found.result).device.type
    told = (plan.left, plan.documents or None, plan.prefix, found.scores.sinks, found.scores.softcap, found.dropout)
    plain = all(one is None for one in told) and not plan.hidden and not plan.added
    return device == "cuda" or device == "cpu" and plain and (plan.right is None or _is_square(found, plan))


def _is_square(found: Attention, plan: Plan) -> bool:
    """Whether each query sees the keys up to its own place."""
    square = same_size(length([*found.queries]), length([*found.keys]))
    return square and plan.right is not None and same_size(plan.right.size, 0)


def _gains(view: GraphView, found: Attention, plan: Plan | MatchFailure) -> bool:
    """Whether a call of torch's op computes less without its mask, which torch's kernels read for all keys, hidden or
    not, or is multiplied out by torch. What was chosen for it, by the option `fa4` or under `sdpa_kernel`, is left."""
    node = found.softmax
    if not found.scores.terms or view.config.fa4 or choice_of(node) is not None or isinstance(plan, MatchFailure):
        return False
    if found.dropout is not None and _as_eager(view):
        return False
    if _is_multiplied_out(found):
        return True
    told = any(said is not None for said in (plan.left, plan.right, plan.documents or None))
    return told and not plan.added and _is_quicker(value(node).device.type, found, plan)


def _is_multiplied_out(found: Attention) -> bool:
    """Whether torch would have all scores of this call of its op in memory, on a GPU."""
    given = arguments_of(found.softmax)
    q, k, v, mask = (value(given[name]) for name in ("query", "key", "value", "attn_mask"))
    return q.device.type == "cuda" and chosen(q, k, v, False, mask) == UNFUSED


def _is_quicker(device: str, found: Attention, plan: Plan) -> bool:
    """Whether kernels that are told of this mask are known to be quicker than those that read it."""
    if device == "cpu":
        told = (plan.left, plan.documents or None, plan.prefix, found.dropout)
        plain = all(one is None for one in told) and not plan.hidden
        return plain and _is_square(found, plan)
    # As data, one row for all queries is read, such as of padding. A single query is left: it reads all that it sees.
    rows = all(same_size(value(h.node).shape[-2], 1) for h in plan.hidden if value(h.node).dim() > 1)
    several = not any(same_size(length([*d]), 1) for d in (found.queries, found.keys))
    return device == "cuda" and plan.dtype in (torch.float16, torch.bfloat16) and rows and several


def _decide(view: GraphView, site: Site) -> Match | MatchFailure:
    found = site.attention
    if (other := in_other_modes(view, sorted(found.inside), found.result)) is not None:
        return other
    inputs = site.inputs(_inputs(found, site.plan))
    if place(inputs, [found.result], found.result, view.mode_states) is None:
        return MatchFailure(found.softmax, *REGION)
    return Match(found.result, inputs, [found.result], lambda build: _rewrite(build, *site.emitted(build)),
                 draws=site.draws)  # fmt: skip


def _as_eager(view: GraphView) -> bool:
    """Whether random numbers are to be those that eager draws."""
    return bool(view.config.inductor.get("fallback_random", inductor.config.fallback_random))


def _inputs(found: Attention, plan: Plan) -> list[Node]:
    nodes = [uncast(o.node) for q, k, _ in found.scores.products for o in (q, k)] + [uncast(found.values.node)]
    nodes += [gain.node for gain in found.scores.gains]
    nodes += [h.node for h in plan.hidden] + [term.node for term, _ in plan.added]
    nodes += [h.documents for h in plan.documents if h.documents is not None]
    if found.scores.sinks is not None and found.scores.sinks[0] is not found.softmax:
        nodes.append(found.scores.sinks[0])
    nodes += [plan.prefix.node] if plan.prefix is not None and plan.prefix.node is not None else []
    nodes += [node for d in (plan.left, plan.right) if d is not None for _, node in d.parts]
    return list(dict.fromkeys(nodes))


# -- the rewrite


def _rewrite(build: Builder, found: Attention, plan: Plan) -> tuple[Node, list[Node]]:
    batch, heads, groups = found.batch, found.heads, found.groups
    first = found.scores.products[0][2]
    q_parts, k_parts = [], []
    for (q, k, scale), channels in zip(found.scores.products, found.channels, strict=True):
        part = arrange(build, (uncast(q.node), q.dims), (batch, heads, found.queries, channels))
        for gain in found.scores.gains:
            by = _broadcast(build, found, gain.node, gain.dims)
            part = build(aten.div.Tensor if gain.divides else aten.mul.Tensor, part, by)
        part = build.cast(part, plan.dtype)
        q_parts.append(part if scale == first else build(aten.mul.Tensor, part, scale / first))
        part = arrange(build, (uncast(k.node), k.dims), (batch, groups, found.keys, channels))
        k_parts.append(build.cast(part, plan.dtype))
    q, k = (p[0] if len(p) == 1 else build(aten.cat.default, p, -1) for p in (q_parts, k_parts))
    values = uncast(found.values.node), found.values.dims
    v = build.cast(arrange(build, values, (batch, groups, found.keys, found.value_channels)), plan.dtype)
    mask = bias = None
    for hidden in plan.hidden:
        one = _broadcast(build, found, hidden.node, hidden.term.beside(hidden.node))
        if hidden.kind == "hidden":
            one = build(aten.logical_not.default, one)
        elif value(one).dtype != torch.bool:
            one = build(aten.ne.Scalar, one, 0)
        mask = one if mask is None else build(aten.logical_and.default, mask, one)
    for term, factor in plan.added:
        one = _broadcast(build, found, term.node, term.beside(term.node))
        one = one if factor == 1 else build(aten.mul.Tensor, one, factor)
        bias = one if bias is None else build(aten.add.Tensor, bias, one)
    sinks, documents = _sinks(build, found, q), _documents(build, found, plan, q)
    if found.zeros and sinks is None and (mask is not None or bias is not None):
        # All that is left of a row without a key is a sink, which is nothing beside any key.
        sinks = build(aten.new_full.default, q, [length([*found.heads])], NO_KEY, dtype=torch.float32)
    softcap = found.scores.softcap
    scale = float(first) if softcap is None else first * softcap
    made = build(
        torch.ops.megacpp.attention.default, q, k, v, mask, bias, sinks, documents, scale, softcap or 0.0,
        *(d and d.emit(build) for d in (plan.left, plan.right)), plan.fill, *_at_the_end(build, found, q, k, plan),
    )  # fmt: skip
    out = arrange(build, (build.item(made, 0), (batch, heads, found.queries, found.value_channels)), found.result_dims)
    out = build.cast(out, value(found.result).dtype)
    if _strides_show(found.result) and not value(out).is_contiguous():
        out = build(aten.clone.default, out, memory_format=torch.contiguous_format)
    return made, [out]


def _broadcast(build: Builder, found: Attention, node: Node, dims: Groups) -> Node:
    """What broadcasts to the scores, as it does to the op's four dimensions."""
    return _spread(build, node, dims, (found.batch, found.heads, found.queries, found.keys))


def _spread(build: Builder, node: Node, dims: Groups, over: Groups) -> Node:
    """`node` in the dimensions `over`, each of which has size 1 where it has none of them."""
    own = {a for d in dims for a in d}
    return arrange(build, (node, dims), [group if own & set(group) else () for group in over])


def _sinks(build: Builder, found: Attention, q: Node) -> Node | None:
    if found.scores.sinks is None:
        return None
    node, dims = found.scores.sinks
    if node is found.softmax:
        return build(aten.new_zeros.default, q, [length([*found.heads])])
    if {a for d in dims for a in d} <= {*found.heads}:
        return arrange(build, (node, dims), (found.heads,))
    return _spread(build, node, dims, (found.batch, found.heads, found.queries))


def _documents(build: Builder, found: Attention, plan: Plan, q: Node) -> Node | None:
    """The numbers of documents; of two that each have to be equal, one for each pair of them that there is."""
    rows = list[Node]()
    for hidden in plan.documents:
        assert hidden.documents is not None
        dims = hidden.term.beside(hidden.documents)
        of_batch = not {a for d in dims for a in d}.isdisjoint(found.batch)
        rows.append(arrange(build, (hidden.documents, dims), (found.batch if of_batch else (), found.queries)))
    if len(rows) < 2:
        return rows[0] if rows else None
    first, second = (_ranks(build, row) for row in rows)
    return build(aten.add.Tensor, build(aten.mul.Tensor, first, size_node(build, value(q).shape[2])), second)


def _ranks(build: Builder, row: Node) -> Node:
    """As what integers their place among those of a row, each counted once."""
    made = build(aten.sort.default, row, -1)
    ordered, order = (build.item(made, n) for n in (0, 1))
    risen = build(aten.ne.Tensor, ordered, build(aten.roll.default, ordered, [1], [-1]))
    # The first is no other than itself, and the last may be.
    counts = build(aten.cumsum.default, risen, -1)
    return build(aten.scatter.src, build(aten.zeros_like.default, order), -1, order, counts)


def _at_the_end(build: Builder, found: Attention, q: Node, k: Node, plan: Plan) -> tuple[Any, ...]:
    """The op's last arguments, words, dropout and prefix, up to the last that is there."""
    prefix = () if plan.prefix is None else (plan.prefix.emit(build, q, arrange, found.batch),)
    if found.dropout is None:
        return (None, 0.0, *prefix) if prefix else ()
    return _words(build, q, k), found.dropout.p, *prefix


def _words(build: Builder, q: Node, k: Node) -> Node:
    """Random words, which torch draws. They are kept for backward, also where all else is computed again, as drawing
    them again takes the generator's state."""
    b, h, t, _ = value(q).shape
    size = size_node(build, value(k).shape[2] + b * h * t)
    words = build(aten.randint.low, 0, WORDS, [size], dtype=torch.int64, device=value(q).device)
    words.meta = {name: one for name, one in words.meta.items() if name not in ("recompute", "ac_graph_id")}
    return words


def _strides_show(result: Node) -> bool:
    """Whether the result's strides reach the frame's output, or a view that other strides have none of."""
    moves = PERMUTATIONS | UNIT_DIMS | COPIES - {aten.contiguous.default} | {aten.slice.Tensor}
    users = (user for n in descendants([result], lambda n: n.target in moves) for user in n.users)
    return any(user.op == "output" or user.target in (aten.view.default, aten.as_strided.default) for user in users)
