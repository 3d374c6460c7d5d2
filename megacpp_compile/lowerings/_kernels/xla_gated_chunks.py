"""Chunks of a gated recurrence on XLA: no float64, which a TPU has to emulate, and inverses made of GEMMs. The loop
over chunks is one `while` there (`xla_loop`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.decays import BLOCK, LEAST, ChannelDecay, HeadDecay
from megacpp_compile.lowerings._kernels.paired_sums import scanned


class _Paired(HeadDecay):
    """`G` has a dimension of two in front: pairs of floats. Gradients are in the dtype of the gates."""

    def _sums(self, gates: Tensor) -> Tensor:
        self.wide = gates.dtype
        steps = gates.clamp(min=LEAST).transpose(-1, -2)
        return scanned(steps, torch.zeros_like(steps)).transpose(-1, -2)

    def _exp(self, logarithm: Tensor) -> Tensor:
        return (logarithm[0] + logarithm[1]).exp()


class PairedHeadDecay(_Paired):
    pass


class PairedChannelDecay(_Paired, ChannelDecay):
    pass


def block_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for strictly lower triangular [..., n, n], n a multiple of `BLOCK`: blocks on the diagonal row by
    row, then whole rows of blocks. A power series would need no rows, but its terms grow beyond float32's digits where
    keys repeat."""
    n = lower.shape[-1]
    eye = torch.eye(n, dtype=lower.dtype, device=lower.device)
    # In front, as inside of an op torch_xla 2.9 selects from an inner dimension wrongly.
    tiles = torch.stack([lower[..., i : i + BLOCK, i : i + BLOCK] for i in range(0, n, BLOCK)])
    own = torch.zeros_like(tiles[..., :1, :]) + eye[:1, :BLOCK]
    for i in range(1, BLOCK):
        own = torch.cat((own, eye[i : i + 1, :BLOCK] - tiles[..., i : i + 1, :i] @ own), -2)
    done = own[0] @ eye[:BLOCK]
    for i in range(BLOCK, n, BLOCK):
        rows = slice(i, i + BLOCK)
        done = torch.cat((done, own[i // BLOCK] @ (eye[rows] - lower[..., rows, :i] @ done)), -2)
    return done


def cannot_serve(tensors: Sequence[Tensor | None]) -> str | None:
    """Why a loop over chunks of these operands cannot be a program, or None."""
    given = [t for t in tensors if t is not None]
    if any(t.device.type == "tpu" for t in given):
        return "no-loop: torch_tpu is given none"
    return None if all(isinstance(n, int) for t in given for n in t.shape) else "a number of tokens that is not fixed"
