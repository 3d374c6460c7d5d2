"""Finds steps of decoding: attention of few queries over the latents that a cache keeps, and what is nearly one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import fx
from torch.fx import Node

from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.sizes import hint
from megacpp_compile.fx.views import is_cast
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.latent_attention.core import Core, cores
from megacpp_compile.matchers.latent_attention.elements import Elements, elements, levels, places
from megacpp_compile.matchers.latent_attention.masks import NotRows, rows_seen
from megacpp_compile.matchers.latent_attention.over_latents import (
    LatentAttention,
    Side,
    over_latents,
    pieces_of,
    samples_of,
)
from megacpp_compile.matchers.latent_attention.up_projections import expanded
from megacpp_compile.reader.links import through

_APPENDS = frozenset({"cat", "index_copy", "slice_scatter", "select_scatter", "index_put", "scatter", "where"})


def find_decodes(graph: fx.Graph) -> Iterator[LatentAttention | MatchFailure]:
    """Every attention of fewer queries than rows over latents, and what is nearly one."""
    done = set[Node]()
    for core in cores(graph):
        if core.result.node in done or not _is_step(core):
            continue
        found = _decode(core)
        if found is not None:
            done.add(core.result.node)
            yield found


def _is_step(core: Core) -> bool:
    queries, keys = core.scores[0]
    tokens, rows = queries.size("t"), keys.size("s")
    return not same_size(tokens, rows) and hint(tokens) < hint(rows)


def _decode(core: Core) -> LatentAttention | MatchFailure | None:
    found = over_latents(core)
    if found is None:
        return _of_a_cache_of_keys(core)
    try:
        seen, given = rows_seen(core, found.sizes["t"])
    except NotRows as why:
        mask = core.masks[0].node
        return MatchFailure(core.result.node, "mask", f"which rows a query sees is not told by {mask.name}: {why}")
    return dataclasses.replace(found, seen=tuple(seen), given=tuple(given))


@or_none
def _of_a_cache_of_keys(core: Core) -> MatchFailure | None:
    """A cache of every head's keys, to which a step appends the keys it expands from its own latents."""
    samples = NoMatch.unless(samples_of(core))
    NoMatch.when(any(Side(k, samples).expanded for _, k in core.scores))
    keys = core.scores[0][1]
    last = levels(elements(keys.node, keys.axes, {**samples, "c": places(keys.size("c"), True)}))[-1].node
    NoMatch.when(str(getattr(last.target, "overloadpacket", "")).rpartition(".")[2] not in _APPENDS)
    given = [n for n in last.all_input_nodes if value(n).dim() == value(last).dim()]
    NoMatch.when(not any(_is_given(n) for n in given))
    rows = keys.axes.index("s")
    NoMatch.when(list(map(hint, value(last).shape)) != list(map(hint, value(keys.node).shape)))
    for new in given:
        axes = list(keys.axes)
        if [hint(n) for d, n in enumerate(value(new).shape) if d != rows] != [
            hint(n) for d, n in enumerate(value(last).shape) if d != rows
        ]:
            continue
        own = {**samples, "s": places(value(new).shape[rows], False), "c": places(keys.size("c"), True)}
        pieces = list(pieces_of(elements(new, axes, own)))
        if any(_is_latent(piece) for piece in pieces) and any(not levels(p)[-1].depends("h") for p in pieces):
            return MatchFailure(
                core.result.node, "expanded-cache", "the cache holds the keys and values of every head, whose latents "
                "are gone, so that no projection can be absorbed: keep latents instead, for a model of transformers "
                "past_key_values=megacpp_compile.use_latent_cache(model, batch=..., capacity=...)"
            )  # fmt: skip
    return None


def _is_latent(piece: Elements) -> bool:
    """Whether a projection makes it of something narrower."""
    found = expanded(piece)
    if found is None:
        return False
    made = value(found.node).shape[-1]
    return isinstance(made, int) and all(term.width < made for term in found.terms)


def _is_given(node: Node) -> bool:
    """Whether `node` is an input of the frame, or a view of one."""
    base = through(node, is_cast, lambda n: len(n.all_input_nodes) == 1 and "slice" in str(n.target))
    return bool(base.op == "placeholder")
