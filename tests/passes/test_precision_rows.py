"""The report's answer to a precision plan: what was asked of each linear, expert layer and attention, and what it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacpp_compile import PrecisionPlan, analysis, explain, sparse_mla
from megacpp_compile.config.options import Config
from megacpp_compile.errors import CaptureError
from megacpp_compile.passes import linear
from megacpp_compile.passes._rewrites import experts as rewrites
from megacpp_compile.precision.survey import survey
from megacpp_compile.report.report import Report
from tests.frames import run
from tests.passes import experts

DIM = 32
PLAN = PrecisionPlan(gate=False)


@pytest.fixture
def float8(monkeypatch):
    monkeypatch.setattr(linear, "no_float8", lambda device: "")


@pytest.fixture
def grouped(monkeypatch):
    monkeypatch.setattr(rewrites, "no_grouped_float8", lambda device: "")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj, self.o_proj = (nn.Linear(DIM, DIM, dtype=torch.bfloat16) for _ in range(3))

    def forward(self, x):
        q, v = self.q_proj(x)[:, None], self.v_proj(x)[:, None]
        return self.o_proj(F.scaled_dot_product_attention(q, q, v).squeeze(1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.up_proj = Attention(), nn.Linear(DIM, 24, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(24, 8, dtype=torch.bfloat16)

    def forward(self, x):
        return self.lm_head(F.silu(self.up_proj(self.self_attn(x))))


def x(rows=16):
    return (torch.randn(2, rows, DIM, dtype=torch.bfloat16),)


def rows(module, args, plan=PLAN, **options):
    frames = run(module, args, Config(precision=plan, **options))
    return {(r["fqn"], r["kind"]): r for a in frames.analyses for r in a.frame.precision}


def of_layer(frames):
    """The row of the layer of experts."""
    (layer,) = (r for a in frames.analyses for r in a.frame.precision if r["kind"] == "experts" and not r["shape"])
    return layer


def of_lists():
    """(experts in a list, their tokens)"""
    x = torch.randn(experts.TOKENS, experts.DIM, dtype=torch.bfloat16)
    return experts.MoE(experts.nonzero_add_assign).to(torch.bfloat16), (x,)


class SparseRows(nn.Module):
    """Attention over rows in fp8, which a kernel may multiply so."""

    def __init__(self, fp8_gemms):
        super().__init__()
        self.fp8_gemms = fp8_gemms

    def forward(self, q, kv, indices, scale):
        return sparse_mla(q, kv, indices, causal=False, kv_scale=scale, fp8_gemms=self.fp8_gemms)[0]


@pytest.mark.parametrize("fp8_gemms", [False, True])
def test_rows_in_fp8_are_no_widening(fp8_gemms):
    q, kv = torch.randn(1, 40, 2, 576, dtype=torch.bfloat16), torch.randn(1, 16, 1, 576).to(torch.float8_e4m3fn)
    args = q, kv, torch.zeros(1, 40, 1, 4, dtype=torch.int32), torch.ones(1, 16, 1, 1)
    with torch.no_grad():
        (row,) = rows(SparseRows(fp8_gemms), args, strict=True).values()
    assert row["effective"] == "fp8 rows" and ("fp8_gemms" in row["reason"]) == fp8_gemms


def test_every_linear_and_attention_has_a_row(float8):
    found = rows(Model(), x(), PrecisionPlan((("*.v_proj", "bf16"),), gate=False))
    said = {fqn: (r["requested"], r["effective"], r["rule"], bool(r["reason"])) for (fqn, _), r in found.items()}
    assert said == {
        "self_attn.q_proj": ("fp8_current", "fp8_current", "role attention", False),
        "self_attn.v_proj": ("bf16", "bf16", "*.v_proj", False),
        "self_attn": ("bf16", "bf16", "role attention_core", False),
        "self_attn.o_proj": ("fp8_current", "fp8_current", "role attention", False),
        "up_proj": ("fp8_current", "bf16", "role experts", True),
        "lm_head": ("bf16", "bf16", "role head", False),
    }
    assert found["up_proj", "linear"]["reason"] == "24 out features, not known to be a multiple of 16"
    assert found["self_attn.q_proj", "linear"]["shape"] == "32x32"


@pytest.mark.parametrize("plan, rule", [
    (PrecisionPlan(roles={"attention_core": "fp8_current"}), "role attention_core"),
    (PrecisionPlan({"self_attn": "fp8_delayed"}), "self_attn"),
])
def test_a_core_that_is_asked_for_is_refused_with_the_reason(float8, plan, rule):
    row = rows(Model(), x(), plan)["self_attn", "attention"]
    assert (row["requested"] != "bf16", row["effective"], row["rule"]) == (True, "bf16", rule)
    assert "attention's core has no fp8 op in the graph" in row["reason"]


@pytest.mark.parametrize("fp8_gemms", [False, True])
def test_rows_that_are_fp8_already_are_said_to_be(float8, fp8_gemms):
    """`sparse_mla` of a payload: no row says that its core has no fp8."""

    class Listed(nn.Module):
        def forward(self, q, kv, scale, indices):
            return torch.ops.megacpp.sparse_mla(q, kv, indices, scale, 0.1, 16, True, 0, fp8_gemms)[0]

    q, kv = torch.randn(1, 3, 2, 24, dtype=torch.bfloat16), torch.randn(1, 9, 1, 24).to(torch.float8_e4m3fn)
    args = q, kv, torch.rand(1, 9, 1, 1), torch.tensor([0, 3, -1]).expand(1, 3, 1, 3).int()
    for plan in (PLAN, PrecisionPlan(roles={"attention_core": "fp8_current"})):
        (row,) = rows(Listed(), args, plan).values()
        assert row["effective"] == "fp8 rows" and row["reason"].startswith("its rows are fp8 already")


def test_where_there_is_no_float8():
    found = rows(Model(), x())
    assert {r["effective"] for r in found.values()} == {"bf16"}
    assert found["self_attn.q_proj", "linear"]["reason"] == "cpu has no float8 GEMMs"


@pytest.mark.parametrize("options, said", [({"disable": ("linear",)}, "the pass linear is off"), ({}, "its input has one dimension")])
def test_nothing_is_left_without_a_reason(float8, options, said):
    module = nn.Sequential(nn.Linear(DIM, DIM, dtype=torch.bfloat16), nn.SiLU())
    args = (torch.randn(DIM, dtype=torch.bfloat16),) if not options else x()
    (row,) = rows(module, args, PrecisionPlan((("*", "fp8_current"),), gate=False), **options).values()
    assert (row["requested"], row["effective"], row["reason"]) == ("fp8_current", "bf16", said)


@pytest.mark.parametrize("stage, error", [("capture", CaptureError("not this one")), ("run_passes", IndexError("a defect"))])
def test_a_frame_that_is_left_alone(monkeypatch, stage, error):
    def no(*_):
        raise error

    monkeypatch.setattr(analysis, stage, no)
    frames = run(Model(), x(), Config(precision=PLAN), captured=False)
    found = {r["fqn"]: r for a in frames.analyses for r in a.frame.precision}
    assert {r["effective"] for r in found.values()} == {"as written"}
    assert found["self_attn.q_proj"]["reason"] == "the frame was compiled by Inductor alone"
    for name in ("lm_head", "self_attn"):
        assert (found[name]["requested"], found[name]["reason"]) == ("bf16", "")


def test_routed_experts(float8):
    """One row for the layer; the GEMMs of its experts are no linears of their own any more."""
    found = rows(*of_lists())
    (layer,) = (r for (_, kind), r in found.items() if kind == "experts")
    assert (layer["requested"], layer["effective"], layer["rule"]) == ("fp8_current", "bf16", "role experts")
    assert layer["reason"] == "cpu has no float8 GEMMs"
    inside = [r for (fqn, kind), r in found.items() if kind == "linear" and fqn.endswith((".up", ".down"))]
    assert len(inside) == 2 * experts.EXPERTS
    assert all(r["effective"] == "bf16" and "part of megacpp::moe" in r["reason"] for r in inside)


@pytest.mark.end_to_end
def test_a_rule_for_a_part_of_a_layer_of_experts(grouped):
    """What the user says of one GEMM goes for the layer, as all of its GEMMs are in one precision."""
    for rule, why in (("*.1.down", "*.1.down has bf16 for experts.1.down"), ("*.other", "multiples of")):
        frames = run(*of_lists(), Config(precision=PrecisionPlan({rule: "bf16"}, gate=False)))
        layer = of_layer(frames)
        assert (layer["requested"], layer["effective"]) == ("fp8_current", "bf16") and why in layer["reason"]
    inside = [r for a in frames.analyses for r in a.frame.precision if r["fqn"].startswith("experts.")]
    assert {r["requested"] for r in inside} == {"fp8_current"}  # a gate within an expert routes nothing


class Experts(nn.Module):
    """A layer of routed experts of sizes that float8 has GEMMs for; without a gate, or across, where asked."""

    def __init__(self, gated=True, across=False, hidden=16, dtype=torch.bfloat16):
        super().__init__()
        self.router, self.gated, self.across = nn.Linear(DIM, 4, bias=False, dtype=dtype), gated, across
        into, out = (2 * hidden if gated else hidden, DIM), (DIM, hidden)
        self.up, self.down = (
            nn.Parameter(torch.randn(4, *(s[::-1] if across else s), dtype=dtype) / 6) for s in (into, out)
        )

    def forward(self, x):
        gates, indices = self.router(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for e in range(4):
            token, choice = torch.where(indices == e)
            up, down = (w[e].t() if self.across else w[e] for w in (self.up, self.down))
            h = F.linear(x[token], up)
            if self.gated:
                gate, h = h.chunk(2, -1)
                h = F.silu(gate) * h
            else:
                h = F.silu(h)
            y.index_add_(0, token, F.linear(h, down) * gates[token, choice, None])
        return y


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "made, plan, reason",
    [
        ({}, {"gate": False}, ""),
        ({}, {}, "gate: 4 experts of 16x32: measured at multiples of 128 only"),
        ({"gated": False}, {"gate": False}, "experts of the layouts pair and gate_up, not single"),
        ({"across": True}, {"gate": False}, "a weight lies [in, out]"),
        ({"hidden": 24}, {"gate": False}, "experts of 24x32, which are no multiples of 16"),
        ({"dtype": torch.float32}, {"gate": False}, "computed in torch.float32"),
        ({}, {"gate": False, "roles": {"experts": "fp8_block"}}, "grouped GEMMs of experts have no fp8_block op"),
    ],
    ids=lambda p: str(p) if isinstance(p, dict) else "",
)
def test_routed_experts_in_float8(grouped, made, plan, reason):
    module = Experts(**made)
    given = torch.randn(12, DIM, dtype=made.get("dtype", torch.bfloat16))
    frames = run(module, (given,), Config(precision=PrecisionPlan(**plan)))
    layer = of_layer(frames)
    (op,) = (n for n in frames.graph.graph.nodes if "megacpp.moe" in str(n.target))
    assert op.args[9:] == (() if reason else (True, "fp8_current"))
    assert reason in layer["reason"] and bool(reason) == bool(layer["reason"])
    assert layer["effective"] == ({torch.float32: "fp32"}.get(given.dtype, "bf16") if reason else "fp8_current")


class Holding(nn.Module):
    """A layer of routed experts under a name."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        setattr(self, name, Experts())

    def forward(self, x):
        return getattr(self, self.name)(x)


@pytest.mark.parametrize("name, rules", [("engram", {}), ("my_mhc_mix", {"*": "fp8_current"}), ("moe", {})])
def test_routed_experts_under_a_name_that_the_plan_excludes(grouped, name, rules):
    """They stay in bf16 as a linear of that name does, and the row says which exclusion keeps them there."""
    given = torch.randn(12, DIM, dtype=torch.bfloat16)
    frames = run(Holding(name), (given,), Config(precision=PrecisionPlan(rules, gate=False)))
    layer, (op,) = of_layer(frames), [n for n in frames.graph.graph.nodes if "megacpp.moe" in str(n.target)]
    effective = "fp8_current" if name == "moe" else "bf16"
    assert (layer["requested"], layer["effective"]) == ("fp8_current", effective)
    assert op.args[9:] == ((True, "fp8_current") if name == "moe" else ())
    assert layer["reason"].startswith("excluded by ") != (name == "moe")


@pytest.mark.end_to_end
def test_routed_experts_under_delayed_scaling_have_current_scaling(grouped):
    """And the report says so; where that has no kernel or a rule has a part in another recipe, they stay in bf16."""
    given, found = torch.randn(12, DIM, dtype=torch.bfloat16), []
    for made, plan in (
        ({}, {"gate": False, "roles": {"experts": "fp8_delayed"}}),
        ({}, {"gate": False, "rules": {"*": "fp8_delayed"}}),
        ({}, {"roles": {"experts": "fp8_delayed"}}),
        ({"across": True}, {"gate": False, "roles": {"experts": "fp8_delayed"}}),
    ):
        frames = run(Experts(**made), (given,), Config(precision=PrecisionPlan(**plan)))
        layer = of_layer(frames)
        (op,) = (n for n in frames.graph.graph.nodes if "megacpp.moe" in str(n.target))
        assert layer["requested"] == "fp8_delayed"
        found.append((layer["effective"], op.args[9:], layer["reason"].partition(":")[0]))
        if layer["effective"] != "bf16":
            assert layer["reason"] == "fp8_current: each token and row has a scale of its own, and none has a past"
    current = "fp8_current", (True, "fp8_current"), "fp8_current"
    assert found[:2] == [current] * 2
    assert [row[:2] for row in found[2:]] == [("bf16", ())] * 2
    assert found[2][2] == "gate" and found[3][2].startswith("a weight lies [in, out]")


@pytest.mark.end_to_end
def test_a_rule_for_a_part_of_experts_under_delayed_scaling(grouped):
    plan = PrecisionPlan({"*.1.down": "fp8_current", "*": "fp8_delayed"}, gate=False)
    layer = of_layer(run(*of_lists(), Config(precision=plan)))
    assert layer["effective"] == "bf16" and "*.1.down has fp8_current for experts.1.down" in layer["reason"]


class Stacked(nn.Module):
    """Experts whose weights are one tensor, in ways that are no layer of routed experts to the pass `moe`."""

    def __init__(self, product, name="experts"):
        super().__init__()
        self.add_module(name, inner := nn.Module())
        inner.up, inner.down = (nn.Parameter(torch.randn(4, *s, dtype=torch.bfloat16)) for s in ((DIM, 16), (16, DIM)))
        inner.forward = lambda x: product(F.silu(product(x, inner.up)), inner.down)

    def forward(self, x):
        for inner in self.children():
            x = inner(x)
        return x


def every(x, w):
    return torch.einsum("etd,edh->eth", x.expand(4, -1, -1) if x.dim() == 2 else x, w)


@pytest.mark.parametrize(
    "product, name, kind", [(every, "experts", "experts"), (torch.matmul, "w", "experts"), (torch.bmm, "attn", "linear")]
)
def test_gemms_with_stacked_weights(float8, product, name, kind):
    x = torch.randn(16, DIM, dtype=torch.bfloat16)
    module = Stacked(product, name)
    frames = run(module, (x if product is every else x.repeat(4, 1, 1),), Config(precision=PLAN))
    found = [r for a in frames.analyses for r in a.frame.precision]
    assert [(r["kind"], r["requested"], r["effective"]) for r in found] == [(kind, "fp8_current", "bf16")] * 2
    assert {r["reason"] for r in found} == {"GEMMs with stacked weights have no fp8 op in the graph"}


def test_activations_are_no_stacked_weights(float8):
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(16, DIM))

        def forward(self, x):
            return x @ (x + self.table).transpose(1, 2)

    assert not rows(Scores(), (torch.randn(2, 16, DIM),))


def test_classes_tell_roles_in_graphs_as_in_modules(float8):
    """`replace_linears` and a compiled graph go by the same plan."""

    class LatentAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inward = nn.Linear(DIM, DIM, dtype=torch.bfloat16)

        def forward(self, x):
            return self.inward(x)

    module = nn.ModuleDict({"block": LatentAttention(), "adapter": nn.Linear(DIM, DIM, dtype=torch.bfloat16)})
    module.forward = lambda x: module["adapter"](module["block"](x))
    found = {fqn: r["effective"] for (fqn, _), r in rows(module, x()).items()}
    assert found == {"block.inward": "fp8_current", "adapter": "bf16"}
    assert {f.fqn: f.requested for f in survey(PLAN, module, target="cuda")} == found


def test_in_the_report_and_its_json():
    report = explain(Model(), *x(), options={"precision": PLAN})
    assert Report.from_json(report.to_json()) == report
    text = str(report)
    assert "requested" in text and "self_attn.q_proj" in text and "cpu has no float8 GEMMs" in text
    assert not explain(Model(), *x()).frames[0].precision
