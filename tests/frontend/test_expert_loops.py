"""Loops over the experts that have tokens fuse as loops over all, where an expert without tokens adds nothing and does
nothing else; in every other case the graph breaks as before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters

import megacpp_compile
from tests.frames import largest_error, train
from tests.frontend import loops_by_membership as membership
from tests.frontend import loops_over_hits as hits
from tests.frontend import loops_over_sorted_slots as parts
from tests.frontend import loops_with_two_values as two_values
from tests.frontend.loops_that_do_more import (
    OTHERS,
    counts_in_a_tensor,
    counts_iterations,
    numbers_the_hits,
    some_zeros_otherwise,
)
from tests.passes.experts import DIM, Expert, MoE, Ungated, skipping_idle_experts, where_index_add

pytestmark = pytest.mark.usefixtures("fresh", "eager_backend")


def trained(call, module, args):
    """What a step computes; an expert without tokens has no gradient in eager, which is a gradient of zeros."""
    results = train(call, module, args)
    leaves = {f"gradient of {n}": p for n, p in module.named_parameters()} | {"gradient of argument 0": args[0]}
    return {name: torch.zeros_like(p) for name, p in leaves.items()} | results


def compiled(module, *inputs, tolerance=1e-5, loops=True, **kwargs):
    """The report of training steps on `inputs`, whose results have to be eager's."""
    eager = copy.deepcopy(module)
    step = torch.compile(module, backend="megacpp", options={"expert_loops": loops}, **kwargs)
    with megacpp_compile.record() as report:
        for x in inputs:
            error, which = largest_error(trained(step, module, (x,)), trained(eager, eager, (x,)))
            assert error <= tolerance, which
    return report


def fuses(report, layers=1):
    assert report.counts["moe"] == layers, report
    assert len(report.frames) == 1 and not counters["graph_break"] and not report.misses
    assert report.frames[0].expert_loops == layers and "read as sums over all" in report.frames[0].outcome


def tokens(n=11):
    return torch.randn(n, DIM).requires_grad_()


@pytest.mark.sampled(9, unit=10)
@pytest.mark.parametrize("body", [*hits.LOOPS, *parts.BRANCHES], ids=lambda body: body.__name__)
def test_loops_that_depend_on_data_fuse(body):
    """Gated experts are in `Model` (below)."""
    fuses(compiled(MoE(body, Ungated, stacked=body in hits.STACKED), tokens()))


# What Dynamo says where it may not break the graph.
BREAKS = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)


@pytest.mark.end_to_end
@pytest.mark.sampled(5)
@pytest.mark.parametrize("body", parts.NO_BRANCHES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("kwargs", [{}, {"dynamic": True}], ids=["static", "dynamic"])
def test_sizes_that_are_read_as_numbers(body, kwargs):
    """By default, as in eager every expert runs, if on no rows."""
    module = MoE(body, Ungated, experts=4, stacked=body is parts.splits_what_gates_multiply)
    report = compiled(module, tokens(), tokens(6), loops="auto", **kwargs)
    assert report.counts["moe"] >= 1 and not counters["graph_break"] and not report.misses


@pytest.mark.sampled(9)
@pytest.mark.parametrize("body", parts.OTHERS, ids=lambda body: body.__name__)
def test_what_else_depends_on_parts_of_sorted_slots(body):
    """Of four experts two have no slots; where others' counts cut the slots, all have the same."""
    module = MoE(body, Ungated, experts=4)
    x = torch.ones(5, DIM).requires_grad_() if body in parts.CUT_BY_OTHERS else tokens(1)
    report = compiled(module, x)
    assert not report.counts["moe"] and any(m.pass_name == "moe" for m in report.misses)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("body", OTHERS, ids=lambda body: body.__name__)
def test_what_an_expert_without_tokens_would_change_breaks_the_graph(body):
    with pytest.raises(BREAKS):
        torch.compile(MoE(body, Ungated, experts=2), backend="megacpp", fullgraph=True)(tokens(5))


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("body", "reason"), [
    (counts_iterations, "sets `n`, which is read later"), (counts_in_a_tensor, "more than their sum is used later"),
    (numbers_the_hits, "handed on by `yield`, as `enumerate` does"),
], ids=lambda p: getattr(p, "__name__", None))  # fmt: skip
def test_what_is_not_taken_computes_as_before_and_says_why(body, reason):
    report = compiled(MoE(body, Ungated, experts=4), tokens(1))  # of two choices: two experts have no token
    assert not report.counts["moe"] and any(f.graph_break for f in report.frames)
    (miss,) = {(m.tag, m.reason) for m in report.misses if m.pass_name == "moe"}
    assert miss[0] == "loop-over-data" and reason in miss[1]


class Dense(torch.nn.Module):
    """No experts; a branch on data changes a buffer, or a number of Python's."""

    def __init__(self):
        super().__init__()
        self.calls, self.linear = 0, torch.nn.Linear(DIM, DIM)
        self.register_buffer("table", torch.ones(DIM))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))


class FillsATable(Dense):
    def forward(self, x, mask):
        if self.table[0] == 0:
            self.table = torch.rand(DIM)
        return self.linear(x) * self.table


class BeginsAtAStep(Dense):
    def forward(self, x, mask):
        if (self.step == 0).any():
            self.table = self.table + 1
        return self.linear(x) * self.table


class CountsPaddedCalls(Dense):
    def forward(self, x, mask):
        if (mask == 0).any():
            self.calls = 1
        return self.linear(x)


class DoublesWhatIsLong(Dense):
    def forward(self, x, mask):
        if (mask == 0).cumsum(0).max() > 1:
            self.table = self.table * 2
        return self.linear(x) * self.table


class AttendsToPadded(Dense):
    """As Longformer attends to some tokens globally: what it writes rows into is made in the branch."""

    def forward(self, x, mask):
        some = (mask == 0).any()
        if some:
            rows = (mask == 0).nonzero(as_tuple=True)
            only = x.new_zeros(5, DIM)
            only[rows] = x[:5][rows]
            only.transpose(0, 1)[:, rows[0]] = 1.0
            x = torch.cat([only, x])
        out = self.linear(x)
        return out[rows] if some else out


@pytest.mark.parametrize(
    "kind", [FillsATable, BeginsAtAStep, CountsPaddedCalls, DoublesWhatIsLong, AttendsToPadded],
    ids=lambda kind: kind.__name__,
)  # fmt: skip
def test_another_branch_on_data_is_no_loop_over_experts(kind):
    report = megacpp_compile.explain(kind(), tokens(), torch.ones(5, dtype=torch.long))
    assert not report.misses and "in forward: `if " in report.frames[0].graph_break


class ThreeLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        bodies = (hits.as_mixtral, hits.by_distinct_choices, counts_iterations)
        self.first, self.second, self.third = (MoE(body, Ungated, experts=2) for body in bodies)

    def forward(self, x):
        return self.third(self.second(self.first(x)))


@pytest.mark.end_to_end
def test_an_input_that_is_indexed_before_anything_looks_at_it(caplog):
    with caplog.at_level("INFO", logger="megacpp_compile"):
        torch.compile(lambda x: x[:, 1] + 1, backend="megacpp")(torch.rand(2, 3))
    assert "left as they are" not in caplog.text


def test_a_loop_that_is_refused_leaves_those_before_it_alone():
    """The graph breaks at its layer, and the layers before are one frame as they would be without it."""
    report = compiled(ThreeLayers(), tokens())
    assert report.counts["moe"] == 2 and [f.expert_loops for f in report.frames if f.expert_loops] == [2]
    (miss,) = {(m.tag, m.reason) for m in report.misses if m.pass_name == "moe"}
    assert miss[0] == "loop-over-data" and "sets `n`, which is read later" in miss[1]


# --- what a loop may come in


def all_to_one(m):
    """Every token chooses expert 1 first and expert 0 second, by scores near each other: where a softmax is nearly 1,
    float32 has no digits left for its gradient."""
    with torch.no_grad():
        m.router.weight.copy_(torch.tensor([[0.1], [0.2], [-0.1], [-0.2]]).expand(4, DIM))
    return m


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("body", [hits.as_mixtral, hits.as_deepseek], ids=lambda b: b.__name__)
def test_experts_without_tokens(body):
    """Two of four experts have none; then there are no tokens at all, and one, and sizes become symbols."""
    module = all_to_one(MoE(body, Ungated, experts=4))
    sizes = (torch.rand(n, DIM).requires_grad_() for n in (9, 0, 1, 5))
    report = compiled(module, *sizes)
    assert not report.misses and not any(f.graph_break for f in report.frames)
    # Without tokens there is no row to look for, and torch knows how a branch on that goes.
    assert report.counts["moe"] >= len(report.frames) - 1 >= 2


class Model(torch.nn.Module):
    """Layers with the same code, called as modules in modules."""

    def __init__(self, layers=2):
        super().__init__()
        self.layers = torch.nn.ModuleList(MoE((hits.as_mixtral, hits.as_deepseek)[i % 2]) for i in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("body", [
    parts.adds_counted_parts, parts.adds_parts_between_ends, parts.joins_parts,
], ids=lambda body: body.__name__)  # fmt: skip
def test_parts_of_no_slots(body):
    """Two of four experts have none, and one array of counts ends before them; then sizes become symbols."""
    module = all_to_one(MoE(body, Ungated, experts=4))
    report = compiled(module, *(torch.rand(n, DIM).requires_grad_() for n in (9, 5, 3)))
    assert not report.misses and not any(f.graph_break for f in report.frames) and report.counts["moe"] >= 1


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_of_a_model(dtype):
    x = torch.randn(11, DIM, dtype=dtype).requires_grad_()
    fuses(compiled(Model().to(dtype), x, tolerance=4e-2 if dtype is torch.bfloat16 else 1e-5, dynamic=True), layers=2)


def test_without_gradients_and_verified():
    model, x = Model(layers=1), tokens().detach()
    with megacpp_compile.record() as report, torch.no_grad():
        got = torch.compile(model, backend="megacpp", options={"verify": "each"})(x)
        assert torch.allclose(got, model(x), atol=1e-6)
    fuses(report)


def test_inference_with_gates_wider_than_tokens():
    """Regression: sizes that are checked behind the loop were taken for unknown ones, and the graph for a broken one."""

    def of_sequences(m, x, indices, gates):
        return parts.joins_parts(m, x.flatten(0, 1), indices.flatten(0, 1), gates.flatten(0, 1).float()).view(*x.shape)

    module, x = MoE(of_sequences, Ungated).bfloat16(), torch.randn(2, 5, DIM, dtype=torch.bfloat16)
    with megacpp_compile.record() as report, torch.no_grad():
        got = torch.compile(module, backend="megacpp", dynamic=False)(x)
        torch.testing.assert_close(got, module(x))
    fuses(report)


@pytest.mark.end_to_end
def test_choices_from_elsewhere_are_said_to_be_so():
    """Which experts a token chose may come twice in a token: then marks are no counts."""
    module = MoE(parts.joins_parts, Ungated, experts=4)
    first = torch.arange(11)
    x, indices, gates = tokens().detach(), torch.stack([first % 4, (first + 1) % 4], 1), torch.rand(11, 2)
    with megacpp_compile.record() as report, torch.no_grad():
        got = torch.compile(parts.joins_parts, backend="megacpp")(module, x, indices, gates)
        torch.testing.assert_close(got, parts.joins_parts(module, x, indices, gates))
    (miss,) = {(m.tag, m.reason) for m in report.misses if m.pass_name == "moe" and m.tag == "loop-over-data"}
    assert not report.counts["moe"] and "no sum over each token's choices is seen" in miss[1]


def test_by_the_package_s_own_compile():
    model, x = Model(layers=1), tokens()
    want = model(x)
    with megacpp_compile.record() as report:
        got = megacpp_compile.compile(model, options={"expert_loops": True})(x)
    assert torch.allclose(got, want, atol=1e-6) and report.counts["moe"] == 1


def test_explain_tells_of_it():
    report = megacpp_compile.explain(MoE(hits.as_mixtral), tokens(), options={"expert_loops": True})
    assert report.counts["moe"] == 1 and not report.misses


@pytest.mark.end_to_end
def test_by_default_an_expert_that_is_skipped_has_no_gradient():
    """As in eager: one of zeros would let momentum and weight decay move it."""
    module = all_to_one(MoE(hits.as_mixtral, Ungated, experts=4))
    with megacpp_compile.record() as report:
        torch.compile(module, backend="megacpp")(torch.rand(5, DIM)).sum().backward()
    assert [e.up.weight.grad is None for e in module.experts] == [False, False, True, True]
    assert not report.counts["moe"] and "has no gradient" in report.misses[0].reason
    torch._dynamo.reset()
    counters.clear()
    fuses(compiled(MoE(hits.as_eager_experts, stacked=True), tokens(), loops="auto"))


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("body", hits.EITHER_WAY, ids=lambda body: body.__name__)
def test_what_gives_zeros_to_an_expert_without_tokens(body):
    """By default, as there its parameters have a gradient in eager, too."""
    module = all_to_one(MoE(body, Ungated, experts=4))
    report = compiled(module, *(torch.rand(n, DIM).requires_grad_() for n in (9, 5)), loops="auto")
    assert not report.misses and not counters["graph_break"]
    assert all(torch.count_nonzero(p.grad) == 0 for e in module.experts[2:] for p in e.parameters())


@pytest.mark.end_to_end
def test_what_gives_zeros_to_some_of_its_parameters():
    report = compiled(MoE(some_zeros_otherwise, Ungated, experts=2), tokens(), loops="auto")
    assert not report.counts["moe"] and "has no gradient" in report.misses[0].reason
    torch._dynamo.reset()
    counters.clear()
    fuses(compiled(MoE(some_zeros_otherwise, Ungated, experts=2), tokens()))


@pytest.mark.end_to_end
@pytest.mark.parametrize("body", [hits.zeros_otherwise, membership.among_distinct_choices], ids=lambda b: b.__name__)
def test_either_way_without_gradients(body):
    module, x = MoE(body, Ungated, experts=4).eval(), tokens().detach()
    with megacpp_compile.record() as report, torch.no_grad():
        got = torch.compile(module, backend="megacpp", fullgraph=True)(x)
        torch.testing.assert_close(got, module(x))
    assert report.counts["moe"] == 1


@pytest.mark.end_to_end
def test_what_skips_nothing_is_not_held_to_that():
    """Regression: experts of their own in a loop over all, which have gradients of zeros in eager too."""
    model = torch.nn.Sequential(MoE(where_index_add), MoE(hits.as_eager_experts, stacked=True))
    report = compiled(model, tokens(), loops="auto")
    assert report.counts["moe"] == 2 and len(report.frames) == 1 and report.frames[0].expert_loops == 1


def test_the_option():
    report = megacpp_compile.explain(MoE(skipping_idle_experts), tokens(), options={"expert_loops": False})
    assert any(f.graph_break for f in report.frames)
    with pytest.raises(BREAKS):
        torch.compile(MoE(skipping_idle_experts), backend="megacpp", options={"expert_loops": False}, fullgraph=True)(tokens())


def test_nothing_is_looked_at_that_dynamo_does_not(eager_backend):
    """Regression: what a call returned and what a loop iterated over was guarded, whether or not it was used."""

    def step(x, settings, values):
        settings.get("step")
        for _ in values:
            pass
        return x.sin()

    compiled = torch.compile(step, backend="megacpp")
    for i in range(3):
        compiled(tokens(), {"step": object()}, [f"{i}", torch.ones(i + 2)])
    assert counters["stats"]["unique_graphs"] == 1


def test_other_backends_are_left_alone():
    with pytest.raises(BREAKS):
        torch.compile(MoE(skipping_idle_experts), backend="eager", fullgraph=True)(tokens())


# --- `if e in indices.unique()`, where nothing else depends on it


@pytest.mark.parametrize("body", membership.FUSE, ids=lambda body: body.__name__)
def test_membership_fuses(body):
    fuses(compiled(MoE(body, Ungated), tokens()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("body", [
    membership.among_distinct_choices, membership.among_choices,
], ids=lambda body: body.__name__)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_membership_of_experts_without_tokens(body, dtype):
    """Two of four experts have none, and sizes become symbols."""
    module = all_to_one(MoE(body, Ungated, experts=4)).to(dtype)
    inputs = (torch.rand(n, DIM, dtype=dtype).requires_grad_() for n in (9, 5, 7))
    report = compiled(module, *inputs, dynamic=True, tolerance=4e-2 if dtype is torch.bfloat16 else 1e-5)
    assert report.counts["moe"] >= 1 and not report.misses and not counters["graph_break"]


@pytest.mark.end_to_end
@pytest.mark.sampled(12)
@pytest.mark.parametrize("body", membership.STAY, ids=lambda body: body.__name__)
def test_other_membership_stays(body):
    """Of four experts two have no tokens, of all tokens or of the first."""
    module = all_to_one(MoE(body, Ungated, experts=4))
    report = compiled(module, torch.rand(5, DIM).requires_grad_(), tokens(3))
    assert not any(frame.expert_loops for frame in report.frames)
    assert any(frame.graph_break for frame in report.frames)


# --- `expert(rows) if len(rows) else rows`, which is the same either way where there are no rows


@pytest.mark.end_to_end
@pytest.mark.sampled(5)
@pytest.mark.parametrize("body", two_values.FUSE, ids=lambda body: body.__name__)
def test_two_values_fuse(body):
    """Of four experts two have no tokens at first."""
    module = MoE(body, Ungated, experts=4)
    fuses(compiled(module, tokens(1)))
    torch._dynamo.reset()
    report = compiled(all_to_one(module), *(torch.rand(n, DIM).requires_grad_() for n in (9, 5, 3)))
    assert not report.misses and not any(f.graph_break for f in report.frames) and report.counts["moe"] >= 1


@pytest.mark.sampled(2, unit=2)
@pytest.mark.parametrize("body", two_values.FUSE, ids=lambda body: body.__name__)
def test_two_values_of_dynamic_shapes(body):
    fuses(compiled(MoE(body, Expert), tokens(), dynamic=True))


@pytest.mark.end_to_end
@pytest.mark.sampled(12)
@pytest.mark.parametrize("body", two_values.OTHER, ids=lambda body: body.__name__)
def test_values_that_make_a_difference(body):
    """Of three experts one has no tokens at first. Behind a graph break numbers are constants, and a branch on them is
    none: what fuses there assumes nothing."""
    module, misses = MoE(body, Ungated), []
    for n in (1, 6):
        torch._dynamo.reset()
        report = compiled(module, tokens(n))
        assert not any(frame.expert_loops for frame in report.frames)
        misses += [m for m in report.misses if m.pass_name == "moe"]
    assert misses


@pytest.mark.end_to_end
def test_an_expert_that_is_skipped_has_no_gradient():
    """By default the report says so, and nothing is taken."""
    report = compiled(MoE(two_values.FUSE[0], Ungated, experts=4), tokens(1), loops="auto")
    assert not report.counts["moe"] and any("has no gradient" in m.reason for m in report.misses)
