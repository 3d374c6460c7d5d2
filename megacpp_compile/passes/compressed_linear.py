"""Linears that save a random projection of their input for their weights' gradients (CompAct, arXiv:2410.15352).

Before: `y = linear(x, w, b)`, in any spelling, and others of the same x
After:  `[y], z = megacpp.compressed_linear(x, [w], [b], draw, rank, seed)`, once for all linears that read x

Outputs, and gradients of x and b, stay what they are. Gradients of weights become estimates, without bias and with
much noise: this pass does nothing unless the option `compress` names linears. The projection is made from the option's
seed and the name of the first of these linears; under `redraw="update"` also from `draw`, the sum of the bits of its
weight, which changes with each update and with nothing else: a second run of the forward makes the same one.
Of use where backward reads x for nothing else (`activation_lifetime`). Refused: what any other op that may keep it
reads, a linear that is not named included; an input of the frame, a result of it, or of an op that keeps its own
results (a ReLU, an attention); linears in regions of `torch.utils.checkpoint`, and those that another pass took,
float8's included, as that keeps less of x already; routers, embeddings, heads, norms and LoRA's paths; frozen weights;
linears of one x through several views or in several dtypes. A policy that recomputes x is an error
(`remat/conflicts.py`). Without gradients nothing is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.config.compression import CompressionPlan
from megacpp_compile.config.globs import inside_segment
from megacpp_compile.config.precision import exclusion_of
from megacpp_compile.config.rules import role_at
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.provenance import module_fqn
from megacpp_compile.fx.sizes import nbytes, rows
from megacpp_compile.lowerings._sum_gradient import sum_gradient
from megacpp_compile.lowerings._traits import name_of, traits_of
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.linear import Linear, match_linear
from megacpp_compile.passes._rewrites.activation_lifetime import saved_elsewhere, storage_owner
from megacpp_compile.passes._rule import Match, in_other_modes
from megacpp_compile.reader.links import chain

name = "compressed_linear"
op = "megacpp::compressed_linear"
after = ("down_norm_up", "gated_linear_attention", "norm_linear")  # whatever else takes a linear has more to gain

_ROLES = ("router", "embedding", "head", "norm")
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    plan = view.config.compress
    if plan is None:
        return
    readers: dict[Node, list[Linear]] = {}  # by the memory that they read
    for node in view.graph.nodes:
        if not view.has_backward(node) or not plan.hits(fqn := module_fqn(node)):
            continue
        linear = match_linear(node)
        if linear is not None:
            refusal = _refusal(view, linear, fqn)
            if refusal is None:
                readers.setdefault(storage_owner(linear.x), []).append(linear)
            else:
                yield refusal
        elif name_of(node).startswith("megacpp::") and traits_of(node).gemm and name_of(node) != op:
            yield MatchFailure(node, "taken", f"{name_of(node)} has it, and keeps less of its input already")
    for linears in readers.values():
        yield _check(view, plan, linears)


@or_failure
def _refusal(view: GraphView, linear: Linear, fqn: str) -> MatchFailure | None:
    """Why one linear by itself stays as it is."""
    node, role = linear.node, role_at(linear.node)
    word = "lora" if inside_segment("lora", fqn) else exclusion_of(fqn)
    if role in _ROLES or word:
        return MatchFailure(node, "role", f"compress leaves alone what is {f'named {word!r}' if word else f'a {role}'}")
    refuse_if(
        not view.has_backward(linear.w), node, "frozen", "its weight is not trained, so backward keeps no input for it"
    )
    refuse_if(
        "ac_graph_id" in node.meta,
        node, "checkpointed", "torch.utils.checkpoint recomputes its input, which is not saved",
    )
    refuse_if(
        value(linear.x).dim() < 2 or not isinstance(value(linear.x).shape[-1], int),
        node, "shape", "its input is a single vector, or of a width that is known at run time only",
    )
    return None


@or_failure
def _check(view: GraphView, plan: CompressionPlan, linears: list[Linear]) -> Match | MatchFailure:
    first = linears[0]
    x, root, dtype = first.x, first.node, value(first.node).dtype
    groups: tuple[Any, ...] = ()
    if any(linear.x is not x for linear in linears):  # of one value whose gradient is summed alike it is summed once
        x, groups = _unsummed(x)
        refuse_if(
            any(_unsummed(linear.x) != (x, groups) for linear in linears),
            root, "views", "the linears that read its input do so through several views of it",
        )
    refuse_if(
        any(value(linear.node).dtype != dtype for linear in linears),
        root, "dtype", "the linears that read its input compute in several dtypes",
    )
    refuse_if(
        len({linear.b is None for linear in linears}) > 1,
        root, "bias", "of the linears that read its input only some have a bias",
    )
    outputs = [linear.node for linear in linears]
    refusal = in_other_modes(view, outputs, root) or saved_elsewhere(view, x, outputs)
    if refusal is not None:
        return refusal if refusal.tag == "region" else MatchFailure(root, refusal.tag, refusal.reason)
    width = value(x).shape[-1]
    rank = plan.rank(width)
    refuse_if(
        rows(value(x)) * rank * dtype.itemsize > nbytes(value(storage_owner(x))),
        root, "expanded", "its input is a smaller value, repeated",
    )
    operands = (t for linear in linears for t in (linear.w, linear.b) if t is not None)
    inputs = list(dict.fromkeys([x, *operands]))
    fqn = module_fqn(root)
    note = f"{rank} of {width} channels kept; weight gradients approximate; projection from {plan.rule()}"
    return Match(
        root, inputs, outputs, lambda build: _rewrite(build, plan, linears, x, groups, rank, fqn), note=note,
        estimated=dict.fromkeys((linear.w for linear in linears), rank),
        # Else a cast for the GEMM dies, and counts by itself.
        freed_activation=storage_owner(x) if value(x).dtype == dtype else None,
    )  # fmt: skip


def _unsummed(x: Node) -> tuple[Node, tuple[Any, ...]]:
    """(the value that `x` is, the groups of ranks that its gradient is summed over, the last one first)."""
    *sums, x = chain(x, {sum_gradient})
    return x, tuple(n.args[1] for n in sums)


def _rewrite(
    build: Builder, plan: CompressionPlan, linears: list[Linear], x: Node, groups: tuple[Any, ...], rank: int, fqn: str
) -> tuple[Node, list[Node]]:
    """x: what the linears read, but for sums of its gradient over `groups`, the last one first."""
    first, dtype = linears[0], value(linears[0].node).dtype
    draw = None
    if plan.redraw == "update":
        # A copy, which is fused away: torch_xla's bridge loses programs that view an input in another dtype (2.9).
        plain = build(aten.clone.default, build(aten.detach.default, first.w))
        bits = build(aten.view.dtype, plain, _BITS[value(plain).dtype.itemsize])
        draw = build(aten.sum.default, bits)  # of integers, so the same in any order
    for group in reversed(groups):
        x = build(sum_gradient, x, group)
    x, weights = build.cast(x, dtype), [linear.weight(build) for linear in linears]
    biases = [build.cast(linear.b, dtype) for linear in linears if linear.b is not None]
    node = build(torch.ops.megacpp.compressed_linear.default, x, weights, biases, draw, rank, plan.key(fqn))
    made = build.item(node, 0)
    return node, [build.item(made, i) for i in range(len(linears))]
