"""`policy="auto"`: what it plans, what it leaves to torch's partitioner, and what it says of both."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._functorch import partitioners

import megacpp_compile
from benchmarks import models as plain
from benchmarks.subjects import block, dsa, remat
from benchmarks.subjects.stack import stack
from megacpp_compile._torch import partitioners as torch_partitioners
from megacpp_compile._torch.partitioners import reporting_backward
from megacpp_compile.backends import automatic as backend
from megacpp_compile.backends.first_cut import FirstCut
from megacpp_compile.config.checkpointing import FREE
from megacpp_compile.config.options import Config
from megacpp_compile.fx.view_chains import base_of
from megacpp_compile.memory.fake_run import FakeRun
from megacpp_compile.remat import automatic, times
from megacpp_compile.remat.automatic import Ladder, Predicted, as_partitioned, plan_of_backward, worth_taking
from megacpp_compile.remat.plan import kept_bytes
from megacpp_compile.remat.planner import make_plan
from megacpp_compile.report.auto_plan import AutoPlan
from megacpp_compile.targets.rates import CPU, Rates, rates
from tests.remat import models
from tests.remat.steps import step, without_code

# GEMMs take nearly all of the time, so that what is cheap costs nearly nothing; and the reverse.
SLOW_GEMMS, FAST_GEMMS = Rates(1e9, 1e13, "slow gemms"), Rates(1e15, 1e9, "fast gemms")
# Layers of two are spared more than the least only by what takes some time.
SPENDS = {"auto": 0.02}
AUTO = {"policy": SPENDS}
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.xdist_group("automatic policy")  # one worker makes the steps that tests share


def plan_all(patch, found=SLOW_GEMMS):
    """Frames of any size are planned, at these rates."""
    patch.setattr(backend, "LEAST_READ", 0)
    patch.setattr(backend, "rates", lambda target: found)


@pytest.fixture
def planned(monkeypatch):
    """Frames of any size are planned, at rates that the test may change."""
    plan_all(monkeypatch)
    return functools.partial(plan_all, monkeypatch)


def usual_step(layers, policy):
    """Of a stack of so many layers, planned as `planned` has it. policy: "spends" is `SPENDS`."""
    with pytest.MonkeyPatch.context() as patch:
        plan_all(patch)
        return step(*models.mla(layers), {"policy": SPENDS if policy == "spends" else policy})


@pytest.fixture(scope="module")
def searched():
    """A step of three layers, with what its ladder is: each step's bytes, costs and recomputed nodes; and what is found
    within as much time as the last one costs, within just less, and within none, each with its costs and bytes."""
    found = []

    def spy(ladder, costs, allowed):
        def found_within(limit):
            plan = within(ladder, costs, limit)
            return costs(plan), plan.saved_bytes()

        plans = [ladder.plan(i) for i in range(ladder.steps + 1)]
        rows = [(p.saved_bytes(), costs(p), [n.name for n in p.recomputed]) for p in plans]
        most = found_within(float("inf"))
        below = math.nextafter(most[0], -1.0)
        found.append((rows, (most, found_within(most[0]), found_within(below), below, found_within(float("-inf")))))
        return within(ladder, costs, allowed)

    within = Ladder.within
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ladder, "within", spy)
        made = usual_step(3, "spends")
    ((rows, tried),) = found
    return made, rows, tried


@pytest.fixture(scope="module")
def usual():
    """Steps that several tests look at."""
    return functools.cache(usual_step)


def chosen(made):
    (found,) = [AutoPlan(**f.auto) for f in made.report.frames if f.auto]
    return found


def routed(layers, dropout=0.0, **kwargs):
    """(model, inputs): layers of attention and experts, of which `moe` is a pass's."""
    torch.manual_seed(0)
    made = (models.Layer(models.Attention(dropout), models.Experts(), **kwargs) for _ in range(layers))
    return models.Model(*made), (models.hidden(),)


def block_of_mla():
    """(a block by itself, its inputs)"""
    model, inputs = models.mla(1)
    return model.layers[0].attention, inputs


def both(model, inputs, around=None, **options):
    """A step without a policy, and one whose policy is automatic."""
    return [step(model, inputs, {"policy": policy, **options}, around=around) for policy in ("none", SPENDS)]


def alike(one, other):
    return [g.code for g in one.graphs] == [g.code for g in other.graphs]


def close(one, other):
    torch.testing.assert_close((one.output, one.gradients), (other.output, other.gradients))


@pytest.mark.end_to_end
def test_a_stack_saves_less_and_says_how_much(usual):
    none, auto = usual(3, "none"), usual(3, "auto")
    close(auto, none)
    found = chosen(auto)
    assert found.taken and found.reason == ""
    # Attention's values are a view of more than their op returns, here as under every policy.
    assert found.saved == auto.predicted <= auto.saved < found.saved_none <= none.saved
    assert found.peak < found.peak_none
    assert found.allowed == FREE and found.more + found.latents["seconds"] <= FREE * found.seconds_none
    assert found.saved_selective < found.saved and found.more < found.more_selective
    assert list(found.given_up)[0] == "mul in mlp.down" and sum(found.given_up.values()) > 0
    row = str(auto.report)
    assert f"recompute {found.recomputed} values (mul in mlp.down, mul in" in row and "selective: saves" in row
    assert "none: saves" in row and "3 latents kept" in row
    again = type(auto.report).from_json(auto.report.to_json())
    assert again.frames[0].auto == auto.report.frames[0].auto and str(again) == row


@pytest.mark.end_to_end
def test_a_block_by_itself_is_left_to_the_partitioner(planned):
    """Its backward reads at once what its forward saved. Its latent is kept, in the down-projection's own buffer."""
    block, (x, *tables) = block_of_mla()
    none, auto = both(block, (x, *tables))
    close(auto, none)
    found = chosen(auto)
    assert not found.taken and "lower the peak" in found.reason and found.chosen.startswith("torch's partitioner")
    held = x.shape[0] * x.shape[1] * (16 + 8) * 4
    assert found.latents["kept"] == 1 and found.latents["bytes"] == held == auto.saved - none.saved
    assert auto.report.frames[0].remat is None
    (without,), (kept,) = ([s for s in one.report.sites if s.op == "megacpp::down_norm_up"] for one in (none, auto))
    assert kept.saved_after == without.saved_after + held and kept.saved_before == without.saved_before


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("keep", [True, False])
def test_a_choice_of_latents_by_the_user_stands(planned, keep):
    none, auto = both(*block_of_mla(), keep_latents=keep)
    assert auto.saved == none.saved and chosen(auto).latents["kept"] == 0


@pytest.mark.end_to_end
def test_latents_are_recomputed_where_their_gemm_is_as_fast_as_memory(planned):
    planned(FAST_GEMMS)
    none, auto = both(*block_of_mla())
    found = chosen(auto)
    assert (found.latents["kept"], found.latents["recomputed"]) == (0, 1) and auto.saved == none.saved


@pytest.mark.exhaustive
def test_the_same_plan_every_time(planned, usual):
    one, other = usual(2, "spends"), step(*models.mla(2), AUTO)
    assert alike(one, other) and one.report.frames[0].auto == other.report.frames[0].auto


@pytest.mark.end_to_end
def test_none_is_no_policy(usual):
    assert Config(policy="none") == Config(policy=None) and Config(policy="none").policy is None
    assert Config(policy="auto").cache_key() != Config(policy=None).cache_key()
    assert Config(**Config(policy="none").to_dict()) == Config(policy="none")
    one, other = usual(1, "none"), step(*models.mla(1), {"policy": None})
    assert alike(one, other) and [f.auto for s in (one, other) for f in s.report.frames] == [None, None]


@pytest.mark.end_to_end
def test_auto_is_the_default(planned, usual):
    assert Config() == Config(policy="auto")
    assert Config().auto_time == FREE == Config(policy={"auto": FREE}).auto_time
    one, other = step(*models.mla(3), {}), usual(3, "auto")
    assert alike(one, other) and chosen(one).taken


@pytest.mark.end_to_end
def test_a_frame_in_which_no_pass_fires_is_inductors(planned):
    none, auto = both(models.llama(1), (models.hidden(),))
    assert alike(none, auto) and [f.auto for f in auto.report.frames] == [None]


@pytest.mark.end_to_end
def test_a_small_frame_is_as_without(usual):
    """Below 32 MiB there is nothing to spare: the graphs are those of "none", and no table speaks of it."""
    none, auto = usual(1, "none"), step(*models.mla(1), AUTO)
    assert alike(none, auto)
    assert "less than 32 MiB" in chosen(auto).reason and "policy auto" not in str(auto.report)


@pytest.mark.end_to_end
def test_what_is_searched(searched):
    """The limit on time is kept to the last bit: what costs just what is allowed is taken, and the next bit below takes
    less. Every step saves less and costs more: the first is torch's own partition, latents kept; what fuses comes
    before what is a kernel of its own, of which the last layer runs no GEMM again."""
    made, (first, *others), (most, same, less, below, none) = searched
    assert same == most
    assert less[0] <= below and less[1] > most[1]
    assert none[1] > less[1], "where nothing is allowed it is what torch's partitioner has"
    assert len(others) == 4 * 3, "four likes, in each layer"
    saved, costs = ([row[i] for row in (first, *others)] for i in (0, 1))
    assert first[1] == 0 and saved == sorted(saved, reverse=True) and costs == sorted(costs)
    assert costs[9] < 0.001 * costs[-1]
    projections = [sum(name.startswith(("mm", "mla_rope_kv")) for name in names) for *_, names in (first, *others)]
    assert projections == [0] * 10 + [2, 4, 5], "the last rotates keys again, from a projection that is saved"


# What a value costs, in bytes moved for each byte freed, where time is bytes alone.
PRICES = {
    # The products of SwiGLU are written once more by a kernel that reads their factors for its own sake, and so is the
    # norm's output by its backward. The other norm's backward is not to be had when the up-projections read its output:
    # it is read, with statistics, and written. Keys and values take a GEMM and the rotation.
    "latent attention and SwiGLU": (
        lambda: models.mla(3),
        [("mlp.gate", 1), ("mlp.down", 1), ("attention_norm", 2.04), ("attention attention.kv_b", 3.39)],
    ),
    # Experts read scores and gates in an order of their own.
    "attention and experts": (
        lambda: routed(3),
        [("first.qkv", 1), ("second.router", 1), ("second", 2.04), ("second", 2.33), ("second", 2.33)],
    ),
    # What is summed over the tokens is read and written again, with the convolution in front of it.
    "a convolution and a state": (
        lambda: (models.Model(*(models.Layer(models.Mixer(), models.SwiGLU(False)) for _ in range(3))),
                 (models.hidden(),)),
        [("first.inward", 1), ("second.gate", 1), ("second.down", 1), ("first", 3.04), ("first.outward", 6)],
    ),
}  # fmt: skip


@pytest.mark.end_to_end
@pytest.mark.parametrize("what", PRICES)
def test_nothing_that_is_written_again_is_free(planned, monkeypatch, what):
    made, want = PRICES[what]
    planned(Rates(1e30, 1.0, "bytes"))
    seen = []

    class Seen(Ladder):
        def __init__(self, *args):
            super().__init__(*args)
            for likes, price in self.prices.items():
                names = sorted({like[1].replace("layers.#.", "") for like in likes})
                seen.append((" ".join(names), pytest.approx(price, abs=0.005)))

    monkeypatch.setattr(backend, "Ladder", Seen)
    torch.manual_seed(0)
    found = chosen(step(*made(), {}))
    assert want == seen
    assert found.more + found.latents["seconds"] <= FREE * found.seconds_none


@pytest.mark.end_to_end
def test_the_ladder_begins_with_what_the_partitioner_saves(planned, monkeypatch):
    """Also where it saves a view that only backward makes, what layers compute alike, and an up-projection's result."""
    begun = []

    class Seen(Ladder):
        def __init__(self, forward, needed, blocks, none, seconds):
            super().__init__(forward, needed, blocks, none, seconds)
            own = (n for n in none.saved if base_of(n).op != "placeholder")
            begun.append((self.plan(0).saved_bytes(), sum(map(kept_bytes, own))))

    monkeypatch.setattr(backend, "Ladder", Seen)
    size, layers = dsa.QUICK[0], 2
    sizes = size.dim, size.heads, size.q_lora, size.kv_lora, size.nope, size.rope, size.v
    torch.manual_seed(0)
    model = plain.Stack([plain.Layer(plain.SparseMLA(size.topk, *sizes), size.dim, 96) for _ in range(layers)])
    inputs = [x.detach().float() for x in dsa.inputs(size, torch.device("cpu"))]
    made = step(model, tuple(inputs), AUTO)
    latents, ((begins, partitioned),) = chosen(made).latents, begun
    # Two projections have a latent, of which each layer's handed over tensor is its own.
    assert latents["kept"] == 2 * layers and begins - partitioned == latents["bytes"]


@pytest.mark.end_to_end
def test_what_is_counted_of_a_plan():
    """A backward takes its multiple of the forward; a limit is on what is spared; and rates are of a table, whoever
    asks, and whatever the machine does beside."""
    ops, graph = torch.ops.megacpp, torch.fx.Graph()
    scan, experts = (graph.call_function(op) for op in (ops.ssd_scan_backward.default, ops.moe_backward.default))
    of_forward = {"megacpp::ssd_scan": 4.0, "megacpp::moe": 4.0}
    assert (times.flops(scan, of_forward), times.flops(experts, of_forward)) == (10.0, 8.0)
    assert times.flops(scan) == 0.0
    none, at = Predicted(saved=100, peak=1000, recomputed=0), int((1 - automatic.LEAST_SPARED) * 1000)
    assert [worth_taking(Predicted(*p, 1), none) for p in ((99, at), (99, at + 1), (100, at))] == [True, False, False]
    assert rates("cpu") is CPU and rates("tpu") == rates("tpu")
    found = rates("cuda")
    assert found.flops / found.bytes > 100 and dataclasses.asdict(found) == dataclasses.asdict(rates("cuda"))


@pytest.mark.exhaustive
def test_predictions_are_no_lower_than_what_was_measured(monkeypatch):
    """Of six layers on an H200 under written policies; here with values as wide as keys, as torch has no kernel on CPU
    for others, which recompute more. `-s` lists them."""
    record = json.loads((ROOT / "docs" / "h200" / "remat.json").read_text())
    measured = {row["name"]: row["ms"]["median"] for row in record["tables"][0]["rows"] if "ms" in row}
    size = dataclasses.replace(block.SIZES[0], v=block.SIZES[0].nope + block.SIZES[0].rope)
    with torch.device("meta"):
        model = stack(size, 5632, 6).to(torch.bfloat16)
    x = torch.empty(size.batch, size.tokens, size.dim, dtype=torch.bfloat16).requires_grad_()
    tables = plain.rotary_tables(size.tokens, size.rope, torch.device("cpu"), torch.bfloat16)
    found = {}

    class Seen(Ladder):
        def __init__(self, *args):
            super().__init__(*args)
            begin = self.seconds(self.begin)
            found["none"] = 1e3 * begin, measured["megacpp"]
            for name, policy in remat.POLICIES.items():
                timed, of = measured.get(f"megacpp, {name}"), Config(policy=policy).own_policy
                if timed and of is not None and of.offload == "none":
                    plan = make_plan(self.forward, self.needed, self.blocks, of, "cuda")
                    found[name] = self.seconds(plan) / begin, timed / measured["megacpp"]

    monkeypatch.setattr(backend, "Ladder", Seen)
    monkeypatch.setattr(backend, "rates", lambda target: rates("cuda"))
    FakeRun(model, (x, *tables), {}, torch.device("cpu"), []).compiled(Config(keep_latents=False))
    for name, (predicted, timed) in found.items():
        print(f"{name:40} predicted {predicted:.3f} measured {timed:.3f}")
    predicted, timed = found.pop("none")
    assert predicted == pytest.approx(timed, rel=0.02) and len(found) == 8
    for name, (predicted, timed) in found.items():
        assert timed <= predicted <= timed + 0.08, name


@pytest.mark.exhaustive
def test_dynamic_sizes(planned, usual):
    none, auto = usual(2, "none"), step(*models.mla(2), AUTO, dynamic=True)
    close(auto, none)
    assert chosen(auto).taken and auto.saved < none.saved


@pytest.mark.exhaustive
def test_autocast(planned):
    none, auto = both(*models.mla(2), around=torch.autocast("cpu", torch.bfloat16))
    assert chosen(auto).taken and auto.saved < none.saved
    for one, other in zip(auto.gradients, none.gradients, strict=True):
        assert torch.linalg.vector_norm(one - other) <= 2**-7 * torch.linalg.vector_norm(other)


@pytest.mark.exhaustive
def test_dropout_draws_the_same_again(planned):
    """The partitioner begins twice, and both times hands out the forward's random numbers."""
    none, auto = both(*routed(2, dropout=0.2))
    assert chosen(auto).taken and auto.saved < none.saved
    close(auto, none)


@pytest.fixture
def divided(monkeypatch):
    """Both halves of every joint graph that has been divided."""
    found, extract = [], partitioners._extract_fwd_bwd_modules
    told = lambda *a, **k: found.append(extract(*a, **k)) or found[-1]  # noqa: E731
    monkeypatch.setattr(partitioners, "_extract_fwd_bwd_modules", told)
    return found


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("found", [SLOW_GEMMS, FAST_GEMMS], ids=["latents kept", "latents recomputed"])
@pytest.mark.parametrize("layers", [2, 1], ids=["a plan", "torch's cut"])
def test_one_graph_is_divided(planned, divided, monkeypatch, layers, found):
    """And the partitioner merges equal nodes once, but where ops were put in the place of those that keep latents."""
    planned(found)
    merged, merge = [], torch_partitioners.find(torch_partitioners._WHERE).fx_graph_cse
    monkeypatch.setattr("torch._functorch.partitioners.fx_graph_cse", lambda g: merged.append(g) or merge(g))
    # At the rates of fast GEMMs what recomputes takes 3.8 % of the step.
    said = chosen(step(*models.mla(layers), {"policy": {"auto": 0.05}}))
    assert (said.taken, said.latents["kept"]) == (layers == 2, layers if found is SLOW_GEMMS else 0)
    assert len(divided) == 1 and len(merged) == (2 if found is SLOW_GEMMS else 1)


@pytest.mark.end_to_end
def test_what_a_cut_saves_is_known_before_it_is_made(planned, monkeypatch):
    """And is what both halves say when they are; a view and a size among what is saved."""
    both = []

    def where(first, stands):
        early, seen = [], first.cut

        def told(inputs, backward):
            early.append(plan_of_backward(first.forward, inputs, backward))

        with reporting_backward(told):
            halves = seen(first.given)
        both.append((*early, as_partitioned(first.forward, halves, first.outputs)))
        return halves if stands(both[-1][0]) else None

    monkeypatch.setattr(FirstCut, "where", where)
    step(*models.mla(1), AUTO)
    step(*models.mla(1), AUTO, dynamic=True)
    step(*routed(1, dropout=0.2), AUTO)
    assert len(both) == 3
    for early, late in both:
        assert early.saved and early.recomputed
        assert (early.saved, early.recomputed, early.free) == (late.saved, late.recomputed, late.free)


@pytest.mark.end_to_end
@pytest.mark.sampled(2)
@pytest.mark.parametrize("layers", [2, 1])
def test_where_a_cut_cannot_be_looked_at_it_is_made(planned, usual, divided, monkeypatch, layers):
    """As on a torch whose partitioner goes another way: the plan is the same."""
    early = usual(layers, "spends")
    divided.clear()
    monkeypatch.setattr(torch_partitioners, "_EXTRACT", "no_such_step")
    late = step(*models.mla(layers), AUTO)
    assert len(divided) == 2
    assert alike(early, late) and early.report.frames[0].auto == late.report.frames[0].auto


@pytest.mark.end_to_end
def test_where_what_is_saved_is_added_to_the_cut_is_made(planned, usual, divided):
    want = chosen(usual(1, "spends"))
    divided.clear()
    quantized = {"activation_quantization_aten_pass": {"allowed_dtypes": "torch.float64"}}
    with torch._inductor.config.patch(post_grad_fusion_options=quantized):
        made = chosen(step(*models.mla(1), AUTO))
    assert (made, len(divided)) == (want, 2)


@pytest.mark.end_to_end
def test_by_blocks(planned):
    """Equal blocks share a plan, and count: what one saves waits while the others run."""
    model, (x, *tables) = models.mla(4)
    with without_code([]), megacpp_compile.record() as report:
        torch._dynamo.reset()
        compiled = megacpp_compile.compile(model, policy="auto", whole_below=1)
        compiled(x.detach().requires_grad_(), *tables).sum().backward()
    (frame,) = [f for f in report.frames if f.auto and f.blocks == 4]
    assert AutoPlan(**frame.auto).taken and frame.remat and frame.peak


# Whose choice stands -> (model and inputs, options, torch's budget, why).
OF_THE_USER = {
    "regions": (lambda: routed(1, checkpointed=True), {}, 1.0, "torch.utils.checkpoint in the model decides"),
    "a budget of torch": (lambda: models.mla(1), {}, 0.5, "activation_memory_budget = 0.5"),
    # The ladder would recompute that input, which a written policy is refused for.
    "a projection kept in place of an input": (
        lambda: (models.llama(1), (models.hidden(),)), {"compress": {"names": ("*.down",)}}, 1.0,
        "compressed_linear keeps a projection in place of its input",
    ),
}  # fmt: skip


@pytest.mark.end_to_end
@pytest.mark.parametrize("what", OF_THE_USER)
def test_what_the_user_has_chosen_stands(planned, what):
    make, options, budget, why = OF_THE_USER[what]
    with torch._functorch.config.patch(activation_memory_budget=budget):
        none, auto = both(*make(), strict=True, **options)
    assert alike(none, auto) and why in chosen(auto).reason
    assert auto.report.sites and (what != "regions" or why == chosen(auto).reason and why in str(auto.report))


@pytest.mark.end_to_end
def test_nothing_is_said_of_inference(planned):
    model, inputs = models.mla(1)
    torch._dynamo.reset()
    with without_code([]), megacpp_compile.record() as report, torch.no_grad():
        torch.compile(model, backend="megacpp", options=AUTO)(*inputs)
    assert [f.auto for f in report.frames] == [None]


@pytest.mark.end_to_end
def test_a_defect_leaves_the_frame_to_the_partitioner(planned, usual, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("a defect")

    none = usual(1, "none")
    monkeypatch.setattr(Ladder, "within", broken)
    auto = step(*models.mla(1), AUTO)
    assert alike(none, auto)
    assert chosen(auto).reason == "internal error: ZeroDivisionError: a defect"


@pytest.mark.exhaustive
def test_what_the_forward_overwrites_is_not_read_anew(planned):
    """A moving average that backward reads: the old one."""

    class Average(nn.Module):
        def __init__(self, stack):
            super().__init__()
            self.stack, self.gain = stack, nn.Parameter(torch.ones(models.DIM))
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x, *tables):
            old = self.mean.clone()
            y = self.stack(x, *tables) * torch.exp(self.gain * old)
            self.mean.add_(1.0)
            return y

    stack, inputs = models.mla(3)
    made = step(Average(stack), inputs, AUTO)
    model, x = Average(stack), inputs[0].detach().requires_grad_()
    out = model(x, *inputs[1:])
    eager = torch.autograd.grad(out.float().square().sum(), [x, *model.parameters()])
    assert chosen(made).taken
    torch.testing.assert_close((made.output, made.gradients), (out, list(eager)))
