"""`ssd_scan` and its backward in plain PyTorch: their meaning, what a CPU runs, and the oracle.

Within a chunk the recurrence is a GEMM with a lower triangular matrix, C_l . B_s times the decay from s to l; across
chunks it is the same thing with chunks for positions. The largest intermediate is that matrix, [b, chunks, h, l, l].
No loop over chunks, so that the number of tokens may be symbolic.

The logarithm of a decay is a sum over consecutive positions, here a difference of prefix sums. In float32 that would
lose what the prefixes hold beyond it, so prefix sums are float64, and so are their gradients, which cancel likewise.
They are GEMMs with a triangle of ones: Inductor can't compile a cumsum at a model's sizes, and float64 is out of
TF32's reach.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype


class Float64Sums:
    """Logarithms of decays as prefix sums, and the way back. What `prefix` makes may be indexed and subtracted along
    its last dimensions, `cumulate` sums such sums, and `to` gives their value in a dtype."""

    @staticmethod
    def prefix(a: Tensor) -> Tensor:
        return _prefix_sums(a)

    cumulate = prefix

    @staticmethod
    def to(sums: Tensor, dtype: torch.dtype) -> Tensor:
        return sums.to(dtype)

    @staticmethod
    def gradient(d_decay: Tensor, d_in: Tensor, d_out: Tensor, d_total: Tensor) -> Tensor:
        """The gradient [b, c, h, l] of the logarithms of single steps, in float64, from those of the logarithms of what
        `_Chunks` makes of them: decay [b, c, h, l, s], decay_in, decay_out [b, c, h, l] and total [b, c, h]."""
        d_in, d_out = d_in.double(), d_out.double()
        rows, columns = (d_decay.sum(i, dtype=torch.float64) for i in (-1, -2))
        d_last = (d_total.double() + d_out.sum(-1)).unsqueeze(-1)
        return _prefix_sums_adjoint(rows - columns + d_in - d_out + F.pad(d_last, (d_in.shape[-1] - 1, 0)))


class _Chunks:
    """The operands by chunk, padded with steps of size 0, which leave the state as it is.

    c: chunks, l: positions of one, g: groups, r: heads of a group. `cuts` [b, c, 1, l]: how many documents have begun
    in the chunk up to and with l; what decays from where there were fewer is nothing. None without documents.
    """

    def __init__(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, seq_idx: Tensor | None, chunk_size: int,
        dtype: torch.dtype, sums: type[Float64Sums],
    ) -> None:  # fmt: skip
        self.tokens, self.groups, self.dtype, self.sums = x.shape[1], B.shape[2], dtype, sums
        short = isinstance(self.tokens, int) and 0 < self.tokens < chunk_size
        self.length = self.tokens if short else chunk_size
        self.chunks = (self.tokens + self.length - 1) // self.length
        self.x, self.dt = self.split(x), self.split(dt)  # [b, c, l, h, p], [b, c, l, h]
        self.A = A.to(dtype)
        self.xdt = self.x * self.dt.unsqueeze(-1)
        self.B, self.C = (self.split(t).transpose(2, 3) for t in (B, C))  # [b, c, g, l, n]
        logs = sums.prefix((self.steps(dt) * self.A).transpose(-1, -2))  # [b, c, h, l]
        last = logs[..., -1:]
        self.decay = self.between(logs).exp()  # from s to l
        self.decay_in = sums.to(logs, dtype).exp()  # from before the chunk to l
        self.decay_out = sums.to(last - logs, dtype).exp()  # from s to the end of the chunk
        self.total = last.squeeze(-1)  # [b, c, h]
        self.over = sums.to(self.total, dtype).exp()  # from before the chunk to its end
        self.cuts = self.begun = None
        if seq_idx is not None:
            self.begun = self.split(_begins(seq_idx), torch.bool).unsqueeze(2)  # [b, c, 1, l]
            self.cuts = cuts = _counts(self.begun)
            end = cuts[..., -1:]
            self.decay = torch.where(cuts.unsqueeze(-1) == cuts.unsqueeze(-2), self.decay, 0)
            self.decay_in = torch.where(cuts == 0, self.decay_in, 0)
            self.decay_out = torch.where(cuts == end, self.decay_out, 0)
            self.over = torch.where(end.squeeze(-1) == 0, self.over, 0)

    def steps(self, dt: Tensor) -> Tensor:
        """[b, c, l, h]; of one row or one chunk where all have its steps, as in retention, and so are decays."""
        rows, tokens = (isinstance(n, int) and n == 0 for n in dt.stride()[:2])
        whole = isinstance(self.tokens, int) and self.tokens > 0 and self.tokens % self.length == 0
        self.once = tokens and whole and self.sums is Float64Sums
        return self.dt[: 1 if rows else None, : 1 if self.once else None]

    def split(self, t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        behind = self.chunks * self.length - self.tokens
        padded = t.to(dtype or self.dtype)
        if not isinstance(behind, int) or behind:
            padded = F.pad(padded, (0, 0) * (t.dim() - 2) + (0, behind))
        return padded.unflatten(1, (self.chunks, self.length))

    def join(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        return t.flatten(1, 2)[:, : self.tokens].to(dtype).contiguous()

    def rows(self, t: Tensor) -> Tensor:
        """[b, c, l, h, p] -> [b, c, g, l, r * p]: the heads of a group side by side."""
        return t.unflatten(3, (self.groups, -1)).flatten(4).transpose(2, 3)

    def unrows(self, t: Tensor, heads: int) -> Tensor:
        return t.transpose(2, 3).unflatten(4, (heads // self.groups, -1)).flatten(3, 4)

    def by_group(self, t: Tensor) -> Tensor:
        """[b, c, h, p, n] -> [b, c, g, r * p, n]."""
        return t.unflatten(2, (self.groups, -1)).flatten(3, 4)

    def over_heads(self, t: Tensor) -> Tensor:
        """[b, c, h, ...] -> [b, c, g, r, ...]."""
        return t.unflatten(2, (self.groups, -1))

    def carry(self) -> Tensor:
        """[b, h, z, c]: how much of what is added before chunk c is left where chunk z begins."""
        total = self.total.transpose(-1, -2)
        total = total.expand(-1, -1, self.chunks) if self.once else total
        carry = self.between(self.sums.cumulate(F.pad(total, (1, 0)))).exp()
        if self.cuts is None:
            return carry
        cuts = _counts(F.pad(self.cuts[..., -1].transpose(-1, -2) > 0, (1, 0)))  # [b, 1, z]
        return torch.where(cuts.unsqueeze(-1) == cuts.unsqueeze(-2), carry, 0)

    def between(self, logs: Tensor) -> Tensor:
        """[..., l, s]: what comes behind s and up to l, -inf where l comes before s; `logs` are prefix sums."""
        n = torch.arange(logs.shape[-1], device=logs.device)
        apart = self.sums.to(logs.unsqueeze(-1) - logs.unsqueeze(-2), self.dtype)
        return torch.where(n.unsqueeze(-1) >= n, apart, -torch.inf)


def _prefix_sums(a: Tensor) -> Tensor:
    """[..., n]: a[0] + ... + a[l], in float64."""
    return a.double() @ _triangle(a).t()


def _prefix_sums_adjoint(d: Tensor) -> Tensor:
    """The gradient of `a` for the gradient `d`, float64, of `_prefix_sums(a)`."""
    return d @ _triangle(d)


def _triangle(a: Tensor) -> Tensor:
    n = a.shape[-1]
    return torch.ones(n, n, dtype=torch.float64, device=a.device).tril()


def _begins(seq_idx: Tensor) -> Tensor:
    """[b, t]: whether a document begins there, its number being another than the one before."""
    n = torch.arange(seq_idx.shape[1], device=seq_idx.device)
    return (seq_idx != F.pad(seq_idx, (1, 0))[:, :-1]) & (n > 0)


def _counts(flags: Tensor) -> Tensor:
    """[..., n]: how many of `flags` up to each are set."""
    n = torch.arange(flags.shape[-1], device=flags.device)
    return (flags.unsqueeze(-2) & (n.unsqueeze(-1) >= n)).sum(-1, dtype=torch.int32)


def _mix(weights: Tensor, states: Tensor) -> Tensor:
    """weights [b, h, z, c] over states [b, c, h, p, n] -> [b, z, h, p, n]."""
    mixed = weights @ states.transpose(1, 2).flatten(3)
    return mixed.unflatten(-1, states.shape[3:]).transpose(1, 2)


def _at_once(k: _Chunks, first: Tensor, added: Tensor) -> Tensor:
    return _mix(k.carry(), torch.cat((first, added), 1))


def _no_state(states: Tensor) -> Tensor:
    """[b, c, h, p, n] -> zeros [b, 1, h, p, n], also where there is no chunk."""
    return states.new_zeros((states.shape[0], 1, *states.shape[2:]))


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int,
    out_dtype: torch.dtype,
    seq_idx: Tensor | None = None,
    sums: type[Float64Sums] = Float64Sums,
    across: Callable[[_Chunks, Tensor, Tensor], Tensor] = _at_once,
) -> tuple[Tensor, Tensor, Tensor]:
    """across: the states in front of each chunk and behind the last, of the first and of what each chunk adds."""
    dtype = compute_dtype(x, dt, A, B, C, D, initial_state)
    k, heads = _Chunks(x, dt, A, B, C, seq_idx, chunk_size, dtype, sums), x.shape[2]

    scores = (k.C @ k.B.transpose(-1, -2)).unsqueeze(3) * k.over_heads(k.decay)  # [b, c, g, r, l, s]
    y = (scores @ k.over_heads(k.xdt.transpose(2, 3))).flatten(2, 3).transpose(2, 3)

    leaving = k.rows(k.xdt * k.decay_out.transpose(2, 3).unsqueeze(-1))
    added = (leaving.transpose(-1, -2) @ k.B).unflatten(3, (heads // k.groups, -1)).flatten(2, 3)
    first = _no_state(added) if initial_state is None else initial_state.to(dtype).unsqueeze(1)
    alone = initial_state is None and isinstance(k.chunks, int) and k.chunks == 1
    states = torch.cat((first, added), 1) if alone else across(k, first, added)
    states, final = states[:, :-1].contiguous(), states[:, -1].clone(memory_format=torch.contiguous_format)

    if not alone:  # what enters is nothing
        entered = k.unrows(k.C @ k.by_group(states).transpose(-1, -2), heads)
        y = y + entered * k.decay_in.transpose(2, 3).unsqueeze(-1)
    if D is not None:
        y = y + D.to(dtype).unsqueeze(-1) * k.x
    return k.join(y, out_dtype), final, states


def ssd_scan_backward(
    dy: Tensor,
    dfinal: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    states: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
    sums: type[Float64Sums] = Float64Sums,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, A, B, C, D and initial_state, the last two empty where there is none.

    Everything within a chunk is recomputed from the operands; `states` is what was saved.
    """
    dtype = states.dtype
    k, heads = _Chunks(x, dt, A, B, C, seq_idx, chunk_size, dtype, sums), x.shape[2]
    dy = k.split(dy)

    # Across chunks: the gradient of the state that each chunk leaves behind.
    decayed = k.rows(dy * k.decay_in.transpose(2, 3).unsqueeze(-1))
    read = (decayed.transpose(-1, -2) @ k.C).unflatten(3, (heads // k.groups, -1)).flatten(2, 3)
    last = _no_state(read) if dfinal is None else dfinal.to(dtype).unsqueeze(1)
    d_states = _mix(k.carry().transpose(-1, -2), torch.cat((read, last), 1))
    left = d_states[:, 1:]
    by_group, left_by_group = k.by_group(states), k.by_group(left)

    # Within a chunk: scores, then what enters it, then what it adds.
    inner = k.C @ k.B.transpose(-1, -2)
    decay = k.over_heads(k.decay)
    dy_heads, xdt_heads = (k.over_heads(t.transpose(2, 3)) for t in (dy, k.xdt))  # [b, c, g, r, l, p]
    d_scores = dy_heads @ xdt_heads.transpose(-1, -2)
    scores = inner.unsqueeze(3) * decay
    d_inner = (d_scores * decay).sum(3)
    d_decay = (d_scores * scores).flatten(2, 3)  # of their logarithms, [b, c, h, l, s]

    from_left = k.unrows(k.B @ left_by_group.transpose(-1, -2), heads) * k.decay_out.transpose(2, 3).unsqueeze(-1)
    d_xdt = (scores.transpose(-1, -2) @ dy_heads).flatten(2, 3).transpose(2, 3) + from_left
    leaving = k.rows(k.xdt * k.decay_out.transpose(2, 3).unsqueeze(-1))
    d_C = d_inner @ k.B + decayed @ by_group
    d_B = d_inner.transpose(-1, -2) @ k.C + leaving @ left_by_group

    # Logarithms of decays, all of them differences of prefix sums.
    entered = k.unrows(k.C @ by_group.transpose(-1, -2), heads) * k.decay_in.transpose(2, 3).unsqueeze(-1)
    d_in = (dy * entered).sum(-1).transpose(2, 3)  # [b, c, h, l]
    d_out = (k.xdt * from_left).sum(-1).transpose(2, 3)
    d_total = (left * states).sum((-2, -1)) * k.over
    d_a = sums.gradient(d_decay, d_in, d_out, d_total).to(dtype)
    if k.begun is not None:
        d_a = torch.where(k.begun, 0, d_a)  # a document's first token has nothing to decay
    d_a = d_a.transpose(2, 3)  # [b, c, l, h]

    d_dt = d_a * k.A + (d_xdt * k.x).sum(-1)
    d_x = d_xdt * k.dt.unsqueeze(-1)
    d_D, d_initial = states.new_empty(0), states.new_empty(0)
    if D is not None:
        d_x = d_x + D.to(dtype).unsqueeze(-1) * dy
        d_D = (dy * k.x).sum((0, 1, 2, 4)).to(D.dtype)
    if initial_state is not None:
        d_initial = d_states[:, 0].to(initial_state.dtype).clone(memory_format=torch.contiguous_format)
    return (
        k.join(d_x, x.dtype),
        k.join(d_dt, dt.dtype),
        (d_a * k.dt).sum((0, 1, 2)).to(A.dtype),
        k.join(d_B.transpose(2, 3), B.dtype),
        k.join(d_C.transpose(2, 3), C.dtype),
        d_D,
        d_initial,
    )
