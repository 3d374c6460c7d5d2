"""Products that share an operand as one, and products by cuBLASLt's own candidates."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, view_to_reshape
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from megacpp_compile.gemm import cublaslt, short
from megacpp_compile.gemm.merge import MAX_WIDTH, merge

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def products(graph: fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=aten.mm.default))


# --- merge


def check(function: Callable[..., Tensor], *args: Tensor, merged: int, left: int) -> fx.Graph:
    """`merge` does so many, leaves so many products, and results, layouts as readers saw them and metadata stay."""
    gm = make_fx(function, select_decomp_table(), tracing_mode="fake")(*args)
    view_to_reshape(gm)  # as Inductor does ahead of its passes
    want = function(*args)
    assert merge(gm.graph) == merged, gm.graph
    gm.graph.lint()
    gm.recompile()
    assert products(gm.graph) == left, gm.graph
    for node in gm.graph.nodes:
        assert node.op != "call_function" or "val" in node.meta, node
    torch.testing.assert_close(gm(*args), want)
    return gm.graph


def x_and_weights(*widths: int, rows: int = 6, inner: int = 5, dtype=torch.float64) -> list[Tensor]:
    return [torch.randn(rows, inner, dtype=dtype), *(torch.randn(inner, n, dtype=dtype) for n in widths)]


def test_one_left_operand():
    check(lambda x, v, w: (x @ v, x @ w), *x_and_weights(3, 4), merged=1, left=1)
    check(lambda x, u, v, w: (x @ u, x @ v, x @ w), *x_and_weights(3, 4, 2), merged=1, left=1)


def test_one_right_operand():
    g, h, x = torch.randn(6, 3), torch.randn(6, 4), torch.randn(6, 5)
    check(lambda g, h, x: (g.t() @ x, h.t() @ x), g, h, x, merged=1, left=1)


def test_transposed_weights_are_put_together_by_rows():
    """So that rows are copied whole: no concat along the lanes of what was transposed."""
    x, v, w = torch.randn(6, 5), torch.randn(3, 5), torch.randn(4, 5)
    graph = check(lambda x, v, w: (x @ v.t(), x @ w.t()), x, v, w, merged=1, left=1)
    (cat,) = graph.find_nodes(op="call_function", target=aten.cat.default)
    assert all(part.op == "placeholder" for part in cat.args[0])


def test_sum_of_products():
    g, h, v, w = torch.randn(6, 3), torch.randn(6, 4), torch.randn(3, 5), torch.randn(4, 5)
    check(lambda g, h, v, w: g @ v + h @ w, g, h, v, w, merged=1, left=1)
    check(lambda g, h, v, w: (g @ v).view(2, 3, 5) + (h @ w).view(2, 3, 5), g, h, v, w, merged=1, left=1)


def test_views_of_one_operand():
    x, v, w = torch.randn(2, 3, 5), torch.randn(5, 3), torch.randn(5, 4)
    check(lambda x, v, w: (x.view(6, 5) @ v, x.view(6, 5) @ w), x, v, w, merged=1, left=1)


def test_results_of_one_pair_are_operands_of_the_next():
    """The first merge puts other nodes in the place of those the second one looks at."""
    x, v, w, a, b = torch.randn(6, 5), torch.randn(5, 3), torch.randn(5, 4), torch.randn(3, 7), torch.randn(3, 2)

    def chain(x, v, w, a, b):
        low = x @ v
        return low @ a, low @ b, x @ w

    check(chain, x, v, w, a, b, merged=2, left=2)

    def weight_made_by_a_product(x, v, w, a, b):
        made = v @ a  # [5, 7]
        return x @ made, x @ w, v @ b

    check(weight_made_by_a_product, x, v, w, a, b, merged=2, left=2)


REFUSED = {
    "another dtype": (lambda x, v, w: (x @ v, x.float() @ w), [*x_and_weights(3), torch.randn(5, 4)]),
    "another operand": (lambda x, v, w: (x @ v, (x + 1) @ w), x_and_weights(3, 4)),
    "an operand that is ready too late": (lambda x, v, w: ((y := x @ v), x @ (w + y.sum())), x_and_weights(3, 4)),
    "too wide": (lambda x, v, w: (x @ v, x @ w), x_and_weights(3, MAX_WIDTH + 1)),
    "both too wide": (lambda x, v, w: (x @ v, x @ w), x_and_weights(MAX_WIDTH + 1, MAX_WIDTH + 1)),
    "transposed left operand": (lambda x, v, w: (x @ v, x.t() @ w), [torch.randn(5, 5) for _ in range(3)]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refuses(why):
    function, args = REFUSED[why]
    check(function, *args, merged=0, left=2)


G, H, V, W = torch.randn(6, 3), torch.randn(6, 4), torch.randn(3, 5), torch.randn(4, 5)


def read_twice(g, h, v, w):
    product = g @ v
    return product + h @ w, product


REFUSED_SUMS = {
    "a product read twice": (read_twice, (G, H, V, W)),
    "one product twice": (lambda g, h, v, w: (p := g @ v) + p + (h @ w).sum(), (G, H, V, W)),
    "another dtype": (lambda g, h, v, w: g @ v + h @ w, (G, H.double(), V, W.double())),
    "too wide": (
        lambda g, h, v, w: g @ v + h @ w,
        (torch.randn(6, MAX_WIDTH + 1), H, torch.randn(MAX_WIDTH + 1, 5), W),
    ),
    "a factor": (lambda g, h, v, w: torch.add(g @ v, h @ w, alpha=2), (G, H, V, W)),
    "a row broadcast": (lambda g, h, v, w: g @ v + h @ w, (G, H[:1], V, W)),
    "a row broadcast behind a view": (lambda g, h, v, w: (g @ v).view(2, 3, 5) + h @ w, (G, H[:3], V, W)),
    "rows in another order": (lambda g, h, v, w: (g @ v).view(6, 1, 5) + (h @ w).view(1, 6, 5), (G, H, V, W)),
}


@pytest.mark.parametrize("why", REFUSED_SUMS)
def test_refuses_sum(why):
    function, args = REFUSED_SUMS[why]
    check(function, *args, merged=0, left=2)


def test_symbolic_sizes_are_left_alone():
    """`make_fx` itself guards on what has to be equal; `merge` adds nothing."""
    cases = [
        (lambda x, v, w: (x @ v, x @ w), x_and_weights(3, 4)),
        (lambda g, h, v, w: g @ v + h @ w, (G, H, V, W)),
    ]
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


def test_model_forward_and_backward():
    """One product forward, one for x's gradient, one for both weights'."""
    model, x = TwoProjections().double(), torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    leaves, counts = [x, *model.parameters()], []

    def merging(gm, _, **__):
        view_to_reshape(gm)
        before = products(gm.graph)
        merged = merge(gm.graph)
        gm.recompile()
        counts.append((before, merged, products(gm.graph)))
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=functools.partial(compile_fx, inner_compile=merging))
    seed = torch.randn(2, 3, 5, dtype=torch.float64)
    with torch._functorch.config.patch(enable_autograd_cache=False):  # it would store Inductor's own kind of result
        got, want = (f(x) for f in (compiled, model))
        torch.testing.assert_close(got, want)
        grads, expected = (torch.autograd.grad(out, leaves, seed) for out in (got, want))
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b)
    # Forward: q and kv; out is an addmm. Backward: gradients of out's input and weight, of both weights, and x's twice.
    assert counts == [(2, 1, 1), (6, 2, 4)]


# --- short


def operands(m=4, k=8, n=16, dtype=torch.bfloat16, device="cpu") -> tuple[Tensor, Tensor]:
    return torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)


class Asked:
    """Stands for a CUDA tensor of any size."""

    def __init__(self, *shape, dtype=torch.bfloat16, device="cuda"):
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)

    def __matmul__(self, other):
        return "aten"


@pytest.fixture
def choice(monkeypatch):
    """Who serves `short.mm(a, b)`."""
    monkeypatch.setattr(torch.ops.megacpp, "short_mm", lambda a, b: "cublaslt")
    return short.mm


BIG = 1 << 13


def test_short_serves_a_large_product_with_a_short_contraction(choice):
    for dtype in (torch.bfloat16, torch.float16):
        assert choice(Asked(BIG, 512, dtype=dtype), Asked(512, BIG, dtype=dtype)) == "cublaslt"
    assert choice(Asked(short.MIN_BYTES // 2 // 64, 64), Asked(64, 64)) == "cublaslt"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Asked(BIG, 1025), Asked(1025, BIG)),
        (Asked(64, 512), Asked(512, 64)),
        (Asked(short.MIN_BYTES // 2 // 64 - 1, 64), Asked(64, 64)),
        (Asked(BIG, 512, dtype=torch.float32), Asked(512, BIG, dtype=torch.float32)),
        (Asked(BIG, 512), Asked(512, BIG, dtype=torch.float16)),
        (Asked(BIG, 512, device="cpu"), Asked(512, BIG, device="cpu")),
        (Asked("a symbol", 512), Asked(512, BIG)),
    ],
    ids=["long", "small", "just too small", "float32", "two dtypes", "cpu", "symbolic"],
)
def test_short_leaves_the_others_to_inductor(choice, a, b):
    assert choice(a, b) == "aten"


@pytest.mark.parametrize("option", ["max_autotune", "max_autotune_gemm"])
def test_short_leaves_the_choice_to_max_autotune(choice, option):
    with inductor_config.patch({option: True}):
        assert choice(Asked(BIG, 512), Asked(512, BIG)) == "aten"


def test_short_on_cpu():
    a, b = operands()
    torch.testing.assert_close(short.mm(a, b), a @ b)
    opcheck(short.short_mm, (a, b))


# --- cublaslt


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_torch_serves():
    assert not cublaslt.available()
    for a, b in (operands(), operands(dtype=torch.float32), operands(m=0), operands(k=0)):
        assert torch.equal(cublaslt.mm(a, b), a @ b)


def laid(t: Tensor, how: str) -> Tensor:
    """The matrix `t` in other memory."""
    if how == "t":
        return t.t().contiguous().t()
    if how == "padded":  # rows 8 lanes apart: aligned, leading dimension not the width
        return torch.cat((t, t.new_zeros(t.shape[0], 8)), 1)[:, : t.shape[1]]
    if how == "unaligned":
        return torch.cat((t.new_zeros(t.shape[0], 1), t), 1)[:, 1:]
    return t.contiguous()


@pytest.fixture
def every_candidate(monkeypatch):
    """Take the fastest candidate, also where torch's own choice is as good: what is tested is what they compute."""
    monkeypatch.setattr(cublaslt, "_WORTH", 1e9)
    monkeypatch.setattr(cublaslt, "_products", {})


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("layouts", ["n n", "n t", "t n", "t t", "padded t", "n padded", "unaligned n", "t unaligned"])
@pytest.mark.parametrize(
    "shape", [(256, 512, 384), (8, 16, 8), (77, 33, 51), (1, 64, 9), (9, 64, 1), (5, 1, 7)], ids=str
)
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


@pytest.mark.cuda
@needs_gpu
def test_cublaslt_serves_something(every_candidate):
    a, b = operands(4096, 512, 4096, device="cuda")
    cublaslt.mm(a, b)
    assert cublaslt.available() and any(p is not None for p in cublaslt._products.values())


@pytest.mark.cuda
@needs_gpu
def test_cublaslt_leaves_the_rest_to_torch(every_candidate):
    a, b = operands(64, 32, 64, device="cuda")
    for x, y in ((a.float(), b.float()), (a[::2, ::2], b[::2]), (a[:0], b), (a[:, :0], b[:0])):
        torch.testing.assert_close(cublaslt.mm(x, y), x @ y)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        torch.testing.assert_close(cublaslt.mm(a, b), a @ b)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(cublaslt._products.values())


@pytest.mark.cuda
@needs_gpu
def test_cublaslt_in_a_cuda_graph(every_candidate):
    """A shape first met while capturing is torch's, and looked at again later; one prepared before is replayed."""
    a, b = operands(64, 32, 64, device="cuda")
    c, d = operands(96, 32, 64, device="cuda")
    cublaslt.mm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = cublaslt.mm(a, b), cublaslt.mm(c, d)
    assert len(cublaslt._products) == 1
    a.normal_(), c.normal_()
    graph.replay()
    torch.testing.assert_close(first, a @ b)
    torch.testing.assert_close(second, c @ d)


@pytest.mark.cuda
@needs_gpu
def test_cublaslt_on_another_stream(every_candidate):
    a, b = operands(256, 128, 256, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = cublaslt.mm(a, b)
    side.synchronize()
    torch.testing.assert_close(got, a @ b)


@pytest.mark.cuda
@needs_gpu
def test_short_mm_is_an_op():
    opcheck(short.short_mm, operands(64, 32, 48, device="cuda"))
    a, b = operands(BIG, 512, BIG // 4, device="cuda")
    torch.testing.assert_close(short.mm(a, b), a @ b)
