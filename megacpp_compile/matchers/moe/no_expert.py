"""Why what is weighted is no expert's output, and the nodes near it that near misses are reported with."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import called, value
from megacpp_compile.fx.views import COMPOSITE_PERMUTATIONS, PERMUTATIONS, RESHAPES, is_cast
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.moe.gemms import Gemm, match_linear_gemm, strip_row_views
from megacpp_compile.matchers.moe.routing import Mask
from megacpp_compile.matchers.moe.rows import picked, read_at
from megacpp_compile.reader.links import through

aten = torch.ops.aten
_STACKED = {aten.bmm.default, aten.baddbmm.default, aten.matmul.default, aten.einsum.default}
_REARRANGED = RESHAPES | PERMUTATIONS | COMPOSITE_PERMUTATIONS
_NEAR = 24  # nodes to look at
ONE_PROJECTION = "an expert is one projection of its rows: the op computes two with an activation between them"


def one_projection_of_all(outs: list[Node]) -> MatchFailure | None:
    """That `outs` are projections of what all of them read, and nothing more."""
    gemms = [match_linear_gemm(strip_row_views(out)) for out in outs]
    read = {strip_row_views(gemm.x) for gemm in gemms if isinstance(gemm, Gemm)}
    if len(outs) == 1 or len(read) != 1 or not all(isinstance(gemm, Gemm) for gemm in gemms):
        return None
    return MatchFailure(outs[0], "projections", ONE_PROJECTION)


def one_projection_of_rows(out: Node, mask: Mask) -> MatchFailure | None:
    """That `out` is a projection of the rows of `mask`, and nothing more."""
    gemm = match_linear_gemm(out)
    read = read_at(strip_row_views(gemm.x)) if isinstance(gemm, Gemm) else None
    alone = read is not None and picked(read[1]) == mask
    return MatchFailure(out, "projections", ONE_PROJECTION) if alone else None


def multiplies_stacked(node: Node) -> bool:
    """Whether `node` is a product with a weight of all experts."""
    return node.target in _STACKED and any(_is_stack(n) for n in node.all_input_nodes)


def _is_stack(node: Node) -> bool:
    node = through(node, _REARRANGED, is_cast)
    return node.op != "call_function" and value(node).dim() == 3


def changed_rows(first: Node) -> MatchFailure:
    """Why `first`, an expert's first projection, is none of rows: what they go through."""
    rows = [n for n in map(strip_row_views, first.all_input_nodes) if n.op == "call_function" and not _is_stack(n)]
    named = ", ".join(dict.fromkeys(called(n).split(".")[0] for n in rows))
    reason = f"an expert's first projection reads what {named} makes, which is not seen to be rows of tokens"
    return MatchFailure(first, "rows", reason)


def changed_before(out: Node) -> str:
    """Why `out`, which is weighted, is no expert's output: what its last GEMM goes through, if there is one."""
    between, gemms = [out], 0
    for node in between:
        if isinstance(match_linear_gemm(strip_row_views(node)), Gemm):
            gemms += 1
        elif node.op == "call_function" and len(between) < _NEAR:
            between += [n for n in node.all_input_nodes if n not in between]
    changes = [n for n in sorted(between) if n.op == "call_function" and strip_row_views(n) is n]
    own = [n for n in changes if not match_linear_gemm(n)]
    named = dict.fromkeys(str(n.target).removeprefix("aten.").split(".")[0] for n in own)
    if not gemms:
        return "what is weighted is no expert's output"
    if gemms > 1:
        joined = f"what is weighted is made of several projections ({', '.join(named)})"
        return f"{joined}: an expert's output is one, to which only a bias may be added"
    return f"an expert's output goes through {', '.join(named)} before it is weighted: only a bias may be added there"


def computed_from(node: Any) -> list[Node]:
    """`node` and what it is computed from in a few steps, tensors alone."""
    found = [node] if isinstance(node, Node) else []
    for n in found:
        if len(found) < _NEAR and n.op == "call_function":
            found += [m for m in n.all_input_nodes if m not in found]
    return [n for n in found if n.op == "call_function" and isinstance(value(n), torch.Tensor)]
