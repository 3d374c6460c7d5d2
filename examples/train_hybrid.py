"""Train a hybrid of attention, Mamba-2 or Gated DeltaNet, and expert layers under several compilers, and compare them.

The model (`plain_hybrid.py`) is plain PyTorch. A compiler that cannot train it, for want of memory or because it fails,
is shown with its reason. The text is Python's own standard library, as in `train_mla.py`.

    python examples/train_hybrid.py                                       # a tiny model, on CPU in a few minutes
    python examples/train_hybrid.py --dtype bfloat16 --backends eager:float32 eager megacpp --steps 200     # likewise
    python examples/train_hybrid.py --mixer delta                         # likewise, Gated DeltaNet for Mamba-2
    python examples/train_hybrid.py --size large --dtype bfloat16 --length 4096 --batch 4 --steps 200     # on a GPU
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import plain_hybrid
import torch
from plain_hybrid import HybridLM
from runs import arguments, largest_difference, parsed, plot, recorded, show
from torch import nn
from train_mla import standard_library_text

# The largest difference allowed between the loss curves of the first backend that runs and the others.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}


def parse_arguments(models: Collection[str], summary: str) -> argparse.Namespace:
    parser = arguments(summary, "train_hybrid.png", steps=30, lr=1e-3, backends=("eager", "megacpp"))
    parser.add_argument("--size", default="tiny", choices=["tiny", "large"], help="large: a billion parameters")
    parser.add_argument("--mixer", default="mamba", choices=["mamba", "delta"], help="delta: Gated DeltaNet layers")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--length", type=int, default=128, help="bytes a sequence, a multiple of the scan's chunk")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="weights and activations")
    args = parsed(parser)
    args.config = plain_hybrid.LARGE if args.size == "large" else plain_hybrid.TINY
    if args.mixer == "delta":
        own = dataclasses.replace(args.config, pattern=args.config.pattern.replace("M", "D"))
        args.config = dataclasses.replace(own, chunk=min(own.chunk, 64))
    if args.length % args.config.chunk:
        parser.error(f"--length must be a multiple of the scan's chunk, {args.config.chunk}")
    if unknown := {backend.rpartition("+")[0] for backend in args.backends}.difference(models):
        parser.error(f"no model of the name {', '.join(unknown)}")
    args.dtype = getattr(torch, args.dtype)
    return args


def main(models: Mapping[str, Callable[[nn.Module], nn.Module]] | None = None, about: str = __doc__ or "") -> int:
    """`models`: what may stand before a backend, as in "name+inductor", and what it makes of the plain model. about:
    the text of `--help`."""
    made = {"": lambda model: model, **(models or {})}
    args = parse_arguments(made, about)
    text = standard_library_text()
    print(f"{len(text):,} bytes of text, {args.size}, {args.device}, {args.dtype}, torch {torch.__version__}")

    def build(backend: str) -> nn.Module:
        return made[backend.rpartition("+")[0]](HybridLM(args.config))

    runs = [recorded(backend, partial(build, backend), text, args) for backend in args.backends]
    ran: list[Any] = [run for run in runs if not run.failed]
    show(runs, ran[0] if ran else runs[0])
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([dataclasses.asdict(run) for run in runs], indent=1))
    if "no_plot" not in args:
        plot(args.plot, [run for run in runs if run.losses])
    if any(run.backend.startswith("megacpp") and (run.failed or not run.fused) for run in runs):
        print("FAILED: megacpp did not train the model, or fused nothing")
        return 1
    worst = max((largest_difference(run, ran[0]) for run in ran[1:]), default=0.0)
    if not worst <= TOLERANCE[args.dtype]:  # written so that NaN fails too
        print(f"FAILED: the loss curves differ by {worst:.2e}, more than {TOLERANCE[args.dtype]:.0e}")
        return 1
    print(f"OK: the loss curves agree within {TOLERANCE[args.dtype]:.0e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
