"""Routed experts (arXiv:1701.06538) -> one op that sorts tokens by expert.

Before: `for e in range(E): t, j = torch.where(indices == e); y.index_add_(0, t, expert_e(x[t]) * gates[t, j, None])`
        or every choice's row times `w[indices]` (bmm, einsum), or sorted rows through grouped GEMMs, summed over
        choices; or all experts on all tokens, weighted by a matrix of gates that is zero but for the chosen,
        where rows may be read and added to by numbers that count up (Llama 4); or all experts' rows, joined by `cat`
        and added up at once.
        Tokens are [T] or [B, S]; gates may multiply what experts read instead of their outputs (Llama 4), or the sum
        where a token has one choice, or be missing, which is as if they were 1. Experts may
        have biases, in float32 beside GEMMs in 16 bits too, clamps, swish and channels of gate and up in turn (gpt-oss)
After:  `y = megacpp.moe(x, indices, gates, w_gate, w_up, w_down, activation, layout, dtype)`, where a precision plan
        has the layer in "fp8_current" `(.., dtype, True, "fp8_current")`, see `_rewrites/`, and with biases
        `(.., dtype, True, precision, b_gate, b_up, b_down)`

Before: `h = act(grouped_mm(rows, w_up.mT, offs=ends)); grouped_mm(h, w_down.mT, offs=ends)` of rows that come sorted by
        expert and leave so, as behind the dispatch of expert parallelism, wherever a layer is not whole
After:  `megacpp.moe_sorted(rows, ends, w_gate, w_up, w_down, activation, layout, ..)`

Safe because each slot (token, choice) is in exactly one expert's rows, and the sum over slots is the same sum; the pass
leaves the router, which computes indices and gates, as it is. A gate on the input does not commute with the activation:
it stays a product in front of the op, whose own gates are ones; experts that were not chosen make zeros of zeros, but
not those with biases. Sorted rows keep their order and their ends, whatever these are; padding behind the last end,
which the plain code leaves unwritten, becomes zeros.
Refused: experts that differ or repeat, other activations, clamps by what is no number, biases that are no expert's own
or wider than what they are added to (but float32 beside 16 bits), rows or outputs that escape, a token written rather
than added to where it may come twice, low-rank paths beside projections (LoRA; weights that are added up fuse), gates
of which all may differ from zero; and with the tag `unread`, experts' weights in GEMMs that no matcher knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megacpp_compile.matchers import moe
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.passes._rewrites.experts import to_match
from megacpp_compile.passes._rule import Match, decided

name = "moe"
op = "megacpp::moe"
after: tuple[str, ...] = ()


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    yield from decided(moe.find(view), partial(to_match, view))
