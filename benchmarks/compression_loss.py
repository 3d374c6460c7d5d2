"""What gradients from random projections do to the loss of a small model, over seeds; on any machine.

    python -m benchmarks.compression_loss                       # 4 layers of width 128, 300 steps, 5 seeds: ten minutes
    python -m benchmarks.compression_loss --feed-forward gelu   # with GELU layers in the place of SwiGLU: some minutes
    python -m benchmarks.compression_loss --steps 20 --seeds 1  # seconds

The model of examples/train_fp8.py is trained in float32, with linears of its feed-forward layers as the option
`compress` has them (`megacpp::compressed_linear`, each with a projection of its own input): the down-projection alone,
drawn once or anew with each update, and all three. Figures are mean losses of the last 20 steps, of that of exact
gradients with the same seed and the same batches.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megacpp_compile.lowerings.compressed_linear  # noqa: F401  the op
from benchmarks import arguments
from benchmarks.rounding_loss import CONFIG, PlainLM, scattered, standard_library_text, trained
from megacpp_compile.config.compression import CompressionPlan

# Row -> (globs over names, whether each update draws anew).
ROWS = {
    "down-projections, drawn once": ("*.down_proj", False),
    "down-projections, drawn with each update": ("*.down_proj", True),
    "all of the feed-forward layers, drawn once": ("*.mlp.*", False),
}

FEED_FORWARDS = ("swiglu", "gelu")


class GELULayer(nn.Module):
    """The plain feed-forward layer, four times as wide as the model."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(dim, 4 * dim, bias=False)
        self.down_proj = nn.Linear(4 * dim, dim, bias=False)
        for p in self.parameters():
            nn.init.normal_(p, std=0.02)  # as PlainLM has its own

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))  # type: ignore[no-any-return]


def compressed(linear: nn.Linear, ratio: float, seed: int, redraw: bool) -> Callable[[Tensor], Tensor]:
    """The forward of `linear` with a projection of its input kept in its place."""
    rank = CompressionPlan(("*",), ratio).rank(linear.in_features)

    def forward(x: Tensor) -> Tensor:
        w, b = linear.weight, linear.bias
        draw = w.detach().view(torch.int32).sum() if redraw else None
        (y,), _ = torch.ops.megacpp.compressed_linear(x, [w], [] if b is None else [b], draw, rank, seed)
        return y  # type: ignore[no-any-return]

    return forward


def final_loss(
    text: Tensor, seed: int, steps: int, names: str = "", redraw: bool = False, ratio: float = 0.25,
    feed_forward: str = "swiglu",
) -> float:  # fmt: skip
    """names: a glob of the linears to compress, "" for exact gradients. feed_forward: of FEED_FORWARDS."""

    def build() -> nn.Module:
        model = PlainLM(CONFIG)
        for block in model.blocks if feed_forward == "gelu" else ():
            block.mlp = GELULayer(CONFIG.dim)
        for number, (name, module) in enumerate(model.named_modules()):
            if isinstance(module, nn.Linear) and fnmatch.fnmatchcase(name, names):
                own = compressed(module, ratio, 1000 * seed + number, redraw)
                module.forward = own  # type: ignore[method-assign, assignment]
        return model

    return trained(build, text, seed, steps)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.parser("benchmarks.compression_loss", __doc__)
    parser.add_argument("--seeds", type=int, default=5, help="seeds, from 0 on")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of a run")
    parser.add_argument("--ratio", type=float, default=0.25, help="channels kept of those of the input")
    parser.add_argument("--feed-forward", choices=FEED_FORWARDS, default="swiglu", help="what the layers are")
    args = parser.parse_args(argv)
    text = standard_library_text()
    ratios: dict[str, list[float]] = {name: [] for name in ROWS}
    for seed in range(args.seeds):
        exact = final_loss(text, seed, args.steps, feed_forward=args.feed_forward)
        for name, (names, redraw) in ROWS.items():
            how = (names, redraw, args.ratio, args.feed_forward)
            ratios[name].append(final_loss(text, seed, args.steps, *how) / exact)
        shares = ", ".join(f"{found[-1]:.4f}" for found in ratios.values())
        print(f"seed {seed}: exact {exact:.4f}, of it {shares}", flush=True)
    for name, found in ratios.items():
        print(f"{name}: final loss {scattered(found)} of exact gradients'")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
