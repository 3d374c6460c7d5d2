"""`gated_delta_rule` on a CPU over few tokens, which autograd differentiates and Inductor fuses, where the reference is
a call for each of its ops: one step after the other, or with gates a head or none one chunk after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._kernels.chunk_grid import STATES_EVERY
from megacpp_compile.lowerings._kernels.decays import BLOCK, LEAST
from megacpp_compile.lowerings._kernels.gated_chunks import not_few
from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.lowerings.gated_delta_rule import reference

# Where the op comes late, as under a policy, its backward is the other's.
from megacpp_compile.lowerings.gated_delta_rule.reference import gated_delta_rule_backward
from megacpp_compile.lowerings.ssd_scan.reference import Float64Sums

__all__ = ["AHEAD", "gated_delta_rule", "gated_delta_rule_backward", "supports"]

AHEAD = True
# Tokens whose steps are compiled in some ten seconds; tokens in chunks, and of a chunk: those of 32 take 1.5 times as
# long.
STEPS, CHUNKED, AT_ONCE = 16, 1024, 64


def supports(name: str, args: Sequence[Any]) -> str | None:
    v, g, cu_seqlens = (args[4], args[5], args[8]) if name.endswith("_backward") else (args[2], args[3], args[6])
    return not_few(v.shape[1], STEPS if g is not None and g.dim() == 4 else CHUNKED, cu_seqlens)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, qk_norm_eps: float | None, chunk_size: int, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = compute_dtype(q, k, v, g, beta, initial_state)
    unit_q, unit_k = (reference.normalised(x.to(dtype), qk_norm_eps)[0] for x in (q, k))
    wide = (None if x is None else x.to(dtype) for x in (g, beta, initial_state))
    if v.shape[1] > STEPS:
        o, final, states, inverse = _chunks(chunk_size, unit_q * scale, unit_k, v.to(dtype), *wide)
        inverse = inverse.to(reference.inverse_dtype(q, k, v, dtype))
    else:
        # A graph drops what makes these, which nobody reads.
        operands = q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_norm_eps, chunk_size
        _, _, states, inverse = reference.gated_delta_rule(*operands, out_dtype)
        o, final = _steps(unit_q * scale, unit_k, v.to(dtype), *wide)
    return o.to(out_dtype).contiguous(), final.clone(), states, inverse.contiguous()


def _steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    decay = None if g is None else (g if g.dim() == 4 else g.unsqueeze(-1)).exp()  # [b, t, h, k or 1]
    read = []
    for i in range(v.shape[1]):
        key, lacking = k[:, i, :, :, None], v[:, i]
        if state is not None:
            state = state if decay is None else decay[:, i, :, :, None] * state
            lacking = lacking - (key * state).sum(-2)
        lacking = lacking if beta is None else beta[:, i, :, None] * lacking
        added = key * lacking.unsqueeze(-2)
        state = added if state is None else state + added
        read.append((q[:, i, :, :, None] * state).sum(-2))
    assert state is not None
    return torch.stack(read, 1), state


def _chunks(
    chunk_size: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The formulas of the reference, of which the states that enter chunks are kept, and what is written."""
    tokens, shared = v.shape[1], v.shape[2] // k.shape[2]
    block = min(chunk_size, -(-tokens // BLOCK) * BLOCK)
    length = min(-(-tokens // block) * block, AT_ONCE)

    def split(x: Tensor) -> Tensor:  # [b, t, h, ...] -> [b, c, h, l, ...]
        behind = -tokens % length
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, behind)) if behind else x
        return padded.unflatten(1, (-1, length)).transpose(2, 3)

    q, k, v = split(q), split(k), split(v)
    pairs, scores = ((x @ k.mT).repeat_interleave(shared, 2) for x in (k, q))
    q_in, k_in = (x.repeat_interleave(shared, 2) for x in (q, k))
    n = torch.arange(length, device=v.device)
    seen, k_out, total = n.unsqueeze(-1) >= n, k_in, None
    if g is None:
        scores = torch.where(seen, scores, 0)
    else:
        sums = Float64Sums.prefix(split(g).clamp(min=LEAST))  # [b, c, h, l]
        apart = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(v.dtype)
        decay = torch.where(seen, apart, -torch.inf).exp()
        pairs, scores = pairs * decay, scores * decay
        into, last = sums.to(v.dtype).exp().unsqueeze(-1), sums[..., -1:]
        q_in, k_in, total = q_in * into, k_in * into, last.to(v.dtype).exp().unsqueeze(-1)
        k_out = k_out * (last - sums).to(v.dtype).exp().unsqueeze(-1)
    weight = None if beta is None else split(beta).unsqueeze(-1)
    inverse = reference.DeltaRuleChunks.inverse(pairs if weight is None else weight * pairs)

    entered, written = [] if state is None else [state], []
    for c in range(v.shape[1]):
        lacking = v[:, c] if state is None else v[:, c] - k_in[:, c] @ state
        written.append(inverse[:, c] @ (lacking if weight is None else weight[:, c] * lacking))
        added = k_out[:, c].mT @ written[-1]
        if state is not None:
            added = added + (state if total is None else total[:, c] * state)
        state = added
        entered.append(state)
    assert state is not None
    o = scores @ torch.stack(written, 1)
    first = len(written) + 1 - len(entered)  # a chunk that nothing enters
    if entered[:-1]:
        o = o + F.pad(q_in[:, first:] @ torch.stack(entered[:-1], 1), (0, 0) * 3 + (first, 0))

    kept = ([torch.zeros_like(state)] * first + entered[:-1])[:: STATES_EVERY * chunk_size // AT_ONCE]
    own = inverse.unflatten(-1, (-1, block)).unflatten(-3, (-1, block)).diagonal(0, -4, -2)  # [..., block, block, m]

    def join(x: Tensor) -> Tensor:
        return x.transpose(2, 3).flatten(1, 2)[:, :tokens]

    rows = F.pad(join(own.movedim(-1, -3).flatten(-3, -2)), (0, chunk_size - block))
    return join(o), state, torch.stack(kept, 1), rows
