"""DeepSeek Sparse Attention written as a mask, as in transformers' DeepSeek-V3.2 and GLM-5
(https://github.com/deepseek-ai/DeepSeek-V3.2-Exp): attention over the latent rows of a list.

Before: `seen = zeros(b, t, s, bool).scatter(-1, scores.topk(k).indices, True) & causal`, over keys and values of all
        rows, `k_nope, v = kv_b(latents).split(..)`, `sdpa(q, cat((k_nope, rope_row)), v, seen)`; in any spelling
After:  `out, _ = megacpp.sparse_mla(cat((q_nope W_uk, q_rope)), cat((latents, rope_row)), indices, ..); out W_uv`

Safe because (q W_uk) c = q (W_uk c), and because a row that is hidden has no weight: the sums are those over listed
rows. That a mask shows the rows of a list where its other parts do is read off how it is made (`lists.py` and
`selections.py` in `matchers/latent_attention`). A causal part is the op's own; any other of bool is read at the listed
rows, and those it hides become -1, as do repetitions in a list that is not from topk, sort or argsort. Differentiable:
what is around the op is plain PyTorch, and indices have no gradient. The scores that rows are chosen by stay as they
are. A query that sees no row is 0 where eager's is NaN, or, for masks of a lowest number, the mean of all rows.
Taken over LEAST_ROWS rows or more where it needs fewer multiply-adds (`_Form`), whose counts are the site's note; for
symbolic sizes, those that the frame was first compiled with.
Refused: shorter sequences, and those over which all rows take fewer multiply-adds (tag `dense-cheaper`, with the length
from which the list pays); masks that are added and are data, a list for each head, lists that are compared or written
by index and may name a row twice (`mask`); keys and values that are not made of one latent a row (`latents`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch.fx import Node

from megacpp_compile.fx.edit import unread_without, value
from megacpp_compile.fx.sizes import hint
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse, refuse_if, refuse_unless
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.latent_attention.core import Core, cores
from megacpp_compile.matchers.latent_attention.masks import NotRows
from megacpp_compile.matchers.latent_attention.over_latents import LatentAttention, over_latents
from megacpp_compile.matchers.latent_attention.selections import Selection, selection_of
from megacpp_compile.passes._rewrites.absorbed import inputs_of, readable
from megacpp_compile.passes._rewrites.absorbed_weights import weights_fit
from megacpp_compile.passes._rewrites.sparse import emit
from megacpp_compile.passes._rule import Match

name = "sparse_mla"
op = "megacpp::sparse_mla"
after: tuple[str, ...] = ("linear",)
# Over fewer rows attention to all of them is no matter, whatever the counts say: its matrix of scores is small, and the
# GEMMs that gather latents by tiles of 64 rows have little to gather.
LEAST_ROWS = 1024


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    found: dict[Node, Match | MatchFailure] = {}
    for core in cores(view.graph):
        node = core.result.node
        if not core.masks or isinstance(found.get(node), Match):
            continue
        decided = _decide(view, core)
        if isinstance(decided, Match) or decided is not None and node not in found:
            found[node] = decided
    yield from found.values()


@or_failure
def _decide(view: GraphView, core: Core) -> Match | MatchFailure | None:
    node, selected = core.result.node, selection_of(core)
    if selected is None:
        return None
    if isinstance(selected, NotRows):
        refuse(node, "mask", f"which rows a query sees is not told by its mask: {selected}")
    found = refuse_unless(
        over_latents(core), node, "latents", "its mask is a list of rows, but keys and values are not made of one "
        "latent a row by up-projections, beside channels that all heads share, in the same compiled function"
    )  # fmt: skip
    inputs = list(dict.fromkeys([*inputs_of(found), selected.index, *(one.node for one in selected.conditions)]))
    if not weights_fit(found) or not readable(inputs, value(node).device):
        return None
    form = _form(found, selected)
    refuse_if(not form.pays, node, "dense-cheaper", str(form))
    return Match(node, inputs, [node], lambda build: emit(build, found, selected), note=str(form))


@dataclasses.dataclass(frozen=True)
class _Form:
    """Multiply-adds of one sequence's forward over all rows and over the listed ones; backward's are in proportion."""

    dense: int
    listed: int
    rows: int
    least: int  # rows from which the list pays

    @property
    def pays(self) -> bool:
        return self.listed < self.dense and self.rows >= LEAST_ROWS

    def __str__(self) -> str:
        name = "listed rows" if self.pays else "all rows"
        counts = f"{self.listed} multiply-adds over listed latents, {self.dense} over all rows of keys and values"
        return f"{name} of {self.rows}: {counts}; such a list pays from {self.least} rows on"


def _form(found: LatentAttention, selected: Selection) -> _Form:
    """A mask lets no kernel skip a row: all are counted, those behind the query too. A projection of latents that
    something else reads stays, and saves nothing."""
    n, p, v, r, h = (found.sizes[axis] for axis in "npvrh")
    t, s = (hint(found.sizes[axis]) for axis in "ts")
    k = hint(value(selected.index).shape[selected.axes.index("k")])
    node = found.core.result.node
    unread = unread_without(node.all_input_nodes, {node})
    up = r * (n + v) if all(expanded in unread for expanded in found.expanded) else 0
    per_query = k * (2 * r + p) + r * (n + v)
    least = (per_query - up) // (n + p + v) if t == s else t * per_query // (t * (n + p + v) + up)
    return _Form(h * s * (t * (n + p + v) + up), h * t * per_query, s, max(least + 1, LEAST_ROWS))
