"""Time against the memory of activations: the stack of `stack.py` under Inductor's budgets, checkpoints and policies.

"saved MiB" is for all layers; the rows of interest are those that save alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import limits
from benchmarks.ceilings import Work
from benchmarks.harness import STEP, Case, Contestant, Settings, run_case, training, wider
from benchmarks.harness import reference as widely
from benchmarks.modules import leaves_of
from benchmarks.subjects.block import QUICK, SIZES, inputs
from benchmarks.subjects.stack import stack
from benchmarks.variants import inductor, ours

POLICIES: dict[str, Any] = {
    "none": "none",
    "auto": "auto",
    "auto, 2 % of time": {"auto": 0.02},
    "selective": "selective",
    "selective, last layer too": {"last_layer": "selective"},
    "full": "full",
    "full, norms and last layer too": {
        **dict.fromkeys(("ablock", "eblock"), "full_plus_norms"),
        "last_layer": "full_plus_norms",
    },
    # From 0.46 on: what saves as much as Inductor's 0.6, 0.4 and 0.2, or a little less.
    **{f"budget {b}": b for b in (0.8, 0.46, 0.31, 0.155)},
    # Beside "selective" and "full" these show what the copies cost.
    "selective, inputs in main memory": {"offload": "inputs"},
    "full, inputs in main memory": {"ablock": "full", "eblock": "full", "offload": "inputs"},
    "selective, all in main memory": {"offload": "all"},
}


class Checkpointed(nn.Module):
    """Every layer under `torch.utils.checkpoint`, as it is written by hand."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.model.layers:  # type: ignore[union-attr]
            x = checkpoint(layer, x, cos, sin, use_reentrant=False)
        return x


def budgeted(budget: float) -> Callable[[nn.Module], Callable[..., Any]]:
    """Inductor under torch's global budget, which is read as it compiles. A backend of its own: Dynamo takes code that
    the same backend has compiled before, whatever the budget was."""

    def backend(gm: Any, args: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(activation_memory_budget=budget):
            return compile_fx(gm, args)

    return lambda model: torch.compile(model, backend=backend)


Rows = dict[str, tuple[str, Callable[[nn.Module], Callable[..., Any]]]]


def cases(settings: Settings) -> Iterator[Case]:
    rows: Rows = {
        "eager": ("eager", lambda model: model),
        "Inductor": ("inductor", inductor),
        **{f"Inductor, budget {b}": ("inductor", budgeted(b)) for b in (0.8, 0.6, 0.4, 0.2)},
        "Inductor, whole blocks by hand": ("inductor", lambda model: inductor(Checkpointed(model))),
        "megacpp": ("ours", ours({})),
        **{f"megacpp, {name}": ("ours", ours({"policy": policy})) for name, policy in POLICIES.items()},
        "Inductor, again": ("control", inductor),
    }
    yield case("remat", settings, *problem(settings), rows)


def problem(settings: Settings) -> tuple[nn.Module, list[Tensor], dict[str, Any]]:
    """(model, its inputs, sizes)."""
    size, hidden, layers = (QUICK[0], 96, 2) if settings.quick else (SIZES[0], 5632, 6)
    model = stack(size, hidden, layers).to(settings.device, torch.bfloat16)
    return model, list(inputs(size, settings)), {"size": size, "hidden": hidden, "layers": layers}


def case(
    subject: str, settings: Settings, model: nn.Module, args: list[Tensor], chosen: dict[str, Any], rows: Rows
) -> Case:
    size, hidden, layers = chosen["size"], chosen["hidden"], chosen["layers"]
    leaves = leaves_of(model, args[0])
    with torch.no_grad():
        grads = [torch.randn_like(model(*args))]

    def wide() -> list[Tensor]:
        other = stack(size, hidden, layers).to(settings.device, wider(torch.bfloat16))
        other.load_state_dict(model.state_dict())
        return widely(other, args, lambda given: leaves_of(other, given[0]), grads)

    def build(compiler: Callable[[nn.Module], Callable[..., Any]]) -> Callable[[], Any]:
        return lambda: training(compiler(model), args, leaves, grads)

    contestants = [Contestant(name, kind, build(make)) for name, (kind, make) in rows.items()]
    mlp = [(size.dim, hidden), (size.dim, hidden), (hidden, size.dim)]
    linear = limits.linear_flops(size.batch * size.tokens, [*size.gemms, *mlp])
    work = {STEP: Work(flops=layers * (3 * linear + 3.5 * size.attention_flops()))}
    sizes = {**dataclasses.asdict(size), "hidden": hidden, "layers": layers}
    names = ["output", "grad x", *(f"grad {name}" for name, _ in model.named_parameters())]
    name = f"{layers} layers of {size.name}"
    return Case(subject, name, sizes, work, wide, contestants, torch.bfloat16, names)


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    # Every row compiles the same code anew.
    with torch._dynamo.config.patch(recompile_limit=64):
        for case in cases(settings):
            yield from run_case(case, settings)
