"""A decoding step of latent attention in the absorbed form (arXiv:2405.04434, 2.1).

Before: `k_nope, v = kv_b(latents).split(..); k = cat((k_nope, rope_row.expand(heads)), -1); sdpa(q, k, v, mask)` over
        the latents of all rows so far, or in another spelling: two up-projections, einsums, a softmax between products
After:  `out, _ = megacpp.mla_decode(cat((q_nope W_uk, q_rope)), cat((latents, rope_row)), lengths, ..); out W_uv`

Safe because (q W_uk) c = q (W_uk c): scores and results are the same sums in another order. No head's keys and values
are made. Found by what attention computes (`matchers/latent_attention`): which elements of keys and values a projection
makes of which latents, and up to which row a query sees; further rows that a mask hides from all queries, as data, are
low in one more channel. A query that sees no row is 0 where eager's is NaN. Low-rank paths beside an up-projection
(LoRA) are absorbed as such, `(q W_uk) + ((q B) A)`, whose weights' sum would take more; a bias of the values is added
to the result, and one of the keys changes no weight of a row.
Taken where it needs fewer multiply-adds by `choose_form`, whose counts are the site's note; for symbolic sizes, those
that the frame was first compiled with.
Refused: training, for which it is no gain (tag `training`, also of what a model absorbs itself); caches of expanded
keys (`expanded-cache`); keys or values that something else reads, too (`escapes`); masks that hide other rows than
those behind a last one (`mask`); steps of so many tokens that the expanded form takes fewer multiply-adds
(`expanded-cheaper`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megacpp_compile.decode.absorbed import LowRank, choose_form
from megacpp_compile.fx.edit import unread_without, value
from megacpp_compile.fx.sizes import hint
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.latent_attention.decodes import find_decodes
from megacpp_compile.matchers.latent_attention.over_latents import LatentAttention
from megacpp_compile.matchers.softmax_attention.absorbed import absorbed
from megacpp_compile.passes._rewrites.absorbed import inputs_of, readable
from megacpp_compile.passes._rewrites.absorbed_weights import weights_fit
from megacpp_compile.passes._rewrites.decode import emit
from megacpp_compile.passes._rule import Match, decided

name = "mla_decode"
op = "megacpp::mla_decode"
after: tuple[str, ...] = ("linear", "sparse_mla")


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    yield from decided(find_decodes(view.graph), partial(_decide, view))
    yield from _absorbed_in_training(view) if view.trained else ()


def _absorbed_in_training(view: GraphView) -> Iterator[MatchFailure]:
    """What a model absorbs itself where it is trained."""
    for one in view.attentions:
        found = None if isinstance(one, MatchFailure) or not view.has_backward(one.result) else absorbed(one)
        if found is not None:
            n, r, p = found.nope, found.latent, found.shared
            yield MatchFailure(
                found.product, "training", f"queries are multiplied by W_uk ahead of the scores: over latents these "
                f"take {r + p} channels instead of {n + p}, and results {r} a head: train on the keys and values that "
                "the latents expand to, and absorb W_uk and W_uv for decoding alone"
            )  # fmt: skip


def _low_rank(found: LatentAttention) -> LowRank:
    """The ranks of what is added to W_uk and W_uv."""
    keys, values = ([m for m in maps if m.down is not None] for maps in (found.w_uk, found.w_uv))
    narrowed = {m.down.node: m.rank for m in (*keys, *values) if m.down is not None}
    return LowRank(sum(m.rank for m in keys), sum(m.rank for m in values), sum(narrowed.values()))


@or_failure
def _decide(view: GraphView, found: LatentAttention) -> Match | MatchFailure | None:
    node, sizes = found.core.result.node, found.sizes
    inputs = inputs_of(found)
    heads, latent = sizes["h"], sizes["r"]
    if not weights_fit(found) or not readable(inputs, value(node).device):
        return None
    if view.has_backward(node):
        refuse(
            node, "training", f"absorbed, scores would take {latent + sizes['p']} channels instead of "
            f"{sizes['n'] + sizes['p']} and no flash kernel, and save nothing that backward does not recompute: decode "
            "under torch.no_grad()"
        )  # fmt: skip
    widths = heads, sizes["n"], sizes["p"], sizes["v"], latent
    form = choose_form(hint(sizes["t"]), hint(sizes["s"]), *widths, low_rank=_low_rank(found))
    refuse_if(not form.absorbed, node, "expanded-cheaper", str(form))
    unread = unread_without(node.all_input_nodes, {node})
    for expanded in found.expanded:
        reason = f"{expanded.name}, what the latents are expanded to, is read elsewhere too"
        refuse_if(expanded not in unread, expanded, "escapes", reason)
    return Match(node, inputs, [node], lambda build: emit(build, found), note=str(form), forward_only=True)
