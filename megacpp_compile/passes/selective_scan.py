"""Mamba-1's selective scan of all tokens at once, by an associative scan, as transformers has it when it is compiled.

Before: `a = exp(dt A); b = dt u B; _, s = associative_scan(combine, (a, b), dim); y = (s @ C[..., None])[..., 0]`, as
        the tree of slices, products and sums that Dynamo makes of it
After:  `y, final_state, states = megacpp.selective_scan(u, dt, A, B, C, None, None, ...)`

Safe because the tree is run beside the recurrence at its number of tokens (`matchers/associative_scans.py`), and what
makes decays, inputs and results beside these (`matchers/selective_scans.py`); the op computes in float32 or better. As
a loop over tokens it is `token_loop`'s.
Refused: states that are read otherwise than by C and as the last of them, other operands, parts under different grad or
autocast modes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.selective_scans import SelectiveScan, find_selective_scans
from megacpp_compile.passes import token_loop
from megacpp_compile.passes._rewrites.arrange import Groups, arrange, recurrence
from megacpp_compile.passes._rule import Match, decided

name = "selective_scan"
op = "megacpp::selective_scan"
after: tuple[str, ...] = ("token_loop",)


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    yield from decided(find_selective_scans(view.graph), partial(_check, view))


def _check(view: GraphView, found: SelectiveScan) -> Match | MatchFailure:
    def emit(build: Builder) -> tuple[Node, Groups, Groups]:
        b, t, d, n = (tuple(part) for part in (found.b, found.t, found.d, found.n))
        dims = {"u": (b, t, d), "dt": (b, t, d), "A": (d, n), "B": (b, t, n), "C": (b, t, n)}
        operands = [arrange(build, found.operands[role], target) for role, target in dims.items()]
        chunk, dtype = token_loop.SELECTIVE_CHUNK, value(found.y.node).dtype
        node = build(torch.ops.megacpp.selective_scan.default, *operands, None, None, chunk, dtype)
        return node, (b, t, d), (b, d, n)

    return recurrence(view, found.operands.values(), found.inside, found.y, found.finals, emit)
