"""`selective_scan` on XLA: the reference, with a chunk's states made in as many steps as its length has bits (an
associative scan), and chunks carried by one `while` loop (`xla_loop`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._kernels.xla_gated_chunks import cannot_serve
from megacpp_compile.lowerings._kernels.xla_loop import Body, Tensors, loop, parted, rejoined
from megacpp_compile.lowerings.selective_scan import reference

# ATen cannot express XLA's `while`: the lowered graph calls these functions.
TRACED = False


class Doubling(reference.InTurn):
    """Chunks of one length, padded with tokens whose step is 0: these leave the state as it is."""

    def __init__(self, tokens: int, chunk_size: int) -> None:
        self.tokens, self.length = tokens, chunk_size

    def within(self, decay: Tensor, added: Tensor, state: Tensor) -> Tensor:
        first = added[:, :1] + decay[:, :1] * state[:, None]
        added, reach = torch.cat((first, added[:, 1:]), 1), 1
        while reach < added.shape[1]:
            added = torch.cat((added[:, :reach], added[:, reach:] + decay[:, reach:] * added[:, :-reach]), 1)
            decay = torch.cat((decay[:, :reach], decay[:, reach:] * decay[:, :-reach]), 1)
            reach *= 2
        return added

    def carry(
        self, body: Body, carried: Tensors, tokens: Sequence[Tensor], chunks: Sequence[Tensor] = (),
        backwards: bool = False,
    ) -> tuple[Tensors, list[Tensor]]:  # fmt: skip
        count = -(-self.tokens // self.length)
        over = count * self.length - self.tokens if count > 1 else 0
        parts = [*(parted(F.pad(x, (0, 0, 0, over)), count) for x in tokens), *(x.transpose(0, 1) for x in chunks)]
        carried, results = loop(body, carried, tuple(x.flip(0) if backwards else x for x in parts))
        *each, states = (x.flip(0) if backwards else x for x in results)
        return carried, [*(rejoined(x, self.tokens) for x in each), states.transpose(0, 1)]


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    return cannot_serve(args[2:10] if name == "selective_scan_backward" else args[:7])


# Functions and no partials: a graph that calls one prints its name.
def selective_scan(*args: Any) -> Any:
    return reference.selective_scan(*args, order=Doubling)  # type: ignore[misc]


def selective_scan_backward(*args: Any) -> Any:
    return reference.selective_scan_backward(*args, order=Doubling)  # type: ignore[misc]
