"""What every op keeps, asserted alike for each: it is its formula, outputs and gradients, and what it keeps for
backward. Registration, and what autocast is to an op, is `test_registration.py`, of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from . import addresses, relative_error, saved_by
from .agreement import tensors_of

Args = Sequence[Any]
Function = Callable[..., Any]


def tolerances(double: float, single: float, half: float) -> pytest.MarkDecorator:
    """Dtypes, and how far off results in them may be."""
    sets = [(torch.float64, double), (torch.float32, single), (torch.bfloat16, half)]
    return pytest.mark.parametrize(("dtype", "tolerance"), sets, ids=str)


def leaves(args: Args) -> list[Tensor]:
    """The tensors that ask for a gradient, those in lists among them."""
    return [t for t in tensors_of(args) if t.requires_grad]


def detached(args: Args) -> tuple[Any, ...]:
    return tuple(tree_map_only(Tensor, Tensor.detach, args))


def as_leaves(args: Args) -> tuple[Any, ...]:
    """`args`, all of floating point of which ask for a gradient."""
    return tuple(tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), args))


def widened(args: Args) -> tuple[Any, ...]:
    """Equal numbers in float64, leaves again where they were leaves, and float64 as any dtype among the arguments."""

    def wide(t: Tensor) -> Tensor:
        return t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t

    return tuple(torch.float64 if isinstance(a, torch.dtype) else a for a in tree_map_only(Tensor, wide, args))


def seeds_for(rand: Any, function: Function, args: Args, outputs: int, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Cotangents of the first `outputs` results."""
    with torch.no_grad():
        return [rand(*t.shape, dtype=dtype) for t in tensors_of(function(*args))[:outputs]]


def differentiate(function: Function, args: Args, seeds: Sequence[Tensor], results: int | None = None) -> list[Tensor]:
    """The first results of `function(*args)`, as many as `seeds` or `results`, and gradients of all leaves against the
    cotangents `seeds`; zeros of those that nothing depends on."""
    outs = tensors_of(function(*args))
    loss = sum((out * seed.to(out)).sum() for out, seed in zip(outs, seeds, strict=False))
    grads = torch.autograd.grad(loss, leaves(args), allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
    return [*outs[: len(seeds) if results is None else results], *grads]


def agree(got: Iterable[Tensor], want: Iterable[Tensor], tolerance: float = 1e-14) -> None:
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert relative_error(g, w) < tolerance, i


def identical(got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(g, w), i


def assert_is(function: Function, formula: Function, rand: Any, args: Args, tolerance: float, outputs: int = 1,
              results: int | None = None, dtype: torch.dtype | None = None) -> list[Tensor]:  # fmt: skip
    """Results and gradients are those of `formula`, which sees the same numbers in float64: rounding alone is between
    them. outputs: how many results have gradients; results: how many there are to compare. Gradients have their
    operands' dtypes. dtype: of the cotangents, float64 without."""
    seeds = seeds_for(rand, function, args, outputs, dtype)
    got = differentiate(function, args, seeds, results)
    agree(got, differentiate(formula, widened(args), seeds, results), tolerance)
    given = leaves(args)
    assert [t.dtype for t in got[len(got) - len(given) :]] == [t.dtype for t in given]
    return got


def gradcheck(function: Function, args: Args, **how: Any) -> None:
    """By all leaves among `args`, those in lists too, of all results that have a gradient."""
    flat, spec = tree_flatten(tuple(args))
    places = [i for i, a in enumerate(flat) if isinstance(a, Tensor) and a.requires_grad]

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        of = dict(zip(places, given, strict=True))
        return tuple(tensors_of(function(*tree_unflatten([of.get(i, a) for i, a in enumerate(flat)], spec))))

    assert torch.autograd.gradcheck(call, [flat[i] for i in places], **how)


def assert_unread(function: Function, formula: Function, args: Args, used: int) -> None:
    """Gradients are right where `used` is the only result that is read."""
    outs = (tensors_of(f(*args))[used].square().sum() for f in (function, formula))
    found = (torch.autograd.grad(out, leaves(args), allow_unused=True, materialize_grads=True) for out in outs)
    torch.testing.assert_close(*found)


def assert_keeps(function: Function, args: Args, kept: Sequence[Any], *results: int) -> list[Tensor]:
    """Of its operands `kept` are what backward keeps, and of the results these, which have no gradient of their own."""
    made: list[Any] = []
    found = saved_by(lambda: made.append(function(*args)))
    outs = tensors_of(made)
    assert found == addresses(*tensors_of(kept), *(outs[i] for i in results))
    return outs
