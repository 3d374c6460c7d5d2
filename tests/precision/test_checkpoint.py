"""Which checkpoint a block in fp8 recomputes through, and that torch's own is refused there."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import megacpp_compile
from megacpp_compile import PrecisionPlan, replace_linears
from megacpp_compile.errors import BadOptionError, EngineError, StockCheckpointError
from megacpp_compile.precision import checkpoint as rule
from megacpp_compile.precision import engine
from megacpp_compile.precision.checkpoint import checkpoint_for, guard, in_fp8

from .models import equal


def block(te=None, recipe="fp8_current", seed=0):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    if te is not None:
        made = made.to(te.device, te.dtype)
        replace_linears(made, PrecisionPlan({"*": recipe}, gate=False), target=te.target)
    return made


def sample(te=None):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    return (x if te is None else x.to(te.device, te.dtype)).requires_grad_()


@pytest.fixture
def called(monkeypatch, te):
    """Which checkpoints were called, "torch" or "te"."""
    names = []

    def by(name, function):
        return lambda *args, **kwargs: (names.append(name), function(*args, **kwargs))[1]

    monkeypatch.setattr(rule.stock, "checkpoint", by("torch", checkpoint))
    monkeypatch.setattr(te.module, "checkpoint", by("te", te.module.checkpoint))
    return names


@pytest.fixture
def stand_in_te(stand_in):
    return types.SimpleNamespace(module=stand_in, device="cpu", dtype=torch.float32, real=False, target="cuda")


def gradients(run, model, x):
    run(x).float().square().sum().backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    x.grad, _ = None, model.zero_grad()
    return [g.float() for g in found]


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed"])
def test_a_block_in_fp8_recomputes_by_transformer_engine(te, recipe, state, called):
    model, x = block(te, recipe), sample(te)
    again = checkpoint_for(model)
    if te.real and recipe == "fp8_delayed":  # its scales move from step to step: compare two equal models' first steps
        other = block(te, recipe)
        other.load_state_dict(model.state_dict())
    else:
        other = model
    want = gradients(other, other, x)
    state.ran.clear()
    got = gradients(lambda x: again(model, x), model, x)
    assert called == ["te"]
    assert all((a - b).norm() <= 1e-3 * b.norm() for a, b in zip(got, want, strict=True))
    if not te.real:
        assert [second for _, _, second in state.ran] == [False, False, True, True]
        assert len({recipe for _, recipe, _ in state.ran}) == 1, "another recipe the second time"


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_is_refused_with_the_reason(te, reentrant):
    model, x = block(te), sample(te)
    with pytest.raises(StockCheckpointError, match=r"Linear\(\d+, \d+\) computes in fp8 under torch.utils.checkpoint"):
        out = checkpoint(model, x, use_reentrant=reentrant)
        assert reentrant, "told in the first forward"
        out.sum().backward()


def test_torchs_checkpoint_is_fine_outside_of_fp8(te):
    model, x = block(te), sample(te)
    with engine.high_precision():
        want = gradients(model, model, x)
        for reentrant in (False, True):
            got = gradients(lambda x, r=reentrant: checkpoint(model, x, use_reentrant=r), model, x)
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)


def test_a_forward_within_backward_is_no_checkpoint(te):
    """An autograd function may run modules in its backward; what it saves is its own affair."""
    model = block(te)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return model(grad.contiguous())

    x = sample(te)
    Function.apply(x).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("wrapper", rule.FP8_WRAPPERS)
def test_a_block_without_transformer_engine_recomputes_by_torch(te, wrapper, called):
    model, x = block(), sample()
    again = checkpoint_for(model, wrapper)
    want = gradients(model, model, x)
    torch.testing.assert_close(gradients(lambda x: again(model, x), model, x), want)
    assert called == ["torch"]


def test_where_transformer_engine_is_absent():
    model, x = block(), sample()
    assert in_fp8(model) is None and guard(model) == 0
    want = gradients(model, model, x)
    torch.testing.assert_close(gradients(lambda x: checkpoint_for(model)(model, x), model, x), want)


def test_what_is_said_is_obeyed(te, called):
    model, x = block(te), sample(te)
    with pytest.raises(StockCheckpointError, match="0 in Sequential computes in fp8.*apply_checkpoints"):
        checkpoint_for(model, "none")(model, x)
    with pytest.raises(BadOptionError, match="Did you mean 'te_checkpoint'"):
        checkpoint_for(model, "te_checkpiont")
    with engine.high_precision():  # in bf16: by name always, else where it is needed
        for wrapper in rule.FP8_WRAPPERS:
            checkpoint_for(model, wrapper)(model, x).sum().backward()
    assert called == ["torch", "torch", "te"]


def test_a_package_that_is_gone_is_an_error(te, monkeypatch):
    model, x = block(te), sample(te)
    monkeypatch.setattr(engine, "load", lambda: (None, "no module"))
    with pytest.raises(EngineError, match="Transformer Engine's checkpoint: no module"):
        checkpoint_for(model)(model, x)


class Owned(nn.Module):
    """A block that brings modules of Transformer Engine itself, which follow the autocast around them."""

    def __init__(self, te):
        super().__init__()
        self.up, self.down = (te.module.Linear(*s, params_dtype=te.dtype, device=te.device) for s in ((32, 64), (64, 32)))

    def forward(self, x):
        return self.down(self.up(x).tanh())


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed"])
def test_the_models_own_modules_are_refused_where_an_autocast_is_in_force(te, recipe):
    """A recomputation runs outside of the autocast: in bf16, where the forward was in fp8."""
    model, x = Owned(te), sample(te)
    assert guard(model) == guard(model) == 2 and len(model.up._forward_pre_hooks) == 1
    with te.module.autocast(enabled=True, recipe=engine.recipe_object(recipe)):
        with pytest.raises(StockCheckpointError, match=r"Linear\(32, 64\) computes in fp8"):
            checkpoint(model, x, use_reentrant=False)
        model(x).sum().backward()  # without a checkpoint nobody minds


@pytest.mark.parametrize("by", ["replace_linears", "policy", "precision", "neither"])
def test_who_guards_a_models_own_modules(stand_in_te, by):
    model = nn.Sequential(Owned(stand_in_te), nn.Linear(32, 32))
    if by == "replace_linears":
        replace_linears(model, PrecisionPlan({"1": "fp8_current"}, gate=False), target="cuda")
    else:
        asked = {"policy": {"policy": "selective"}, "precision": {"precision": "fp8_current"}, "neither": {}}[by]
        megacpp_compile.compile(model, rest="eager", **asked)
    assert [bool(m._forward_pre_hooks) for m in (model[0].up, model[0].down)] == [by != "neither"] * 2


def test_the_models_own_modules_are_fine_in_bf16(te, called):
    model, x = Owned(te), sample(te)
    guard(model)
    want = gradients(model, model, x)
    for again in (rule.stock.checkpoint, checkpoint_for(model)):
        kwargs = {"use_reentrant": False} if again is rule.stock.checkpoint else {}
        torch.testing.assert_close(gradients(lambda x, a=again, k=kwargs: a(model, x, **k), model, x), want)
    assert called == ["torch", "torch"]


def test_the_models_own_modules_recompute_by_transformer_engine(te, called):
    model, x = Owned(te), sample(te)
    guard(model)
    again = checkpoint_for(model)

    def in_autocast(run):
        def ran(x):
            with te.module.autocast(enabled=True, recipe=engine.recipe_object("fp8_current")):
                return run(x)

        return ran

    want = gradients(in_autocast(model), model, x)
    got = gradients(in_autocast(lambda x: again(model, x)), model, x)
    assert called == ["te"]
    assert all((a - b).norm() <= 1e-3 * b.norm() for a, b in zip(got, want, strict=True))


def steps(call, model, state):
    """Three steps of inputs that grow; gradients of the last, and each module's history."""
    state.rounds = True
    for size in (1.0, 2.0, 8.0):
        found = gradients(call, model, (size * sample().detach()).requires_grad_())
    return found, [m.fp8_meta["history"] for m in model.modules() if hasattr(m, "fp8_meta")]


def delayed(te):
    model = block(te, "fp8_delayed")
    # Without the autocast around the model's forward, which the recomputation of a block is outside of, too.
    model._forward_pre_hooks.clear()
    model._forward_hooks.clear()
    return model


def test_a_history_of_maxima_grows_once_a_step_and_without_the_rule_twice(stand_in_te, state, monkeypatch):
    """And gradients are wrong without it."""
    from megacpp_compile.precision import te_modules

    plain, twin, other = (delayed(stand_in_te) for _ in range(3))
    again = checkpoint_for(twin)
    want, once = steps(plain, plain, state)
    got, histories = steps(lambda x: again(twin, x), twin, state)
    assert histories == once and [len(history) for history in once] == [3, 3] and equal(got, want)
    monkeypatch.setattr(te_modules, "refuse_stock_checkpoint", lambda module: None)
    got, histories = steps(lambda x: checkpoint(other, x, use_reentrant=False), other, state)
    assert [len(history) for history in histories] == [6, 6]
    assert max(((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)) > 1e-2
