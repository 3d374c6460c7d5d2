"""CUDA graphs, on a GPU: every op is captured and replayed with new inputs, and compiled models are, as Inductor does it.

    pytest -n 8 tests/backends/test_cuda_graphs.py

What the report says of them is tested without a GPU (`test_cuda_graph_reports.py`)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import megacpp_compile
from megacpp_compile.lowerings._registry import choose, semantic_ops
from tests.corpus import decodes
from tests.lowerings import relative_error
from tests.lowerings.agreement import KIND, bits, on, tensors_of, unit_of
from tests.lowerings.cases import CASES
from tests.seeds import Draws

on_gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
OPS = {name: op for op, (_, name) in semantic_ops().items()}
DTYPE = torch.bfloat16


def refillable(t: torch.Tensor) -> bool:
    """Whether each element of `t` has a place of its own."""
    return not any(stride == 0 and n > 1 for n, stride in zip(t.shape, t.stride(), strict=True))


def draws(name, device):
    """[(label, two draws of its arguments)] of the cases of an op whose second draw can be written over the first."""
    found = []
    for label, make in CASES[name].items():
        first, second = (on(device, make(Draws(f"{name} {label} {i}", torch.float64), DTYPE)) for i in range(2))
        a, b = tensors_of(first), tensors_of(second)
        same = [t.shape for t in a] == [t.shape for t in b] and all(map(refillable, a)) and all(t.numel() for t in a)
        if same and all(x == y for x, y in zip(first, second, strict=True) if isinstance(x, int | float | str)):
            found.append((label, first, second))
    return found


@pytest.mark.end_to_end
def test_every_op_has_cases():
    assert set(OPS) == set(KIND)
    for name in OPS:
        assert draws(name, "cpu"), name


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in OPS])
@torch.no_grad()
def test_an_op_is_captured_and_replayed(name, kernels_of_any_size):
    """The lowering that CUDA gets, warmed up once, and then replayed with other operands in the same memory. Two cases of
    each op, of those that a kernel serves where it serves any."""
    cases, served = draws(name, "cuda"), 0
    cases.sort(key=lambda case: choose(OPS[name], "cuda", case[1]).effective == "reference")
    for label, first, second in cases:
        choice = choose(OPS[name], "cuda", first)
        want = [t.clone() for t in tensors_of(choice.body(*second))]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            choice.body(*first)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = choice.body(*first)
        for old, new in zip(tensors_of(first), tensors_of(second), strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        for i, (g, w) in enumerate(zip(tensors_of(got), want, strict=True)):
            # Sums by atomic additions may come in another order.
            assert torch.equal(bits(g), bits(w)) or relative_error(g, w) < unit_of(DTYPE), f"{label}: output {i}"
        served += 1
        if served == 2:
            return
    assert served, "no case was captured"


class Block(nn.Module):
    """A latent between two projections and a gated MLP."""

    def __init__(self, width=256):
        super().__init__()
        self.down, self.norm = nn.Linear(width, 64, bias=False), nn.RMSNorm(64)
        self.up = nn.Linear(64, width, bias=False)
        self.gate, self.out = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        x = x + self.up(self.norm(self.down(x)))
        a, b = self.gate(x).chunk(2, -1)
        return x + self.out(torch.nn.functional.silu(a) * b)


class Experts(nn.Module):
    """Routed experts with a weight each, whose addresses a kernel reads from a table."""

    def __init__(self, width=64, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.each = nn.ModuleList(nn.ModuleList(nn.Linear(*sizes, bias=False) for sizes in
                                                ((width, 128), (width, 128), (128, width))) for _ in range(experts))  # fmt: skip

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for e, (gate, up, down) in enumerate(self.each):
            here = (weights * (chosen == e)).sum(-1, keepdim=True)
            out = out + here * down(torch.nn.functional.silu(gate(x)) * up(x))
        return out


MODES = [{"mode": "reduce-overhead"}, {"options": {"inductor": {"triton.cudagraphs": True}}}]


@pytest.mark.parametrize("asked", [pytest.param(m, marks=on_gpu) for m in MODES], ids=["mode", "options"])
@pytest.mark.parametrize("model", [Block, Experts])
def test_training_is_captured_and_replayed(model, asked):
    """Forward and backward, on new inputs each, with eager's gradients; nothing was skipped."""
    counters.clear()
    # Rounded to fewer bits a router may choose otherwise than eager's.
    dtype, width = (DTYPE, 256) if model is Block else (torch.float32, 64)
    plain = model().to("cuda", dtype)
    ours = copy.deepcopy(plain)
    compiled = torch.compile(ours, backend="megacpp", **asked)
    with megacpp_compile.record() as report:
        for step in range(5):
            x = torch.randn(128, width, device="cuda", dtype=dtype)
            results = []
            for call, of in ((plain, plain), (compiled, ours)):
                torch.compiler.cudagraph_mark_step_begin()
                of.zero_grad(set_to_none=True)
                out = call(x)
                out.float().square().mean().backward()
                results.append([out.detach().clone(), *(p.grad.clone() for p in of.parameters() if p.grad is not None)])
            assert all(relative_error(a, b) < 4e-2 for a, b in zip(*reversed(results), strict=True)), step
    assert report.frames[0].cuda_graph.startswith("captured"), report.frames[0].cuda_graph
    assert not counters["inductor"]["cudagraph_skips"]


class Decoder(nn.Module):
    """A layer with a cache of its own, which it writes to in place, at a position that it moves."""

    def __init__(self, capacity=64):
        super().__init__()
        self.layer = decodes.Step(decodes.one_projection, DTYPE)
        for name, channels in (("latents", decodes.LATENT), ("ropes", decodes.ROPE)):
            self.register_buffer(name, torch.zeros(2, capacity, channels, dtype=DTYPE))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        m, places = self.layer, self.position + torch.arange(x.shape[1], device=x.device)
        for cache, new in zip((self.latents, self.ropes), decodes.new_rows(m, x, places), strict=True):
            cache.index_copy_(1, places, new)
        k, v = decodes.expanded(m, self.latents, self.ropes)
        seen = torch.arange(self.latents.shape[1], device=x.device) <= places[:, None]
        out = nn.functional.scaled_dot_product_attention(decodes.queries(m, x, places), k, v, attn_mask=seen)
        self.position.add_(x.shape[1])
        return m.out(decodes.joined(out))


def steps(device, count, asked, tokens=1):
    """[(what a compiled decoder gives, eager's)] of each step."""
    plain = Decoder().to(device)
    ours = copy.deepcopy(plain)
    compiled = torch.compile(ours, backend="megacpp", fullgraph=True, **asked)
    found = []
    for _ in range(count):
        x = torch.randn(2, tokens, decodes.WIDTH, device=device, dtype=DTYPE)
        torch.compiler.cudagraph_mark_step_begin()
        found.append((compiled(x).clone(), plain(x)))
    return found


@torch.no_grad()
def test_the_decoder_decodes(no_kernels):
    """The same without a GPU, and so without graphs."""
    with megacpp_compile.record() as report, torch._dynamo.config.patch(error_on_recompile=True):
        assert all(relative_error(got, want) < 4e-2 for got, want in steps("cpu", 8, MODES[0]))
    (frame,) = report.frames
    assert frame.passes["mla_decode"] == 1 and frame.cuda_graph == "not captured: cpu"


@pytest.mark.parametrize("asked", [pytest.param(m, marks=on_gpu) for m in MODES], ids=["mode", "options"])
@pytest.mark.parametrize("tokens", [1, 3])
@torch.no_grad()
def test_a_step_is_replayed_with_a_moving_length(asked, tokens):
    """One graph for all positions: the cache is the module's own, and the length is data."""
    counters.clear()
    with megacpp_compile.record() as report, torch._dynamo.config.patch(error_on_recompile=True):
        found = steps("cuda", 16, asked, tokens)
    assert all(relative_error(got, want) < 4e-2 for got, want in found)
    (frame,) = report.frames
    assert frame.passes["mla_decode"] == 1 and frame.cuda_graph.startswith("captured"), frame.outcome
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("form", [pytest.param(f, marks=on_gpu) for f in ("absorbed", "expanded")])
@torch.no_grad()
def test_a_cache_of_latents_is_replayed(form):
    """`MLAKVCache` and `latent_attention`: update, attention and advance in one graph."""
    counters.clear()
    sizes = {"layers": 1, "batch": 2, "capacity": 64, "latent_dim": decodes.LATENT, "rope_dim": decodes.ROPE}
    caches = [megacpp_compile.MLAKVCache(**sizes, dtype=DTYPE, device="cuda") for _ in range(2)]
    up = torch.randn(decodes.HEADS * (decodes.NOPE + decodes.VALUE), decodes.LATENT, device="cuda", dtype=DTYPE)

    def step(cache, latent, rope, q_nope, q_rope):
        rows = cache.update(0, latent, rope)
        out = megacpp_compile.latent_attention(q_nope, q_rope, rows, up, form=form)
        cache.advance(1)
        return out

    compiled = torch.compile(step, backend="megacpp", fullgraph=True, mode="reduce-overhead")
    shapes = (decodes.LATENT,), (1, decodes.ROPE), (decodes.HEADS, decodes.NOPE), (decodes.HEADS, decodes.ROPE)
    with megacpp_compile.record() as report, torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(16):
            given = [torch.randn(2, 1, *shape, device="cuda", dtype=DTYPE) for shape in shapes]
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(caches[0], *given).clone()
            assert relative_error(got, step(caches[1], *given)) < 4e-2
    assert report.frames[0].cuda_graph.startswith("captured"), report.frames[0].outcome
