"""Routed experts (arXiv:1701.06538) -> one op that sorts tokens by expert.

Before: `for e in range(E): t, j = torch.where(indices == e); y.index_add_(0, t, expert_e(x[t]) * gates[t, j, None])`
        or every choice's row times `w[indices]` (bmm, einsum), or sorted rows through grouped products, summed over
        choices; or all experts on all tokens, weighted by a matrix of gates that is zero but for the chosen.
        Tokens are [T] or [B, S]; gates may multiply what experts read instead of what they make (Llama 4)
After:  `y = megacpp.moe(x, indices, gates, w_gate, w_up, w_down, activation, layout, dtype)`, and where a precision
        plan has the layer in "fp8_current" `(.., dtype, True, "fp8_current")`, see `_moe_precision`

Safe because each slot (token, choice) is in exactly one expert's rows, and the sum over slots is the same sum; the
router's own mathematics, which makes indices and gates, is not touched. A gate is no factor behind an activation: one
on the input is multiplied there, and the op's own gates are ones; experts that were not chosen make zeros of zeros.
Refused: experts that differ or repeat, a missing gate, biases, clamps and other activations (gpt-oss), rows or outputs
that escape, a token written rather than added to where it may come twice, gates of which all may differ from zero; and
with the tag `unread`, experts' weights that are multiplied in a form none of this is about.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe import dense, grouped, loop, sorted_tokens, unread
from megacpp_compile.passes._rule import Match

aten = torch.ops.aten
_FOUND = (aten.nonzero.default, aten.nonzero_numpy.default, aten.where.default)
_COUNTS = (aten.sum.dim_IntList, aten.sum.default, aten.any.dim, aten.any.dims, aten.bincount.default,
           aten.histc.default)  # fmt: skip
_ADVICE = "a loop over the experts that were hit breaks the graph; write `for e in range(num_experts):` instead"

name = "moe"
op = "megacpp::moe"
after: tuple[str, ...] = ()


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    found: list[Match | MatchFailure] = []
    for way in (loop.find, dense.find, grouped.find, sorted_tokens.find, _hit_lists):
        found += way(view)
    yield from found
    yield from unread.find(view, found, loop.unweighted(view))


def _hit_lists(view: GraphView) -> Iterator[MatchFailure]:
    """A list of the experts that were chosen at all: who loops over it breaks the graph, in every iteration."""
    for node in view.graph.nodes:
        if node.target not in _FOUND or len(node.args) != 1:
            continue
        step, counted = node.args[0], False
        for _ in range(8):
            if not isinstance(step, Node) or step.op != "call_function" or not step.args:
                break
            counted = counted or step.target in _COUNTS
            if counted and step.target in (aten.one_hot.default, aten.bincount.default, aten.histc.default):
                yield MatchFailure(node, "loop-over-data", _ADVICE)
                break
            step = step.args[0]
