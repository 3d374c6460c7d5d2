"""The grouped GEMMs in Gluon: that they compile for Hopper, which calls they take, how they are told where weights lie,
and on a GPU what they compute."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from megacpp_compile.lowerings._activation import Activation, Bound
from megacpp_compile.lowerings._kernels import grouped  # noqa: F401  registers the ops

from .contract import identical
from .gluon_kernels import assemble, needs_hopper, needs_triton, tile

pytest.importorskip("triton")
from megacpp_compile.lowerings._kernels import (
    hopper_grouped,
    triton_gated,
    triton_gated_gradients,
    triton_grouped,
    triton_quantise,
)

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CLAMPED = Activation("silu", 1.702, offset=1.0, gate=Bound(high=7.0), up=Bound(-7.0, 7.0))
# Bytes of shared memory that a program may have.
MOST = 227 * 1024
POINTERS = {"take": "*i64", "take_grad": "*i64", "take_x": "*i64", "ends": "*i32", "places": "*i32", "gates": "*fp32",
            "dots": "*fp32", "x_scale": "*fp32", "w_scale": "*fp32"}  # fmt: skip
ROWS_OF = "x", "x2", "out", "gate", "up", "grad", "d_gate", "d_up"
# The arguments that make a kernel another one, and the tiles that TMA brings for it.
ROWS = {"gate_and_up": ({"TAKE": True, "PAIR": True}, {"weights": (1, 128, 64)}),
        "down": ({"NEAR": 16}, {"x": (128, 64), "x2": (128, 64), "weights": (1, 256, 64)}),
        "gathered": ({"TAKE": True}, {"weights": (1, 256, 64)}),
        "back": ({"SECOND": True, "ACROSS": True}, {"x": (128, 64), "x2": (128, 64), "weights": (1, 64, 256)}),
        "clamped": ({"TAKE": True, "PAIR": True, "CURVE": CLAMPED.constants}, {"weights": (1, 128, 64)})}
# Those of float8, whose rows have scales, and whose weights have them but in backward.
ROWS_IN_FLOAT8 = {"gate_and_up": ({"TAKE": True, "PAIR": True}, {"weights": (1, 128, 128)}),
                  "down": ({}, {"x": (128, 128), "x2": (128, 128), "weights": (1, 256, 128)}),
                  "gathered": ({"TAKE": True}, {"weights": (1, 256, 128)}),
                  "back": ({"w_scale": None}, {"x": (128, 128), "x2": (128, 128), "weights": (1, 256, 128)})}
WEIGHTS = {"x_gathered": {"TAKE_GRAD": False, "TAKE_X": True, "BM": 128, "BN": 256},
           "grad_gathered": {"TAKE_GRAD": True, "TAKE_X": False, "BM": 256, "BN": 128},
           "as_they_lie": {"TAKE_GRAD": False, "TAKE_X": False, "BM": 128, "BN": 256}}


def compiles(kernel: Any, constants: dict[str, Any], tiles: dict[str, tuple[int, ...]],
             dtype: torch.dtype = BF16) -> str:
    """The kernel's PTX, of operands of that dtype."""
    types = {**POINTERS, **dict.fromkeys(ROWS_OF, "*bf16"), "x": "*bf16" if dtype == BF16 else "*fp8e4nv"}
    types["x2"] = types["x"]
    types |= {name: tile(shape, BF16 if name in ("gate", "up") else dtype) for name, shape in tiles.items()}
    made = assemble(kernel, types, {"STAGES": 4, **constants})
    ptx = made.asm["ptx"]
    assert made.metadata.shared <= MOST
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    return ptx


@pytest.mark.end_to_end
@needs_triton
class TestCompiled:
    GIVEN: ClassVar = {"E": 64, "EP": 128, "BN": 256, "NEAR": 1, "NAME": "silu", "CURVE": None, "TAKE": False,
                       "PAIR": False, "SECOND": False, "ACROSS": False, "REGISTERS": 208, "COPY_REGISTERS": 64}

    @pytest.mark.rare(*(ROWS_IN_FLOAT8.keys() - {"back"}))
    @pytest.mark.parametrize("case", ROWS_IN_FLOAT8)
    def test_rows_in_float8(self, case):
        constants, tiles = ROWS_IN_FLOAT8[case]
        ptx = compiles(hopper_grouped.grouped_rows_hopper, self.GIVEN | constants, tiles, FP8)
        assert "m64n256k32.f32.e4m3.e4m3" in ptx
        assert ("cp.async.cg" in ptx) == bool(constants.get("TAKE")), "rows that are gathered are copied, others by TMA"

    @pytest.mark.rare(*(ROWS.keys() - {"gate_and_up"}))
    @pytest.mark.parametrize("case", ROWS)
    def test_rows(self, case):
        constants, tiles = ROWS[case]
        given = self.GIVEN | {"x_scale": None, "w_scale": None}
        ptx = compiles(hopper_grouped.grouped_rows_hopper, given | constants, tiles)
        assert "m64n256k16" in ptx
        assert ("cp.async.cg" in ptx) == bool(constants.get("TAKE")), "rows that are gathered are copied, others by TMA"

    @pytest.mark.rare(*(WEIGHTS.keys() - {"as_they_lie"}))
    @pytest.mark.parametrize("case", WEIGHTS)
    def test_weights(self, case):
        constants = WEIGHTS[case]
        tiles = {"grad_tiles": (64, constants["BM"]), "x_tiles": (64, constants["BN"])}
        given = {"NEAR": 1, "REGISTERS": 184, "COPY_REGISTERS": 104}
        ptx = compiles(hopper_grouped.grouped_weights_hopper, given | constants, tiles)
        assert ("cp.async.cg" in ptx) == (case != "as_they_lie")


def addresses(lying: Any) -> list[int]:
    unit = lying.strides[0] * lying.base.element_size()
    return [lying.base.data_ptr() + place * unit for place in lying.places.tolist()]


class TestLying:
    """TMA is told of one array over all weights."""

    def test_separate(self):
        weights = [torch.empty(24, 64, dtype=BF16) for _ in range(5)]
        lying = hopper_grouped._lying(weights)
        assert addresses(lying) == [w.data_ptr() for w in weights]
        assert lying.shape == [max(lying.places.tolist()) + 1, 24, 64]
        assert lying.strides[1:] == [64, 1] and not lying.across

    @pytest.mark.parametrize("parts", [1, 2])
    def test_stacked(self, parts):
        weights = [torch.empty(5, 24, 64, dtype=BF16) for _ in range(parts)]
        lying = hopper_grouped._lying(weights)
        assert addresses(lying) == [one.data_ptr() for w in weights for one in w.unbind()]

    def test_gate_and_up_in_one(self):
        weights = [torch.empty(48, 64, dtype=BF16) for _ in range(3)]
        lying = hopper_grouped._lying(weights, halves=True)
        assert addresses(lying) == [w.chunk(2)[half].data_ptr() for half in range(2) for w in weights]
        assert lying.shape[1:] == [24, 64]

    def test_across(self):
        """What is summed may lie across in bfloat16 alone."""
        weights = [torch.empty(32, 64, dtype=BF16).t() for _ in range(3)]
        lying = hopper_grouped._lying(weights)
        assert lying.across and lying.shape[1:] == [32, 64] and lying.strides[1:] == [64, 1]
        assert lying.tiles(128, 64).block_shape == [1, 64, 128]
        transposed = hopper_grouped._lying(weights, transposed=True)
        assert not transposed.across and transposed.shape == lying.shape and transposed.tiles(128, 64).block_shape == [1, 128, 64]
        assert hopper_grouped._lying(weights, halves=True) is None
        narrow = [w.to(FP8) for w in weights]
        assert hopper_grouped._lying(narrow) is None and hopper_grouped._lying(narrow, transposed=True)

    def test_too_far_apart(self, monkeypatch):
        """Which is known before their places are put on the device."""
        places = (0, 16, 2**36)
        assert hopper_grouped._places(places) == (16, 2**32 + 1, (0, 1, 2**32))
        assert 2**32 + 1 > hopper_grouped.MOST_UNITS
        monkeypatch.setattr(hopper_grouped, "addresses", lambda weights: [*places])
        monkeypatch.setattr(hopper_grouped, "table", lambda *_: pytest.fail("a table is made"))
        assert hopper_grouped._lying([torch.empty(24, 64, dtype=BF16) for _ in places]) is None

    def test_one(self):
        lying = hopper_grouped._lying([torch.empty(24, 64, dtype=BF16)])
        assert lying.shape == [1, 24, 64] and lying.places.tolist() == [0]

    @pytest.mark.parametrize(
        "weights",
        [[torch.empty(24, 64)], [torch.empty(24, 60, dtype=BF16)],
         [torch.empty(24, 64, dtype=BF16), torch.empty(32, 64, dtype=BF16)],
         [torch.empty(24, 64, dtype=BF16), torch.empty(64, 24, dtype=BF16).t()],
         [torch.empty(24 * 64 + 4, dtype=BF16)[4:].view(24, 64)], [torch.empty(24, 128, dtype=BF16)[:, ::2]]],
        ids=["float32", "rows_of_120_bytes", "sizes_differ", "strides_differ", "begins_at_8_bytes", "every_other"],
    )
    def test_what_tma_does_not_take(self, weights):
        assert hopper_grouped._lying(weights) is None


@pytest.fixture
def launched(monkeypatch):
    """What would be launched on a Hopper GPU, by kernels in Gluon and by others."""
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(hopper_grouped, "on_hopper", lambda device: True)
    monkeypatch.setattr(hopper_grouped, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper_grouped.kernels, "missing", "")
    monkeypatch.setattr(hopper_grouped, "launch", lambda kernel, grid, **args: calls.append((kernel.fn.__name__, args)))
    for module, name in ((triton_grouped, "rows"), (triton_gated, "gated"), (triton_gated_gradients, "gradients"),
                         (triton_gated_gradients, "gradients_of_rows")):
        monkeypatch.setattr(module, name, lambda *args, _name=name, **named: calls.append((_name, named)))
    monkeypatch.setattr(hopper_grouped, "grouped_mm", lambda *args: calls.append(("grouped_mm", {})))
    return calls


@needs_triton
class TestServes:
    OFFSETS = torch.tensor([4096, 8192], dtype=torch.int32)
    TAKE = torch.zeros(8192, dtype=torch.int64)

    def rows(self, count=8192, width=64):
        return torch.empty(count, width, dtype=BF16)

    def weights(self, n=128, k=64):
        return [torch.empty(n, k, dtype=BF16) for _ in range(2)]

    def test_rows(self, launched):
        out = hopper_grouped.rows([self.rows()], self.weights(), self.OFFSETS, False, None)
        ((name, args),) = launched
        assert name == "grouped_rows_hopper" and out.shape == (8192, 128)
        assert not args["TAKE"] and not args["ACROSS"] and args["weights"].block_shape == [1, 256, 64]

    def test_rows_of_two_back(self, launched):
        out = hopper_grouped.rows([self.rows(), self.rows()], 2 * self.weights(64, 128), self.OFFSETS, True, None)
        ((_, args),) = launched
        assert args["SECOND"] and args["ACROSS"] and out.shape == (8192, 128)
        assert args["weights"].block_shape == [1, 64, 256] and len(args["places"]) == 4

    def test_gated(self, launched):
        x, w = self.rows(500), self.weights()
        gate, up, out = hopper_grouped.gated(x, w, self.weights(), self.OFFSETS, self.TAKE, "silu")
        assert gate.shape == up.shape == out.shape == (8192, 128)
        both, empty, out = hopper_grouped.gated(x, w, [], self.OFFSETS, self.TAKE, "silu")
        assert both.shape == (8192, 128) and not empty.numel() and out.shape == (8192, 64)
        assert [name for name, _ in launched] == 2 * ["grouped_rows_hopper"]
        assert [args["hs"] for _, args in launched] == [128, 128]

    def test_gradients(self, launched):
        hidden, gates = [self.rows(), self.rows()], torch.empty(8192)
        grad = self.rows(500, 128)
        hopper_grouped.gradients(grad, self.weights(128, 64), hidden, gates, self.OFFSETS, self.TAKE, "silu")
        assert [name for name, _ in launched] == ["grouped_rows_hopper", "gradients_of_rows"]
        args = launched[0][1]
        assert args["ACROSS"] and args["TAKE"] and args["out"].shape == (8192, 64)

    def test_many_columns(self, launched):
        hopper_grouped.rows([self.rows()], self.weights(8192), self.OFFSETS, False, None)
        hopper_grouped.rows([self.rows()], self.weights(8448), self.OFFSETS, False, None)
        assert [args["NEAR"] for _, args in launched] == [1, 16]

    @pytest.mark.parametrize(("n", "k", "tall"), [(2048, 1408, 256), (2816, 2048, 128), (128, 128, 128)])
    def test_weights_by_fewer_tiles(self, launched, n, k, tall):
        made = hopper_grouped.weights(self.rows(8192, n), self.rows(8192, k), self.OFFSETS, None, None)
        ((name, args),) = launched
        assert name == "grouped_weights_hopper" and made.shape == (2, n, k) and args["BM"] == tall
        assert args["tiles"] == 2 * -(-n // tall) * -(-k // (384 - tall))

    def test_float8(self, launched):
        x, w8, scales = self.rows().to(FP8), torch.stack(self.weights()).to(FP8), (torch.ones(8192), torch.ones(2, 128))
        made = hopper_grouped.rows([x], [w8], self.OFFSETS, False, None, scales, BF16)
        assert made.dtype == BF16
        made = hopper_grouped.gated(x, [w8], [], self.OFFSETS, self.TAKE, "silu", scales, BF16)
        assert all(t.dtype == BF16 for t in made)
        hidden, gates = [self.rows(), self.rows()], torch.empty(8192)
        transposed = [torch.empty(2, 64, 128, dtype=FP8).transpose(-1, -2)]
        hopper_grouped.gradients(self.rows(8192, 128).to(FP8), transposed, hidden, gates, self.OFFSETS, None, "silu",
                                 scales[0], BF16)
        assert [name for name, _ in launched] == 3 * ["grouped_rows_hopper"] + ["gradients_of_rows"]
        of_rows = [args for _, args in launched[:3]]
        assert [args["weights"].block_shape[1:] for args in of_rows] == [[256, 128], [128, 128], [256, 128]]
        assert of_rows[2]["x_scale"] is scales[0] and of_rows[2]["out"].dtype == BF16
        assert not any(args["ACROSS"] for args in of_rows)

    @pytest.mark.parametrize("why", ["lie_across", "float16"])
    def test_float8_left_to_triton(self, launched, why):
        w8, dtype = [w.to(FP8) for w in self.weights()], torch.float16 if why == "float16" else BF16
        if why == "lie_across":
            w8 = [w.t().contiguous().t() for w in w8]
        hopper_grouped.rows([self.rows().to(FP8)], w8, self.OFFSETS, False, None, (torch.ones(8192), None), dtype)
        assert [name for name, _ in launched] == ["rows"]

    @pytest.mark.parametrize(
        "why", ["few_rows", "few_of_a_group", "float16", "bias", "rows_of_120_bytes", "100_channels", "no_gluon"],
    )
    def test_leaves_to_others(self, launched, monkeypatch, why):
        x, w, offsets, named = self.rows(), self.weights(), self.OFFSETS, {}
        if why == "few_rows":
            x = self.rows(4096)
        if why == "few_of_a_group":
            w, offsets = 20 * w, self.OFFSETS.repeat(20)
        if why == "float16":
            x, w = x.half(), [one.half() for one in w]
        if why == "bias":
            named = {"bias": torch.empty(2, 128, dtype=BF16)}
        if why == "rows_of_120_bytes":
            x, w = self.rows(width=60), self.weights(k=60)
        if why == "100_channels":
            w = self.weights(100)
        if why == "no_gluon":
            monkeypatch.setattr(hopper_grouped.kernels, "missing", "this Triton has none")
        hopper_grouped.rows([x], w, offsets, False, None, **named)
        assert [name for name, _ in launched] == ["rows"]

    @pytest.mark.parametrize(("groups", "want"), [(21, "one two back"), (22, "one back"), (32, "one back"), (33, "")])
    def test_rows_of_a_group(self, launched, groups, want):
        offsets = torch.arange(1, groups + 1, dtype=torch.int32) * (8192 // groups)
        x, w = self.rows(), [torch.empty(groups, 64, 64, dtype=BF16)]
        calls = {"one": lambda: hopper_grouped.rows([x], w, offsets, False, None),
                 "two": lambda: hopper_grouped.rows([x, x], 2 * w, offsets, True, None),
                 "back": lambda: hopper_grouped.gradients(x, w, [x, x], torch.empty(8192), offsets, None, "silu")}
        for name, call in calls.items():
            launched.clear()
            call()
            assert launched[0][0].endswith("hopper") == (name in want.split()), name

    @pytest.mark.parametrize("why", ["lie_across", "100_channels", "bias"])
    def test_gate_and_up_left_to_triton(self, launched, why):
        w = [torch.empty(64, 128, dtype=BF16).t() for _ in range(2)] if why == "lie_across" else self.weights()
        bias = torch.empty(2, 128, dtype=BF16) if why == "bias" else None
        w = self.weights(100) if why == "100_channels" else w
        hopper_grouped.gated(self.rows(), w, w, self.OFFSETS, None, "silu", b_gate=bias, b_up=bias)
        assert [name for name, _ in launched] == ["gated"]

    @pytest.mark.parametrize(("rows", "n", "k"), [(512, 64, 64), (8192, 4096, 8192)], ids=["few_rows", "large"])
    def test_weights_by_cutlass(self, launched, rows, n, k):
        hopper_grouped.weights(self.rows(rows, n), self.rows(rows, k), self.OFFSETS, None, None)
        assert [name for name, _ in launched] == ["grouped_mm"]


class Ends:
    """Groups' ends, in memory that kernels read."""

    def __init__(self, ends: list[int], at: int = 0) -> None:
        self.ends, self.at = ends, at

    def __add__(self, step: int) -> Ends:
        return Ends(self.ends, self.at + step)


@needs_triton
@pytest.mark.parametrize("near", [1, 4, 16])
@pytest.mark.parametrize("across", [1, 3, 40])
@pytest.mark.parametrize("sizes", [[300, 0, 128, 129, 0], [5000, 1], [1] * 70, [0, 0, 7]], ids=str)
def test_programs_find_every_tile_once(monkeypatch, near, across, sizes):
    """The walk that all roles make, in Python: programs go by steps of their count, and behind the last group are rows
    of none."""
    module = importlib.import_module("megacpp_compile.lowerings._kernels.gluon_grouped")
    load = lambda at, mask, other: at.ends[at.at] if mask else other  # noqa: E731
    monkeypatch.setattr(module, "gl", SimpleNamespace(minimum=min, load=load))
    for name in ("placed", "advanced"):
        monkeypatch.setattr(module, name, getattr(module, name).fn)
    ends, behind, tall = [sum(sizes[: i + 1]) for i in range(len(sizes))], 200, 128
    want, first = set(), 0
    for group, end in enumerate([*ends, ends[-1] + behind]):
        want |= {(group, row, end, n) for row in range(first, end, tall) for n in range(across)}
        first = end
    tiles, got = len(want) // across, []
    for program in range(7):
        walk = (-1, 0, 0, 0, 0)
        for number in range(program, tiles * across, 7):
            rows = ends[-1] + behind
            found = module.found.fn(Ends(ends), rows, number, tiles, across, *walk, len(sizes), tall, near)
            got.append(found[:4])
            walk = found[4:]
    assert len(got) == len(want) and set(got) == want


# Experts, width, hidden, rows of each expert, rows of none behind them. Of some, tiles are cut on every side.
SIZES = {"plain": (3, 256, 384, [4096, 2048, 2048], 0), "ragged": (5, 264, 200, [1500, 0, 2011, 4800, 65], 50),
         "narrow": (2, 64, 72, [1, 8300], 7), "many": (30, 128, 128, [97 * (i % 7) + 1 for i in range(30)], 0),
         "wide": (2, 64, 4232, [5000, 3300], 9)}


class Case:
    """Operands of a layer's GEMMs, and its groups."""

    def __init__(self, rand: Any, experts: int, width: int, hidden: int, sizes: list[int], behind: int) -> None:
        self.live, self.total = sum(sizes), max(sum(sizes) + behind, hopper_grouped.LEAST_ROWS)
        self.ends = [sum(sizes[: i + 1]) for i in range(experts)]
        self.offsets = torch.tensor(self.ends, dtype=torch.int32, device="cuda")
        self.take = torch.arange(self.total, device="cuda") * 37 % 300
        self.x, self.grad = (self.made(rand, 300, width) for _ in range(2))
        self.a, self.gate, self.up = (self.made(rand, self.total, hidden) for _ in range(3))
        self.d_hidden = self.made(rand, self.total, 2 * hidden)
        self.gates = self.made(rand, self.total, 1).flatten().float()
        self.into = [self.made(rand, hidden, width) / width**0.5 for _ in range(2 * experts)]
        self.down = [self.made(rand, width, hidden) / hidden**0.5 for _ in range(experts)]
        self.experts = experts

    @staticmethod
    def made(rand: Any, *shape: int) -> Tensor:
        return rand(*shape).to("cuda", BF16)

    def groups(self) -> list[slice]:
        return [slice(start, end) for start, end in zip([0, *self.ends[:-1]], self.ends, strict=True)]

    def by_group(self, x: Tensor, weights: list[Tensor], transposed: bool = False) -> Tensor:
        """x @ w.T, or x @ w, in float32; zeros behind all groups."""
        out = torch.zeros(self.total, weights[0].shape[-1 if transposed else -2], device="cuda")
        for own, w in zip(self.groups(), weights, strict=True):
            out[own] = x[own].float() @ (w.float() if transposed else w.float().t())
        return out

    def sums(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.stack([left[own].float().t() @ right[own].float() for own in self.groups()])


@pytest.fixture
def launches(monkeypatch):
    """That a test launches kernels in Gluon, however few rows its groups have."""
    launched, launch = [], hopper_grouped.launch
    monkeypatch.setattr(hopper_grouped, "launch", lambda *args, **named: launched.append(launch(*args, **named)))
    for name in ("LEAST_OF_GROUP", "LEAST_OF_TWO"):
        monkeypatch.setattr(hopper_grouped, name, 0)
    yield
    assert launched and not hopper_grouped.kernels.missing


def near(got: Tensor, want: Tensor) -> None:
    """Within bfloat16's rounding of the largest, and exactly zero where all that is summed is."""
    assert got.isfinite().all()
    assert (got.float() - want).abs().max() <= 2**-7 * want.abs().max()


@needs_hopper
@pytest.mark.parametrize("size", SIZES)
class TestValues:
    @pytest.fixture
    def case(self, rand, size, launches):
        return Case(rand, *SIZES[size])

    @pytest.mark.parametrize("stacked", [False, True], ids=["separate", "stacked"])
    def test_rows(self, case, stacked):
        down, into = ([torch.stack(case.down)], torch.stack(case.into).chunk(2)) if stacked else (case.down, case.into)
        near(hopper_grouped.rows([case.a], down, case.offsets, False, None), case.by_group(case.a, case.down))
        gathered = hopper_grouped.rows([case.grad], down, case.offsets, True, case.take)
        near(gathered, case.by_group(case.grad[case.take], case.down, True))
        parts = case.d_hidden.chunk(2, 1)
        back = hopper_grouped.rows(list(parts), list(into), case.offsets, True, None)
        n = case.experts
        near(back, sum(case.by_group(parts[i], case.into[i * n : (i + 1) * n], True) for i in range(2)))
        assert not back[case.live :].any() and not gathered[case.live :].any()

    @pytest.mark.parametrize("fused", [False, True], ids=["pair", "in_one"])
    def test_gated(self, case, fused):
        gates, ups = case.into[: case.experts], case.into[case.experts :]
        both = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        weights = (both, []) if fused else (gates, ups)
        gate, up, out = hopper_grouped.gated(case.x, *weights, case.offsets, case.take, "silu")
        if fused:
            gate, up = gate.chunk(2, 1)
        x = case.x[case.take]
        near(gate, case.by_group(x, gates))
        near(up, case.by_group(x, ups))
        near(out, torch.nn.functional.silu(gate.float()) * up.float())

    @pytest.mark.parametrize("gathered", [False, True], ids=["as_they_lie", "gathered"])
    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh", str(CLAMPED)])
    def test_gradients(self, case, gathered, activation):
        """As Triton's kernel, whose tests compare it with float64: but for the sigmoid's last bit."""
        grad, take = (case.grad, case.take) if gathered else (case.grad[case.take], None)
        args = case.down, [case.gate, case.up], case.gates, case.offsets, take, activation
        got = hopper_grouped.gradients(grad, *args)
        want = triton_gated_gradients.gradients(grad, *args)
        for g, w in zip(got, want, strict=True):
            near(g, w.float())
            assert not g[case.live :].any()

    def test_gradients_of_transposed_weights(self, case):
        args = [case.gate, case.up], case.gates, case.offsets, case.take, "silu"
        transposed = [w.t().contiguous().t() for w in case.down]
        for g, w in zip(hopper_grouped.gradients(case.grad, transposed, *args),
                        hopper_grouped.gradients(case.grad, case.down, *args), strict=True):
            assert torch.equal(g, w)

    def test_weights(self, case):
        """What stands behind the last group, and in the next one, is not a number, and changes nothing."""
        a, d_hidden = case.a.clone(), case.d_hidden.clone()
        a[case.live :] = d_hidden[case.live :] = float("nan")
        grad, x = case.grad[case.take], case.x[case.take]
        near(hopper_grouped.weights(case.grad, a, case.offsets, case.take, None), case.sums(grad, case.a))
        near(hopper_grouped.weights(d_hidden, case.x, case.offsets, None, case.take), case.sums(case.d_hidden, x))
        near(hopper_grouped.weights(d_hidden, a, case.offsets, None, None), case.sums(case.d_hidden, case.a))
        first = case.groups()[0]
        a[first], d_hidden[first] = case.a[first], case.d_hidden[first]
        a[first.stop :] = d_hidden[first.stop :] = float("nan")
        got = hopper_grouped.weights(d_hidden, a, case.offsets, None, None)[0]
        near(got, case.sums(case.d_hidden, case.a)[0])

    def test_equal_bits_again(self, case):
        def made() -> list[Tensor]:
            gate, up, out = hopper_grouped.gated(case.x, case.into[: case.experts], case.into[case.experts :],
                                                 case.offsets, case.take, "silu")
            more = hopper_grouped.gradients(case.grad, case.down, [gate, up], case.gates, case.offsets, case.take,
                                            "silu")
            return [gate, up, out, *more, hopper_grouped.weights(more[0], case.x, case.offsets, None, case.take)]

        identical(made(), made())


# Of these, rows of payloads begin at multiples of 16 bytes.
SIZES_IN_FLOAT8 = {"plain": SIZES["plain"], "ragged": (5, 272, 208, [1500, 0, 2011, 4800, 65], 50),
                   "narrow": (2, 64, 80, [1, 8300], 7), "many": SIZES["many"], "wide": (2, 64, 4240, [5000, 3300], 9)}


@needs_hopper
@pytest.mark.parametrize("size", SIZES_IN_FLOAT8)
class TestFloat8:
    """Of payloads times their scales, in float32."""

    @pytest.fixture
    def case(self, rand, size, launches):
        return Case(rand, *SIZES_IN_FLOAT8[size])

    @staticmethod
    def wide(payload: Tensor, scale: Tensor) -> Tensor:
        return payload.float() * scale[..., None]

    def test_rows(self, case):
        """What stands behind the last group may have a scale that is infinite."""
        a = case.a.clone()
        a[case.live :] = float("inf")
        x8, x_scale = triton_quantise.quantised_rows(a)
        assert x_scale[case.live :].isinf().all()
        w8, scale = triton_quantise.quantised_weights(case.down, 1)
        got = hopper_grouped.rows([x8], [w8], case.offsets, False, None, (x_scale, scale), BF16)
        near(got, case.by_group(self.wide(x8, x_scale), list(self.wide(w8, scale))))
        assert not got[case.live :].any()

    def test_rows_gathered(self, case):
        x8, x_scale = triton_quantise.quantised_rows(case.x)
        w8, scale = triton_quantise.quantised_weights(case.into[: case.experts], 1)
        got = hopper_grouped.rows([x8], [w8], case.offsets, False, case.take, (x_scale, scale), BF16)
        near(got, case.by_group(self.wide(x8, x_scale)[case.take], list(self.wide(w8, scale))))

    def test_rows_back(self, case):
        _, scale = triton_quantise.quantised_weights(case.into, 2)
        x8, x_scale = triton_quantise.quantised_rows(case.d_hidden, None, scale, case.offsets)
        w8 = triton_quantise.transposed_weights(case.into, 2, scale)
        got = hopper_grouped.rows([x8], [w8], case.offsets, False, None, (x_scale, None), BF16)
        near(got, case.by_group(self.wide(x8, x_scale), list(w8.float())))

    @pytest.mark.parametrize("fused", [False, True], ids=["pair", "in_one"])
    def test_gated(self, case, fused):
        x8, x_scale = triton_quantise.quantised_rows(case.x)
        w8, scale = triton_quantise.quantised_weights(case.into, 2)
        weights = ([w8], []) if fused else tuple([part] for part in w8.chunk(2, 1))
        gate, up, out = hopper_grouped.gated(x8, *weights, case.offsets, case.take, "silu", (x_scale, scale), BF16)
        if fused:
            gate, up = gate.chunk(2, 1)
        want = case.by_group(self.wide(x8, x_scale)[case.take], list(self.wide(w8, scale)))
        near(torch.cat([gate, up], 1), want)
        near(out, torch.nn.functional.silu(gate.float()) * up.float())
        assert not gate[case.live :].any() and not out[case.live :].any()

    @pytest.mark.parametrize("activation", ["silu", str(CLAMPED)])
    def test_gradients(self, case, activation):
        _, scale = triton_quantise.quantised_weights(case.down, 1)
        g8, g_scale = triton_quantise.quantised_rows(case.grad, case.take, scale, case.offsets)
        w8 = triton_quantise.transposed_weights(case.down, 1, scale).transpose(-1, -2)
        args = g8, [w8], [case.gate, case.up], case.gates, case.offsets, None, activation, g_scale, BF16
        got, want = hopper_grouped.gradients(*args), triton_gated_gradients.gradients(*args)
        for g, w in zip(got, want, strict=True):
            near(g, w.float())
            assert not g[case.live :].any()
