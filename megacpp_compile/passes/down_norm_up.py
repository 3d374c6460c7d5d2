"""Down-projection -> RMSNorm of the latent -> up-projection(s): MLA's low-rank pairs (arXiv:2405.04434, 2.1).

Before: `down = linear(x, w_down); latent, rest = down.split([c, r], -1); up = linear(rms_norm(latent, w_norm), w_up)`
After:  `[up], rest, rrms = megacpp.down_norm_up(x, w_down, b_down, w_norm, [w_up], eps, start=0, size=c)`

Safe because the op computes the same function in at least the same precision, and nothing else reads a value between x
and the up-projections: backward recomputes from x what was saved there (the latent, its float32 copy, the normed
latent).
Trades one GEMM for memory: x is saved for the gradient of the down-projection's weight anyway, so backward recomputes
the latent. What is saved and what is recomputed both grow with the latent's width, so any width is worth it: an output
projection before the norm and the gate of the next block is as good a site as a low rank (Zamba2).
One down-projection may make several latents (`q, kv, pe = linear(x, w).split([c, d, r], -1)`): each op then takes its
own rows of the weight, if all of them can.
Refused: another norm (LayerNorm, eps outside the root, another axis), a latent or norm that escapes, a bias or
non-linearity between norm and up-projection, parts under different grad or autocast modes; a frozen down-projection,
for which backward would keep x instead of narrower latents.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, place, value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.attention import is_attention
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.linear import Linear, match_linear
from megacpp_compile.matchers.rms_norm import NoNorm, RmsNorm, match_rms_norm
from megacpp_compile.matchers.views import consumers, is_cast, is_outer_view, lane_slice, replay
from megacpp_compile.passes._norm import between, depends, escaping, gain_of, norm_before, projections
from megacpp_compile.passes._rule import Match

aten = torch.ops.aten
name = "down_norm_up"
op = "megacpp::down_norm_up"
after = ("linear",)

Rest = tuple[Node, list[Node], int, int]  # channels not normed: (node, chain from the down-projection, start, width)


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    done: set[Node] = set()
    seen: set[Node] = set()
    several = dict(_several(view))
    for node in view.graph.nodes:
        up = match_linear(node)
        if up is None or node in done:
            continue
        source, norm = norm_before(up)
        if norm is None:
            continue
        if isinstance(norm, NoNorm):
            if _after_projection(source):
                yield MatchFailure(norm.node, norm.tag, norm.reason)
            continue
        found = several[norm.node] if norm.node in several else _check(view, norm)
        if isinstance(found, Match):
            done.update(found.outputs)
        if found is not None:
            yield found
        seen.add(source)
        done.update(n for n, _, _ in consumers(norm.node, between))
    yield from _stranded(view, seen)


def _several(view: GraphView) -> Iterator[tuple[Node, Match]]:
    """(norm, match) for latents that one down-projection makes side by side, where every one of them matches."""
    latents: dict[Node, dict[int, tuple[int, RmsNorm]]] = {}
    for node in view.graph.nodes:
        up = match_linear(node)
        norm = norm_before(up)[1] if up is not None else None
        if isinstance(norm, RmsNorm) and (found := _down(norm.x)) is not None:
            latents.setdefault(found[0].node, {}).setdefault(found[1], (found[2], norm))
    for node, by_start in latents.items():
        runs = [(start, size, norm) for start, (size, norm) in sorted(by_start.items())]
        matches: list[tuple[Node, Match]] = []
        lo = 0
        for i, (start, size, norm) in enumerate(runs if len(runs) > 1 else []):
            behind = runs[i + 1][0] if i + 1 < len(runs) else value(node).shape[-1]
            hi = behind if start == lo else start + size  # what is not normed lies on one side of what is
            last = i + 1 == len(runs)
            match = _check(view, norm, (lo, hi)) if start + size <= hi and not (last and hi != behind) else None
            if not isinstance(match, Match):
                break
            matches.append((norm.node, match))
            lo = hi
        else:
            yield from matches


def _stranded(view: GraphView, seen: set[Node]) -> Iterator[MatchFailure]:
    """Norms of a latent that reach their up-projection only through something else."""
    for node in view.graph.nodes:
        if node.target not in (aten.rms_norm.default, aten.rsqrt.default):
            continue
        top = node
        for _ in range(4):  # from the rsqrt up to the last multiplication
            nxt = next((u for u in top.users if isinstance(match_rms_norm(u), RmsNorm)), None)
            if nxt is None:
                break
            top = nxt
        norm = match_rms_norm(top)
        if not isinstance(norm, RmsNorm) or norm.node in seen or _down(norm.x) is None:
            continue
        step = norm.node
        for _ in range(3):
            if len(step.users) != 1:
                break
            step = next(iter(step.users))
            if match_linear(step) is not None or any(match_linear(u) is not None for u in step.users):
                blocker = next(iter(norm.node.users))
                yield MatchFailure(blocker, "no-up", f"{blocker.name} stands between the norm and the up-projection")
                break


def _rank(node: Node) -> int:
    fake = value(node)
    return fake.dim() if isinstance(fake, torch.Tensor) else -1


def _after_projection(node: Node, depth: int = 16) -> bool:
    """Whether a near miss stands behind a down-projection at all; a residual stream's own norm is no near miss."""
    for _ in range(depth):
        cut = lane_slice(node)
        if cut is not None:
            node = cut[0]
        elif match_linear(node) is not None:
            return True
        elif node.op == "call_function" and node.all_input_nodes:
            node = max(node.all_input_nodes, key=lambda n: (_rank(n), n))
        else:
            return False
    return False


def _down(x: Node) -> tuple[Linear, int, int, list[Node]] | None:
    """(the linear whose output channels `start : start + size` are `x`, start, size, the views in between)."""
    start, size, chain = 0, value(x).shape[-1], list[Node]()
    while True:
        cut = lane_slice(x)
        if cut is not None:
            x, start = cut[0], start + cut[1]
        elif is_outer_view(x):
            chain.insert(0, x)
            x = x.args[0]  # type: ignore[assignment]
        else:
            break
    linear = match_linear(x)
    return None if linear is None or not isinstance(size, int) else (linear, start, size, chain)


def _check(view: GraphView, norm: RmsNorm, part: tuple[int, int] | None = None) -> Match | MatchFailure | None:
    """The match of `norm` with the projections before and behind it; None where it is no latent's.

    part: the channels of the down-projection that belong to this latent and its op; None for all of them.
    """
    found = _down(norm.x)
    if found is None:
        return None  # the norm of a residual stream, not of a latent
    down, start, size, views = found
    lo, hi = part or (0, down.out_features)
    if start > lo and start + size != hi:
        return MatchFailure(norm.x, "latent-place", "the normed channels lie in the middle of the down-projection")
    ups, refusal = projections(norm)
    if refusal is not None:
        return refusal
    ups = [(up, views + chain) for up, chain in ups]
    if not ups:
        return None
    if (escape := escaping(norm)) is not None:
        return escape
    dtypes = {value(n).dtype for n in (down.node, *(u.node for u, _ in ups))}
    if len(dtypes) > 1:
        return MatchFailure(ups[0][0].node, "dtype", "down- and up-projection run in different dtypes")
    rests = _rests(norm, down, start, size, lo, hi)
    if isinstance(rests, MatchFailure):
        return rests
    site = [down.node, *norm.internal, *(u.node for u, _ in ups), *(r for r, *_ in rests)]
    for node in site:
        if view.mode_states[node] != view.mode_states[down.node]:
            return MatchFailure(node, "region", "part of it runs under another grad or autocast mode")
    if (frozen := _frozen(view, down, size, [*norm.gains, *(u.w for u, _ in ups)])) is not None:
        return frozen
    inputs = [down.x, down.w, *([down.b] if down.b is not None else []), *norm.gains]
    inputs += [n for u, _ in ups for n in (u.w, u.b) if n is not None]
    gone = {down.node, *norm.internal}
    if any(depends(i, gone) for i in inputs):
        return MatchFailure(norm.node, "feedback", "a weight or gain is computed from the latent itself")
    outputs = [u.node for u, _ in ups] + [r for r, *_ in rests]
    if place(inputs, outputs, down.node, view.mode_states) is None:
        return MatchFailure(down.node, "region", "a weight is computed under another grad or autocast mode")
    return Match(
        ups[0][0].node,
        list(dict.fromkeys(inputs)),
        outputs,
        lambda build: _rewrite(view, build, norm, down, start - lo, size, ups, rests, part),
    )


def _frozen(view: GraphView, down: Linear, size: int, behind: list[Node]) -> MatchFailure | None:
    """Why it would not save memory: no gradient of a weight asks for x, and the latents are narrower."""
    if not view.trained or view.needs_grad(down.w) or not view.needs_grad(down.x):
        return None
    latents = size * (2 if any(map(view.needs_grad, behind)) else 1)
    x, kept = down.x, False
    while is_outer_view(x) or is_cast(x):
        x = x.args[0]  # type: ignore[assignment]
    for user, read, _ in consumers(x, lambda n: is_outer_view(n) or is_cast(n)):
        linear = match_linear(user)
        kept = kept or linear is None or linear.x is not read or view.needs_grad(linear.w)
    if kept or x.op == "placeholder" or is_attention(x) or not isinstance(n := value(x).shape[-1], int) or n <= latents:
        return None
    reason = f"the down-projection is frozen: {n} channels of its input would be kept instead of {latents} behind it"
    return MatchFailure(down.node, "frozen", reason)


def _rests(norm: RmsNorm, down: Linear, start: int, size: int, first: int, end: int) -> list[Rest] | MatchFailure:
    """Every reader of channels `first` to `end` that are not normed."""
    total = down.out_features
    lo, hi = (first, start) if start > first else (start + size, end)
    rests: list[Rest] = []
    stack: list[tuple[Node, int, int, list[Node]]] = [(down.node, 0, total, [])]
    while stack:
        node, at, width, chain = stack.pop()
        if at + width <= first or at >= end:
            continue  # another latent's
        for user in node.users:
            if user in norm.internal:
                continue
            if user.target in (aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default):
                for item in user.users:
                    cut = lane_slice(item)
                    if cut is None:
                        return MatchFailure(user, "escapes", "the down-projection is split along another dimension")
                    _stack_or_rest(stack, rests, item, at + cut[1], cut[2], chain, lo, hi)
                continue
            cut = lane_slice(user)
            if cut is not None:
                _stack_or_rest(stack, rests, user, at + cut[1], cut[2], chain, lo, hi)
            elif is_outer_view(user):
                stack.append((user, at, width, [*chain, user]))
            else:
                at_node = node if user.op == "output" else user
                return MatchFailure(at_node, "escapes", f"the latent is used elsewhere too ({user.name})")
    return sorted(rests)


def _stack_or_rest(  # type: ignore[no-untyped-def]
    stack, rests: list[Rest], node: Node, at: int, width: int, chain: list[Node], lo: int, hi: int
) -> None:
    """Add a run of channels to `rests` if it lies outside the latent, else to the `stack` of values to look behind."""
    if lo <= at and at + width <= hi:
        rests.append((node, chain, at - lo, width))
    else:
        stack.append((node, at, width, [*chain, node] if is_outer_view(node) else chain))


def _rewrite(
    view: GraphView,
    build: Builder,
    norm: RmsNorm,
    down: Linear,
    start: int,
    size: int,
    ups: list[tuple[Linear, list[Node]]],
    rests: list[Rest],
    part: tuple[int, int] | None,
) -> tuple[Node, list[Node]]:
    dtype = value(down.node).dtype
    w_down, b_down = down.weight(build), None if down.b is None else build.cast(down.b, dtype)
    if part is not None:
        w_down, b_down = (b and build(aten.slice.Tensor, b, 0, *part) for b in (w_down, b_down))
    w_up = [u.weight(build) for u, _ in ups]
    gain = gain_of(build, norm)
    node = build(
        torch.ops.megacpp.down_norm_up.default,
        build.cast(down.x, dtype), w_down, b_down, gain, w_up, float(norm.eps), start, size,
        *([True] if view.config.keep_latents is True else []),
    )  # fmt: skip
    all_up, rest = build.item(node, 0), build.item(node, 1)
    new = []
    for i, (up, chain) in enumerate(ups):
        out = replay(build, chain, build.item(all_up, i))
        if up.b is not None:
            out = build(aten.add.Tensor, out, build.cast(up.b, value(up.node).dtype))
        new.append(out)
    for _, chain, at, width in rests:
        out = replay(build, chain, rest)
        if width != value(rest).shape[-1]:
            out = build(aten.slice.Tensor, out, -1, at, at + width)
        new.append(out)
    return node, new
