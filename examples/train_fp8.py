"""Train the language model of `train_mla.py` in bfloat16 and with linears in float8; compare losses, time and memory.

Parameters are bfloat16 and the optimizer holds float32 copies, as is usual. The model knows nothing of precision: a
plan (`options={"precision": "fp8_current"}`) says which linears are in float8. Where a device has no float8 the plan
says bfloat16 everywhere, and the runs are alike. The text is Python's own standard library.

    python examples/train_fp8.py --size tiny --steps 20 --blocks           # anywhere, in some minutes

on a GPU, 12 layers with 0.60 B parameters:

    python examples/train_fp8.py
    python examples/train_fp8.py --backends eager inductor megacpp megacpp:fp8_current --json fp8.json
    python examples/train_fp8.py --seeds 6 --backends inductor megacpp:fp8_current   # what one pair of runs cannot tell
"""

import argparse
import dataclasses
import itertools
import json
import math
import platform
import statistics
import sys

import torch
from runs import AVERAGED, Run, arguments, parsed, plot, recorded, scattered, show
from train_mla import ModelConfig, PlainLM, standard_library_text

SIZES = {  # config, sequences a step, bytes a sequence
    "tiny": (ModelConfig(), 2, 128),
    "large": (
        ModelConfig(
            dim=2048, layers=12, heads=16, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128, mlp_dim=5632
        ),
        2,
        4096,
    ),
}


def parse_arguments() -> argparse.Namespace:
    backends = ("inductor", "megacpp", "megacpp:fp8_current")
    parser = arguments(__doc__ or "", "train_fp8.png", steps=300, lr=3e-4, backends=backends)
    size = "large" if torch.cuda.is_available() else "tiny"
    parser.add_argument("--size", default=size, choices=list(SIZES), help="large: 12 layers of width 2048")
    parser.add_argument("--batch", type=int, default=argparse.SUPPRESS, help="sequences a step (default: 2)")
    parser.add_argument("--length", type=int, default=argparse.SUPPRESS, help="bytes a sequence (4096, tiny: 128)")
    parser.add_argument("--blocks", action="store_true", help="compile block by block: one artifact for all layers")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each backend, from --seed on (default: 1)")
    bound = "largest final loss allowed, of the first backend's; one pair of runs differs by 6 %% by chance (1.1)"
    parser.add_argument("--ratio", type=float, default=1.1, help=bound)
    args = parsed(parser)
    args.config, batch, length = SIZES[args.size]
    args.batch, args.length = getattr(args, "batch", batch), getattr(args, "length", length)
    args.dtype = torch.bfloat16
    return args


def conditions(args: argparse.Namespace) -> dict[str, object]:
    cuda = args.device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(args.device) if cuda else platform.machine(),
        "torch": torch.__version__,
        "model": dataclasses.asdict(args.config),
        "parameters": sum(p.numel() for p in PlainLM(args.config).to("meta").parameters()),
        **{name: getattr(args, name) for name in ("batch", "length", "steps", "lr", "seed", "blocks")},
        "final_loss_is": f"mean of the last {AVERAGED} steps",
    }


def main() -> int:
    args = parse_arguments()
    text = standard_library_text()
    about = conditions(args)
    print(f"{about['parameters']:,} parameters, {args.batch} x {args.length} of {len(text):,} bytes of text a step, "
          f"{about['device']}, torch {torch.__version__}")  # fmt: skip
    runs: list[Run] = []
    for name, seed in itertools.product(args.backends, range(args.seed, args.seed + args.seeds)):
        mine = argparse.Namespace(**{**vars(args), "seed": seed})
        blocks = "blocks" if args.blocks else ""
        runs.append(recorded(name, lambda: PlainLM(args.config), text, mine, masters=True, blocks=blocks, decay=True))
        if args.json:  # after every run, so that one that does not end costs no other's figures
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({**about, "runs": [dataclasses.asdict(run) for run in runs]}, indent=1))
    first = runs[: args.seeds]
    show(runs, first[0])
    ratios: dict[str, list[float]] = {}
    for run, like in zip(runs[args.seeds :], itertools.cycle(first), strict=False):
        ratios.setdefault(run.backend, []).append(run.final_loss / like.final_loss)
    for name, found in ratios.items():
        run = next(run for run in runs if run.backend == name)
        print(f"{name}: final loss {scattered(found)} of {first[0].backend}'s"
              + (f", step {run.step_ms / first[0].step_ms:.3f}" if first[0].step_ms else "")
              + (f", peak {run.peak_mib / first[0].peak_mib:.3f}" if first[0].peak_mib else ""))  # fmt: skip
    if "no_plot" not in args:
        plot(args.plot, [run for run in runs if run.losses])
    for run in runs:
        finite = all(map(math.isfinite, run.losses))
        if run.failed or not finite:
            print(f"FAILED: {run.backend}: {run.failed or 'a loss is no number'}")
            return 1
    for name, found in ratios.items():
        if not statistics.fmean(found) <= args.ratio:
            print(f"FAILED: {name}: final loss {scattered(found)} of {first[0].backend}'s, above {args.ratio}")
            return 1
    print(f"OK: every mean final loss is within {args.ratio} of {first[0].backend}'s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
