"""A plain MLA block through the whole compiler, on every device present: results, sites, and what ran.

On CUDA the Triton kernels serve, however small the tensors, in what Inductor compiles; on CPU the reference lowerings,
in the graph that Inductor would compile (`no_kernels`).
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megacpp_compile
from megacpp_compile.backends import inductor
from tests.corpus.spellings import PlainMLA, tables

ON_CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_CUDA)]
HEADS, NOPE, ROPE, V = 4, 32, 16, 24
SITES = {"down_norm_up": 2, "mla_rope_q": 1, "mla_rope_kv": 1}


class Block(PlainMLA):
    """As a user writes it: heads first, the shared key row expanded, everything out of place."""

    def __init__(self):
        super().__init__(128, HEADS, 64, 48, NOPE, ROPE, V)


class QueriesReadTwice(Block):
    """The projection is read again after its rotation: nobody may have overwritten it."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().forward(x, cos, sin) + self._query(x).square().mean(-1, keepdim=True)


class Checkpointed(Block):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x + checkpoint(super().forward, x, cos, sin, use_reentrant=False)


def train(function, module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    cos, sin = (t.to(x.dtype) for t in tables("full", x.shape[1], ROPE, device=x.device))
    out = function(x, cos, sin)
    return [out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], grad)]


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]


DRAWS = 4
# A twentieth of a unit in the last place of bfloat16, relative to an output: where eager makes no error at all.
EXACT = torch.finfo(torch.bfloat16).eps / 40


def more_by_chance(count: int) -> float:
    """How many times as large the norm of `count` errors may be as that of others of their distribution: the ratio's
    standard deviation is about 1 / sqrt(count), of which there may be four; a twentieth is for unlike distributions."""
    return 1.05 + 4 / count**0.5


@pytest.fixture
def kernels_serve(request, device):
    request.getfixturevalue("no_kernels" if device == "cpu" else "kernels_of_any_size")
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


CASES = {
    "default": (Block, {}, SITES), "latents kept": (Block, {"keep_latents": True}, SITES),
    "merged": (Block, {"fuse_shared_input_gemms": True, "keep_latents": True}, SITES),
    "measured blocks": (Block, {"autotune": True}, SITES),
    "read twice": (QueriesReadTwice, {}, {"mla_rope_q": 1, "mla_rope_kv": 1}),
    "checkpointed": (Checkpointed, {}, SITES),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_trains_as_exactly_as_eager(kernels_serve, device, case):
    """bf16, and on CUDA another length after the first: eager's error against float64 and no more, but for chance."""
    make, options, sites = CASES[case]
    if device == "cpu" and options.keys() & {"fuse_shared_input_gemms", "autotune"}:
        pytest.skip("an option of CUDA's lowerings")
    exact = make().double().to(device)
    half = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict(half.state_dict())
    with megacpp_compile.record() as report:
        compiled = torch.compile(half, backend=megacpp_compile.backend, options={"strict": True, **options})
        for tokens in (48, 40) if device == "cuda" else (48,):  # dynamic shapes on CPU are the pipeline tests' subject
            found = []
            for _ in range(DRAWS):
                x = torch.randn(2, tokens, 128, device=device).bfloat16()
                grad = torch.randn(2, tokens, 128, device=device).bfloat16()
                want = train(exact, exact, x.double(), grad.double())
                found.append([errors(train(f, half, x, grad), want) for f in (compiled, half)])
            ours, eager = torch.tensor(found).square().mean(0).sqrt().tolist()
            bounds = [more_by_chance(t.numel() * DRAWS) * e + EXACT for t, e in zip(want, eager, strict=True)]
            assert all(a <= b for a, b in zip(ours, bounds, strict=True)), (ours, eager)
    for name, count in sites.items():
        assert {f.passes[name] for f in report.frames if f.grad} == {count}, (name, report)
    if device == "cuda":
        effective = {s.effective for s in report.sites}
        assert effective == {"cuda_triton"}, [(s.pass_name, s.effective, s.reason) for s in report.sites]


@pytest.mark.parametrize("device", DEVICES)
def test_small_sites_are_left_to_inductor(device):
    block = Block().to(device)
    with megacpp_compile.record() as report:
        megacpp_compile.explain(block, torch.randn(2, 8, 128, device=device), *tables("full", 8, ROPE, device=device))
    expected = "small" if device == "cuda" else ""
    assert report.sites and all(s.effective == "reference" and expected in s.reason for s in report.sites)


@pytest.mark.end_to_end
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_batch_of_one(no_kernels, caplog, monkeypatch, dynamic):
    """Torch 2.13's attention patterns fail on it on CPU unless they leave it; the frame is compiled without them, its
    rewrites stay, and no error is logged."""
    monkeypatch.setattr(inductor, "_no_kernel_serves", lambda operands: False)
    torch._dynamo.reset()
    logging.getLogger("torch._subclasses.fake_tensor").addHandler(caplog.handler)
    block, x = Block(), torch.randn(1, 16, 128)
    with megacpp_compile.record() as report:
        compiled = torch.compile(block, backend="megacpp", dynamic=dynamic)
        got = train(compiled, block, x, grad := torch.randn(1, 16, 128))
    logging.getLogger("torch._subclasses.fake_tensor").removeHandler(caplog.handler)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert report.frames[0].captured, report.frames[0].reason
    assert {k: v for k, v in report.counts.items() if v} == SITES
    assert max(errors(got, [t.double() for t in train(block, block, x, grad)])) < 1e-5
