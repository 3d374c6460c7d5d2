"""Delayed scaling: what a compiled model remembers of its past, and whose that is; no step's meaning is another."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megacpp_compile
from megacpp_compile.backends._lower import LowerSemanticOps
from megacpp_compile.errors import NotAModuleError, ScalingStateError
from megacpp_compile.frontend import calls_of_blocks
from megacpp_compile.precision import maxima
from tests.backends.models import DIM, HIDDEN, Block, Stack, batch, equal, options, step
from tests.backends.models import compiled as compiled_as
from tests.lowerings import relative_error
from tests.precision.models import Of

pytestmark = pytest.mark.usefixtures("float8", "no_kernels")


def compiled(model, recipe="fp8_delayed", **more):
    return compiled_as(model, recipe, **more)


def largest(t):
    return t.abs().max().float().item()


def test_remembers_what_the_last_steps_had(rand):
    """Newest first; what the past shows, each step pushes one further. Of two readers of x it is the first's."""
    model = Stack(1)
    run, seen = compiled(model), []
    for _ in range(3):
        x, grad = batch(rand)
        step(run, model, x, grad)
        seen.insert(0, (x, grad))
        with torch.no_grad():
            model.blocks[0].down.weight.mul_(2)
        seen[0] += (largest(model.blocks[0].down.weight) / 2,)
        state = megacpp_compile.scaling_state(model)
        rest = [0.0] * (maxima.HISTORY + 1 - len(seen))
        assert state["blocks.0.gate.weight:x"].tolist() == [largest(x) for x, *_ in seen] + rest
        assert state["blocks.0.down.weight:g"].tolist() == [largest(grad) for _, grad, _ in seen] + rest
        assert state["blocks.0.down.weight:w"].tolist() == [w for *_, w in seen] + rest
    kinds = {"gate": "xwg", "up": "wg", "down": "xwg"}
    assert set(state) == {f"blocks.0.{name}.weight:{kind}" for name, of in kinds.items() for kind in of}
    assert all(c.shape == (maxima.HISTORY + 1,) and c.dtype == torch.float32 for c in state.values())


def test_the_past_ends(rand):
    """A number that is older than the history counts no more."""
    model = Stack(1)
    run = compiled(model)
    x, grad = batch(rand)
    step(run, model, x * 100, grad)
    for _ in range(maxima.HISTORY + 1):
        step(run, model, x, grad)
    assert largest(megacpp_compile.scaling_state(model)["blocks.0.gate.weight:x"]) == largest(x)


@pytest.mark.end_to_end
def test_as_near_as_current_scaling(rand):
    """From the first step on, with gradients that e4m3 does not hold unscaled, and a weight that is 0 at first."""
    model = Stack()
    with torch.no_grad():
        model.blocks[1].down.weight.zero_()
    runs = {recipe: compiled(model, recipe) for recipe in ("fp8_delayed", "fp8_current")}
    worst = dict.fromkeys(runs, 0.0)
    for _ in range(4):
        x, grad = batch(rand)
        want = step(model, model, x, grad)
        for recipe, run in runs.items():
            got = step(run, model, x, grad)
            errors = [relative_error(g, w) for g, w in zip(got, want, strict=True) if w.count_nonzero()]
            worst[recipe] = max(worst[recipe], *errors)
        with torch.no_grad():
            model.blocks[1].down.weight.add_(0.02 * rand(DIM, HIDDEN))
    assert 0 < worst["fp8_delayed"] < 1.15 * worst["fp8_current"] < 0.15, worst


@pytest.mark.end_to_end
@pytest.mark.parametrize("by_frames", [True, False])
def test_blocks_that_share_code_have_pasts_of_their_own(rand, monkeypatch, by_frames):
    """One artifact serves all blocks, and each call brings its weights' past: frames of one block, and a whole frame
    whose blocks are one graph."""
    monkeypatch.setattr(calls_of_blocks, "CALL", 0)
    model, same = Stack(4), Stack(4)
    with megacpp_compile.record() as report:
        if by_frames:
            run = megacpp_compile.compile(model, options=options())
        else:
            run = compiled(model, repeated_blocks=True)
        whole = compiled(same)
        for _ in range(2):
            x, grad = batch(rand)
            got, want = step(run, model, x, grad), step(whole, same, x, grad)
            # Between frames autograd adds three gradients of x up in another order, in bfloat16, which moves payloads.
            assert torch.equal(got[0], want[0]) and max(map(relative_error, got, want)) < 0.1
    assert sum(frame.blocks == 4 for frame in report.frames) == 1, report
    state, other = (megacpp_compile.scaling_state(m) for m in (model, same))
    assert state.keys() == other.keys()
    assert all(relative_error(state[name], other[name]) < (0.1 if name.endswith("g") else 1e-9) for name in state)
    assert len({state[f"blocks.{i}.down.weight:x"][0].item() for i in range(4)}) == 4


@pytest.mark.end_to_end
@pytest.mark.sampled(2)  # after a step: tests/precision/test_scaling_state.py, too
@pytest.mark.parametrize("when", ["before", "after"])
def test_goes_on_after_a_restart(rand, when):
    """A state that was saved and loaded, before the first step or behind one, and the same steps, bit for bit."""
    batches = [batch(rand) for _ in range(4)]
    model = Stack()
    run = compiled(model)
    for x, grad in batches[:2]:
        step(run, model, x, grad)
    torch.save(megacpp_compile.scaling_state(model), saved := io.BytesIO())
    want = [step(run, model, x, grad) for x, grad in batches[2:]]

    torch._dynamo.reset()
    again = Stack()
    run = compiled(again)
    if when == "after":
        step(run, again, *batches[3])
    saved.seek(0)
    megacpp_compile.load_scaling_state(again, torch.load(saved, weights_only=True))
    got = [step(run, again, x, grad) for x, grad in batches[2:]]
    assert all(map(equal, got, want))
    without = step(compiled(fresh := Stack()), fresh, *batches[2])
    assert not all(map(torch.equal, without, want[0])), "the state would not matter"


def test_a_state_that_does_not_fit():
    model = Stack(1)
    column = torch.zeros(maxima.HISTORY + 1)
    good = {"blocks.0.up.weight:w": column + 1}
    wrong = {"blocks.7.up.weight:w": column, "blocks.0.up.weight:z": column, "blocks.0.up.weight:x": column[1:]}
    with pytest.raises(ScalingStateError) as caught:
        megacpp_compile.load_scaling_state(model, {**good, **wrong})
    assert all(name in str(caught.value) for name in wrong) and "blocks.0.up.weight:w" not in str(caught.value)
    assert "the closest is blocks.0.up.weight" in str(caught.value)
    assert megacpp_compile.scaling_state(model) == {}
    for function in (megacpp_compile.scaling_state, lambda m: megacpp_compile.load_scaling_state(m, {})):
        with pytest.raises(NotAModuleError):
            function("model")


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["auto", "selective", "full", "torch's checkpoint"])
def test_what_is_recomputed_has_the_scales_of_its_forward(rand, how):
    """A step that recomputes its casts gives the bits of one that keeps them, though its forward has moved the past."""
    models = [Stack(), Stack()]
    models[1].checkpointed = how == "torch's checkpoint"
    policies = "none", "none" if models[1].checkpointed else how
    runs = [compiled(model, policy=policy) for model, policy in zip(models, policies, strict=True)]
    for i in range(3):
        x, grad = batch(rand)
        x = x * 10**i  # no step's own scale would be the last one's
        assert equal(*(step(run, model, x, grad) for run, model in zip(runs, models, strict=True)))


@pytest.mark.end_to_end
def test_another_size_goes_on_with_the_same_past(rand):
    """The frame that is compiled for it, with symbolic sizes, reads and writes what the first one did."""
    model = Stack(1)
    run, seen = compiled(model), []
    for sequences in (2, 3, 5, 2):
        x, grad = batch(rand, sequences)
        step(run, model, x, grad)
        seen.insert(0, largest(x))
    assert megacpp_compile.scaling_state(model)["blocks.0.gate.weight:x"].tolist()[:4] == seen


@pytest.mark.end_to_end
def test_a_weight_that_is_read_twice(rand):
    """Each linear has a past of its own. Two blocks, one behind the other, are 0.1 to 0.16 off with either recipe."""

    class Twice(Block):
        def forward(self, x):
            return super().forward(torch.tanh(super().forward(x)) * 1e-2)

    torch.manual_seed(0)
    model = Twice()
    run = compiled(model)
    for _ in range(2):
        x, grad = batch(rand)
        assert 0 < max(map(relative_error, step(run, model, x, grad), step(model, model, x, grad))) < 0.25
    state = megacpp_compile.scaling_state(model)
    assert state["gate.weight:x"][0] == largest(x) and 0 < state["gate.weight:x.1"][0] < 0.011


@pytest.mark.end_to_end
def test_an_overflow_is_seen_and_forgotten(rand):
    """What is infinite, as a gradient whose loss was scaled too far, is not saturated; the next step has the past that
    there was before."""
    model = Stack(1)
    run = compiled(model)
    x, grad = batch(rand)
    step(run, model, x, grad)
    overflow = grad.clone()
    overflow[0, 0, 0] = float("inf")
    assert not all(t.isfinite().all() for t in step(run, model, x, overflow))
    got, want = step(run, model, x, grad), step(model, model, x, grad)
    assert max(map(relative_error, got, want)) < 0.15
    step(run, model, x, grad)
    past = megacpp_compile.scaling_state(model)["blocks.0.down.weight:g"][:4].tolist()
    assert past == [largest(grad), largest(grad), 0, largest(grad)]


@pytest.mark.end_to_end
def test_a_step_beyond_the_past_is_saturated_once(rand):
    """The one thing that delayed scaling does worse: numbers over twice the past's, in the step that has them first."""
    model = Stack(1)
    run = compiled(model)
    x, grad = batch(rand)
    step(run, model, x, grad)
    far = [relative_error(step(run, model, 100 * x, grad)[0], model(100 * x).detach()) for _ in range(3)]
    assert far[0] > 0.5 and far[2] < 0.15  # what lies behind a saturated number is seen a step later


@pytest.mark.end_to_end
def test_forward_without_backward_counts(rand):
    """As for a loss that is only looked at: x and weights have one step more, gradients keep theirs."""
    model = Stack(1)
    run = compiled(model)
    x, grad = batch(rand)
    step(run, model, x, grad)
    run(2 * x.detach().requires_grad_())
    state = megacpp_compile.scaling_state(model)
    assert state["blocks.0.gate.weight:x"][:2].tolist() == [2 * largest(x), largest(x)]
    assert state["blocks.0.down.weight:g"][0] == largest(grad)


@pytest.mark.end_to_end
def test_a_model_that_is_gone_leaves_nothing(rand, few_objects):
    before = len(maxima._FRAMES)
    model = Stack(1)
    step(compiled(model), model, *batch(rand))
    weights = [weakref.ref(p) for p in model.parameters()]
    assert len(maxima._FRAMES) == before + 3 and all(ref() in maxima._FRAMES for ref in weights)
    del model
    torch._dynamo.reset()
    gc.collect()
    # Those of another test may be gone by now, too.
    assert all(ref() is None for ref in weights) and len(maxima._FRAMES) <= before


def precision_of(model, *args, **more):
    with megacpp_compile.record() as report:
        compiled(model, **more)(*args)
    return report, {row["fqn"]: (row["effective"], row["reason"]) for row in report.frames[0].precision}


@torch.no_grad()
def test_inference_has_current_scaling(rand):
    model = Stack(1)
    report, rows = precision_of(model, batch(rand)[0])
    assert {effective for effective, _ in rows.values()} == {"fp8_current"}
    assert {reason for _, reason in rows.values()} == {"fp8_current: nothing is trained here"}
    assert {site.note for site in report.sites} == {"fp8_current: nothing is trained here"}
    assert megacpp_compile.scaling_state(model) == {}


def behind():
    """A linear of its own behind one whose weight is computed, or another tensor in every call."""
    torch.manual_seed(0)
    parts = {name: nn.Linear(DIM, DIM, bias=False, dtype=torch.bfloat16) for name in ("proj", "other")}
    for name, shape in (("a", (4, DIM)), ("b", (DIM, 4))):
        parts[name] = nn.Parameter(torch.randn(shape, dtype=torch.bfloat16))

    def body(m, x, weight=None):
        return m.other(F.linear(x, m.proj.weight + m.b @ m.a if weight is None else weight))

    return Of(body, **parts)


@pytest.mark.parametrize("weight", ["computed", "leaf", "view"])
def test_a_weight_that_is_no_parameter_has_current_scaling(rand, weight):
    """As FSDP's first version hands views of its flat parameter to a forward: no tensor of theirs was there before."""
    model, given = behind(), nn.Parameter(rand(DIM * DIM)).view(DIM, DIM)
    args = {"computed": (), "leaf": (given.detach().requires_grad_(),), "view": (given,)}[weight]
    report, rows = precision_of(model, batch(rand)[0], *args)
    given = "its weight is no parameter, and may be another tensor in every call, so it has no past"
    why = "its weight is computed here, so it has no past" if weight == "computed" else given
    assert sorted(reason for _, reason in rows.values()) == ["", f"fp8_current: {why}"], report
    assert set(megacpp_compile.scaling_state(model)) == {f"other.weight:{kind}" for kind in "xwg"}


@pytest.mark.end_to_end
def test_float32_weights_under_autocast(rand):
    """The cast that autocast makes of a weight is no computation."""
    model = Stack(1).float()
    run = compiled(model)
    x, grad = batch(rand)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            got, want = (step(f, model, x.float(), grad.float()) for f in (run, model))
            assert max(map(relative_error, got, want)) < 0.15
    assert largest(model.blocks[0].down.weight.bfloat16()) == megacpp_compile.scaling_state(model)["blocks.0.down.weight:w"][0]


@pytest.mark.end_to_end
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current"])
def test_backward_casts_no_weight_for_its_scale(rand, monkeypatch, recipe):
    """A policy recomputes the payloads of activations; a scale is a number, which is saved."""
    casts, lower = [], LowerSemanticOps.run

    def run(self, graph):
        found = (node for node in graph.nodes if "fp8_quantize" in str(node.target))
        casts.append([node.args[0].meta["val"].dim() == 2 for node in found])
        lower(self, graph)

    monkeypatch.setattr(LowerSemanticOps, "run", run)
    x = rand(2, 16, DIM).requires_grad_()
    compiled(Stack(), recipe, policy="selective")(x).float().square().sum().backward()
    forward, backward = casts
    assert sum(forward) > 0 and backward and not any(backward)
