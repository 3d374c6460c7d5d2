"""What rounding the operands of linears to float8 does to the loss of a small model, over seeds; on any machine.

    python -m benchmarks.rounding_loss                  # 4 layers of width 128, 300 steps, 6 seeds: some 20 minutes
    python -m benchmarks.rounding_loss --steps 20 --seeds 2     # a minute

The model of examples/train_fp8.py is trained in float32, with linears outside of the head as the traced recipe has
them (`megacpp::fp8_linear`, its reference): e4m3 forward, gradients in e4m3 and in e5m2. Beside them is float32 from
parameters that differ by a thousandth: what chance alone does. Figures are mean losses of the last 20 steps, of that
of float32 with the same seed and the same batches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import megacpp_compile.lowerings.fp8_linear  # noqa: F401  the ops
from benchmarks import arguments

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from runs import scattered, train
from train_mla import ModelConfig, PlainLM, standard_library_text

CONFIG = ModelConfig(
    dim=128, layers=4, heads=4, q_rank=96, kv_rank=48, nope_dim=32, rope_dim=16, v_dim=32, mlp_dim=352
)
BATCHES = {"batch": 4, "length": 128}
FORMATS = ("e4m3", "e5m2")


def in_fp8(linear: nn.Linear, gradients: str) -> Callable[[Tensor], Tensor]:
    """The forward of `linear` with its operands rounded, and in backward its output's gradient."""
    ops = torch.ops.megacpp

    def forward(x: Tensor) -> Tensor:
        w = linear.weight
        rounded = (*ops.fp8_quantize(x.detach(), "e4m3"), *ops.fp8_quantize(w.detach(), "e4m3"))
        biases = [] if linear.bias is None else [linear.bias]
        return ops.fp8_linear(x, [w], *rounded, biases, gradients, x.dtype)[0]

    return forward


def final_loss(text: Tensor, seed: int, steps: int, gradients: str = "", noise: float = 0.0) -> float:
    """gradients: their format, "" for float32 throughout. noise: relative, of the parameters at the start."""
    draw = torch.Generator().manual_seed(seed + 999)

    def build() -> nn.Module:
        model = PlainLM(CONFIG)
        with torch.no_grad():
            for p in model.parameters() if noise else ():
                p.mul_(1 + noise * torch.randn(p.shape, generator=draw))
        for name, module in model.named_modules():
            if gradients and isinstance(module, nn.Linear) and "head" not in name:
                module.forward = in_fp8(module, gradients)  # type: ignore[method-assign, assignment]
        return model

    return trained(build, text, seed, steps)


def trained(build: Callable[[], nn.Module], text: Tensor, seed: int, steps: int) -> float:
    """The final loss of what `build` makes, trained in float32 on CPU. Raises RuntimeError where training fails."""
    how = argparse.Namespace(device="cpu", dtype=torch.float32, steps=steps, lr=1e-3, seed=seed, **BATCHES)
    run = train("eager", build, text, how, decay=True)
    if run.failed:
        raise RuntimeError(run.failed)
    return run.final_loss


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.parser("benchmarks.rounding_loss", __doc__)
    parser.add_argument("--seeds", type=int, default=6, help="seeds, from 0 on")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of a run")
    args = parser.parse_args(argv)
    text = standard_library_text()
    ratios: dict[str, list[float]] = {name: [] for name in ("float32, nearly the same parameters", *FORMATS)}
    for seed in range(args.seeds):
        plain = final_loss(text, seed, args.steps)
        rounded = [final_loss(text, seed, args.steps, gradients) for gradients in FORMATS]
        losses = [final_loss(text, seed, args.steps, noise=1e-3), *rounded]
        for found, loss in zip(ratios.values(), losses, strict=True):
            found.append(loss / plain)
        shares = ", ".join(f"{found[-1]:.4f}" for found in ratios.values())
        print(f"seed {seed}: float32 {plain:.4f}, of it {shares}", flush=True)
    for name, found in ratios.items():
        print(f"{name}: final loss {scattered(found)} of float32's")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
