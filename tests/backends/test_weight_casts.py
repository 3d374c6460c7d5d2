"""Casts of weights in front of a frame: how often they are made, and that they change no result."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import megacpp_compile
from megacpp_compile.backends import weight_casts
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.lowerings._gemm.float8_support import no_float8
from megacpp_compile.precision import weight_casts as cache
from tests.backends.models import DIM, HIDDEN, Block, batch, equal, options, step
from tests.backends.models import compiled as compiled_as
from tests.lowerings import relative_error
from tests.precision.models import Of
from tests.seeds import Draws

on_a_cpu = pytest.mark.usefixtures("float8", "no_kernels")

LINEARS = 3


def draws(request):
    return Draws(request.node.name, torch.bfloat16)


@pytest.fixture
def made(monkeypatch):
    """The names of the ops that made casts in front of frames, in order."""
    names, plain = [], weight_casts._now

    @functools.wraps(plain)
    def counted(name, *args):
        names.append(name)
        return plain(name, *args)

    monkeypatch.setattr(weight_casts, "_now", counted)
    return names


def block(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return Block(dtype=dtype)


def compiled(model, recipe="fp8_current", cached=True, **more):
    return compiled_as(model, recipe, cache_weight_casts=cached, **more)


def uncached_and_cached(make, calls, compiled=compiled):
    """[what `calls(run, model)` gives] of weights that are cast in each call and of those that are cast once, and both
    reports."""
    results, reports = [], []
    for cached in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make()
        with megacpp_compile.record() as report, megacpp_compile.cached_weight_casts():
            results.append(calls(compiled(model, cached=cached), model))
        reports.append(report)
    return results, reports


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dynamic", [False, None])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed"])
@on_a_cpu
def test_is_cast_once_for_all_microbatches_of_a_step(rand, made, recipe, dynamic):
    """Of all sizes, whether each has a frame of its own or the second makes one for any."""
    model = block()
    run = compiled(model, recipe, dynamic=dynamic)
    for n in (1, 2):
        with megacpp_compile.cached_weight_casts():
            for sequences in (2, 3):
                step(run, model, *batch(rand, sequences))
        assert len(made) == n * LINEARS and set(made) == {"fp8_quantize_weights"}
    x, grad = batch(rand)
    step(run, model, x, grad)
    step(run, model, x, grad)
    assert len(made) == (2 + 2) * LINEARS  # without a context, in each call


@pytest.mark.parametrize("autocast", [False, True])
@on_a_cpu
def test_results_are_those_without(request, autocast):
    """Bit for bit, through steps that change the weights between contexts."""
    dtype = torch.float32 if autocast else torch.bfloat16
    results = []
    for cached in (False, True):
        torch._dynamo.reset()
        model, rand, seen = block(dtype), draws(request), []
        run = compiled(model, cached=cached)
        for _ in range(2):
            with megacpp_compile.cached_weight_casts(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                for _ in range(2):
                    seen += step(run, model, *batch(rand))
            with torch.no_grad():
                for weight in model.parameters():
                    weight.data.copy_(weight - 0.1 * weight.grad.sign())
        results.append(seen)
    assert equal(*results)


def heads():
    """Queries, keys and values of few heads, whose gradients are put together for one GEMM."""
    parts = {name: nn.Linear(64, n, bias=False, dtype=torch.bfloat16) for name, n in (("q", 32), ("k", 16), ("v", 16))}
    return Of(lambda m, x: (m.q(x), m.k(x), m.v(x)), **parts)


@on_a_cpu
def test_linears_that_share_a_gemm_share_a_cast(rand, made):
    x, grad = rand(32, 64), rand(32, 64)
    calls = lambda run, model: step(lambda x: torch.cat(run(x), -1), model, x, grad)  # noqa: E731
    results, reports = uncached_and_cached(heads, calls)
    assert [len(report.sites) for report in reports] == [1, 1] and len(made) == 1 and equal(*results)


@on_a_cpu
def test_of_linears_that_share_a_gemm_one_may_have_no_gradient(rand):
    """Backward reads the columns of the others alone."""
    x, results = rand(32, 64), []
    for cached in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, leaf = heads(), x.clone().requires_grad_()
        q, _, v = compiled(model, cached=cached)(leaf)
        loss = q.float().sum() + v.float().square().sum()
        results.append(torch.autograd.grad(loss, [leaf, model.q.weight, model.v.weight]))
    assert equal(*results)


@on_a_cpu
def test_a_changed_weight_is_cast_anew(rand, made):
    """One that an operation in place has changed, even in the context; all others stay."""
    model = block()
    run = compiled(model)
    x, grad = batch(rand)
    with megacpp_compile.cached_weight_casts():
        step(run, model, x, grad)
        with torch.no_grad():
            model.down.weight.mul_(2)
        changed = step(run, model, x, grad)
    assert len(made) == LINEARS + 1
    torch._dynamo.reset()
    assert equal(changed, step(compiled(model, cached=False), model, x, grad))


@on_a_cpu
def test_backward_has_the_casts_of_its_forward(rand):
    """Of two forwards before their backwards."""
    model = block()
    run = compiled(model)
    x, grad = batch(rand)
    want = step(run, model, x, grad)
    x = x.requires_grad_()
    with megacpp_compile.cached_weight_casts():
        first, second = run(x), run(x)
        (dx,) = torch.autograd.grad(first, x, grad)
        assert torch.equal(dx, want[1]) and torch.equal(torch.autograd.grad(second, x, grad)[0], want[1])


@on_a_cpu
def test_recomputation_reads_the_cache(rand, made):
    model = block()
    run = compiled(model)
    x, grad = batch(rand)
    want = step(run, model, x, grad)
    made.clear()
    with megacpp_compile.cached_weight_casts():
        got = step(lambda x: checkpoint(run, x, use_reentrant=False), model, x, grad)
    assert equal(got, want) and len(made) == LINEARS


@on_a_cpu
def test_inference_keeps_one_orientation(rand, made, monkeypatch):
    model = block().requires_grad_(False)
    run, kept = compiled(model), []
    plain = cache._made
    monkeypatch.setattr(cache, "_made", lambda *args: kept.append(plain(*args)) or kept[-1])
    with megacpp_compile.cached_weight_casts(), torch.inference_mode():
        for sequences in (2, 2, 2):
            run(batch(rand, sequences)[0])
    assert len(made) == LINEARS and all(columns.numel() == 0 for _, columns, _ in kept)


@pytest.mark.end_to_end
@on_a_cpu
def test_nothing_outlives_the_context(rand, few_objects, monkeypatch):
    model = block()
    run, refs, plain = compiled(model), [], cache._made

    def watched(*args):
        casts = plain(*args)
        refs.extend(weakref.ref(t) for t in casts)
        return casts

    monkeypatch.setattr(cache, "_made", watched)
    with megacpp_compile.cached_weight_casts():
        with megacpp_compile.cached_weight_casts():
            step(run, model, *batch(rand))
        gc.collect()
        assert refs and all(ref() is not None for ref in refs)  # the outermost counts
        step(run, model, *batch(rand))
        assert len(refs) == 3 * LINEARS
    gc.collect()
    assert all(ref() is None for ref in refs)


@pytest.mark.end_to_end
@on_a_cpu
def test_repeated_blocks_have_their_own(rand, made):
    """Blocks that share an artifact have weights of their own."""
    x, grad = batch(rand)

    def by_blocks(model, cached):
        more = {**options("fp8_current", cache_weight_casts=cached), "strict": False}
        return megacpp_compile.compile(model, options=more)

    twice = lambda run, model: [step(run, model, x, grad) for _ in range(2)]  # noqa: E731
    results, _ = uncached_and_cached(lambda: nn.Sequential(Block(), Block(), Block()), twice, by_blocks)
    results = sum(results, [])
    assert len(made) == 3 * LINEARS and all(equal(got, results[0]) for got in results[1:])


class Doubled(Block):
    def forward(self, x):
        return F.linear(x, 2 * self.gate.weight) @ self.down.weight.t()


def notes(report):
    return {site.note for site in report.sites}


@pytest.mark.end_to_end
@on_a_cpu
def test_says_what_it_did(rand):
    for recipe, model, want in (
        ("fp8_current", block(), {"weights cast once in cached_weight_casts()"}),
        ("fp8_block", block(), {"cast in every call, as blocks have no shared casts"}),
        ("fp8_current", Doubled(), {"cast in every call, as a weight is computed or gathered here",
                                    "weights cast once in cached_weight_casts()"}),
    ):  # fmt: skip
        torch._dynamo.reset()
        model = model.to(torch.bfloat16)
        if recipe == "fp8_block":
            model.gate, model.up, model.down = (nn.Linear(128, 128, bias=False).bfloat16() for _ in range(3))
        x = rand(1, 128, model.gate.in_features).requires_grad_()
        with megacpp_compile.record() as report, megacpp_compile.cached_weight_casts():
            compiled(model, recipe)(x).sum().backward()
        assert notes(report) == want


@pytest.mark.end_to_end
@on_a_cpu
def test_a_weight_that_is_no_parameter_is_cast_in_the_frame(rand, made):
    x, w = rand(16, DIM).requires_grad_(), rand(HIDDEN, DIM).requires_grad_()
    plan = PrecisionPlan(roles={"other": "fp8_current"}, gate=False)
    with megacpp_compile.record() as report:
        more = {"precision": plan, "cache_weight_casts": True}
        run = torch.compile(lambda x, w: F.linear(x, w), backend="megacpp", options=more)
        run(x, w).sum().backward()
    assert notes(report) == {"cast in every call, as a weight is no parameter"} and not made


class Experts(nn.Module):
    def __init__(self, experts=4):
        super().__init__()
        make = lambda i, o: nn.ModuleList(nn.Linear(i, o, bias=False) for _ in range(experts))  # noqa: E731
        self.router = nn.Linear(DIM, experts, bias=False)
        self.gate, self.up, self.down = make(DIM, HIDDEN), make(DIM, HIDDEN), make(HIDDEN, DIM)

    def forward(self, x):
        gates, indices = self.router(x).float().softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for e in range(len(self.gate)):
            token, choice = torch.where(indices == e)
            rows = x[token]
            rows = self.down[e](F.silu(self.gate[e](rows)) * self.up[e](rows))
            y = y.index_add(0, token, rows * gates[token, choice, None].to(x.dtype))
        return y


@pytest.mark.end_to_end
@on_a_cpu
def test_experts(rand, made):
    """Their weights are cast once, too, and results are bit for bit those without."""
    x, grad = rand(64, DIM), rand(64, DIM)

    def strictly(model, cached):
        plan = PrecisionPlan(rules=(("router", "bf16"),), gate=False)
        more = {"precision": plan, "cache_weight_casts": cached, "strict": True, "require": {"moe": 1}}
        return torch.compile(model, backend="megacpp", options=more)

    twice = lambda run, model: [step(run, model, x, grad) for _ in range(2)]  # noqa: E731
    results, reports = uncached_and_cached(lambda: Experts().bfloat16(), twice, strictly)
    for report in reports:
        rows = [(r["effective"], r["reason"]) for f in report.frames for r in f.precision if r["kind"] == "experts"]
        assert rows == [("fp8_current", "")]
    results = sum(results, [])
    assert made == ["fp8_quantize_experts"] * 2 and all(equal(got, results[0]) for got in results[1:])


class Normalised(Block):
    """Its weights are changed where a forward begins, and one in the middle of it."""

    def forward(self, x):
        with torch.no_grad():
            self.gate.weight.mul_(0.5)
        y = F.silu(self.gate(x)) * self.up(x)
        with torch.no_grad():
            self.down.weight.mul_(0.5)
        return self.down(y)


@pytest.mark.end_to_end
@on_a_cpu
def test_a_frame_that_changes_its_weights(rand):
    """What it reads of a weight is what it has written, in every call."""
    x, grad = batch(rand)
    thrice = lambda run, model: [t for _ in range(3) for t in step(run, model, x, grad)]  # noqa: E731
    results, _ = uncached_and_cached(Normalised, thrice)
    assert equal(*results)


@on_a_cpu
def test_is_verified_site_by_site(rand):
    model = block()
    step(compiled(model, verify="each", require={"linear": LINEARS}), model, *batch(rand))


@on_a_cpu
def test_warns_where_nothing_is_cast(rand, monkeypatch):
    said = []
    monkeypatch.setattr(cache, "warn_once", said.append)
    model = block()
    with megacpp_compile.cached_weight_casts():
        compiled(model, cached=False)(batch(rand)[0])
    assert len(said) == 1 and "cached_weight_casts() has no effect" in said[0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available() or bool(no_float8(torch.device("cuda"))), reason="needs float8 GEMMs")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed"])
def test_on_a_gpu(request, made, recipe, mode):
    """By kernels, in CUDA graphs too: once a context, and near what is cast in each call, through steps that change the
    weights. Scales of one rounding more move an element in some hundred to the next number of e4m3. Under delayed scaling
    the two round weights by other scales, each of them by up to 2^-4: 0.22 apart in the worst gradient of many."""
    results = []
    for cached in (False, True):
        torch._dynamo.reset()
        model, rand, seen = block().cuda(), draws(request), []
        graphs = {} if mode is None else {"inductor": {"triton.cudagraphs": True}}
        run = compiled(model, recipe, cached, **graphs)
        for _ in range(3):
            with megacpp_compile.cached_weight_casts():
                for _ in range(2):
                    torch.compiler.cudagraph_mark_step_begin()
                    seen += step(run, model, *(t.cuda() for t in batch(rand)))
            with torch.no_grad():
                for weight in model.parameters():
                    weight.sub_(0.1 * weight.grad.sign())
        results.append(seen)
    assert len(made) == 3 * LINEARS
    worst = max(map(relative_error, *results))
    assert worst < (2e-2 if recipe == "fp8_current" else 0.3), worst
