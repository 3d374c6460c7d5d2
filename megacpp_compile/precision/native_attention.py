"""`te.DotProductAttention` in plain PyTorch, as of release 2.20: dense sequences, by torch's own attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from megacpp_compile.nn.attention import attention
from megacpp_compile.precision.native import refuse

_FORMATS = ("sbhd", "bshd")
_MASKS = ("no_mask", "causal", "causal_bottom_right", "arbitrary")
_ALL = ((-1, -1), (-1, 0))  # windows that limit nothing; the second is a causal mask's


class DotProductAttention(nn.Module):
    """Attention over queries, keys [.., heads or groups, d_qk] and values [.., d_v], in the layout `qkv_format`.

    Returns [s, b, heads * d_v] for "sbhd", [b, s, heads * d_v] for "bshd", in the queries' dtype. An `attention_mask`
    is true where a query must not attend. Raises EngineError for packed sequences, padding masks, windows, context
    parallelism, and a soft cap beside dropout or an explicit mask.
    """

    def __init__(
        self, num_attention_heads: int, kv_channels: int | tuple[int, int], num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None, bottom_right_diagonal: bool | None = None, softcap: float = 0.0,
        sequence_parallel: bool = False, tp_size: int = 1, get_rng_state_tracker: Any = None, tp_group: Any = None,
        layer_number: int | None = None, attention_type: str = "self", cp_group: Any = None,
        cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p",
        softmax_scale: float | None = None, softmax_type: str = "vanilla", return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse(self, tp_size=tp_size, tp_group=tp_group, cp_group=cp_group, return_max_logit=return_max_logit,
               softmax_type=None if softmax_type == "vanilla" else softmax_type)  # fmt: skip
        self.heads, self.groups = num_attention_heads, num_gqa_groups or num_attention_heads
        d_qk, d_v = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.d_v, self.dropout = d_v, attention_dropout
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(d_qk)
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.window_size, self.softcap = window_size, softcap
        self._check(qkv_format, attn_mask_type, window_size)

    def _check(self, qkv_format: str, mask: str, window: Any) -> None:
        refuse(
            self,
            qkv_format=None if qkv_format in _FORMATS else qkv_format,
            attn_mask_type=None if mask in _MASKS else mask,
            window_size=None if window is None or tuple(window) in _ALL else window,
        )

    def forward(
        self, query_layer: torch.Tensor, key_layer: torch.Tensor, value_layer: torch.Tensor,
        attention_mask: Any = None, qkv_format: str | None = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
        cu_seqlens_q_padded: Any = None, cu_seqlens_kv_padded: Any = None, max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None, attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None, bottom_right_diagonal: bool | None = None,
        softcap: float | None = None, checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias", core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: Any = None, fast_zero_fill: bool = True, inference_params: Any = None,
        pad_between_seqs: bool | None = None, fp8_output: bool | None = False, bf16_backward: bool | None = False,
        num_splits: int | None = 1, score_mod: Any = None, score_mod_bprop: Any = None, score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None, qkv_layer: Any = None, kv_layer: Any = None,
        qkv_interleave_dim: int = -3, thd_attention_policies: Any = None, thd_attention_policy_dispatch: str = "auto",
    ) -> torch.Tensor:  # fmt: skip
        refuse(self, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, inference_params=inference_params,
               alibi_slopes=alibi_slopes, pad_between_seqs=pad_between_seqs, score_mod=score_mod, qkv_layer=qkv_layer,
               kv_layer=kv_layer, thd_attention_policies=thd_attention_policies,
               core_attention_bias_type=None if core_attention_bias_type in ("no_bias", "post_scale_bias")
               else core_attention_bias_type)  # fmt: skip
        layout, kind = qkv_format or self.qkv_format, attn_mask_type or self.attn_mask_type
        self._check(layout, kind, window_size or self.window_size)
        cap = self.softcap if softcap is None else softcap
        to_heads = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
        q, k, v = (t.permute(to_heads) for t in (query_layer, key_layer, value_layer))
        bias = core_attention_bias if core_attention_bias_type == "post_scale_bias" else None
        mask, dropout = _mask(kind, q, k, attention_mask, bias), self.dropout if self.training else 0.0
        if mask is not None or dropout:
            refuse(self, softcap=cap or None)

        def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            causal = kind == "causal" and mask is None
            if mask is None and not dropout:
                return attention(q, k, v, softcap=cap, scale=self.scale, causal=causal)
            return scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=self.scale,
                enable_gqa=self.groups != self.heads,
            )  # fmt: skip

        out = checkpoint(core, q, k, v, use_reentrant=False) if checkpoint_core_attention else core(q, k, v)
        out = out.permute(2, 0, 1, 3) if layout == "sbhd" else out.transpose(1, 2)
        return out.flatten(2)


def _mask(kind: str, q: torch.Tensor, k: torch.Tensor, given: Any, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The `attn_mask` for torch's attention: bool, true where a query attends, or a bias to add to the scores; None
    where `is_causal` suffices or nothing is masked."""
    queries, keys = q.shape[-2], k.shape[-2]
    kept = None
    if kind == "causal_bottom_right" or (kind == "causal" and bias is not None):
        shift = keys - queries if kind == "causal_bottom_right" else 0
        kept = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(shift)
    if kind == "arbitrary":
        kept = ~given
    if bias is None:
        return kept
    return bias if kept is None else bias.masked_fill(~kept, float("-inf"))
