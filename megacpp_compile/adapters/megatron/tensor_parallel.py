"""Forwards that Megatron's modules get on several tensor-parallel ranks, and what the ranks exchange in them.

Each computes what the module's own forward computes there, from the shards it has. What Megatron hides in autograd
functions that write in place and ask for the current CUDA device are functional collectives here, which a frame holds.
Source: Megatron-LM, https://arxiv.org/abs/1909.08053, section 3, and https://arxiv.org/abs/2205.05198, section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from megacpp_compile._torch.ops import collectives
from megacpp_compile.adapters.megatron.plain_forwards import engine_bias, engine_input
from megacpp_compile.lowerings._sharded_loss import loss_of_words
from megacpp_compile.lowerings._sum_gradient import sum_gradient, summed


def _all_gather(x: Tensor, dim: int, group: str, ranks: int) -> Tensor:
    parts: Tensor = collectives.wait_tensor(collectives.all_gather_into_tensor(x.contiguous(), ranks, group))
    return parts if dim == 0 else torch.cat(parts.chunk(ranks), dim)


def _reduce_scatter(x: Tensor, group: str, ranks: int) -> Tensor:
    part: Tensor = collectives.wait_tensor(collectives.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group))
    return part


def _part(x: Tensor, dim: int, ranks: int, rank: int) -> Tensor:
    return x.chunk(ranks, dim)[rank].contiguous()


class _Summed(torch.autograd.Function):
    """The sum over ranks, whose gradient all of them have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _Gathered(torch.autograd.Function):
    """All ranks' parts along a dimension. Of the gradient, which is the same on every rank, each has its part; where
    each has a share of it (`shares`), the sum of these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, shares: bool, group: str, ranks: int, rank: int) -> Tensor:
        ctx.settings = dim, shares, group, ranks, rank
        return _all_gather(x, dim, group, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dim, shares, group, ranks, rank = ctx.settings
        part = _reduce_scatter(grad, group, ranks) if shares else _part(grad, dim, ranks, rank)
        return part, None, None, None, None, None


class _Scattered(torch.autograd.Function):
    """This rank's part of what is the same on all, or of the sum over ranks (`shares`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, shares: bool, group: str, ranks: int, rank: int) -> Tensor:
        ctx.settings = dim, group, ranks
        return _reduce_scatter(x, group, ranks) if shares else _part(x, dim, ranks, rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dim, group, ranks = ctx.settings
        return _all_gather(grad, dim, group, ranks), None, None, None, None, None


class OfRanks:
    """A module of several ranks."""

    plain_group: str  # its name
    plain_ranks: int
    plain_rank: int

    def _summed(self, x: Tensor) -> Tensor:
        return _Summed.apply(x, self.plain_group)  # type: ignore[no-any-return]

    def _gathered(self, x: Tensor, dim: int, *, shares: bool = False) -> Tensor:
        return _Gathered.apply(x, dim, shares, self.plain_group, self.plain_ranks, self.plain_rank)  # type: ignore[no-any-return]

    def _scattered(self, x: Tensor, dim: int, *, shares: bool = False) -> Tensor:
        return _Scattered.apply(x, dim, shares, self.plain_group, self.plain_ranks, self.plain_rank)  # type: ignore[no-any-return]


def attributes(module: Any) -> Mapping[str, Any]:
    """What `OfRanks` reads."""
    group = group_of(module)
    return {"plain_group": group.group_name, "plain_ranks": group.size(), "plain_rank": group.rank()}


def group_of(module: Any) -> Any:
    """A module's tensor-parallel group, or None."""
    own = getattr(module, "tp_group", None)
    return own if own is not None else getattr(getattr(module, "pg_collection", None), "tp", None)


class ColumnLinear(OfRanks):
    """`ColumnParallelLinear`: [..., in] to this rank's [..., out], or to all ranks' where it gathers its output."""

    plain_as = "linear, of ranks"
    weight: Tensor
    bias: Tensor | None
    skip_bias_add: bool
    gather_output: bool
    sequence_parallel: bool
    disable_grad_reduce: bool

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if self.sequence_parallel:
            input_ = self._gathered(input_, 0, shares=True)
        elif not self.disable_grad_reduce:
            input_ = sum_gradient(input_, self.plain_group)
        y = linear(input_, self.weight if weight is None else weight, None if self.skip_bias_add else self.bias)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            y = self._gathered(y, -1)
        return y, self.bias if self.skip_bias_add else None


class RowLinear(OfRanks):
    """`RowParallelLinear`: this rank's [..., in] to [..., out], the sum over ranks."""

    plain_as = "linear, of ranks"
    weight: Tensor
    bias: Tensor | None
    skip_bias_add: bool
    input_is_parallel: bool
    sequence_parallel: bool

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        y = linear(input_ if self.input_is_parallel else self._scattered(input_, -1), self.weight)
        y = self._scattered(y, 0, shares=True) if self.sequence_parallel else self._summed(y)
        if self.skip_bias_add or self.bias is None:
            return y, self.bias if self.skip_bias_add else None
        return y + self.bias, None


class EngineLinear(OfRanks):
    """Megatron's linears by Transformer Engine, with a norm in front or without, split by columns or by rows."""

    plain_as = "linear, of ranks, behind the norm it may have"

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        bias = engine_bias(self)
        x = engine_input(self, x)
        if self.parallel_mode == "column":
            x = self._gathered(x, 0, shares=True) if self.sequence_parallel else sum_gradient(x, self.plain_group)
            y = linear(x, self.weight, None if self.te_return_bias else bias)
        else:
            y = linear(x, self.weight)
            y = self._scattered(y, 0, shares=True) if self.sequence_parallel else self._summed(y)
            y = y if bias is None or self.te_return_bias else y + bias
        return y, bias if self.te_return_bias else None


class VocabularyEmbedding(OfRanks):
    """`VocabParallelEmbedding`: the sum of what each rank has of the words, zeros for those of others."""

    plain_as = "embedding, of ranks"
    weight: Tensor
    reduce_scatter_embeddings: bool
    deterministic_mode: bool
    vocab_start_index: int

    def forward(self, input_: Tensor) -> Tensor:
        places = input_ - self.vocab_start_index
        others = (places < 0) | (places >= self.weight.shape[0])
        places = places.masked_fill(others, 0)
        rows = self.weight[places] if self.deterministic_mode else embedding(places, self.weight)
        rows = rows.masked_fill(others.unsqueeze(-1), 0)
        if self.reduce_scatter_embeddings:
            return self._scattered(rows.transpose(0, 1), 0, shares=True)
        return self._summed(rows)


class LanguageModelLoss(OfRanks):
    """`LanguageModule.compute_language_model_loss` of this rank's words: the loss of every token, [b, s]."""

    plain_as = "its loss: cross_entropy, of ranks"

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        rows, own = logits.float().flatten(0, 1), logits.shape[-1]
        words = self.plain_rank * own, self.plain_ranks * own, self.plain_group
        loss = loss_of_words(rows, labels.transpose(0, 1).reshape(-1), -100, 0.0, "none", *words)
        return loss.view(logits.shape[:2]).transpose(0, 1).contiguous()
