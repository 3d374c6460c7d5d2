"""Every lowering present, on every device present, against the reference in float64.

The same file runs anywhere: a machine without a GPU tries what can run on CPU, one with a GPU both. With
`TRITON_INTERPRET=1` the CUDA lowerings run on CPU tensors too. What an op's lowering says it can't do is skipped, with
its words.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only

from megacpp_compile.lowerings import _registry
from megacpp_compile.lowerings._registry import PREFERENCE, choose, semantic_ops

from . import LAYOUTS, relative_error

# Norm of the difference to the float64 reference over the reference's norm, for inputs rounded to the dtype.
TOLERANCE = {
    # (kind of op, dtype)
    # A rotation rounds its products and its sum, then the result: a few units in the last place, of which bfloat16 has
    # 2^-8 and float32 2^-23. A gradient summed over heads is no worse, as it is summed in float32.
    ("rotation", torch.bfloat16): 2 * 2**-8,
    ("rotation", torch.float32): 4 * 2**-23,
    ("rotation", torch.float64): 1e-14,
    # Two matrix products with a norm between. In bfloat16 latent and normed latent are rounded in between, each adding
    # 2^-9 or so; the backward goes through both again. float32: sums over the width in any order, and TF32 is off.
    ("projection", torch.bfloat16): 2e-2,
    ("projection", torch.float32): 5e-6,
    ("projection", torch.float64): 1e-13,
}
KIND = {
    "down_norm_up": "projection",
    "down_norm_up_backward": "projection",
    "mla_rope_q": "rotation",
    "mla_rope_kv": "rotation",
    "mla_rope_kv_backward": "rotation",
    "rope_qk": "rotation",
}

CASES: dict[str, dict[str, Callable[..., tuple[Any, ...]]]] = {name: {} for name in KIND}


def case(op: str, label: str = ""):
    """Register `make(rand, dtype) -> arguments` as a case of `op`."""

    def register(make):
        CASES[op][label or make.__name__] = make
        return make

    return register


def _projection(rand, dtype, outer=(2, 17), d=48, k=24, start=0, size=24, ups=(40,), bias=False, gain=True):
    x, w_down = rand(*outer, d, dtype=dtype), rand(k, d, dtype=dtype) / d**0.5
    b_down, w_norm = rand(k, dtype=dtype) if bias else None, 1 + rand(size, dtype=dtype) / 4 if gain else None
    return x, w_down, b_down, w_norm, [rand(n, size, dtype=dtype) / size**0.5 for n in ups], 1e-6, start, size


PROJECTIONS = {
    "query": {},
    "latent_before_rope_key": {"k": 32, "bias": True},
    "rope_key_before_latent": {"k": 32, "start": 8},
    "two_ups_no_gain": {"ups": (40, 24), "gain": False},
    "odd_sizes": {"outer": (3, 5), "d": 37, "k": 29, "size": 23, "ups": (31,), "bias": True},
    "one_token": {"outer": (1, 1)},
    "flat": {"outer": (33,), "k": 32},
}
for label, options in PROJECTIONS.items():
    case("down_norm_up", label)(lambda rand, dtype, options=options: _projection(rand, dtype, **options))

    @case("down_norm_up_backward", label)
    def _(rand, dtype, options=options):
        x, w_down, b_down, w_norm, w_up, eps, start, size = _projection(rand, dtype, **options)
        reference = importlib.import_module("megacpp_compile.lowerings.down_norm_up.reference")
        up, rest, rrms, _ = reference.down_norm_up(x, w_down, b_down, w_norm, w_up, eps, start, size)
        seeds = [rand(*u.shape, dtype=dtype) for u in up], rand(*rest.shape, dtype=dtype)
        return *seeds, x, w_down, b_down, w_norm, w_up, rrms, start, size


def _tables(rand, leading, width, dtype):
    return rand(*leading, width, dtype=dtype), rand(*leading, width, dtype=dtype)


# label -> (leading dimensions of q, of the tables, which one the heads are)
OUTER = {
    "bshd": ((2, 17, 4), (1, 17, 1), 2),
    "bhsd": ((2, 4, 17), (1, 1, 17), 1),
    "row_tables": ((2, 17, 6), (2, 17, 1), 2),
    "one": ((1, 1, 1), (1, 1, 1), 2),
}
HEADS = {"deepseek": (32, 16), "odd": (11, 6), "no_nope": (0, 16)}  # label -> (nope, rope)


def _rotations() -> Iterator[tuple[str, dict[str, Any]]]:
    for layout in LAYOUTS:
        for full in (False, True):
            flags = "".join("io"[i] if on else "." for i, on in enumerate(layout[:2])) + ("r" if layout[2] else ".")
            yield f"layout_{flags}{'_full' if full else ''}", {"layout": layout, "full": full}
    for outer in OUTER:
        for heads in HEADS:
            yield f"{outer}_{heads}", {"outer": outer, "heads": heads}
    for name in ("inverse", "half_tables_dtype", "strided", "other_out_dtype"):
        yield name, {name: True}


def _options(options, dtype):
    layout = options.get("layout", (True, False, False))
    outer, leading, heads = OUTER[options.get("outer", "bshd")]
    nope, r = HEADS[options.get("heads", "deepseek")]
    table_dtype = dtype if options.get("half_tables_dtype") else torch.promote_types(dtype, torch.float32)
    width = r if options.get("full") else r // 2
    # Only upwards: a reference in float64 would not know of the rounding that comes after.
    out_dtype = torch.promote_types(dtype, torch.float32) if options.get("other_out_dtype") else dtype
    return layout, outer, leading, heads, nope, r, width, table_dtype, out_dtype


def _main(rand, shape, dtype, options):
    """The main operand, perhaps as a part of a wider buffer whose rows stand in another order."""
    if not options.get("strided"):
        return rand(*shape, dtype=dtype)
    return rand(shape[1], shape[0], *shape[2:-1], shape[-1] + 8, dtype=dtype).transpose(0, 1)[..., 8:]


for label, options in _rotations():

    @case("mla_rope_q", label)
    def _(rand, dtype, options=options):
        layout, outer, leading, _, nope, r, width, table_dtype, out_dtype = _options(options, dtype)
        q = _main(rand, (*outer, nope + r), dtype, options)
        return q, *_tables(rand, leading, width, table_dtype), nope, *layout, bool(options.get("inverse")), out_dtype

    @case("rope_qk", label)
    def _(rand, dtype, options=options):
        layout, outer, leading, heads, nope, r, width, table_dtype, out_dtype = _options(options, dtype)
        q = _main(rand, (*outer, nope + r), dtype, options)
        fewer = [max(1, n // 2) if i == heads else n for i, n in enumerate(outer)]
        k = _main(rand, (*fewer, nope + r), dtype, options)
        return q, k, *_tables(rand, leading, width, table_dtype), nope, *layout, bool(options.get("inverse")), out_dtype

    if "inverse" not in options:

        @case("mla_rope_kv", label)
        def _(rand, dtype, options=options):
            layout, outer, leading, heads, nope, r, width, table_dtype, out_dtype = _options(options, dtype)
            shared = [1 if i == heads else n for i, n in enumerate(outer)]
            kv = _main(rand, (*outer, nope + 24), dtype, options)
            k_rope = _main(rand, (*shared, r), dtype, options)
            return kv, k_rope, *_tables(rand, leading, width, table_dtype), nope, *layout, out_dtype

        @case("mla_rope_kv_backward", label)
        def _(rand, dtype, options=options):
            layout, outer, leading, heads, nope, r, width, table_dtype, _ = _options(options, dtype)
            grads = _main(rand, (*outer, nope + r), dtype, options), _main(rand, (*outer, 24), dtype, options)
            tables = _tables(rand, leading, width, table_dtype)
            return *grads, *tables, nope, *layout, [heads], dtype, dtype


def lowerings() -> list[Any]:
    """(device, target, op, lowering) for everything that can run here."""
    places = [("cpu", "cpu")]
    if torch.cuda.is_available():
        places.append(("cuda", "cuda"))
    elif os.environ.get("TRITON_INTERPRET") == "1":
        places.append(("cpu", "cuda"))
    found = []
    for device, target in places:
        for op, (folder, name) in semantic_ops().items():
            home = Path(_registry.package.__path__[0]) / folder
            for lowering in PREFERENCE[target]:
                if (home / f"{lowering}.py").exists():
                    marks = [pytest.mark.cuda] if device == "cuda" else []
                    label = f"{device}-{name}-{lowering}"
                    found.append(pytest.param(device, op, folder, name, lowering, marks=marks, id=label))
    return found


@contextlib.contextmanager
def poisoned_memory():
    """New memory is full of NaN, so that an element nobody writes can't pass for a result."""
    kept = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(kept[0], warn_only=kept[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


def tensors_of(results):
    return [t for t in tree_flatten(results)[0] if isinstance(t, torch.Tensor)]


def on(device, args, dtype=None):
    """`args` on `device`, and in `dtype` where they are floating point, strides kept."""

    def move(t):
        if dtype is not None and t.is_floating_point():
            t = t.to(dtype)
        if t.device.type == device or 0 in t.shape:
            return t.to(device)
        buffer = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
        return buffer.copy_(t)

    args = tree_map_only(torch.Tensor, move, args)
    return tuple(dtype if dtype is not None and isinstance(a, torch.dtype) else a for a in args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("device", "op", "folder", "name", "lowering"), lowerings())
def test_agrees_with_the_reference(rand, device, op, folder, name, lowering, dtype):
    module = importlib.import_module(f"megacpp_compile.lowerings.{folder}.{lowering}")
    reference = getattr(importlib.import_module(f"megacpp_compile.lowerings.{folder}.reference"), name)
    supports, body = getattr(module, "supports", None), getattr(module, name)
    refused, wrong = {}, []
    for label, make in CASES[name].items():
        args = on(device, make(rand, dtype))
        if supports is not None and (reason := supports(name, args)) is not None:
            refused[label] = reason
            continue
        before = [t.clone() for t in tensors_of(args)]
        with poisoned_memory(), torch.no_grad():
            got = tensors_of(body(*args))
        want = tensors_of(reference(*on(device, args, torch.float64)))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            promised = tensors_of(op(*tree_map_only(torch.Tensor, mode.from_tensor, args)))
        for i, (g, w, p) in enumerate(zip(got, want, promised, strict=True)):
            if not w.numel():
                continue
            if (g.shape, g.dtype) != (p.shape, p.dtype):
                wrong.append(f"{label}: output {i} is {tuple(g.shape)} {g.dtype}, not {tuple(p.shape)} {p.dtype}")
            elif g.isnan().any():
                wrong.append(f"{label}: output {i} has {int(g.isnan().sum())} of {g.numel()} elements unwritten")
            elif (error := relative_error(g, w)) > TOLERANCE[KIND[name], dtype]:
                wrong.append(f"{label}: output {i} is off by {error:.2e}")
        if any(not torch.equal(a, b) for a, b in zip(before, tensors_of(args), strict=True)):
            wrong.append(f"{label}: an input was written to")
    assert not wrong, "\n".join(wrong)
    if len(refused) == len(CASES[name]):
        pytest.skip(f"{lowering} serves none of the cases: {set(refused.values())}")


def test_every_op_has_cases():
    """A new op, or a new backward, has to be entered here."""
    names = {name for _, name in semantic_ops().values()}
    assert names == set(KIND) == {name for name, cases in CASES.items() if cases}


def test_every_op_has_a_reference_on_every_target():
    for target, order in PREFERENCE.items():
        assert order[-1] == "reference", target
    for folder, name in semantic_ops().values():
        assert callable(getattr(importlib.import_module(f"megacpp_compile.lowerings.{folder}.reference"), name))


def test_poison_is_seen():
    """The check above rests on this: memory nobody wrote reads as NaN."""
    with poisoned_memory():
        assert torch.empty(64).isnan().all() and torch.empty_like(torch.ones(3, dtype=torch.bfloat16)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def _call(rand, op="mla_rope_q"):
    found = next(o for o, (_, name) in semantic_ops().items() if name == op)
    return found, CASES[op]["bshd_deepseek"](rand, torch.float32)


def test_a_lowering_that_is_missing_is_passed_over_with_a_reason(rand, monkeypatch):
    monkeypatch.setitem(PREFERENCE, "cpu", ("imaginary", "reference"))
    choice = choose(_call(rand)[0], "cpu", _call(rand)[1])
    assert (choice.requested, choice.effective) == ("imaginary", "reference")
    assert choice.reason.startswith("no-lowering: mla_rope_q has no imaginary")


def test_a_lowering_that_refuses_is_passed_over_with_its_reason(rand, monkeypatch):
    module = importlib.import_module("megacpp_compile.lowerings.mla_rope_q.reference")
    monkeypatch.setattr(module, "supports", lambda name, args: f"{name} is not for today", raising=False)
    monkeypatch.setitem(PREFERENCE, "cpu", ("reference", "fallback"))
    stand_in = type(module)("megacpp_compile.lowerings.mla_rope_q.fallback")
    stand_in.mla_rope_q = module.mla_rope_q
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    choice = choose(_call(rand)[0], "cpu", _call(rand)[1])
    assert (choice.requested, choice.effective) == ("reference", "fallback")
    assert choice.reason == "reference: mla_rope_q is not for today"
