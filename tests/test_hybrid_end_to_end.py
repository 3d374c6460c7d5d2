"""Layers of experts, Mamba-2, delta rules and linear attention through the whole compiler on a GPU, with the kernels,
however small the tensors.

On CPU the tests of each pass compare results; what only a GPU shows is here: that its kernels serve in what Inductor
compiles, that they are as exact, and that nobody waits for the device.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megacpp_compile
from benchmarks.models import Scan
from tests.corpus.delta.block import CHUNKED, LINEAR, PlainDelta
from tests.corpus.delta.block import TOKENS as BY_TOKEN
from tests.lowerings.gluon_kernels import LEAST_CHUNKS, needs_hopper, told
from tests.test_end_to_end import EXACT, ON_CUDA, more_by_chance

pytestmark = ON_CUDA
DIM, HIDDEN, EXPERTS, CHOICES, TOKENS = 64, 96, 8, 2, 200


@pytest.fixture(autouse=True)
def kernels_serve(kernels_of_any_size):
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Routed by scores that are given, so that a wider model routes alike."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        gates, indices = scores.softmax(-1).topk(CHOICES, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(indices == number)
            out.index_add_(0, token, expert(x[token]) * gates[token, choice, None].to(x.dtype))
        return out


class Mixer(nn.Module):
    def __init__(self, heads: int = 4, p: int = 16, n: int = 16, groups: int = 2, chunk: int = 16):
        super().__init__()
        self.p, self.n, self.inner, self.states, self.scan = p, n, heads * p, groups * n, Scan(chunk)
        mixed = self.inner + 2 * self.states
        self.in_proj = nn.Linear(DIM, self.inner + mixed + heads, bias=False)
        self.conv = nn.Conv1d(mixed, mixed, 4, padding=3, groups=mixed)
        self.dt_bias, self.A_log = nn.Parameter(torch.randn(heads)), nn.Parameter(torch.randn(heads))
        self.weight = nn.Parameter(torch.ones(self.inner))
        self.out_proj = nn.Linear(self.inner, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        heads = self.dt_bias.numel()
        z, mixed, dt = self.in_proj(x).split([self.inner, self.inner + 2 * self.states, heads], -1)
        mixed = F.silu(self.conv(mixed.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        u, b, c = mixed.split([self.inner, self.states, self.states], -1)
        u, b, c = u.unflatten(-1, (-1, self.p)), b.unflatten(-1, (-1, self.n)), c.unflatten(-1, (-1, self.n))
        dt = F.softplus(dt.to(wide) + self.dt_bias.to(wide))
        y = self.scan(u.to(wide), dt, -self.A_log.to(wide).exp(), b.to(wide), c.to(wide)).flatten(-2)
        h = y * F.silu(z.to(wide))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.out_proj(self.weight * h.to(x.dtype))


DRAWS = 6


def results(function, module: nn.Module, args: tuple[Tensor, ...], grad: Tensor) -> list[Tensor]:
    x = args[0].detach().requires_grad_()
    out = function(x, *args[1:])
    return [out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], grad)]


def compare(make, args: tuple[Tensor, ...], sites: dict[str, int], bound: float, dynamic: bool = False):
    """Outputs and gradients in bfloat16 err at most `bound` times as much as eager's, by float64; gives the step.

    Over several draws of the input: a gradient of a few numbers (one a head) is more or less exact by chance, by how
    much its numbers tell (`more_by_chance`).
    """
    exact = make().double().cuda()
    half = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict(half.state_dict())
    with megacpp_compile.record() as report:
        how = {"backend": "megacpp", "options": {"strict": True}, "dynamic": dynamic or None}
        compiled = torch.compile(half, fullgraph=True, **how)
        errors = []
        for _ in range(DRAWS):
            args = (torch.randn_like(args[0]), *args[1:])
            grad = torch.randn_like(args[0])
            want = results(exact, exact, tuple(t.double() for t in args), grad.double())
            errors.append([
                [(t.double() - wide).square().sum() for t, wide in zip(found, want, strict=True)]
                for found in (results(compiled, half, args, grad), results(half, half, args, grad), [0 * t for t in want])
            ])
    ours, theirs, norms = torch.tensor(errors).sum(0).sqrt()
    for mine, eager, norm, wide in zip(ours, theirs, norms, want, strict=True):
        allowed = bound if wide.numel() > 100 else more_by_chance(wide.numel() * DRAWS)
        assert mine <= allowed * eager + EXACT * norm, (mine / norm, eager / norm, wide.shape)
    assert {name: count for name, count in report.counts.items() if count} == sites
    assert {s.effective for s in report.sites} == {"cuda_triton"}, [(s.pass_name, s.reason) for s in report.sites]
    return lambda: results(compiled, half, args, grad)


def never_waits(step) -> None:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def random(*lengths: int) -> Tensor:
    return torch.randn(*lengths, DIM, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("routing", ["spread", "two experts only"])
def test_experts(routing):
    x = random(TOKENS)
    scores = torch.randn(TOKENS, EXPERTS, device="cuda")
    if routing != "spread":
        scores[:, [1, 5]] += 100
    never_waits(compare(Experts, (x, scores), {"moe": 1}, 1.25))


MIXERS = {"ssd_scan": 1, "causal_conv1d": 1, "gated_rms_norm": 1}


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("batch, tokens", [(1, 16), (2, 80)])
def test_mixer(groups, batch, tokens):
    never_waits(compare(lambda: Mixer(groups=groups), (random(batch, tokens),), MIXERS, 1.35))


@needs_hopper
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_mixer_in_gluon(monkeypatch, dynamic):
    """Of sizes that Gluon's kernels of the scan take, in Inductor's graphs, with tokens that are known or symbolic.
    Gradients that the mixer joins are written where they are joined."""
    from megacpp_compile.lowerings.ssd_scan import _hopper

    if _hopper.kernels.missing:
        pytest.skip(_hopper.kernels.missing)
    monkeypatch.setattr(LEAST_CHUNKS, 0)
    launched, walk, others = [], "ssd_walk_hopper", ["ssd_scores_grad_hopper", "ssd_key_grad_hopper"]
    for name in (walk, *others):
        monkeypatch.setattr(_hopper, name, told(getattr(_hopper, name), launched))
    joined, backward = [], _hopper.backward
    monkeypatch.setattr(_hopper, "backward", lambda *args: joined.append(args[-1]) or backward(*args))
    step = compare(lambda: Mixer(heads=8, p=64, n=128, chunk=64), (random(2, 320),), MIXERS, 1.35, dynamic=dynamic)
    launched.clear()
    never_waits(step)
    assert launched == [walk, walk, walk, *others] and not _hopper.kernels.missing
    assert joined and all(into is not None for into in joined)


DELTA = {name: (CHUNKED[name], {"chunk": 64}, 192, {"gated_delta_rule": 1}) for name in (
    "rows_in_place", "solved_at_once", "no_gate_row_by_row", "channel_gates",
)}  # fmt: skip
DELTA |= {name: (BY_TOKEN[name], {}, 24, {"token_loop": 1}) for name in (
    "sums_of_products", "einsums_channel_gates", "no_gate",
)}  # fmt: skip


def delta(spelling, **sizes):
    return lambda: PlainDelta(spelling, dim=DIM, groups=2, heads=4, width=32, values=32, wide=True, **sizes)


@pytest.mark.parametrize("name", DELTA)
def test_delta_rules(name):
    spelling, sizes, tokens, sites = DELTA[name]
    never_waits(compare(delta(spelling, **sizes), (random(2, tokens),), sites, 1.5))


def test_a_linear_attention_token_by_token():
    compare(delta(LINEAR["rate_by_token"]), (random(2, 24),), {"token_loop": 1}, 1.5)
