"""`gated_delta_rule`'s kernels in Gluon: that they compile for Hopper, whom they serve, and on a GPU their numbers."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest
import torch

from .agreement import DoesNotCompile, faults, interpreted, on, poisoned_memory, reference_of
from .delta_cases import final_gradient, rule

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_triton = pytest.mark.skipif(
    interpreted() or importlib.util.find_spec("triton") is None, reason="the kernels are Triton's compiler's to compile"
)
# So much shared memory leaves room for a second program on a multiprocessor, of 228 KiB less 1 KiB a program.
HALF = 113 * 1024
SIZES = {"C": 64, "K": 128, "V": 128}
KERNELS = {
    "walk": {**SIZES, "BV": 64, "EVERY": 8, "FIRST": 0, "A_STAGES": 3, "B_STAGES": 2, "OUTPUT_REGISTERS": 112,
             "COPY_REGISTERS": 40},
    "walk_from_a_state": {},
    "states": {**SIZES, "BV": 64, "EVERY": 8, "STAGES": 2},
    "query_grad": {**SIZES, "HB": 2, "NORM": 1},
    "query_grad_bare": {**SIZES, "HB": 1, "NORM": 0},
    "key_grad": {**SIZES, "HB": 2, "GATED": 1, "BETA": 1, "NORM": 1},
    "key_grad_bare": {**SIZES, "HB": 1, "GATED": 0, "BETA": 0, "NORM": 0},
}  # fmt: skip
KERNELS["walk_from_a_state"] = KERNELS["walk"] | {"FIRST": 1}
TILES = {"q": (1, 64, 128), "k": (1, 64, 128), "do": (1, 64, 128), "dq": (1, 64, 128), "dk": (1, 64, 128),
         "dv": (1, 64, 128), "errors": (64, 128), "d_rows": (64, 128), "states": (128, 128), "d_states": (128, 128),
         "d_scores": (64, 64)}  # fmt: skip
# By 64 of V's channels, where the state is in registers.
NARROW_TILES = TILES | dict.fromkeys(("v", "inverse", "mixed", "o"), (1, 64, 64)) | {
    "solve": (64, 64), "errors": (64, 64), "states": (128, 64)}  # fmt: skip
FLOATS = ("decay", "steps", "norms", "d_decay", "dg", "dbeta", "factors")


def hopper():
    from megacpp_compile.lowerings.gated_delta_rule import _hopper

    if _hopper.missing:
        pytest.skip(_hopper.missing)
    return _hopper


def assembled(label: str) -> tuple[str, int]:
    """The kernel's assembly for sm_90, and its bytes of shared memory; assembled, which needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    gluon = hopper()
    which = re.match("walk|states|query_grad|key_grad", label)[0]
    kernel = getattr(gluon, f"delta_{which}")
    names, constants = kernel.arg_names, KERNELS[label]
    types = {"scale": "fp32"} | dict.fromkeys(FLOATS, "*fp32")
    for name, tile in (NARROW_TILES if which in ("walk", "states") else TILES).items():
        layout = gluon.NVMMASharedLayout.get_default_for(list(tile), gluon.bfloat16)
        types[name] = f"tensordesc<bf16{list(tile)},{layout!r}>"
    layout = gluon.NVMMASharedLayout.get_default_for([128, 64], gluon.float32)
    whole_state = f"tensordesc<fp32[128, 64],{layout!r}>"
    if which == "walk":
        types |= dict.fromkeys(("first_state", "states", "last"), whole_state)
    else:
        types["kept"] = whole_state
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    whole = {(names.index(n),): [["tt.divisibility", 16]] for n in FLOATS if n in names}
    source = GluonASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, whole)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert made.asm["cubin"]
    return made.asm["ptx"], made.metadata.shared


@needs_triton
@pytest.mark.parametrize("label", KERNELS)
def test_compiles_for_hopper(label):
    text, shared = assembled(label)
    assert shared <= (227 * 1024 if "walk" in label else HALF)
    # All tiles of operands come by TMA, and GEMMs read them where they are.
    assert "cp.async.bulk.tensor.3d.shared" in text and "wgmma.mma_async" in text and "ld.global.v4" not in text


class Call:
    """Of 64 chunks of 32 value heads, which Gluon takes."""

    batch, chunks, heads, key_heads, K, V = 1, 64, 32, 16, 128, 128
    wide = per_channel = False
    v = torch.empty(0, device="meta")


@needs_triton
@pytest.mark.parametrize("change, served", [
    ({}, True), ({"key_heads": 8}, True), ({"key_heads": 4}, False), ({"K": 64}, False), ({"V": 256}, False),
    ({"wide": True}, False), ({"per_channel": True}, False), ({"chunks": 31}, False), ({"chunks": 32}, True),
    ({"chunk": 32}, False), ({"packed": True}, False), ({"hopper": False}, False), ({"missing": "a name"}, False),
])  # fmt: skip
def test_whom_it_serves(monkeypatch, change, served):
    gluon = hopper()
    call, given = Call(), {"chunk": 64, "packed": False, "hopper": True, "missing": "", **change}
    for name in change.keys() & vars(Call).keys():
        setattr(call, name, change[name])
    monkeypatch.setattr(gluon, "on_hopper", lambda device: given["hopper"])
    monkeypatch.setattr(gluon, "missing", given["missing"])
    assert gluon.serve(call, given["chunk"], given["packed"]) is served


@needs_triton
@pytest.mark.parametrize("op", ["walk", "states", "gradients"])
def test_what_does_not_compile_is_served_otherwise(monkeypatch, caplog, op):
    """By Triton's kernels, of the same arguments; said once."""
    from megacpp_compile.lowerings.gated_delta_rule import _entering_states, _head_gradients, _walks

    gluon, ops = hopper(), torch.ops.megacpp_delta
    monkeypatch.setattr(gluon, "missing", "")
    for kernel in ("delta_walk", "delta_states", "delta_query_grad"):
        monkeypatch.setattr(gluon, kernel, DoesNotCompile())
    asked = []
    module = {"walk": _walks, "states": _entering_states, "gradients": _head_gradients}[op]
    monkeypatch.setattr(module, "_in_triton", lambda call, *args: asked.append(call) or made(call))
    q, k, v = (torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16) for _ in range(3))

    def made(call):
        return module._results(call, torch.bfloat16) if op == "walk" else module._results(call)

    square, state = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 128, 128, dtype=torch.bfloat16)
    for _ in range(2):
        if op == "walk":
            ops.walk(q, k, v, square, square, torch.zeros(5, 1, 1, 64), None, 0.1)
        elif op == "states":
            rows, norms = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1, 2, 64)
            ops.entering_states(k, v, torch.zeros(1, 1, 1, 128, 128), square, rows, rows, norms)
        else:
            rows, norms = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1, 2, 64)
            errors = torch.zeros(1, 1, 1, 64, 128, dtype=torch.bfloat16)
            ops.gradients(v, q, k, v, None, None, rows, rows, norms, state, errors, state, errors, 0.1, None)
    assert len(asked) == 2 and caplog.text.count("no attribute 'barrier'") == 1 and "Triton's own" in caplog.text


def test_ops_are_there_with_the_rule():
    """A graph from a cache calls them in a process that has lowered nothing."""
    code = """
import sys, torch, megacpp_compile.lowerings.gated_delta_rule
assert not [name for name in sys.modules if name.startswith("megacpp_compile") and name.endswith("cuda_triton")]
print(*[getattr(torch.ops.megacpp_delta, op).default for op in ("walk", "entering_states", "gradients")])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.split() == [f"megacpp_delta.{op}.default" for op in ("walk", "entering_states", "gradients")], out


NUMBERS = {
    "as_in_a_model": {},
    "ragged": {"t": 200, "b": 2},
    "one_head_a_key": {"hk": 4},
    "four_heads_a_key": {"hk": 1},
    "no_gate": {"gate": "none"},
    "bare": {"gate": "none", "beta": False, "initial": False},
    "keys_as_they_are": {"eps": None},
    "no_state": {"initial": False},
    "strong_gates": {"decay": "strong", "t": 640},
    "sudden_gates": {"decay": "sudden"},
    "many_segments": {"t": 1100},
    "rows_side_by_side": {},
    "heads_before_tokens": {"b": 2},
}
# q, k and v are slices of rows that begin at odd multiples of 8 numbers, which are copied; these are not.
ROWS = {"rows_side_by_side": True, "heads_before_tokens": False}


@pytest.mark.cuda
@pytest.mark.skipif(not HOPPER, reason="the kernels are of Hopper's instructions")
@pytest.mark.parametrize("label", NUMBERS)
def test_numbers(rand, monkeypatch, label):
    """Against the definition in float64; and gradients of tokens that write nothing are not lost."""
    from megacpp_compile.lowerings.gated_delta_rule import cuda_triton

    gluon = hopper()
    monkeypatch.setattr(gluon, "LEAST_CHUNKS", 0)
    launched = []
    kernels = ["delta_walk", "delta_states", "delta_query_grad", "delta_key_grad"]
    for kernel in kernels:
        monkeypatch.setattr(gluon, kernel, told(getattr(gluon, kernel), launched))
    options = {"b": 1, "t": 256, "hk": 2, "hv": 4, "k": 128, "v": 128, **NUMBERS[label]}
    *given, scale, eps, chunk, out = rule(rand, torch.bfloat16, chunk=64, **options)
    if label in ROWS:
        given[:3] = (t.contiguous() if ROWS[label] else transposed(t) for t in given[:3])
    if given[4] is not None:
        given[4] = given[4].clone()
        given[4][:, 5::7] = 0
    given = on("cuda", given)
    with poisoned_memory():
        o, final, states, inverse = cuda_triton.gated_delta_rule(*given, scale, eps, chunk, out)
    exact = on("cuda", given, torch.float64)
    want = reference_of("gated_delta_rule")(*exact, scale, eps, chunk, torch.float64)
    eps_16 = torch.finfo(torch.bfloat16).eps
    assert not faults((o, final, states), want[:3], 2 * eps_16)
    (do,) = on("cuda", (rand(*o.shape, dtype=out),))
    dfinal = final_gradient(rand, final.cpu(), options)
    dfinal = dfinal if dfinal is None else dfinal.cuda()
    with poisoned_memory():
        got = cuda_triton.gated_delta_rule_backward(do, dfinal, *given, states, inverse, scale, eps, chunk)
    want = reference_of("gated_delta_rule_backward")(
        do.double(), None if dfinal is None else dfinal.double(), *exact, *want[2:], scale, eps, chunk
    )
    assert not faults(got, want, 3 * eps_16)
    assert launched == kernels


def transposed(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def told(kernel, names):
    class Told:
        def __getitem__(self, grid):
            names.append(kernel.fn.__name__)
            return kernel[grid]

    return Told()
