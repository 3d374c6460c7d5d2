"""`ShardingPlan` where there is no XLA: what it accepts, decides and refuses, and the two rewrites of graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import megacpp_compile
from megacpp_compile import Config, Report, ShardingPlan, sharding
from megacpp_compile.errors import BadOptionError, MegacppError, RuleWithoutHitError, ShardingError
from megacpp_compile.passes._driver import pass_names
from megacpp_compile.report.records import Frame
from megacpp_compile.sharding.gemms import keep_batches
from megacpp_compile.sharding.layout import gather
from tests.corpus.spellings import PlainMLA, tables

MESH = {"data": 2, "model": 4}
PLAN = ShardingPlan(
    mesh=MESH, rules={"*.q.weight": ("model", None), "*.weight": [("data", "model"), None], "*.bias": None}, batch="data"
)


def test_the_first_rule_wins():
    assert PLAN.decide("layers.0.q.weight") == (("model", None), "*.q.weight")
    assert PLAN.decide("layers.0.k.weight") == ((("data", "model"), None), "*.weight")
    assert PLAN.decide("q.bias") == (None, "*.bias")
    assert PLAN.decide("table") == (None, "")
    assert "over data 2 x model 4" in PLAN.describe() and "*.weight -> data+model, -" in PLAN.describe()
    assert PLAN.gathered((("data", "model"), "data", None)) == ("model", None, None)


def test_a_plan_is_plain_data():
    assert ShardingPlan.of(PLAN.to_dict()) == PLAN and hash(ShardingPlan.of(PLAN.to_dict())) == hash(PLAN)
    config = Config.from_options({"sharding": PLAN.to_dict()}, pass_names())
    assert config.sharding == PLAN and Config(**config.to_dict()) == config
    assert config.cache_key() != Config().cache_key()
    row = {"fqn": "q.weight", "shape": [8, 4], "spec": "model, -", "rule": "*.q.weight", "by": ""}
    report = Report(frames=[Frame(sharding={"mesh": MESH, "pinned": [row]})])
    assert Report.from_json(report.to_json()) == report
    assert "sharding over data 2 x model 4" in str(report) and "8x4" in str(report)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("model", ["a ShardingPlan, or a mapping"]),
        ({"rules": {}}, ["'mesh'"]),
        ({"mehs": {"model": 4}}, ["Did you mean 'mesh'"]),
        ({"mesh": {}}, ["at least one axis"]),
        ({"mesh": {"model": 0}}, ["1 or more"]),
        ({"mesh": MESH, "rules": {"*.q": ("modle", None)}}, ["rules['*.q']", "Did you mean 'model'"]),
        ({"mesh": MESH, "rules": {"*.q": ("data", "data")}}, ["once at most"]),
        ({"mesh": MESH, "rules": {"*.q": "model"}}, ["a tuple"]),
        ({"mesh": MESH, "rules": [("*.q", None), ("*.q", None)]}, ["every pattern once"]),
        ({"mesh": MESH, "rules": {"a..b": None}}, ["a glob over parameter names"]),
        ({"mesh": MESH, "batch": "dta"}, ["Did you mean 'data'"]),
        ({"mesh": MESH, "devices": [0, 1]}, ["each of 0 to 7 once"]),
    ],
    ids=str,
)
def test_bad_plans(value, words):
    with pytest.raises(BadOptionError) as caught:
        Config(sharding=value)
    assert not [w for w in words if w not in str(caught.value)], caught.value


def test_specs_have_to_fit():
    assert PLAN.whole("w", (8, 3), None) == (None, None)
    assert PLAN.whole("w", (16, 3), (("data", "model"), None)) == (("data", "model"), None)
    with pytest.raises(ShardingError, match="dimension 0 has 4 elements, not divisible by the 8 devices"):
        PLAN.whole("w", (4, 3), (("data", "model"), None))
    with pytest.raises(ShardingError, match="2 dimensions"):
        PLAN.whole("w", (4, 3), ("model",))


def test_a_rule_without_a_hit_is_an_error_before_anything_happens():
    model = nn.ModuleDict({"q": nn.Linear(4, 8), "k": nn.Linear(4, 8)})
    with pytest.raises(RuleWithoutHitError, match="sharding: the pattern '.*qq.weight' hits no parameter.*Did you mean"):
        sharding.apply(ShardingPlan(mesh=MESH, rules={"*.qq.weight": None}), model)
    with pytest.raises(RuleWithoutHitError):
        megacpp_compile.compile(model, sharding=ShardingPlan(mesh=MESH, rules={"*.qq.weight": None}))


def test_elsewhere_than_on_xla_it_says_so():
    model = nn.ModuleDict({"q": nn.Linear(4, 8)})
    with pytest.raises(ShardingError, match="q.weight.*on cpu, not on an XLA device"):
        sharding.apply(ShardingPlan(mesh=MESH, rules={"*.weight": None}), model)
    with pytest.raises(ShardingError, match="fc.weight"), sharding.constructing(PLAN, "fc"):
        megacpp_compile.NativeLayerSpec()["linear_fc2"](8, 8, bias=False)
    megacpp_compile.NativeLayerSpec()["linear_fc2"](8, 8)  # outside nothing is pinned


def error_of(plan: ShardingPlan, compile) -> MegacppError:
    with pytest.raises(MegacppError) as caught:
        compile(plan)
    return caught.value


@pytest.mark.end_to_end
def test_a_frame_names_its_parameters():
    """The rule without a hit is found in a whole frame, and a parameter that is on no XLA device is named."""
    block, x = PlainMLA(24, heads=2, q_lora=14, kv_lora=10, nope=6, rope=4, v=5), torch.randn(1, 3, 24)
    angles = tables(block.rope.table, 3, 4)

    def compiled(plan):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()  # after a break elsewhere in the process a rule without a hit is no error
        torch.compile(block, backend="megacpp", options={"sharding": plan, "strict": True})(x, *angles)

    assert isinstance(error_of(ShardingPlan(mesh=MESH, rules={"*.q_c.weight": None}), compiled), RuleWithoutHitError)
    error = error_of(ShardingPlan(mesh=MESH, rules={"*.q_b.weight": None}), compiled)
    assert isinstance(error, ShardingError) and error.name == "q_a.weight", "a part of down_norm_up without a rule"
    indivisible = error_of(ShardingPlan(mesh={"model": 7}, rules={"*.q_b.weight": ("model", None)}), compiled)
    assert isinstance(indivisible, ShardingError) and "20 elements" in str(indivisible)


@pytest.mark.parametrize("turned", [False, True])
def test_products_keep_their_batch_dimensions(turned):
    def attention(q, k, v):
        scores = (q @ k.mT).softmax(-1)
        return (scores.mT @ v if turned else scores @ v).square()

    q, k, v = (torch.randn(2, 3, 5, n, dtype=torch.float64) for n in (4, 4, 6))
    gm = make_fx(attention)(q, k, v)
    want = gm(q, k, v)
    assert _count(gm, torch.ops.aten.bmm.default) == 2
    keep_batches(gm.graph)
    gm.recompile()
    assert _count(gm, torch.ops.aten.bmm.default) == 0 and _count(gm, torch.ops.aten.einsum.default) == 2
    torch.testing.assert_close(gm(q, k, v), want)


def test_products_of_three_dimensions_stay():
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    gm = make_fx(torch.bmm)(a, b)
    keep_batches(gm.graph)
    assert _count(gm, torch.ops.aten.bmm.default) == 1


def _count(gm, target) -> int:
    return sum(n.target is target for n in gm.graph.nodes)


def test_parameters_in_parts_are_gathered_in_front_of_their_readers():
    x, w, b = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((3, 4), (8, 4), (8,)))
    gm = torch.fx.symbolic_trace(lambda x, w, b: torch.nn.functional.linear(x, w, b).sin() + w.sum())
    want = torch.autograd.grad(gm(x, w, b).square().sum(), (x, w, b))
    gather(PLAN, gm, {1: ("data", None), 2: ("model",)})
    assert _count(gm, torch.ops.megacpp.laid_out.default) == 1, "what is cut over the model stays"
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    assert node.args[0].target == "w" and len(node.users) == 2 and set(node.args[0].users) == {node}
    got = torch.autograd.grad(gm(x, w, b).square().sum(), (x, w, b))
    torch.testing.assert_close(got, want)
    torch.library.opcheck(torch.ops.megacpp.laid_out.default, (w, *node.args[1:]))
