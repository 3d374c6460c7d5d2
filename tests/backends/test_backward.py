"""A rewritten frame's backward is lowered with its forward, where what fails still falls back."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import compile_fx as compile_fx_module
from torch._inductor.custom_graph_pass import CustomGraphPass

from megacpp_compile import Report, record
from megacpp_compile._torch._registry import release
from megacpp_compile.backends import _lower
from megacpp_compile.errors import NotLoweredError
from megacpp_compile.lowerings.mla_rope_kv import reference
from megacpp_compile.remat.tagging import TagForRemat
from tests.backends.models import Layer
from tests.corpus.spellings import PlainMLA

eager_backward = pytest.mark.skipif(
    release(torch.__version__) < (2, 10), reason="torch 2.9 lowers a backward its own way, whoever asks"
)


pytestmark = pytest.mark.usefixtures("no_kernels")


def compiled_step(model, x, options=None, **how):
    """(the report of a forward alone, gradients after it)"""
    compiled = torch.compile(model, backend="megacpp", options=options)
    with record() as report:
        loss = compiled(*x).square().sum()
    return report, torch.autograd.grad(loss, list(model.parameters()), **how)


def assert_right(model, x, got):
    want = torch.autograd.grad(model(*x).square().sum(), list(model.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def broken(node_name):
    """`_lower._lower`, which raises at ops whose name holds `node_name`."""
    lower = _lower._lower

    def raising(graph, node, *rest):
        if node_name in str(node.target):
            raise RuntimeError("a planted lie: no lowering here")
        lower(graph, node, *rest)

    return raising


@eager_backward
def test_a_backward_that_cannot_be_lowered_falls_back_and_is_an_error_under_strict(monkeypatch, caplog):
    monkeypatch.setattr(_lower, "_lower", broken("down_norm_up_backward"))
    model, x = Layer(), (torch.randn(5, 16),)
    report, grads = compiled_step(model, x)
    (frame,) = report.frames
    assert not frame.captured and not report.sites and "a planted lie" in frame.reason
    assert any("a planted lie" in r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert_right(model, x, grads)
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="a planted lie"):
        torch.compile(model, backend="megacpp", options={"strict": True})(*x)


@eager_backward
def test_an_op_left_in_the_backward_is_an_error_of_the_forward(monkeypatch):
    lower = _lower._lower
    monkeypatch.setattr(_lower, "_lower", lambda g, n, *a: None if "backward" in str(n.target) else lower(g, n, *a))
    with pytest.raises(NotLoweredError, match="down_norm_up_backward"):
        torch.compile(Layer(), backend="megacpp")(torch.randn(5, 16))


@pytest.mark.end_to_end
@eager_backward
def test_a_backward_that_returns_another_shape_than_it_promised_falls_back(monkeypatch):
    """Nothing of ours fails here, but what Inductor makes of the graph behind."""
    turn = reference.mla_rope_kv_backward

    def one_row_too_many(*args, **kwargs):
        d_kv, d_rope = turn(*args, **kwargs)
        return d_kv, torch.cat((d_rope, d_rope))

    monkeypatch.setattr(reference, "mla_rope_kv_backward", one_row_too_many)
    model = PlainMLA()
    x = model.example_inputs()
    report, grads = compiled_step(model, x)
    assert not report.frames[0].captured and "Inductor refused the rewritten graph" in report.frames[0].reason
    assert_right(model, x, grads)


class FailsInBackward(CustomGraphPass):
    """A pass of the user's that no backward gets through."""

    def __call__(self, graph):
        if any("tangents" in n.name for n in graph.find_nodes(op="placeholder")):
            raise ValueError("the user's own pass")

    def uuid(self):
        return None


def test_what_inductor_refuses_of_the_plain_frame_too_is_its_own_error():
    options = {"inductor": {"post_grad_custom_post_pass": FailsInBackward()}}
    loss = torch.compile(Layer(), backend="megacpp", options=options)(torch.randn(5, 16)).sum()
    with pytest.raises(Exception, match="the user's own pass"):
        loss.backward()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", [Layer, lambda: nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16))])
def test_a_policy_that_fails_on_the_joint_graph(model, monkeypatch):
    def run(self, graph):
        raise RuntimeError("a planted lie: no plan")

    monkeypatch.setattr(TagForRemat, "run", run)
    model, x = model(), (torch.randn(5, 16),)
    report, grads = compiled_step(model, x, {"policy": "selective"})
    (frame,) = report.frames
    assert "a planted lie" in frame.reason and frame.remat is None
    assert_right(model, x, grads)
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="a planted lie"):
        torch.compile(model, backend="megacpp", options={"policy": "selective", "strict": True})(*x)


def backwards_lowered(monkeypatch):
    """How many backward graphs Inductor has been given so far."""
    given = []
    whole = compile_fx_module._recursive_post_grad_passes

    def passes(gm, is_inference=False):
        given.append(any("tangents" in n.name for n in gm.graph.find_nodes(op="placeholder")))
        return whole(gm, is_inference)

    monkeypatch.setattr(compile_fx_module, "_recursive_post_grad_passes", passes)
    return lambda: sum(given)


@eager_backward
def test_the_backward_is_lowered_with_the_forward_and_once(monkeypatch):
    lowered = backwards_lowered(monkeypatch)
    compiled, x = torch.compile(Layer(), backend="megacpp"), torch.randn(5, 16)
    loss = compiled(x).square().sum()
    assert lowered() == 1
    loss.backward()
    compiled(x).sum().backward()
    with torch.no_grad():
        compiled(x)
    assert lowered() == 1


def test_the_backward_of_a_plain_frame_is_lowered_when_it_runs(monkeypatch):
    lowered = backwards_lowered(monkeypatch)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16))
    loss = torch.compile(model, backend="megacpp")(torch.randn(5, 16)).sum()
    assert lowered() == 0
    loss.backward()
    assert lowered() == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=eager_backward)])
def test_a_graph_that_is_kept_is_differentiated_twice(dynamic):
    """Its backward leaves the saved tensors as they are, also where torch finds out too late that it has to."""
    model, x = Layer(), torch.randn(5, 16)
    loss = torch.compile(model, backend="megacpp", dynamic=dynamic)(x).square().sum()
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=kept) for kept in (True, False))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert_right(model, (x,), first)


def test_what_serves_a_backward_is_reported(monkeypatch):
    """Beside what serves the forward, where it is something else."""
    choose = _lower.choose

    def slower(op, target, args):
        choice = choose(op, target, args)
        if not str(op).endswith("_backward.default"):
            return choice
        return dataclasses.replace(choice, requested="cuda_gluon", effective="cuda_triton", reason="rows begin anywhere")

    model, x = Layer(), torch.randn(4, 16, requires_grad=True)
    report, gradients = compiled_step(model, (x,))
    assert report.frames[0].backward == {"megacpp::down_norm_up": ["reference"]} and "; backward" not in str(report)
    torch._dynamo.reset()
    monkeypatch.setattr(_lower, "choose", slower)
    report, again = compiled_step(model, (x,))
    told = "cuda_gluon → cuda_triton (rows begin anywhere)"
    assert report.frames[0].backward == {"megacpp::down_norm_up": [told]}
    assert "; backward" in str(report) and Report.from_json(report.to_json()) == report
    assert all(map(torch.equal, gradients, again))
