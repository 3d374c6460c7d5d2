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
from benchmarks import models
from megacpp_compile import analysis, pipeline, record
from megacpp_compile.backend import megacpp
from megacpp_compile.backends import inductor
from megacpp_compile.errors import NotCapturedError, TorchInternalsError
from megacpp_compile.frontend.capture import fake_inputs
from tests.corpus import jitter_gains
from tests.corpus.spellings import PlainMLA
from tests.frames import train
from tests.lowerings import relative_error

VOCABULARY, DIM = 19, 24
PER_LAYER = {"down_norm_up": 2, "mla_rope_q": 1, "mla_rope_kv": 1}
ONE = {"down_norm_up": 1}  # what fires in `Projections`


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        sizes = {"heads": 2, "q_lora": 14, "kv_lora": 10, "nope": 6, "rope": 4, "v": 5}
        self.norm, self.attention = nn.RMSNorm(DIM, eps=1e-6), PlainMLA(DIM, **sizes, table_source="buffer")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class LM(nn.Module):
    def __init__(self, layers: int = 1):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        for i, layer in enumerate(self.layers):  # no two layers alike: a graph that serves both must not mix them up
            nn.init.normal_(layer.attention.kv_a.weight, std=(1 + i) * DIM**-0.5)
            jitter_gains(layer, seed=i)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x)

    def call(self, layer, x):
        return layer(x)


class Projections(nn.Sequential):
    """The smallest model that something fires in, for what is about frames rather than about the ops in them."""

    def __init__(self):
        torch.manual_seed(7)
        super().__init__(nn.Linear(DIM, 10, bias=False), nn.RMSNorm(10), nn.Linear(10, 12, bias=False), nn.Tanh())


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


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        assert (got[name].shape, got[name].dtype) == (expected.shape, expected.dtype), name
        assert relative_error(got[name], expected) <= 1e-5, name


def assert_no_less_exact(got: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Against float64, no less exact than eager: 1.25 times its error over everything together. A single tensor of a
    few entries may be luckier in either, so each by itself has more room."""
    assert got.keys() == eager.keys() == exact.keys()
    ours, theirs = ({n: relative_error(t[n], exact[n]) for n in exact} for t in (got, eager))
    whole, allowed = (sum(e * e for e in errors.values()) ** 0.5 / len(errors) ** 0.5 for errors in (ours, theirs))
    assert whole <= 1.25 * allowed + 1e-3
    for name in exact:
        assert got[name].dtype == eager[name].dtype, name
        assert ours[name] <= 2 * theirs[name] + 4e-3, f"{name}: {ours[name]:.4f} off, eager {theirs[name]:.4f}"


def check(model: nn.Module, *steps: tuple[Any, ...], call: Any = None, after=lambda model: None, **how: Any):
    """A training step for each of these arguments, compiled and in eager, from the same random state: both must agree.

    call: what is called for the model; else it is compiled as one graph, but for what `how` says. after: what both
    models go through after each step. Returns the report.
    """
    eager = copy.deepcopy(model)
    with record() as report:
        call = call or torch.compile(model, **{"backend": "megacpp", "fullgraph": True} | how)
        for args in steps:
            want = train(eager, eager, args)
            assert_same(train(call, model, args), want)
            for m in (eager, model):
                after(m)
    return report


def compiled(model: Any, *args: Any, **how: Any):
    """(report, what the model gives, compiled so)."""
    with record() as report:
        out = torch.compile(model, **{"backend": "megacpp"} | how)(*args)
    return report, out


def fired(layers: int) -> dict[str, int]:
    return {name: count * layers for name, count in PER_LAYER.items()}


def counts(report) -> dict[str, int]:
    return {name: count for name, count in report.counts.items() if count}


class Spy(CustomGraphPass):
    """Looks at the graphs Inductor is given: `options={"inductor": {"post_grad_custom_pre_pass": spy}}`."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs.append([str(n.target) for n in graph.nodes if n.op == "call_function"])

    def uuid(self) -> None:
        return None  # never from a cache: it has to see the graph


def stepped(model):
    torch.optim.SGD(model.parameters(), lr=0.01).step()


def of_any_length(x):
    torch._dynamo.mark_dynamic(x, 1)
    return x


@pytest.mark.end_to_end
@pytest.mark.parametrize("how", ["graphs", pytest.param("kernels", marks=pytest.mark.exhaustive)])
def test_training(request, how):
    """Three steps of SGD: the second and third read weights that changed after compilation, and the third is longer than
    the first: sizes are symbols. Kernels of two lengths of a smaller model are the next test's."""
    if how == "graphs":
        request.getfixturevalue("no_kernels")
    batches = [(of_any_length(hidden(seq) + step),) for step, seq in enumerate((6, 6, 11))]
    report = check(Block(), *batches, after=stepped)
    assert counts(report) == fired(1)
    assert [f.captured and f.grad for f in report.frames] == [True]


@pytest.mark.end_to_end
def test_training_in_vectorised_code(vectorised):
    """As users get it, of one site: at two lengths, which kernels take as a symbol."""
    report = check(Projections(), *((of_any_length(hidden(length, requires_grad=True)),) for length in (6, 11)))
    assert counts(report) == ONE and len(report.frames) == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mode", "kind"), [(torch.no_grad, Block), (torch.inference_mode, Projections)])
def test_inference(mode, kind, no_kernels):
    """The two modes differ in what tensors are, not in what any one op makes of them."""
    model = kind()
    with mode():
        report, got = compiled(model, hidden(), fullgraph=True)
        torch.testing.assert_close(got, model(hidden()), rtol=1e-5, atol=1e-5)
    assert counts(report) == (fired(1) if kind is Block else ONE)
    assert [f.grad for f in report.frames] == [False]
    assert all(s.saved_before is s.saved_after is None for s in report.sites)


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [Block, Projections])
@pytest.mark.parametrize("how", ["autocast", "bfloat16_weights"])
def test_half_precision(request, how, kind):
    """It costs no more accuracy compiled than in eager, as measured against float64. Kernels of Inductor's run in the
    small model; those of RoPE in half precision are `tests.frontend.test_autocast`'s."""
    if kind is Block:
        request.getfixturevalue("no_kernels")
    model, x, autocast = kind(), hidden(), how == "autocast"
    if not autocast:
        model, x = model.bfloat16(), x.bfloat16()
    exact_model, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    exact = train(exact_model, exact_model, (x.double(),))

    def around():
        return torch.autocast("cpu", torch.bfloat16, enabled=autocast)

    want = train(eager, eager, (x,), around)
    with record() as report:
        got = train(torch.compile(model, backend="megacpp", fullgraph=True), model, (x,), around)
    assert counts(report) == (fired(1) if kind is Block else ONE)
    assert_no_less_exact(got, want, exact)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dynamic", "kind"), [(None, Projections), (True, Block)], ids=["automatic", "dynamic"])
def test_changing_shapes_recompile_no_more_than_in_dynamo_alone(no_kernels, dynamic, kind):
    """Whose count is the least that any backend has, Inductor included. What is compiled once has the larger model."""
    graphs, reports = [], []
    for backend in ("megacpp", "eager"):
        torch._dynamo.reset()
        counters.clear()
        lengths = ((hidden(seq),) for seq in (6, 9, 7))
        reports.append(check(kind(), *lengths, backend=backend, dynamic=dynamic))
        graphs.append(counters["stats"]["unique_graphs"])
    report, (ours, least) = reports[0], graphs
    assert [f.captured for f in report.frames] == [True] * ours
    assert counts(report) == (fired(ours) if kind is Block else {"down_norm_up": ours})
    assert ours <= least


@pytest.mark.end_to_end
def test_tied_weights(no_kernels):
    model = LM()
    model.head.weight = model.embed.weight
    assert counts(check(model, (tokens(),))) == fired(1)


@pytest.mark.end_to_end
def test_frozen_weights(no_kernels):
    model = LM()
    block = model.layers[0].attention
    for p in (model.embed.weight, block.q_a.weight, block.q_norm.weight, block.kv_b.weight, model.head.weight):
        p.requires_grad_(False)
    assert counts(check(model, (tokens(),))) == fired(1)
    assert block.q_a.weight.grad is None and block.q_b.weight.grad is not None


def test_gradient_of_the_input_only(no_kernels):
    """With every weight frozen no weight gradient is computed: of the op's five products in the backward (latent,
    two weights, two inputs) three are left."""

    products = []
    for frozen in (False, True):
        torch._dynamo.reset()
        model, spy = Projections().requires_grad_(not frozen), Spy()
        options = {"inductor": {"post_grad_custom_post_pass": spy}}
        assert counts(check(model, (hidden(requires_grad=True),), options=options)) == ONE
        forward, backward = ([t for t in g if "aten.mm" in t or "aten.addmm" in t] for g in spy.graphs)
        products.append((len(forward), len(backward)))
    assert products == [(2, 5), (2, 3)]


def test_autograd_grad_of_the_input_alone(no_kernels):
    model, x = Projections(), hidden(requires_grad=True)
    report, out = compiled(model, x)
    got, want = (torch.autograd.grad(y.square().sum(), x) for y in (out, model(x)))
    assert counts(report) == ONE
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.end_to_end
def test_graph_break_between_blocks(eager_backend):
    """Frames of the same code: each layer must run with its own weights."""

    class Broken(LM):
        def forward(self, ids):
            x = self.layers[0](self.embed(ids))
            torch._dynamo.graph_break()
            return self.head(self.layers[1](x))

    report = check(Broken(layers=2), (tokens(),), fullgraph=False)
    assert counts(report) == fired(2)
    assert {s.frame for s in report.sites} == {0, 1}


@pytest.mark.end_to_end
def test_one_graph_serves_layers_with_different_weights(no_kernels):
    model = LM(layers=2)
    for layer in model.layers:
        layer.compile(backend="megacpp", fullgraph=True)
    report = check(model, (tokens(),), call=model)
    assert counters["stats"]["unique_graphs"] == 1
    assert counts(report) == fired(1)


def test_compile_in_place_and_deepcopy(eager_backend):
    """`module.compile()` marks the module; a copy of it is compiled again and goes its own way."""
    model = LM()
    with record() as report:
        for _ in range(2):
            model.compile(backend="megacpp", fullgraph=True)
            check(model, (tokens(),), call=model)
            model = copy.deepcopy(model)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9)
    assert set(counts(report)) == set(PER_LAYER)
    assert all(f.captured for f in report.frames)


class Checkpointed(LM):
    how: dict[str, Any] = {}

    def call(self, layer, x):
        return checkpoint(layer, x, use_reentrant=False, **self.how)


@pytest.mark.end_to_end
def test_checkpointed_blocks(no_kernels):
    """The passes fire inside the regions, and the backward computes their ops again."""
    spies = {cls: Spy() for cls in (LM, Checkpointed)}
    for cls, spy in spies.items():
        torch._dynamo.reset()
        report = check(cls(), (tokens(),), options={"inductor": {"post_grad_custom_pre_pass": spy}})
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


def test_mutated_buffers(no_kernels):

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
    report = check(model, *((torch.randn(2, 6, DIM),) for _ in range(3)))
    assert counts(report) == ONE
    assert model.steps.item() == 3 and model.mean.any() and len(report.frames) == 1


def test_mutated_input(no_kernels):

    class Cached(Projections):
        def forward(self, x, cache):
            out = super().forward(x)
            cache[:, 1:3] = out.detach()[:, 1:3]
            return out

    model, caches = Cached(), [torch.zeros(2, 6, 12) for _ in range(2)]
    report, out = compiled(model, hidden(), caches[0], fullgraph=True)
    assert counts(report) == ONE
    want = model(hidden(), caches[1])
    got, grads = ((y, *torch.autograd.grad(y.square().sum(), [*model.parameters()])) for y in (out, want))
    torch.testing.assert_close((caches[0], *got), (caches[1], *grads), rtol=1e-5, atol=1e-5)
    assert caches[1].any()


def test_outputs_that_alias_inputs(no_kernels):
    class Aliasing(Projections):
        def forward(self, x):
            return super().forward(x), x, x.view(-1, DIM), x.detach()

    model, x = Aliasing(), hidden(requires_grad=True)
    assert counts(check(model, (x,))) == ONE
    _, same, view, detached = torch.compile(model, backend="megacpp")(x)
    assert {t.data_ptr() for t in (same, view, detached)} == {x.data_ptr()}
    assert view.requires_grad and not detached.requires_grad


def test_keyword_and_plain_arguments(no_kernels):
    class Keyed(Projections):
        def forward(self, x, *, scale=None, shift=0.0, twice=False):
            out = super().forward(x if scale is None else x * scale["by"]) + shift
            return {"out": out}["out"] * (2 if twice else 1), None

    model, by = Keyed(), torch.full((DIM,), 1.5)
    whole = torch.compile(model, backend="megacpp", fullgraph=True)

    def call(x):
        out, nothing = whole(x, scale={"by": by}, shift=0.25, twice=True)
        assert nothing is None
        return out

    with record() as report:
        got = train(call, model, (hidden(),))
    want = train(lambda x: 2 * (Projections.forward(model, x * by) + 0.25), model, (hidden(),))
    assert_same(got, want)
    assert counts(report) == ONE


@pytest.mark.parametrize(("p", "options"), [(0.0, None), (0.5, {"inductor": {"fallback_random": True}})])
def test_random_ops(no_kernels, p, options):
    """p = 0 changes nothing. With p > 0 and Inductor told to draw as eager does, the very same lanes are dropped, in
    forward and backward."""
    model = nn.Sequential(nn.Dropout(p), Projections(), nn.Dropout(p))
    assert counts(check(model, (hidden(requires_grad=True),), options=options)) == ONE


@pytest.mark.end_to_end
def test_random_ops_of_inductor():
    class Dropped(Projections):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.3)

    model, x = Dropped(), hidden(6).repeat(32, 1, 1).requires_grad_()
    with record() as report:
        out, again = map(torch.compile(model, backend="megacpp"), (x, x))
    assert counts(report) == ONE
    zeros = (out == 0).float().mean().item()
    assert abs(zeros - 0.3) < 0.04, "4608 draws: five standard deviations are 0.034"
    assert not torch.equal(out, again)
    kept = out != 0
    want = Projections.forward(model, x) / 0.7
    torch.testing.assert_close(out[kept], want[kept], rtol=1e-5, atol=1e-5)


def test_tensor_subclass_falls_back(no_kernels):
    from torch.testing._internal.two_tensor import TwoTensor

    model, x = Projections(), TwoTensor(hidden(), 2 * hidden())
    with torch.no_grad():
        (report, got), want = compiled(model, x), model(x)
    assert isinstance(got, TwoTensor)
    torch.testing.assert_close((got.a, got.b), (want.a, want.b), rtol=1e-5, atol=1e-5)
    (frame,) = report.frames
    assert not frame.captured and "TwoTensor" in frame.reason and report.sites == []


class Unasked(Checkpointed):
    how = {"context_fn": lambda: (PassedOn(), PassedOn())}


def test_a_frame_not_captured_is_an_error_under_strict(no_kernels):
    with pytest.raises(NotCapturedError) as caught:
        compiled(Unasked(), tokens(), options={"strict": True})
    error = caught.value
    assert "forward (test_pipeline.py:" in error.frame and "context_fn" in error.reason
    assert error.frame in str(error) and error.reason in str(error) and "without 'strict'" in str(error)


def test_frames_not_captured_warn_once_a_reason(eager_backend, caplog):
    with record() as report:
        for _ in range(2):
            torch._dynamo.reset()
            compiled(Unasked(), tokens())
    assert [f.captured for f in report.frames] == [False, False]
    (said,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name == "megacpp_compile")
    assert "context_fn" in said


def test_a_torch_without_what_capture_needs_is_an_error_under_strict(eager_backend, monkeypatch):
    def lacks(*_):
        raise TorchInternalsError("torch.gone", torch.__version__, "a test", "the frame is compiled by Inductor alone")

    monkeypatch.setattr(analysis, "capture", lacks)
    with pytest.raises(NotCapturedError, match=r"torch\.gone"):
        compiled(Projections(), hidden(), options={"strict": True})


def test_what_holds_no_idiom_is_no_error_under_strict(no_kernels):
    report, _ = compiled(torch.sin, hidden(), options={"strict": True})
    assert report.frames[0].reason == "too small to hold an idiom"


def on_fake_inputs(options):
    """A backend that is given fake inputs, as DDP's optimizer gives them."""

    def backend(gm, inputs):
        return megacpp(gm, fake_inputs(inputs)[1], options=options)

    return backend


def test_verify_says_what_it_found(eager_backend):
    with record() as report:
        compiled(Projections(), hidden(), options={"verify": "each"})
        compiled(Projections(), hidden())
    found, nothing = (frame.verified for frame in report.frames)
    assert nothing is None and found["sites"] == len(report.sites) // 2 > 0
    assert 0 <= found["difference"] <= found["tolerance"] == 1e-5 and found["pass_name"] in report.counts
    assert f"{found['sites']} site, worst difference {found['difference']:.1e} of 1e-05 in " in report.summary()


def test_verify_says_where_it_cannot_look(eager_backend, caplog):
    with record() as report:
        for seq in (6, 7):
            torch._dynamo.reset()
            compiled(Projections(), hidden(seq), backend=on_fake_inputs({"verify": "each"}))
        compiled(Projections(), hidden(), backend=on_fake_inputs({}))
        compiled(torch.sin, hidden(), backend=on_fake_inputs({"verify": "each"}))
    assert [(m.frame, m.tag) for m in report.misses if m.pass_name == "verify"] == [(0, "not-verified"), (1, "not-verified")]
    assert sum("verify" in r.getMessage() for r in caplog.records if r.levelname == "WARNING") == 1


def test_the_target_is_resolved_once_a_frame(no_kernels, monkeypatch):
    asked, whole = [], pipeline.resolve_target
    monkeypatch.setattr(pipeline, "resolve_target", lambda *a: asked.append(a) or whole(*a))
    compiled(nn.Tanh(), hidden())
    assert len(asked) == 1


def test_model_without_idiom_reaches_inductor_untouched(monkeypatch):
    handed, given = [], []
    monkeypatch.setattr(module, "compile_fx", lambda gm, _, **kwargs: handed.append((gm, kwargs)) or gm.forward)

    def backend(gm, inputs):
        given.append((gm, gm.print_readable(print_output=False)))
        return megacpp(gm, inputs)

    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8), nn.Tanh())
    report, _ = compiled(model, torch.randn(3, 8), backend=backend)
    ((gm, code),), ((received, kwargs),) = given, handed
    assert received is gm and gm.print_readable(print_output=False) == code
    assert kwargs == {"config_patches": None}
    assert report.frames[0].captured and counts(report) == {}


def test_loss_inside_the_graph(no_kernels):
    """A whole training objective in one frame, with a target that is no float."""

    class Objective(Projections):
        def forward(self, x, ids):
            return F.cross_entropy(super().forward(x).flatten(0, 1), ids.flatten())

    model = Objective().append(nn.Linear(12, 12, bias=False))
    assert counts(check(model, (hidden(), tokens() % 12))) == ONE | {"linear_cross_entropy": 1}


def test_names_of_the_backend(eager_backend):
    """Registered; and callable, also after the module of the same name was imported, as every compilation does."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    assert "megacpp" in torch._dynamo.list_backends(exclude_tags=None)
    assert megacpp_compile.backend.megacpp is megacpp
    report, got = compiled(model, x, backend=megacpp_compile.backend)
    torch.testing.assert_close(got, model(x))
    assert len(report.frames) == 1


class Scaled(Projections):
    """With three floats that `dynamic=True` makes inputs: an op has one of them, a product another, and the third is only
    compared."""

    def __init__(self):
        super().__init__()
        self.eps, self.factor, self.most = 1e-6, 0.5, 2.5

    def forward(self, x: Tensor) -> Tensor:
        down, norm, up, _ = self
        latent = down(x if self.most > 1.5 else -x)
        latent = latent * torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + self.eps) * norm.weight
        return up(latent) * self.factor


def test_floats_that_are_numbers_are_known_before_the_frame_is_differentiated(no_kernels, monkeypatch):
    handed, real = [], pipeline._hand_to_backend
    monkeypatch.setattr(pipeline, "_hand_to_backend", lambda *args: handed.append(args) or real(*args))
    torch._dynamo.reset()
    model, x = Scaled(), torch.randn(3, DIM, requires_grad=True)
    compiled = torch.compile(model, backend=megacpp, dynamic=True)
    with record() as report:
        for model.factor in (0.5, 0.25):
            assert relative_error(compiled(x), model(x)) < 1e-5
    assert report.counts["down_norm_up"] == 1 and len(report.frames) == len(handed) == 1
    for name, number in (("eps", 0.5), ("most", 1.0)):
        with record() as report:
            setattr(model, name, number)
            assert relative_error(compiled(x), model(x)) < 1e-5
        assert len(report.frames) == 1


@pytest.mark.end_to_end
def test_floats_do_not_keep_a_pattern_of_inductor_from_a_frame(no_kernels, monkeypatch):
    """The layer's own norms keep theirs as inputs, of which a graph that is traced for attention alone knows nothing."""
    compiled, real = [], inductor._compile
    monkeypatch.setattr(inductor, "_compile", lambda *args, **kw: compiled.append(args) or real(*args, **kw))
    monkeypatch.setattr(inductor, "_no_kernel_serves", lambda operands: False)
    torch._dynamo.reset()
    model = models.Layer(models.MLA(24, 2, 14, 10, 6, 4, 5), 24, 32)
    x, tables = torch.randn(2, 6, 24, requires_grad=True), models.rotary_tables(6, 4, torch.device("cpu"), torch.float32)
    y = torch.compile(model, backend=megacpp, dynamic=True)(x, *tables)
    assert relative_error(y, model(x, *tables)) < 1e-5
    assert len(compiled) == 1


@pytest.mark.parametrize("batch", [1, 2])
def test_attention_that_torch_multiplies_out_is_left_to_it(no_kernels, monkeypatch, recwarn, batch):
    """Values of 5 channels and keys of 10, for which CPU has no kernel: the op's products and softmax are no pattern to
    replace by the op. With a batch of one that pattern of torch 2.13's failed, and the frame was compiled again."""
    compiled, real = [], inductor._compile
    monkeypatch.setattr(inductor, "_compile", lambda *args, **kw: compiled.append(args) or real(*args, **kw))
    counters.clear()
    torch._dynamo.reset()
    model = models.MLA(24, 2, 0, 10, 6, 4, 5)
    tables = models.rotary_tables(6, 4, torch.device("cpu"), torch.float32)
    x = torch.randn(batch, 6, 24, requires_grad=True)
    y = torch.compile(model, backend=megacpp)(x, *tables)
    assert relative_error(y, model(x, *tables)) < 1e-5
    assert len(compiled) == 1 and counters["inductor"]["fuse_attention"] == 0
    assert not [w for w in recwarn if issubclass(w.category, FutureWarning)]
