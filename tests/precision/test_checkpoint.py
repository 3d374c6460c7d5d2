"""Which checkpoint a block in fp8 recomputes through, and that torch's own is refused there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megacpp_compile import PrecisionPlan, replace_linears
from megacpp_compile.config.checkpointing import CheckpointingPolicy
from megacpp_compile.errors import BadOptionError, StockCheckpointError
from megacpp_compile.precision import engine
from megacpp_compile.precision.checkpoint import checkpoint_for


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


def gradients(run, model, x):
    run(x).float().square().sum().backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    x.grad, _ = None, model.zero_grad()
    return [g.float() for g in found]


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed"])
def test_a_block_in_fp8_recomputes_by_transformer_engine(te, recipe, state):
    model, x = block(te, recipe), sample(te)
    again = checkpoint_for(model)
    assert again.func is te.module.checkpoint
    if te.real and recipe == "fp8_delayed":  # its scales move from step to step: compare two equal models' first steps
        other = block(te, recipe)
        other.load_state_dict(model.state_dict())
    else:
        other = model
    want = gradients(other, other, x)
    state.ran.clear()
    got = gradients(lambda x: again(model, x), model, x)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()
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
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


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


def test_a_block_without_transformer_engine_recomputes_by_torch():
    model, x = block(), sample()
    for wrapper in ("te_checkpoint", "none"):
        again = checkpoint_for(model, wrapper)
        assert again.func is checkpoint
        want = gradients(model, model, x)
        for a, b in zip(gradients(lambda x, f=again: f(model, x), model, x), want, strict=True):
            torch.testing.assert_close(a, b)


def test_what_is_said_is_obeyed(te):
    with pytest.raises(StockCheckpointError, match="Sequential"):
        checkpoint_for(block(te), "none")
    with pytest.raises(BadOptionError, match="Did you mean 'te_checkpoint'"):
        checkpoint_for(block(te), "te_checkpiont")


def test_a_policy_says_that_it_wraps_no_call():
    with pytest.warns(FutureWarning, match=r"'policy.fp8_wrapper' has no effect.*call the block through .*checkpoint_for"):
        assert CheckpointingPolicy.of({"fp8_wrapper": "te_checkpoint"}).ablock == "selective"
