"""The backward of `gated_delta_rule` on CUDA in Triton.

What forward kept is the state that enters every 8th chunk and T's rows. Chunks side by side, `prepare` makes what no
state enters; segments side by side, `states` makes the states that enter all chunks; `reverse_walk`, the one sequential
part, walks back over the chunks for the gradients of the states; and, chunks side by side again, `query_grad`,
`value_grad` and `key_grad` make all gradients. With gates a channel the first and the last have kernels of their own
(`_triton_backward_channels`). No atomics: equal inputs give equal bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.lowerings._kernels.chunk_grid import STATES_EVERY, chunks_bound
from megacpp_compile.lowerings._kernels.triton_launch import last_dim_contiguous, strides
from megacpp_compile.lowerings.gated_delta_rule import (
    _triton_backward_channels,
    _triton_gradients,
    _triton_reverse_walk,
    _triton_states,
)
from megacpp_compile.lowerings.gated_delta_rule._chunk_tables import ChunkTables
from megacpp_compile.lowerings.gated_delta_rule._mild_chunks import launch, mild_chunks

__all__ = ["gated_delta_rule_backward"]

# Channels of v that a program of the reverse walk has, and chunks it has loaded or is loading.
COLUMNS, STAGES = 32, 3


class _Call:
    """Sizes, and the operands as the kernels read them: channels contiguous in memory, any other strides."""

    def __init__(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None,
        cu_seqlens: Tensor | None, scale: float, eps: float | None, chunk_size: int,
    ) -> None:  # fmt: skip
        self.batch, self.tokens, self.key_heads, self.K = q.shape
        self.heads, self.V = v.shape[2:]
        self.per_key, self.C, self.scale, self.eps = self.heads // self.key_heads, chunk_size, scale, eps
        self.do, self.q, self.k, self.v = (last_dim_contiguous(t) for t in (do, q, k, v))
        self.per_channel = g is not None and g.dim() == 4
        self.g = last_dim_contiguous(g) if g is not None and self.per_channel else g
        self.beta = beta
        self.wide = any(t.dtype != torch.bfloat16 for t in (q, k, v))
        self.inner = torch.float32 if self.wide else torch.bfloat16
        self.chunks = chunks_bound(self.tokens, chunk_size, cu_seqlens)
        self.packed = ChunkTables(cu_seqlens, chunk_size, self.chunks) if cu_seqlens is not None else None
        # Value heads that read one row of keys on their way to the state.
        self.per_state = 1 if self.per_channel else self.per_key
        self.cuts = chunk_size.bit_length() - 1
        self.by_key = (self.chunks * self.key_heads, self.batch)
        # Without gates or documents the kernels have no use for these pointers.
        self.nothing = torch.empty(0, dtype=torch.int32, device=q.device)
        sizes = {"C": chunk_size, "K": self.K, "V": self.V, "PACKED": int(self.packed is not None)}
        self.common = {"tokens": self.tokens, "chunks": self.chunks, "heads": self.heads,
                       "table": self.packed.chunks if self.packed else self.nothing,
                       "WIDE": int(self.wide), **sizes}  # fmt: skip

    @property
    def empty(self) -> bool:
        return any(statically_known_true(size == 0) for size in (self.batch, self.tokens, self.heads))

    def new(self, *shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.q.device)

    def at_once(self, columns: int) -> int:
        """Channels of v that a program takes at once."""
        return min(self.V, 32 if self.wide else columns)

    def stages(self, narrow: int) -> int:
        return _stages(self.C, self.K, self.wide, narrow)

    def by_chunk(self, *shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.new(self.batch, self.chunks, *shape, dtype=dtype)

    def strides_of(self, *names: str) -> dict[str, Any]:
        return {name: at for of in names for name, at in strides(of, getattr(self, of), "bth").items()}


def _stages(chunk: int, keys: int, wide: bool, narrow: int) -> int:
    """Chunks that a walk has in shared memory: as many as fit in float32. One is avoided: with it Triton 3.6 reads
    beyond (see `ssd_scan`)."""
    return narrow if not wide else 2 if chunk * keys <= 64 * 64 else 1


def shared_memory(chunk: int, keys: int, wide: bool) -> int:
    """Bytes of it that a program of the reverse walk takes, the most of all kernels."""
    numbers = _stages(chunk, keys, wide, STAGES) * chunk * (3 * keys + 2 * COLUMNS) + COLUMNS * (keys + chunk)
    return numbers * (4 if wide else 2)


def gated_delta_rule_backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor,
    inverse: Tensor,
    scale: float,
    qk_norm_eps: float | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = _Call(do, q, k, v, g, beta, cu_seqlens, scale, qk_norm_eps, chunk_size)
    documents = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else call.batch
    d_initial = call.new(documents, call.heads, call.K, call.V)
    if call.empty:
        d_initial.zero_() if dfinal is None else d_initial.copy_(dfinal)
        dq, dk, dv, dg, dbeta = (call.new(0) if t is None else torch.zeros_like(t) for t in (q, k, v, g, beta))
    else:
        kept, inverse = states.contiguous(), inverse.contiguous()
        made = (_prepare_channels if call.per_channel else _prepare)(call, inverse)
        made |= _states(call, kept, initial_state, made)
        made |= _reverse_walk(call, dfinal, documents, d_initial, made)
        dq, dk, dv, dg, dbeta = (_channel_gradients if call.per_channel else _gradients)(call, inverse, made)
    d_initial = call.new(0) if initial_state is None else d_initial.to(initial_state.dtype)
    return dq, dk, dv, dg, dbeta, d_initial


def _prepare(call: _Call, inverse: Tensor) -> dict[str, Tensor]:
    """The decays, steps and norms, and a chunk's parts that no state enters."""
    made = {"decay": call.by_chunk(call.heads, call.C)} | _prepared(call)
    g = call.do if call.g is None else call.g
    _triton_states.prepare(
        lambda meta: (call.chunks * call.heads, call.batch),
        {"num_warps": 4, "num_stages": 1}, BV=call.at_once(128), g=g, GATED=int(call.g is not None),
        **strides("g", g, "bth"), **made, **_prepare_args(call, inverse),
    )  # fmt: skip
    return made | {"reading": call.q, "writing": call.k, "ends": made["decay"]}


def _prepare_channels(call: _Call, inverse: Tensor) -> dict[str, Tensor]:
    """As `_prepare`; what reads and writes the state has its decays inside, so that `decay` is 0, but for `ends`."""
    g, rows = call.g, (call.batch, call.tokens, call.heads, call.K)
    assert g is not None
    made = _prepared(call) | {name: call.new(*rows, dtype=call.inner) for name in ("reading", "writing")}
    made |= {"ends": call.by_chunk(call.heads, call.K), "no_decay": call.by_chunk(call.heads, call.C)}
    sums = call.by_chunk(call.heads, call.C, call.K)
    places = call.packed.chunks if call.packed else call.nothing
    mild = mild_chunks(g, places, call.chunks, call.C, call.packed is not None, call.wide)
    launch(
        _triton_backward_channels.prepare, lambda meta: (call.chunks * call.heads, call.batch), call.wide, 8, 4,
        BV=call.at_once(64), g=g, decay=sums, mild=mild, CUTS=call.cuts, **strides("g", g, "bth"), **made,
        **_prepare_args(call, inverse),
    )  # fmt: skip
    return made | {"decay": made["no_decay"], "sums": sums, "mild": mild}


def _prepared(call: _Call) -> dict[str, Tensor]:
    heads, C = call.heads, call.C
    return {
        "steps": call.by_chunk(heads, C),
        "norms": call.by_chunk(heads, 2, C),
        "solve": call.by_chunk(heads, C, C, dtype=call.inner),
        "w": call.by_chunk(heads, C, call.K, dtype=call.inner),
        "du_local": call.by_chunk(heads, C, call.V, dtype=call.inner),
    }


def _prepare_args(call: _Call, inverse: Tensor) -> dict[str, Any]:
    beta = call.do if call.beta is None else call.beta
    return {"q": call.q, "k": call.k, "do": call.do, "beta": beta, "inverse": inverse, "scale": call.scale,
            "eps": call.eps or 0.0, "per_key": call.per_key, "BETA": int(call.beta is not None),
            "NORM": int(call.eps is not None), **strides("beta", beta, "bth"), **call.strides_of("q", "k", "do"),
            **call.common}  # fmt: skip


def _states(call: _Call, kept: Tensor, initial: Tensor | None, made: dict[str, Tensor]) -> dict[str, Tensor]:
    """The states that enter all chunks, and the errors."""
    out = {
        "states": call.by_chunk(call.heads, call.K, call.V, dtype=call.inner),
        "errors": call.by_chunk(call.heads, call.C, call.V, dtype=call.inner),
    }
    _triton_states.states(
        lambda meta: (kept.shape[1] * call.heads, call.V // call.at_once(64), call.batch),
        {"num_warps": 4, "num_stages": call.stages(STAGES)}, BV=call.at_once(64), k=made["writing"], v=call.v,
        kept=kept,
        starts=call.packed.starts if call.packed else call.nothing, per_key=call.per_state, segments=kept.shape[1],
        initial=kept if initial is None else initial.contiguous(), EVERY=STATES_EVERY,
        INITIAL=int(initial is not None), CHANNELS=int(call.per_channel), **out,
        **_only(made, "solve w decay steps norms ends"), **strides("k", made["writing"], "bth"),
        **call.strides_of("v"), **call.common,
    )  # fmt: skip
    return out


def _reverse_walk(
    call: _Call, dfinal: Tensor | None, documents: Any, d_initial: Tensor, made: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of the states that leave the chunks, and of U."""
    out = {
        "d_states": call.by_chunk(call.heads, call.K, call.V, dtype=call.inner),
        "du": call.by_chunk(call.heads, call.C, call.V, dtype=call.inner),
    }
    _triton_reverse_walk.reverse_walk(
        lambda meta: (call.V // call.at_once(COLUMNS), call.heads, documents),
        {"num_warps": 4, "num_stages": call.stages(STAGES)}, BV=call.at_once(COLUMNS), q=made["reading"],
        k=made["writing"], do=call.do, documents=call.packed.documents if call.packed else call.nothing,
        last=d_initial if dfinal is None else dfinal.contiguous(), d_initial=d_initial, per_key=call.per_state,
        scale=call.scale, CHANNELS=int(call.per_channel), LAST=int(dfinal is not None), **out,
        **_only(made, "w du_local decay steps norms ends"), **strides("q", made["reading"], "bth"),
        **strides("k", made["writing"], "bth"), **call.strides_of("do"), **call.common,
    )  # fmt: skip
    return out


def _gradients(call: _Call, inverse: Tensor, made: dict[str, Tensor]) -> tuple[Tensor, ...]:
    q, k, v, g, beta = call.q, call.k, call.v, call.g, call.beta
    dq, dk, dv = (call.new(*t.shape, dtype=t.dtype) for t in (q, k, v))
    dg, dbeta = (call.new(0) if t is None else call.new(*t.shape, dtype=t.dtype) for t in (g, beta))
    passed = {
        "d_scores": call.by_chunk(call.key_heads, call.C, call.C, dtype=call.inner),
        "d_between": call.by_chunk(call.key_heads, call.C, call.C, dtype=call.inner),
        "d_decay": call.by_chunk(call.heads, _triton_gradients.PARTS, call.C),
    }
    launch = {"num_warps": 4, "num_stages": 1}
    common = {"BV": call.at_once(64), "HB": call.per_key, "key_heads": call.key_heads, "d_decay": passed["d_decay"],
              **_only(made, "decay steps norms errors"), **call.common}  # fmt: skip
    norm = {"NORM": int(call.eps is not None)}
    _triton_gradients.query_grad(
        lambda meta: call.by_key, launch, q=q, k=k, do=call.do, dq=dq, scale=call.scale, states=made["states"],
        d_scores=passed["d_scores"], **norm, **call.strides_of("q", "k", "do"), **common,
    )  # fmt: skip
    _triton_gradients.value_grad(
        lambda meta: call.by_key, launch, k=k, inverse=inverse, du=made["du"], dv=dv, dbeta=dbeta,
        d_between=passed["d_between"], CHANNELS=0, BETA=int(beta is not None), **call.strides_of("k"), **common,
    )  # fmt: skip
    _triton_gradients.key_grad(
        lambda meta: call.by_key, {"num_warps": 8, "num_stages": 1}, q=q, k=k, dv=dv, dk=dk, dg=dg,
        d_scores=passed["d_scores"], d_between=passed["d_between"], GATED=int(g is not None), **norm,
        **_only(made, "states d_states"), **call.strides_of("q", "k"), **(common | {"BV": call.at_once(128)}),
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta


def _channel_gradients(call: _Call, inverse: Tensor, made: dict[str, Tensor]) -> tuple[Tensor, ...]:
    v, g, beta, rows = call.v, call.g, call.beta, (call.batch, call.tokens, call.heads, call.K)
    assert g is not None
    dv, dg = call.new(*v.shape, dtype=v.dtype), call.new(*g.shape, dtype=g.dtype)
    dbeta = call.new(0) if beta is None else call.new(*beta.shape, dtype=beta.dtype)
    direct = call.per_key == 1
    dq, dk = (call.new(*rows, dtype=t.dtype if direct else torch.float32) for t in (call.q, call.k))
    d_between = call.by_chunk(call.heads, call.C, call.C, dtype=call.inner)
    grid = call.chunks * call.heads, call.batch
    bv = call.at_once(64)
    _triton_gradients.value_grad(
        lambda meta: grid, {"num_warps": 4, "num_stages": 1}, BV=bv, k=call.k, inverse=inverse, du=made["du"],
        dv=dv, dbeta=dbeta, d_between=d_between, d_decay=made["ends"], key_heads=call.heads, HB=1, CHANNELS=1,
        BETA=int(beta is not None), **_only(made, "decay steps norms errors"), **call.strides_of("k"), **call.common,
    )  # fmt: skip
    d_decay = call.by_chunk(call.heads, call.C, call.K)
    shared = {"BV": bv, "q": call.q, "k": call.k, "do": call.do, "decay": made["sums"], "d_decay": d_decay,
              "per_key": call.per_key, "scale": call.scale, "eps": call.eps or 0.0, "CUTS": call.cuts,
              "NORM": int(call.eps is not None), **_only(made, "mild steps states errors"),
              **call.strides_of("q", "k", "do"), **call.common}  # fmt: skip
    d_scores = torch.empty_like(d_between)
    launch(_triton_backward_channels.query_grad, lambda meta: grid, call.wide, 8, 8, d_scores=d_scores, dq=dq, **shared)
    d_reads = torch.empty_like(d_decay)
    of_keys = {name: arg for name, arg in shared.items() if name not in ("do", "do_b", "do_t", "do_h", "scale")}
    of_reads = {name: arg for name, arg in of_keys.items() if name not in ("q", "q_b", "q_t", "q_h", "steps", "errors")}
    launch(
        _triton_backward_channels.read_grad, lambda meta: grid, call.wide, 8, 4, d_between=d_between, d_reads=d_reads,
        dv=dv, **of_reads,
    )  # fmt: skip
    launch(
        _triton_backward_channels.key_grad, lambda meta: grid, call.wide, 8, 8, d_scores=d_scores, d_between=d_between,
        d_reads=d_reads, dk=dk, dg=dg, **_only(made, "ends d_states"), **of_keys,
    )  # fmt: skip
    if not direct:
        dq, dk = (d.unflatten(2, (call.key_heads, -1)).sum(3).to(like.dtype)
                  for d, like in ((dq, call.q), (dk, call.k)))  # fmt: skip
    return dq, dk, dv, dg, dbeta


def _only(made: dict[str, Tensor], names: str) -> dict[str, Tensor]:
    return {name: made[name] for name in names.split()}
