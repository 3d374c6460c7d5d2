"""Steps that spellings of the delta rule share, each in several ways."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# --- the norm of queries and keys


def times_rsqrt(x, eps=1e-6):
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + eps)


def over_sqrt(x, eps=1e-6):
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + eps)


def over_norm(x):
    return x / x.norm(dim=-1, keepdim=True)


def over_longer_norm(x):
    return F.normalize(x, p=2.0, dim=-1)


def no_norm(x):
    return x


# --- the inverse of I + L, L strictly lower triangular [..., c, c]


def by_rows_in_place(lower):
    """Forward substitution, a row at a time into what holds -L."""
    inverse = -lower
    size = lower.shape[-1]
    for i in range(1, size):
        row = inverse[..., i, :i].clone()
        before = inverse[..., :i, :i].clone()
        inverse[..., i, :i] = row + (row.unsqueeze(-1) * before).sum(-2)
    return inverse + torch.eye(size, dtype=lower.dtype, device=lower.device)


def by_rows_in_a_list(lower):
    """Each row by a product with all rows above it."""
    size = lower.shape[-1]
    unit = torch.eye(size, dtype=lower.dtype, device=lower.device).expand(lower.shape)
    rows = [unit[..., 0, :]]
    for i in range(1, size):
        above = torch.stack(rows, -2)
        rows.append(unit[..., i, :] - torch.einsum("...j,...jc->...c", lower[..., i, :i], above))
    return torch.stack(rows, -2)


def by_solving(lower):
    unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower + unit, unit.expand_as(lower), upper=False, unitriangular=True)


def by_doubling(lower):
    """(I - L)(I + L^2)(I + L^4)...: L is nilpotent."""
    unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse, power, reached = unit - lower, lower @ lower, 2
    while reached < lower.shape[-1]:
        inverse, power, reached = inverse @ (unit + power), power @ power, 2 * reached
    return inverse


def by_power_series(lower):
    """I - L + L^2 - ..."""
    term = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    total = term
    for _ in range(lower.shape[-1] - 1):
        term = -torch.matmul(lower, term)
        total = total + term
    return total


def by_halves(lower):
    """[[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]."""
    size = lower.shape[-1]
    if size == 1:
        return torch.ones_like(lower)
    half = size // 2
    above, below = by_halves(lower[..., :half, :half]), by_halves(lower[..., half:, half:])
    corner = -below @ lower[..., half:, :half] @ above
    return torch.cat((F.pad(above, (0, size - half)), torch.cat((corner, below), -1)), -2)


def by_general_inverse(lower):
    return torch.linalg.inv(torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device) + lower)


def by_general_solve(lower):
    unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve(unit + lower, unit.expand_as(lower))


def by_solving_from_the_right(lower):
    unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(unit + lower, unit.expand_as(lower), upper=False, left=False)


def by_inverse_with_info(lower):
    return torch.linalg.inv_ex(torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device) + lower).inverse


def by_blocks(lower, size=2):
    """Diagonal blocks by rows; then those below, out of the blocks above: T_ij = -T_ii sum_k L_ik T_kj."""
    starts = range(0, lower.shape[-1], size)
    block = {(i, j): lower[..., i : i + size, j : j + size] for i in starts for j in starts}
    made = {(i, i): by_rows_in_place(block[i, i].clone()) for i in starts}
    for i in starts:
        for j in reversed(range(0, i, size)):
            made[i, j] = -made[i, i] @ sum(block[i, k] @ made[k, j] for k in range(j, i, size))
    nothing = torch.zeros_like(made[0, 0])
    return torch.cat([torch.cat([made.get((i, j), nothing) for j in starts], -1) for i in starts], -2)


# --- chunks and heads


def chunked(x, size):
    """[b, h, t, ...] as [b, h, chunks, size, ...]."""
    return x.reshape(*x.shape[:2], -1, size, *x.shape[3:])


def padded(x, behind):
    """[b, h, t, ...], longer by `behind` tokens of zeros."""
    return F.pad(x, (0, 0) * (x.dim() - 3) + (0, behind))


def repeated(x, heads):
    """[b, t, hk, K] for all value heads, by repeat_interleave."""
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def heads_of(q, k, v, scale, norm):
    """Queries and keys normed, for all value heads, and queries scaled."""
    return repeated(norm(q), v.shape[2]) * scale, repeated(norm(k), v.shape[2])


def expanded(x, heads):
    """[b, t, hk, K] for all value heads, as a view that is then flattened."""
    b, t, hk, size = x.shape
    return x[:, :, :, None, :].expand(b, t, hk, heads // hk, size).reshape(b, t, heads, size)


def causal(size, of, diagonal=0):
    return torch.ones(size, size, dtype=torch.bool, device=of.device).tril(diagonal)


def zeros_for(k, v):
    """A state for k [b, h, ..., K] and v [b, h, ..., V]."""
    return torch.zeros(k.shape[0], k.shape[1], k.shape[-1], v.shape[-1], dtype=v.dtype, device=v.device)
