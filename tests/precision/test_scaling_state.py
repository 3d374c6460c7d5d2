"""A state of delayed scaling that was saved under one wrapping goes on under any other, or says what does not fit."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

import megacpp_compile
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.errors import ScalingStateError
from megacpp_compile.precision import maxima

pytestmark = [
    pytest.mark.usefixtures("float8", "no_kernels"),
    pytest.mark.xdist_group("saved scaling states"),  # one worker trains what is saved
]
DIM, HIDDEN = 32, 48


@pytest.fixture(autouse=True)
def group(monkeypatch, one_rank):
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1)  # as small as others are asked to be
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        make = lambda i, o: nn.Linear(i, o, bias=False, dtype=torch.bfloat16)  # noqa: E731
        self.norm, self.up, self.down = nn.RMSNorm(DIM, dtype=torch.bfloat16), make(DIM, HIDDEN), make(HIDDEN, DIM)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


NAMES = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")]
KEYS = {f"{name}:{kind}" for name in NAMES for kind in "xwg"}
OPTIONS = {"precision": PrecisionPlan(rules=(("*", "fp8_delayed"),), gate=False)}


def compiled(model):
    return torch.compile(model, backend="megacpp", options=OPTIONS)


def by_blocks(model):
    return megacpp_compile.compile(model, options=OPTIONS)


def with_checkpoints(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return model


def sharded(model, *blocks):
    mesh = init_device_mesh("cpu", (1,))  # where there is a GPU FSDP2 would take it
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parametrised(model):
    for block in model.blocks:
        parametrize.register_parametrization(block.up, "weight", nn.Identity())
    return model


# Name -> (what the state is asked of, what runs) of a plain model.
WRAPPED = {
    "plain": lambda model: (model, compiled(model)),
    "compiled": lambda model: (run := compiled(model), run),
    "checkpoints": lambda model: (with_checkpoints(model), compiled(model)),
    "ddp": lambda model: (ddp := nn.parallel.DistributedDataParallel(model), compiled(ddp)),
    "ddp in buckets": lambda model: (
        ddp := nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001), compiled(ddp)
    ),
    "by blocks": lambda model: (model, by_blocks(model)),
    "compiled ddp": lambda model: (run := compiled(nn.parallel.DistributedDataParallel(model)), run),
    "whole fsdp2": lambda model: (sharded(model), compiled(model)),
    "fsdp2 by blocks": lambda model: (sharded(model, *model.blocks), by_blocks(model)),
    "fsdp2": lambda model: (sharded(model, *model.blocks), compiled(model)),
    "parametrised": lambda model: (parametrised(model), compiled(model)),
}
PAIRS = [("plain", other) for other in WRAPPED]
PAIRS += [(one, "plain") for one in WRAPPED if one != "plain"] + [("fsdp2", "compiled ddp"), ("compiled ddp", "fsdp2")]


def step(run, seed):
    x = torch.randn(2, 16, DIM, generator=torch.Generator().manual_seed(seed)).bfloat16()
    y = run((x * 2**seed).requires_grad_())
    y.backward(torch.cos(x.float()).bfloat16() * 1e-3)
    return y.detach()


def wrapped(how, state=None):
    torch._dynamo.reset()
    model, run = WRAPPED[how](Model())
    if state is not None:
        megacpp_compile.load_scaling_state(model, state)
    return model, run


@pytest.fixture(scope="module")
def saved():
    """Wrapping -> (the state behind three steps, what the next one gives)."""

    @functools.cache
    def train(how):
        model, run = wrapped(how)
        for seed in range(3):
            step(run, seed)
        state = megacpp_compile.scaling_state(model)
        return {key: column.clone() for key, column in state.items()}, step(run, 1)

    return train


@pytest.fixture(scope="module")
def anew():
    """What that step gives as the first of all, whatever the wrapping."""
    return functools.cache(lambda: step(wrapped("plain")[1], 1))


@pytest.mark.end_to_end
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_saved_under_one_wrapping_and_loaded_under_another(saved, anew, one, other):
    """The step behind it gives the bits that it gives where nothing was saved, and pushes the past on."""
    state, want = saved(one)
    assert set(state) == KEYS
    again, run = wrapped(other, state)
    got = step(run, 1)
    assert torch.equal(got, want) and not torch.equal(anew(), want)
    after = megacpp_compile.scaling_state(again)
    assert set(after) == KEYS
    assert all(torch.equal(after[key][1:], state[key][:-1]) for key in KEYS)
    megacpp_compile.load_scaling_state(again, state)  # behind a step, it counts as before one
    assert all(map(torch.equal, megacpp_compile.scaling_state(again).values(), map(state.get, after)))
    assert torch.equal(step(run, 1), want)


@pytest.mark.end_to_end
def test_what_was_loaded_last_counts_before_fsdp2_has_gathered_anything():
    column = torch.arange(1.0, maxima.HISTORY + 2)
    model, run = wrapped("fsdp2", dict.fromkeys(KEYS, column))
    megacpp_compile.load_scaling_state(model, {key: 2 * column for key in KEYS if key.endswith("w")})
    step(run, 0)
    state = megacpp_compile.scaling_state(model)
    assert all(torch.equal(state[key][1:], (2 if key.endswith("w") else 1) * column[:-1]) for key in KEYS)


@pytest.mark.end_to_end
def test_a_tied_weight_is_saved_once_and_loaded_by_any_of_its_names():
    model = Model()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    run = compiled(model)
    step(run, 0)
    state = megacpp_compile.scaling_state(model)
    both = ("x", "x.1", "w", "g", "g.1")  # of the weight there is one payload
    assert {key for key in state if "up" in key} == {f"blocks.0.up.weight:{kind}" for kind in both}
    column = torch.arange(1.0, maxima.HISTORY + 2)
    megacpp_compile.load_scaling_state(model, {"blocks.1.up.weight:g.1": column})
    assert torch.equal(megacpp_compile.scaling_state(model)["blocks.0.up.weight:g.1"], column)


@pytest.mark.end_to_end
@pytest.mark.parametrize("how", WRAPPED)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(how):
    model, _ = wrapped(how)
    column = torch.ones(maxima.HISTORY + 1)
    wrong = {
        "blocks.0.norm.weight:x": "no linear's weight, but of shape (32,)",
        "blocks.0.up.weight:y": "does not end with a tensor of a linear, :x, :w, :g",
        "module.blocks.0.up.weight:x": "no parameter of the model (the closest is blocks.0.up.weight)",
        "head:x": "no parameter of the model", "blocks.1.up.weight:g": f"not a tensor of {maxima.HISTORY + 1} numbers",
    }
    state, before = dict.fromkeys([*KEYS, *wrong], column), len(maxima.AWAITED)
    with pytest.raises(ScalingStateError) as caught:
        megacpp_compile.load_scaling_state(model, state | {"blocks.1.up.weight:g": column[1:]})
    assert set(caught.value.lines) == {f"{key}: {why}" for key, why in wrong.items()}
    assert len(maxima.AWAITED) <= before and all(not maxima.LOADED.get(p) for p in model.parameters())
