"""Pre-norm -> the projection(s) that alone read it: QKV, an MLP's gate and up, a mixer's input projection.

Before: `h = rms_norm(x, w_norm); q, k, v = linear(h, w_q), linear(h, w_k), linear(h, w_v)`
After:  `[q, k, v], rrms = megacpp.norm_linear(x, w_norm, [w_q, w_k, w_v], [], eps)`

Safe because the op computes the same function in at least the same precision, and only the projections read the normed
value: backward recomputes it from x, which the residual stream keeps alive anyway, and from one number a token.
Refused: another norm, a normed value or statistic that escapes (into a router, a residual, an op that an earlier pass
made), projections in different dtypes or only some with a bias, parts under different grad or autocast modes, and any
norm under a remat policy, which recomputes norms by itself.

Off unless `passes={"norm_linear": True}`: backward reads x once more, and little memory is saved. Of two blocks of a
norm and three projections, Inductor kept nine values of x's size without this pass and eight with it. Four Mamba-2
mixers behind norms take 1.007 of the time and 0.96 of the peak with it (docs/kernels.md, norm_linear). The reference is
the op's lowering on CUDA, too: a kernel of Inductor's in front of cuBLAS' GEMM. A Triton GEMM that
could have the norm in its prologue is no faster than torch's without one (docs/kernels.md, down_norm_up).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, place, value
from megacpp_compile.matchers._match import MatchFailure, or_failure, or_refuse, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.linear import Linear, match_projection
from megacpp_compile.matchers.rms_norm import RmsNorm
from megacpp_compile.matchers.views import consumers, replay
from megacpp_compile.passes._rewrites.norm import between, depends, gain_of, norm_before, projections, refuse_escapes
from megacpp_compile.passes._rule import Match, in_other_modes

name = "norm_linear"
op = "megacpp::norm_linear"
after = ("causal_conv1d", "down_norm_up", "gated_delta_rule", "gated_rms_norm", "hyper_connection", "linear",
         "linear_cross_entropy", "mla_rope_q", "mla_rope_kv", "moe", "rope_qk", "ssd_scan")  # fmt: skip
by_default = False


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    done: set[Node] = set()
    for node in view.graph.nodes:
        linear = match_projection(node)
        if linear is None or node in done:
            continue
        _, norm = norm_before(linear)
        if isinstance(norm, MatchFailure):
            yield norm
        elif norm is not None:
            done.update(user for user, _, _ in consumers(norm.node, between))
            yield _check(view, norm)


@or_failure
def _check(view: GraphView, norm: RmsNorm) -> Match | MatchFailure:
    refuse_if(
        view.config.own_policy is not None, norm.node, "policy", "under a policy backward recomputes the norm as it is"
    )
    readers = projections(norm)
    refuse_escapes(norm)
    linears = [linear for linear, _ in readers]
    refuse_if(value(norm.x).dim() < 2, norm.x, "rank", "a single vector has no tokens")
    first, dtypes = linears[0].node, {value(n.node).dtype for n in linears}
    refuse_if(len(dtypes) > 1, first, "dtype", "the projections run in different dtypes")
    refuse_if(len({n.b is None for n in linears}) > 1, first, "bias", "only some of the projections have a bias")
    or_refuse(in_other_modes(view, (*norm.internal, *(n.node for n in linears)), norm.node))
    inputs = list(dict.fromkeys([norm.x, *norm.gains, *(w for n in linears for w in (n.w, n.b) if w is not None)]))
    refuse_if(
        any(depends(i, norm.internal) for i in inputs if i is not norm.x),
        norm.node, "feedback", "a weight or gain is computed from the normed value itself",
    )
    outputs = [n.node for n in linears]
    refuse_if(
        place(inputs, outputs, norm.node, view.mode_states) is None,
        norm.node, "region", "a weight is computed under another grad or autocast mode",
    )
    return Match(outputs[0], inputs, outputs, lambda build: _rewrite(build, norm, readers))


def _rewrite(build: Builder, norm: RmsNorm, readers: list[tuple[Linear, list[Node]]]) -> tuple[Node, list[Node]]:
    weights = [linear.weight(build) for linear, _ in readers]
    biases = [build.cast(n.b, value(n.node).dtype) for n, _ in readers if n.b is not None]
    gain = gain_of(build, norm)
    node = build(torch.ops.megacpp.norm_linear.default, norm.x, gain, weights, biases, float(norm.eps))
    projected = build.item(node, 0)
    new = [replay(build, chain, build.item(projected, i)) for i, (_, chain) in enumerate(readers)]
    return node, [linear.shaped(build, out) for (linear, _), out in zip(readers, new, strict=True)]
