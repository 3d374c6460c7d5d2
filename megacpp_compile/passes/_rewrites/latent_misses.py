"""What is nearly a normed latent: only where a down-projection, a norm and an up-projection stand in line.

A transformer is full of a linear, a norm and another linear that are none: the norm of a residual stream, a post-norm
before its residual, the norm of queries or keys over the whole width. A report about them would be no help.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.frontend.dtensors import described
from megacpp_compile.frontend.tensor_subclasses import LINEARS
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import is_reshape
from megacpp_compile.fx.walks import reached
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.linear import Linear, match_linear, match_projection
from megacpp_compile.matchers.low_rank import Adapted
from megacpp_compile.matchers.rms_norm import RmsNorm, match_rms_norm
from megacpp_compile.matchers.views import cut_from, is_cast, is_outer_view
from megacpp_compile.passes._rewrites.latent import Latent, is_residual, latent_of
from megacpp_compile.passes._rewrites.norm import depends
from megacpp_compile.reader.links import through

# What a normalisation may be made of, by the name of the op.
_ARITHMETIC = frozenset(
    {
        "mul", "div", "add", "sub", "rsub", "pow", "square", "abs", "mean", "sum", "var", "rsqrt", "sqrt", "reciprocal",
        "clamp", "clamp_min", "maximum", "rms_norm", "layer_norm", "native_layer_norm", "group_norm", "getitem",
        "linalg_vector_norm", "norm", "detach", "expand", "expand_as", "squeeze", "unsqueeze", "flatten", "unflatten",
    }
)  # fmt: skip
_STEPS = 32  # nodes of one normalisation


def after_a_latent(source: Node, up: Linear) -> bool:
    """Whether `source`, which `up` projects, is some normalisation of a latent, and no residual stream."""
    def inner(nodes: Iterable[Node]) -> list[Node]:
        return [n for n in nodes if n.op == "call_function" and not any(map(is_residual, n.users))]

    def latent_at(node: Node) -> Latent | None:
        return latent_of(node) if isinstance(value(node), torch.Tensor) and value(node).dim() else None

    def made_of(node: Node) -> list[Node]:
        seen = _name(node) in _ARITHMETIC and not is_residual(node) or is_cast(node) or is_reshape(node)
        return inner(node.all_input_nodes) if seen and latent_at(node) is None else []

    found = map(latent_at, itertools.islice(reached(inner([source]), made_of), _STEPS))
    return any(latent is not None and latent.narrows(up) for latent in found)


def beside_no_path(norm: RmsNorm, up: Linear) -> MatchFailure | None:
    """Why a norm of what was nearly a latent is none: its down-projection, which is narrow, is multiplied by a tensor
    or added to what is no low-rank path (DoRA, a gate).

    Whatever is added comes from what the down-projection reads. So no residual does, to which an MLP's output is added.
    """
    node = through(norm.x, cut_from, is_outer_view, is_cast)
    stack, seen, sums = [node], set[Node](), list[Node]()
    width = value(node).shape[-1]
    while stack and len(seen) < _STEPS:
        step = stack.pop()
        if step in seen or step.op != "call_function":
            continue
        seen.add(step)
        linear = match_linear(step)
        if linear is not None and step is not node and linear.out_features == width:
            latent = Latent(Adapted(step, linear, (), frozenset()), 0, value(norm.x).shape[-1], [])
            # The first of the graph, which a residual stream is made of, is told the soonest.
            added, x = sorted({a for s in sums for a in s.all_input_nodes}), {linear.x}
            if latent.narrows(up) and all(depends(a, x) for a in added):
                why = "stands between the down-projection and the norm, and is no sum with low-rank paths"
                return MatchFailure(node, "no-path", f"{node.name} {why}")
        elif _name(step) in ("mul", "div", "add", "sub") or is_cast(step):
            sums += [step] if is_residual(step) else []
            stack += [a for a in step.args[:2] if isinstance(a, Node)]
    return None


def unmatched_latents(view: GraphView, seen: set[Node]) -> Iterator[MatchFailure]:
    """Norms of a latent that reach their up-projection only through something else."""
    for node in view.graph.nodes:
        if node.target not in (aten.rms_norm.default, aten.rsqrt.default):
            continue
        norm = _norm_at(node)
        if norm is None or norm.node in seen or (latent := latent_of(norm.x)) is None:
            continue
        step = norm.node
        for _ in range(3):
            if len(step.users) != 1 or is_residual(step := next(iter(step.users))):
                break
            if step.target in LINEARS:  # captured as it was written, so on DTensors
                if latent.narrows(Linear(step, step.args[0], step.args[1], None)):  # type: ignore[arg-type]
                    why = "its input's gradient is summed over ranks before the norm's backward"
                    yield MatchFailure(step, "dtensor", f"the up-projection is {described(step)}: {why}")
                break
            ups = [up for up in map(match_projection, (step, *step.users)) if up is not None]
            if ups:
                blocker = next(iter(norm.node.users))
                if any(map(latent.narrows, ups)):
                    reason = f"{blocker.name} stands between the norm and the up-projection"
                    yield MatchFailure(blocker, "no-up", reason)
                break


def _norm_at(node: Node) -> RmsNorm | None:
    """The norm whose root is `node`, up to its last multiplication."""
    for _ in range(4):
        above = next((u for u in node.users if isinstance(match_rms_norm(u), RmsNorm)), None)
        if above is None:
            break
        node = above
    norm = match_rms_norm(node)
    return norm if isinstance(norm, RmsNorm) else None


def _name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", "")
