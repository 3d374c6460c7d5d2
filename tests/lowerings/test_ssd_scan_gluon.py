"""`ssd_scan`'s kernels in Gluon: that they compile for Hopper, whom they serve, and on a GPU their numbers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from .agreement import INNER_UNIT, TIMES_ROUNDING, DoesNotCompile, faults, on, poisoned_memory, reference_of
from .cases import _scan
from .gluon_kernels import HALF, LEAST_CHUNKS, ON_HOPPER, assemble, hopper, needs_triton, on_hopper, replays, tile, told
from .rounding import moved_by_rounding

SIZES = {"P": 64, "N": 128}
WALK = {**SIZES, "L": 64, "REVERSE": 0, "SKIP": 1, "FIRST": 1, "ROWS": 1, "PACKED": 0, "STAGES": 2}
WALK |= {"v": "bfloat16", "out": "bfloat16"}
PAIRS = {**SIZES, "L": 128, "HB": 8, "PACKED": 0, "dy": "bfloat16"}
KEYS = {**SIZES, "L": 128, "HB": 8, "PACKED": 0, "d_B": "bfloat16"}
KERNELS = {"walk": WALK, "walk_to_float32": {**WALK, "out": "float32", "FIRST": 0},
           "walk_of_states_of_64": {**WALK, "N": 64, "SKIP": 0}, "states_alone": {**WALK, "ROWS": 0, "SKIP": 0},
           "walk_back": {**WALK, "REVERSE": 1}, "walk_back_of_float32": {**WALK, "REVERSE": 1, "v": "float32"},
           "scores_grad": PAIRS, "scores_grad_of_float32": {**PAIRS, "dy": "float32"},
           "scores_grad_of_one_head": {**PAIRS, "N": 64, "HB": 1}, "key_grad": KEYS,
           "key_grad_in_parts": {**KEYS, "d_B": "float32"}, "key_grad_of_one_head": {**KEYS, "N": 64, "HB": 1},
           "walk_of_documents": {**WALK, "PACKED": 1},
           "walk_back_of_documents": {**WALK, "REVERSE": 1, "v": "float32", "PACKED": 1},
           "scores_grad_of_documents": {**PAIRS, "dy": "float32", "PACKED": 1},
           "key_grad_of_documents": {**KEYS, "PACKED": 1}}
FLOATS = ("decay", "steps", "skip", "first", "states", "last", "d_scores", "row_sums", "column_sums", "across",
          "diagonal", "d_skip", "dots", "inner")  # fmt: skip


def compiled(label: str) -> Any:
    gluon, constants = hopper("ssd_scan"), dict(KERNELS[label])
    (own,) = {"dy", "d_B", "out"} & constants.keys()
    kernel, warps = {"out": (gluon.ssd_walk_hopper, 4), "dy": (gluon.ssd_scores_grad_hopper, 4),
                     "d_B": (gluon.ssd_key_grad_hopper, 8)}[own]  # fmt: skip
    dtypes = {name: getattr(torch, constants.pop(name)) for name in ("v", own) if name in constants}
    P, N, rows = constants["P"], constants["N"], 128 if own == "d_B" else 64
    types = dict.fromkeys(FLOATS, "*fp32") | {"cuts": "*i32"} | {name: tile((1, rows, N)) for name in ("q", "k", "B", "C")}
    types |= {name: tile((1, rows, P), dtypes.get(name, torch.bfloat16)) for name in ("v", "x", "dy", "out")}
    types |= {"d_B": tile((1, rows, N), dtypes.get("d_B", torch.bfloat16))}
    types |= dict.fromkeys(("left", "entering"), tile((P, N), torch.float32))
    return assemble(kernel, types, constants, num_warps=warps)


@pytest.mark.end_to_end
@pytest.mark.rare(*(KERNELS.keys() - {"walk", "walk_back_of_documents", "scores_grad", "key_grad"}))
@needs_triton
@pytest.mark.parametrize("case", KERNELS)
def test_compiles_for_hopper(case):
    made = compiled(case)
    text, shared = made.asm["ptx"], made.metadata.shared
    third = 75 * 1024
    assert shared <= (227 * 1024 if case.startswith("key") else third if case.startswith("scores") else HALF)
    # All tiles of operands come by TMA, and GEMMs read them where they are.
    assert "cp.async.bulk.tensor.3d.shared" in text and "wgmma.mma_async" in text


class Call:
    """Of 128 chunks of 64 tokens of 64 heads, which Gluon takes."""

    x = B = C = torch.empty(0, dtype=torch.bfloat16, device="meta")
    batch, heads, p, n, chunk = 1, 64, 64, 128, 256

    def __init__(self, **change):
        self.count = change.pop("count", 128)
        for name, value in change.items():
            setattr(self, name, value)

    def chunks_of(self, length):
        return self.count


FLOAT32 = torch.empty(0, device="meta")


@needs_triton
@pytest.mark.parametrize(("change", "served"),
                         [({}, True), ({"n": 64}, True), ({"rows": torch.float32}, True), ({"chunk": 64}, True),
                          ({"batch": 2, "count": 64}, True), ({"n": 256}, False), ({"p": 128}, False),
                          ({"chunk": 32}, False), ({"x": FLOAT32}, False), ({"C": FLOAT32}, False),
                          ({"rows": torch.float16}, False), ({"count": 127}, False), ({"hopper": False}, False),
                          ({"missing": "a name"}, False)])  # fmt: skip
def test_whom_it_serves(monkeypatch, change, served):
    gluon, change = hopper("ssd_scan"), dict(change)
    on_chip, missing = change.pop("hopper", True), change.pop("missing", "")
    rows = change.pop("rows", torch.bfloat16)
    monkeypatch.setattr(ON_HOPPER, lambda device: on_chip)
    monkeypatch.setattr(gluon.kernels, "missing", missing)
    assert gluon.serve(Call(**change), rows) is served


def scan(rand, **options):
    given = {"b": 1, "t": 200, "h": 8, "g": 2, "p": 64, "n": 128, "chunk": 256, **options}
    made = _scan(rand, torch.bfloat16, **given)
    return list(made[:8]), made[8], made[9] if len(made) > 9 else None


@needs_triton
@pytest.mark.parametrize("op", ["scan", "backward"])
def test_what_does_not_compile_is_served_otherwise(rand, monkeypatch, caplog, op):
    from megacpp_compile.lowerings.ssd_scan import _call, cuda_triton

    gluon = hopper("ssd_scan")
    monkeypatch.setattr(gluon.kernels, "missing", "")
    monkeypatch.setattr(gluon, "ssd_walk_hopper", DoesNotCompile())
    monkeypatch.setattr(_call.ScanOperands, "decay", lambda call, length: (call.dt, call.dt))
    args, out, _ = scan(rand)
    y, last, states = reference_of("ssd_scan")(*args, out)
    promised = (y, last, states) if op == "scan" else (*args[:6],)
    asked = []
    monkeypatch.setattr(cuda_triton, f"_{op}", lambda *given: asked.append(given) or promised)
    if op == "scan":
        got = [cuda_triton.scan_on_hopper(tuple(args[:5]), *args[5:], out, None) for _ in range(2)][1]
    else:
        call = y, last, tuple(args[:5]), *args[5:7], states, args[7], None
        got = [cuda_triton.backward_on_hopper(*call) for _ in range(2)][1]
    assert got is promised and len(asked) == 2
    assert caplog.text.count("no attribute 'barrier'") == 1 and "Triton's own" in caplog.text


@pytest.mark.end_to_end
def test_ops_are_there_with_the_scan():
    """A graph from a cache calls them in a process that has lowered nothing; on no data they give what the op does."""
    code = """
import sys, torch, megacpp_compile.lowerings.ssd_scan
assert not [name for name in sys.modules if name.startswith("megacpp_compile") and name.endswith("cuda_triton")]
def draw(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")
x, B, dt, A = draw(2, 100, 4, 64), draw(2, 100, 2, 128), draw(2, 100, 4, dtype=torch.float32), draw(4, dtype=torch.float32)
args = [x, dt, A, B, B, A, None, 64, torch.float32, None]
ours, own = torch.ops.megacpp_ssd.scan(*args), torch.ops.megacpp.ssd_scan(*args)
back = [own[0], None, *args[:7], own[2], 64, None]
ours += torch.ops.megacpp_ssd.backward(*back)
joined, *rest = torch.ops.megacpp_ssd.backward(*back, [0, 256, 512])
assert joined.shape == (2, 100, 768) and [rest[i - 1].shape for i in (1, 2, 5, 6)] == [ours[3 + i].shape for i in (1, 2, 5, 6)]
own += torch.ops.megacpp.ssd_scan_backward(*back)
assert [(t.shape, t.dtype) for t in ours] == [(t.shape, t.dtype) for t in own]
print(len(ours))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.split() == ["10"], out


NUMBERS = {"as_in_a_model": {}, "ragged": {"t": 1000, "b": 2, "h": 16}, "one_group": {"g": 1, "h": 24, "t": 300},
           "a_group_a_head": {"g": 4, "h": 4}, "states_of_64": {"n": 64, "t": 520},
           "states_every_64": {"chunk": 64, "t": 300}, "states_every_128": {"chunk": 128, "t": 300, "b": 2},
           "one_chunk": {"t": 40}, "no_state": {"initial": False}, "bare": {"initial": False, "skip": False},
           "strong_decay": {"rates": (1.0, 40.0), "t": 400}, "no_decay": {"rates": (0.0, 0.0)}, "rows_together": {},
           "gradient_in_slices": {"t": 300},
           "documents": {"t": 300, "b": 2, "begins": [(0, 3, 64, 70, 127, 128, 191), (250,)]},
           "documents_in_short_chunks": {"t": 520, "chunk": 64, "begins": [(1, 63, 65, 256, 400)], "initial": False},
           "documents_of_one_group": {"t": 300, "g": 1, "h": 24, "chunk": 128, "begins": [(130,)]}}


@on_hopper
@pytest.mark.parametrize("rows", [torch.bfloat16, torch.float32], ids=["rows_in_16_bits", "rows_in_float32"])
@pytest.mark.parametrize("label", NUMBERS)
def test_numbers(rand, monkeypatch, label, rows):
    """Against the definition in float64: what is not rounded to bfloat16 at the end, to three units of 16 bits."""
    from megacpp_compile.lowerings.ssd_scan import cuda_triton

    gluon, launched = hopper("ssd_scan"), []
    monkeypatch.setattr(LEAST_CHUNKS, 0)
    names = "ssd_walk_hopper", "ssd_scores_grad_hopper", "ssd_key_grad_hopper"
    for name in names:
        monkeypatch.setattr(gluon, name, told(getattr(gluon, name), launched))
    args, _, documents = scan(rand, **NUMBERS[label])
    # x, B and C are slices of rows that begin at odd multiples of 8 numbers, which are copied; these are not.
    args = on("cuda", [t.contiguous() if label == "rows_together" and t is not None and hasattr(t, "shape") else t
                       for t in args])  # fmt: skip
    (documents,) = on("cuda", (documents,))
    with poisoned_memory():
        y, last, states = cuda_triton.ssd_scan(*args, rows, documents)
    exact = on("cuda", args, torch.float64)
    want = reference_of("ssd_scan")(*exact, torch.float64, documents)
    unit = torch.finfo(torch.bfloat16).eps if rows == torch.bfloat16 else 3 * INNER_UNIT
    assert not faults((y,), want[:1], unit) and not faults((last, states), want[1:], 3 * INNER_UNIT)
    (dy,) = on("cuda", (rand(*y.shape, dtype=rows),))
    if label == "gradient_in_slices":  # of rows that begin at odd multiples of 8 numbers
        dy = torch.nn.functional.pad(dy.flatten(2), (8, 0))[..., 8:].unflatten(2, dy.shape[2:])
    dlast = last if NUMBERS[label].get("initial", True) else None
    back = dy, dlast, *args[:7], states, args[7], documents
    with poisoned_memory():
        got = cuda_triton.ssd_scan_backward(*back)
    exact_back = on("cuda", back, torch.float64)
    want = reference_of("ssd_scan_backward")(*exact_back)

    def rounding():
        wide = on("cpu", back, torch.float64)
        return [TIMES_ROUNDING * moved for moved in moved_by_rounding(reference_of("ssd_scan_backward"), wide, INNER_UNIT)]

    eps = torch.finfo(torch.bfloat16).eps
    in_16_bits = [0, 3, 4]  # gradients of x, B and C
    assert not faults([got[i] for i in in_16_bits], [want[i] for i in in_16_bits], eps)
    in_float32 = [1, 2, 5, 6]
    assert not faults([got[i] for i in in_float32], [want[i] for i in in_float32], 3 * INNER_UNIT,
                      lambda: [rounding()[i] for i in in_float32])  # fmt: skip
    walks = [names[0]] * (2 if args[7] == 128 or args[0].shape[1] <= 128 and args[0].shape[1] > 64 else 3)
    assert launched == [*walks, *names[1:]]


@on_hopper
@pytest.mark.parametrize("label", ["as_in_a_model", "ragged", "one_group", "documents"])
def test_gradients_side_by_side(rand, monkeypatch, label):
    """Those of x, B and C, wherever they begin, are to the bit what they are in memory of their own."""
    from megacpp_compile.lowerings.ssd_scan import cuda_triton

    hopper("ssd_scan")
    monkeypatch.setattr(LEAST_CHUNKS, 0)
    args, _, documents = scan(rand, **NUMBERS[label])
    args, (documents,) = on("cuda", args), on("cuda", (documents,))
    y, last, states = cuda_triton.ssd_scan(*args, torch.float32, documents)
    back = rand(*y.shape, dtype=torch.float32, device="cuda"), last, *args[:7], states, args[7], documents
    apart = cuda_triton.ssd_scan_backward(*back)
    parts = [apart[i].flatten(2) for i in (4, 0, 3)]  # C's, x's, B's
    at_c, at_x, at_b = 0, parts[0].shape[-1], parts[0].shape[-1] + parts[1].shape[-1]
    with poisoned_memory():
        joined, *rest = torch.ops.megacpp_ssd.backward(*back, [at_x, at_b, at_c])
    assert torch.equal(joined, torch.cat(parts, -1))
    assert all(torch.equal(rest[i - 1], apart[i]) for i in (1, 2, 5, 6))


@on_hopper
def test_in_a_cuda_graph(rand, monkeypatch):
    from megacpp_compile.lowerings.ssd_scan import cuda_triton

    hopper("ssd_scan")
    monkeypatch.setattr(LEAST_CHUNKS, 0)
    args, *_ = scan(rand, b=2, t=1024)
    args = on("cuda", args)

    def made():
        y, last, states = cuda_triton.ssd_scan(*args, torch.float32)
        return [y, last, *cuda_triton.ssd_scan_backward(y, last, *args[:7], states, args[7])]

    replays(made)
