"""Which chunks of gates a channel are of small decay, and their queries and keys with the gates inside
(`_triton_small_decay`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.chunk_grid import chunks_bound
from megacpp_compile.lowerings._kernels.gluon_launch import launch, numbers
from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.gated_delta_rule import _hopper, _triton_large_decay, _triton_small_decay
from megacpp_compile.targets.chips import multiprocessors

# Rows of a chunk that a program's loop has unrolled: half of the shortest chunk at most.
ROWS = 8
# Chunks that are looked at at once for the list of those of large decay.
LISTED = 4096
# Programs of a kernel by cuts for each SM, which has room for one or two (255 registers a thread, 8 warps or 4). A
# program's part of the chunks is fixed: with few programs the last ones run alone (4: 2 % longer where all
# decays are large).
PROGRAMS = 16


def told_apart(wide: bool) -> bool:
    """Whether chunks of small decay have kernels of their own. Not for float32, `wide`: factors that grow would cost
    digits."""
    return not wide


def programs(device: torch.device) -> int:
    """How many a kernel by cuts has; in the interpreter, where they run one after the other, those of one SM."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return PROGRAMS * (multiprocessors(device) if on_gpu else 1)


class SmallDecayChunks:
    """Of gates g [b, tokens, heads, K] a channel.

    small_decay int32 [b, chunks, heads]; queries, keys, out_keys [b, tokens, heads, K]; dots float32 [b, tokens,
    heads]; ends float32 [b, chunks, heads, 3, K]. Kernels for the other chunks write their own parts of these but
    `dots`, and all of them where chunks are not told apart. large_decay: the others' list (`_triton_large_decay`).
    places: the first and last tokens of documents' chunks.
    """

    def __init__(
        self, q: Tensor, k: Tensor, g: Tensor, places: Tensor, chunks: Any, chunk: int, eps: float | None,
        documents: bool, wide: bool,
    ) -> None:  # fmt: skip
        batch, _, heads, _ = g.shape
        self.told_apart, count = told_apart(wide), batch * chunks * heads
        if self.told_apart and not documents and _hopper.serve_gates(g, chunk, count):
            made = torch.ops.megacpp_delta.small_decay_chunks(q, k, g, eps)
        else:
            made = _results(g, chunks, torch.float32 if wide else torch.bfloat16)
            if self.told_apart:
                _in_triton(made, q, k, g, places, chunk, eps, documents)
        self.small_decay, self.queries, self.keys, self.out_keys, self.dots, self.ends = made
        self.programs = programs(g.device) if self.told_apart else count
        self.large_decay = torch.empty(1 + count if self.told_apart else 0, dtype=torch.int32, device=g.device)
        if self.told_apart:
            _triton_large_decay.large_decay_chunks(
                lambda meta: (1,), {"num_warps": 16, "num_stages": 1, "ROWS": LISTED}, small_decay=self.small_decay,
                large_decay=self.large_decay,
                chunks=chunks, heads=heads, count=count,
            )  # fmt: skip

    def by_cuts(self) -> dict[str, Any]:
        """Arguments of kernels by cuts, `programs` of each."""
        return {"large_decay": self.large_decay, "SKIP": int(self.told_apart)}

    def rows(self) -> dict[str, Any]:
        """Arguments of kernels that read these queries and keys."""
        return {"q": self.queries, "k": self.keys, "out_keys": self.out_keys, "per_key": 1,
                **strides("q", self.queries, "bth"), **strides("k", self.keys, "bth")}  # fmt: skip


def _results(g: Tensor, chunks: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
    batch, tokens, heads, size = g.shape

    def new(*shape: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=g.device)

    return (
        new(batch, chunks, heads, dtype=torch.int32),
        *(new(batch, tokens, heads, size, dtype=dtype) for _ in range(3)),
        new(batch, tokens, heads, dtype=torch.float32),
        new(batch, chunks, heads, 3, size, dtype=torch.float32),
    )


def _in_triton(
    made: tuple[Tensor, ...], q: Tensor, k: Tensor, g: Tensor, places: Tensor, chunk: int, eps: float | None,
    documents: bool,
) -> None:  # fmt: skip
    small_decay, queries, keys, out_keys, dots, ends = made
    (batch, chunks, heads), (tokens, size) = small_decay.shape, (g.shape[1], g.shape[3])
    _triton_small_decay.small_decay_chunks(
        lambda meta: (chunks, heads, batch), {"num_warps": 1, "num_stages": 1, "ROWS": ROWS}, q=q, k=k, g=g,
        places=places, small_decay=small_decay, queries=queries, keys=keys, out_keys=out_keys, dots=dots, ends=ends,
        tokens=tokens,
        heads=heads, per_key=heads // k.shape[2], chunks=chunks, eps=eps or 0.0, **strides("q", q, "bth"),
        **strides("k", k, "bth"), **strides("g", g, "bth"), C=chunk, K=size, NORM=int(eps is not None),
        DOCUMENTS=int(documents),
    )  # fmt: skip


# --- on Hopper, in Gluon (`_gluon_small_decay_chunks`)


def on_hopper(q: Tensor, k: Tensor, g: Tensor, eps: float | None) -> tuple[Tensor, ...]:
    """What the op `megacpp_delta::small_decay_chunks` does: those of `SmallDecayChunks`, bfloat16, without
    documents."""
    made = promised(g)

    def in_triton() -> tuple[Tensor, ...]:
        _in_triton(made, q, k, g, made[0], _hopper.CHUNK, eps, False)
        return made

    return _hopper.kernels.or_in_triton("gated_delta_rule", lambda: _in_gluon(made, q, k, g, eps), in_triton)


def promised(g: Tensor) -> tuple[Tensor, ...]:
    return _results(g, chunks_bound(g.shape[1], _hopper.CHUNK, None), torch.bfloat16)


def _in_gluon(made: tuple[Tensor, ...], q: Tensor, k: Tensor, g: Tensor, eps: float | None) -> tuple[Tensor, ...]:
    small_decay, queries, keys, out_keys, dots, ends = made
    (batch, chunks, heads), C, K = small_decay.shape, _hopper.CHUNK, _hopper.CHANNELS
    by_tokens = {"q": q, "k": k, "g": g, "queries": queries, "keys": keys, "out_keys": out_keys}
    launch(
        _hopper.delta_small_decay_chunks_hopper, (chunks * heads, batch),
        **{name: _hopper.tokens(t, K) for name, t in by_tokens.items()}, small_decay=small_decay, dots=dots, ends=ends,
        tokens=g.shape[1], chunks=chunks, heads=heads, per_key=heads // k.shape[2], eps=eps or 0.0, C=C, K=K,
        GATE=numbers(g.dtype), NORM=int(eps is not None), num_warps=4,
    )  # fmt: skip
    return made
