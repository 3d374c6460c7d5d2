"""Attention that a model computes part by part, heads in a loop or queries in chunks, as the one attention that it is:
each part is an attention by itself, and one `cat` or `stack` joins their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.views import COPIES, FOLDS, PERMUTATIONS, RESHAPES, UNIT_DIMS, is_cast
from megacpp_compile.matchers.latent_attention.core import SDPA
from megacpp_compile.matchers.softmax_attention.parts import Attention, Groups
from megacpp_compile.matchers.softmax_attention.scores import ScoresReader
from megacpp_compile.matchers.softmax_attention.whole import Apart, Site
from megacpp_compile.matchers.softmax_attention.whole_heads import Heads
from megacpp_compile.matchers.softmax_attention.whole_queries import Queries
from megacpp_compile.matchers.ssd.atoms import Atom, NoAxes
from megacpp_compile.reader.links import only_user, onward

_JOINS = {aten.cat.default, aten.stack.default}
_VIEWS = COPIES | PERMUTATIONS | UNIT_DIMS | RESHAPES | FOLDS


def joined(sites: Sequence[Site], fits: Callable[[Site], bool]) -> list[Site]:
    """`sites`, parts of one replaced by it, as often as there are such. fits: whether queries in chunks may be one."""
    left = list(sites)
    while (found := next(_wholes(left, fits), None)) is not None:
        whole, parts = found
        left = [whole if site is parts[0] else site for site in left if site is parts[0] or site not in parts]
    return left


def _wholes(sites: Sequence[Site], fits: Callable[[Site], bool]) -> Iterator[tuple[Site, list[Site]]]:
    joins: dict[Node, dict[Node, tuple[Site, Groups]]] = {}
    for site in sites:
        if site.attention.softmax.target is not SDPA and (end := _end(site.attention)) is not None:
            join, last, dims = end
            joins.setdefault(join, {})[last] = site, dims
    for join, parts in joins.items():
        entries: Any = join.args[0]
        if not join.kwargs and len(entries) == len(set(entries)) > 1 and all(entry in parts for entry in entries):
            own, ends = [parts[entry][0] for entry in entries], [parts[entry][1] for entry in entries]
            whole = chunks = _whole(Queries, join, own, ends)
            if chunks is None:
                whole = _whole(Heads, join, own, ends)
            if whole is not None and (whole is not chunks or fits(whole)):
                yield whole, own


def _whole(kind: type[Heads | Queries], join: Node, sites: list[Site], ends: list[Groups]) -> Site | None:
    try:
        return kind(join, sites, ends).whole()
    except Apart:
        return None


def _end(found: Attention) -> tuple[Node, Node, Groups] | None:
    """(what joins the result with others, as what it joins it, the dimensions of that); None where something else reads
    the result, too."""
    twins = {a: Atom(a.size) for d in found.result_dims for a in d}
    dims = [[twins[a] for a in d] for d in found.result_dims]
    _, *views = onward(found.result, is_cast, _VIEWS)
    last = views[-1] if views else found.result
    join = only_user(last)
    if join is None or join.target not in _JOINS or sum(map(is_cast, views)) > 1:
        return None
    try:
        for view in views:
            dims = ScoresReader(frozenset()).view(view, dims)
    except NoAxes:
        return None
    own = {twin: a for a, twin in twins.items()}
    whole = all(twin.parts is None for twin in own)
    return (join, last, tuple(tuple(own[a] for a in d) for d in dims)) if whole else None
