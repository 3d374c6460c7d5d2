"""GEMMs that share an operand as one, and GEMMs by cuBLASLt's own candidates."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, view_to_reshape
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from megacpp_compile.backends import inductor
from megacpp_compile.backends._protocol import Settings
from megacpp_compile.config.options import Config
from megacpp_compile.fx.edit import value
from megacpp_compile.lowerings._gemm import autotune, cublaslt, outer_products
from megacpp_compile.lowerings._gemm.autotune import AutotuneGemms
from megacpp_compile.lowerings._gemm.shared_input import MAX_WIDTH, merge
from megacpp_compile.targets import TARGETS
from tests.seeds import Draws

aten = torch.ops.aten
draw = Draws(__name__)


def gemms(graph: fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=aten.mm.default))


def check(function: Callable[..., Tensor], *args: Tensor, merged: int, left: int) -> fx.Graph:
    """`merge` does so many, leaves so many GEMMs, and results, layouts as readers saw them and metadata stay."""
    gm = make_fx(function, select_decomp_table(), tracing_mode="fake")(*args)
    view_to_reshape(gm)  # as Inductor does ahead of its passes
    want = function(*args)
    assert merge(gm.graph) == merged, gm.graph
    gm.graph.lint()
    gm.recompile()
    assert gemms(gm.graph) == left, gm.graph
    for node in gm.graph.nodes:
        assert node.op != "call_function" or "val" in node.meta, node
    torch.testing.assert_close(gm(*args), want)
    return gm.graph


def x_and_weights(*widths: int, rows: int = 6, inner: int = 5, dtype=torch.float64) -> list[Tensor]:
    return [draw(rows, inner, dtype=dtype), *(draw(inner, n, dtype=dtype) for n in widths)]


def test_transposed_weights_are_put_together_by_rows():
    """So that rows are copied whole: no concat along the channels of what was transposed."""
    x, v, w = torch.randn(6, 5), torch.randn(3, 5), torch.randn(4, 5)
    graph = check(lambda x, v, w: (x @ v.t(), x @ w.t()), x, v, w, merged=1, left=1)
    (cat,) = graph.find_nodes(op="call_function", target=aten.cat.default)
    assert all(part.op == "placeholder" for part in cat.args[0])


G, H, V, W = draw(6, 3), draw(6, 4), draw(3, 5), draw(4, 5)
CHAIN = draw(6, 5), draw(5, 3), draw(5, 4), draw(3, 7), draw(3, 2)
SUM = G, H, V, W


def read_twice(g, h, v, w):
    product = g @ v
    return product + h @ w, product


def chain(x, v, w, a, b):
    low = x @ v
    return low @ a, low @ b, x @ w


def weight_made_by_a_gemm(x, v, w, a, b):
    made = v @ a  # [5, 7]
    return x @ made, x @ w, v @ b


# Of the last two the first merge puts other nodes in the place of those the second one looks at.
MERGED = {"one left operand": (lambda x, v, w: (x @ v, x @ w), x_and_weights(3, 4)),
          "one left operand of three": (lambda x, u, v, w: (x @ u, x @ v, x @ w), x_and_weights(3, 4, 2)),
          "one right operand": (lambda g, h, x: (g.t() @ x, h.t() @ x), (G, H, draw(6, 5))),
          "a sum": (lambda g, h, v, w: g @ v + h @ w, SUM),
          "a sum behind views": (lambda g, h, v, w: (g @ v).view(2, 3, 5) + (h @ w).view(2, 3, 5), SUM),
          "views of one operand": (lambda x, v, w: (x.view(6, 5) @ v, x.view(6, 5) @ w), (draw(2, 3, 5), *CHAIN[1:3])),
          "results are operands": (chain, CHAIN), "a result is a weight": (weight_made_by_a_gemm, CHAIN)}
REFUSED = {"another dtype": (lambda x, v, w: (x @ v, x.float() @ w), [*x_and_weights(3), draw(5, 4)]),
           "another operand": (lambda x, v, w: (x @ v, (x + 1) @ w), x_and_weights(3, 4)),
           "an operand that is ready too late": (lambda x, v, w: ((y := x @ v), x @ (w + y.sum())),
                                                 x_and_weights(3, 4)),
           "too wide": (lambda x, v, w: (x @ v, x @ w), x_and_weights(3, MAX_WIDTH + 1)),
           "both too wide": (lambda x, v, w: (x @ v, x @ w), x_and_weights(MAX_WIDTH + 1, MAX_WIDTH + 1)),
           "transposed left operand": (lambda x, v, w: (x @ v, x.t() @ w), [draw(5, 5) for _ in range(3)]),
           "a GEMM read twice": (read_twice, SUM),
           "one GEMM twice": (lambda g, h, v, w: (p := g @ v) + p + (h @ w).sum(), SUM),
           "a sum of another dtype": (lambda g, h, v, w: g @ v + h @ w, (G, H.double(), V, W.double())),
           "a sum too wide": (lambda g, h, v, w: g @ v + h @ w, (draw(6, MAX_WIDTH + 1), H, draw(MAX_WIDTH + 1, 5), W)),
           "a factor": (lambda g, h, v, w: torch.add(g @ v, h @ w, alpha=2), SUM),
           "a row broadcast": (lambda g, h, v, w: g @ v + h @ w, (G, H[:1], V, W)),
           "a row broadcast behind a view": (lambda g, h, v, w: (g @ v).view(2, 3, 5) + h @ w, (G, H[:3], V, W)),
           "rows in another order": (lambda g, h, v, w: (g @ v).view(6, 1, 5) + (h @ w).view(1, 6, 5), SUM)}


@pytest.mark.parametrize("which", MERGED)
def test_merges(which):
    n = 2 if MERGED[which][1] is CHAIN else 1
    check(MERGED[which][0], *MERGED[which][1], merged=n, left=n)


@pytest.mark.parametrize("why", REFUSED)
def test_refuses(why):
    check(REFUSED[why][0], *REFUSED[why][1], merged=0, left=2)


def test_symbolic_sizes_are_left_alone():
    """`make_fx` itself guards on what has to be equal; `merge` adds nothing."""
    cases = [(lambda x, v, w: (x @ v, x @ w), x_and_weights(3, 4)), (lambda g, h, v, w: g @ v + h @ w, (G, H, V, W))]
    for function, args in cases:
        gm = make_fx(function, select_decomp_table(), tracing_mode="symbolic")(*args)
        env = next(iter(gm.graph.nodes)).meta["val"].fake_mode.shape_env
        guards = len(env.guards)
        assert merge(gm.graph) == 0 and len(env.guards) == guards


class TwoProjections(nn.Module):
    """The two down-projections of multi-latent attention, read apart."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(5, 6, bias=False), nn.Linear(5, 4, bias=False), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat((self.q(x).relu(), self.kv(x).tanh()), -1))


@pytest.mark.end_to_end
def test_model_forward_and_backward():
    """One GEMM forward, one for x's gradient, one for both weights'."""
    model, x = TwoProjections().double(), torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    leaves, counts = [x, *model.parameters()], []

    def merging(gm, _, **__):
        view_to_reshape(gm)
        before = gemms(gm.graph)
        merged = merge(gm.graph)
        gm.recompile()
        counts.append((before, merged, gemms(gm.graph)))
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=functools.partial(compile_fx, inner_compile=merging))
    seed = torch.randn(2, 3, 5, dtype=torch.float64)
    with torch._functorch.config.patch(enable_autograd_cache=False):  # it would store Inductor's own kind of result
        got, want = (f(x) for f in (compiled, model))
        torch.testing.assert_close(got, want)
        grads, expected = (torch.autograd.grad(out, leaves, seed) for out in (got, want))
    torch.testing.assert_close(grads, expected)
    # Forward: q and kv; out is an addmm. Backward: gradients of out's input and weight, of both weights, and x's twice.
    assert counts == [(2, 1, 1), (6, 2, 4)]


def operands(m=4, k=8, n=16, dtype=torch.bfloat16, device="cpu") -> tuple[Tensor, Tensor]:
    return torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)


BIG = 1 << 13


@pytest.fixture
def gaining(monkeypatch):
    """Every GEMM that is tried has a faster candidate; the shapes that were tried."""
    tried: list[tuple[int, ...]] = []
    monkeypatch.setattr(cublaslt, "gains", lambda a, b: tried.append((*a.shape, b.shape[1])) or True)
    return tried


def asked(a: tuple[int, int], b: tuple[int, int], dtype=torch.bfloat16, other=None, device="cuda", turned=False):
    """Fake operands, so that any size will do; `turned`: the left one lies across."""
    left = torch.empty(a[::-1], dtype=dtype, device=device).t() if turned else torch.empty(a, dtype=dtype, device=device)
    return left, torch.empty(b, dtype=other or dtype, device=device)


WORTH = {"a short contraction": ((BIG, 512), (512, BIG), {}),
         "float16": ((BIG, 512), (512, BIG), {"dtype": torch.float16}),
         "just large enough": ((autotune.LARGE_BYTES // 2 // 64, 64), (64, 64), {}),
         "a long contraction": ((BIG, BIG), (BIG, 1024), {})}
NOT_WORTH = {
    "small": ((64, 512), (512, 64), {}), "just too small": ((autotune.LARGE_BYTES // 2 // 64 - 1, 64), (64, 64), {}),
    "long and few": ((256, BIG), (BIG, 1024), {}), "so large that trying takes long": ((8 * BIG, BIG), (BIG, BIG), {}),
    "float32": ((BIG, 512), (512, BIG), {"dtype": torch.float32}), "cpu": ((BIG, 512), (512, BIG), {"device": "cpu"}),
    "a sum over tokens": ((BIG, BIG), (BIG, 1024), {"turned": True}),
}
CASES = [(*case, True) for case in WORTH.values()] + [(*case, False) for case in NOT_WORTH.values()]


@pytest.mark.parametrize(("a", "b", "kinds", "worth"), CASES, ids=[*WORTH, *NOT_WORTH])
def test_which_products_are_tuned(gaining, a, b, kinds, worth):
    """In a graph, and in a lowering, which leaves the others to Inductor as well."""
    with FakeTensorMode():
        gm = make_fx(torch.mm)(*asked(a, b, **kinds))
        lowered = make_fx(autotune.mm)(*asked(a, b, **kinds))
    AutotuneGemms()(gm.graph)
    for graph in (gm.graph, lowered.graph):
        (node,) = [n for n in graph.nodes if n.op == "call_function" and n.target is not aten.t.default]
        assert node.target is (torch.ops.megacpp.tuned_mm.default if worth else aten.mm.default)
        assert node.meta["val"].shape == (a[0], b[1])
    assert gaining == [(*a, b[1])] * 2 * worth


def test_what_gains_nothing_stays(monkeypatch):
    monkeypatch.setattr(cublaslt, "gains", lambda *_: False)
    with FakeTensorMode():
        for function in (torch.mm, autotune.mm):
            gm = make_fx(function)(*asked((BIG, 512), (512, BIG)))
            AutotuneGemms()(gm.graph)
            assert gemms(gm.graph) == 1


def test_symbolic_sizes_are_inductors(gaining):
    shapes = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    a, b = (mode.from_tensor(t) for t in operands(64, 32, 64))
    assert all(isinstance(n, torch.SymInt) for n in a.shape)
    gm = make_fx(torch.mm)(a, b)
    AutotuneGemms()(gm.graph)
    assert gemms(gm.graph) == 1


@pytest.mark.parametrize("option", ["max_autotune", "max_autotune_gemm"])
def test_max_autotune_has_its_own_choice(gaining, option):
    with FakeTensorMode():
        gm = make_fx(torch.mm)(*asked((BIG, 512), (512, BIG)))
        with inductor_config.patch({option: True}):
            AutotuneGemms()(gm.graph)
            lowered = make_fx(autotune.mm)(*asked((BIG, 512), (512, BIG)))
    assert gemms(gm.graph) == gemms(lowered.graph) == 1


def test_what_is_concatenated_stays(gaining):
    """Inductor has both written into the result."""
    with FakeTensorMode():
        a, b = asked((BIG, 512), (512, BIG))
        gm = make_fx(lambda a, b: torch.cat((a @ b, a @ b), 1))(a, b)
    AutotuneGemms()(gm.graph)
    assert gemms(gm.graph) == 2


def test_tuned_on_cpu():
    a, b = operands()
    torch.testing.assert_close(autotune.mm(a, b), a @ b)
    opcheck(autotune.tuned_mm, (a, b))


@pytest.mark.end_to_end
def test_tuned_products_compile(gaining, monkeypatch):
    monkeypatch.setattr(autotune, "_worth", lambda a, b: True)

    def function(x, w):
        return ((x.relu() @ w.t()) * 2).to(torch.bfloat16)

    given = torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(48, 64, dtype=torch.bfloat16)
    graphs: list[fx.Graph] = []

    class Spy(AutotuneGemms):
        def run(self, graph):
            super().run(graph)
            graphs.append(graph)

    with inductor_config.patch(post_grad_custom_post_pass=Spy(), force_disable_caches=True):
        got = torch.compile(function)(*given)
    (graph,) = graphs
    assert len(graph.find_nodes(op="call_function", target=torch.ops.megacpp.tuned_mm.default)) == 1
    torch.testing.assert_close(got, function(*given), rtol=2e-2, atol=2e-2)


def test_products_are_tried_with_memory(monkeypatch):
    """Also where a lowering asks: fake operands, functionalised, while it is traced."""
    tried: list[Tensor] = []
    monkeypatch.setattr(cublaslt, "available", lambda: True)
    monkeypatch.setattr(cublaslt, "_gemm", lambda a, b, out: tried.extend((a, b)) or "serves")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def lowering(a, b):
        assert cublaslt.gains(a, b)
        return a @ b

    before = torch.get_rng_state()
    with FakeTensorMode():
        make_fx(torch.func.functionalize(lowering), tracing_mode="real")(*operands())
    for given, t in zip(operands(), tried, strict=True):
        assert type(t) is Tensor and not torch._is_functional_tensor(t) and t.data_ptr()
        assert (t.shape, t.dtype) == (given.shape, given.dtype) and t.float().std() > 0.5
    torch.set_rng_state(before)


def test_what_was_tried_is_not_tried_again(monkeypatch):
    found = {cublaslt._key(*operands()): None, cublaslt._key(*operands(m=8)): object()}
    monkeypatch.setattr(cublaslt, "_gemms", found)
    monkeypatch.setattr(cublaslt.Operand, "filled", lambda self: pytest.fail("made operands to try it on"))
    with FakeTensorMode() as mode:
        fakes = [[mode.from_tensor(t) for t in operands(m=m)] for m in (4, 8)]
    assert [cublaslt.gains(*pair) for pair in fakes] == [False, True]


def table(frequencies, positions):
    """As transformers has it: views behind need the GEMM's own memory layout."""
    angles = (frequencies[None, :, None] @ positions[None, None, :]).transpose(1, 2)
    return torch.cat((angles, angles), -1).cos(), (frequencies[:, None] @ positions[None]).view(-1)


OUTER = {"a table of rotations": (table, (draw(4), draw(6))),
         "rows": (lambda a, b: (a @ b).view(-1), (draw(5, 1), draw(1, 3))),
         "a transposed column": (lambda a, b: a.t() @ b, (draw(1, 5), draw(1, 3))),
         "a batch in another order": (lambda a, b: torch.bmm(a.transpose(0, 1), b).view(-1), (draw(5, 2, 1), draw(2, 1, 3))),
         "bfloat16": (lambda a, b: a @ b, (draw(5, 1).bfloat16(), draw(1, 3).bfloat16())),
         "rows without channels": (lambda a, b: a @ b, (draw(5, 1), draw(1, 0)))}


@pytest.mark.parametrize("which", OUTER)
def test_gemms_over_one_channel_are_multiplications(which):
    function, given = OUTER[which]
    gm = make_fx(function, tracing_mode="fake")(*given)
    before = len(gm.graph.find_nodes(op="call_function", target=aten.bmm.default)) + gemms(gm.graph)
    strides = [value(out).stride() for out in gm.graph.output_node().args[0]] if which == "a table of rotations" else None
    assert outer_products.multiply(gm.graph) == before > 0
    gm.graph.lint()
    gm.recompile()
    assert not gemms(gm.graph) and not gm.graph.find_nodes(op="call_function", target=aten.bmm.default)
    torch.testing.assert_close(gm(*given), function(*given), rtol=0, atol=0)
    if strides is not None:
        assert [value(out).stride() for out in gm.graph.output_node().args[0]] == strides


def test_backward_is_not_handed_a_product_of_two_vectors():
    """In a graph that is not divided yet the partitioner takes it for a GEMM, which is not computed twice."""
    def rotated(x, frequencies, positions):
        angles = (frequencies[:, None] @ positions[None]).t()
        return x * angles.cos()

    def saved(multiplied):
        handed = []

        def divided(joint, inputs, **options):
            if multiplied:
                outer_products.MultiplyOuterProducts()(joint.graph)
            halves = min_cut_rematerialization_partition(joint, inputs, **options)
            handed.extend(tuple(value(n).shape) for n in halves[0].graph.output_node().args[0][1:])
            return halves

        given = draw(6, 4).requires_grad_(), draw(4), draw(6)
        found = aot_function(rotated, lambda gm, _: make_boxed_func(gm), partition_fn=divided)(*given)
        found.sum().backward()
        torch.testing.assert_close(given[0].grad, (given[2][:, None] * given[1]).cos())
        return handed

    assert (4, 6) in saved(multiplied=False) and not {(4, 6), (6, 4)} & {*saved(multiplied=True)}


def test_other_gemms_stay():
    def others(a, b, c, bias):
        return a @ b, torch.addmm(bias, c, b[:1])

    gm = make_fx(others, tracing_mode="symbolic")(draw(5, 2), draw(2, 3), draw(5, 1), draw(3))
    before = str(gm.graph)
    assert outer_products.multiply(gm.graph) == 0 and str(gm.graph) == before


class TestSearchBegunAhead:
    """GEMMs of a joint graph are tried in a thread, one after the other; whoever asks meanwhile waits, or goes first."""

    @pytest.fixture(autouse=True)
    def slow_search(self, monkeypatch):
        self.tried, self.go, self.running = [], threading.Event(), threading.Event()

        def gemm(a, b, out):
            key = cublaslt._key(a, b)
            with cublaslt._searching:
                self.tried.append((a.shape[0], threading.current_thread().name.startswith("megacpp_gemms")))
                if self.tried[-1][1]:
                    self.running.set()
                    assert self.go.wait(20)
                cublaslt._gemms[key] = None if a.shape[0] == 8 else "serves"
            return cublaslt._gemms[key]

        monkeypatch.setattr(cublaslt, "available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(cublaslt, "_gemm", gemm)
        monkeypatch.setattr(cublaslt, "_gemms", {})
        monkeypatch.setattr(cublaslt, "_begun", {})
        yield
        self.go.set()

    def test_each_gemm_once_and_the_answer_is_waited_for(self):
        for m in (4, 8, 4):
            cublaslt.begin(*operands(m=m))
        self.go.set()
        assert [cublaslt.gains(*operands(m=m)) for m in (4, 8, 4)] == [True, False, True]
        assert [m for m, _ in self.tried] == [4, 8] and not cublaslt._begun

    def test_one_that_waits_behind_another_is_tried_by_whoever_asks(self):
        cublaslt.begin(*operands(m=4))
        assert self.running.wait(20)
        cublaslt.begin(*operands(m=8))
        threading.Timer(0.1, self.go.set).start()  # the first holds the GPU until then
        assert not cublaslt.gains(*operands(m=8))
        assert self.tried == [(4, True), (8, False)]

    def test_what_nobody_asked_for_is_dropped(self):
        with pytest.raises(ZeroDivisionError), cublaslt.searches_end():
            for m in (4, 8, 16):
                cublaslt.begin(*operands(m=m))
            assert self.running.wait(20)
            threading.Timer(0.1, self.go.set).start()
            raise ZeroDivisionError
        assert not cublaslt._begun and self.tried == [(4, True)]
        cublaslt._thread().submit(lambda: None).result(20)
        assert self.tried == [(4, True)]

    def test_large_gemms_of_a_joint_graph_are_begun(self, monkeypatch):
        self.go.set()
        monkeypatch.setattr(autotune, "_worth", lambda a, b: a.shape[0] != 16)

        def joint(*given):
            return [torch.mm(a, b) for a, b in zip(given[::2], given[1::2], strict=True)]

        given = [t for m in (4, 8, 16) for t in operands(m=m)]
        with FakeTensorMode() as mode:
            graph = make_fx(joint)(*(mode.from_tensor(t) for t in given)).graph
        before = str(graph)
        with inductor_config.patch(max_autotune_gemm=True):
            autotune.BeginSearch()(graph)
        assert not cublaslt._begun
        autotune.BeginSearch()(graph)
        assert {key[3][0] for key in cublaslt._begun} == {4, 8} and str(graph) == before


@pytest.mark.parametrize(("ms", "rounds"), [(0.1, [5, 5, 5, *[4] * 6]), (1.0, [5, 5, *[4] * 3])])
def test_the_search_takes_fewer_rounds_where_gemms_are_long(monkeypatch, ms, rounds):
    """One candidate, which is far behind, is dropped early; torch's own and the heuristic's first stay to the end."""
    takes, timed = {0: 1.3, 1: 0.9, 2: 1.4, 3: 0.95, cublaslt._TORCHS: 1.25}, []

    def one_round(calls):
        timed.append(len(calls))
        return {i: takes[i] * ms for i in calls}

    monkeypatch.setattr(cublaslt, "_round", one_round)
    monkeypatch.setattr(cublaslt, "_BEHIND", 1.3)
    monkeypatch.setattr(cublaslt, "_library", lambda kind: None)
    gemm = object.__new__(cublaslt.Gemm)
    gemm._has_torchs_bits = lambda *_: True
    candidates = ["first", "best", "far behind", "near"]
    assert gemm._best(*operands(), None, candidates) == "best" and timed == rounds
    takes[1] = takes[3] = 1.24  # 1 % of torch's is no gain
    assert gemm._best(*operands(), None, candidates) is None
    takes[1] = 0.9
    gemm._has_torchs_bits = lambda *_: False
    assert gemm._best(*operands(), None, candidates) is None


class TestKeptChoices:
    """cuBLASLt's candidates stand for themselves here: what is kept of them, for which GEMM, and when it is believed."""

    @pytest.fixture(autouse=True)
    def on_a_gpu(self, monkeypatch, tmp_path):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        self.gpu = types.SimpleNamespace(name="a GPU", major=9, minor=0, multi_processor_count=132)
        self.release, self.bits, self.searched = 120800, True, 0
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: self.gpu)
        library = types.SimpleNamespace(cublasLtGetVersion=lambda: self.release)
        monkeypatch.setattr(cublaslt, "_library", lambda: library)

    def chosen(self, words, m=4):
        """The algorithm of a GEMM in a process of its own, whose search would find `words`."""
        gemm = object.__new__(cublaslt.Gemm)

        def best(*_):
            self.searched += 1
            return None if words is None else cublaslt._Candidate(algorithm=(cublaslt.c_uint64 * 8)(*words))

        gemm._candidates, gemm._best = lambda *_: [], best
        gemm._has_torchs_bits = lambda *_: self.bits
        a, b = operands(m=m)
        found = gemm._chosen(a, b, a @ b)
        return None if found is None else list(found.algorithm)

    @pytest.mark.parametrize("words", [None, [2**64 - 1, *range(7)]])
    def test_is_found_by_the_next_process(self, words):
        assert [self.chosen(words), self.chosen([1] * 8)] == [words, words] and self.searched == 1

    @pytest.mark.parametrize("other", ["another length", "another GPU", "another release", "caches disabled", "torn"])
    def test_is_not_found_by(self, other, tmp_path):
        self.chosen([1] * 8)
        if other == "another GPU":
            self.gpu.multi_processor_count = 78
        if other == "another release":
            self.release += 1
        if other == "torn":
            (file,) = (tmp_path / "megacpp_gemms").iterdir()
            file.write_text(file.read_text()[:9])
        with inductor_config.patch(force_disable_caches=other == "caches disabled"):
            assert self.chosen([2] * 8, m=8 if other == "another length" else 4) == [2] * 8
        assert self.searched == 2

    def test_is_searched_for_again_where_the_bits_are_others(self):
        self.chosen([1] * 8)
        self.bits = False
        assert self.chosen([2] * 8) == [2] * 8
        self.bits = True
        assert self.chosen([3] * 8) == [2] * 8 and self.searched == 2


@pytest.mark.parametrize("on", [True, False])
def test_tuning_is_an_option_and_for_cuda(on):
    """The user's own pass comes first, and the option takes only ours away."""
    seen: list[str] = []
    given = {"post_grad_custom_post_pass": lambda graph: seen.append("the user's")}
    for target in ("cpu", "cuda"):
        gave = inductor.gemm_patches(Settings(TARGETS[target], Config(autotune_gemms=on), given))
        if on and target == "cuda":
            assert isinstance(gave["post_grad_custom_post_pass"], AutotuneGemms)
            assert isinstance(gave["joint_custom_pre_pass"], autotune.BeginSearch)
            gave["post_grad_custom_post_pass"](fx.Graph())
            assert seen == ["the user's"]
        elif target == "cuda":
            assert {**gave, "joint_custom_pre_pass": None} == {**given, "joint_custom_pre_pass": None}
            assert isinstance(gave["joint_custom_pre_pass"], outer_products.MultiplyOuterProducts)
        else:
            assert gave == given


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_torch_serves():
    assert not cublaslt.available()
    for a, b in (operands(), operands(dtype=torch.float32), operands(m=0), operands(k=0)):
        assert torch.equal(cublaslt.mm(a, b), a @ b)


def laid(t: Tensor, how: str) -> Tensor:
    """The matrix `t` in other memory."""
    if how == "t":
        return t.t().contiguous().t()
    if how == "padded":  # rows 8 channels apart: aligned, leading dimension not the width
        return torch.cat((t, t.new_zeros(t.shape[0], 8)), 1)[:, : t.shape[1]]
    if how == "unaligned":
        return torch.cat((t.new_zeros(t.shape[0], 1), t), 1)[:, 1:]
    return t.contiguous()


@pytest.fixture
def every_candidate(monkeypatch):
    """Take the fastest candidate, also where torch's own choice is as good: what is tested is what they compute."""
    monkeypatch.setattr(cublaslt, "_WORTH", 1e9)
    monkeypatch.setattr(cublaslt, "_LEAST", -1e9)
    monkeypatch.setattr(torch, "equal", lambda a, b: True)
    monkeypatch.setattr(cublaslt, "_gemms", {})


def on_gpu(test):
    return pytest.mark.cuda(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("layouts", ["n n", "n t", "t n", "t t", "padded t", "n padded", "unaligned n", "t unaligned"])
@pytest.mark.parametrize("shape", [(256, 512, 384), (8, 16, 8), (77, 33, 51), (1, 64, 9), (9, 64, 1), (5, 1, 7)],
                         ids=str)
def test_cublaslt_agrees_with_torch(every_candidate, shape, layouts, dtype):
    """Within one rounding: sums of float32 in another order."""
    m, k, n = shape
    a, b = (laid(t, how) for t, how in zip(operands(m, k, n, dtype, "cuda"), layouts.split(), strict=True))
    want = a.double() @ b.double()
    for _ in range(2):  # the second one finds it prepared
        got = cublaslt.mm(a, b)
        assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, (m, n), True)
        # Half a unit of the result, and float32's rounding of the terms.
        allowed = torch.finfo(dtype).eps / 2 * want.abs() + 2**-20 * (a.double().abs() @ b.double().abs())
        assert ((got.double() - want).abs() <= 1.01 * allowed + torch.finfo(dtype).tiny).all()


@on_gpu
def test_cublaslt_serves_something(every_candidate):
    a, b = operands(4096, 512, 4096, device="cuda")
    cublaslt.mm(a, b)
    assert cublaslt.available() and any(p is not None for p in cublaslt._gemms.values())


@on_gpu
def test_cublaslt_leaves_the_rest_to_torch(every_candidate):
    a, b = operands(64, 32, 64, device="cuda")
    for x, y in ((a.float(), b.float()), (a[::2, ::2], b[::2]), (a[:0], b), (a[:, :0], b[:0])):
        torch.testing.assert_close(cublaslt.mm(x, y), x @ y)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        torch.testing.assert_close(cublaslt.mm(a, b), a @ b)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(cublaslt._gemms.values())


@on_gpu
def test_cublaslt_in_a_cuda_graph(every_candidate):
    """A shape first met while capturing is torch's, and looked at again later; one prepared before is replayed."""
    a, b = operands(64, 32, 64, device="cuda")
    c, d = operands(96, 32, 64, device="cuda")
    cublaslt.mm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = cublaslt.mm(a, b), cublaslt.mm(c, d)
    assert len(cublaslt._gemms) == 1
    a.normal_(), c.normal_()
    graph.replay()
    torch.testing.assert_close(first, a @ b)
    torch.testing.assert_close(second, c @ d)


@on_gpu
def test_cublaslt_on_another_stream(every_candidate):
    a, b = operands(256, 128, 256, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = cublaslt.mm(a, b)
    side.synchronize()
    torch.testing.assert_close(got, a @ b)


@on_gpu
def test_tuned_ops():
    opcheck(autotune.tuned_mm, operands(64, 32, 48, device="cuda"))
    a, b = operands(BIG, 512, BIG // 4, device="cuda")
    torch.testing.assert_close(autotune.mm(a, b), a @ b, rtol=0, atol=0)


@on_gpu
def test_products_are_tried_on_operands_of_their_own(every_candidate):
    """Of fake ones; and draw no random numbers of the caller's. What was tried serves from then on."""
    before = torch.cuda.get_rng_state()
    with FakeTensorMode():
        a, b = (torch.empty(256, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        assert cublaslt.gains(a, b.t())
    assert (torch.cuda.get_rng_state() == before).all() and len(cublaslt._gemms) == 1
    a, b = (torch.randn(256, 512, device="cuda").bfloat16() for _ in range(2))
    cublaslt.mm(a, b.t())
    assert len(cublaslt._gemms) == 1


@on_gpu
def test_other_bits_are_not_taken(monkeypatch, every_candidate):
    monkeypatch.setattr(torch, "equal", lambda a, b: False)
    a, b = operands(256, 512, 384, device="cuda")
    cublaslt.mm(a, b)
    assert [*cublaslt._gemms.values()] == [None]
