"""Every lowering present, on every device present, against the reference in float64.

The same file runs anywhere: a machine without a GPU tries what can run on CPU, one with a GPU both. With
`TRITON_INTERPRET=1` it is the CUDA lowerings that run on CPU tensors. What an op's lowering says it can't do is skipped, with
its words.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from megacpp_compile.lowerings._registry import choose, semantic_ops
from megacpp_compile.targets import TARGETS

from . import agreement as by
from .agreement import interpreted, lowerings, module_of, on, poisoned_memory, rarely, tensors_of
from .cases import CASES

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
HALF_RARELY = pytest.mark.parametrize("dtype", [torch.float32, rarely(torch.bfloat16)], ids=["float32", "bfloat16"])


def everywhere(only_in_place: bool = False) -> list[Any]:
    """(device, op, folder, name, lowering) for everything that can run here."""
    found = []
    for device, target in by.places():
        for op, folder, name, lowering in lowerings(target):
            if only_in_place and (target != "cuda" or name not in overwrites(folder, lowering)):
                continue
            if interpreted() and lowering == "reference":
                continue
            marks = [pytest.mark.cuda] if device == "cuda" else []
            label = f"{device}-{name}-{lowering}"
            found.append(pytest.param(device, op, folder, name, lowering, marks=marks, id=label))
    return found


# An op with as many cases has several for each branch of a kernel.
MANY = 15


def cases_of(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """All; but the interpreter, which takes minutes for them, tries half of many in float32 and the rest in bfloat16, of
    two that stand together one in each: what a case is about and the dtype are apart in a kernel. A GPU is held to all
    in both."""
    if not interpreted() or len(CASES[name]) <= MANY:
        return CASES[name]
    half = int(dtype == torch.bfloat16)
    return {label: make for i, (label, make) in enumerate(CASES[name].items()) if (i + i // 2) % 2 == half}


def overwrites(folder: str, lowering: str) -> dict[str, tuple[int, ...]]:
    return getattr(module_of(folder, lowering), "OVERWRITES", {})


def faults_of(rand, device, op, module, name, dtype, cases):
    """(what is wrong with the results of `cases`, why others are refused)"""
    refused, wrong = {}, []
    for label, make in cases.items():
        args = on(device, make(rand, dtype))
        if (reason := by.why_not(module, name, args)) is not None:
            refused[label] = reason
            continue
        before = [by.memory(t).clone() for t in tensors_of(args)]
        with poisoned_memory(), torch.no_grad():
            got = tensors_of(getattr(module, name)(*args))
        found = by.disagreements(got, name, args)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            promised = tensors_of(op(*tree_map_only(torch.Tensor, mode.from_tensor, args)))
        for i, (g, p) in enumerate(zip(got, promised, strict=True)):
            if (g.shape, g.dtype) != (p.shape, p.dtype):
                found.append(f"output {i} is {tuple(g.shape)} {g.dtype}, not {tuple(p.shape)} {p.dtype}")
        if any(not torch.equal(a, by.memory(b)) for a, b in zip(before, tensors_of(args), strict=True)):
            found.append("an input was written to")
        wrong += [f"{label}: {fault}" for fault in found]
    return wrong, refused


# Op -> cases that launch each of its kernels; of others the first does.
ONCE = {"causal_conv1d": ("taps_5", "fewer_steps_than_taps"), "linear_cross_entropy": ("odd_sizes",),
        "linear_cross_entropy_backward": ("odd_sizes",), "gated_delta_rule_backward": ("gate_a_channel", "bare"),
        "gated_delta_rule": ("gate_a_channel", "bare"), "mla_decode": ("one_token", "fp8", "codes"),
        "moe_sorted": ("pair_separate", "as_gpt_oss"), "sparse_mla": ("plain", "fp8_row"),
        "attention": ("all_keys", "dropout"), "attention_backward": ("all_keys", "dropout"),
        "ssd_scan": ("documents_chunk_128",), "ssd_scan_backward": ("wide_heads",)}  # fmt: skip
# Of which some kernels take half precision alone.
IN_HALF = "gated_delta_rule", "gated_delta_rule_backward"


@pytest.mark.parametrize(("device", "op", "folder", "name", "lowering"), everywhere())
def test_agrees_once(rand, device, op, folder, name, lowering):
    cases = {label: CASES[name][label] for label in ONCE.get(name, list(CASES[name])[:1])}
    dtype = torch.bfloat16 if name in IN_HALF else torch.float32
    wrong, _ = faults_of(rand, device, op, module_of(folder, lowering), name, dtype, cases)
    assert not wrong, "\n".join(wrong)


@pytest.mark.exhaustive if interpreted() else pytest.mark.sampled(9, unit=45)
@DTYPES
@pytest.mark.parametrize(("device", "op", "folder", "name", "lowering"), everywhere())
def test_agrees_with_the_reference(rand, device, op, folder, name, lowering, dtype):
    cases = cases_of(name, dtype)
    wrong, refused = faults_of(rand, device, op, module_of(folder, lowering), name, dtype, cases)
    assert not wrong, "\n".join(wrong)
    print(f"{len(cases) - len(refused)} cases, refused: {refused}")
    if len(refused) == len(cases):
        pytest.skip(f"{lowering} serves none of the cases: {set(refused.values())}")


# Op -> how few programs are asked for, and of which cases.
FEW = {"down_norm_up_backward": ("PROGRAMS", 2, "flat"), "gated_rms_norm_backward": ("WARPS", 8, "many_rows")}


@HALF_RARELY
@pytest.mark.parametrize(("device", "op", "folder", "name", "lowering"),
                         [p for p in everywhere() if p.values[3] in FEW and p.values[4] == "cuda_triton"])
def test_few_programs_go_over_many_rows(rand, monkeypatch, device, op, folder, name, lowering, dtype):
    module, (limit, few, label) = module_of(folder, lowering), FEW[name]
    monkeypatch.setattr(module, limit, few)
    args = on(device, CASES[name][label](rand, dtype))
    with poisoned_memory(), torch.no_grad():
        got = tensors_of(getattr(module, name)(*args))
    assert not by.disagreements(got, name, args)


def embedded(t: torch.Tensor) -> torch.Tensor:
    """`t` with other data before and behind it in its buffer, whose change would be seen."""
    around = 64
    buffer = torch.arange(t.numel() + 2 * around, device=t.device).to(t.dtype)
    inside = buffer[around : around + t.numel()].view(t.shape)
    return inside.copy_(t)


# Into halves and from them, in other by.memory, and packed.
MOVED = "layout_i..", "layout_.or_full", "strided", "expanded", "packed_unequal_heads_3"


@HALF_RARELY
@pytest.mark.parametrize("few", [True, rarely(False)], ids=["few", "all"])
@pytest.mark.parametrize(("device", "op", "folder", "name", "lowering"), everywhere(only_in_place=True))
def test_in_place(rand, device, op, folder, name, lowering, dtype, few):
    """The results in the operands' own memory: the same bits as elsewhere, and no other byte written."""
    module = module_of(folder, lowering)
    which, wrong, served, cases = overwrites(folder, lowering)[name], [], 0, cases_of(name, dtype)
    cases = {label: CASES[name][label] for label in MOVED} if few else cases
    for label, make in cases.items():
        args = list(on(device, make(rand, dtype)))
        if by.why_not(module, name, args) is not None:
            continue
        for i in which:
            if args[i].is_contiguous():
                args[i] = embedded(args[i])
        out_dtype = next(a for a in args if isinstance(a, torch.dtype))
        with poisoned_memory(), torch.no_grad():
            wrong += [f"{label}: {f}" for f in by.in_place_faults(getattr(module, name), which, args, out_dtype)]
        served += 1
    assert not wrong, "\n".join(wrong)
    assert served > len(cases) // 2


@pytest.mark.parametrize("rope_first", [False, True], ids=["nope_first", "rope_first"])
@pytest.mark.parametrize(("device", "op", "folder", "name", "lowering"), everywhere(only_in_place=True))
def test_in_place_does_not_touch_the_other_channels(rand, device, op, folder, name, lowering, rope_first):
    """Not even to write them as they were: NaNs keep their payload, zeros their sign."""
    nope, r = 12, 8
    module, which = module_of(folder, lowering), overwrites(folder, lowering)[name]
    operands = [rand(2, 3, 4, nope + r, dtype=torch.float32, device=device) for _ in which]
    for t in operands:
        others = t[..., r:] if rope_first else t[..., :nope]
        others.view(torch.int32)[..., ::3] = 0x7FC12345
        others[..., 1::3] = -0.0
    before = by.copies_of(operands)
    tables = (rand(1, 3, 1, r // 2, dtype=torch.float32, device=device) for _ in range(2))
    getattr(module, name)(*operands, *tables, nope, True, False, rope_first, False, torch.float32, in_place=True)
    for now, then in zip(operands, before, strict=True):
        same = now.view(torch.int32) == then.view(torch.int32)
        assert (same[..., r:] if rope_first else same[..., :nope]).all()
        assert not (same[..., :r] if rope_first else same[..., nope:]).any()


def test_every_op_has_cases():
    """A new op, or a new backward, has to be entered here."""
    names = {name for _, name in semantic_ops().values()}
    assert names == set(by.KIND) == {name for name, cases in CASES.items() if cases}


def test_every_op_has_a_reference_on_every_target():
    for target in TARGETS.values():
        assert target.lowerings[-1] == "reference", target
    for folder, name in semantic_ops().values():
        assert callable(getattr(module_of(folder, "reference"), name))


def test_poison_is_seen():
    """The check above rests on this: memory nobody wrote reads as NaN."""
    with poisoned_memory():
        assert torch.empty(64).isnan().all() and torch.empty_like(torch.ones(3, dtype=torch.bfloat16)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def _call(rand, op="mla_rope_q"):
    found = next(o for o, (_, name) in semantic_ops().items() if name == op)
    return found, CASES[op]["bshd_deepseek"](rand, torch.float32)


def prefer(monkeypatch, *lowerings):
    monkeypatch.setitem(TARGETS, "cpu", dataclasses.replace(TARGETS["cpu"], lowerings=lowerings))


def test_a_lowering_that_is_missing_is_passed_over_with_a_reason(rand, monkeypatch):
    prefer(monkeypatch, "imaginary", "reference")
    choice = choose(_call(rand)[0], "cpu", _call(rand)[1])
    assert (choice.requested, choice.effective) == ("imaginary", "reference")
    assert choice.reason.startswith("no-lowering: mla_rope_q has no imaginary")


def test_a_lowering_that_refuses_is_passed_over_with_its_reason(rand, monkeypatch):
    module = importlib.import_module("megacpp_compile.lowerings.mla_rope_q.reference")
    monkeypatch.setattr(module, "supports", lambda name, args: f"{name} is not for today", raising=False)
    prefer(monkeypatch, "reference", "fallback")
    stand_in = type(module)("megacpp_compile.lowerings.mla_rope_q.fallback")
    stand_in.mla_rope_q = module.mla_rope_q
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    choice = choose(_call(rand)[0], "cpu", _call(rand)[1])
    assert (choice.requested, choice.effective) == ("reference", "fallback")
    assert choice.reason == "reference: mla_rope_q is not for today"
