"""The gated delta rule in chunks: DeltaNet, Gated DeltaNet (arXiv:2412.06464), Kimi Delta Attention (arXiv:2510.26692).

Before: within chunks `T = (I + tril(beta k k^T * decays, -1))^-1`, by rows, a solve or a series, `u = T (beta v)`,
        `w = T (beta k * decays)`; from chunk to chunk `new = u - w S`, `o = q S + (q k^T * decays) new`,
        `S = S * decay + k^T new`; l2 norms, padding, repeated heads, a scale; in any spelling
After:  `o, final_state, ... = megacpp.gated_delta_rule(q, k, v, g, beta, state, None, scale, eps, chunk, ...)`

Safe because the matcher (`matchers/delta_rule/`) runs the subgraph at small sizes on random operands in float64 and
compares it with the recurrence that the op computes. Operands are read before they are normed, cast, repeated for the
heads of a group, or padded; what makes gates and weights (softplus, sigmoid) stays in front of the op.
Refused: other recurrences that correct a state, intermediates used elsewhere, parts under different grad or autocast
modes, spellings with ops whose sizes can't be told.
A single token, as in decoding, stays plain and is no near miss: it reads and writes the state, of which Inductor makes
two kernels, and the op would do no less. One that is padded to a chunk becomes the op.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.delta_rule.rule import DeltaRule, find_delta_rules
from megacpp_compile.matchers.documents import compared_documents
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.recurrences import single_steps
from megacpp_compile.matchers.ssd.atoms import flat
from megacpp_compile.passes._rewrites.arrange import Groups, arrange, gated_chunk_size, leading, recurrence
from megacpp_compile.passes._rule import Match, Recognised

name = "gated_delta_rule"
op = "megacpp::gated_delta_rule"
after: tuple[str, ...] = ("token_loop",)  # a loop of few tokens is also one of chunks
ONE_TOKEN = "one token of a delta rule"
DOCUMENTS = (
    "documents", "what integers are equal, as packed documents' are, masks it: gates of -1e4 where one begins are taken"
)  # fmt: skip


def find(view: GraphView) -> Iterator[Match | MatchFailure | Recognised]:
    seen = set[Node]()
    for found in find_delta_rules(view.graph):
        if not isinstance(found, DeltaRule):
            told = compared_documents(found.node)
            yield MatchFailure(found.node, *(DOCUMENTS if told is not None else (found.tag, found.reason)))
        elif found.axes.t or found.chunk:
            yield _check(view, found)
        else:
            seen |= found.inside
            yield Recognised(found.o.node, ONE_TOKEN)
    for step in single_steps(view.graph.nodes):
        if step not in seen:
            yield Recognised(step, ONE_TOKEN)


def _check(view: GraphView, rule: DeltaRule) -> Match | MatchFailure:
    def emit(build: Builder) -> tuple[Node, Groups, Groups]:
        x = rule.axes
        b, t, h, k, v = (tuple(flat(d)) for d in (x.b, x.t, x.h, x.k, x.v))
        groups = leading([rule.operands["q"], rule.operands["k"]], h)
        channels = "g" in rule.operands and bool({a for d in rule.operands["g"].dims for a in d} & set(k))
        targets = {
            "q": (b, t, groups, k), "k": (b, t, groups, k), "v": (b, t, h, v),
            "g": (b, t, h, k) if channels else (b, t, h), "beta": (b, t, h), "initial_state": (b, h, k, v),
        }  # fmt: skip
        args: list[Any] = [
            arrange(build, rule.operands[role], target) if role in rule.operands else None
            for role, target in targets.items()
        ]
        node = build(
            torch.ops.megacpp.gated_delta_rule.default, *args, None, rule.scale, rule.qk_norm_eps,
            gated_chunk_size(rule.chunk), value(rule.o.node).dtype,
        )  # fmt: skip
        return node, (b, t, h, v), (b, h, k, v)

    return recurrence(view, rule.operands.values(), rule.inside, rule.o, rule.final_states, emit)
