"""Loops over experts are traced whole for this backend, and nothing else is traced otherwise than it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import megacpp_compile
from megacpp_compile import analysis
from megacpp_compile._torch import translator
from megacpp_compile.frontend import same_frames, unbacked_shapes
from tests.frames import largest_error, train
from tests.passes.experts import DIM, Expert, MoE, Ungated, skipping_idle_experts, where_index_add

pytestmark = pytest.mark.usefixtures("fresh")


def compiled(module, x, **kwargs):
    with megacpp_compile.record() as report:
        got = train(torch.compile(module, backend="megacpp", **kwargs), module, (x,))
    eager = copy.deepcopy(module)
    error, which = largest_error(got, train(eager, eager, (x,)))
    assert error < 1e-5, which
    return report


def tokens():
    return torch.randn(11, DIM).requires_grad_()


def the_miss(report):
    """The one near miss of a loop over experts, however often it was met."""
    (miss,) = {(m.tag, m.reason): m for m in report.misses if m.pass_name == "moe"}.values()
    return miss


def test_a_loop_over_experts_is_one_frame(no_kernels):
    report = compiled(MoE(where_index_add), tokens())
    assert report.counts["moe"] == 1, report
    assert len(report.frames) == 1 and not counters["graph_break"]


def rows_above_the_mean(m, x, indices, gates):
    """No experts: rows whose number the data decides, with something to fuse before and after."""
    y = m.experts[0](x) + 1
    rows = torch.nonzero(y.sum(-1) > 0).squeeze(-1)
    return y.index_add(0, rows, m.experts[1](y[rows]))


@pytest.mark.end_to_end
def test_what_is_not_recognised_breaks_the_graph_as_it_did(no_kernels):
    module, x = MoE(rows_above_the_mean, Ungated), tokens()
    report = compiled(module, x)
    assert not report.counts["moe"]
    frames = [f for f in report.frames if f.captured]
    torch._dynamo.reset()
    graphs = []
    torch.compile(module, backend=lambda gm, _: graphs.append(gm) or gm.forward)(x)
    assert len(frames) == len(graphs) > 1


def breaks_behind_the_sizes(m, x, indices, gates):
    rows = torch.nonzero(x.sum(-1) > 0).squeeze(-1)
    torch._dynamo.graph_break()
    return x.index_add(0, rows, m.experts[1](x[rows]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("body", [rows_above_the_mean, breaks_behind_the_sizes])
def test_graphs_and_breaks_are_no_more_than_of_any_backend(body, eager_backend):
    counted = {}
    for backend in ("eager", "megacpp"):
        torch._dynamo.reset()
        torch.manual_seed(0)  # how many graphs there are depends on how many rows are found
        counters.clear()
        module = torch.compile(nn.Sequential(*(MoE(body, Ungated, experts=2) for _ in range(2))), backend=backend)
        for length in (11, 7):
            module(torch.randn(length, DIM))
        counted[backend] = (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
    assert counted["megacpp"] <= counted["eager"] and counted["megacpp"][1] <= counted["eager"][1]


def test_who_asks_for_one_graph_gets_it(no_kernels):
    try:
        torch.compile(MoE(rows_above_the_mean, Ungated), backend="eager", fullgraph=True)(tokens())
    except torch._dynamo.exc.Unsupported:
        pytest.skip("this torch has to be told to trace such ops, whatever the backend")
    report = compiled(MoE(rows_above_the_mean, Ungated), tokens(), fullgraph=True)
    assert len(report.frames) == 1


def hit_experts_only(m, x, indices, gates):
    y = torch.zeros_like(x)
    mask = torch.nn.functional.one_hot(indices, num_classes=m.num_experts).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        choice, token = torch.where(mask[e[0]])
        y.index_add_(0, token, x[token] * gates[token, choice, None])
    return y


@pytest.mark.parametrize(("loops", "tag", "reason"), [
    ("auto", "no-expert", ""), (False, "graph-break", "range(num_experts)"),
])  # fmt: skip
def test_a_loop_that_depends_on_data_is_a_near_miss_that_says_why(loops, tag, reason, eager_backend):
    """Where it is left to break the graph, with advice."""
    miss = the_miss(compiled(MoE(hit_experts_only, Ungated, experts=2), tokens(), options={"expert_loops": loops}))
    assert miss.tag == tag and reason in miss.reason and "hit_experts_only" in miss.source


def skipping_empty_groups(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        if token.numel() == 0:
            continue
        y[token] += expert(x[token]) * gates[token, choice, None]
    return y


def rows_as_numbers(m, x, indices, gates):
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        rows = token.tolist()
        out[rows] += expert(x[rows]) * gates[token, choice, None]
    return out


def rows_as_numbers_where_there_are_any(m, x, indices, gates):
    out = torch.zeros_like(x)
    for e in range(m.num_experts):
        picked = (indices == e).any(-1)
        if len(rows := picked.nonzero().flatten().tolist()) > 0:
            weight = (gates * (indices == e)).sum(-1)[rows, None]
            out[rows] += m.experts[e](x[rows]) * weight
    return out


def one_row_at_a_time(m, x, indices, gates):
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        for t in (indices == e).any(-1).nonzero().flatten().tolist():
            out[t] += expert(x[t]) * (gates[t] * (indices[t] == e)).sum()
    return out


def run_expert(m, out, x, indices, gates, e):
    token, choice = torch.where(indices == e)
    out[token] += m.experts[e](x[token]) * gates[token, choice, None]


def rows_as_tensors(m, x, indices, gates):
    """What the advice for rows that are read as numbers says."""
    out = torch.zeros_like(x)
    for e in range(m.num_experts):
        run_expert(m, out, x, indices, gates, e)
    return out


@pytest.mark.parametrize(
    "body", [rows_as_numbers, rows_as_numbers_where_there_are_any, one_row_at_a_time], ids=lambda p: p.__name__
)
def test_rows_that_are_read_as_numbers_are_advised_to_stay_tensors(body, eager_backend):
    report = compiled(MoE(body, experts=2), tokens())
    (miss,) = [m for m in report.misses if m.pass_name == "moe"]
    assert (miss.tag, report.counts["moe"]) == ("graph-break", 0)
    assert "`rows, choice = torch.where(indices == e)`" in miss.reason and "which rows an expert has" in miss.reason
    assert compiled(MoE(rows_as_tensors, experts=2), tokens()).counts["moe"] == 1


def experts_as_numbers(m, x, indices, gates):
    out = torch.zeros_like(x)
    for e in torch.unique(indices).tolist():
        token, choice = torch.where(indices == e)
        out[token] += m.experts[e](x[token]) * gates[token, choice, None]
    return out


def experts_as_numbers_in_a_loop_of_groups(m, x, indices, gates):
    out = torch.zeros_like(x)
    for part in range(2):
        hit = torch.unique(indices)
        for e in hit.tolist():
            token, choice = torch.where(indices == e)
            out[token] += m.experts[e](x[token]) * gates[token, choice, None] * part
    return out


def experts_among_numbers(m, x, indices, gates):
    """What each adds stands elsewhere."""
    out = torch.zeros_like(x)
    active = torch.unique(indices).tolist()
    for e in range(m.num_experts):
        if e in active:
            run_expert(m, out, x, indices, gates, e)
    return out


def experts_in_an_array(m, x, indices, gates):
    out = torch.zeros_like(x)
    for e in torch.unique(indices).cpu().numpy():
        run_expert(m, out, x, indices, gates, int(e))
    return out


@pytest.mark.parametrize("body", [
    experts_as_numbers, experts_as_numbers_in_a_loop_of_groups, experts_among_numbers, experts_in_an_array,
], ids=lambda p: p.__name__)  # fmt: skip
def test_experts_that_are_read_as_numbers_have_another_advice(body, eager_backend):
    report = compiled(MoE(body, experts=2), tokens(), options={"expert_loops": False})
    reasons = [m.reason for m in report.misses if m.tag == "graph-break"]
    assert any("which experts have tokens" in reason and "for e in hit:" in reason for reason in reasons)
    assert not any("which rows" in reason for reason in reasons)


def with_tanh():
    return Expert(activation=torch.tanh)


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("body", "expert", "tag", "words"), [
    (where_index_add, with_tanh, "activation", "its activation is none that is known"),
    (skipping_idle_experts, Expert, "graph-break", "without a branch"),
    (skipping_empty_groups, Expert, "graph-break", "without a branch"),
], ids=lambda p: getattr(p, "__name__", None))  # fmt: skip
def test_a_loop_has_one_near_miss_and_its_advice_is_right(body, expert, tag, words, eager_backend):
    """`where_index_add` over `Expert` is each of these as its advice has it, and fires (above)."""
    report = compiled(MoE(body, expert, experts=2), tokens(), options={"expert_loops": tag != "graph-break"})
    (miss,) = [m for m in report.misses if m.pass_name == "moe"]
    assert miss.tag == tag and words in miss.reason
    assert ("range(num_experts)" in miss.reason) == (tag == "graph-break"), "no other advice beside the reason"


def groups_of_known_sizes(m, x, indices, gates):
    """As transformers' JetMoe: rows sorted by expert, and cut where each expert's end."""
    order = indices.flatten().argsort()
    sizes = indices.flatten().bincount(minlength=m.num_experts).tolist()
    groups = x[order // 2].split(sizes)
    outs = [expert(rows) for expert, rows in zip(m.experts, groups, strict=True)]
    return torch.zeros_like(x).index_add(0, order // 2, torch.cat(outs) * gates.flatten()[order, None])


def test_sizes_of_groups_read_as_numbers_fuse(eager_backend):
    """Of two groups, so that the sum of their sizes looks like a state that is carried from one to the next."""
    report = megacpp_compile.explain(MoE(groups_of_known_sizes, Ungated, experts=2), tokens())
    assert report.counts["moe"] == 1 and not report.misses and not any(f.graph_break for f in report.frames)


def test_other_backends_are_left_alone():
    graphs = []
    backend = lambda gm, _: graphs.append(unbacked_shapes.unknown_sizes(gm)) or gm.forward  # noqa: E731
    torch.compile(MoE(where_index_add), backend=backend)(tokens())
    assert not any(graphs)


@pytest.mark.end_to_end
@pytest.mark.parametrize("experts", [4, 12])
def test_no_shape_is_looked_up_while_a_loop_over_many_experts_is_traced(monkeypatch, no_kernels, experts):
    """In torch's cache, in vain where every expert has a number of rows of its own."""
    asked = []
    ends = translator._look_nothing_up

    def seen(frame):
        ends(frame)
        asked.append(frame.fake_mode.cache_enabled)

    monkeypatch.setattr(translator, "_look_nothing_up", seen)
    report = compiled(MoE(where_index_add, experts=experts), tokens())
    assert report.counts["moe"] == 1 and asked[0] and asked[-1] is (experts < translator._MANY)


class Within(nn.Module):
    """A call that Dynamo gives up, as it breaks where nothing can be resumed, and one within it that is all it does."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))

    def forward(self, x):
        try:
            return self.within(x)
        finally:
            pass

    def within(self, x):
        rows = torch.nonzero(x.sum(-1) > 0).squeeze(-1)
        y = self.down(self.up(x).square())
        return y.index_add(0, rows, x[rows].softmax(-1))


def test_a_graph_that_is_traced_again_is_looked_at_once(monkeypatch):
    looked_at = []
    real = analysis.capture

    def capture(gm, inputs):
        looked_at.append(len(gm.graph.nodes))
        return real(gm, inputs)

    monkeypatch.setattr(analysis, "capture", capture)
    report = megacpp_compile.explain(Within(), torch.randn(11, DIM))
    assert looked_at.count(max(looked_at)) == 1, looked_at  # not for `forward` and for `within`
    names = [frame.name for frame in report.frames]
    assert [name.split(" ")[0] for name in names[:2]] == ["forward", "within"]
    assert any("resume_in_within" in name for name in names[2:])  # torch 2.11 names it by its line first


def graph_and_inputs(function, *args):
    found = []
    torch._dynamo.reset()
    torch.compile(function, backend=lambda gm, inputs: found.append((gm, inputs)) or gm.forward)(*args)
    (one,) = found
    return one


def twice(x, w):
    return (x @ w).relu() @ w


def under_another_name(x, w):
    return twice(x, w)


def with_other_operands(x, w):
    return (x @ w).relu() @ x


def test_which_frames_are_the_same_graph():
    x, w = torch.randn(4, 4), nn.Parameter(torch.randn(4, 4))
    key = same_frames.key_of(*graph_and_inputs(twice, x, w))
    assert key == same_frames.key_of(*graph_and_inputs(under_another_name, x, w))
    others = [
        (with_other_operands, x, w), (twice, x[:2], w), (twice, x.t(), w), (twice, x.double(), w.double()),
        (twice, x, w.detach()), (twice, x.clone().requires_grad_(), w), (twice, w, w),
    ]  # fmt: skip
    keys = [same_frames.key_of(*graph_and_inputs(*other)) for other in others]
    with torch.no_grad():
        keys.append(same_frames.key_of(*graph_and_inputs(twice, x, w)))
    with torch.autocast("cpu"):
        keys.append(same_frames.key_of(*graph_and_inputs(twice, x, w)))
    assert None not in keys and len({key, *keys}) == 1 + len(keys)
