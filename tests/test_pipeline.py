"""A plain model through `torch.compile(model, backend="megacpp")` with Inductor on CPU, against eager.

The models are tiny because each graph costs seconds of C++ compilation, and alike so that Inductor's cache serves
several tests.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx as module
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import megacpp_compile
from megacpp_compile import analysis, pipeline, record
from megacpp_compile.backend import megacpp
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.errors import NotCapturedError, TorchInternalsError
from megacpp_compile.frontend.capture import fake_inputs
from tests.corpus import jitter_gains
from tests.corpus.spellings import PlainMLA

VOCABULARY, DIM = 19, 24
PER_LAYER = {"down_norm_up": 2, "mla_rope_q": 1, "mla_rope_kv": 1}


def attention(**options) -> PlainMLA:
    return PlainMLA(DIM, heads=2, q_lora=14, kv_lora=10, nope=6, rope=4, v=5, table_source="buffer", **options)


class Block(nn.Module):
    def __init__(self, p: float = 0.0):
        super().__init__()
        torch.manual_seed(7)
        self.norm, self.attention, self.dropout = nn.RMSNorm(DIM, eps=1e-6), attention(), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.attention(self.norm(x)))


class LM(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, layers: int = 2, tied: bool = False, p: float = 0.0):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block(p) for _ in range(layers))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        for i, layer in enumerate(self.layers):  # no two layers alike: a graph that serves both must not mix them up
            nn.init.normal_(layer.attention.kv_a.weight, std=(1 + i) * DIM**-0.5)
            jitter_gains(layer, seed=i)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Projections(nn.Module):
    """The smallest model that something fires in, for what is about frames rather than about the ops in them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.down, self.up = nn.Linear(DIM, 10, bias=False), nn.Linear(10, 12, bias=False)
        self.norm = nn.RMSNorm(10)

    def forward(self, x):
        return self.up(self.norm(self.down(x))).tanh()


def tokens(seq: int = 6, batch: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (batch, seq), generator=torch.Generator().manual_seed(seq))


def hidden(seq: int = 6, **kwargs) -> Tensor:
    return torch.randn(2, seq, DIM, generator=torch.Generator().manual_seed(seq), **kwargs)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def train(call, model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Outputs of `call` and the gradients of their mean squares in model and arguments, by name."""
    leaves = {f"argument {i}": a for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad}
    leaves |= {n: p for n, p in model.named_parameters() if p.requires_grad}
    for leaf in leaves.values():
        leaf.grad = None
    out = call(*args, **kwargs)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, Tensor)]
    sum(o.float().square().mean() for o in outs if o.requires_grad).backward()
    results = {f"output {i}": o.detach().clone() for i, o in enumerate(outs)}
    return results | {f"gradient of {n}": t.grad.clone() for n, t in leaves.items() if t.grad is not None}


def error_of(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over norm."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12))


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        assert (got[name].shape, got[name].dtype) == (expected.shape, expected.dtype), name
        assert error_of(got[name], expected) <= tolerance, name


def assert_no_less_exact(got: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Against float64, no less exact than eager: 1.25 times its error over everything together. A single tensor of a
    few entries may be luckier in either, so each by itself has more room."""
    assert got.keys() == eager.keys() == exact.keys()
    ours, theirs = ({n: error_of(t[n], exact[n]) for n in exact} for t in (got, eager))
    whole, allowed = (sum(e * e for e in errors.values()) ** 0.5 / len(errors) ** 0.5 for errors in (ours, theirs))
    assert whole <= 1.25 * allowed + 1e-3
    for name in exact:
        assert got[name].dtype == eager[name].dtype, name
        assert ours[name] <= 2 * theirs[name] + 4e-3, f"{name}: {ours[name]:.4f} off, eager {theirs[name]:.4f}"


def check(model: nn.Module, *args: Any, options: dict[str, Any] | None = None, tolerance: float = 1e-5, **kwargs: Any):
    """One training step compiled as one graph, and one in eager, from the same random state: both must agree.

    Returns the report. Keyword arguments go to the model.
    """
    eager = copy.deepcopy(model)
    torch.manual_seed(1)
    want = train(eager, eager, *args, **kwargs)
    with record() as report:
        compiled = torch.compile(model, backend="megacpp", options=options, fullgraph=True)
        torch.manual_seed(1)
        assert_same(train(compiled, model, *args, **kwargs), want, tolerance)
    return report


def fired(layers: int) -> dict[str, int]:
    return {name: count * layers for name, count in PER_LAYER.items()}


ONE = {"down_norm_up": 1}  # what fires in `Projections`


def counts(report) -> dict[str, int]:
    """Without passes that did not fire."""
    return {name: count for name, count in report.counts.items() if count}


class Spy(CustomGraphPass):
    """Looks at the graphs Inductor is given: `options={"inductor": {"post_grad_custom_pre_pass": spy}}`."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs.append([str(n.target) for n in graph.nodes if n.op == "call_function"])

    def uuid(self) -> None:
        return None  # never from a cache: it has to see the graph


# --- training and inference


def test_training():
    """Three steps of SGD: the second and third read weights that changed after compilation, and the third is longer than
    the first: kernels take sizes as symbols."""
    model = LM(layers=1)
    eager = copy.deepcopy(model)
    with record() as report:
        compiled = torch.compile(model, backend="megacpp", fullgraph=True)
        for step, seq in enumerate((6, 6, 11)):
            batch = tokens(seq) + step
            batch %= VOCABULARY
            torch._dynamo.mark_dynamic(batch, 1)
            assert_same(train(compiled, model, batch), train(eager, eager, batch))
            with torch.no_grad():
                for m in (model, eager):
                    for p in m.parameters():
                        p.sub_(p.grad, alpha=0.01)
    assert counts(report) == fired(1)
    assert [f.captured and f.grad for f in report.frames] == [True]


def test_training_in_vectorised_code(vectorised):
    """As users get it, of one site: at two lengths, which kernels take as a symbol."""
    model = Projections()
    eager = copy.deepcopy(model)
    with record() as report:
        compiled = torch.compile(model, backend="megacpp", fullgraph=True)
        for length in (6, 11):
            x = hidden(length, requires_grad=True)
            torch._dynamo.mark_dynamic(x, 1)
            assert_same(train(compiled, model, x), train(eager, eager, x))
    assert counts(report) == ONE and len(report.frames) == 1


@pytest.mark.parametrize(("mode", "kind"), [(torch.no_grad, Block), (torch.inference_mode, Projections)])
def test_inference(mode, kind, no_kernels):
    """The two modes differ in what tensors are, not in what any one op makes of them."""
    model = kind()
    with mode(), record() as report:
        got = torch.compile(model, backend="megacpp", fullgraph=True)(hidden())
        torch.testing.assert_close(got, model(hidden()), rtol=1e-5, atol=1e-5)
    assert counts(report) == (fired(1) if kind is Block else ONE)
    assert [f.grad for f in report.frames] == [False]
    assert all(s.saved_before is s.saved_after is None for s in report.sites)


def in_bfloat16(call):
    """Under autocast; a half-precision argument would need none."""

    def run(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return call(*args)

    return run


@pytest.mark.parametrize("kind", [Block, Projections])
@pytest.mark.parametrize("how", ["autocast", "bfloat16_weights"])
def test_half_precision(request, how, kind):
    """It costs no more accuracy compiled than in eager, as measured against float64. Kernels of Inductor's run in the
    small model; those of RoPE in half precision are `tests.frontend.test_autocast`'s."""
    if kind is Block:
        request.getfixturevalue("no_kernels")
    model, wrap, x = kind(), in_bfloat16, hidden()
    if how == "bfloat16_weights":
        model, wrap, x = model.bfloat16(), lambda call: call, x.bfloat16()
    exact_model, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    exact = train(exact_model, exact_model, x.double())
    want = train(wrap(eager), eager, x)
    with record() as report:
        got = train(wrap(torch.compile(model, backend="megacpp", fullgraph=True)), model, x)
    assert counts(report) == (fired(1) if kind is Block else ONE)
    assert_no_less_exact(got, want, exact)


# --- shapes


def graphs_for(backend: str, kind: type[nn.Module], seqs: tuple[int, ...], dynamic: bool | None) -> int:
    torch._dynamo.reset()
    counters.clear()
    model = kind()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)
    for seq in seqs:
        assert_same(train(compiled, model, hidden(seq)), train(eager, eager, hidden(seq)))
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("dynamic", "kind"), [(None, Projections), (True, Block)], ids=["automatic", "dynamic"])
def test_changing_shapes_recompile_no_more_than_in_dynamo_alone(no_kernels, dynamic, kind):
    """Whose count is the least that any backend has, Inductor included. What is compiled once has the larger model."""
    with record() as report:
        ours = graphs_for("megacpp", kind, (6, 9, 7), dynamic)
    assert [f.captured for f in report.frames] == [True] * ours
    assert counts(report) == (fired(ours) if kind is Block else {"down_norm_up": ours})
    assert ours <= graphs_for("eager", kind, (6, 9, 7), dynamic)


# --- weights


def test_tied_weights(no_kernels):
    assert counts(check(LM(layers=1, tied=True), tokens())) == fired(1)


def test_frozen_weights(no_kernels):
    model = LM(layers=1)
    block = model.layers[0].attention
    for p in (model.embed.weight, block.q_a.weight, block.q_norm.weight, block.kv_b.weight, model.head.weight):
        p.requires_grad_(False)
    assert counts(check(model, tokens())) == fired(1)
    assert block.q_a.weight.grad is None and block.q_b.weight.grad is not None


def test_gradient_of_the_input_only(no_kernels):
    """With every weight frozen no weight gradient is computed: of the op's five products in the backward (latent,
    two weights, two inputs) three are left."""

    products = []
    for frozen in (False, True):
        torch._dynamo.reset()
        model, spy = Projections().requires_grad_(not frozen), Spy()
        options = {"inductor": {"post_grad_custom_post_pass": spy}}
        assert counts(check(model, hidden(requires_grad=True), options=options)) == {"down_norm_up": 1}
        forward, backward = ([t for t in g if "aten.mm" in t or "aten.addmm" in t] for g in spy.graphs)
        products.append((len(forward), len(backward)))
    assert products == [(2, 5), (2, 3)]


def test_autograd_grad_of_the_input_alone(no_kernels):
    """The graph is compiled for all gradients, and asked for one."""
    model = Projections()
    x = hidden(requires_grad=True)
    (want,) = torch.autograd.grad(model(x).square().sum(), x)
    with record() as report:
        (got,) = torch.autograd.grad(torch.compile(model, backend="megacpp")(x).square().sum(), x)
    assert counts(report) == ONE
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# --- several graphs


def test_graph_break_between_blocks(eager_backend):
    """Frames of the same code: each layer must run with its own weights."""

    class Broken(LM):
        def forward(self, ids):
            x = self.embed(ids)
            x = self.layers[0](x)
            torch._dynamo.graph_break()
            x = self.layers[1](x)
            return self.head(x)

    model = Broken()
    eager = copy.deepcopy(model)
    with record() as report:
        got = train(torch.compile(model, backend="megacpp"), model, tokens())
    assert_same(got, train(eager, eager, tokens()))
    assert counts(report) == fired(2)
    assert {s.frame for s in report.sites} == {0, 1}


def test_one_graph_serves_layers_with_different_weights(no_kernels):
    model = LM()
    eager = copy.deepcopy(model)
    for layer in model.layers:
        layer.compile(backend="megacpp", fullgraph=True)
    with record() as report:
        assert_same(train(model, model, tokens()), train(eager, eager, tokens()))
    assert counters["stats"]["unique_graphs"] == 1
    assert counts(report) == fired(1)


def test_compile_in_place_and_deepcopy(eager_backend):
    """`module.compile()` marks the module; a copy of it is compiled again and goes its own way."""
    model = LM(layers=1)
    eager = copy.deepcopy(model)
    model.compile(backend="megacpp", fullgraph=True)
    with record() as report:
        assert_same(train(model, model, tokens()), train(eager, eager, tokens()))
        other = copy.deepcopy(model)
        with torch.no_grad():
            for p, q in zip(other.parameters(), eager.parameters(), strict=True):
                p.mul_(0.9)
                q.mul_(0.9)
        other.compile(backend="megacpp", fullgraph=True)
        assert_same(train(other, other, tokens()), train(eager, eager, tokens()))
    assert set(counts(report)) == set(PER_LAYER)
    assert all(f.captured for f in report.frames)


# --- checkpointing


class Checkpointed(LM):
    how: dict[str, Any] = {}

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, **self.how)
        return self.head(x)


def test_checkpointed_blocks(no_kernels):
    """The passes fire inside the regions, and the backward computes their ops again."""
    spies = {cls: Spy() for cls in (LM, Checkpointed)}
    for cls, spy in spies.items():
        torch._dynamo.reset()
        report = check(cls(layers=1), tokens(), options={"inductor": {"post_grad_custom_pre_pass": spy}})
        assert counts(report) == fired(1)
        assert [f.captured for f in report.frames] == [True]

    def forward_ops(graph):
        return sorted(t.split(".")[1] for t in graph if t.startswith("megacpp.") and "backward" not in t)

    (plain, plain_backward), (kept, recomputed) = (spy.graphs for spy in spies.values())
    assert forward_ops(plain) == forward_ops(kept) == ["down_norm_up"] * 2 + ["mla_rope_kv", "mla_rope_q"]
    # rope_q is its own backward, so it stands in every backward graph
    assert forward_ops(plain_backward) == ["mla_rope_q"]
    assert set(forward_ops(recomputed)) == {"down_norm_up", "mla_rope_kv", "mla_rope_q"}


class PassedOn(TorchDispatchMode):
    """In the place of a selective checkpoint's contexts, without a policy that could be asked."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


# --- what surrounds an idiom


def test_mutated_buffers(no_kernels):
    """A counter and a running mean are written to on every call, as often as in eager."""

    class Counting(Projections):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(DIM))

        def forward(self, x):
            self.steps += 1
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
            return super().forward(x) + self.mean[:12] * self.steps

    model = Counting()
    eager = copy.deepcopy(model)
    with record() as report:
        compiled = torch.compile(model, backend="megacpp", fullgraph=True)
        for seed in (1, 2, 3):
            x = torch.randn(2, 6, DIM, generator=torch.Generator().manual_seed(seed))
            assert_same(train(compiled, model, x), train(eager, eager, x))
    assert counts(report) == ONE
    assert model.steps.item() == 3 and len(report.frames) == 1
    torch.testing.assert_close(model.mean, eager.mean)


def test_mutated_input(no_kernels):
    """A cache that the caller passes in, is written to, and comes back."""

    class Cached(Projections):
        def forward(self, x, cache):
            out = super().forward(x)
            cache[:, 1:3] = out.detach()[:, 1:3]
            return out

    model, caches = Cached(), [torch.zeros(2, 6, 12) for _ in range(2)]
    eager = copy.deepcopy(model)
    want = train(eager, eager, hidden(), caches[0])
    with record() as report:
        compiled = torch.compile(model, backend="megacpp", fullgraph=True)
        assert_same(train(compiled, model, hidden(), caches[1]), want)
    assert counts(report) == ONE
    torch.testing.assert_close(caches[1], caches[0])
    assert caches[1].any()


def test_outputs_that_alias_inputs(no_kernels):
    class Aliasing(Projections):
        def forward(self, x):
            return super().forward(x), x, x.view(-1, DIM), x.detach()

    x = hidden(requires_grad=True)
    model = Aliasing()
    assert counts(check(model, x)) == ONE
    _, same, view, detached = torch.compile(model, backend="megacpp")(x)
    assert {t.data_ptr() for t in (same, view, detached)} == {x.data_ptr()}
    assert view.requires_grad and not detached.requires_grad


def test_keyword_and_plain_arguments(no_kernels):
    class Keyed(Projections):
        def forward(self, x, *, scale=None, shift=0.0, twice=False):
            out = super().forward(x if scale is None else x * scale["by"]) + shift
            return {"out": out}["out"] * (2 if twice else 1), None

    report = check(Keyed(), hidden(), scale={"by": torch.full((DIM,), 1.5)}, shift=0.25, twice=True)
    assert counts(report) == ONE


def test_random_ops(no_kernels):
    """p = 0 changes nothing. With p > 0 and Inductor told to draw as eager does, the very same lanes are dropped, in
    forward and backward."""
    for p, options in ((0.0, None), (0.5, {"inductor": {"fallback_random": True}})):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Dropout(p), Projections(), nn.Dropout(p))
        assert counts(check(model, hidden(requires_grad=True), options=options)) == ONE


def test_random_ops_of_inductor():
    class Dropped(Projections):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.3)

    model = Dropped()
    with record() as report:
        compiled = torch.compile(model, backend="megacpp")
        x = hidden(6).repeat(32, 1, 1).requires_grad_()
        out, again = compiled(x), compiled(x)
    assert counts(report) == {"down_norm_up": 1}
    zeros = (out == 0).float().mean().item()
    assert abs(zeros - 0.3) < 0.04, "4608 draws: five standard deviations are 0.034"
    assert not torch.equal(out, again)
    kept = out != 0
    want = Projections.forward(model, x) / 0.7
    torch.testing.assert_close(out[kept], want[kept], rtol=1e-5, atol=1e-5)


# --- frames left to Inductor


def test_tensor_subclass_falls_back(no_kernels):
    from torch.testing._internal.two_tensor import TwoTensor

    model = Projections()
    x = TwoTensor(hidden(), 2 * hidden())
    with record() as report, torch.no_grad():
        got = torch.compile(model, backend="megacpp")(x)
        want = model(x)
    assert isinstance(got, TwoTensor)
    torch.testing.assert_close((got.a, got.b), (want.a, want.b), rtol=1e-5, atol=1e-5)
    (frame,) = report.frames
    assert not frame.captured and "TwoTensor" in frame.reason
    assert report.sites == []


class Unasked(Checkpointed):
    how = {"context_fn": lambda: (PassedOn(), PassedOn())}


def test_a_frame_not_captured_is_an_error_under_strict(no_kernels):
    with pytest.raises(NotCapturedError) as caught:
        torch.compile(Unasked(layers=1), backend="megacpp", options={"strict": True})(tokens())
    error = caught.value
    assert "forward (test_pipeline.py:" in error.frame and "context_fn" in error.reason
    assert error.frame in str(error) and error.reason in str(error) and "without 'strict'" in str(error)


def test_frames_not_captured_warn_once_a_reason(eager_backend, caplog):
    warn_once.cache_clear()
    with record() as report:
        for _ in range(2):
            torch._dynamo.reset()
            torch.compile(Unasked(layers=1), backend="megacpp")(tokens())
    assert [f.captured for f in report.frames] == [False, False]
    (said,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name == "megacpp_compile")
    assert "context_fn" in said


def test_a_torch_without_what_capture_needs_is_an_error_under_strict(eager_backend, monkeypatch):
    missing = TorchInternalsError("torch.gone", torch.__version__, "a test", "the frame is compiled by Inductor alone")

    def lacks(*_):
        raise missing

    monkeypatch.setattr(analysis, "capture", lacks)
    with pytest.raises(NotCapturedError, match=r"torch\.gone"):
        torch.compile(Projections(), backend="megacpp", options={"strict": True})(hidden())


def test_what_holds_no_idiom_is_no_error_under_strict(no_kernels):
    with record() as report:
        torch.compile(lambda x: x.sin(), backend="megacpp", options={"strict": True})(hidden())
    assert report.frames[0].reason == "too small to hold an idiom"


def on_fake_inputs(options):
    """A backend that is given fake inputs, as DDP's optimizer gives them."""

    def backend(gm, inputs):
        return megacpp(gm, fake_inputs(inputs)[1], options=options)

    return backend


def test_verify_says_where_it_cannot_look(eager_backend, caplog):
    warn_once.cache_clear()
    with record() as report:
        for seq in (6, 7):
            torch._dynamo.reset()
            torch.compile(Projections(), backend=on_fake_inputs({"verify": "each"}))(hidden(seq))
        torch.compile(Projections(), backend=on_fake_inputs({}))(hidden())
        torch.compile(torch.sin, backend=on_fake_inputs({"verify": "each"}))(hidden())
    assert [(m.frame, m.tag) for m in report.misses if m.pass_name == "verify"] == [(0, "not-verified"), (1, "not-verified")]
    assert sum("verify" in r.getMessage() for r in caplog.records if r.levelname == "WARNING") == 1


def test_the_target_is_resolved_once_a_frame(no_kernels, monkeypatch):
    asked = []
    whole = pipeline.resolve_target
    monkeypatch.setattr(pipeline, "resolve_target", lambda *a: asked.append(a) or whole(*a))
    torch.compile(nn.Tanh(), backend="megacpp")(hidden())
    assert len(asked) == 1


def test_model_without_idiom_reaches_inductor_untouched(monkeypatch):
    handed = []

    def compile_fx(gm, inputs, **kwargs):
        handed.append((gm, kwargs))
        return gm.forward

    monkeypatch.setattr(module, "compile_fx", compile_fx)
    given = []

    def backend(gm, inputs):
        given.append((gm, gm.print_readable(print_output=False)))
        return megacpp(gm, inputs)

    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8), nn.Tanh())
    with record() as report:
        torch.compile(model, backend=backend)(torch.randn(3, 8))
    ((gm, code),), ((received, kwargs),) = given, handed
    assert received is gm
    assert gm.print_readable(print_output=False) == code
    assert kwargs == {"config_patches": None}
    assert report.frames[0].captured and counts(report) == {}


def test_reports_nest(eager_backend):
    with record() as outer:
        with record() as inner:
            torch.compile(Projections(), backend="megacpp", fullgraph=True)(hidden())
        torch._dynamo.reset()
        model = Projections()
        with torch.no_grad():
            torch.compile(model, backend="megacpp")(hidden())
    assert counts(inner) == ONE
    assert counts(outer) == {"down_norm_up": 2}
    assert [s.frame for s in outer.sites] == [0, 1]
    assert [f.grad for f in outer.frames] == [True, False]


def test_loss_inside_the_graph(no_kernels):
    """A whole training objective in one frame, with a target that is no float."""

    class Objective(Projections):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(12, 12, bias=False)

        def forward(self, x, ids):
            return F.cross_entropy(self.head(super().forward(x)).flatten(0, 1), ids.flatten())

    assert counts(check(Objective(), hidden(), tokens() % 12)) == ONE | {"linear_cross_entropy": 1}


def test_the_backend_is_registered():
    assert "megacpp" in torch._dynamo.list_backends(exclude_tags=None)


def test_public_name_of_the_backend():
    """Callable, also after the module of the same name was imported, as every compilation does."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    assert megacpp_compile.backend.megacpp is megacpp
    with megacpp_compile.record() as report:
        compiled = torch.compile(model, backend=megacpp_compile.backend)
        torch.testing.assert_close(compiled(x), model(x))
    assert len(report.frames) == 1
