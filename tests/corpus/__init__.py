"""Plain PyTorch models that nobody fused: what the passes must find, and what they must leave alone.

`spellings`    the same ideas (RoPE, RMSNorm, concat, splits) as different authors write them, and two attention
               blocks that take any combination of them
`near_misses`  models that look like an idiom and are not
`gallery`      whole blocks in the manner of well-known code bases
`delta`        the delta rule and gated linear attention in chunks and token by token, and their near misses
`heads`        output projections and their losses, as different authors write them
`layers`       models of two layers of every idiom, which take any length

An expectation maps a pass name to a count: an int is exact, "2?" allows 0 to 2, "1..2" allows 1 to 2. A pass that an
expectation does not name is not judged. Whatever fires, results and gradients must stay those of eager.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["allowed_counts", "jitter_gains"]


def allowed_counts(expectation: int | str) -> range:
    """The counts that an expectation allows: 2 -> {2}, "2?" -> {0, 1, 2}, "1..2" -> {1, 2}."""
    text = str(expectation)
    if text.endswith("?"):
        return range(int(text[:-1]) + 1)
    low, _, high = text.partition("..")
    return range(int(low), int(high or low) + 1)


def jitter_gains(module: nn.Module, amount: float = 0.3, seed: int = 1) -> nn.Module:
    """Move every norm gain away from its initial value; a gain of ones would hide a rewrite that drops it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1 and not name.endswith("bias"):
                noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.add_(((noise * 2 - 1) * amount).to(parameter))
    return module
