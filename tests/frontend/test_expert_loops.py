"""Loops over the experts that have tokens fuse as loops over all, where an expert without tokens adds nothing and does
nothing else; in every other case the graph breaks as before."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import megacpp_compile
from tests.frames import largest_error, train
from tests.passes.experts import DIM, MoE

pytestmark = pytest.mark.usefixtures("eager_backend")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    settings = ("capture_dynamic_output_shape_ops", "capture_scalar_outputs")
    before = [getattr(torch._dynamo.config, name) for name in settings]
    yield
    assert [getattr(torch._dynamo.config, name) for name in settings] == before


def trained(call, module, args):
    """What a step computes; an expert without tokens has no gradient in eager, which is a gradient of zeros."""
    results = train(call, module, args)
    leaves = {f"gradient of {n}": p for n, p in module.named_parameters()} | {"gradient of argument 0": args[0]}
    return {name: torch.zeros_like(p) for name, p in leaves.items()} | results


def compiled(module, *inputs, tolerance=1e-5, **kwargs):
    """The report of training steps on `inputs`, whose results have to be eager's."""
    eager = copy.deepcopy(module)
    step = torch.compile(module, backend="megacpp", **kwargs)
    with megacpp_compile.record() as report:
        for x in inputs:
            error, which = largest_error(trained(step, module, (x,)), trained(eager, eager, (x,)))
            assert error <= tolerance, which
    return report


def fuses(report, layers=1):
    assert report.counts["moe"] == layers, report
    assert len(report.frames) == 1 and not counters["graph_break"] and not report.misses
    assert report.frames[0].expert_loops == layers and "read as sums over all" in report.frames[0].outcome


def breaks(report):
    assert not report.counts["moe"], report
    assert any(f.graph_break for f in report.frames), report


def tokens(n=11):
    return torch.randn(n, DIM).requires_grad_()


def hits(mask):
    return torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()


def choices_by_expert(m, indices):
    return F.one_hot(indices, num_classes=m.num_experts).permute(2, 1, 0)


# --- lists of the experts that have tokens


def as_mixtral(m, x, indices, gates):
    """As transformers' Mixtral up to 4.56."""
    y = torch.zeros((x.shape[0], DIM), dtype=x.dtype)
    mask = choices_by_expert(m, indices)
    for e in hits(mask):
        expert = m.experts[e]
        choice, token = torch.where(mask[e].squeeze(0))
        current = x[None, token].reshape(-1, DIM)
        y.index_add_(0, token, (expert(current) * gates[token, choice, None]).to(x.dtype))
    return y


def as_eager_experts(m, x, indices, gates):
    """As transformers' experts since 5.0, with weights in one tensor each."""
    y = torch.zeros_like(x)
    with torch.no_grad():
        mask = choices_by_expert(m, indices)
        hit = hits(mask)
    for e in hit:
        e = e[0]
        if e == m.num_experts:
            continue
        choice, token = torch.where(mask[e])
        gate, up = F.linear(x[token], m.gate_up[e]).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, m.down[e])
        y.index_add_(0, token, (out * gates[token, choice, None]).to(y.dtype))
    return y


def by_number(m, x, indices, gates):
    y = torch.zeros_like(x)
    counts = torch.bincount(indices.flatten(), minlength=m.num_experts)
    for e in torch.nonzero(counts != 0, as_tuple=True)[0]:
        e = int(e)
        token, choice = torch.where(indices == e)
        y = y.index_add(0, token, m.experts[e](x[token]) * gates[token, choice].unsqueeze(-1))
    return y


def by_any(m, x, indices, gates):
    y = torch.zeros_like(x)
    mask = F.one_hot(indices, m.num_experts).permute(2, 0, 1).bool()
    for e in mask.any(-1).any(-1).nonzero().flatten():
        token, choice = mask[e].nonzero(as_tuple=True)
        y[token] += m.experts[e](x[token]) * gates[token, choice, None]
    return y


# --- branches on how many tokens an expert has


def as_deepseek(m, x, indices, gates):
    """As DeepSeek publishes its inference code."""
    y = torch.zeros_like(x)
    counts = torch.bincount(indices.flatten(), minlength=m.num_experts).tolist()
    for i in range(m.num_experts):
        if counts[i] == 0:
            continue
        expert = m.experts[i]
        token, choice = torch.where(indices == i)
        y[token] += expert(x[token]) * gates[token, choice, None]
    return y


def by_mask(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        mask = indices == e
        if mask.any():
            token, choice = torch.where(mask)
            y.index_add_(0, token, m.experts[e](x[token]) * gates[token, choice, None])
    return y


def by_length(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        if len(token) == 0:
            continue
        y.index_add_(0, token, expert(x[token]) * gates[token, choice, None])
    return y


def by_numel(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = (indices == e).nonzero(as_tuple=True)
        if token.numel():
            y[token] += expert(x[token]) * gates[token, choice, None]
    return y


def by_shape(m, x, indices, gates):
    y = torch.zeros_like(x)
    mask = choices_by_expert(m, indices)
    for e in range(m.num_experts):
        choice, token = torch.where(mask[e])
        if token.shape[0] > 0:
            out = m.experts[e](x[token])
            y.index_add_(0, token, out * gates[token, choice, None])
    return y


def by_sum(m, x, indices, gates):
    y = torch.zeros_like(x)
    mask = F.one_hot(indices, m.num_experts).permute(2, 0, 1)
    counts = mask.sum(dim=(1, 2))
    for e in range(m.num_experts):
        if not counts[e] > 0:
            continue
        token, choice = torch.where(mask[e])
        y.index_add_(0, token, m.experts[e](x[token]) * gates[token, choice, None])
    return y


def by_item(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        mask = indices == e
        if mask.sum().item() == 0:
            continue
        token, choice = torch.where(mask)
        y.index_add_(0, token, m.experts[e](x[token]) * gates[token, choice, None])
    return y


STACKED = (as_eager_experts,)
LOOPS = (as_mixtral, as_eager_experts, by_number, by_any, as_deepseek, by_mask, by_length, by_numel, by_shape, by_sum,
         by_item)  # fmt: skip


@pytest.mark.parametrize("body", LOOPS, ids=lambda body: body.__name__)
def test_loops_that_depend_on_data_fuse(body):
    fuses(compiled(MoE(body, stacked=body in STACKED), tokens()))


# --- what must not be taken for a loop over all experts: `add` is an iteration as it should be


def add(m, y, x, indices, gates, e):
    token, choice = torch.where(indices == e)
    y.index_add_(0, token, m.experts[e](x[token]) * gates[token, choice, None])


def counts_iterations(m, x, indices, gates):
    y, n = torch.zeros_like(x), 0
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        n += 1
    return y * n


def appends(m, x, indices, gates):
    y, seen = torch.zeros_like(x), []
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        seen.append(x[0].sum())
    return y + torch.stack(seen).sum()


def counts_in_a_module(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        if (indices == e).any():
            add(m, y, x, indices, gates, e)
            m.calls = getattr(m, "calls", 0) + 1
    return y


def counts_in_a_tensor(m, x, indices, gates):
    y, aux = torch.zeros_like(x), torch.zeros(())
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        aux += 1
    return y * aux


def counts_in_a_new_tensor(m, x, indices, gates):
    y, aux = torch.zeros_like(x), torch.zeros(())
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        aux = aux + 1
    return y * aux


def adds_to_all_tokens(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        if (indices == e).any():
            add(m, y, x, indices, gates, e)
            y += m.router.weight[e]
    return y


def most_tokens_first(m, x, indices, gates):
    y = torch.zeros_like(x)
    hit = hits(choices_by_expert(m, indices)).flatten()
    for e in hit[torch.argsort(-hit)]:
        add(m, y, x, indices, gates, e)
    return y


def some_only(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in hits(choices_by_expert(m, indices)).flatten()[:2]:
        add(m, y, x, indices, gates, e)
    return y


def hit_by_first_choices(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in hits(choices_by_expert(m, indices[:, :1])).flatten():
        add(m, y, x, indices, gates, e)
    return y


def hit_by_other_tokens(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in hits(choices_by_expert(m, indices[:2])).flatten():
        add(m, y, x, indices, gates, e)
    return y


def stops_early(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        if not (indices == e).any():
            break
        add(m, y, x, indices, gates, e)
    return y


def stops_after_one(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        if e == 0:
            break
    return y


def drops_the_few(m, x, indices, gates):
    y = torch.zeros_like(x)
    counts = torch.bincount(indices.flatten(), minlength=m.num_experts)
    for e in range(m.num_experts):
        if counts[e] < 5:
            continue
        add(m, y, x, indices, gates, e)
    return y


def skips_by_another_expert(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        if (indices == m.num_experts - 1 - e).any():
            add(m, y, x, indices, gates, e)
    return y


def runs_another_expert(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, m.num_experts - 1 - e)
    return y


def or_else(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        if (indices == e).any():
            add(m, y, x, indices, gates, e)
        else:
            y += 1
    return y


def only_if_none(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        if (indices == e).any():
            continue
        y += m.router.weight[e]
    return y


def with_dropout(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in hits(choices_by_expert(m, indices)).flatten():
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, F.dropout(m.experts[e](x[token]), 0.5) * gates[token, choice, None])
    return y


def reads_the_last(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
    return y * m.router.weight[e].sum()


def reads_the_last_rows(m, x, indices, gates):
    y, token = torch.zeros_like(x), None
    for e in range(m.num_experts):
        if (indices == e).any():
            token, choice = torch.where(indices == e)
            y.index_add_(0, token, m.experts[e](x[token]) * gates[token, choice, None])
    return y + x[token].sum()


def keeps_an_output(m, x, indices, gates):
    y, last = torch.zeros_like(x), x.sum()
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        last = last * 0 + y.sum()
    return y + last


def numbers_the_hits(m, x, indices, gates):
    y = torch.zeros_like(x)
    for i, e in enumerate(hits(choices_by_expert(m, indices)).flatten()):
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, m.experts[i](x[token]) * gates[token, choice, None])
    return y


def by_a_generator(m, x, indices, gates):
    y = torch.zeros_like(x)
    numbers = iter([float(i) for i in range(1, 9)])
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        next(numbers)
    return y * next(numbers)


def in_a_generator(m, x, indices, gates):
    y = torch.zeros_like(x)

    def found():
        for e in hits(choices_by_expert(m, indices)).flatten():
            yield e + 0

    n = 0
    for e in found():
        add(m, y, x, indices, gates, e)
        n += 1
    return y * n


def shifts_the_list(m, x, indices, gates):
    """The entries are views of the list."""
    y, hit = torch.zeros_like(x), hits(choices_by_expert(m, indices)).flatten()
    for e in hit:
        add(m, y, x, indices, gates, e)
        hit += 1
    return y


def draws_a_number(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        random.random()
    return y


def by_a_closure(m, x, indices, gates):
    y, n = torch.zeros_like(x), 0

    def count():
        nonlocal n
        n += 1

    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        count()
    return y * n


def tries(m, x, indices, gates):
    y, n = torch.zeros_like(x), 0
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        try:
            [][e]
        except IndexError:
            n = n + 1
    return y * n


OTHERS = (counts_iterations, appends, counts_in_a_module, counts_in_a_tensor, counts_in_a_new_tensor,
          adds_to_all_tokens, most_tokens_first, some_only, hit_by_first_choices, hit_by_other_tokens, stops_early,
          stops_after_one, drops_the_few, skips_by_another_expert, runs_another_expert, or_else, only_if_none,
          with_dropout, reads_the_last, reads_the_last_rows, keeps_an_output, numbers_the_hits, by_a_generator,
          in_a_generator, shifts_the_list, draws_a_number, by_a_closure, tries)  # fmt: skip


# What Dynamo says where it may not break the graph.
BREAKS = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)


@pytest.mark.parametrize("body", OTHERS, ids=lambda body: body.__name__)
def test_what_an_expert_without_tokens_would_change_breaks_the_graph(body):
    with pytest.raises(BREAKS):
        torch.compile(MoE(body), backend="megacpp", fullgraph=True)(tokens(5))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (counts_iterations, "sets `n`, which is read later"),
        (appends, "changes a value of Python's"),
        (counts_in_a_tensor, "more than their sum is used later"),
        (hit_by_first_choices, "not seen that the others have no tokens"),
    ],
    ids=lambda p: getattr(p, "__name__", None),
)
def test_what_is_not_taken_computes_as_before_and_says_why(body, reason):
    report = compiled(MoE(body, experts=6), tokens(2))
    assert not report.counts["moe"] and any(f.graph_break for f in report.frames)
    (miss,) = {(m.tag, m.reason) for m in report.misses if m.pass_name == "moe"}
    assert miss[0] == "loop-over-data" and reason in miss[1]


# --- what a loop may come in


def all_to_one(m):
    """Every token chooses expert 1 first and expert 0 second."""
    with torch.no_grad():
        m.router.weight.copy_(torch.tensor([[1.0], [2.0], [-1.0], [-2.0]]).expand(4, DIM))
    return m


@pytest.mark.parametrize("body", [as_mixtral, as_eager_experts, as_deepseek, by_length], ids=lambda b: b.__name__)
def test_experts_without_tokens(body):
    """Two of four experts have none; then there are no tokens at all, and one, and sizes become symbols."""
    module = all_to_one(MoE(body, experts=4, stacked=body in STACKED))
    sizes = (torch.rand(n, DIM).requires_grad_() for n in (9, 0, 1, 5))
    report = compiled(module, *sizes)
    assert not report.misses and not any(f.graph_break for f in report.frames)
    # Without tokens there is no row to look for, and torch knows how a branch on that goes.
    assert report.counts["moe"] >= len(report.frames) - 1 >= 2


class Model(torch.nn.Module):
    """Layers with the same code, called as modules in modules."""

    def __init__(self, layers=2):
        super().__init__()
        self.layers = torch.nn.ModuleList(MoE((as_mixtral, as_deepseek)[i % 2]) for i in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_of_a_model(dtype):
    x = torch.randn(11, DIM, dtype=dtype).requires_grad_()
    fuses(compiled(Model().to(dtype), x, tolerance=4e-2 if dtype is torch.bfloat16 else 1e-5, dynamic=True), layers=2)


def test_without_gradients_and_verified():
    model, x = Model(), tokens().detach()
    with megacpp_compile.record() as report, torch.no_grad():
        got = torch.compile(model, backend="megacpp", options={"verify": "each"})(x)
        assert torch.allclose(got, model(x), atol=1e-6)
    fuses(report, layers=2)


def test_by_the_package_s_own_compile():
    model, x = Model(), tokens()
    want = model(x)
    with megacpp_compile.record() as report:
        got = megacpp_compile.compile(model)(x)
    assert torch.allclose(got, want, atol=1e-6) and report.counts["moe"] == 2


def test_explain_tells_of_it():
    report = megacpp_compile.explain(MoE(as_mixtral), tokens())
    assert report.counts["moe"] == 1 and not report.misses


def test_the_option():
    with pytest.raises(BREAKS):
        torch.compile(MoE(by_mask), backend="megacpp", options={"expert_loops": False}, fullgraph=True)(tokens())


def test_other_backends_are_left_alone():
    with pytest.raises(BREAKS):
        torch.compile(MoE(by_mask), backend="eager", fullgraph=True)(tokens())
