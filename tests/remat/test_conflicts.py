"""Everything else a model or a user may have put in place: dropout, autocast, dynamic shapes, graph breaks, checkpoints."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import checkpoint

import megacpp_compile
from megacpp_compile import analysis
from megacpp_compile.config.options import Config
from megacpp_compile.errors import BlockKindError, CaptureError, MegacppError, TwoPoliciesError
from tests.remat import models
from tests.remat.steps import cores, count, same, step, without_code

X = models.hidden()
FULL = {"policy": {"ablock": "full_plus_norms", "eblock": "selective", "last_layer": "full_plus_norms"}}


def less(model, options=FULL, around=None):
    """(a step without a policy, one that keeps less under `options`), the same to the last bit."""
    plain, policed = (step(model, (X,), o, around) for o in ({}, options))
    assert same(plain, policed) and policed.saved < plain.saved
    return plain, policed


@pytest.mark.end_to_end
def test_dropout():
    _, policed = less(models.llama(1, dropout=0.5))
    # The mask is drawn again from the seed, which is not.
    assert count(policed.graphs[1], "inductor_seeds") == 0 < count(policed.graphs[0], "inductor_seeds")


class Averaging(models.SwiGLU):
    """Writes three buffers and reads each: the old value, the new one, and a mean of batches. Others in place, too."""

    def __init__(self):
        super().__init__()
        for name in ("old", "new", "mean"):
            self.register_buffer(name, torch.ones(models.DIM))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = super().forward(x) * self.old.clone()
        self.old.mul_(0.5)
        self.new.mul_(0.5)
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        y = y.tanh_() * 1.5
        y += x
        return y * (self.new * 2) * self.mean


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", [FULL["policy"], 0.0], ids=str)
def test_what_the_forward_writes(policy):
    """Regression: backward recomputed from a buffer's new value where the forward had read its old one."""
    torch.manual_seed(0)
    model = models.Model(models.Layer(models.Attention(), Averaging()), models.Layer(models.Attention(), Averaging()))
    eager, x = copy.deepcopy(model), X.detach().requires_grad_()
    want = torch.autograd.grad(eager(x).square().sum(), [x, *eager.parameters()])
    got = step(model, (X,), {"policy": policy})
    for mine, theirs in zip(got.gradients, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())
    for (name, mine), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


@pytest.mark.end_to_end
def test_autocast():
    less(models.llama(1), around=torch.autocast("cpu", torch.bfloat16))


@pytest.mark.end_to_end
def test_dynamic_shapes():
    model = models.llama(1)
    policed = step(model, (models.hidden(40),), FULL, dynamic=True)
    x = models.hidden(40).requires_grad_()
    eager = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(policed.gradients, list(eager), rtol=1e-4, atol=1e-4)
    assert any(isinstance(n.meta.get("val"), torch.SymInt) for n in policed.graphs[0].graph.nodes)


@pytest.mark.end_to_end
def test_frames_between_graph_breaks():
    """Each keeps less; a pattern for blocks that are in another frame is no error there."""
    options = {**FULL, "block_kinds": {"layers.*.first": "ablock", "first": "ablock"}}
    _, policed = less(models.llama(2, broken=True), options)
    given_up, *compiled = policed.report.frames  # the loop over layers, and each layer
    assert given_up.graph_break and not given_up.captured
    assert len(compiled) > 1 and all(f.remat for f in compiled)


@pytest.mark.end_to_end
def test_checkpoint_in_the_model_is_honoured():
    plain, policed = less(models.llama(2, checkpointed=True), {"policy": "selective"})
    assert cores(policed.graphs[1]) == cores(plain.graphs[1]) == 2


def routed(checkpointed, layers=1):
    torch.manual_seed(0)
    made = (models.Layer(models.Experts(bias=False), models.SwiGLU(), checkpointed=checkpointed) for _ in range(layers))
    return models.Model(*made)


@pytest.fixture(scope="module")
def user_checkpoint():
    """A step without a policy, which all tests of routers in checkpoints share."""
    return step(routed(True), (X,), {})


@pytest.fixture(scope="module")
def no_checkpoint():
    return step(routed(False), (X,), {})


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.xdist_group("remat routers")
@pytest.mark.parametrize("policy", ["selective", 0.0], ids=str)
def test_a_router_in_a_checkpoint_chooses_once(policy, user_checkpoint, no_checkpoint):
    """A second choice, from scores a rounding apart, could be another one. The experts around it run again."""
    policed = step(routed(True), (X,), {"policy": policy})
    assert policed.report.counts["moe"] == 1 and same(user_checkpoint, policed)
    forward, backward = policed.graphs
    assert count(forward, "aten.topk") == 1 and count(backward, "aten.topk") == 0
    assert count(backward, "aten._softmax.") == 0, "what backward reads of the scores is what was chosen from"
    # One GEMM of each layer's router and shared block is not enough: the experts' own run again.
    assert policed.saved < no_checkpoint.saved


@pytest.mark.end_to_end
@pytest.mark.xdist_group("remat routers")
def test_without_a_policy_a_checkpoint_is_the_users_but_for_the_choice(user_checkpoint, no_checkpoint):
    """As under Inductor alone the whole region runs again, but for the router's choice and what it is made from."""
    forward, backward = user_checkpoint.graphs
    assert user_checkpoint.report.counts["moe"] == 1 and same(user_checkpoint, no_checkpoint)
    assert count(forward, "aten.topk") == 1 and count(backward, "aten.topk") == 0
    assert count(backward, "aten._softmax.") == 0
    assert user_checkpoint.saved < no_checkpoint.saved


@pytest.mark.end_to_end
def test_a_frame_that_falls_back_chooses_once_too():
    """It keeps its regions as Dynamo has them, and chooses in them."""
    with mock.patch.object(analysis, "capture", side_effect=CaptureError("planted")):
        fallen = step(routed(True), (X,), {})
    assert not fallen.report.frames[0].captured
    assert count(fallen.graphs[0], "aten.topk") == 1 and count(fallen.graphs[1], "aten.topk") == 0


@pytest.mark.parametrize(
    ("budget", "options", "error", "says"),
    [(1.0, {"strict": True}, TwoPoliciesError, "torch.utils.checkpoint"),
     (0.5, {}, TwoPoliciesError, "activation_memory_budget = 0.5"),
     (1.0, {"block_kinds": {"layer.*.firs": "mblock"}}, BlockKindError, "layers.0.first")],
    ids=["checkpoint in the model", "global budget", "pattern without a hit"],
)  # fmt: skip
def test_refused(budget, options, error, says):
    model = models.llama(2, checkpointed="strict" in options)
    with pytest.raises(MegacppError) as caught, torch._functorch.config.patch(activation_memory_budget=budget):
        step(model, (X,), {"policy": "selective", **options})
    assert isinstance(caught.value, error)
    assert says in (caught.value.close if error is BlockKindError else str(caught.value))


@pytest.mark.end_to_end
def test_blocks_are_what_the_user_says():
    made = step(models.llama(2), (X,), {"policy": "selective", "block_kinds": {"layers.1.second": "rblock"}})
    assert {k: v["blocks"] for k, v in made.remat.items()} == {"ablock": 2, "eblock": 1, "rblock": 1, "": 0}


class Count(CustomGraphPass):
    calls = 0

    def __call__(self, graph):
        Count.calls += 1

    def uuid(self):
        return "count"


def test_a_pass_of_the_users_runs_first():
    step(models.llama(1), (X,), {"policy": "full", "inductor": {"joint_custom_post_pass": Count()}})
    assert Count.calls == 1


def test_no_plan_for_inference():
    torch._dynamo.reset()
    options = {"policy": "full", "inductor": {}}
    with torch.no_grad(), megacpp_compile.record() as report, without_code([]):
        torch.compile(models.llama(1), backend=megacpp_compile.backend, options=options)(X)
    assert [f.remat for f in report.frames] == [None]


def test_policies_key_caches():
    one, other = Config(policy="selective"), Config(policy={"last_layer": "full"})  # type: ignore[arg-type]
    assert one != other and one == Config(policy=megacpp_compile.CheckpointingPolicy())
    assert copy.deepcopy(other).policy == other.policy


@pytest.mark.parametrize(("options", "budget", "asked"), [
    ({"policy": "selective"}, 1.0, "options['policy']"), ({"policy": {"budget": 0.5}}, 1.0, "options['policy']"),
    ({"policy": "none"}, 0.5, "torch's memory budget"), ({"policy": "none"}, 1.0, ""), ({}, 1.0, ""),
], ids=str)  # fmt: skip
def test_what_a_checkpoint_overrules_is_told(options, budget, asked, caplog):
    """Each region has a line, and there is one warning."""
    x = X.detach().requires_grad_()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        for checkpointed in (False, True):
            report = megacpp_compile.explain(models.llama(2, checkpointed=checkpointed), x, options=options)
            told = [m.fqn for m in report.misses if m.tag == "checkpoint-region"]
            assert told == ["layers.0", "layers.1"] * (checkpointed and bool(asked))
    said = [r.getMessage() for r in caplog.records if "torch.utils.checkpoint" in r.getMessage()]
    assert len(said) == bool(asked) and all(f"layers.0 and others, and {asked} nothing" in text for text in said)


class Around(models.Model):
    """Checkpoints that compiled code does not see: around layers that are compiled one by one."""

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.usefixtures("eager_backend")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", ["selective", None], ids=str)
def test_what_a_checkpoint_around_compiled_blocks_overrules_is_told(reentrant, policy, caplog):
    made = Around(*models.llama(4).layers)
    made.reentrant = reentrant
    with megacpp_compile.record() as report:
        megacpp_compile.compile(made, policy=policy)(X.detach().requires_grad_()).sum().backward()
    told = [m.reason for m in report.misses if m.tag == "checkpoint-region"]
    assert bool(told) == (policy is not None) and all("of the whole frame" in reason for reason in told)
    said = [r for r in caplog.records if r.levelname == "WARNING" and "torch.utils.checkpoint" in r.getMessage()]
    assert len(said) == bool(told)
