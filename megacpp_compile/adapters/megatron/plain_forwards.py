"""Forwards that Megatron's modules get in plain PyTorch, as classes put in front of the module's own.

Each computes what the module's own forward computes on one tensor-parallel rank, from the parameters the module has.
Calls with arguments that plain PyTorch does not serve go to the module's own forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, layer_norm, linear, rms_norm, scaled_dot_product_attention


class ParallelLinear:
    """`ColumnParallelLinear` and `RowParallelLinear`: [..., in] to ([..., out], the bias that the caller is to add)."""

    plain_as = "linear"
    weight: Tensor  # None where every call gives one, as for a head that shares the embedding's
    bias: Tensor | None
    skip_bias_add: bool

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        weight = self.weight if weight is None else weight
        if self.skip_bias_add:
            return linear(input_, weight), self.bias
        return linear(input_, weight, self.bias), None


class VocabularyEmbedding:
    """`VocabParallelEmbedding`: numbers [b, s] to rows [b, s, h], or [s, b, h] where it is asked to scatter them."""

    plain_as = "embedding"
    weight: Tensor
    reduce_scatter_embeddings: bool
    deterministic_mode: bool

    def forward(self, input_: Tensor) -> Tensor:
        rows = self.weight[input_] if self.deterministic_mode else embedding(input_, self.weight)
        return rows.transpose(0, 1).contiguous() if self.reduce_scatter_embeddings else rows


class LanguageModelLoss:
    """`LanguageModule.compute_language_model_loss`: the loss of every token, [b, s], of logits [s, b, vocabulary]."""

    plain_as = "its loss: cross_entropy"

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        rows = logits.float().flatten(0, 1)
        loss = cross_entropy(rows, labels.transpose(0, 1).reshape(-1), reduction="none")
        return loss.view(logits.shape[:2]).transpose(0, 1).contiguous()


class EngineLinear:
    """Megatron's linears by Transformer Engine, with a norm in front or without; results as `ParallelLinear`'s."""

    plain_as = "linear, behind the norm it may have"
    weight: Tensor
    bias: Tensor | None
    te_return_bias: bool

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x, bias = engine_input(self, x), engine_bias(self)
        if self.te_return_bias:
            return linear(x, self.weight), bias
        return linear(x, self.weight, bias), None


def engine_input(module: Any, x: Tensor) -> Tensor:
    """What a linear of Transformer Engine multiplies, behind the norm that it may have."""
    if not hasattr(module, "layer_norm_weight"):
        return x
    return _norm(x, module.layer_norm_weight, module.layer_norm_bias, module)


def engine_bias(module: Any) -> Tensor | None:
    """Its bias, which is empty where it has none."""
    bias: Tensor | None = module.bias
    return bias if bias is not None and bias.numel() else None


class EngineNorm:
    """Transformer Engine's RMSNorm and LayerNorm over the last axis."""

    plain_as = "norm"

    def forward(self: Any, x: Tensor) -> Tensor:
        return _norm(x, self.weight, getattr(self, "bias", None), self)


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, module: Any) -> Tensor:
    gain = weight + 1 if module.zero_centered_gamma else weight
    if bias is None:
        return rms_norm(x, gain.shape, gain, module.eps)
    return layer_norm(x, gain.shape, gain, bias, module.eps)


class EngineAttention:
    """Transformer Engine's attention inside Megatron's MLA, dense and causal or without a mask: torch's own.

    query, key [s, b, heads, d_qk], value [s, b, heads, d_v]; returns [s, b, heads * d_v].
    """

    plain_as = "scaled_dot_product_attention"
    plain_scale: float
    plain_dropout: float

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, attn_mask_type: Any,
        attention_bias: Any = None, packed_seq_params: Any = None, num_splits: Any = None,
    ) -> Tensor:  # fmt: skip
        served = attn_mask_type.name in ("causal", "no_mask") and attention_bias is None and packed_seq_params is None
        if not served or (attn_mask_type.name == "causal" and query.shape[0] != key.shape[0]):
            own = super().forward  # type: ignore[misc]
            return own(query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params, num_splits)  # type: ignore[no-any-return]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = scaled_dot_product_attention(
            q, k, v, dropout_p=self.plain_dropout if self.training else 0.0,
            is_causal=attn_mask_type.name == "causal", scale=self.plain_scale, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return out.permute(2, 0, 1, 3).flatten(2)


class HostCopies:
    """`MoEAlltoAllTokenDispatcher`, which copies counts of tokens to main memory on a stream of its own: neither Dynamo
    nor Inductor takes what it does to the stream, and some of it is an error there instead of a graph break."""

    plain_as = "the same, its copies to main memory in eager"

    @torch.compiler.disable
    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)  # type: ignore[misc]


class RotaryTable:
    """`RotaryEmbedding` and `YarnRotaryEmbedding`: angles [s, 1, 1, d] of positions from `offset` on, without the cache
    and the copy to the current device that theirs have in front; YaRN's with the factor of cosines and sines."""

    plain_as = "a table of angles"
    plain_rates: Tensor  # [d], angle by which each position turns a channel further
    plain_factor: float | None

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        places = torch.arange(max_seq_len, device=self.plain_rates.device, dtype=self.plain_rates.dtype) + offset
        angles = torch.outer(places, self.plain_rates)[:, None, None]
        return angles if self.plain_factor is None else (angles, self.plain_factor)


def rates(module: Any) -> tuple[Tensor, float | None] | None:
    """(`plain_rates`, `plain_factor`) of a rotary module of Megatron's, or None where its angles are not the position
    times a rate."""
    table = module.get_emb(_PLACES)
    table, factor = table if isinstance(table, tuple) else (table, None)
    found = table[1, 0, 0].detach().clone()
    places = torch.arange(_PLACES, device=found.device, dtype=found.dtype)
    return (found, factor) if torch.equal(torch.outer(places, found)[:, None, None], table) else None


def table_attributes(module: Any) -> dict[str, Any]:
    """The attributes that `RotaryTable` reads, of a module that `rates` knows."""
    found = rates(module)
    assert found is not None
    return {"plain_rates": found[0], "plain_factor": found[1]}


_PLACES = 64


def is_plain_tensor(tensor: Any) -> bool:
    """Whether a parameter is an ordinary one: not quantised, and no subclass but `nn.Parameter`."""
    return type(tensor) in (torch.nn.Parameter, Tensor) or tensor is None
