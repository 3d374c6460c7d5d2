"""Down-projection -> RMSNorm of the latent -> up-projection(s): MLA's low-rank pairs (arXiv:2405.04434, 2.1).

Before: `down = linear(x, w_down); latent, rest = down.split([c, r], -1); up = linear(rms_norm(latent, w_norm), w_up)`
After:  `[up], rest, rrms = megacpp.down_norm_up(x, w_down, b_down, w_norm, [w_up], eps, start=0, size=c)`

Safe because the op computes the same function in at least the same precision: backward recomputes from x what was saved
between x and the up-projections (the latent, its float32 copy, the normed latent).
Trades one GEMM for memory: x is saved for the gradient of the down-projection's weight anyway, so backward recomputes
the latent. What is saved and what is recomputed both grow with the latent's width, so any width is worth it: an output
projection before the norm and the gate of the next block is as good a site as a low rank (Zamba2).
One down-projection may make several latents (`q, kv, pe = linear(x, w).split([c, d, r], -1)`): each op then takes its
own rows of the weight, if all of them can. Low-rank paths beside it (LoRA) are part of it: backward needs what they
keep anyway.
A normed latent that is also returned, written to a cache or read without gradients is a result of the op; the latent
before its norm likewise, and what reads one of them and keeps it for backward has the op keep the latent.
Under tensor parallelism each rank has up-projections of its own, and the op sums the gradient of the normed latent.
Refused: another norm (LayerNorm, eps outside the root, another axis), a statistic that escapes, a bias or
non-linearity between norm and up-projection, parts under different grad or autocast modes; a frozen down-projection,
for which backward would keep x instead of narrower latents. Told only of what is narrower than both its neighbours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import Builder, place, value
from megacpp_compile.lowerings._sum_gradient import sum_gradient
from megacpp_compile.matchers._match import MatchFailure, or_failure, or_refuse, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.linear import Linear, match_projection
from megacpp_compile.matchers.rms_norm import RmsNorm
from megacpp_compile.matchers.views import consumers, replay
from megacpp_compile.passes._rewrites.latent import Latent, SideOutputs, beside, frozen, keeps, latent_of
from megacpp_compile.passes._rewrites.latent_misses import after_a_latent, beside_no_path, unmatched_latents
from megacpp_compile.passes._rewrites.norm import (
    between_ranks,
    depends,
    fold_scaling,
    gain_of,
    norm_before,
    reads,
    refuse_escapes,
)
from megacpp_compile.passes._rule import Match, in_other_modes

name = "down_norm_up"
op = "megacpp::down_norm_up"
after = ("linear", "linear_cross_entropy", "mla_decode")  # a head behind a narrow norm is the loss's


@dataclasses.dataclass(frozen=True)
class _Site:
    """A latent between its projections. part: the channels of the down-projection that belong to the op, None for all;
    escapes: whether something else reads the normed latent; keep: whether the op keeps the latent for backward;
    group: of the ranks that share the latent and have projections of their own, if there are any."""

    latent: Latent
    norm: RmsNorm
    ups: list[tuple[Linear, list[Node]]]
    beside: SideOutputs
    part: tuple[int, int] | None
    escapes: bool
    keep: bool
    group: tuple[str, ...]

    @property
    def inputs(self) -> list[Node]:
        down = self.latent.down
        linears = [down.linear, *(up for up, _ in self.ups)]
        found = [n for one in linears for n in (one.w, one.b) if n is not None]
        paths = [n for path in down.paths for n in path.inputs]
        return list(dict.fromkeys([down.linear.x, *found, *paths, *self.norm.gains]))

    @property
    def outputs(self) -> list[Node]:
        found = [up.node for up, _ in self.ups]
        found += [n for n, *_ in (*self.beside.rests, *self.beside.raw)]
        return [*found, *([self.norm.node] if self.escapes else [])]


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    done: set[Node] = set()
    seen: set[Node] = set()
    several = dict(_several(view))
    for node in view.graph.nodes:
        up = match_projection(node)
        if up is None or node in done:
            continue
        source, norm = norm_before(up, between_ranks)
        if norm is None:
            continue
        if isinstance(norm, MatchFailure):
            if after_a_latent(source, up):
                yield norm
            continue
        done.update(n for n, _, _ in consumers(norm.node, between_ranks))
        found = several[norm.node] if norm.node in several else _check(view, norm, up)
        if isinstance(found, Match):
            done.update(found.outputs)
        if found is not None:
            yield found
        seen.add(source)
        done.update(n for n, _, _ in consumers(norm.node, between_ranks))
    yield from unmatched_latents(view, seen)


def _several(view: GraphView) -> Iterator[tuple[Node, Match]]:
    """(norm, match) for latents that one down-projection makes side by side, where every one of them matches."""
    latents: dict[Node, dict[int, tuple[int, RmsNorm, Linear]]] = {}
    for node in view.graph.nodes:
        up = match_projection(node)
        norm = norm_before(up, between_ranks)[1] if up is not None else None
        if up is not None and isinstance(norm, RmsNorm) and (found := latent_of(norm.x)) is not None:
            latents.setdefault(found.down.node, {}).setdefault(found.start, (found.size, norm, up))
    for node, by_start in latents.items():
        runs = [(start, *run) for start, run in sorted(by_start.items())]
        matches: list[tuple[Node, Match]] = []
        lo = 0
        for i, (start, size, norm, up) in enumerate(runs if len(runs) > 1 else []):
            behind = runs[i + 1][0] if i + 1 < len(runs) else value(node).shape[-1]
            hi = behind if start == lo else start + size  # what is not normed lies on one side of what is
            last = i + 1 == len(runs)
            match = _check(view, norm, up, (lo, hi)) if start + size <= hi and not (last and hi != behind) else None
            if not isinstance(match, Match):
                break
            matches.append((norm.node, match))
            lo = hi
        else:
            yield from matches


def _check(
    view: GraphView, norm: RmsNorm, up: Linear, part: tuple[int, int] | None = None
) -> Match | MatchFailure | None:
    """The match of `norm` with the projections before and behind it; None where it is no latent's.

    part: the channels of the down-projection that belong to this latent and its op; None for all of them.
    """
    latent = latent_of(norm.x)
    if latent is None:
        return beside_no_path(norm, up)  # or the norm of a residual stream, not of a latent
    found = _site(view, norm, latent, part)
    refusal = _refusal(view, found) if isinstance(found, _Site) else found
    if refusal is not None:
        return refusal if latent.narrows(up) else None
    if not isinstance(found, _Site):
        return None
    return Match(found.ups[0][0].node, found.inputs, found.outputs, lambda build: _rewrite(view, build, found))


@or_failure
@or_none
def _site(view: GraphView, norm: RmsNorm, latent: Latent, part: tuple[int, int] | None) -> _Site | MatchFailure | None:
    """Who reads the latent and its norm, or why they can't all be served; None for what is no latent."""
    start, size = latent.start, latent.size
    lo, hi = part or (0, latent.down.linear.out_features)
    refuse_if(
        start > lo and start + size != hi,
        norm.x, "latent-place", "the normed channels lie in the middle of the down-projection",
    )
    ups, others, groups = [], [], set()
    for user, read, chain in fold_scaling(norm, between_ranks):
        up = reads(user, read)
        if up is not None and view.mode_states[user] == view.mode_states[latent.down.node]:
            sums = [link for link in chain if link.target is sum_gradient]
            groups.add(tuple(link.args[1] for link in sums))
            ups.append((up, latent.views + [link for link in chain if link not in sums]))
        else:
            others.append((user, read))
    if not ups:
        # What reads it in its own mode is what a latent is for; a linear in another one may choose tokens alone.
        own = [(user, read) for user, read in others if view.mode_states[user] == view.mode_states[norm.node]]
        elsewhere = next((user for user, read in others if reads(user, read) is not None), None)
        refuse_if(
            elsewhere is not None and not own,
            elsewhere, "region", "the up-projection runs under another grad or autocast mode",
        )
        user, read = (own or others)[0]
        at = read if user.op == "output" else user  # the output itself has no place in the source
        return MatchFailure(at, "no-up", f"no linear follows the norm directly ({user.name})")
    reason = "the gradients of its up-projections are not all summed over the same ranks"
    refuse_if(len(groups) > 1 or len(*groups) > 1, norm.node, "ranks", reason)
    refuse_escapes(norm)
    more = NoMatch.unless(or_refuse(beside(view, norm, latent, lo, hi)))
    NoMatch.when((others or more.raw) and not any(latent.narrows(up) for up, _ in ups))
    keep = bool(more.raw) or any(keeps(view, user, read) for user, read in others)
    return _Site(latent, norm, ups, more, part, bool(others), keep, *groups)


@or_failure
def _refusal(view: GraphView, site: _Site) -> MatchFailure | None:
    """Why the op can't stand for `site`, or would not be worth it."""
    norm, ups, down = site.norm, [up for up, _ in site.ups], site.latent.down
    if all(value(up.node).dtype != value(down.linear.node).dtype for up in ups):  # a low-rank path's may be wider
        return MatchFailure(ups[0].node, "dtype", "down- and up-projection run in different dtypes")
    gone = {down.node, down.linear.node, *down.internal, *norm.internal}
    # A norm is computed in the dtypes it is written in, or wider ones, whatever autocast is around it.
    rest = (down.node, down.linear.node, *down.internal, *(up.node for up in ups), *(n for n, *_ in site.beside.rests))
    or_refuse(in_other_modes(view, rest, down.node))
    or_refuse(in_other_modes(view, norm.internal, down.node, autocast=False))
    or_refuse(frozen(view, site.latent, [*norm.gains, *(up.w for up in ups)]))
    refuse_if(
        any(depends(i, gone) for i in site.inputs),
        norm.node, "feedback", "a weight or gain is computed from the latent itself",
    )
    refuse_if(
        place(site.inputs, site.outputs, down.node, view.mode_states) is None,
        down.node, "region", "a weight is computed under another grad or autocast mode",
    )
    return None


def _rewrite(view: GraphView, build: Builder, site: _Site) -> tuple[Node, list[Node]]:
    latent, norm, down = site.latent, site.norm, site.latent.down.linear
    first = site.part[0] if site.part else 0

    def own(rows: Node) -> Node:
        return build(aten.slice.Tensor, rows, 0, *site.part) if site.part else rows

    x_side, w_side, b_down = _sides(build, site.latent, None if down.b is None else build.cast(down.b, _dtype(down)))
    keep = view.config.keep_latents is True or site.keep
    wide = value(latent.down.node).dtype
    options = [
        keep, x_side, w_side and own(w_side), value(norm.node).dtype if site.escapes else None,
        *(site.group or [None]), wide if wide != _dtype(down) else None,
    ]  # fmt: skip
    while options and not options[-1]:
        options.pop()
    node = build(
        torch.ops.megacpp.down_norm_up.default,
        build.cast(down.x, _dtype(down)), own(down.weight(build)), b_down and own(b_down), gain_of(build, norm),
        [up.weight(build) for up, _ in site.ups], float(norm.eps), latent.start - first, latent.size, *options,
    )  # fmt: skip
    all_up, rest = build.item(node, 0), build.item(node, 1)
    new = []
    for i, (up, chain) in enumerate(site.ups):
        out = up.shaped(build, replay(build, chain, build.item(all_up, i)))
        if up.b is not None:
            out = build(aten.add.Tensor, out, build.cast(up.b, value(up.node).dtype))
        new.append(out)
    for _, chain, at, width in site.beside.rests:
        out = replay(build, chain, rest)
        if width != value(rest).shape[-1]:
            out = build(aten.slice.Tensor, out, -1, at, at + width)
        new.append(out)
    new += [replay(build, chain, build.item(node, 3)) for _, chain in site.beside.raw]
    if site.escapes:
        new.append(replay(build, latent.views, build.item(all_up, len(site.ups))))
    return node, new


def _dtype(linear: Linear) -> torch.dtype:
    dtype: torch.dtype = value(linear.node).dtype
    return dtype


def _sides(build: Builder, latent: Latent, bias: Node | None) -> tuple[Node | None, Node | None, Node | None]:
    """(operand, weight) of all low-rank paths beside the down-projection as one, and its bias with theirs."""
    rows: list[Node] = []
    weights: list[Node] = []
    for path in latent.down.paths:
        dtype = _dtype(latent.down.paths[0].up)
        bias_of_rows = None if path.down.b is None else build.cast(path.down.b, _dtype(path.down))
        low = build(
            aten.linear.default, build.cast(path.down.x, _dtype(path.down)), path.down.weight(build), bias_of_rows
        )
        rows.append(build.cast(path.scaled(build, low), dtype))
        weights.append(build.cast(path.up.weight(build), dtype))
        if path.up.b is not None:
            more = build.cast(path.scaled(build, path.up.b), _dtype(latent.down.linear))
            bias = more if bias is None else build(aten.add.Tensor, bias, more)
    if len(rows) > 1:
        return build(aten.cat.default, rows, -1), build(aten.cat.default, weights, 1), bias
    return (*rows, *weights, bias) if rows else (None, None, bias)  # type: ignore[return-value]
