"""Linears under "fp8_delayed": what the pass emits, and what the compiled frame has in its place."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacpp_compile.backends.delayed_scaling import thread_amax_history
from megacpp_compile.config import fp8_gain
from megacpp_compile.config.options import Config
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.matchers.rope import frozen_tables
from megacpp_compile.passes import linear
from tests.frames import check, render, run

NAME = "linear"
DELAYED = PrecisionPlan(rules=(("*", "fp8_delayed"),), gate=False)
CONFIG = Config(strict=True, precision=DELAYED)
FLOAT8 = 0.15  # as in `test_linear.py`


@pytest.fixture(autouse=True)
def float8(monkeypatch):
    monkeypatch.setattr(linear, "no_float8", lambda device: "")


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(48, 32, dtype=torch.bfloat16)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def x():
    return (torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_(),)


def test_graph():
    """The pass's graph has no past: it is that of a first step. Inputs of trained weights are transposed, too."""
    frames = check(Two(), x(), CONFIG, tolerance=FLOAT8)
    assert frames.counts[NAME] == 2
    expecttest.assert_expected_inline(render(frames.graph), """\
new_zeros: f32[1] = new_zeros(x, [1], dtype=float32)
detach: bf16[2, 16, 32] = detach(x)
fp8_quantize_delayed: (float8_e4m3fn[2, 16, 32], float8_e4m3fn[32, 32], f32[], f32[]) = megacpp.fp8_quantize_delayed(detach, new_zeros, e4m3, True)
getitem: float8_e4m3fn[2, 16, 32] = fp8_quantize_delayed[0]
getitem_1: float8_e4m3fn[32, 32] = fp8_quantize_delayed[1]
getitem_2: f32[] = fp8_quantize_delayed[2]
new_zeros_1: f32[1] = new_zeros(up_weight, [1], dtype=float32)
detach_1: bf16[48, 32] = detach(up_weight)
fp8_quantize_delayed_1: (float8_e4m3fn[48, 32], float8_e4m3fn[0], f32[], f32[]) = megacpp.fp8_quantize_delayed(detach_1, new_zeros_1, e4m3, False)
getitem_3: float8_e4m3fn[48, 32] = fp8_quantize_delayed_1[0]
getitem_4: f32[] = fp8_quantize_delayed_1[2]
fp8_linear: (bf16[2, 16, 48]) = megacpp.fp8_linear(x, [up_weight], getitem, getitem_2, getitem_3, getitem_4, [], e4m3, bfloat16, None, None, getitem_1)
getitem_5: bf16[2, 16, 48] = fp8_linear[0]
gelu: bf16[2, 16, 48] = gelu(getitem_5)
new_zeros_2: f32[1] = new_zeros(gelu, [1], dtype=float32)
detach_2: bf16[2, 16, 48] = detach(gelu)
fp8_quantize_delayed_2: (float8_e4m3fn[2, 16, 48], float8_e4m3fn[48, 32], f32[], f32[]) = megacpp.fp8_quantize_delayed(detach_2, new_zeros_2, e4m3, True)
getitem_6: float8_e4m3fn[2, 16, 48] = fp8_quantize_delayed_2[0]
getitem_7: float8_e4m3fn[48, 32] = fp8_quantize_delayed_2[1]
getitem_8: f32[] = fp8_quantize_delayed_2[2]
new_zeros_3: f32[1] = new_zeros(down_weight, [1], dtype=float32)
detach_3: bf16[32, 48] = detach(down_weight)
fp8_quantize_delayed_3: (float8_e4m3fn[32, 48], float8_e4m3fn[0], f32[], f32[]) = megacpp.fp8_quantize_delayed(detach_3, new_zeros_3, e4m3, False)
getitem_9: float8_e4m3fn[32, 48] = fp8_quantize_delayed_3[0]
getitem_10: f32[] = fp8_quantize_delayed_3[2]
fp8_linear_1: (bf16[2, 16, 32]) = megacpp.fp8_linear(gelu, [down_weight], getitem_6, getitem_8, getitem_9, getitem_10, [down_bias], e4m3, bfloat16, None, None, getitem_7)
getitem_11: bf16[2, 16, 32] = fp8_linear_1[0]
return [getitem_11]""")


def test_graph_with_its_past():
    """History in front, what was seen behind, and no number of a step before in between but the scales."""
    analysis = run(Two(), x(), CONFIG).analyses[0]
    past = thread_amax_history(analysis.captured.gm, analysis.captured)
    assert [(c.kind, c.turn) for c in past.columns] == [*zip("xwxwgg", [0] * 6, strict=True)]
    assert [tuple(t.shape) for t in past.fakes] == [(16, 6), (4,), (), ()]
    expecttest.assert_expected_inline(render(analysis.captured.gm), """\
push_maxima: (f32[16, 6], f32[6, 4]) = megacpp.push_maxima(maxima_0, maxima_1, [maxima_2, maxima_3])
getitem: f32[16, 6] = push_maxima[0]
getitem_1: f32[6, 4] = push_maxima[1]
select: f32[4] = select.int(getitem_1, 0, 0)
select_1: f32[4] = select.int(getitem_1, 0, 1)
select_2: f32[4] = select.int(getitem_1, 0, 2)
select_3: f32[4] = select.int(getitem_1, 0, 3)
select_4: f32[4] = select.int(getitem_1, 0, 4)
select_5: f32[4] = select.int(getitem_1, 0, 5)
detach: bf16[2, 16, 32] = detach(x)
fp8_quantize_delayed: (float8_e4m3fn[2, 16, 32], float8_e4m3fn[32, 32], f32[], f32[]) = megacpp.fp8_quantize_delayed(detach, select, e4m3, True)
getitem_2: float8_e4m3fn[2, 16, 32] = fp8_quantize_delayed[0]
getitem_3: float8_e4m3fn[32, 32] = fp8_quantize_delayed[1]
getitem_4: f32[] = fp8_quantize_delayed[2]
detach_1: bf16[48, 32] = detach(up_weight)
fp8_quantize_delayed_1: (float8_e4m3fn[48, 32], float8_e4m3fn[0], f32[], f32[]) = megacpp.fp8_quantize_delayed(detach_1, select_1, e4m3, False)
getitem_5: float8_e4m3fn[48, 32] = fp8_quantize_delayed_1[0]
getitem_6: f32[] = fp8_quantize_delayed_1[2]
fp8_linear: (bf16[2, 16, 48]) = megacpp.fp8_linear(x, [up_weight], getitem_2, getitem_4, getitem_5, getitem_6, [], e4m3, bfloat16, select_4, maxima_2, getitem_3)
getitem_7: bf16[2, 16, 48] = fp8_linear[0]
gelu: bf16[2, 16, 48] = gelu(getitem_7)
detach_2: bf16[2, 16, 48] = detach(gelu)
fp8_quantize_delayed_2: (float8_e4m3fn[2, 16, 48], float8_e4m3fn[48, 32], f32[], f32[]) = megacpp.fp8_quantize_delayed(detach_2, select_2, e4m3, True)
getitem_8: float8_e4m3fn[2, 16, 48] = fp8_quantize_delayed_2[0]
getitem_9: float8_e4m3fn[48, 32] = fp8_quantize_delayed_2[1]
getitem_10: f32[] = fp8_quantize_delayed_2[2]
detach_3: bf16[32, 48] = detach(down_weight)
fp8_quantize_delayed_3: (float8_e4m3fn[32, 48], float8_e4m3fn[0], f32[], f32[]) = megacpp.fp8_quantize_delayed(detach_3, select_3, e4m3, False)
getitem_11: float8_e4m3fn[32, 48] = fp8_quantize_delayed_3[0]
getitem_12: f32[] = fp8_quantize_delayed_3[2]
fp8_linear_1: (bf16[2, 16, 32]) = megacpp.fp8_linear(gelu, [down_weight], getitem_8, getitem_10, getitem_11, getitem_12, [down_bias], e4m3, bfloat16, select_5, maxima_3, getitem_9)
getitem_13: bf16[2, 16, 32] = fp8_linear_1[0]
getitem_14: f32[] = fp8_quantize_delayed[3]
getitem_15: f32[] = fp8_quantize_delayed_1[3]
getitem_16: f32[] = fp8_quantize_delayed_2[3]
getitem_17: f32[] = fp8_quantize_delayed_3[3]
stack: f32[4] = stack([getitem_14, getitem_15, getitem_16, getitem_17])
copy_: f32[4] = copy_(maxima_1, stack)
copy__1: f32[16, 6] = copy_(maxima_0, getitem)
return [getitem_13]""")


def test_a_frozen_weight_needs_nothing_transposed():
    model = Two()
    model.up.weight.requires_grad_(False)
    casts = [n for n in run(model, x(), CONFIG).graph.graph.nodes if "fp8_quantize_delayed" in str(n.target)]
    assert [n.args[3] for n in casts] == [False, False, True, False]  # of up's x and weight, of down's


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed"])
def test_weights_of_linears_in_float8_are_asked_no_more_whether_they_are_tables(monkeypatch, recipe):
    """Which walks all that is computed from them: with every weight in float8, the graph once for each cast."""
    asked, answer = [], frozen_tables._used_as_table
    monkeypatch.setattr(frozen_tables, "_used_as_table", lambda node, acts: (asked.append(node), answer(node, acts))[1])
    plan = PrecisionPlan(rules=(("*", recipe),), gate=False)
    frames = run(Two(), x(), Config(strict=True, precision=plan))
    assert frames.counts[NAME] == 2
    asked.clear()
    graph = frames.graph.graph
    weights = {n.name: n for n in graph.find_nodes(op="placeholder") if "weight" in n.name or "bias" in n.name}
    assert frozen_tables.frozen_tables(graph, frozenset(weights.values()), frozenset()) == frozenset()
    assert set(asked) == {weights[name] for name in weights if "bias" in name}


def test_the_gate_asks_about_what_runs(monkeypatch):
    """Casts of current scaling cost more: a linear that gains by delayed scaling alone is bf16 where that cannot serve."""
    monkeypatch.setattr(fp8_gain, "gain", lambda recipe, shape: 1.2 if recipe == "fp8_delayed" else 1.05)
    plan = PrecisionPlan(rules=(("*", "fp8_delayed"),))
    frames = run(Two(), x(), Config(strict=True, precision=plan))
    assert frames.counts[NAME] == 2
    with torch.no_grad():
        frames = run(Two(), x(), Config(strict=True, precision=plan))
    assert frames.counts[NAME] == 0
    want = "predicted gain 1.05, below 1.10 (fp8_current: nothing is trained here)"
    assert [miss.reason.partition(": ")[2] for miss in frames.misses] == [want] * 2
    rows = [row for analysis in frames.analyses for row in analysis.frame.precision]
    assert {(row["requested"], row["effective"]) for row in rows} == {("fp8_delayed", "bf16")}


def test_current_and_delayed_readers_of_one_tensor():
    """Each has a payload of its own."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = (nn.Linear(32, 32, bias=False, dtype=torch.bfloat16) for _ in range(2))

        def forward(self, x):
            return self.a(x) * self.b(x).tanh()

    plan = PrecisionPlan(rules=(("a", "fp8_current"), ("*", "fp8_delayed")), gate=False)
    frames = check(Pair(), x(), Config(strict=True, precision=plan), tolerance=FLOAT8)
    targets = [str(n.target) for n in frames.graph.graph.nodes]
    casts = ("fp8_quantize", "fp8_quantize_transposed", "fp8_quantize_delayed")
    assert [targets.count(f"megacpp.{name}.default") for name in casts] == [1, 1, 2]
