"""`gated_delta_rule` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle.

What a token writes is what its value lacks of what the state has for its key, so tokens of a chunk depend on one
another through a unit lower triangular matrix; its inverse T turns them into GEMMs:

    L_ti = beta_t <k_t decay(i to t), k_i>, i < t        T = (I + L)^-1        U = T diag(beta) (V - Kin S)

The rest is that of `_kernels.gated_chunks`. A loop over chunks carries the state, so that graphs hold the op.
Source: the WY form of https://arxiv.org/abs/2406.06484, gates as in https://arxiv.org/abs/2412.06464; the backward is
that of the formulas above, in closed form.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._kernels.gated_chunks import GatedChunks
from megacpp_compile.lowerings._op import compute_dtype

# A loop over chunks, of which there may be any number.
TRACED = False


def inverse_dtype(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which T is kept where the op computes in `dtype`: half as wide where q, k and v are."""
    narrow = dtype == torch.float32 and all(t.dtype.itemsize == 2 for t in (q, k, v))
    return torch.bfloat16 if narrow else dtype


class DeltaRuleChunks(GatedChunks):
    """Adds `beta` [b, c, h, l, 1], `raw`, which is L without beta, and T [b, c, h, l, l]."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, initial_state: Tensor | None,
        cu_seqlens: Tensor | None, eps: float | None, chunk_size: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        q, self.q_scale = normalised(q.to(dtype), eps)
        k, self.k_scale = normalised(k.to(dtype), eps)
        super().__init__(q, k, v, g, initial_state, cu_seqlens, chunk_size, dtype)
        one = v.new_ones((), dtype=dtype).expand(v.shape[:3]) if beta is None else beta.to(dtype)
        self.beta = self.grid.split(one).unsqueeze(-1)
        self.raw = self.scores[0].tril(-1)
        self.T = self.inverse(self.beta * self.raw)

    @staticmethod
    def inverse(lower: Tensor) -> Tensor:
        """(I + lower)^-1 for strictly lower triangular matrices."""
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand(lower.shape)
        return torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)

    def _rows(self) -> Tensor:
        return torch.stack((self.k, self.q))

    def _written_from(self) -> tuple[Tensor, ...]:
        return self.v, self.k_in, self.beta, self.T

    @staticmethod
    def write(states: Tensor, v: Tensor, k_in: Tensor, beta: Tensor, T: Tensor) -> Tensor:  # type: ignore[override]
        return T @ (beta * (v - k_in @ states))

    @staticmethod
    def write_backward(d_written: Tensor, v: Tensor, k_in: Tensor, beta: Tensor, T: Tensor) -> Tensor:  # type: ignore[override]
        return -(k_in.transpose(-1, -2) @ (beta * (T.transpose(-1, -2) @ d_written)))

    def _gradients_within(self, d_written: Tensor, d_P: Tensor, written: Tensor, entered: Tensor) -> Any:
        d_right = self.T.transpose(-1, -2) @ d_written
        d_v = self.beta * d_right
        d_L = -(d_right @ written.transpose(-1, -2)).tril(-1)
        d_beta = (d_right * (self.v - self.k_in @ entered)).sum(-1) + (d_L * self.raw).sum(-1)
        return d_v, torch.stack((self.beta * d_L, d_P)), -(d_v @ entered.transpose(-1, -2)), (d_beta,)

    def keys_gradient(self, d: Tensor, x: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
        """That of queries or keys as the op was given them, for `d` of those by value head, `x`."""
        grad = self.by_key_head(d).sum(3)
        if factor is not None:
            unit = self.grid.join(x)[:, :, :: self.shared]
            grad = factor * (grad - unit * (grad * unit).sum(-1, keepdim=True))
        return grad.to(dtype).contiguous()


def normalised(x: Tensor, eps: float | None) -> tuple[Tensor, Tensor | None]:
    """Rows of unit length, and what they were multiplied with [..., 1]."""
    if eps is None:
        return x, None
    factor = (x.square().sum(-1, keepdim=True) + eps).rsqrt()
    return x * factor, factor


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_norm_eps: float | None,
    chunk_size: int,
    out_dtype: torch.dtype,
    chunks: type[DeltaRuleChunks] = DeltaRuleChunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = compute_dtype(q, k, v, g, beta, initial_state)
    x = chunks(q, k, v, g, beta, initial_state, cu_seqlens, qk_norm_eps, chunk_size, dtype)
    inverse = F.pad(x.grid.join(x.T), (0, chunk_size - x.grid.length)).to(inverse_dtype(q, k, v, dtype))
    return *x.forward(scale, out_dtype), inverse.contiguous()


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
    chunks: type[DeltaRuleChunks] = DeltaRuleChunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta and initial_state, empty where there is none.

    Everything within a chunk is recomputed from the operands, T as well, which was rounded to be kept.
    """
    x = chunks(q, k, v, g, beta, initial_state, cu_seqlens, qk_norm_eps, chunk_size, states.dtype)
    d = x.backward(do, dfinal, states, scale)
    d_g, d_beta, d_initial = (states.new_empty(0) for _ in range(3))
    if g is not None and d.gates is not None:
        d_g = d.gates.reshape(g.shape).to(g.dtype).contiguous()
    if beta is not None:
        d_beta = x.grid.join(d.others[0]).to(beta.dtype).contiguous()
    if initial_state is not None:
        d_initial = d.initial.to(initial_state.dtype).contiguous()
    return (
        x.keys_gradient(d.q, x.q, x.q_scale, q.dtype),
        x.keys_gradient(d.k, x.k, x.k_scale, k.dtype),
        x.grid.join(d.v).to(v.dtype).contiguous(),
        d_g,
        d_beta,
        d_initial,
    )
