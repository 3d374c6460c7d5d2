"""examples/train_hybrid.py with Hugging Face's optimised paths among its rows: the same model, text and options.

    python -m benchmarks.hybrid_lm --size large --dtype bfloat16 --length 4096 --batch 4 --steps 200 \\
        --backends eager inductor megacpp hugging_face+eager hugging_face+inductor

`hugging_face+BACKEND` has the blocks of peers/hugging_face.py, with the same weights at the start. It needs
a GPU, transformers, mamba_ssm and causal_conv1d.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from benchmarks.peers import hugging_face

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # scripts, not a package

import train_hybrid

MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "hugging_face": lambda model: hugging_face.wired(model, hugging_face.kernels()),
}


def main() -> int:
    return train_hybrid.main(MODELS, about=__doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
