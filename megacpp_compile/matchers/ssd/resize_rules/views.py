"""Views and repetitions."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx import short_loops
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import (
    COMPOSITE_PERMUTATIONS,
    EXPANSIONS,
    FOLDS,
    PERMUTATIONS,
    REPETITIONS,
    RESHAPES,
    UNIT_DIMS,
)
from megacpp_compile.matchers.ssd.atoms import Dim, NoAxes, flat, fresh, is_one
from megacpp_compile.matchers.ssd.tensor_ops import ResizeContext, rule_table, run_reshape
from megacpp_compile.reader.dims import permutation, permuted, repetition

RULES, rule = rule_table()


@rule(*RESHAPES, *FOLDS, run=run_reshape)
def _view(r: ResizeContext, n: Node) -> list[Dim]:
    return r.axes.regroup(r.dims[n.args[0]], value(n).shape)


def _permuted(r: ResizeContext, n: Node, args: tuple[Any, ...]) -> Tensor:
    return args[0].permute(permutation(n) or [])


@rule(*PERMUTATIONS, *COMPOSITE_PERMUTATIONS - {aten.numpy_T.default}, run=_permuted)
def _permute(r: ResizeContext, n: Node) -> list[Dim]:
    return permuted(n, r.dims[n.args[0]])


@rule(*UNIT_DIMS, run=run_reshape)
def _unit_dims(r: ResizeContext, n: Node) -> list[Dim]:
    source = [d for d in r.dims[n.args[0]] if flat(d)]
    it = iter(source)
    return [[] if is_one(s) else next(it) for s in value(n).shape]


def _repeated(r: ResizeContext, n: Node, args: tuple[Any, ...]) -> Tensor:
    have, want = args[0].shape, r.shape(r.dims[n])
    have = [1] * (len(want) - len(have)) + list(have)
    times = [w // h for h, w in zip(have, want, strict=True)]
    if n.target is not aten.repeat_interleave.self_int:
        return args[0].repeat(times)
    out = args[0]
    for dim, count in enumerate(times):
        out = out.repeat_interleave(count, dim) if count > 1 else out
    return out


@rule(*EXPANSIONS, *REPETITIONS, run=_repeated)
def _repeat(r: ResizeContext, n: Node) -> list[Dim]:
    times, inside = NoAxes.unless(repetition(n), "a repetition of all elements")
    dims = r.dims[n.args[0]]
    dims = [*([[]] * (len(times) - len(dims))), *dims]
    fixed = n.target in EXPANSIONS or all(isinstance(count, int) for count in times)
    NoAxes.when(not fixed, "a repetition of symbolic size")
    return [[*d, *fresh(count)] if inside else [*fresh(count), *d] for d, count in zip(dims, times, strict=True)]


def _as_it_is(r: ResizeContext, n: Node, args: tuple[Any, ...]) -> Tensor:
    return args[0]  # type: ignore[no-any-return]


@rule(*short_loops.MARKS, run=_as_it_is)
def _part_of_loop(r: ResizeContext, n: Node) -> list[Dim]:
    dims, dim = list(r.dims[n.args[0]]), n.args[1]
    if dim >= 0 and flat(dims[dim]):  # type: ignore[operator]
        other = fresh(value(n).shape[dim])
        one = (other, dims[dim]) if n.target is short_loops.shortened else (dims[dim], other)  # type: ignore[index]
        r.axes.stands_for(*one)
        dims[dim] = other  # type: ignore[index]
    return dims
