"""What ops become for XLA, by the program itself: fixed shapes, as few products as there can be, no float64."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path

import pytest
import torch
from torch._functorch.aot_autograd import make_boxed_func

import megacpp_compile
from benchmarks.xla_programs import instructions
from megacpp_compile.backends import openxla
from megacpp_compile.lowerings.moe import reference as experts
from megacpp_compile.lowerings.moe import tpu_xla as blocks
from megacpp_compile.lowerings.moe_sorted import reference as sorted_experts
from megacpp_compile.lowerings.moe_sorted import tpu_xla as sorted_blocks
from megacpp_compile.lowerings.ssd_scan import reference as scan
from megacpp_compile.lowerings.ssd_scan import tpu_xla as paired
from tests.lowerings.cases import CURVES

from .test_plain_models import host_ops

TOKENS, WIDTH, HIDDEN, CHOICES = 24, 12, 20, 2


def program(tensors):
    import torch_xla

    return torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))


def computed(tensors):
    """`tensors`, by one program for all of them: who reads one after the other compiles a program for each."""
    import torch_xla

    torch_xla.sync(wait=True)
    return tensors


def moe_step(module, device, count, skewed=False, as_gpt_oss=False):
    """Outputs and gradients of forward and backward; with `skewed` every token goes to experts 0 and 1, or to none.
    as_gpt_oss: with biases, and gate and up in turn, clamped."""
    rand = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, grad, gates = rand(TOKENS, WIDTH), rand(TOKENS, WIDTH), rand(TOKENS, CHOICES)
    indices = rand(TOKENS, count).topk(CHOICES).indices
    if skewed:
        indices = torch.arange(CHOICES).repeat(TOKENS, 1)
        indices[::5] = -1
    up, gate, down = rand(count, HIDDEN, WIDTH), rand(count, HIDDEN, WIDTH), rand(count, WIDTH, HIDDEN)
    x, grad, gates, indices, up, gate, down = (t.to(device) for t in (x, grad, gates, indices, up, gate, down))
    into, form, biases = ([gate], [up]), ("silu", "pair"), ()
    if as_gpt_oss:
        both = torch.stack((gate, up), 2).flatten(1, 2)
        into, form = ([], [both]), (CURVES["clamped_swish"], "interleaved")
        biases = True, "", None, both.sum(-1), down.sum(-1)
    y, hidden, order, offsets = module.moe(x, indices, gates, *into, [down], *form, x.dtype, *biases)
    *gradients, others = module.moe_backward(grad, x, gates, *into, [down], hidden, order, offsets, *form, *biases[1:])
    return y, *gradients, *others


@pytest.mark.parametrize("as_gpt_oss", [False, True], ids=["plain", "as gpt-oss"])
@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
def test_experts(xla, skewed, as_gpt_oss):
    given = 5, skewed, as_gpt_oss
    for got, want in zip(computed(moe_step(blocks, xla, *given)), moe_step(experts, "cpu", *given), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-4)


def sorted_step(module, device, count, ends):
    """Outputs and gradients of experts over sorted rows, those behind the last of `ends` padding."""
    rand = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, grad, gate, up = rand(TOKENS, WIDTH), rand(TOKENS, WIDTH), *(rand(count, HIDDEN, WIDTH) for _ in range(2))
    down, ends = rand(count, WIDTH, HIDDEN), torch.tensor(ends, dtype=torch.int32)
    x, grad, gate, up, down, ends = (t.to(device) for t in (x, grad, gate, up, down, ends))
    y, hidden = module.moe_sorted(x, ends, [gate], [up], [down], "silu", "pair")
    *gradients, _ = module.moe_sorted_backward(grad, x, [gate], [up], [down], hidden, ends, "silu", "pair")
    return y, *gradients


@pytest.mark.parametrize("ends", [(5, 5, 24), (0, 0, 0), (20, 20, 20)], ids=str)
def test_sorted_experts(xla, ends):
    found = sorted_step(sorted_blocks, xla, 3, ends)
    assert instructions(program(found))["dot"] == 8  # as many as `moe` has
    for got, want in zip(computed(found), sorted_step(sorted_experts, "cpu", 3, ends), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-4)


def test_experts_take_as_many_products_however_many_there_are(xla):
    few, many = (instructions(program(moe_step(blocks, xla, count))) for count in (3, 9))
    assert few["dot"] == many["dot"] == 8  # three forward; backward has one for the weights of gate and up


def test_rows_of_experts_are_few_more_than_there_are(xla):
    """Not every row by every expert: less than a block an expert on top, wherever the rows go."""
    for slots, count in ((4096, 8), (4096, 64), (98304, 64), (7, 5), (3, 64)):
        rows = blocks.block_rows(slots, count)
        padded = (slots + count * (rows - 1)) // rows * rows
        assert padded <= slots + count * (rows - 1) <= 3 * slots and rows <= max(1, 2 * slots // count)


def test_a_capacity_has_fixed_shapes(xla):
    indices = torch.randn(TOKENS, 5, generator=torch.Generator().manual_seed(0)).topk(CHOICES).indices
    found = megacpp_compile.equal_split(indices.to(xla), 5, factor=0.5)
    assert "<=" not in program(found)  # how XLA writes a size that is not known
    want = megacpp_compile.equal_split(indices, 5, factor=0.5)
    assert want[1].sum() > 0
    for got, expected in zip(found, want, strict=True):
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("kind", ["A", "M", "E"])
def test_a_block_of_a_hybrid(xla, monkeypatch, kind):
    """Attention, a mixer, experts: forward and backward as one program that nobody had to run to write down."""
    import torch_xla
    import torch_xla.debug.metrics as metrics

    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    from plain_hybrid import HybridConfig, HybridLM

    def step(call, model):
        model.zero_grad()
        tokens = torch.arange(128).remainder(50).view(2, 64).to(xla)
        torch_xla.sync()
        metrics.clear_all()
        out = call(tokens)
        out.square().mean().backward()
        return program([out, *(p.grad for p in model.parameters())]), host_ops()

    monkeypatch.setattr(openxla, "_program", lambda graph, _: make_boxed_func(graph.forward))
    model = HybridLM(HybridConfig(pattern=kind, dim=32, experts=3, expert_dim=24, shared_dim=24)).to(xla)
    torch._dynamo.reset()
    with megacpp_compile.record() as report:
        text, on_host = step(torch.compile(model, backend="megacpp", options={"strict": True}), model)
    assert report.counts[{"A": "down_norm_up", "M": "ssd_scan", "E": "moe"}[kind]] == 1 and len(report.frames) == 1
    assert not on_host and instructions(text)["dot"] > 0
    # How XLA writes a size that is not known, one it has a bound of, and what a TPU has no unit for.
    assert not re.search(r"\[[^\]]*(\?|<=)[^\]]*\]", text) and "f64" not in text
    if kind == "E":
        assert step(model, model)[1] == ["aten::nonzero"]  # as the model has it


def test_experts_behind_a_capacity(xla):
    """In one frame with the op; what is dropped is counted there as on CPU."""
    from tests.passes.experts import DIM, EXPERTS, MoE, where_index_add

    counted = []

    def body(m, x, indices, gates):
        kept, dropped = megacpp_compile.equal_split(indices, EXPERTS, factor=0.5)
        counted.append(dropped)
        return where_index_add(m, x, kept, gates)

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = MoE(body)

        def forward(self, x):
            counted.clear()
            return self.moe(x), counted[0]

    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Counting(), torch.randn(TOKENS, DIM)
    want, dropped = model(x)
    want.square().sum().backward()
    there = copy.deepcopy(model).to(xla)
    there.zero_grad()
    with megacpp_compile.record() as report:
        got, counts = torch.compile(there, backend="megacpp", options={"strict": True}, fullgraph=True)(x.to(xla))
        got.square().sum().backward()
    assert report.counts["moe"] == 1 and [s.effective for s in report.sites] == ["tpu_xla"]
    assert dropped.sum() > 0 and torch.equal(counts.cpu(), dropped)
    pairs = [(got, want), *zip((p.grad for p in there.parameters()), (p.grad for p in model.parameters()), strict=True)]
    for one, other in pairs:
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=1e-5, atol=1e-5)


def scan_step(module, device, *documents):
    rand = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    b, t, h, p, g, n = 2, 40, 4, 6, 2, 5
    x, dt, a = rand(b, t, h, p), rand(b, t, h).exp(), -rand(h).exp()
    args = [v.to(device) for v in (x, dt, a, rand(b, t, g, n), rand(b, t, g, n), rand(h))]
    documents = [numbers.to(device) for numbers in documents]
    y, final, states = module.ssd_scan(*args, None, 16, torch.float32, *documents)
    dy, dfinal = (rand(*v.shape).to(device) for v in (y, final))
    return y, final, *module.ssd_scan_backward(dy, dfinal, *args, None, states, 16, *documents)[:-1]


@pytest.mark.parametrize("begins", [[], [5, 16, 30]], ids=["one_sequence", "documents"])
def test_scan(xla, begins):
    documents = [sum((torch.arange(40) >= at).int() for at in begins).expand(2, -1)] if begins else []
    got = scan_step(paired, xla, *documents)
    assert "f64" not in program(got)
    for one, want in zip(computed(got), scan_step(scan, "cpu", *documents), strict=True):
        assert (one.cpu() - want).norm() / want.norm() < 1e-5
