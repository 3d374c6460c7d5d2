"""Runs the in-place kernels over and over, for watching them from outside; needs a CUDA GPU.

    compute-sanitizer --tool memcheck  python -m tests.lowerings.in_place_runs
    compute-sanitizer --tool racecheck python -m tests.lowerings.in_place_runs

Every repetition starts from the same data and has to give the same bits: a channel read after another thread has written
it would not. Pairs go in interleaved and come out as halves, which is the layout in which that can happen. Exit code 1
where bits differ. PYTORCH_NO_CUDA_MEMORY_CACHING=1 lets memcheck see the bounds of every tensor.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence

import torch

from megacpp_compile.lowerings.mla_rope_q import cuda_triton as queries
from megacpp_compile.lowerings.rope_qk import cuda_triton as grouped

HEADS = (1, 12, 20, 28, 64)


def run(heads: int, heads_first: bool, inverse: bool, repetitions: int) -> int:
    """How many repetitions differ from the first, over both kernels."""
    cos, sin = (torch.randn(1, 65, 1, 32, device="cuda") for _ in range(2))
    q = torch.randn(2, 65, heads, 192, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(2, 65, max(heads // 4, 1), 192, device="cuda", dtype=torch.bfloat16)
    if heads_first:
        q, k, cos, sin = (t.transpose(1, 2) for t in (q, k, cos, sin))
    flags = (128, True, False, False, inverse, torch.bfloat16)
    seen: list[tuple[torch.Tensor, ...]] = []
    for _ in range(repetitions):
        alone, mine, its = q.clone(), q.clone(), k.clone()
        queries.mla_rope_q(alone, cos, sin, *flags, in_place=True)
        grouped.rope_qk(mine, its, cos, sin, *flags, in_place=True)
        seen.append((alone, mine, its))
    first = seen[0]
    assert torch.equal(first[0], first[1]), "the two kernels disagree"
    return sum(not all(map(torch.equal, first, other)) for other in seen[1:])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lowerings.in_place_runs", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--repetitions", type=int, default=20, help="of every kernel and layout (default: 20)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("tests.lowerings.in_place_runs needs a CUDA GPU: torch sees none", file=sys.stderr)
        return 2
    bad = 0
    for heads, heads_first, inverse in itertools.product(HEADS, (False, True), (False, True)):
        differ = run(heads, heads_first, inverse, args.repetitions)
        bad += differ
        layout = "heads first" if heads_first else "tokens first"
        print(f"{heads} heads, {layout}, {'inverse' if inverse else 'forward'}: {differ} repetitions differ")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
