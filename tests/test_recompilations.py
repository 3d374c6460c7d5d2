"""What compiles a frame again: no more than what Dynamo alone compiles again, and the report says what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import LocalSource
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves, tree_map

from megacpp_compile import record
from megacpp_compile._torch._registry import release
from megacpp_compile.backends._lower import _Hole, _trace
from megacpp_compile.lowerings._registry import choose, semantic_ops
from megacpp_compile.targets import CPU
from tests.lowerings.cases import CASES

DIM = 24


class Adapter(nn.Module):
    """A low-rank adapter as trainers write it: on or off, with a factor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(DIM, 3, bias=False), nn.Linear(3, DIM, bias=False)
        self.enabled, self.scale = True, 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x)) * self.scale if self.enabled else x


class Block(nn.Module):
    """A low rank that is rewritten, with dropout, an adapter and a mask behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(DIM, 6), nn.RMSNorm(6), nn.Linear(6, DIM)
        self.adapter, self.dropout = Adapter(), nn.Dropout(0.25)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.adapter(self.up(self.norm(self.down(x)))))
        if mask is None:
            return x
        scores = x @ x.transpose(-1, -2)
        return (scores.masked_fill(~mask, -1e9) if mask.dtype == torch.bool else scores + mask).softmax(-1) @ x


def tokens(batch: int = 2, length: int = 6) -> Tensor:
    return torch.randn(batch, length, DIM)


def triangle(dtype: torch.dtype = torch.bool, length: int = 6) -> Tensor:
    lower = torch.ones(length, length).tril()
    return lower.bool() if dtype == torch.bool else lower.log().to(dtype)


def reload(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def toggle(model: Any) -> None:
    model.adapter.enabled = not model.adapter.enabled


def scale(model: Any) -> None:
    model.adapter.scale += 0.25


def freeze(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def same(model: nn.Module) -> None:
    pass


# What happens before a call -> what it does to the model, the call's inputs, and the guard that fails by it, if any.
EVENTS: dict[str, tuple[Callable[[Any], Any], Callable[[], tuple[Any, ...]], str]] = {
    "first": (same, lambda: (tokens(),), "-"),
    "again": (same, lambda: (tokens(),), ""),
    "weights loaded in place": (reload, lambda: (tokens(),), ""),
    "a mask": (same, lambda: (tokens(), triangle()), "mask is no longer None"),
    "a mask's dtype": (same, lambda: (tokens(), triangle(torch.float32)), "mask is Float, and was Bool"),
    "an adapter off": (toggle, lambda: (tokens(),), "`self.adapter.enabled == True` no longer holds"),
    "an adapter on": (toggle, lambda: (tokens(),), ""),
    "eval()": (nn.Module.eval, lambda: (tokens(),), "`self.dropout.training == True` no longer holds"),
    "train()": (nn.Module.train, lambda: (tokens(),), ""),
    "a second length": (same, lambda: (tokens(2, 9),), "x has size 9 in dimension 1, and had 6"),
    "a third length": (same, lambda: (tokens(2, 7),), ""),
    "a second batch": (same, lambda: (tokens(3, 7),), "x has size 3 in dimension 0, and had 2"),
    "a third batch": (same, lambda: (tokens(5, 8),), ""),
    "a factor": (scale, lambda: (tokens(5, 8),), "`self.adapter.scale == 0.5` no longer holds"),
    "another factor": (scale, lambda: (tokens(5, 8),), ""),
    "a frozen weight": (freeze, lambda: (tokens(5, 8),), "self.down.weight requires no gradient, and did"),
}


def compilations(backend: str) -> tuple[dict[str, int], list[str], str]:
    """(event -> graphs that its call compiled, why each frame of ours was compiled again, the report's summary)"""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, found, before = Block(), {}, 0
    compiled = torch.compile(model, backend=backend)
    with torch._dynamo.config.patch(recompile_limit=len(EVENTS)), record() as report:
        for name, (change, inputs, _) in EVENTS.items():
            change(model)
            compiled(*inputs()).square().mean().backward()
            found[name], before = counters["stats"]["unique_graphs"] - before, counters["stats"]["unique_graphs"]
    return found, [frame.recompiled or "-" for frame in report.frames], report.summary()


@pytest.mark.end_to_end
def test_no_more_than_under_dynamo_alone_and_the_report_says_why(no_kernels):
    """Which is the least that any backend has, Inductor among them."""
    ours, reasons, text = compilations("megacpp")
    alone, none, _ = compilations("eager")
    assert not none and {name: n for name, n in ours.items() if n > alone[name]} == {}
    expected = [why for _, _, why in EVENTS.values() if why]
    again = [why for why in reasons if why != "-"]
    assert sum(ours.values()) == len(reasons) and len(again) == len(reasons) - 1 >= 7
    if release(torch.__version__) >= (2, 13):  # which has these words for its guards, and one more
        assert reasons == expected
        assert ours == {name: int(bool(why)) for name, (_, _, why) in EVENTS.items()}
    assert f"{len(again)} compiled again" in text.splitlines()[0] and f"compiled again ({len(again)}):" in text
    assert f"forward ({__file__.rpartition('/')[2]}" in text and again[0] in text


CALLS = [("down_norm_up", "latent_before_rope_key"), ("down_norm_up_backward", "latent_before_rope_key"),
         ("norm_linear", "biases"), ("causal_conv1d", "taps_3"), ("causal_conv1d_backward", "taps_3")]  # fmt: skip


@pytest.mark.parametrize(("op", "label"), CALLS, ids=[op for op, _ in CALLS])
def test_a_lowering_leaves_the_number_of_tokens_a_symbol(op, label):
    """Where C++ asks a symbolic size for a number, each length is compiled anew."""
    semantic_ops()  # registers them
    args = CASES[op][label](torch.randn, torch.float32)
    tokens = next(x for x in tree_leaves(args) if isinstance(x, Tensor)).shape[1]
    sizes = ShapeEnv()
    mode, fakes = FakeTensorMode(shape_env=sizes), []

    def fake(x):
        if not isinstance(x, Tensor):
            return x
        dims = [DimDynamic.DUCK if size == tokens else DimDynamic.STATIC for size in x.shape]
        context = StatelessSymbolicContext(dims, constraint_sizes=[None] * x.dim())
        fakes.append(mode.from_tensor(x, source=LocalSource(f"x{len(fakes)}"), symbolic_context=context))
        return _Hole(len(fakes) - 1)

    holes = tree_map(fake, args)
    call = getattr(torch.ops.megacpp, op).default
    with enable_python_dispatcher():  # as Inductor's passes run
        body = choose(call, CPU.name, tree_map(lambda x: fakes[x.index] if isinstance(x, _Hole) else x, holes)).body
        _trace(body, holes, fakes, CPU)
    assert any(isinstance(size, torch.SymInt) for x in fakes for size in x.shape) and not sizes.replacements
