"""Checkpoint regions that choose what to save (`context_fn`): sites fire in them, their policy is asked as eager asks it,
and what a step saves is no more than with Inductor alone."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megacpp_compile import record
from megacpp_compile._torch._registry import release
from tests.corpus.spellings import PlainMLA, tables
from tests.frames import TOLERANCE, check, largest_error, train
from tests.test_pipeline import PassedOn

aten = torch.ops.aten
SITES = {"down_norm_up": 2, "mla_rope_q": 1, "mla_rope_kv": 1}
ATTENTION = (aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default)


def recompute_all(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


def keep_products(ctx, op, *args, **kwargs):
    return op in (aten.mm.default, aten.addmm.default)


def must_keep_attention(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in ATTENTION else CheckpointPolicy.MUST_RECOMPUTE


def every_second_product() -> Callable[..., CheckpointPolicy]:
    """As torchtitan's, which counts."""
    seen: collections.Counter[bool] = collections.Counter()

    def policy(ctx, op, *args, **kwargs):
        seen[ctx.is_recompute] += op is aten.mm.default
        save = op in ATTENTION or (op is aten.mm.default and seen[ctx.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


POLICIES: dict[str, Callable[[], Any]] = {
    "recompute_all": lambda: recompute_all, "keep_products": lambda: keep_products,
    "must_keep_attention": lambda: must_keep_attention, "every_second_product": every_second_product,
}  # fmt: skip


def contexts(policy: Callable[[], Any] | None) -> Callable[[], Any] | None:
    return None if policy is None else lambda: create_selective_checkpoint_contexts(policy())


class Regions(nn.Module):
    """Blocks of latent attention, each in a region of its own; no policy: none is."""

    def __init__(self, policy: Callable[[], Any] | None, blocks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.blocks = nn.ModuleList(PlainMLA() for _ in range(blocks))
        self.contexts = contexts(policy)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for block in self.blocks:
            if self.contexts is None:
                x = x + block(x, cos, sin)
            else:
                x = x + checkpoint(block, x, cos, sin, use_reentrant=False, context_fn=self.contexts)
        return x


def inputs(tokens: int = 12) -> tuple[Tensor, ...]:
    block = PlainMLA()
    x = torch.randn(2, tokens, block.dim, requires_grad=True)
    return x, *tables(block.rope.table, tokens, block.rope_dim)


@pytest.mark.parametrize("name", POLICIES)
def test_sites_fire_inside(name):
    frames = check(Regions(POLICIES[name]), inputs())
    assert frames.fired == SITES


def test_at_a_second_length():
    model, args = Regions(every_second_product), inputs(7)
    frames = check(model, inputs(), dynamic=True)
    assert frames.fired == SITES
    got = train(frames.compiled, model, args)
    assert largest_error(got, train(model, model, args))[0] <= TOLERANCE[torch.float32]
    # Before 2.13 torch fixes the length that a region is traced with.
    assert len(frames.graphs) == 1 or release(torch.__version__) < (2, 13)


def test_the_policy_is_asked_what_eager_asks_it():
    """Of every op in order: a policy may count them."""
    asked: list[Any] = []

    def policy():
        def ask(ctx, op, *args, **kwargs):
            if not ctx.is_recompute:
                asked.append((op, *(tuple(a.shape) for a in args if isinstance(a, Tensor))))
            return CheckpointPolicy.PREFER_RECOMPUTE

        return ask

    model, args = Regions(policy), inputs()
    model(*args)
    eager = asked.copy()
    asked.clear()
    check(model, args)
    assert eager and asked[: len(eager)] == eager


def saved(policy: Callable[[], Any] | None, backend: str) -> tuple[int, dict[str, int]]:
    """Bytes that a step holds for backward beside the weights, and what fired."""
    torch._dynamo.reset()
    model, args = Regions(policy), inputs()
    with record() as report:
        out = torch.compile(model, backend=backend)(*args)
    of_model = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in out.grad_fn.saved_tensors}
    assert all(frame.captured for frame in report.frames)
    return sum(n for at, n in kept.items() if at not in of_model), {k: n for k, n in report.counts.items() if n}


@pytest.mark.exhaustive
def test_no_more_is_saved_than_by_inductor(no_kernels):
    """And what policies save differs: none is taken for another, nor for no region."""
    ours = {}
    for name in ("recompute_all", "every_second_product", "keep_products", "no region"):
        policy = POLICIES.get(name)
        alone, _ = saved(policy, "inductor")
        ours[name], fired = saved(policy, "megacpp")
        assert fired == SITES
        assert ours[name] <= alone, name
    assert ours["recompute_all"] <= ours["every_second_product"] < ours["keep_products"] < ours["no region"]


class Latents(nn.Module):
    """One site, which C++ is made for in a moment."""

    def __init__(self, policy: Callable[[], Any] | None) -> None:
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(16, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, 16, bias=False)
        self.contexts = contexts(policy)

    def step(self, x: Tensor) -> Tensor:
        return self.up(self.norm(self.down(x))).sin().mean(-1)

    def forward(self, x: Tensor) -> Tensor:
        if self.contexts is None:
            return self.step(x).cos()
        return checkpoint(self.step, x, use_reentrant=False, context_fn=self.contexts).cos()


@pytest.mark.end_to_end
def test_torch_s_caches_tell_regions_apart(tmp_path, monkeypatch):
    """The graphs are the same to a letter."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    with functorch_config.patch(enable_autograd_cache=True), inductor_config.patch(fx_graph_cache=True):
        for policy in (None, POLICIES["recompute_all"], POLICIES["recompute_all"]):
            torch._dynamo.reset()
            with record() as report:
                out = torch.compile(Latents(policy), backend="megacpp")(torch.ones(4, 16))
            (frame,) = report.frames
            found.append((frame.cached, sum(t.numel() for t in out.grad_fn.saved_tensors)))
    (_, without), first, second = found
    assert [cached for cached, _ in found] == [False, False, True]
    assert first[1] == second[1] < without


def test_contexts_without_a_policy_leave_the_frame_to_inductor(no_kernels):
    model = Latents(POLICIES["recompute_all"])
    model.contexts = lambda: (PassedOn(), PassedOn())
    with record() as report:
        torch.compile(model, backend="megacpp")(torch.ones(4, 16))
    (frame,) = report.frames
    assert not frame.captured and "context_fn" in frame.reason and "PassedOn" in frame.reason
    assert "create_selective_checkpoint_contexts" in frame.reason
