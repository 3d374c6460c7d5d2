"""torchtitan's GraphTrainer: its trace of a training step has ops and their backward, and its passes lower them. What
traces here is written after torchtitan's own tracer; the last test runs torchtitan itself."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import annotate_fn, preserve_node_meta
from torch.nn.utils import stateless
from torch.utils.checkpoint import CheckpointPolicy

import megacpp_compile
from megacpp_compile.errors import AlreadyCompiledError, BadOptionError
from megacpp_compile.integrations.torchtitan import lowering_pass, record_ops, register, save_pass, with_passes
from megacpp_compile.lowerings._registry import semantic_ops
from tests.backends.models import Layer
from tests.seeds import Draws

if not hasattr(torch._dynamo.config, "force_compile_during_fx_trace"):
    pytest.skip("this torch compiles no frames within a trace", allow_module_level=True)

SITES = {"attention": 1, "down_norm_up": 2}


class Attention(nn.Module):
    def __init__(self, dim: int = 16):
        super().__init__()
        self.q, self.k, self.v = (Layer(dim, 8, dim) if i < 2 else nn.Linear(dim, dim) for i in range(3))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """calls: how often its own code ran."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head = Attention(), nn.Linear(16, 4)
        self.attention.forward = annotate_fn({"module_fqn": "attention"})(self.attention.forward)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return self.head(x + self.attention(x))


class Breaks(Model):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.fixture
def rand(request):
    return Draws(request.node.name)


def step(model):
    def forward_backward(x):
        loss = model(x).square().mean()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    return forward_backward


def traced(model: nn.Module, x: torch.Tensor):
    """(graph of state and inputs, fake inputs, inputs), as `minimal_fx_tracer` makes it of a training step."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    given = [*state.values(), x]
    fakes = [mode.from_tensor(t, static_shapes=True) for t in given]

    def flat(*args):
        with (
            stateless._reparametrize_module(model, dict(zip(state, args, strict=False))),
            torch.compiler._patch_engine_backward(),
        ):
            return step(model)(*args[len(state) :])

    with (
        mode, tracing(TracingContext(mode)), preserve_node_meta(),
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),
        torch.autograd.set_multithreading_enabled(False), torch.compiler._non_strict_tracing_context(),
    ):  # fmt: skip
        return make_fx(flat, record_stack_traces=True)(*fakes), fakes, given


def ops(gm) -> Counter[str]:
    return Counter(n.target._opname for n in gm.graph.nodes if n.target in semantic_ops())


def ran(gm, given) -> list[torch.Tensor]:
    with torch.no_grad():
        return gm(*(t.detach().clone() for t in given))


def test_trace(no_kernels, rand):
    """Sites are those of `torch.compile`, forward and backward are in the trace, and are eager's in float32."""
    x, model = rand(2, 12, 16), Model()
    want = step(model)(x)
    with megacpp_compile.record() as compiled:
        torch.compile(Model(), backend="megacpp", options={"policy": None})(x)
    torch._dynamo.reset()
    with megacpp_compile.record() as report:
        gm, fakes, given = traced(record_ops(model, {"strict": True, "require": SITES}), x)
    assert {name: n for name, n in report.counts.items() if n} == SITES
    assert report.counts == compiled.counts
    assert ops(gm) == {"attention": 1, "attention_backward": 1, "down_norm_up": 2, "down_norm_up_backward": 2}
    for got in (ran(gm, given), ran(lowering_pass(gm, fakes), given)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert not ops(gm)


def test_what_later_passes_read(rand):
    """Of what stands in an op's place they are told the module, whether it is backward, and that Inductor compiles it."""
    gm, fakes, _ = traced(record_ops(Model()), rand(2, 12, 16))
    given = set(gm.graph.nodes)
    kept, lowered = [], []
    for node in lowering_pass(gm, fakes).graph.nodes:
        (kept if node in given else lowered).append(node)
    assert lowered and all(n.meta["custom"]["compile_with_inductor"] == {} for n in lowered)
    assert {n.meta["custom"].get("module_fqn") for n in lowered if not n.meta.get("autograd_backward")} == {"attention"}
    assert any(n.meta.get("autograd_backward") for n in lowered)
    assert all("compile_with_inductor" not in n.meta.get("custom", {}) for n in kept)


def test_outside_of_a_trace(rand):
    """The model runs as it did, and what it writes to its buffers is written in a trace, too."""
    x, model = rand(2, 12, 16), Model()
    want = model(x)
    with megacpp_compile.record() as report:
        assert torch.equal(record_ops(model)(x), want) and not report.frames
    gm, _, given = traced(model, x)
    counted = [t.clone() for t in given]
    with torch.no_grad():
        gm(*counted)
    assert given[-2] == 2 and counted[-2] == 3


def test_graph_break(rand, caplog):
    x, model = rand(2, 12, 16), Breaks()
    want = step(Model())(x)
    gm, _, given = traced(record_ops(model), x)
    assert not ops(gm)
    torch.testing.assert_close(ran(gm, given), want, rtol=1e-5, atol=1e-6)
    assert "Breaks is traced as it is written: " in caplog.text
    with pytest.raises(torch._dynamo.exc.Unsupported):
        traced(record_ops(Breaks(), {"strict": True}), x)


@pytest.mark.parametrize(("options", "why"), [
    ({"policy": "selective"}, "memory_policy"), ({"repeated_blocks": True}, "every block"),
    ({"precision": "fp8_delayed"}, "step to step"), ({"inductor": {"max_autotune": True}}, "calls Inductor"),
], ids=["policy", "repeated_blocks", "precision", "inductor"])  # fmt: skip
def test_options_of_the_trainer(options, why):
    for take in (lambda o: record_ops(Model(), o), lambda o: register(options=o), lambda o: with_passes([], o)):
        with pytest.raises(BadOptionError, match=why):
            take(options)


def test_compiled_already():
    model = record_ops(Model())
    with pytest.raises(AlreadyCompiledError):
        record_ops(model)


@pytest.mark.parametrize("policy", [CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE])
def test_what_is_saved(rand, policy):
    """As GEMMs and attention are, where GraphTrainer's policy leaves it open."""
    gm, _, _ = traced(record_ops(Model()), rand(2, 12, 16))
    forward = [n for n in gm.graph.nodes if n.op == "call_function" and not n.meta.get("autograd_backward")]
    for node in forward:
        node.meta["recompute"] = policy
    save_pass(gm)
    saved = {n for n in forward if n.meta["recompute"] is CheckpointPolicy.MUST_SAVE}
    cores = {n for n in forward if n.target in semantic_ops()}
    results = {user for n in cores for user in n.users}
    assert len(cores) == 3
    assert saved == (cores | results if policy is CheckpointPolicy.PREFER_RECOMPUTE else set())


# By torchtitan 0.3's names.
DEFAULT = ("eliminate_dead_code_pass", "tag_with_memory_policy_pass", "selective_activation_remat_pass",
           "regional_inductor_pass", "cudagraph_pass")  # fmt: skip


def passes_called(*names: str) -> list[types.FunctionType]:
    made = [lambda gm, example_inputs: gm for _ in names]
    for each, name in zip(made, names, strict=True):
        each.__name__ = name
    return made


def names_of(passes) -> list[str]:
    return [getattr(p, "func", p).__name__ for p in passes]


@pytest.mark.parametrize(("given", "want"), [
    (DEFAULT, [*DEFAULT[:2], "save_pass", DEFAULT[2], "lowering_pass", *DEFAULT[3:]]),
    (DEFAULT[4:], ["lowering_pass", "cudagraph_pass"]),
    (DEFAULT[:1], [*DEFAULT[:1], "lowering_pass"]),
], ids=["default", "precompiled", "no code"])  # fmt: skip
def test_order_of_passes(given, want):
    assert names_of(with_passes(passes_called(*given))) == want


def registries(monkeypatch, default):
    """GraphTrainer's registries, where torchtitan is not installed. default: makes its list of passes."""
    home = "torchtitan.experiments.graph_trainer"
    registry = types.SimpleNamespace(PASS_PIPELINE_REGISTRY={}, POST_INIT_HOOKS={})
    monkeypatch.setitem(sys.modules, f"{home}.registry", registry)
    monkeypatch.setitem(sys.modules, f"{home}.passes", types.SimpleNamespace(construct_default_graph_passes=default))
    for package in ("torchtitan", "torchtitan.experiments", home):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    return registry


def test_register(rand, monkeypatch):
    """By the registries, as GraphTrainer reads them."""
    asked = []

    def default(traced_result, config, *, parallel_dims=None):
        asked.append((traced_result, config, parallel_dims))
        return passes_called(*DEFAULT)

    registry = registries(monkeypatch, default)
    register("ours", {"strict": True})
    trainer = types.SimpleNamespace(model_parts=[Model()])
    registry.POST_INIT_HOOKS["ours"](trainer)
    x = rand(2, 12, 16)
    want = step(Model())(x)
    gm, fakes, given = traced(trainer.model_parts[0], x)
    assert ops(gm)["attention"] == 1
    for graph_pass in registry.PASS_PIPELINE_REGISTRY["ours"]("trace", "config", parallel_dims="dims"):
        gm = graph_pass(gm, fakes)
    assert not ops(gm) and asked == [("trace", "config", "dims")]
    torch.testing.assert_close(ran(gm, given), want, rtol=1e-5, atol=1e-6)


@pytest.mark.end_to_end
def test_torchtitan_itself():
    """Its GraphTrainer steps on a tiny DeepSeek-V3: the sites of torch.compile, losses of eager."""
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    example = Path(__file__).parents[2] / "examples" / "inside_trainers.py"
    run = subprocess.run(
        [sys.executable, str(example), "graph_trainer"], capture_output=True, text=True, timeout=600, check=True
    )
    eager, compiled = (
        [float(x) for x in re.search(rf"losses, {kind}: +(.+)", run.stdout)[1].split(", ")] for kind in ("eager", "compiled")
    )
    assert compiled == pytest.approx(eager, abs=2e-5) and len(eager) == 3
    assert "1 of 1 frame captured, 9 sites fused" in run.stdout
