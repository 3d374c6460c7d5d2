"""Routed experts as people write them, and what looks like them and is something else."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, DIM, HIDDEN, EXPERTS, CHOICES = 11, 8, 16, 3, 2


class Expert(nn.Module):
    def __init__(
        self,
        activation: Callable[[Tensor], Tensor] = F.silu,
        bias: bool = False,
        of_up: Callable[[Tensor], Tensor] = lambda up: up,
    ):
        super().__init__()
        self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=bias) for _ in range(2))
        self.down = nn.Linear(HIDDEN, DIM, bias=bias)
        self.activation, self.of_up = activation, of_up

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.of_up(self.up(x)))


class Summed(nn.Linear):
    """A linear whose bias is added afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        return self.bias + F.linear(x, self.weight)


class Ungated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Fused(nn.Module):
    """Gate and up in one projection."""

    def __init__(self, up_first: bool = False):
        super().__init__()
        self.both, self.down = nn.Linear(DIM, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)
        self.up_first = up_first

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        if self.up_first:
            gate, up = up, gate
        return self.down(F.silu(gate) * up)


class MoE(nn.Module):
    """A router, and `body(self, x, indices, gates)` with experts of its own: a list, or weights in one tensor each."""

    def __init__(
        self, body, expert: Callable[[], nn.Module] = Expert, experts: int = EXPERTS, stacked: bool = False,
        choices: int = CHOICES,
    ):  # fmt: skip
        super().__init__()
        self.body, self.router, self.choices = body, nn.Linear(DIM, experts, bias=False), choices
        self.num_experts = experts
        if stacked:
            self.gate_up = nn.Parameter(torch.randn(experts, 2 * HIDDEN, DIM) / 3)
            self.down = nn.Parameter(torch.randn(experts, DIM, HIDDEN) / 3)
        else:
            self.experts = nn.ModuleList(expert() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        gates, indices = self.router(x).softmax(-1).topk(self.choices, dim=-1)
        return self.body(self, x, indices, gates)


def where_index_add(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, m.experts[e](x[token]) * gates[token, choice, None])
    return y


def skipping_idle_experts(m, x, indices, gates):
    """With a branch on data, at which Dynamo breaks the graph."""
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        mask = indices == e
        if mask.any():
            token, choice = torch.where(mask)
            y.index_add_(0, token, m.experts[e](x[token]) * gates[token, choice, None])
    return y


def one_hot_mask(m, x, indices, gates):
    """As transformers' Mixtral had it."""
    y = torch.zeros_like(x)
    mask = F.one_hot(indices, num_classes=m.num_experts).permute(2, 1, 0)
    for e in range(m.num_experts):
        choice, token = torch.where(mask[e])
        current = x[None, token].reshape(-1, x.shape[-1])
        y.index_add_(0, token, (m.experts[e](current) * gates[token, choice, None]).to(x.dtype))
    return y


def one_hot_tokens_first(m, x, indices, gates):
    """As transformers' DeepSeek-V3 had it, but for its branch on the number of tokens."""
    y = torch.zeros_like(x, dtype=gates.dtype)
    mask = F.one_hot(indices, num_classes=m.num_experts).permute(2, 0, 1)
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(mask[e])
        weight = gates[token, choice]
        y.index_add_(0, token, expert(x[token]) * weight.unsqueeze(-1))
    return y.type(x.dtype)


def nonzero_add_assign(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = (indices == e).nonzero(as_tuple=True)
        y[token] += gates[token, choice].unsqueeze(-1) * expert(x[token])
    return y


def index_put_accumulate(m, x, indices, gates):
    y = x.new_zeros(x.shape)
    for e, expert in enumerate(m.experts):
        token, choice = torch.nonzero(indices == e, as_tuple=True)
        y = y.index_put((token,), expert(x.index_select(0, token)) * gates[token, choice, None], accumulate=True)
    return y


def experts_backwards(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in reversed(range(m.num_experts)):
        token, choice = torch.where(indices == e)
        y = y.index_add(0, token, m.experts[e](x[token]) * gates[token, choice, None])
    return y


def onto_the_input(m, x, indices, gates):
    """The sum starts from the residual stream."""
    y = x.clone()
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, expert(x[token]) * gates[token, choice, None])
    return y


def stacked_weights(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        token, choice = torch.where(indices == e)
        gate, up = F.linear(x[token], m.gate_up[e]).chunk(2, dim=-1)
        y.index_add_(0, token, F.linear(F.silu(gate) * up, m.down[e]) * gates[token, choice, None])
    return y


def stacked_transposed(m, x, indices, gates):
    y = torch.zeros_like(x)
    gate_up, down = m.gate_up.transpose(1, 2), m.down.mT
    for e in range(m.num_experts):
        token, choice = torch.where(indices == e)
        both = x[token] @ gate_up[e]
        gate, up = both[:, :HIDDEN], both[:, HIDDEN:]
        y.index_add_(0, token, ((F.gelu(gate) * up) @ down[e]) * gates[token, choice, None])
    return y


def some_of_the_experts(m, x, indices, gates):
    """One rank's share."""
    y = torch.zeros_like(x)
    for e in range(1, 3):
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, m.experts[e](x[token]) * gates[token, choice, None])
    return y


def batched_gemms(m, x, indices, gates):
    """Every choice with its own copy of the weights, as transformers' `batched_mm`."""
    ids = indices.reshape(-1).clamp(0, m.num_experts - 1)
    rows = x.repeat_interleave(CHOICES, dim=0)
    gate, up = torch.bmm(m.gate_up[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    out = torch.bmm(m.down[ids], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (out * gates.reshape(-1).unsqueeze(-1)).view(x.shape[0], CHOICES, -1).sum(dim=1)


def sorted_grouped_gemms(m, x, indices, gates):
    """Rows sorted by expert through grouped GEMMs, as transformers' `grouped_mm`; in bfloat16 only."""
    ids = indices.reshape(-1)
    order = torch.argsort(ids)
    ends = torch.bincount(ids, minlength=m.num_experts).cumsum(0).to(torch.int32)
    rows = x[order // CHOICES]
    gate, up = torch._grouped_mm(rows, m.gate_up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
    out = torch._grouped_mm(F.silu(gate) * up, m.down.transpose(-2, -1), offs=ends)
    out = (out * gates.reshape(-1)[order].unsqueeze(-1))[torch.argsort(order)]
    return out.view(x.shape[0], CHOICES, -1).sum(dim=1)


def batched_by_other_choices(m, x, indices, gates):
    """The second GEMM takes the next expert's weight."""
    ids = indices.reshape(-1).clamp(0, m.num_experts - 1)
    rows = x.repeat_interleave(CHOICES, dim=0)
    gate, up = torch.bmm(m.gate_up[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    out = torch.bmm(m.down[(ids + 1) % m.num_experts], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (out * gates.reshape(-1).unsqueeze(-1)).view(x.shape[0], CHOICES, -1).sum(dim=1)


def batched_with_gates_of_experts(m, x, indices, gates):
    """A gate per channel is no gate per choice."""
    ids = indices.reshape(-1).clamp(0, m.num_experts - 1)
    rows = x.repeat_interleave(CHOICES, dim=0)
    gate, up = torch.bmm(m.gate_up[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    out = torch.bmm(m.down[ids], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (out * m.down[ids].mean(-1)).view(x.shape[0], CHOICES, -1).sum(dim=1)


def batched_by_any_numbers(m, x, indices, gates):
    """Numbers that may be negative count from the end, as python's do."""
    ids = (indices - 1).reshape(-1)
    rows = x.repeat_interleave(CHOICES, dim=0)
    gate, up = torch.bmm(m.gate_up[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    out = torch.bmm(m.down[ids], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (out * gates.reshape(-1).unsqueeze(-1)).view(x.shape[0], CHOICES, -1).sum(dim=1)


def scaled_input(m, x, indices, gates):
    """The gate on the expert's input, where it is no factor of the output."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, expert(x[token] * gates[token, choice, None]))
    return y


def as_gpt_oss(m, x, indices, gates):
    """As transformers' `batched_mm`: biases, clamps, channels of gate and up in turn, and swish."""
    ids = indices.reshape(-1).clamp(0, m.num_experts - 1)
    both = torch.bmm(m.gate_up[ids], x.repeat_interleave(CHOICES, dim=0)[..., None])[..., 0] + m.gate_up.mean(-1)[ids]
    gate, up = both[..., ::2].clamp(max=0.7), both[..., 1::2].clamp(-0.7, 0.7)
    hidden = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    out = torch.bmm(m.down[ids], hidden[..., None])[..., 0] + m.down.mean(-1)[ids]
    return (out * gates.reshape(-1, 1)).view(x.shape[0], CHOICES, -1).sum(dim=1)


def stacked_as_gpt_oss(m, x, indices, gates):
    """As transformers' own loop, but over all experts: weights lie [in, out]."""
    gate_up, down, y = m.gate_up.mT.contiguous(), m.down.mT.contiguous(), torch.zeros_like(x)
    into, behind = m.gate_up.mean(-1), m.down.mean(-1)
    for e in range(m.num_experts):
        token, choice = torch.where(indices == e)
        both = x[token] @ gate_up[e] + into[e]
        gate, up = both[..., ::2].clamp(min=None, max=0.7), both[..., 1::2].clamp(min=-0.7, max=0.7)
        out = ((up + 1) * (gate * torch.sigmoid(gate * 1.702))) @ down[e] + behind[e]
        y.index_add_(0, token, (out * gates[token, choice, None]).to(x.dtype))
    return y


def scaled_input_of_biased(m, x, indices, gates):
    """Only rows that chose an expert are there, so that a bias needs no gate."""
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        token, choice = torch.where(indices == e)
        gate, up = F.linear(x[token] * gates[token, choice, None], m.gate_up[e], m.gate_up[e].mean(-1)).chunk(2, dim=-1)
        y.index_add_(0, token, F.linear(F.silu(gate) * up, m.down[e], m.down.unbind(0)[e].mean(-1)))
    return y


def returning_what_they_read(m, x, indices, gates):
    """Zero-computation experts (arXiv:2410.07348): all but the first return what they read."""
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        token, choice = torch.where(indices == e)
        out = m.experts[e](x[token]) if e < 1 else x[token]
        y.index_add_(0, token, out * gates[token, choice, None])
    return y


def first_returns_what_it_reads(m, x, indices, gates):
    """Onto the residual stream, and by a matrix of gates."""
    y, by_expert = x.clone(), torch.zeros(x.shape[0], m.num_experts, dtype=x.dtype).scatter(1, indices, gates)
    for e in range(m.num_experts):
        token, _ = torch.where(indices == e)
        out = m.experts[e](x[token]) if e else x[token]
        y.index_add_(0, token, out * by_expert[token, e, None])
    return y


def returning_among_stacked(m, x, indices, gates):
    """The last expert's part of one weight nothing reads, and the other weight has none."""
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        token, choice = torch.where(indices == e)
        out = x[token]
        if e < m.num_experts - 1:
            gate, up = F.linear(out, m.gate_up[e]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, m.down[: m.num_experts - 1].unbind()[e])
        y.index_add_(0, token, out * gates[token, choice, None])
    return y


def rows_read_twice(m, x, indices, gates):
    """Rows are taken anew for each projection."""
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        token, choice = torch.where(indices == e)
        own = m.experts[e]
        y.index_add_(0, token, own.down(F.silu(own.gate(x[token])) * own.up(x[token])) * gates[token, choice, None])
    return y


LISTS = [where_index_add, one_hot_mask, one_hot_tokens_first, nonzero_add_assign, index_put_accumulate,
         experts_backwards, onto_the_input, some_of_the_experts, scaled_input,
         returning_what_they_read, first_returns_what_it_reads, rows_read_twice]  # fmt: skip
STACKED = [stacked_weights, stacked_transposed, batched_gemms, as_gpt_oss, stacked_as_gpt_oss, scaled_input_of_biased,
           returning_among_stacked]  # fmt: skip


# --- near misses


def one_expert_twice(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in (*range(m.num_experts), 0):
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, m.experts[e](x[token]) * gates[token, choice, None])
    return y


def an_expert_left_out(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in (0, 2):
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, m.experts[e](x[token]) * gates[token, choice, None])
    return y


def gate_of_the_first_choice(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, _ = torch.where(indices == e)
        y.index_add_(0, token, expert(x[token]) * gates[token, 0, None])
    return y


def capacity(m, x, indices, gates):
    """Tokens beyond the expert's capacity are dropped."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        token, choice = token[:3], choice[:3]
        y.index_add_(0, token, expert(x[token]) * gates[token, choice, None])
    return y


def next_experts_tokens(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, expert(x.roll(1, 0)[token]) * gates[token, choice, None])
        x = x + 1
    return y


def output_read_elsewhere(m, x, indices, gates):
    y, norms = torch.zeros_like(x), []
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        out = expert(x[token])
        norms.append(out.square().sum())
        y.index_add_(0, token, out * gates[token, choice, None])
    return y, torch.stack(norms)


def written_by_any_indices(m, x, indices, gates):
    """`+=` by an index that may come twice counts it once."""
    return nonzero_add_assign(m, x, (indices // 2).contiguous(), gates)


def scaled_by_any_row(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, expert(x[token] * gates[choice, choice, None]))
    return y


def rows_added_to_outputs(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        token, choice = torch.where(indices == e)
        gate, up = F.linear(x[token], m.gate_up[e]).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, m.down[e]) + x[token]
        y.index_add_(0, token, out * gates[token, choice, None])
    return y


def normed_outputs(m, x, indices, gates):
    """A norm between an expert and its gate, in the dtype of its own."""
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        token, choice = torch.where(indices == e)
        out = m.experts[e](x[token]).float() * (1 + m.router.weight[0])
        out = (out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-6)).type_as(x)
        y.index_add_(0, token, out * gates[token, choice, None])
    return y


def returning_without_a_gate(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, m.experts[e](x[token]) * gates[token, choice, None] if e else x[token])
    return y


def returning_other_rows(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        token, choice = torch.where(indices == e)
        out = m.experts[e](x[token]) if e else x.tanh()[token]
        y.index_add_(0, token, out * gates[token, choice, None])
    return y


def returning_twice(m, x, indices, gates):
    y = torch.zeros_like(x)
    for i, e in enumerate((*range(m.num_experts), 0)):
        token, choice = torch.where(indices == e)
        out = m.experts[e](x[token]) if i < m.num_experts else x[token]
        y.index_add_(0, token, out * gates[token, choice, None])
    return y


NEAR_MISSES = {
    "normed_outputs": ("no-expert", normed_outputs, Expert),
    "returning_without_a_gate": ("no-expert", returning_without_a_gate, Expert),
    "returning_other_rows": ("inputs", returning_other_rows, Expert),
    "returning_twice": ("twice", returning_twice, Expert),
    "one_expert_twice": ("twice", one_expert_twice, Expert),
    "an_expert_left_out": ("gaps", an_expert_left_out, Expert),
    "gate_of_the_first_choice": ("gates", gate_of_the_first_choice, Expert),
    "capacity": ("no-rows", capacity, Expert),
    "next_experts_tokens": ("inputs", next_experts_tokens, Expert),
    "output_read_elsewhere": ("escapes", output_read_elsewhere, Expert),
    "written_by_any_indices": ("twice", written_by_any_indices, Expert),
    "scaled_by_any_row": ("gates", scaled_by_any_row, Expert),
    "activation": ("activation", where_index_add, lambda: Expert(F.softplus)),
    "no_softcap": ("activation", where_index_add, lambda: Expert(lambda h: 0.2 * torch.tanh(h / 0.3) * torch.sigmoid(h))),
    "another_sigmoid": ("activation", where_index_add, lambda: Expert(lambda h: h.clamp(max=0.3) * torch.sigmoid(h + 1))),
    "clamp": ("clamp", where_index_add, lambda: Expert(lambda h: F.silu(h.clamp(max=h.amax())))),
    "projections": ("projections", where_index_add, lambda: Expert(lambda h: F.silu(h + 1))),
}

STACKED_NEAR_MISSES = {
    "indices": batched_by_other_choices,
    "range": batched_by_any_numbers,
    "bias": rows_added_to_outputs,
}
