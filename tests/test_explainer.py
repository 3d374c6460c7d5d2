"""`explain` and the command line: the report of a model that never runs."""

import json
import sys

import pytest
import torch

import megacpp_compile
from megacpp_compile.cli import main
from tests.corpus.spellings import PlainMLA
from tests.passes.experts import DIM, TOKENS, MoE, where_index_add


def build():
    block = PlainMLA()
    return block, block.example_inputs()


def build_with_kwargs():
    return (*build(), {})


@pytest.mark.end_to_end
def test_explain_counts_and_leaves_the_model_alone():
    block, args = build()
    before = dict(block.named_parameters())
    report = megacpp_compile.explain(block, *args)
    assert {k: v for k, v in report.counts.items() if v} == {"down_norm_up": 2, "mla_rope_q": 1, "mla_rope_kv": 1}
    assert all(p is before[name] for name, p in block.named_parameters())
    assert all(s.saved_before is not None and s.saved_after is not None for s in report.sites)
    assert torch.isfinite(block(*args)).all()
    report = megacpp_compile.explain(block, *args, options={"disable": ("mla_rope_q", "mla_rope_kv")})
    assert "mla_rope_q" not in {s.pass_name for s in report.sites} and report.counts["down_norm_up"] == 2
    report = megacpp_compile.explain(block.to("meta"), *(a.to("meta") for a in args))
    assert report.counts["mla_rope_kv"] == 1


@pytest.mark.end_to_end
def test_explain_sees_through_sizes_that_values_decide():
    """A loop over experts takes as many rows as the router says. Where nothing is recognised the graph breaks."""
    x = torch.randn(TOKENS, DIM)
    assert megacpp_compile.explain(MoE(where_index_add), x).counts["moe"] == 1
    other = megacpp_compile.explain(lambda x: x[x > 0].sin(), x)
    assert not other.sites and len(other.frames) > 1
    beyond = megacpp_compile.explain(lambda x: (x[x > 0].sin() @ x[x > 0]) * x, x)  # which fakes can't run
    assert "not looked at" in beyond.frames[-1].reason


WIDTH = 8


class Around(torch.nn.Module):
    """`between` stands between two idioms, outside of any loop, in which a graph break costs Dynamo the frame."""

    def __init__(self, between):
        super().__init__()
        self.down, self.up, self.again, self.out = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.norm, self.last, self.between = torch.nn.RMSNorm(WIDTH), torch.nn.RMSNorm(WIDTH), between

    def forward(self, x):
        y = self.between(self.up(self.norm(self.down(x))))
        return self.out(self.last(self.again(y)))


def picks_rows(y):
    rows = torch.nonzero(y.sum(-1) > 0)[:, 0]
    return y.index_add(0, rows, y[rows])


def picks_by_mask(y):
    return y[y.sum(-1) > 0]


def reads_a_number(y):
    return y * y.sum().item()


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("between", [picks_rows, picks_by_mask, reads_a_number])
def test_explain_reports_what_compiling_does_around_sizes_that_values_decide(between, eager_backend):
    model, x = Around(between), torch.randn(2, WIDTH).abs()
    with megacpp_compile.record() as compiled:
        torch.compile(model, backend="megacpp")(x)
    told = megacpp_compile.explain(model, x)
    assert told.counts["down_norm_up"] == compiled.counts["down_norm_up"] == 2
    (cut,) = {f.graph_break for f in told.frames if f.captured and f.passes["down_norm_up"]} - {""}
    assert between.__name__ in cut and cut in {f.graph_break for f in compiled.frames}


def test_explain_says_where_it_stops():
    def slices(y):
        return y[: int(y.sum() > 0)]

    report = megacpp_compile.explain(Around(slices), torch.randn(2, WIDTH))
    last = report.frames[-1]
    assert "not looked at" in last.reason and "slices" in last.name and "\n" not in last.reason
    assert report.counts["down_norm_up"] == 1


def test_command_line_explains_as_json(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "explained", sys.modules[__name__])
    for target in ("explained:build", "explained:build_with_kwargs"):
        assert main(["explain", target, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["counts"]["down_norm_up"] == 2


def test_command_line_lists_passes(capsys):
    assert main(["passes"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("mla_rope_q") > printed.index("down_norm_up")
