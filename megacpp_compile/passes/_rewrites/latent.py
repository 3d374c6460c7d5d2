"""Where a latent comes from and who reads it: its down-projection, the channels beside it, and what must stay.

Most latents are read by their norm alone, and most normed latents by up-projections alone. A value that is also
returned, written to a cache or read without gradients stays, as a result of the op.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import COPIES, DETACH, UNIT_DIMS
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_unless
from megacpp_compile.matchers.attention import is_attention
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.linear import Linear, match_linear
from megacpp_compile.matchers.low_rank import Adapted, match_adapted
from megacpp_compile.matchers.rms_norm import RmsNorm
from megacpp_compile.matchers.views import consumers, cut_from, is_cast, is_outer_view, is_reshape, lane_slice
from megacpp_compile.reader.links import chain, through

# What autograd differentiates without its operand's values: writes, and sums.
_WRITES = frozenset(
    {
        aten.cat.default, aten.stack.default, aten.copy.default, aten.copy_.default, aten.slice_scatter.default,
        aten.select_scatter.default, aten.index_copy.default, aten.index_put.default, aten.index_put_.default,
        aten._index_put_impl_.default,
    }
)  # fmt: skip
_SUMS = frozenset(
    {
        aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default,
        aten.mean.dim,
    }
)  # fmt: skip

Chained = tuple[Node, list[Node]]  # (node, views in front of it)


@dataclasses.dataclass(frozen=True)
class Latent:
    """Channels `start : start + size` of the down-projection `down`, seen through `views`."""

    down: Adapted
    start: int
    size: int
    views: list[Node]

    def narrows(self, up: Linear) -> bool:
        """Whether it is narrower than what it is made of and than what `up` makes of it: a latent as people mean it.

        The norm of an attention's or an MLP's output is not, and that nothing was made of it is no news.
        """
        return self.size < value(self.down.linear.x).shape[-1] and self.size < up.out_features


@dataclasses.dataclass
class SideOutputs:
    """What else is read of a down-projection. rests: (node, views, first channel, width) of channels that are not
    normed; raw: readers' values of the latent before its norm."""

    rests: list[tuple[Node, list[Node], int, int]]
    raw: list[Chained]


def latent_of(x: Node) -> Latent | None:
    """The latent that `x` is, or None where no linear makes it."""
    size, (*way, x) = value(x).shape[-1], chain(x, cut_from, is_outer_view)
    cuts = [(n, lane_slice(n)) for n in reversed(way)]
    start, views = sum(cut[1] for _, cut in cuts if cut is not None), [n for n, cut in cuts if cut is None]
    down = match_adapted(x)
    return None if down is None or not isinstance(size, int) else Latent(down, start, size, views)


def is_residual(node: Node) -> bool:
    """Whether `node` adds two activations, as a residual stream does; a bias is none."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor):
        return False
    shape = value(node).shape
    added = [a for a in node.args[:2] if isinstance(a, Node) and isinstance(value(a), torch.Tensor)]
    return len(added) == 2 and all(
        len(value(a).shape) == len(shape) > 1 and value(a).shape[-1] == shape[-1] for a in added
    )


@or_failure
def beside(view: GraphView, norm: RmsNorm, latent: Latent, first: int, end: int) -> SideOutputs | MatchFailure | None:
    """Every reader of the down-projection's channels `first` to `end` but the norm; None where the latent is a residual
    stream."""
    start, size = latent.start, latent.size
    lo, hi = (first, start) if start > first else (start + size, end)
    found = SideOutputs([], [])
    stack: list[tuple[Node, int, int, list[Node]]] = [(latent.down.node, 0, latent.down.linear.out_features, [])]

    def part(node: Node, at: int, width: int, views: list[Node]) -> None:
        """A run of channels: outside the latent, or to look behind."""
        if lo <= at and at + width <= hi:
            found.rests.append((node, views, at - lo, width))
        else:
            stack.append((node, at, width, [*views, node] if is_outer_view(node) else views))

    while stack:
        node, at, width, views = stack.pop()
        if at + width <= first or at >= end:
            continue  # another latent's
        for user in node.users:
            if user in norm.internal:
                continue
            if user.target in (aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default):
                for item in user.users:
                    reason = "the down-projection is split along another dimension"
                    _, first_of_item, size_of_item = refuse_unless(lane_slice(item), user, "escapes", reason)
                    part(item, at + first_of_item, size_of_item, views)
                continue
            cut = lane_slice(user)
            if cut is not None:
                part(user, at + cut[1], cut[2], views)
            elif is_outer_view(user):
                stack.append((user, at, width, [*views, user]))
            elif is_residual(user):
                return None
            elif (at, width) == (start, size) and user.target not in _SUMS and not keeps(view, user, node):
                found.raw += [] if (node, views) in found.raw else [(node, views)]
            else:
                at_node = node if user.op == "output" else user
                return MatchFailure(at_node, "escapes", f"the latent is used elsewhere too ({user.name})")
    found.rests.sort()
    return found


def keeps(view: GraphView, user: Node, read: Node, detached: bool = False) -> bool:
    """Whether `user` makes autograd keep the values of `read` for backward."""
    if user.op == "output" or not view.trained or not view.mode_states[user].grad:
        return False
    if user.target in _WRITES | _SUMS or is_cast(user):
        return False
    linear = match_linear(user)
    if linear is not None and linear.x is read and linear.w is not read:
        return view.needs_grad(linear.w)
    if user.target in (aten.mul.Tensor, aten.mul.Scalar) and not isinstance(value(user.args[1]), torch.Tensor):
        return False
    gone = user.target is DETACH
    if gone or user.target in COPIES | UNIT_DIMS or is_outer_view(user) or is_reshape(user) or lane_slice(user):
        return any(keeps(view, u, user, detached or gone) for u in user.users)
    if detached and not any(view.needs_grad(n) for n in user.all_input_nodes if n is not read):
        return False
    return True


@or_none
def frozen(view: GraphView, latent: Latent, behind: list[Node]) -> MatchFailure | None:
    """Why it would not save memory: no gradient of a weight asks for x, and the latents are narrower."""
    down = latent.down.linear
    NoMatch.when(not view.trained or view.needs_grad(down.w) or not view.needs_grad(down.x))
    latents = latent.size * (2 if any(map(view.needs_grad, behind)) else 1)
    x, kept = down.x, False
    x = through(x, is_outer_view, is_cast)
    for user, read, _ in consumers(x, lambda n: is_outer_view(n) or is_cast(n)):
        linear = match_linear(user)
        kept = kept or linear is None or linear.x is not read or view.needs_grad(linear.w)
    NoMatch.when(
        kept or x.op == "placeholder" or is_attention(x) or not isinstance(n := value(x).shape[-1], int) or n <= latents
    )
    reason = f"the down-projection is frozen: {n} channels of its input would be kept instead of {latents} behind it"
    return MatchFailure(down.node, "frozen", reason)
