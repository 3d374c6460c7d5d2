"""Experts over rows that come sorted, as behind the dispatch of expert parallelism, and layers around such experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .experts import DIM, EXPERTS, HIDDEN, clamped_swiglu
from .experts_at_once import GROUPED_MM


class Sorted(nn.Module):
    """`body(self, rows, counts)` with weights of all experts; `counts` rows are the first expert's, and so on."""

    def __init__(self, body, other: bool = False):
        super().__init__()
        self.body, self.turned = body, other
        shape = (DIM, HIDDEN) if other else (HIDDEN, DIM)
        self.gate, self.up = (nn.Parameter(torch.randn(EXPERTS, *shape) / 3) for _ in range(2))
        self.down = nn.Parameter(torch.randn(EXPERTS, *shape[::-1]) / 3)
        self.bias, self.last_bias = (nn.Parameter(torch.randn(EXPERTS, n)) for n in (HIDDEN, DIM))

    def forward(self, rows, counts):
        return self.body(self, rows, counts)


def ends_of(counts):
    return counts.cumsum(0, dtype=torch.int32)


def mm(rows, weight, ends):
    return torch._grouped_mm(rows, weight, offs=ends)


def two_projections(m, rows, counts):
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    hidden = F.silu(mm(rows, m.gate.transpose(-2, -1), ends))
    hidden = hidden * mm(rows, m.up.transpose(-2, -1), ends)
    return mm(hidden, m.down.transpose(-2, -1), ends)


def with_casts(m, rows, counts):
    """Parameters in float32, GEMMs in bfloat16."""
    ends = ends_of(counts)
    hidden = F.silu(mm(rows.bfloat16(), m.gate.bfloat16().transpose(-2, -1), ends))
    hidden = hidden * mm(rows.bfloat16(), m.up.transpose(-2, -1).bfloat16(), ends)
    return mm(hidden, m.down.bfloat16().transpose(-2, -1), ends).type_as(rows)


def with_casts_and_biases(m, rows, counts, wide: bool = False):
    """As torchtitan's gpt-oss, whose rows behind the last expert's get zeros. wide: biases stay in float32."""
    ends = ends_of(counts)
    all_counts = torch.cat((counts, (rows.shape[0] - ends[-1]).unsqueeze(0).to(counts.dtype))).long()

    def biases(of, dtype):
        rest = torch.cat((of, of.new_zeros(1, of.shape[-1])))
        return rest.repeat_interleave(all_counts, 0, output_size=rows.shape[0]).to(torch.float32 if wide else dtype)

    hidden = mm(rows.bfloat16(), m.up.mT.bfloat16(), ends)
    hidden = F.gelu(hidden + biases(m.bias, hidden.dtype))
    out = mm(hidden.bfloat16(), m.down.mT.bfloat16(), ends)
    return (out + biases(m.last_bias, out.dtype)).type_as(rows)


def with_casts_and_wide_biases(m, rows, counts):
    return with_casts_and_biases(m, rows, counts, wide=True)


def one_projection(m, rows, counts):
    ends = ends_of(counts)
    gate, up = GROUPED_MM(rows, torch.cat((m.gate, m.up), 1).mT, offs=ends).chunk(2, -1)
    return GROUPED_MM(F.gelu(gate) * up, m.down.mT, offs=ends)


def in_turn(m, rows, counts):
    """Gate and up are channels in turn, clamped."""
    ends = ends_of(counts)
    return mm(clamped_swiglu(mm(rows, torch.stack((m.gate, m.up), 2).flatten(1, 2).mT, ends)), m.down.mT, ends)


def up_and_down(m, rows, ends, between, down_ends=None):
    """Without a gate: what is `between` the two GEMMs."""
    return mm(between(mm(rows, m.up.mT, ends)), m.down.mT, ends if down_ends is None else down_ends)


def without_a_gate(m, rows, counts):
    return up_and_down(m, rows, ends_of(counts), lambda hidden: F.relu(hidden).square())


def scores_around(m, rows, counts):
    """A score for every row before the experts and one behind them, which stay as they are."""
    scores = rows.mean(-1, keepdim=True).sigmoid()
    return two_projections(m, rows * scores, counts) * scores


def stored_in_out(m, rows, counts):
    """Weights that lie [in, out]; `other` makes such."""
    ends = ends_of(counts)
    return mm(F.silu(mm(rows, m.gate, ends)) * mm(rows, m.up, ends), m.down, ends)


def ends_that_come(m, rows, counts):
    """Where rows end is given, rather than how many they are."""
    return up_and_down(m, rows, counts, F.silu)


def repeated_biases(m, rows, counts):
    repeated = lambda bias: bias.repeat_interleave(counts, dim=0, output_size=rows.shape[0])  # noqa: E731
    out = up_and_down(m, rows, ends_of(counts), lambda hidden: F.relu(hidden + repeated(m.bias)))
    return out + repeated(m.last_bias)


def biases_and_padding(m, rows, counts):
    """As torchtitan's gpt-oss: rows behind the last expert's get zeros."""
    ends = ends_of(counts)
    all_counts = torch.cat((counts, (rows.shape[0] - ends[-1]).unsqueeze(0).to(counts.dtype))).long()
    biases = torch.cat((m.bias, m.bias.new_zeros(1, HIDDEN))).repeat_interleave(all_counts, 0, output_size=len(rows))
    out = up_and_down(m, rows, ends, lambda hidden: F.relu(hidden + biases))
    return torch.where((torch.arange(len(rows)) < ends[-1])[:, None], out, 0.0)


def a_constant_behind(m, rows, counts):
    """The sum with what is no bias of the experts' stays."""
    return two_projections(m, rows, counts) + m.last_bias[0]


ROWS = [two_projections, one_projection, in_turn, without_a_gate, scores_around, ends_that_come, repeated_biases,
        biases_and_padding, a_constant_behind]  # fmt: skip


# --- near misses


def biases_of_others(m, rows, counts):
    biases = m.bias.flip(0).repeat_interleave(counts.flip(0), dim=0, output_size=rows.shape[0])
    return up_and_down(m, rows, ends_of(counts), lambda hidden: F.relu(hidden + biases))


def hidden_is_returned(m, rows, counts):
    ends = ends_of(counts)
    hidden = mm(rows, m.up.mT, ends)
    return mm(F.silu(hidden), m.down.mT, ends), hidden.relu()


def an_activation_of_its_own(m, rows, counts):
    return up_and_down(m, rows, ends_of(counts), F.softplus)


NEAR_MISSES = {"bias": biases_of_others, "escapes": hidden_is_returned, "activation": an_activation_of_its_own}


# --- no experts


def adapters(m, rows, counts):
    """Two GEMMs by group without an activation between them, as LoRA's of several texts are."""
    return up_and_down(m, rows, ends_of(counts), lambda hidden: hidden)


def other_groups_behind(m, rows, counts):
    return up_and_down(m, rows, ends_of(counts), F.relu, ends_of(counts.flip(0)))


OTHERS = [adapters, other_groups_behind]


# --- whole layers


class TokenChoice(nn.Module):
    """torchtitan's MoE in words of our own: a router in float32 with a bias for the choice alone, counts kept for
    balancing, rows sorted by expert through experts in bfloat16, their outputs times scores added to the tokens.

    scores_first: experts read scored rows. opaque: the outputs are added by an op that no compiler looks into. body: of
    the experts.
    """

    def __init__(self, scores_first=False, opaque=False, marks=True, shared=True, body=with_casts):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Sorted(body)
        self.shared = nn.Linear(DIM, DIM, bias=False) if shared else None
        self.scores_first, self.opaque, self.marks = scores_first, opaque, marks
        self.register_buffer("expert_bias", torch.linspace(-0.1, 0.1, EXPERTS))
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS))

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            scores = self.router(x.float()).sigmoid()
        _, chosen = torch.topk(scores + self.expert_bias, k=2, dim=-1, sorted=False)
        top = scores.gather(-1, chosen)
        top = top / (top.sum(-1, keepdim=True) + 1e-20) * 1.5
        if self.marks:
            marks = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
            counts = marks.sum(dim=tuple(range(x.dim() - 1)))
        else:
            counts = torch.histc(chosen.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS)
        if self.training:
            with torch.no_grad():
                self.tokens_per_expert.add_(counts)
        shape, x, top = x.shape, x.reshape(-1, DIM), top.reshape(-1, 2)
        order = torch.argsort(chosen.view(-1), stable=True)
        sorted_scores, token = top.view(-1)[order], order // 2
        rows = x[token]
        if self.scores_first:
            rows = (rows.float() * sorted_scores.reshape(-1, 1)).to(rows.dtype)
        out = self.experts(rows, counts)
        if not self.scores_first:
            out = (out.float() * sorted_scores.reshape(-1, 1)).to(out.dtype)
        index = token.reshape(-1, 1).expand(-1, DIM)
        y = torch.zeros_like(x)
        y = add_rows(y, index, out) if self.opaque else y.scatter_add(dim=0, index=index, src=out)
        return y.view(shape) if self.shared is None else y.view(shape) + self.shared(x).view(shape)


@torch.library.custom_op("megacpp_tests::add_rows", mutates_args=())
def add_rows(y: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return y.scatter_add(0, index, rows)


@add_rows.register_fake
def _(y, index, rows):
    return torch.empty_like(y)


add_rows.register_autograd(
    lambda ctx, grad: (grad, None, grad.gather(0, ctx.saved_tensors[0])),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)
