"""No number, infinities, nothing at all, and sums in half precision: every op, by every lowering that runs here, is held
to what plain code makes of them (`special_values.ENTRIES`).

With `TRITON_INTERPRET=1` kernels run on CPU tensors, with a GPU on it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megacpp_compile.lowerings._op import OUTSIDE_OF_GRAPHS
from megacpp_compile.lowerings._registry import _untaken, semantic_ops

from . import agreement as by
from .agreement import interpreted, lowerings, module_of, on, poisoned_memory, tensors_of
from .cases import CASES, CURVES
from .contract import widened
from .special_values import ENTRIES, Entry, filled

# Of an error in float32, by norm: sums in other orders, some of which cancel.
TOLERANCE = 2e-4


def everywhere(having: str, exact: bool = False) -> list[Any]:
    """(device, folder, entry, lowering) of all that can run here, of entries that have what is called `having`. exact:
    those of ops that round nothing to float8. The interpreter runs Triton's kernels alone, and leaves further calls of
    an op to `make test-all`."""
    found = []
    for device, target in by.places():
        for _, folder, name, lowering in lowerings(target):
            if interpreted() and lowering != "cuda_triton":
                continue
            for label, entry in ENTRIES.items():
                if label.split(" ")[0] == name and getattr(entry, having) and not (exact and entry.tolerance):
                    marks = [pytest.mark.cuda] if device == "cuda" else []
                    if interpreted() and label != next(known for known in ENTRIES if known.split(" ")[0] == name):
                        marks = [pytest.mark.exhaustive]
                    values = device, folder, label, lowering
                    found.append(pytest.param(*values, marks=marks, id="-".join((device, label, lowering))))
    return found


# What stands in the place of what does not count; a kernel goes alike by both, one of which the interpreter tries.
BAD = {"nan": float("nan"), **({} if interpreted() else {"inf": float("inf")})}


def elsewhere(test: Any) -> Any:
    """A test that the interpreter leaves to `make test-all`, as others hold kernels to what rounding amounts to."""
    return pytest.mark.exhaustive(test) if interpreted() else test


@pytest.fixture
def op(monkeypatch, device, folder, label, lowering):
    """The op of an entry with its autograd, by one lowering and, where that refuses, by the reference. A test in which it
    refuses all calls is skipped, with its words."""
    package, name = importlib.import_module(f"megacpp_compile.lowerings.{folder}"), label.split(" ")[0]
    module, reference = module_of(folder, lowering), module_of(folder, "reference")
    served, refused = [], set()

    def chosen(which: str) -> Any:
        def call(*args: Any) -> Any:
            body = getattr(module, which, None)
            if reason := _untaken(body, args) or (body is None and "none") or by.why_not(module, which, args):
                refused.add(reason)
                return getattr(reference, which)(*args)
            served.append(which)
            with poisoned_memory():  # results that share memory are for compiled graphs alone
                return tree_map_only(Tensor, torch.clone, body(*args))

        return call

    for n in (n for f, n in semantic_ops().values() if f == folder):
        monkeypatch.setitem(OUTSIDE_OF_GRAPHS, n, chosen(n))
    yield getattr(package, name)
    if refused and not served:
        pytest.skip(f"{lowering} serves none of the calls: {refused}")


def differentiated(function: Any, entry: Entry, args: Any, seeds: Any = None) -> list[Tensor]:
    """Results that have gradients, and these gradients. seeds: by results, cotangents."""
    return differentiated_by(function, entry, args, [seeds])[0]


def differentiated_by(function: Any, entry: Entry, args: Any, several: list[Any]) -> list[list[Tensor]]:
    """The same of several sets of cotangents, all of one run."""

    def leaf(t: Tensor) -> Tensor:
        return t.detach().requires_grad_() if t.is_floating_point() else t

    args = [tree_map_only(Tensor, leaf, a) if i in entry.leaves else a for i, a in enumerate(args)]
    leaves = [t for t in tensors_of(args) if t.requires_grad]
    outs = tensors_of(function(*args))[: len(entry.rows)]
    results = [o.detach() for o in outs]
    found = []
    for seeds in several if leaves else ():
        seeds = seeds(outs) if callable(seeds) else seeds
        pairs = [(o, s.to(o)) for o, s in zip(outs, seeds, strict=True) if o.requires_grad]
        if not pairs:  # of nothing
            found.append([*results, *map(torch.zeros_like, leaves)])
            continue
        cotangents = [s for _, s in pairs]
        grads = torch.autograd.grad([o for o, _ in pairs], leaves, cotangents, True, allow_unused=True, materialize_grads=True)
        found.append([*results, *grads])
    return found or [results] * len(several)


def faults(got: list[Tensor], want: list[Tensor], tolerance: float, strict: bool, unlike: Any = ()) -> list[str]:
    """What is wrong with `got`, in words. strict: what is no number in `want` is none in `got` either. unlike: places
    of which the values differ."""
    wrong = []
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if (g.shape, g.dtype) != (w.shape, w.dtype):
            wrong.append(f"{i}: {tuple(g.shape)} {g.dtype}, not {tuple(w.shape)} {w.dtype}")
            continue
        here, there = g.isfinite(), w.isfinite()
        if (lost := int((there & ~here).sum())) or strict and (here & ~there).any():
            wrong.append(f"{i}: {lost} no numbers that are, {int((here & ~there).sum())} that are none, of {g.numel()}")
        both = here & there
        error = (g[both].double() - w[both].double()).norm() / w[both].double().norm().clamp_min(1e-35)
        if error > tolerance and i not in unlike:
            wrong.append(f"{i}: off by {float(error):.1e}")
    return wrong


def unlike(entry: Entry, args: Any) -> set[int]:
    """Places, among results and gradients, of what is an estimate."""
    place, found = len(entry.rows), set()
    for i in entry.leaves:
        count = sum(t.is_floating_point() for t in tensors_of([args[i]]))
        found |= set(range(place, place + count)) if i in entry.estimates else set()
        place += count
    return found


def seeds_like(rand: Any, outs: list[Tensor]) -> list[Tensor]:
    return [rand(o.numel(), dtype=torch.float32, device=str(o.device)).view(o.shape) for o in outs]


def check(op: Any, entry: Entry, args: Any, seeds: Any, strict: bool = True, plain: Any = None) -> list[str]:
    """What is wrong with the op's results beside those of plain code, of `plain` arguments where these are others."""
    return check_each(op, entry, args, {"": seeds}, strict, plain)


def check_each(
    op: Any, entry: Entry, args: Any, several: dict[str, Any], strict: bool = True, plain: Any = None
) -> list[str]:
    """The same with each of several upstream gradients, after its name. Of either code it is one run."""
    want = differentiated_by(entry.plain, entry, args if plain is None else plain, [*several.values()])
    got = differentiated_by(called(op, entry), entry, args, [*several.values()])
    tolerance, strict, places = entry.tolerance or TOLERANCE, strict and not entry.freed, unlike(entry, args)
    named = zip(several, got, want, strict=True)
    return [name and f"{name}: {f}" or f for name, g, w in named for f in faults(g, w, tolerance, strict, places)]


def called(op: Any, entry: Entry) -> Any:
    return op if entry.call is None else functools.partial(entry.call, op)


@pytest.fixture
def args(rand, device, label):
    return on(device, made(rand, label, torch.float32))


@pytest.fixture
def entry(label, folder, lowering, args):
    found = ENTRIES[label]
    serves = by.why_not(module_of(folder, lowering), label.split(" ")[0], args) is None
    return dataclasses.replace(found, plain=found.by_kernels[lowering]) if serves and lowering in found.by_kernels else found


def made(rand: Any, label: str, dtype: torch.dtype) -> Any:
    """The arguments of an entry's call."""
    return ENTRIES[label].prepare(CASES[label.split(" ")[0]][ENTRIES[label].case](rand, dtype))


@pytest.fixture
def seeds(rand, entry, args):
    with torch.no_grad():
        return seeds_like(rand, entry.plain(*args))


@pytest.mark.parametrize(("device", "folder", "label", "lowering"), everywhere("left_out"))
def test_left_out(op, entry, args, seeds):
    wrong = []
    for what, fill in entry.left_out.items():
        for name, bad in BAD.items():
            plain = fill(args, 0.5) if what in entry.promised else None
            wrong += [f"{what}, {name}: {f}" for f in check(op, entry, fill(args, bad), seeds, False, plain)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("device", "folder", "label", "lowering"), everywhere("empty"))
def test_nothing_counts(rand, device, op, entry):
    wrong = []
    for what, make in entry.empty.items():
        made = on(device, make(rand))
        wrong += [f"{what}: {f}" for f in check(op, entry, made, lambda outs: [torch.ones_like(o) for o in outs])]
    assert not wrong, "\n".join(wrong)


def in_a_row(seeds: list[Tensor], entry: Entry, args: Any, value: float) -> list[Tensor]:
    """`seeds` with `value` in the rows of the entry's block."""
    found = []
    for seed, dim, rows in zip(seeds, entry.rows, entry.block(args), strict=False):
        seed = seed.clone()
        if seed.dim():
            seed.transpose(0, dim)[rows] = value
        found.append(seed)
    return found


@pytest.mark.parametrize(("device", "folder", "label", "lowering"), everywhere("leaves"))
def test_upstream(op, entry, args, seeds):
    upstream = {}
    for name, value in (*BAD.items(), ("zero", 0.0)):
        upstream[f"{name} everywhere"] = [torch.full_like(s, value) for s in seeds]
        upstream[f"{name} in a row"] = in_a_row(seeds, entry, args, value)
    wrong = check_each(op, entry, args, upstream)
    assert not wrong, "\n".join(wrong)


def second(t: Tensor, dim: int, value: float) -> Tensor:
    """`t` with `value` in the second place of a dimension."""
    return filled(t.transpose(0, dim), 1, value).transpose(0, dim)


# Of which the square is infinite, and the product with a weight is not.
LARGE = 1e25


@pytest.mark.parametrize(("device", "folder", "label", "lowering"), everywhere("token"))
def test_a_token_that_is_no_number(op, entry, args, seeds):
    """Whole, with an upstream gradient and without one."""
    wrong = []
    for place, dim in entry.token.items():
        for name, bad in (BAD | ({"large": LARGE} if entry.squared else {})).items():
            given = list(args)
            given[place] = tree_map_only(Tensor, functools.partial(second, dim=dim, value=bad), args[place])
            nothing = [torch.zeros_like(s) for s in seeds]
            upstream = {"any": seeds, "none": nothing, "none there": in_a_row(seeds, entry, args, 0.0)}
            wrong += [f"{name} in {place}, gradient {f}" for f in check_each(op, entry, given, upstream)]
    assert not wrong, "\n".join(wrong)


@elsewhere
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("device", "folder", "label", "lowering"), everywhere("leaves", exact=True))
def test_half(rand, device, op, label, entry, dtype):
    """Finite where eager is, and no further off than its error in the same dtype, small and large. Without clamps:
    rounding carries a value across a limit now and then, where its gradient is all or nothing."""
    args, wrong = on(device, made(rand, label, dtype)), []
    args = [CURVES["swish"] if isinstance(a, str) and "clamp" in a else a for a in args]
    sets = {"as they are": args} | ({"large": entry.large(args)} if entry.large and dtype == torch.float16 else {})
    for what, given in sets.items():
        with torch.no_grad():
            seeds = seeds_like(rand, entry.plain(*given))
        for power in (-10, 0, 6, 11) if what == "large" else (0,):
            scaled = [s * 2.0**power for s in seeds]
            exact = differentiated(entry.plain, entry, widened(given), scaled)
            eager = differentiated(entry.plain, entry, given, scaled)
            got = differentiated(op, entry, given, scaled)
            wrong += [f"{what} times 2^{power}, {f}" for f in coarser(got, eager, exact, dtype, unlike(entry, given))]
    assert not wrong, "\n".join(wrong)


# An error that eager's own is to be multiplied by, and units in the last place beside it.
TIMES_EAGER, UNITS = 2.0, 3.0


def coarser(got: Any, eager: Any, exact: Any, dtype: torch.dtype, unlike: Any) -> list[str]:
    """Of which results the error is larger than eager's."""
    wrong = []
    for i, (g, e, x) in enumerate(zip(got, eager, exact, strict=True)):
        if (lost := int((e.isfinite() & ~g.isfinite()).sum())) and i not in unlike:
            wrong.append(f"{i}: {lost} of {g.numel()} no numbers, which eager's are")
        both = e.isfinite() & g.isfinite()
        size = x[both].norm().clamp_min(1e-9)
        mine, theirs = (float((t[both].double() - x[both]).norm() / size) for t in (g, e))
        if i not in unlike and mine > TIMES_EAGER * theirs + UNITS * torch.finfo(dtype).eps:
            wrong.append(f"{i}: off by {mine:.1e}, eager by {theirs:.1e}")
    return wrong


def test_every_op_has_an_entry():
    """A new op has to be entered."""
    names = {name.removesuffix("_backward") for _, name in semantic_ops().values()}
    assert names == {label.split(" ")[0] for label in ENTRIES}
