"""An attention block built from the seven classes of a layer spec, the same on every target.

    block = AttentionBlock(te_layer_spec().or_native(), 4096, 32, num_gqa_groups=8)
    x = block(x, cos, sin)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megacpp_compile.errors import AdapterError

_KEYS = ("linear_qkv", "attention", "linear_proj")


class AttentionBlock(nn.Module):
    """x + proj(attention(rope(qkv(norm(x))))), x [b, s, hidden] in and out, in the parameters' dtype.

    spec: `te_layer_spec()`, `NativeLayerSpec()` or a mixture; "linear_qkv" has the norm in front, "attention" takes
        grouped heads in the layout bshd. Parameters have the names that these classes give them, the same in
        Transformer Engine's and the plain ones: "linear_qkv.layer_norm_weight", "linear_qkv.weight" with the rows of
        q, k and v behind each other, "linear_proj.weight".
    hidden, num_heads, num_gqa_groups (num_heads by default), kv_channels (hidden / num_heads by default): sizes.
    eps, normalization ("RMSNorm" or "LayerNorm"), bias: as the classes take them. causal: whether a token attends to
        those before it alone.
    params_dtype, device: of parameters; torch's default, and each class's own default device.

    Raises AdapterError for a spec that lacks a class, with the reason it has, and for sizes that do not divide.
    """

    def __init__(
        self, spec: Mapping[str, Any], hidden: int, num_heads: int, *, num_gqa_groups: int | None = None,
        kv_channels: int | None = None, eps: float = 1e-5, normalization: str = "RMSNorm", bias: bool = False,
        causal: bool = True, params_dtype: torch.dtype | None = None, device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        missing = [key for key in _KEYS if spec.get(key) is None]
        if missing:
            reason = getattr(spec, "reasons", {}).get(missing[0]) or "there is none"
            remedy = "Use te_layer_spec().or_native()."
            raise AdapterError(f"an attention block without {missing[0]}", str(reason), remedy)
        groups = num_gqa_groups or num_heads
        if num_heads % groups or (kv_channels is None and hidden % num_heads):
            sizes = f"{num_heads} heads in {groups} groups over {hidden} channels"
            raise AdapterError("an attention block", f"{sizes} do not divide", "Give kv_channels, or other sizes.")
        self.heads, self.groups, self.channels = num_heads, groups, kv_channels or hidden // num_heads
        more = {"bias": bias, "params_dtype": params_dtype or torch.get_default_dtype()}
        more |= {} if device is None else {"device": device}
        rows = (num_heads + 2 * groups) * self.channels
        self.linear_qkv = spec["linear_qkv"](hidden, rows, eps=eps, normalization=normalization, **more)
        self.attention = spec["attention"](
            num_heads, self.channels, num_gqa_groups=groups, qkv_format="bshd",
            attn_mask_type="causal" if causal else "no_mask",
        )  # fmt: skip
        self.linear_proj = spec["linear_proj"](num_heads * self.channels, hidden, **more)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """cos, sin: [s, rotated channels], as many as there are or fewer, each angle in both halves."""
        sizes = (self.heads, self.groups, self.groups)
        split = self.linear_qkv(x).split([n * self.channels for n in sizes], -1)
        q, k, v = (t.unflatten(-1, (n, self.channels)) for t, n in zip(split, sizes, strict=True))
        out = self.attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        return x + self.linear_proj(out)  # type: ignore[no-any-return]


def _rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """t [b, s, heads, d], its first channels rotated by half-split RoPE."""
    cos, sin = (table[:, None].to(t.dtype) for table in (cos, sin))
    rotated, rest = t.split([cos.shape[-1], t.shape[-1] - cos.shape[-1]], -1)
    first, second = rotated.chunk(2, -1)
    rotated = rotated * cos + torch.cat((-second, first), -1) * sin
    return rotated if not rest.shape[-1] else torch.cat((rotated, rest), -1)
