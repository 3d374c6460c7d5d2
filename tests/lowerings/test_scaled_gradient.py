"""A head's gradient in the memory of what its forward saved: where that is safe, and that it is right either way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megacpp_compile
from megacpp_compile.lowerings.linear_cross_entropy import scaled
from tests.remat.steps import count, without_code

HIDDEN, WORDS, TOKENS = 8, 24, 6


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, x, target):
        return F.cross_entropy(self.head(self.up(x)), target)


@pytest.fixture
def steps(monkeypatch):
    """(model, its compiled form, arguments, the addresses that it saves, its graphs)."""
    monkeypatch.setattr(scaled, "LEAST", 4 * HIDDEN * WORDS)
    monkeypatch.setattr(scaled, "DEVICES", ("cpu",))
    torch._dynamo.reset()
    model, saved, graphs = Head(), set(), []
    args = torch.randn(TOKENS, HIDDEN), torch.randint(WORDS, (TOKENS,))

    def pack(t):
        saved.add(t.data_ptr())
        return t

    # A backward that is lowered with its forward has no donated buffers; this one is lowered when it first runs.
    no_donations = torch._functorch.config.patch(donated_buffer=False)
    with no_donations, without_code(graphs), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield model, torch.compile(model, backend=megacpp_compile.backend), args, saved, graphs


def wanted(model, args):
    return torch.autograd.grad(model(*args), list(model.parameters()))


def test_in_the_memory_of_what_was_saved(steps):
    model, call, args, saved, graphs = steps
    exact = wanted(model, args)
    saved.clear()
    call(*args).backward()
    assert count(graphs[1], "megacpp.scaled_gradient") == 1, "of w alone: x's is too small"
    assert model.head.weight.grad.data_ptr() in saved
    torch.testing.assert_close([p.grad for p in model.parameters()], list(exact))


def test_a_graph_that_is_kept_runs_again(steps):
    model, call, args, saved, _ = steps
    exact = wanted(model, args)
    saved.clear()
    loss = call(*args)
    for n in (1, 2):
        loss.backward(retain_graph=True)
        assert model.head.weight.grad.data_ptr() not in saved
        torch.testing.assert_close([p.grad for p in model.parameters()], [n * g for g in exact])
    loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [3 * g for g in exact])


def test_gradients_add_up_over_calls(steps):
    model, call, args, _, _ = steps
    exact = wanted(model, args)
    for _ in range(2):
        (call(*args) * 0.5).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], list(exact))


def test_outside_of_a_backward_nothing_is_written():
    t = torch.randn(3, 4)
    before = t.clone()
    assert torch.equal(torch.ops.megacpp.scaled_gradient(t, torch.tensor(2.0)), 2 * before)
    assert torch.equal(t, before)


def test_a_factor_is_not_rounded():
    t, factor = torch.randn(64, dtype=torch.bfloat16), torch.tensor(1 / 3)
    assert torch.equal(torch.ops.megacpp.scaled_gradient(t, factor), (t.float() / 3).bfloat16())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("size", [1, 8191, 3 * 8192 + 5])
def test_the_kernel(size):
    from megacpp_compile.lowerings.linear_cross_entropy._triton_scaled import scale_in_place

    factor = torch.tensor(1 / 3, device="cuda")
    t = torch.randn(size + 1, device="cuda").bfloat16()
    exact = torch.cat([(t[:-1].float() * factor).bfloat16(), t[-1:]])
    scale_in_place(t[:-1], factor)
    assert torch.equal(t, exact)
