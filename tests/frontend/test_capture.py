"""What capture must carry through: custom autograd functions, in-place ops without readers, checkpointed blocks."""

import functools
import sys

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from megacpp_compile.frontend.canonicalize.whole_slices import whole_slices
from tests.corpus.spellings import PlainMLA
from tests.frames import check


class Tripled(torch.autograd.Function):
    """Forward and backward write in place, and backward is not forward's derivative."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        y.mul_(2)
        y[..., 0].add_(1)
        return y

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad.mul_(3)
        return grad


@functools.cache
def dynamo_alone_is_wrong() -> bool:
    """Whether Dynamo without any compiler behind it differs from eager here, as in torch 2.11, whose traced backward
    loses what is written in place."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3), requires_grad=True)
    (want,) = torch.autograd.grad(Tripled.apply(x.sin()).sum(), x)
    (got,) = torch.autograd.grad(torch.compile(lambda x: Tripled.apply(x.sin()), backend="eager")(x).sum(), x)
    return not torch.allclose(got, want)


@pytest.fixture
def in_place_backward():
    if dynamo_alone_is_wrong():
        pytest.skip(f"torch {torch.__version__}: Dynamo alone computes a wrong gradient for a backward that writes in place")


class Around(nn.Module):
    """`body(self, x, *tables)` around a block and a linear."""

    def __init__(self, body, block=None, dim=40):
        super().__init__()
        self.body, self.block, self.into = body, block, nn.Linear(dim, dim)

    def forward(self, x, *tables):
        return self.body(self, x, *tables)


def wrapped(m, x, *tables):
    return Tripled.apply(m.block(Tripled.apply(m.into(x)), *tables)) + 1


def changed_after_the_call(m, x, *tables):
    """What the function reads and what it returns are both written to before either is used again."""
    y = m.into(x)
    z = Tripled.apply(y)
    y.add_(1)
    z.mul_(2)
    return m.block(z, *tables) + y


@pytest.mark.end_to_end
@pytest.mark.parametrize("body", [wrapped, changed_after_the_call], ids=lambda f: f.__name__)
def test_custom_functions_keep_their_backward_around_fused_ops(in_place_backward, body):
    block = PlainMLA()
    frames = check(Around(body, block), block.example_inputs())
    assert frames.counts["down_norm_up"] == 2 and frames.counts["mla_rope_kv"] == 1


def test_frames_nothing_fires_in_are_left_as_they_came(in_place_backward):
    """Looking at the frame must leave Dynamo's own graph as it was."""

    def only_functions(m, x):
        return Tripled.apply(torch.relu(Tripled.apply(m.into(x))) * 2) + 1

    frames = check(Around(only_functions, dim=8), (torch.randn(4, 8),))
    assert not any(frames.counts.values())


def test_in_place_ops_in_checkpointed_blocks_survive():
    def body(block, x, *tables):
        y = block(x, *tables)
        y = y * 1.0
        y[..., 0].mul_(2)
        return y

    def in_place(m, *args):
        return checkpoint(body, m.block, *args, use_reentrant=False)

    block = PlainMLA()
    frames = check(Around(in_place, block, dim=1), block.example_inputs())
    assert frames.counts["down_norm_up"] == 2


def test_slices_of_whole_dimensions_are_dropped():
    cut, graph = torch.ops.aten.slice.Tensor, fx.Graph()
    x = graph.placeholder("x")
    whole = graph.call_function(cut, (graph.call_function(cut, (x,)), 0, 0, sys.maxsize))
    part = graph.call_function(cut, (whole, 1, 0, 3))
    tail = graph.call_function(cut, (part, 0, 1, sys.maxsize))
    every_other = graph.call_function(cut, (tail, 1, 0, sys.maxsize, 2))
    graph.output((every_other, graph.call_function(cut, (x, 0))))
    assert whole_slices(graph) == 2
    given = torch.arange(20).view(4, 5)
    left, same = fx.GraphModule(nn.Module(), graph)(given)
    assert torch.equal(left, given[1:, :3:2]) and torch.equal(same, given)
    assert same is not given  # an output that is an input would be returned as such
