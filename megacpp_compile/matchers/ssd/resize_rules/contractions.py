"""Sums and products over dimensions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.matchers.ssd.atoms import Dim, NoAxes, flat
from megacpp_compile.matchers.ssd.tensor_ops import ResizeContext, broadcast, rule_table
from megacpp_compile.reader.dims import reduced_dims

RULES, rule = rule_table()


@rule(aten.sum.dim_IntList)
def _sum(r: ResizeContext, n: Node) -> list[Dim]:
    dims = r.dims[n.args[0]]
    NoAxes.when(not n.args[1], "a sum of everything")
    gone, keep = reduced_dims(n)
    return [[] if i in gone else d for i, d in enumerate(dims) if keep or i not in gone]


@rule(aten.cumsum.default)
def _cumsum(r: ResizeContext, n: Node) -> list[Dim]:
    return r.dims[n.args[0]]


@rule(aten.flip.default)
def _flip(r: ResizeContext, n: Node) -> list[Dim]:
    return r.dims[n.args[0]]


@rule(aten.matmul.default, aten.bmm.default, aten.mm.default)
def _matmul(r: ResizeContext, n: Node) -> list[Dim]:
    a, b = (r.dims[x] for x in n.args[:2])
    left, right = ([[], *a] if len(a) == 1 else a), ([*b, []] if len(b) == 1 else b)
    r.axes.same(left[-1], right[-2])
    out = [*broadcast(r, [left[:-2], right[:-2]]), *([left[-2]] if len(a) > 1 else []),
           *([right[-1]] if len(b) > 1 else [])] if len(left) > 2 or len(right) > 2 else [  # fmt: skip
        *([left[-2]] if len(a) > 1 else []), *([right[-1]] if len(b) > 1 else [])]  # fmt: skip
    return out


def _run_einsum(r: ResizeContext, n: Node, args: tuple[Any, ...]) -> Tensor:
    return torch.einsum(args[0], *args[1])


@rule(aten.einsum.default, run=_run_einsum)
def _einsum(r: ResizeContext, n: Node) -> list[Dim]:
    equation, operands = str(n.args[0]).replace(" ", ""), [r.dims[a] for a in n.args[1]]  # type: ignore[union-attr]
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    NoAxes.when(not arrow, "an einsum without an output")
    letters: dict[str, Dim] = {}
    dots: list[list[Dim]] = []

    def meet(letter: str, dim: Dim) -> None:
        if not flat(letters.setdefault(letter, dim)):
            letters[letter] = dim
        elif flat(dim):
            r.axes.same(letters[letter], dim)

    for term, dims in zip(terms, operands, strict=True):
        before, ellipsis, after = term.partition("...")
        count = len(dims) - len(before) - len(after)
        for letter, dim in zip(before, dims, strict=False):
            meet(letter, dim)
        for letter, dim in zip(after, dims[len(dims) - len(after) :], strict=True):
            meet(letter, dim)
        if ellipsis:
            dots.append(dims[len(before) : len(before) + count])
    before, ellipsis, after = output.partition("...")
    middle = broadcast(r, dots) if ellipsis and dots else []
    return [*(letters[c] for c in before), *middle, *(letters[c] for c in after)]
