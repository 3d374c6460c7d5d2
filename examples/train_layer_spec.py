"""Train one model built from Transformer Engine's classes and from plain PyTorch's of the same names; compare losses.

`te_layer_spec()` and `NativeLayerSpec()` have the same seven keys, and their classes the same arguments and parameters:
the model below is written once, and every run starts from the same weights. A run is named SPEC+BACKEND, with a dtype
of its own behind a colon; what bfloat16 itself costs is the distance to the first, in float32. The optimizer holds
float32 copies of parameters in bfloat16. The text is Python's own standard library.

    python examples/train_layer_spec.py --backends native+eager:float32 native+eager native+megacpp    # anywhere
    python examples/train_layer_spec.py --size large --json te.json        # a GPU, with Transformer Engine
"""

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from runs import Run, arguments, parsed, plot, recorded, show
from torch import Tensor, nn
from train_mla import standard_library_text

from megacpp_compile import NativeLayerSpec, te_layer_spec
from megacpp_compile.precision.layer_spec import LayerSpec

SPECS: dict[str, Callable[[], LayerSpec]] = {"native": NativeLayerSpec, "te": te_layer_spec}


@dataclasses.dataclass(frozen=True)
class Config:
    dim: int = 128
    layers: int = 2
    heads: int = 4
    mlp_dim: int = 256
    vocab: int = 256  # bytes


SIZES = {"tiny": (Config(), 2, 64), "large": (Config(2048, 12, 16, 5632), 2, 4096)}  # config, sequences, bytes of each


class Block(nn.Module):
    def __init__(self, spec: dict, c: Config, device: str):
        super().__init__()
        self.heads = c.heads
        shared = {"bias": False, "params_dtype": torch.float32, "device": device}
        self.qkv = spec["linear_qkv"](c.dim, 3 * c.dim, normalization="RMSNorm", **shared)
        self.attention = spec["attention"](c.heads, c.dim // c.heads, qkv_format="bshd", attn_mask_type="causal")
        self.proj = spec["linear_proj"](c.dim, c.dim, **shared)
        self.mlp = spec["layernorm_mlp"](c.dim, c.mlp_dim, normalization="RMSNorm", activation="swiglu", **shared)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        x = x + self.proj(self.attention(q, k, v))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, spec: dict, c: Config, device: str = "cpu"):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab, c.dim, device=device)
        self.blocks = nn.ModuleList(Block(spec, c, device) for _ in range(c.layers))
        self.norm = spec["norm"](c.dim, params_dtype=torch.float32, device=device)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.embedding.weight)


def built(name: str, c: Config, device: str) -> nn.Module:
    """The model of a run, with the weights that plain PyTorch's classes draw on CPU under the current seed."""
    weights = Model(NativeLayerSpec(), c).state_dict()
    nn.init.normal_(weights["embedding.weight"], std=0.02)
    spec = SPECS[name.partition("+")[0]]()
    missing = [f"{key}: {why}" for key, why in spec.reasons.items() if spec[key] is None]
    if missing:
        raise RuntimeError(missing[0])
    model = Model(spec, c, device)
    left = model.load_state_dict(weights, strict=False)
    if unlike := [key for key in (*left.missing_keys, *left.unexpected_keys) if not key.endswith("_extra_state")]:
        raise RuntimeError(f"the classes differ in their parameters: {', '.join(unlike)}")
    return model


def parse_arguments() -> argparse.Namespace:
    names = ("native+eager:float32", "native+eager", "native+megacpp", "te+eager")
    parser = arguments(__doc__ or "", "train_layer_spec.png", steps=300, lr=3e-4, backends=names)
    size = "large" if torch.cuda.is_available() else "tiny"
    parser.add_argument("--size", default=size, choices=list(SIZES), help="large: 12 layers of width 2048")
    how_far = "largest mean relative difference of losses that runs after the second may have, of the second's own"
    parser.add_argument("--ratio", type=float, default=2.0, help=f"{how_far} to the first (2)")
    args = parsed(parser)
    if unknown := [name for name in args.backends if name.partition("+")[0] not in SPECS or "+" not in name]:
        parser.error(f"a run is native+BACKEND or te+BACKEND, not {unknown[0]!r}")
    args.config, args.batch, args.length = SIZES[args.size]
    args.dtype = torch.bfloat16
    return args


def distance(run: Run, reference: Run) -> float:
    """Mean over steps of the difference of losses, over the reference's."""
    apart = [abs(a - b) / abs(b) for a, b in zip(run.losses, reference.losses, strict=False)]
    return sum(apart) / len(apart) if apart else float("nan")


def write(path: Path, args: argparse.Namespace, runs: list[Run]) -> None:
    cuda = args.device.startswith("cuda")
    about = {
        "device": torch.cuda.get_device_name(args.device) if cuda else platform.machine(),
        "torch": torch.__version__,
        "model": dataclasses.asdict(args.config),
        **{name: getattr(args, name) for name in ("batch", "length", "steps", "lr", "seed")},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "runs": [dataclasses.asdict(run) for run in runs]}, indent=1))


def main() -> int:
    args = parse_arguments()
    text = standard_library_text()
    runs: list[Run] = []
    for name in args.backends:
        runs.append(recorded(name, lambda name=name: built(name, args.config, args.device), text, args, masters=True))
        if args.json:  # after every run, so that one that does not end costs no other's figures
            write(args.json, args, runs)
    show(runs, runs[0])
    print("\nmean relative difference of losses to the first run's, step by step")
    far = {run.backend: distance(run, runs[0]) for run in runs[1:]}
    for name, value in far.items():
        print(f"  {name}: {value:.2e}")
    if "no_plot" not in args:
        plot(args.plot, [run for run in runs if run.losses])
    if failed := [run for run in runs if run.failed]:
        print(f"FAILED: {failed[0].backend}: {failed[0].failed}")
        return 1
    second = next(iter(far.values()), 0.0)
    for name, value in far.items():
        if not value <= args.ratio * second:
            print(f"FAILED: {name} is {value / second:.2f} as far from {runs[0].backend} as the second run")
            return 1
    print(f"OK: no run is more than {args.ratio} times as far from {runs[0].backend} as the second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
