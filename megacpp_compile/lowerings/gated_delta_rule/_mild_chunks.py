"""Which chunks of gates a channel are mild, and how kernels are launched for those and for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.gated_delta_rule import _triton_mild

# Arguments of each launch. For float32 operands there is one for all chunks: factors that grow would cost their digits.
ALL = ({"MILD": 0, "SKIP": 0},)
APART = ({"MILD": 1, "SKIP": 0}, {"MILD": 0, "SKIP": 1})


def launches(wide: bool) -> tuple[dict[str, int], ...]:
    """wide: operands of float32."""
    return ALL if wide else APART


def launch(kernel: Callable[..., Any], grid: Any, wide: bool, warps: int, mild_warps: int, **args: Any) -> None:
    """Launch `kernel` for all chunks; mild ones may leave registers for fewer warps where the others spill them."""
    for which in launches(wide):
        own = {"num_warps": mild_warps if which["MILD"] else warps, "num_stages": 1}
        kernel(grid, own, **which, **args)


def mild_chunks(g: Tensor, places: Tensor, chunks: Any, chunk: int, documents: bool, wide: bool) -> Tensor:
    """int32 [b, chunks, heads]; not written where there is one launch for all. g: [b, tokens, heads, K]; places: the
    first and last tokens of documents' chunks."""
    batch, tokens, heads, keys = g.shape
    mild = torch.empty((batch, chunks, heads), dtype=torch.int32, device=g.device)
    if launches(wide) is APART:
        _triton_mild.mild_chunks(
            lambda meta: (chunks, heads, batch), {"num_warps": 4, "num_stages": 1}, g=g, places=places, mild=mild,
            tokens=tokens, heads=heads, chunks=chunks, **strides("g", g, "bth"), C=chunk, K=keys,
            DOCUMENTS=int(documents),
        )  # fmt: skip
    return mild
