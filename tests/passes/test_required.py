"""`require` counts in a call of the model, whatever frames the call is cut into."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import megacpp_compile
from megacpp_compile.backends import inductor
from megacpp_compile.errors import RequirementError

DIM = 8
PASS = "down_norm_up"


@pytest.fixture(autouse=True)
def clean(eager_backend):
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    def __init__(self, broken=True, number=None):
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(DIM, 6), nn.RMSNorm(6), nn.Linear(6, DIM, bias=False)
        self.broken, self.number = broken, number

    def forward(self, x):
        if self.broken:
            torch._dynamo.graph_break()
        out = x + self.up(self.norm(self.down(x)))
        return out if self.number is None else out * self.number


class Model(nn.Module):
    def __init__(self, layers=3, **kwargs):
        super().__init__()
        self.layers = nn.ModuleList(Layer(**kwargs) for _ in range(layers))

    def forward(self, x):
        x = x * 2 + 1
        for layer in self.layers:
            x = layer(x)
        return x.tanh()


class Broken(Layer):
    def forward(self, x):
        torch._dynamo.graph_break()
        latent = self.norm(self.down(x))
        return x + self.up(latent.tanh())


def x(rows=4):
    return torch.randn(rows, DIM)


def require(wanted):
    return {"require": {PASS: wanted}}


def error_of(call):
    with pytest.raises(Exception) as caught:
        call()
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, RequirementError), error
    return error


@pytest.mark.end_to_end
def test_a_model_in_pieces_is_counted_whole():
    """Regression: each frame by itself had to meet the requirement."""
    model = Model()
    compiled = torch.compile(model, backend="megacpp", options=require(3), dynamic=False)
    torch.testing.assert_close(compiled(data := x()), model(data))
    compiled(x(5))  # another shape, and evaluation: of each call the frames that ran in it count
    compiled.eval()
    with torch.no_grad():
        compiled(x())
        compiled(x(5))


def test_too_few_are_told_when_the_call_ends():
    compiled = torch.compile(Model(), backend="megacpp", options=require(4))
    error = error_of(lambda: compiled(x()))
    text = str(error)
    assert (error.fired, error.wanted) == (3, 4) and "the pass fired 3 times, wanted 4 times" in text
    assert "in torch_dynamo_resume_in_forward" in text
    assert "graph break at test_required.py:" in text and "in forward: Call to `torch._dynamo.graph_break" in text
    assert error_of(lambda: compiled(x())).fired == 3, "and again, until it is met"


def test_too_many_are_an_error_at_once():
    ran = []
    model = Model()
    model.layers[2].register_forward_hook(lambda *_: ran.append(1))
    error = error_of(lambda: torch.compile(model, backend="megacpp", options=require(1))(x()))
    assert "the pass fired twice, wanted once" in str(error) and "Nearest misses" not in str(error)
    assert not ran, "before the third layer"


def test_a_whole_model_is_checked_before_it_is_compiled():
    model = Model(broken=False)
    torch.compile(Model(), backend="megacpp")(x())  # graph breaks of other models do not matter
    torch.compile(model, backend="megacpp", options=require(3))(x())
    torch._dynamo.reset()
    ran = []
    model.layers[0].down.register_forward_hook(lambda *_: ran.append(1))
    assert error_of(lambda: torch.compile(model, backend="megacpp", options=require(2))(x())).fired == 3
    assert error_of(lambda: torch.compile(model, backend="megacpp", options=require(4))(x())).fired == 3


def test_near_misses_of_all_pieces_are_named():
    model = Model()
    model.layers[1] = Broken()
    error = error_of(lambda: torch.compile(model, backend="megacpp", options=require(3))(x()))
    assert error.fired == 2 and error.breaks
    assert any(miss.reason in str(error) for miss in error.misses)


def test_the_models_own_error_stays():
    class Fails(Model):
        def forward(self, x):
            super().forward(x)
            raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        torch.compile(Fails(), backend="megacpp", options=require(4))(x())


def test_a_frame_the_backend_refuses_does_not_count(monkeypatch):
    """Regression: it was held against what the passes made, before that was given up."""
    def refuses(*_):
        raise RuntimeError("refused")

    monkeypatch.setattr(inductor, "compile_lowered", refuses)
    for broken in (True, False):
        compiled = torch.compile(Model(2, broken=broken), backend="megacpp", options=require(2))
        assert error_of(functools.partial(compiled, x())).fired == 0


@pytest.mark.parametrize("number", [None, 0.5])
def test_blocks_count_as_often_as_they_run(number):
    """Whether one artifact serves all of them or each has its own."""
    model = Model(4, broken=False)
    for i, layer in enumerate(model.layers):
        layer.number = number and number * (i + 1)
    megacpp_compile.compile(model, **require(4))
    model(x())
    eager = copy.deepcopy(model)
    eager(x())  # nothing of the copy is compiled
    megacpp_compile.regional.compile.uncompile(model)
    assert not model._forward_hooks and not model._forward_pre_hooks
    megacpp_compile.compile(model, **require(5))
    assert error_of(lambda: model(x())).fired == 4
    megacpp_compile.regional.compile.uncompile(model)
    megacpp_compile.compile(model, **require(1))
    assert "fired twice, wanted once" in str(error_of(lambda: model(x())))


def test_what_backward_runs_again_does_not_count():
    class Checkpointed(Model):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = megacpp_compile.compile(Checkpointed(4, broken=False), **require(4))
    for _ in range(2):
        model(x().requires_grad_()).sum().backward()


def test_a_step_compiled_with_its_backward():
    model = Model()

    def step(x):
        out = model(x)
        out.sum().backward()
        return out

    assert error_of(lambda: torch.compile(step, backend="megacpp", options=require(2))(x())).fired == 3


def test_explain_counts_alike():
    megacpp_compile.explain(Model(), x(), options=require(3))
    assert error_of(lambda: megacpp_compile.explain(Model(), x(), options=require(4))).fired == 3


def test_an_estimate_by_blocks_holds_no_block_against_it():
    megacpp_compile.estimate(Model(4, broken=False), x().requires_grad_(), options=require(4))
