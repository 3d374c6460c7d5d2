"""Delayed scaling with symbolic sizes: sites and recompilations are current scaling's, numbers are static sizes'."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import megacpp_compile
from megacpp_compile.lowerings._kernels.fp8 import SAMPLE, delayed_scale
from tests.backends.models import DIM, Stack, compiled, equal, step
from tests.backends.test_delayed_scaling import largest
from tests.lowerings import relative_error
from tests.seeds import Draws

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.usefixtures("float8", "no_kernels"),
    pytest.mark.xdist_group("delayed dynamic"),  # one worker trains what tests share
]
SEQUENCES = (3, 5, 2, 7, 3)


class Folded(Stack):
    """Reads its tokens by sixteens, so that as many rows as there may be are known to be a multiple of that."""

    def forward(self, x):
        return super().forward(x.unflatten(1, (16, DIM)))


def marked(run, x):
    torch._dynamo.mark_dynamic(x, 0)
    return run(x)


# Name -> (torch.compile's `dynamic`, how a step calls what was compiled).
HOW = {
    "second length": (None, lambda run: run), "dynamic": (True, lambda run: run),
    "marked": (None, lambda run: functools.partial(marked, run)),
}


@pytest.fixture(scope="module")
def batches():
    """Of several lengths, of which no sample takes the first whole."""
    draw = Draws("batches", torch.bfloat16)
    return [(draw(n, 16 * DIM), draw(n, 16, DIM) * 1e-6) for n in SEQUENCES]


@pytest.fixture(scope="module")
def trained(batches):
    """(recipe, how) -> (each step's results, report, graphs that Dynamo made, state) of a model trained on `batches`."""

    @functools.cache
    def train(recipe, how):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        dynamic, call = HOW[how] if how else (False, lambda run: run)
        model = Folded(1)
        run = call(compiled(model, recipe, dynamic))
        with megacpp_compile.record() as report:
            steps = [step(run, model, x, grad) for x, grad in batches]
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return steps, report, graphs, megacpp_compile.scaling_state(model)

    return train


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", HOW)
def test_sites_and_recompilations_are_those_of_current_scaling(trained, how):
    found = {}
    for recipe in ("fp8_current", "fp8_delayed"):
        _, report, graphs, _ = trained(recipe, how)
        assert {row["effective"] for frame in report.frames for row in frame.precision} == {recipe}
        found[recipe] = graphs, report.counts, [(m.tag, m.reason) for m in report.misses]
    assert found["fp8_current"] == found["fp8_delayed"]
    assert found["fp8_delayed"][0] == (2 if how == "second length" else 1)


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", HOW)
def test_numbers_are_those_of_static_sizes(trained, batches, how):
    """Bit for bit, from the first step, whose scales come from samples; and the past is every batch's."""
    got, _, _, state = trained("fp8_delayed", how)
    want, _, graphs, static = trained("fp8_delayed", None)
    assert graphs == len(set(SEQUENCES))
    assert all(map(equal, got, want))
    assert state.keys() == static.keys() and all(torch.equal(state[key], static[key]) for key in state)
    seen = [largest(x) for x, _ in batches][::-1]
    assert state["blocks.0.gate.weight:x"][: len(seen)].tolist() == seen


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", HOW)
def test_as_near_as_current_scaling(trained, batches, how):
    eager = Folded(1)
    want = [step(eager, eager, x, grad) for x, grad in batches]
    worst = {}
    for recipe in ("fp8_current", "fp8_delayed"):
        got, *_ = trained(recipe, how)
        pairs = [pair for gs, ws in zip(got, want, strict=True) for pair in zip(gs, ws, strict=True)]
        worst[recipe] = max(relative_error(g, w) for g, w in pairs)
    assert 0 < worst["fp8_delayed"] < 1.15 * worst["fp8_current"] < 0.15, worst


@pytest.mark.end_to_end
def test_what_a_length_hides_is_told_as_under_current_scaling(rand):
    """Tokens that are not known to be a multiple of 16 leave linears in bfloat16, by either recipe."""
    said = {}
    for recipe in ("fp8_current", "fp8_delayed"):
        x, grad = (rand(2, 48, DIM) for _ in range(2))
        torch._dynamo.reset()
        model = Stack(1)
        run = compiled(model, recipe, dynamic=True)
        with megacpp_compile.record() as report:
            step(run, model, x, grad)
        said[recipe] = {(m.tag, m.reason) for m in report.misses}
        assert megacpp_compile.scaling_state(model) == {}
    assert said["fp8_current"] == said["fp8_delayed"] and {tag for tag, _ in said["fp8_delayed"]} == {"multiple"}


def padded(rand, rows):
    """Rows of zeros in front, as padding has them, hide nothing from a sample."""
    x = rand(rows, DIM, dtype=torch.float32)
    x[: rows // 2] = 0
    x[::3] *= 7
    return x


@pytest.mark.end_to_end
def test_a_sample_of_symbolic_rows_is_that_of_as_many(rand):
    """Traced once, as lowerings are, for any number of them."""

    def scale(x):
        return delayed_scale(x, torch.zeros((), device=x.device), torch.float8_e4m3fn)

    traced = make_fx(scale, tracing_mode="symbolic")(padded(rand, 3 * SAMPLE))
    lengths = SAMPLE - 1, SAMPLE + 1, 2 * SAMPLE - 1, 2 * SAMPLE, 5 * SAMPLE + 3
    for x in (padded(rand, rows) for rows in lengths):
        assert torch.equal(traced(x), scale(x)) and scale(x) != 1
    assert not traced.shape_env.guards
