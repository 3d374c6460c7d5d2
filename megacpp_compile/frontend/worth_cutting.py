"""Whether a graph is worth cutting into blocks where nobody asked for it: what that spares, and what it takes.

It spares compiling all blocks but one of a kind, in proportion to their calls. It takes a call a block, and kernels
that reach from one block into the next: of what a block hands on, the next one's first norm is then read on its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch.fx import GraphModule, Node

from megacpp_compile.frontend.calls_of_blocks import CALL, NotCut, Piece, all_calls
from megacpp_compile.frontend.hidden_writes import storage_of
from megacpp_compile.fx.edit import dynamo_value
from megacpp_compile.fx.groups import by_key
from megacpp_compile.fx.sizes import elements, hint, nbytes

# Blocks of one kind. Fewer are compiled in seconds.
MANY = 8
# Calls that need not be compiled: of 24 layers of MLA and SwiGLU each takes a CPU 25 ms.
SPARED = 256
# Of the bytes that a block makes, those that it hands on: half as much more is read for them, beside all else.
HANDED_ON = 1 / 8
# Multiplications of a block's weights on a GPU, which take 0.1 ms there: less does not hide a call.
WORK = 2e10


def worth(gm: GraphModule, pieces: Sequence[Piece]) -> str:
    """Why the cut is worth it, in words. Raises NotCut where it is not."""
    kinds = by_key((piece.kind, piece) for piece in pieces)
    blocks = max((like for like in kinds.values() if like[0].name), key=len)
    if len(blocks) < MANY:
        raise NotCut(f"{len(blocks)} equal blocks, fewer than {MANY}", few=True)
    whole = sum(_size(gm, piece) for piece in pieces)
    left = sum(_size(gm, first) for first, *_ in kinds.values())
    if whole - left - CALL * len(pieces) < SPARED:
        raise NotCut(f"{whole - left} calls fewer to compile are not worth {len(pieces)} graphs", few=True)
    block = blocks[0]
    made, handed = _bytes(block.calls), _bytes(block.outputs)
    if handed > HANDED_ON * made:
        raise NotCut(f"its blocks hand on {handed / made:.0%} of what they make, which one graph need not read again")
    if any(v.device.type == "cuda" for v in _tensors(block.outputs)) and (work := _work(block)) < WORK:
        raise NotCut(f"a block's GEMMs are {work:.0e} multiplications, which do not hide a call")
    return f"{left} in the place of {whole} calls to compile"


def fires_across(fired: Counter[str], joint: Counter[str]) -> str:
    """The pass that finds more in two neighbouring pieces, `joint`, than in one and the other, `fired`; "" for none."""
    return next((name for name, count in joint.items() if count > fired[name]), "")


def _size(gm: GraphModule, piece: Piece) -> int:
    return sum(1 for _ in all_calls(piece.calls, gm))


def _tensors(nodes: Iterable[Node]) -> list[torch.Tensor]:
    return [v for n in nodes if isinstance(v := dynamo_value(n), torch.Tensor)]


def _bytes(nodes: Iterable[Node]) -> int:
    """Of all storages that hold results of the nodes."""
    held = {storage_of(n): v for n in nodes if isinstance(v := dynamo_value(n), torch.Tensor)}
    return sum(map(nbytes, held.values()))


def _work(block: Piece) -> float:
    """Multiplications of the block's weights with what it hands on, as many rows."""
    weights = (v for v in _tensors(block.inputs) if isinstance(v, torch.nn.Parameter) and v.dim() > 1)
    rows = max((elements(v) // max(hint(v.shape[-1]), 1) for v in _tensors(block.outputs) if v.dim()), default=0)
    return float(rows * sum(map(elements, weights)))
