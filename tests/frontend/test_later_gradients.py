"""Logits beside a loss have no part in the frame's backward, until somebody asks for their gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megacpp_compile
from megacpp_compile.frontend import later_gradients
from tests.fixtures import kernels_left_out
from tests.seeds import Draws

pytestmark = pytest.mark.usefixtures("fresh")
WORDS = 12


@pytest.fixture(autouse=True)
def small_ones_count(monkeypatch):
    monkeypatch.setattr(later_gradients, "LARGE", 0)


@pytest.fixture
def graphs():
    """The graphs that are run."""
    found = []
    with kernels_left_out(found.append):
        yield found


class Model(nn.Module):
    """A head with its loss, behind `body(module, x)`."""

    def __init__(self, draws, body=lambda m, x: m.up(x).tanh()):
        super().__init__()
        self.body, self.up, self.head = body, nn.Linear(8, 8), nn.Linear(8, WORDS, bias=False)
        self.register_buffer("seen", torch.zeros(()))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(draws(*p.shape) / 2)

    def forward(self, x, ids):
        logits = self.head(self.body(self, x))
        loss = F.cross_entropy(logits.flatten(0, -2).float(), ids.flatten())
        return loss, logits


def inputs(name, length=5):
    draws = Draws(name)
    return draws, draws(2, length, 8, grad=True), torch.arange(2 * length).view(2, length) % WORDS


def loss_alone(loss, logits):
    return loss


def both(loss, logits):
    return loss + logits.float().square().mean()


def logits_alone(loss, logits):
    return logits.float().square().mean()


def step(call, module, x, ids, of):
    loss, logits = call(x * 1.5, ids)  # what a frame is given need not be a leaf
    assert logits.requires_grad
    return loss.detach(), torch.autograd.grad(of(loss, logits), [x, *module.parameters()])


def held_against_eager(module, x, ids, of, **settings):
    """(what was compiled for a step of `of`'s gradients, for another one)"""
    call = torch.compile(module, backend="megacpp", **settings)
    frames = []
    for _ in range(2):
        with megacpp_compile.record() as report:
            torch.testing.assert_close(step(call, module, x, ids, of), step(module, module, x, ids, of))
        frames.append(len(report.frames))
    return frames


def tangents(graphs):
    """How many gradients each backward is given."""
    found = [[n for n in gm.graph.nodes if n.name.startswith("tangents")] for gm in graphs]
    return [len(one) for one in found if one]


def test_the_loss_alone(graphs, request):
    draws, *given = inputs(request.node.name)
    assert held_against_eager(Model(draws), *given, loss_alone) == [1, 0]
    assert set(tangents(graphs)) == {1}


@pytest.mark.parametrize(("of", "run"), [(both, {1, 2}), (logits_alone, {2})], ids=["both", "logits_alone"])
def test_a_gradient_of_the_logits(of, run, graphs, request):
    draws, *given = inputs(request.node.name)
    assert held_against_eager(Model(draws), *given, of) == [2, 0]
    assert set(tangents(graphs)) == run


def test_at_a_second_length(graphs, request):
    draws, *given = inputs(request.node.name)
    module = Model(draws)
    call = torch.compile(module, backend="megacpp")
    for length, of in ((5, loss_alone), (7, loss_alone), (9, both), (11, both), (11, loss_alone)):
        _, *given = inputs(request.node.name, length)
        torch.testing.assert_close(step(call, module, *given, of), step(module, module, *given, of))


def test_under_autocast(graphs, request):
    draws, *given = inputs(request.node.name)
    module = Model(draws)
    call = torch.compile(module, backend="megacpp")
    results = []
    for one in (call, module):
        with torch.autocast("cpu", torch.bfloat16):
            loss, logits = one(*given)
        assert logits.dtype == torch.bfloat16
        results.append(torch.autograd.grad(both(loss, logits), [*module.parameters()]))
    torch.testing.assert_close(*results, atol=2e-2, rtol=2e-2)


def test_backward_twice(graphs, request):
    draws, x, ids = inputs(request.node.name)
    module = Model(draws)
    found = []
    for call in (torch.compile(module, backend="megacpp"), module):
        loss, logits = call(x, ids)
        found.append([torch.autograd.grad(of(loss, logits), [*module.parameters()], retain_graph=True)
                      for of in (loss_alone, both, both)])  # fmt: skip
    torch.testing.assert_close(*found)


def test_a_weight_that_was_written_to_is_an_error_as_in_eager(graphs, request):
    draws, x, ids = inputs(request.node.name)
    module = Model(draws)
    _, logits = torch.compile(module, backend="megacpp")(x, ids)
    with torch.no_grad():
        module.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()


def counting(m, x):
    m.seen += 1
    return m.up(x)


def overwritten(m, x):
    return m.up(x.mul_(2))


BODIES = {
    "dropout": (lambda m, x: F.dropout(m.up(x), 0.5), 2), "no_dropout": (lambda m, x: F.dropout(m.up(x), 0.0), 1),
    "attention": (lambda m, x: F.scaled_dot_product_attention(m.up(x), x, x, dropout_p=0.1), 2),
    "attention_that_drops_nothing": (lambda m, x: F.scaled_dot_product_attention(m.up(x), x, x), 1),
    "noise": (lambda m, x: m.up(x) + torch.rand_like(x), 2), "counts": (counting, 2), "overwrites": (overwritten, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_what_would_differ_when_run_again(name, graphs, request):
    draws, x, ids = inputs(request.node.name)
    body, count = BODIES[name]
    call = torch.compile(Model(draws, body), backend="megacpp")
    call(x * 1.5, ids)[0].backward()
    assert set(tangents(graphs)) == {count}


def test_outputs_that_stay_in_backward(graphs, request, monkeypatch):
    """What no loss is computed from, what is small, and what another output shares memory with."""
    draws, x, ids = inputs(request.node.name)

    def beside(module, x, ids):
        loss, logits = module(x, ids)
        return loss, x.exp()

    def viewed(module, x, ids):
        loss, logits = module(x, ids)
        return loss, logits, logits[0]

    module = Model(draws)
    for body in (beside, viewed):
        torch.compile(body, backend="megacpp")(module, x * 1.5, ids)[0].backward()
    monkeypatch.setattr(later_gradients, "LARGE", 2**26)
    torch.compile(module, backend="megacpp")(x * 1.5, ids)[0].backward()
    assert 1 not in tangents(graphs) and tangents(graphs)


def test_without_a_loss_or_gradients(graphs, request):
    draws, x, ids = inputs(request.node.name)
    module = Model(draws)
    torch.compile(lambda x: (module.up(x), module.head(x)), backend="megacpp")(x)[0].sum().backward()
    assert set(tangents(graphs)) == {2}
    with torch.no_grad():
        assert not torch.compile(module, backend="megacpp")(x, ids)[1].requires_grad


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gradient_of_the_logits_on_cuda(request):
    """Where a thread of autograd's own comes to compile the frame again."""
    draws, x, ids = inputs(request.node.name)
    module, x = Model(draws).cuda(), x.detach().cuda().requires_grad_()
    assert held_against_eager(module, x, ids.cuda(), loss_alone) == [1, 0]
    torch._dynamo.reset()
    assert held_against_eager(module, x, ids.cuda(), both) == [2, 0]
