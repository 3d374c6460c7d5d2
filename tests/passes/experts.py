"""Routed experts as people write them, and what looks like them and is something else."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, DIM, HIDDEN, EXPERTS, CHOICES = 11, 8, 16, 3, 2


class Expert(nn.Module):
    def __init__(self, activation=F.silu, bias: bool = False, of_up: Callable[[Tensor], Tensor] = lambda up: up):
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

    def __init__(self, body, expert: Callable[[], nn.Module] = Expert, experts=EXPERTS, stacked=False, choices=CHOICES):
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


# --- parts of bodies


def swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def clamped_swiglu(both: Tensor) -> Tensor:
    """As gpt-oss has it: channels of gate and up in turn."""
    gate, up = both[..., ::2].clamp(max=0.7), both[..., 1::2].clamp(-0.7, 0.7)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def matrix(indices: Tensor, gates: Tensor) -> Tensor:
    """[T, E], zero where an expert was not chosen."""
    return torch.zeros(*gates.shape[:-1], EXPERTS, dtype=gates.dtype).scatter(-1, indices, gates)


def _add(y, rows, out):
    y[rows] += out
    return y


def _write(y, rows, out):
    y[rows] = out
    return y


ADDS = {"index_add_": lambda y, rows, out: y.index_add_(0, rows, out), "+=": _add, "=": _write}


def over_experts(m, x, found, out, *, onto=torch.zeros_like, experts=range, add="index_add_"):
    """A loop that adds `out(e, *found(e))` to `onto(x)`, at the rows that the first of what is found names. add: one of
    ADDS, or a function of the sum, rows and what is added to them."""
    y = onto(x)
    for e in experts(m.num_experts):
        at = found(e)
        y = ADDS.get(add, add)(y, at[0], out(e, *at))
    return y


def loop(out, name: str = "", found=torch.where, **options):
    """The body that adds `out(m, x, gates, e, *found(marks))`, of the marks of each choice that is expert `e`."""

    def body(m, x, indices, gates):
        made = lambda e, *at: out(m, x, gates, e, *at)  # noqa: E731
        return over_experts(m, x, lambda e: found(indices == e), made, **options)

    body.__name__ = name or out.__name__
    return body


def weighted(m, x, gates, e, token, choice):
    return m.experts[e](x[token]) * gates[token, choice, None]


def by_name(*bodies):
    return {body.__name__: body for body in bodies}


# --- spellings: of experts in a list

where_index_add = loop(weighted, "where_index_add")
onto_the_input = loop(weighted, "onto_the_input", onto=Tensor.clone)  # the sum starts from the residual stream
some_of_the_experts = loop(weighted, "some_of_the_experts", experts=lambda _: range(1, 3))  # one rank's share


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
    mask = F.one_hot(indices, num_classes=m.num_experts).permute(2, 1, 0)

    def out(e, token, choice):
        current = x[None, token].reshape(-1, x.shape[-1])
        return (m.experts[e](current) * gates[token, choice, None]).to(x.dtype)

    return over_experts(m, x, lambda e: torch.where(mask[e])[::-1], out)


def one_hot_tokens_first(m, x, indices, gates):
    """As transformers' DeepSeek-V3 had it, but for its branch on the number of tokens."""
    mask = F.one_hot(indices, num_classes=m.num_experts).permute(2, 0, 1)

    def out(e, token, choice):
        weight = gates[token, choice]
        return m.experts[e](x[token]) * weight.unsqueeze(-1)

    onto = lambda x: torch.zeros_like(x, dtype=gates.dtype)  # noqa: E731
    return over_experts(m, x, lambda e: torch.where(mask[e]), out, onto=onto).type(x.dtype)


nonzero_add_assign = loop(
    lambda m, x, g, e, t, k: g[t, k].unsqueeze(-1) * m.experts[e](x[t]), "nonzero_add_assign",
    found=lambda marks: marks.nonzero(as_tuple=True), add="+=")  # fmt: skip


@loop
def scaled_input(m, x, gates, e, token, choice):
    """The gate on the expert's input, where it is no factor of the output."""
    return m.experts[e](x[token] * gates[token, choice, None])


@loop
def returning_what_they_read(m, x, gates, e, token, choice):
    """Zero-computation experts (arXiv:2410.07348): all but the first return what they read."""
    return (m.experts[e](x[token]) if e < 1 else x[token]) * gates[token, choice, None]


def first_returns_what_it_reads(m, x, indices, gates):
    """Onto the residual stream, and by a matrix of gates."""
    by_expert = torch.zeros(x.shape[0], m.num_experts, dtype=x.dtype).scatter(1, indices, gates)

    def out(e, token, _):
        return (m.experts[e](x[token]) if e else x[token]) * by_expert[token, e, None]

    return over_experts(m, x, lambda e: torch.where(indices == e), out, onto=Tensor.clone)


@loop
def rows_read_twice(m, x, gates, e, token, choice):
    """Rows are taken anew for each projection."""
    own = m.experts[e]
    return own.down(F.silu(own.gate(x[token])) * own.up(x[token])) * gates[token, choice, None]


LISTS = by_name(
    where_index_add, onto_the_input, some_of_the_experts, one_hot_mask, one_hot_tokens_first, nonzero_add_assign,
    scaled_input, returning_what_they_read, first_returns_what_it_reads, rows_read_twice,
) | {
    "index_put_accumulate": loop(
        lambda m, x, g, e, t, k: m.experts[e](x.index_select(0, t)) * g[t, k, None],
        found=lambda marks: torch.nonzero(marks, as_tuple=True), onto=lambda x: x.new_zeros(x.shape),
        add=lambda y, rows, out: y.index_put((rows,), out, accumulate=True)),
    # without a gradient to the tokens: of all of them, of an expert's, and of those seen with another dimension
    "detached_tokens": loop(lambda m, x, g, e, t, k: m.experts[e](x.detach()[t]) * g[t, k, None]),
    "detached_rows": loop(lambda m, x, g, e, t, k: m.experts[e](x[t].detach()) * g[t, k, None]),
    "detached_views_of_rows": loop(
        lambda m, x, g, e, t, k: m.experts[e](x[None, t].reshape(-1, x.shape[-1]).detach()) * g[t, k, None]),
    "experts_backwards": loop(
        weighted, experts=lambda n: range(n)[::-1], add=lambda y, rows, out: y.index_add(0, rows, out)),
}  # fmt: skip

# --- of weights in one tensor for all


def of_stacked(m, rows, e, down=None):
    return F.linear(swiglu(F.linear(rows, m.gate_up[e])), m.down[e] if down is None else down)


@loop
def stacked_weights(m, x, gates, e, token, choice):
    return of_stacked(m, x[token], e) * gates[token, choice, None]


def stacked_transposed(m, x, indices, gates):
    gate_up, down = m.gate_up.transpose(1, 2), m.down.mT

    def out(e, token, choice):
        both = x[token] @ gate_up[e]
        gate, up = both[:, :HIDDEN], both[:, HIDDEN:]
        return ((F.gelu(gate) * up) @ down[e]) * gates[token, choice, None]

    return over_experts(m, x, lambda e: torch.where(indices == e), out)


def by_choices(m, x, ids, gates=None, down_ids=None):
    """Every choice with its own copy of the weights, of experts `ids` and, downwards, `down_ids`."""
    hidden = swiglu(torch.bmm(m.gate_up[ids], x.repeat_interleave(CHOICES, dim=0).unsqueeze(-1)).squeeze(-1))
    out = torch.bmm(m.down[ids if down_ids is None else down_ids], hidden.unsqueeze(-1)).squeeze(-1)
    weight = m.down[ids].mean(-1) if gates is None else gates.reshape(-1).unsqueeze(-1)
    return (out * weight).view(x.shape[0], CHOICES, -1).sum(dim=1)


def slots(m, indices):
    return indices.reshape(-1).clamp(0, m.num_experts - 1)


def batched_gemms(m, x, indices, gates):
    """As transformers' `batched_mm`."""
    return by_choices(m, x, slots(m, indices), gates)


def batched_by_other_choices(m, x, indices, gates):
    """The second GEMM takes the next expert's weight."""
    return by_choices(m, x, ids := slots(m, indices), gates, (ids + 1) % m.num_experts)


def batched_with_gates_of_experts(m, x, indices, gates):
    """A gate per channel is no gate per choice."""
    return by_choices(m, x, slots(m, indices))


def batched_by_any_numbers(m, x, indices, gates):
    """Numbers that may be negative count from the end, as python's do."""
    return by_choices(m, x, (indices - 1).reshape(-1), gates)


def sorted_grouped_gemms(m, x, indices, gates):
    """Rows sorted by expert through grouped GEMMs, as transformers' `grouped_mm`; in bfloat16 only."""
    ids = indices.reshape(-1)
    order = torch.argsort(ids)
    ends = torch.bincount(ids, minlength=m.num_experts).cumsum(0).to(torch.int32)
    hidden = swiglu(torch._grouped_mm(x[order // CHOICES], m.gate_up.transpose(-2, -1), offs=ends))
    out = torch._grouped_mm(hidden, m.down.transpose(-2, -1), offs=ends)
    out = (out * gates.reshape(-1)[order].unsqueeze(-1))[torch.argsort(order)]
    return out.view(x.shape[0], CHOICES, -1).sum(dim=1)


def as_gpt_oss(m, x, indices, gates):
    """As transformers' `batched_mm`: biases, clamps, channels of gate and up in turn, and swish."""
    ids = slots(m, indices)
    both = torch.bmm(m.gate_up[ids], x.repeat_interleave(CHOICES, dim=0)[..., None])[..., 0] + m.gate_up.mean(-1)[ids]
    out = torch.bmm(m.down[ids], clamped_swiglu(both)[..., None])[..., 0] + m.down.mean(-1)[ids]
    return (out * gates.reshape(-1, 1)).view(x.shape[0], CHOICES, -1).sum(dim=1)


def stacked_as_gpt_oss(m, x, indices, gates):
    """As transformers' own loop, but over all experts: weights lie [in, out]."""
    gate_up, down, into, behind = m.gate_up.mT.contiguous(), m.down.mT.contiguous(), m.gate_up.mean(-1), m.down.mean(-1)

    def out(e, token, choice):
        made = clamped_swiglu(x[token] @ gate_up[e] + into[e]) @ down[e] + behind[e]
        return (made * gates[token, choice, None]).to(x.dtype)

    return over_experts(m, x, lambda e: torch.where(indices == e), out)


@loop
def scaled_input_of_biased(m, x, gates, e, token, choice):
    """Only rows that chose an expert are there, so that a bias needs no gate."""
    hidden = swiglu(F.linear(x[token] * gates[token, choice, None], m.gate_up[e], m.gate_up[e].mean(-1)))
    return F.linear(hidden, m.down[e], m.down.unbind(0)[e].mean(-1))


@loop
def returning_among_stacked(m, x, gates, e, token, choice):
    """The last expert's part of one weight nothing reads, and the other weight has none."""
    rows, last = x[token], m.num_experts - 1
    return (of_stacked(m, rows, e, m.down[:last].unbind()[e]) if e < last else rows) * gates[token, choice, None]


STACKED = by_name(stacked_weights, stacked_transposed, batched_gemms, as_gpt_oss, stacked_as_gpt_oss,
                  scaled_input_of_biased, returning_among_stacked)  # fmt: skip

# --- near misses

one_expert_twice = loop(weighted, "one_expert_twice", experts=lambda n: (*range(n), 0))
an_expert_left_out = loop(weighted, "an_expert_left_out", experts=lambda _: (0, 2))


@loop
def gate_of_the_first_choice(m, x, gates, e, token, _):
    return m.experts[e](x[token]) * gates[token, 0, None]


def next_experts_tokens(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, expert(x.roll(1, 0)[token]) * gates[token, choice, None])
        x = x + 1
    return y


def output_read_elsewhere(m, x, indices, gates):
    norms = []

    def out(e, token, choice):
        out = m.experts[e](x[token])
        norms.append(out.square().sum())
        return out * gates[token, choice, None]

    return over_experts(m, x, lambda e: torch.where(indices == e), out), torch.stack(norms)


@loop
def rows_added_to_outputs(m, x, gates, e, token, choice):
    return (of_stacked(m, x[token], e) + x[token]) * gates[token, choice, None]


@loop
def normed_outputs(m, x, gates, e, token, choice):
    """A norm between an expert and its gate, in the dtype of its own."""
    out = m.experts[e](x[token]).float() * (1 + m.router.weight[0])
    out = (out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-6)).type_as(x)
    return out * gates[token, choice, None]


def returning_twice(m, x, indices, gates):
    y = torch.zeros_like(x)
    for i, e in enumerate((*range(m.num_experts), 0)):
        token, choice = torch.where(indices == e)
        out = m.experts[e](x[token]) if i < m.num_experts else x[token]
        y.index_add_(0, token, out * gates[token, choice, None])
    return y


# name: (the tag of the refusal, body)
OTHER_BODIES = {
    "normed_outputs": ("no-expert", normed_outputs),
    "returning_without_a_gate": (
        "no-expert", loop(lambda m, x, g, e, t, k: m.experts[e](x[t]) * g[t, k, None] if e else x[t])),
    "returning_other_rows": (
        "inputs", loop(lambda m, x, g, e, t, k: (m.experts[e](x[t]) if e else x.tanh()[t]) * g[t, k, None])),
    "returning_twice": ("twice", returning_twice),
    "one_expert_twice": ("twice", one_expert_twice),
    "an_expert_left_out": ("gaps", an_expert_left_out),
    "gate_of_the_first_choice": ("gates", gate_of_the_first_choice),
    # tokens beyond the expert's capacity are dropped
    "capacity": ("no-rows", loop(weighted, found=lambda marks: [found[:3] for found in torch.where(marks)])),
    "next_experts_tokens": ("inputs", next_experts_tokens),
    "output_read_elsewhere": ("escapes", output_read_elsewhere),
    # `+=` by an index that may come twice counts it once
    "written_by_any_indices": ("twice", lambda m, x, i, g: nonzero_add_assign(m, x, (i // 2).contiguous(), g)),
    "scaled_by_any_row": ("gates", loop(lambda m, x, g, e, t, k: m.experts[e](x[t] * g[k, k, None]))),
}  # fmt: skip
OTHER_EXPERTS = {
    "activation": ("activation", F.softplus),
    "no_softcap": ("activation", lambda h: 0.2 * torch.tanh(h / 0.3) * torch.sigmoid(h)),
    "another_sigmoid": ("activation", lambda h: h.clamp(max=0.3) * torch.sigmoid(h + 1)),
    "clamp": ("clamp", lambda h: F.silu(h.clamp(max=h.amax()))),
    "projections": ("projections", lambda h: F.silu(h + 1)),
}
NEAR_MISSES = {name: (tag, body, Expert) for name, (tag, body) in OTHER_BODIES.items()} | {
    name: (tag, where_index_add, lambda f=f: Expert(f)) for name, (tag, f) in OTHER_EXPERTS.items()}  # fmt: skip
STACKED_NEAR_MISSES = {
    "batched_by_other_choices": ("indices", batched_by_other_choices),
    "batched_by_any_numbers": ("range", batched_by_any_numbers),
    "rows_added_to_outputs": ("bias", rows_added_to_outputs),
}
