"""Plain models on an XLA device: the sites found on CPU, results and gradients of eager CPU, one compilation for all steps,
and nothing that XLA would hand back to the host."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import megacpp_compile
from megacpp_compile.backends import _lower, automatic
from megacpp_compile.errors import NotLoweredError
from megacpp_compile.targets.rates import Rates
from tests.corpus import allowed_counts
from tests.corpus.spellings import PlainGQA, PlainMLA, tables
from tests.remat import models as stacks

pytestmark = pytest.mark.usefixtures("fresh")

# Largest difference over the largest element, float32 on both sides; sums in any order.
TOLERANCE = 1e-5
BLOCKS = {
    "halves": (PlainMLA, {}),
    "neighbours, tokens first": (PlainMLA, {"rope_spelling": "complex_view_flatten", "layout": "bshd"}),
    "neighbours to halves": (PlainMLA, {"rope_spelling": "even_odd_slices_to_halves", "norm": "nn_rms_norm"}),
    "half tables, rope key first": (
        PlainMLA, {"rope_spelling": "halves_products_in_cat", "down": "merged_rope_first", "up": "two_linears"},
    ),
    "whole heads": (PlainGQA, {"qk_norm": "nn_rms_norm"}),
    "whole heads, neighbours": (PlainGQA, {"rope_spelling": "rotate_every_two"}),
}  # fmt: skip


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.detach().cpu().double() - want.detach().double()).abs().max() / want.detach().abs().max())


def host_ops() -> list[str]:
    import torch_xla.debug.metrics as metrics

    return [name for name in metrics.counter_names() if name.startswith("aten::")]


def compilations() -> int:
    import torch_xla.debug.metrics as metrics

    data = metrics.metric_data("CompileTime")
    return data[0] if data else 0


def made(kind, settings):
    """(a block, its input, its tables) on CPU."""
    torch.manual_seed(0)
    block = kind(**settings)
    x = torch.randn(2, 11, block.dim if hasattr(block, "dim") else 40)
    return block, x, tables(block.rope.table, x.shape[1], getattr(block, "rope_dim", 14))


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in BLOCKS), ("halves", {"keep_latents": False})])
def test_block(xla, name, options):
    import torch_xla.debug.metrics as metrics

    kind, settings = BLOCKS[name]
    block, x, angles = made(kind, settings)
    there = copy.deepcopy(block).to(xla)
    x.requires_grad_()
    out = block(x, *angles)
    grad = torch.randn_like(out)
    out.backward(grad)

    metrics.clear_all()
    moved = x.detach().to(xla).requires_grad_()
    with megacpp_compile.record() as report:
        call = torch.compile(there, backend="megacpp", options={"strict": True, **options})
        result = call(moved, *(t.to(xla) for t in angles))
        result.backward(grad.to(xla))
    for site, wanted in kind.expected(**settings).items():
        assert report.counts[site] in allowed_counts(wanted), report
    assert {frame.target for frame in report.frames} == {"tpu"}
    assert {frame.chosen.get("keep_latents") for frame in report.frames} == {None if options else True}
    assert {site.effective for site in report.sites} == {"tpu_xla"} and difference(result, out) < TOLERANCE
    assert difference(moved.grad, x.grad) < TOLERANCE
    for (label, p), q in zip(there.named_parameters(), block.parameters(), strict=True):
        assert difference(p.grad, q.grad) < TOLERANCE, label
    assert not host_ops()


def hybrid():
    """A mixer, experts in a loop, and attention, as in the examples."""
    from plain_hybrid import HybridConfig, HybridLM

    torch.manual_seed(0)
    return HybridLM(HybridConfig(pattern="MEA", dim=32, experts=3, expert_dim=24, shared_dim=24))


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")


def sites_of_the_hybrid(report):
    """One frame, every op but the rotation of whole heads."""
    absent = ("attention", "compressed_linear", "gated_delta_rule", "gated_linear_attention", "index_scores",
              "linear", "linear_cross_entropy", "mla_decode", "rope_qk", "selective_scan", "sparse_mla", "token_loop")  # fmt: skip
    assert {name: n for name, n in report.counts.items() if n != 1} == dict.fromkeys(absent, 0)
    assert [frame.captured for frame in report.frames] == [True]
    assert {s.op.removeprefix("megacpp::"): s.effective for s in report.sites if s.effective != "tpu_xla"} == {
        "causal_conv1d": "reference", "gated_rms_norm": "reference",
    }  # fmt: skip
    assert not any(site.reason for site in report.sites)  # what served was asked for


def kept(call, module, x, angles) -> int:
    """Elements that a step keeps for its backward, but for parameters and inputs."""
    found = {}

    def pack(t):
        found[id(t)] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call(x, *angles)
    own = {id(t) for t in (*module.parameters(), x, *angles)}
    return sum(t.numel() for t in found.values() if id(t) not in own)


def test_what_backward_keeps(xla):
    """Less than under plain openxla; with a checkpoint around the block next to nothing; a policy is obeyed too."""
    block, x, angles = made(PlainMLA, {})
    block, x, angles = block.to(xla), x.to(xla).requires_grad_(), [t.to(xla) for t in angles]

    def checkpointed(x, *angles):
        return checkpoint(block, x, *angles, use_reentrant=False)

    sizes = {}
    for name, function, options in (
        ("openxla", block, None), ("megacpp", block, {}), ("checkpointed", checkpointed, {}),
        ("policy", block, {"policy": "full"}),
    ):
        torch._dynamo.reset()
        settings = {"backend": "openxla"} if options is None else {"backend": "megacpp", "options": options}
        sizes[name] = kept(torch.compile(function, **settings), block, x, angles)
    assert sizes["megacpp"] < sizes["openxla"] / 2, sizes
    assert sizes["checkpointed"] < sizes["megacpp"] / 4 and sizes["policy"] < sizes["megacpp"] / 4, sizes


def mla():
    block, _, angles = made(PlainMLA, {})

    def loss(call, generator, device):
        data = torch.randn(2, 11, 40, generator=generator).to(device)
        return (call(data, *(t.to(device) for t in angles)) - data).square().mean()

    return block, loss, 1e-2, lambda report: None


def mla_mamba_and_experts():
    def loss(call, generator, device):
        tokens = torch.randint(0, 50, (2, 64), generator=generator).to(device)
        return F.cross_entropy(call(tokens).flatten(0, 1), tokens.flatten())

    return hybrid(), loss, 1e-3, sites_of_the_hybrid


@pytest.mark.parametrize("make", [mla, mla_mamba_and_experts])
def test_training_compiles_once(xla, examples, make):
    """Losses of AdamW steps and the first one's gradients equal those of eager CPU, and only the first two steps compile:
    the second has gradients to free and an optimizer's state to read. Forward and backward are compiled in the first."""
    import torch_xla
    import torch_xla.debug.metrics as metrics

    def train(module, device, call, steps=5):
        optimizer = torch.optim.AdamW(module.parameters(), lr=rate)
        losses, compiled, extracted = [], [], []
        for step in range(steps):
            before = compilations() if device != "cpu" else 0
            optimizer.zero_grad()
            loss = loss_of(call, torch.Generator().manual_seed(step), device)
            loss.backward()
            optimizer.step()
            if device != "cpu":
                torch_xla.sync(wait=True)
                compiled.append(compilations() - before)
                extracted.append(metrics.counter_value("DynamoExtractCompiledGraph"))
            if step == 0:
                first = {name: p.grad.cpu().clone() for name, p in module.named_parameters()}
            losses.append(loss.detach())
        return torch.stack([loss.cpu() for loss in losses]), first, compiled, extracted

    module, loss_of, rate, check = make()
    there = copy.deepcopy(module).to(xla)
    want, exact, *_ = train(module, "cpu", module)
    metrics.clear_all()
    with megacpp_compile.record() as report:
        call = torch.compile(there, backend="megacpp", options={"strict": True})
        got, gradients, compiled, extracted = train(there, xla, call)
    check(report)
    assert want[-1] < want[0] and ((got - want).abs() / want).max() < 1e-4
    assert difference(got[:1], want[:1]) < TOLERANCE
    for name, gradient in gradients.items():
        assert difference(gradient, exact[name]) < TOLERANCE, name
    assert compiled[0] > 0 and not any(compiled[2:]), compiled
    assert set(extracted) == {2} and not host_ops(), extracted


def test_what_nothing_fires_in_is_left_to_openxla(xla):
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8), torch.nn.GELU())
    there, x = copy.deepcopy(module).to(xla), torch.randn(3, 8)
    with megacpp_compile.record() as report:
        result = torch.compile(there, backend="megacpp")(x.to(xla))
    assert not report.sites and [frame.target for frame in report.frames] == ["tpu"]
    assert difference(result, module(x)) < TOLERANCE


def test_an_op_left_without_a_lowering_is_an_error(xla, monkeypatch):
    monkeypatch.setattr(_lower, "_lower", lambda *_: None)
    block, x, angles = made(PlainMLA, {})
    with pytest.raises(NotLoweredError):
        torch.compile(block.to(xla), backend="megacpp")(x.to(xla), *(t.to(xla) for t in angles))


def test_settings_of_inductor_are_named(xla, caplog):
    block, x, angles = made(PlainMLA, {})
    call = torch.compile(block.to(xla), backend="megacpp", options={"inductor": {"max_autotune": True}})
    with caplog.at_level("WARNING", logger="megacpp_compile"):
        call(x.to(xla), *(t.to(xla) for t in angles))
    assert "max_autotune" in caplog.text


@pytest.mark.parametrize("sparing", [True, False])
def test_policy_auto_on_a_stack(xla, monkeypatch, sparing):
    """At the target's rates; gradients are eager's on CPU, with a plan and without; latents are kept here in any case."""
    monkeypatch.setattr(automatic, "LEAST_READ", 0)
    monkeypatch.setattr(automatic, "rates", lambda target: Rates(1e9, 1e13, target))
    if not sparing:
        monkeypatch.setattr(automatic, "worth_taking", lambda plan, none: False)
    model, inputs = stacks.mla(3)
    x = inputs[0].detach().requires_grad_()
    want = torch.autograd.grad(model(x, *inputs[1:]).square().sum(), [x, *model.parameters()])
    model = model.to(xla)
    x, *tables = (t.detach().to(xla) for t in inputs)
    x.requires_grad_()
    with megacpp_compile.record() as report:
        out = torch.compile(model, backend="megacpp", options={"policy": "auto"})(x, *tables)
        got = torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
    (found,) = [f.auto for f in report.frames if f.auto]
    assert found["taken"] is sparing and found["rates"] == "tpu" and found["latents"]["kept"] == 0
    assert report.frames[0].chosen == {"keep_latents": True}
    for mine, eager in zip(got, want, strict=True):
        assert (mine.cpu() - eager).abs().max() <= 1e-5 * eager.abs().max()
