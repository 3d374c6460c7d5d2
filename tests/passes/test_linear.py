"""Linears under a precision plan: which are taken, with what beside them, and why others are not.

A CPU multiplies no float8. Where the pass has to fire, the question is answered for it.
"""

from __future__ import annotations

import dataclasses

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megacpp_compile
from megacpp_compile.config.options import Config
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.passes import linear
from tests.corpus.spellings import PlainMLA
from tests.frames import check, largest_error, render, run, train

NAME = "linear"
DIM, HIDDEN, ROWS = 32, 48, 16
EVERYTHING = PrecisionPlan(rules=(("*", "fp8_current"),), gate=False)
# Of the largest value: three bits of mantissa in operands and gradients, through two layers.
FLOAT8 = 0.15


@pytest.fixture
def float8(monkeypatch):
    monkeypatch.setattr(linear, "no_float8", lambda device: "")
    monkeypatch.setattr(linear, "no_block_scales", lambda device: "")


class MLP(nn.Module):
    def __init__(self, dtype=torch.bfloat16, hidden=HIDDEN, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.up_proj, self.gate_proj = (nn.Linear(DIM, hidden, bias=bias, dtype=dtype) for _ in range(2))
        self.down_proj = nn.Linear(hidden, DIM, bias=bias, dtype=dtype)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def hidden(rows=ROWS, dtype=torch.bfloat16):
    return (torch.randn(2, rows, DIM, generator=torch.Generator().manual_seed(rows)).to(dtype).requires_grad_(),)


def config(plan=EVERYTHING, **options):
    return Config(strict=True, precision=plan, **options)


def trained(module, args, device="cpu", **options):
    """The report of a step through the backend, whose results and gradients are near eager's."""
    torch._dynamo.reset()
    module, args = module.to(device), tuple(a.detach().to(device).requires_grad_() for a in args)
    with megacpp_compile.record() as report:
        compiled = torch.compile(module, backend="megacpp", options={**options, "strict": True}, fullgraph=True)
        got = train(compiled, module, args)
    error, which = largest_error(got, train(module, module, args))
    assert error <= FLOAT8, which
    return report


# --- fires


def test_graph(float8):
    """x is quantised once for both of its readers."""
    frames = check(MLP(), hidden(), config(), tolerance=FLOAT8)
    assert frames.counts[NAME] == 3
    expecttest.assert_expected_inline(render(frames.graph), """\
detach: bf16[2, 16, 32] = detach(x)
fp8_quantize_transposed: (float8_e4m3fn[2, 16, 32], float8_e4m3fn[32, 32], f32[]) = megacpp.fp8_quantize_transposed(detach, e4m3)
getitem: float8_e4m3fn[2, 16, 32] = fp8_quantize_transposed[0]
getitem_1: float8_e4m3fn[32, 32] = fp8_quantize_transposed[1]
getitem_2: f32[] = fp8_quantize_transposed[2]
detach_1: bf16[48, 32] = detach(gate_proj_weight)
fp8_quantize: (float8_e4m3fn[48, 32], f32[]) = megacpp.fp8_quantize(detach_1, e4m3)
getitem_3: float8_e4m3fn[48, 32] = fp8_quantize[0]
getitem_4: f32[] = fp8_quantize[1]
fp8_linear: (bf16[2, 16, 48]) = megacpp.fp8_linear(x, [gate_proj_weight], getitem, getitem_2, getitem_3, getitem_4, [], e4m3, bfloat16, None, None, getitem_1)
getitem_5: bf16[2, 16, 48] = fp8_linear[0]
silu: bf16[2, 16, 48] = silu(getitem_5)
detach_2: bf16[48, 32] = detach(up_proj_weight)
fp8_quantize_1: (float8_e4m3fn[48, 32], f32[]) = megacpp.fp8_quantize(detach_2, e4m3)
getitem_6: float8_e4m3fn[48, 32] = fp8_quantize_1[0]
getitem_7: f32[] = fp8_quantize_1[1]
fp8_linear_1: (bf16[2, 16, 48]) = megacpp.fp8_linear(x, [up_proj_weight], getitem, getitem_2, getitem_6, getitem_7, [], e4m3, bfloat16, None, None, getitem_1)
getitem_8: bf16[2, 16, 48] = fp8_linear_1[0]
mul: bf16[2, 16, 48] = mul.Tensor(silu, getitem_8)
detach_3: bf16[2, 16, 48] = detach(mul)
fp8_quantize_transposed_1: (float8_e4m3fn[2, 16, 48], float8_e4m3fn[48, 32], f32[]) = megacpp.fp8_quantize_transposed(detach_3, e4m3)
getitem_9: float8_e4m3fn[2, 16, 48] = fp8_quantize_transposed_1[0]
getitem_10: float8_e4m3fn[48, 32] = fp8_quantize_transposed_1[1]
getitem_11: f32[] = fp8_quantize_transposed_1[2]
detach_4: bf16[32, 48] = detach(down_proj_weight)
fp8_quantize_2: (float8_e4m3fn[32, 48], f32[]) = megacpp.fp8_quantize(detach_4, e4m3)
getitem_12: float8_e4m3fn[32, 48] = fp8_quantize_2[0]
getitem_13: f32[] = fp8_quantize_2[1]
fp8_linear_2: (bf16[2, 16, 32]) = megacpp.fp8_linear(mul, [down_proj_weight], getitem_9, getitem_11, getitem_12, getitem_13, [], e4m3, bfloat16, None, None, getitem_10)
getitem_14: bf16[2, 16, 32] = fp8_linear_2[0]
return [getitem_14]""")


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="there from torch 2.10 on")
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed"])
def test_graph_of_a_gradient_in_float32(float8, recipe):
    """The parameter's `grad_dtype` is the op's last argument; all else is as it is without."""
    plan = PrecisionPlan(rules=(("*", recipe),), gate=False)
    graphs = []
    for dtype in (torch.bfloat16, torch.float32):
        module = MLP()
        module.gate_proj.weight.grad_dtype = dtype
        frames = run(module, hidden(), config(plan))
        graphs.append(render(frames.graph).splitlines())
        assert [s.note for a in frames.analyses for s in a.outcome.sites][1:] == ["", ""]
    (plain, asked), *others = [(a, b) for a, b in zip(*graphs, strict=True) if a != b]
    assert not others and "gate_proj_weight" in plain and "megacpp.fp8_linear(" in plain
    assert plain.endswith(", None, None, getitem_1)") and asked == plain.removesuffix(")") + ", float32)"


def test_bias_and_a_matmul(float8):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj = nn.Linear(DIM, HIDDEN, dtype=torch.bfloat16)
            self.weight = nn.Parameter(torch.randn(HIDDEN, DIM, dtype=torch.bfloat16) / 6)

        def forward(self, x):
            return torch.matmul(F.gelu(self.up_proj(x)), self.weight)

    frames = check(Other(), hidden(), config(), tolerance=FLOAT8)
    assert frames.counts[NAME] == 2, frames.misses


def test_autocast(float8):
    """Parameters in float32, computed in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        frames = run(MLP(torch.float32), hidden(dtype=torch.float32), config())
    assert frames.counts[NAME] == 3, frames.misses


def test_takes_latents_projections_and_leaves_the_rest_of_attention_to_its_passes(float8):
    """The up-projections of latents are in float8; rotations are recognised behind them."""
    block = PlainMLA(48, 4, 32, 32, 16, 16, 16).to(torch.bfloat16)
    args = tuple(a.to(torch.bfloat16).detach() for a in block.example_inputs(2, 16))
    plain = run(block, args, Config(strict=True))
    frames = run(block, args, config())
    rotations = [n for n in plain.fired if "rope" in n]
    assert rotations and all(frames.counts[n] == plain.counts[n] for n in rotations), frames.fired
    assert frames.counts[NAME] and frames.counts["down_norm_up"] < plain.counts["down_norm_up"]


def test_the_plan_chooses(float8):
    """First match wins; bfloat16 is no near miss."""
    plan = PrecisionPlan(rules=(("up_proj", "bf16"), ("*", "fp8_current")), gate=False)
    frames = check(MLP(), hidden(), config(plan), tolerance=FLOAT8)
    assert frames.counts[NAME] == 2 and not frames.tags(NAME)


def test_saves_payloads(float8):
    """Under autograd the two inputs are kept as bytes, transposed as backward reads them; their values in bfloat16 are not."""
    frames = run(MLP(), hidden(), config())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        frames.compiled(*hidden())
    sizes = {(t.dtype, *t.shape) for t in kept}
    assert {(torch.float8_e4m3fn, DIM, 2 * ROWS), (torch.float8_e4m3fn, HIDDEN, 2 * ROWS)} <= sizes
    assert not {(torch.float8_e4m3fn, 2, ROWS, DIM), (torch.bfloat16, 2, ROWS, DIM)} & sizes


def test_through_the_backend(float8, no_kernels):
    """Lowered, differentiated by Inductor's partitioner, verified site by site, with bytes kept in place of values."""
    report = trained(MLP(), hidden(), precision=EVERYTHING, verify="each")
    assert report.counts[NAME] == 3
    assert [(s.pass_name, s.effective) for s in report.sites] == [(NAME, "reference")] * 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["selective", "full", 0.3])
def test_composes_with_remat(float8, no_kernels, policy):
    """What is computed again is quantised again, to the same bits."""
    results = []
    for given in (None, policy):
        module, (x,) = Layers(2), hidden()
        torch._dynamo.reset()
        options = {"precision": EVERYTHING, "policy": given, "strict": True, "require": {NAME: 6}}
        results.append(train(torch.compile(module, backend="megacpp", options=options), module, (x,)))
    for name, want in results[0].items():
        assert torch.equal(results[1][name], want), name


class Layers(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"norm": nn.RMSNorm(DIM, dtype=torch.bfloat16), "mlp": MLP()}) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["mlp"](layer["norm"](x))
        return x


def test_graph_of_weights_that_are_cast_in_front(float8):
    """One op for both orientations of each weight, and of a weight that was rounded by autocast."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up = nn.Linear(DIM, HIDDEN, bias=False)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.up(x)

    frames = check(Two(), hidden(), config(cache_weight_casts=True), tolerance=FLOAT8)
    assert frames.counts[NAME] == 1
    expecttest.assert_expected_inline(render(frames.graph), """\
_enter_autocast(cpu, bfloat16, True, False)
to_copy: bf16[48, 32] = _to_copy(up_weight, dtype=bfloat16)
detach: bf16[2, 16, 32] = detach(x)
fp8_quantize_transposed: (float8_e4m3fn[2, 16, 32], float8_e4m3fn[32, 32], f32[]) = megacpp.fp8_quantize_transposed(detach, e4m3)
getitem: float8_e4m3fn[2, 16, 32] = fp8_quantize_transposed[0]
getitem_1: float8_e4m3fn[32, 32] = fp8_quantize_transposed[1]
getitem_2: f32[] = fp8_quantize_transposed[2]
detach_1: bf16[48, 32] = detach(to_copy)
fp8_quantize_weights: (float8_e4m3fn[48, 32], float8_e4m3fn[32, 48], f32[]) = megacpp.fp8_quantize_weights([detach_1], True)
getitem_3: float8_e4m3fn[48, 32] = fp8_quantize_weights[0]
getitem_4: f32[] = fp8_quantize_weights[2]
getitem_5: float8_e4m3fn[32, 48] = fp8_quantize_weights[1]
fp8_linear: (bf16[2, 16, 48]) = megacpp.fp8_linear(x, [to_copy], getitem, getitem_2, getitem_3, getitem_4, [], e4m3, bfloat16, None, None, getitem_1, None, getitem_5)
getitem_6: bf16[2, 16, 48] = fp8_linear[0]
_exit_autocast(enter_autocast)
return [getitem_6]""")


# --- one GEMM for linears that share an input

GATED = PrecisionPlan(rules=(("*", "fp8_current"),))


@pytest.fixture
def narrow_alone(float8, monkeypatch):
    """The gate refuses up to 32 features; casts cost next to nothing, so that what joins another GEMM gains."""
    monkeypatch.setattr(linear.fp8_gain, "refusal", lambda _, shape: f"{shape[1]} features" if shape[1] <= 32 else "")
    monkeypatch.setattr(linear.fp8_gain, "COPY_TB_PER_S", 1e9)


class Pair(nn.Module):
    """Two readers of an input."""

    def __init__(self, widths=(48, 16), bias=(False, False)):
        super().__init__()
        torch.manual_seed(0)
        one, two = (nn.Linear(DIM, n, bias=b, dtype=torch.bfloat16) for n, b in zip(widths, bias, strict=True))
        self.one, self.two = one, two

    def forward(self, x):
        return self.one(x).tanh(), self.two(x)


def test_a_narrow_one_joins_a_wide_one(narrow_alone):
    frames = check(Pair(), hidden(), config(GATED), tolerance=FLOAT8)
    assert frames.counts[NAME] == 1 and not frames.tags(NAME)
    expecttest.assert_expected_inline(render(frames.graph), """\
detach: bf16[2, 16, 32] = detach(x)
fp8_quantize_transposed: (float8_e4m3fn[2, 16, 32], float8_e4m3fn[32, 32], f32[]) = megacpp.fp8_quantize_transposed(detach, e4m3)
getitem: float8_e4m3fn[2, 16, 32] = fp8_quantize_transposed[0]
getitem_1: float8_e4m3fn[32, 32] = fp8_quantize_transposed[1]
getitem_2: f32[] = fp8_quantize_transposed[2]
cat: bf16[64, 32] = cat([one_weight, two_weight])
detach_1: bf16[64, 32] = detach(cat)
fp8_quantize: (float8_e4m3fn[64, 32], f32[]) = megacpp.fp8_quantize(detach_1, e4m3)
getitem_3: float8_e4m3fn[64, 32] = fp8_quantize[0]
getitem_4: f32[] = fp8_quantize[1]
fp8_linear: (bf16[2, 16, 48], bf16[2, 16, 16]) = megacpp.fp8_linear(x, [one_weight, two_weight], getitem, getitem_2, getitem_3, getitem_4, [], e4m3, bfloat16, None, None, getitem_1)
getitem_5: bf16[2, 16, 48] = fp8_linear[0]
getitem_6: bf16[2, 16, 16] = fp8_linear[1]
tanh: bf16[2, 16, 48] = tanh(getitem_5)
return [tanh, getitem_6]""")


@pytest.mark.parametrize("bias", [(True, True), (True, False)])
def test_joins_by_bias(narrow_alone, bias):
    """Biases are put below each other; where one has none, each linear is by itself."""
    frames = check(Pair(bias=bias), hidden(), config(GATED), tolerance=FLOAT8)
    assert frames.counts[NAME] == 1 and frames.tags(NAME) == (set() if all(bias) else {"gate"})
    assert "cat" in render(frames.graph) or not all(bias)


def test_narrow_ones_join_each_other(narrow_alone):
    frames = check(Pair((32, 16)), hidden(), config(GATED), tolerance=FLOAT8)
    assert frames.counts[NAME] == 1 and not frames.tags(NAME)


def test_wide_ones_join_where_that_moves_less(float8):
    """Queries, keys and values of few heads: 24 channels of gradients to put together, 64 of the input's to add."""

    class QKV(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            make = lambda n: nn.Linear(64, n, bias=False, dtype=torch.bfloat16)  # noqa: E731
            self.q, self.k, self.v = make(64), make(16), make(16)

        def forward(self, x):
            return self.q(x).tanh(), self.k(x), self.v(x)

    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    frames = check(QKV(), (x,), config(), tolerance=FLOAT8)
    notes = [site.note for analysis in frames.analyses for site in analysis.outcome.sites]
    assert frames.counts[NAME] == 1 and notes == ["3 linears, one in backward"]


def test_wide_ones_stay_apart(narrow_alone):
    plan = PrecisionPlan(rules=(("down_proj", "bf16"), ("*", "fp8_current")))
    frames = check(MLP(), hidden(), config(plan), tolerance=FLOAT8)
    assert frames.counts[NAME] == 2 and "cat" not in render(frames.graph)


def test_joins_in_no_other_way(narrow_alone):
    """Another input, another precision by the plan, a weight that is not trained, a weight that is made later."""

    class OtherInput(Pair):
        def forward(self, x):
            return self.one(x).tanh(), self.two(x + 1)

    class MadeLater(Pair):
        def forward(self, x):
            y = self.one(x)
            return y, F.linear(x, self.two.weight * y.abs().mean())

    frozen = Pair()
    frozen.two.weight.requires_grad_(False)
    for module in (OtherInput(), MadeLater(), frozen):
        frames = check(module, hidden(), config(GATED), tolerance=FLOAT8)
        assert frames.counts[NAME] == 1 and frames.tags(NAME) == {"gate"}, type(module)
        assert "cat" not in render(frames.graph)
    plan = PrecisionPlan(rules=(("two", "bf16"), ("*", "fp8_current")))
    assert "cat" not in render(run(Pair(), hidden(), config(plan)).graph)


def test_joins_only_where_that_gains(narrow_alone, monkeypatch):
    monkeypatch.setattr(linear.fp8_gain, "joining_gain", lambda *_: linear.fp8_gain.LEAST_GAIN - 0.01)
    frames = run(Pair(), hidden(), config(GATED))
    assert frames.counts[NAME] == 1 and frames.tags(NAME) == {"gate"}


def test_down_projections_of_latent_attention_join(narrow_alone):
    """Rotations are recognised behind what is split off their GEMM."""
    block = PlainMLA(48, 4, 48, 16, 16, 16, 16).to(torch.bfloat16)
    args = tuple(a.to(torch.bfloat16).detach() for a in block.example_inputs(2, 16))
    frames = run(block, args, config(GATED))
    assert "fp8_linear(x, [q_a_weight, kv_a_weight]" in render(frames.graph)
    assert frames.counts["mla_rope_q"] == frames.counts["mla_rope_kv"] == 1, frames.misses


def test_joined_through_the_backend(narrow_alone, no_kernels):
    """Lowered and differentiated under a policy, verified, and both linears in the table of precision."""
    report = trained(Pair(bias=(True, True)), hidden(), precision=GATED, verify="each", policy="selective")
    assert [(s.pass_name, s.note) for s in report.sites] == [(NAME, "2 linears, one in backward")]
    assert [(r["fqn"], r["effective"]) for r in report.frames[0].precision] == [("one", "fp8_current"), ("two", "fp8_current")]


# --- by blocks

BLOCKS = PrecisionPlan(rules=(("*", "fp8_block"),), gate=False)


class Wide(nn.Module):
    """Two readers of an input, of sizes that blocks divide."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(256, 128, dtype=torch.bfloat16), nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.a(x) * self.b(x)


def wide_input():
    return (torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_(),)


def test_graph_by_blocks(float8):
    frames = check(Wide(), wide_input(), config(BLOCKS), tolerance=FLOAT8)
    assert frames.counts[NAME] == 2
    expecttest.assert_expected_inline(render(frames.graph), """\
detach: bf16[2, 64, 256] = detach(x)
fp8_quantize_tiles: (float8_e4m3fn[2, 64, 256], f32[2, 64, 2]) = megacpp.fp8_quantize_tiles(detach, 1)
getitem: float8_e4m3fn[2, 64, 256] = fp8_quantize_tiles[0]
getitem_1: f32[2, 64, 2] = fp8_quantize_tiles[1]
detach_1: bf16[128, 256] = detach(a_weight)
fp8_quantize_tiles_1: (float8_e4m3fn[128, 256], f32[1, 2]) = megacpp.fp8_quantize_tiles(detach_1, 128)
getitem_2: float8_e4m3fn[128, 256] = fp8_quantize_tiles_1[0]
getitem_3: f32[1, 2] = fp8_quantize_tiles_1[1]
fp8_block_linear: bf16[2, 64, 128] = megacpp.fp8_block_linear(x, a_weight, getitem, getitem_1, getitem_2, getitem_3, a_bias, bfloat16)
detach_2: bf16[128, 256] = detach(b_weight)
fp8_quantize_tiles_2: (float8_e4m3fn[128, 256], f32[1, 2]) = megacpp.fp8_quantize_tiles(detach_2, 128)
getitem_4: float8_e4m3fn[128, 256] = fp8_quantize_tiles_2[0]
getitem_5: f32[1, 2] = fp8_quantize_tiles_2[1]
fp8_block_linear_1: bf16[2, 64, 128] = megacpp.fp8_block_linear(x, b_weight, getitem, getitem_1, getitem_4, getitem_5, None, bfloat16)
mul: bf16[2, 64, 128] = mul.Tensor(fp8_block_linear, fp8_block_linear_1)
return [mul]""")


def test_by_blocks_through_the_backend(float8, no_kernels):
    """Lowered, differentiated by Inductor's partitioner, verified site by site, under a policy, with bytes kept."""
    (x,) = args = wide_input()
    report = trained(Wide(), args, precision=BLOCKS, verify="each", policy="selective")
    assert [(s.pass_name, s.op, s.effective) for s in report.sites] == [(NAME, "megacpp::fp8_block_linear", "reference")] * 2
    payload, x_scales, w_scales = x.numel(), 4 * x.numel() // 128, 4 * 2
    assert [s.saved_after for s in report.sites] == [payload + x_scales + w_scales] * 2


def test_both_recipes_of_one_input(float8):
    frames = run(Wide(), wide_input(), config(PrecisionPlan(rules=(("a", "fp8_block"), ("b", "fp8_current")), gate=False)))
    assert frames.counts[NAME] == 2
    graph = render(frames.graph)
    assert graph.count("fp8_quantize_tiles(") == 2 and graph.count("fp8_quantize(") == graph.count("fp8_quantize_transposed(") == 1


def test_refuses_what_blocks_do_not_divide(float8):
    refused("multiple", MLP(), hidden(), BLOCKS)


def test_refuses_a_device_without_block_scales():
    refused("device", Wide(), wide_input(), BLOCKS)


# --- on a GPU


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_block"])
def test_on_a_gpu(recipe):
    """In one graph that Inductor compiled: the products are cuBLASLt's, results and gradients near eager's."""
    from megacpp_compile.lowerings._gemm.float8_support import no_block_scales, no_float8

    device = torch.device("cuda")
    if missing := (no_block_scales if recipe == "fp8_block" else no_float8)(device):
        pytest.skip(missing)
    plan = PrecisionPlan(rules=(("*", recipe),), gate=False)
    report = trained(Wide(), wide_input(), device, precision=plan)
    assert [(s.pass_name, s.effective) for s in report.sites] == [(NAME, "cuda_scaled_mm")] * 2, report
    assert {row["effective"] for row in report.frames[0].precision} == {recipe}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_joined_on_a_gpu(narrow_alone):
    report = trained(Pair(bias=(True, True)), hidden(), "cuda", precision=GATED)
    assert [(s.effective, s.note) for s in report.sites] == [("cuda_scaled_mm", "2 linears, one in backward")], report


# --- stays out


def test_without_a_plan():
    assert run(MLP(), hidden()).counts[NAME] == 0


def test_disabled(float8):
    assert NAME not in run(MLP(), hidden(), config(disable=(NAME,))).counts


def refused(tag, module, args, plan=EVERYTHING):
    frames = check(module, args, config(plan), tolerance=4e-2)
    assert tag in frames.tags(NAME), frames.misses
    assert not frames.counts[NAME]


def test_refuses_a_device_without_float8():
    refused("device", MLP(), hidden())


def test_a_device_without_float8_gains_nothing():
    """Whatever the gate would predict: it predicts for devices that have float8."""
    misses = [m for m in run(MLP(), hidden(), config(GATED)).misses if m.pass_name == NAME]
    assert len(misses) == 3 and all(m.reason == "cpu has no float8 GEMMs" for m in misses)


def test_refuses_float32(float8):
    refused("dtype", MLP(torch.float32), hidden(dtype=torch.float32))


def test_refuses_by_the_gate(float8):
    """Small sides lose, and the report says what was predicted."""
    refused("gate", MLP(), hidden(), GATED)
    misses = run(MLP(), hidden(), config(GATED)).misses
    assert any("predicted gain" in miss.reason for miss in misses)


@pytest.mark.parametrize("what", ["rows", "features"])
def test_refuses_what_is_no_multiple_of_16(float8, what):
    refused("multiple", MLP(hidden=24) if what == "features" else MLP(), hidden(ROWS if what == "features" else 7))


def test_takes_the_others_one_by_one(float8):
    """A width the tensor cores can't take costs that linear, not its neighbours."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(DIM, 24, dtype=torch.bfloat16)
            self.b = nn.Linear(DIM, HIDDEN, dtype=torch.bfloat16)

        def forward(self, x):
            return self.a(x), self.b(x)

    frames = check(Mixed(), hidden(), config(), tolerance=FLOAT8)
    assert frames.counts[NAME] == 1 and frames.tags(NAME) == {"multiple"}


def test_refuses_rows_nobody_knows(float8):
    args = hidden()
    torch._dynamo.mark_dynamic(args[0], 1)
    frames = run(MLP(), args, config())
    assert frames.tags(NAME) == {"multiple"} and not frames.counts[NAME]


class Named(nn.Module):
    """Linears by these names, one after the other, and one by a name of none."""

    def __init__(self, names):
        super().__init__()
        self.parts = nn.ModuleDict({name: MLP() for name in names})
        self.up_proj = nn.Linear(DIM, DIM, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        for part in self.parts.values():
            x = x + part(x)
        return self.up_proj(x)


def test_names_that_the_plan_excludes_stay(float8):
    """One list for modules and graphs; a rule that names one of them stands above it, and says so."""
    names = ("engram", "mhc_mix", "temporal_mlp", "lora_B")
    roles = dataclasses.replace(PrecisionPlan.of("fp8_current"), gate=False)
    frames = check(Named(names), hidden(), config(roles), tolerance=FLOAT8)
    assert frames.counts[NAME] == 1 and frames.tags(NAME) == {"excluded"}
    reasons = {m.reason.split(":")[0] for m in frames.misses if m.pass_name == NAME}
    assert reasons == {f"excluded by {word!r}" for word in ("engram", "mhc", "temporal_", "lora_")}
    rules = PrecisionPlan(rules=(("parts.engram.*", "fp8_current"), ("*", "fp8_current")), gate=False)
    frames = check(Named(names[:2]), hidden(), config(rules), tolerance=FLOAT8)
    assert frames.counts[NAME] == 4 and frames.tags(NAME) == {"excluded"}
    assert rules.decide("parts.engram.up_proj").rule == "parts.engram.*, above the exclusion of 'engram'"
