"""`gated_delta_rule` on a CPU over few tokens: one step after the other, which autograd differentiates and Inductor
fuses, where the reference is a call for each of its ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.gated_chunks import not_few
from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.lowerings.gated_delta_rule import reference

# Where the op comes late, as under a policy, its backward is the other's.
from megacpp_compile.lowerings.gated_delta_rule.reference import gated_delta_rule_backward

__all__ = ["AHEAD", "gated_delta_rule", "gated_delta_rule_backward", "supports"]

AHEAD = True
# Tokens whose steps are compiled in some ten seconds.
FEW = 16


def supports(name: str, args: Sequence[Any]) -> str | None:
    v, cu_seqlens = (args[4], args[8]) if name.endswith("_backward") else (args[2], args[6])
    return not_few(v.shape[1], FEW, cu_seqlens)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, qk_norm_eps: float | None, chunk_size: int, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    operands = q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_norm_eps, chunk_size
    # A graph drops what makes these, which nobody reads.
    _, _, states, inverse = reference.gated_delta_rule(*operands, out_dtype)
    dtype, h = compute_dtype(q, k, v, g, beta, initial_state), v.shape[2]
    q, k = (reference.normalised(x.to(dtype), qk_norm_eps)[0].repeat_interleave(h // x.shape[2], 2) for x in (q, k))
    q, v = q * scale, v.to(dtype)
    decay = None if g is None else (g if g.dim() == 4 else g.unsqueeze(-1)).to(dtype).exp()  # [b, t, h, k or 1]
    state = None if initial_state is None else initial_state.to(dtype)
    read = []
    for i in range(v.shape[1]):
        key, lacking = k[:, i, :, :, None], v[:, i]
        if state is not None:
            state = state if decay is None else decay[:, i, :, :, None] * state
            lacking = lacking - (key * state).sum(-2)
        lacking = lacking if beta is None else beta[:, i, :, None].to(dtype) * lacking
        added = key * lacking.unsqueeze(-2)
        state = added if state is None else state + added
        read.append((q[:, i, :, :, None] * state).sum(-2))
    assert state is not None
    return torch.stack(read, 1).to(out_dtype), state.clone(), states, inverse
