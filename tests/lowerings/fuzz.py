"""Random calls of every op: each CUDA lowering that takes one, against the reference in float64.

    python -m tests.lowerings.fuzz                                          # 1000 cases, some minutes
    python -m tests.lowerings.fuzz --cases 10000 --device cuda --seed 1     # needs a CUDA GPU
    python -m tests.lowerings.fuzz --cases 300 --device cpu

Needs Triton, whose interpreter runs the kernels where there is no GPU; the seed is drawn and printed. Prints how many cases each lowering served and why it refused others, so that a run that tried nothing shows; ends with 1
if a case failed, with the command that repeats it, or if a kernel served no case at all.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import os
import random
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch

from . import agreement
from .agreement import interpreted, lowerings, tensors_of
from .fuzz_draw import OPS, Kind, Maker, arguments, kind

# Failures after which a run ends: the first ones tell.
MOST_FAILURES = 20


@dataclasses.dataclass
class Outcome:
    """What a run tried and found."""

    served: Counter[str] = dataclasses.field(default_factory=Counter)
    in_place: Counter[str] = dataclasses.field(default_factory=Counter)
    refused: dict[str, Counter[str]] = dataclasses.field(default_factory=lambda: defaultdict(Counter))
    failures: list[str] = dataclasses.field(default_factory=list)

    def idle(self, device: str = "cuda") -> list[str]:
        """Lowerings that served nothing, of those that can run on `device`: an interpreter runs Triton's alone."""
        labels = [f"{name} {lowering}" for _, _, name, lowering in lowerings("cuda")]
        here = [label for label in labels if device == "cuda" or label.endswith((" reference", " cuda_triton"))]
        return [label for label in here if not self.served[label]]

    def text(self) -> str:
        lines = []
        for _, _, name, lowering in lowerings("cuda"):
            label = f"{name} {lowering}"
            in_place = f", {self.in_place[label]} also in place" if self.in_place[label] else ""
            lines.append(f"{label:36} served {self.served[label]:6}{in_place}, refused {self.refused[label].total()}")
            lines += [f"    {count:6} {reason}" for reason, count in self.refused[label].most_common()]
        return "\n".join(lines)


def described(args: Any) -> str:
    """Arguments as a line: tensors by dtype, shape, strides and offset."""

    def one(a: Any) -> str:
        if isinstance(a, torch.Tensor):
            at = f"+{a.storage_offset()}" if a.storage_offset() else ""
            values = f" {a.tolist()}" if not a.is_floating_point() else ""
            return f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}/{list(a.stride())}{at}{values}"
        return f"[{', '.join(map(one, a))}]" if isinstance(a, (list, tuple)) else str(a).removeprefix("torch.")

    return ", ".join(map(one, args))


def attempt(case: Kind, args: Any, outcome: Outcome) -> list[str]:
    """Run every lowering of `case.op` on `args`; what is wrong, in words."""
    name = case.op
    before = [agreement.memory(t).clone() for t in tensors_of(args)]
    wrong, dtypes = [], {}
    for folder, lowering in ((f, low) for _, f, n, low in lowerings_of() if n == name):
        module, label = agreement.module_of(folder, lowering), f"{name} {lowering}"
        if (reason := agreement.why_not(module, name, args)) is not None:
            outcome.refused[label][reason] += 1
            continue
        body = getattr(module, name)
        got = tensors_of(body(*args))
        found = agreement.disagreements(got, name, args)
        dtypes[lowering] = [t.dtype for t in got]
        if any(not torch.equal(a, agreement.memory(t)) for a, t in zip(before, tensors_of(args), strict=True)):
            found.append("an input was written to")
        which = getattr(module, "OVERWRITES", {}).get(name, ())
        if which and case.flags.get("in_place"):
            out_dtype = next(a for a in args if isinstance(a, torch.dtype))
            found += [f"in place: {f}" for f in agreement.in_place_faults(body, which, args, out_dtype)]
            outcome.in_place[label] += 1
        outcome.served[label] += 1
        wrong += [f"{lowering}: {f}" for f in found]
    if len({tuple(d) for d in dtypes.values()}) > 1:
        wrong.append(f"results differ in dtype: {dtypes}")
    return wrong


@functools.cache
def lowerings_of() -> list[tuple[Any, str, str, str]]:
    return list(lowerings("cuda"))


def args_device(args: Any) -> str:
    return tensors_of(args)[0].device.type


def fuzz(cases: int, device: str, seed: int, kinds: int = 120, room: int = 200, only: int | None = None,
         quiet: bool = False, ops: Collection[str] = OPS) -> Outcome:  # fmt: skip
    """`cases` random calls of `kinds` kinds with at most about `room` tokens each; or the one case `only`. Of those,
    calls of `ops`."""
    if device == "cpu" and not interpreted():
        raise SystemExit("on CPU the kernels need TRITON_INTERPRET=1 in the environment")
    pool = [kind(random.Random(f"{seed} kind {i}"), OPS[i % len(OPS)]) for i in range(kinds)]
    outcome, start = Outcome(), time.monotonic()
    for index in range(cases) if only is None else [only]:
        draw = random.Random(f"{seed} case {index}")
        case = pool[index % kinds]
        if case.op not in ops:
            continue
        args: Any = "not made"
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                args = arguments(case, draw, Maker(device, draw.randrange(2**31)), room)
                with agreement.poisoned_memory():
                    wrong = attempt(case, agreement.copies_of(args), outcome)
        except Exception:  # an error is a finding like any other, and there may be more
            wrong = [traceback.format_exc(limit=-4)]
        if wrong:
            again = f"python -m tests.lowerings.fuzz --device {device} --seed {seed} --kinds {kinds} --room {room}"
            call = f"{case.op}({described(args)})"
            outcome.failures.append(f"{again} --only {index}\n    {call}\n    " + "\n    ".join(wrong))
            print(outcome.failures[-1], flush=True)
            if len(outcome.failures) >= MOST_FAILURES:
                break
        if not quiet and (index + 1) % max(cases // 20, 1) == 0:
            print(f"{index + 1} cases, {time.monotonic() - start:.0f} s, {len(outcome.failures)} failed", flush=True)
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lowerings.fuzz", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--cases", type=int, default=1000, help="random calls (default: 1000)")
    parser.add_argument("--device", default=here, choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="default: a fresh one")
    parser.add_argument("--kinds", type=int, default=120, help="kinds of calls, each a kernel or two to compile (120)")
    parser.add_argument("--room", type=int, help="about how many tokens a call may have (cuda: 200, cpu: 12)")
    parser.add_argument("--only", type=int, help="one case, by its number")
    argv = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(argv)
    if options.device == "cuda" and here == "cpu":
        parser.exit(2, f"{parser.prog} --device cuda needs a CUDA GPU: torch sees none\n")
    if importlib.util.find_spec("triton") is None:
        parser.exit(2, f"{parser.prog} needs Triton, which is not installed: pip install triton\n")
    if options.device == "cpu" and not interpreted():
        # Triton reads this when it is imported, which it is by now.
        again = [sys.executable, "-m", "tests.lowerings.fuzz", *argv]
        return subprocess.run(again, env={**os.environ, "TRITON_INTERPRET": "1"}).returncode
    room = options.room or (200 if options.device == "cuda" else 12)
    print(f"seed {options.seed}")
    outcome = fuzz(options.cases, options.device, options.seed, options.kinds, room, options.only)
    print(outcome.text())
    idle = outcome.idle(options.device) if options.only is None else []
    if idle:
        print("served nothing: " + ", ".join(idle))
    print(f"{len(outcome.failures)} failed")
    return 1 if outcome.failures or idle else 0


if __name__ == "__main__":
    sys.exit(main())
