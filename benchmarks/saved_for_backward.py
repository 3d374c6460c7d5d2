"""Bytes a compiled plain MLA block keeps for backward: what the partitioner saved, backend against backend.

    python -m benchmarks.saved_for_backward      # on a GPU if there is one

Counted: distinct storages among the tensors the compiled forward hands to its backward, without parameters and inputs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import arguments


class PlainBlock(nn.Module):
    """DeepSeek-style MLA as a model author writes it."""

    def __init__(self, dim: int, heads: int, q_lora: int, kv_lora: int, nope: int, rope: int, v: int) -> None:
        super().__init__()
        self.heads, self.kv_lora, self.nope, self.rope, self.v = heads, kv_lora, nope, rope, v
        self.q_a, self.q_norm = nn.Linear(dim, q_lora, bias=False), nn.RMSNorm(q_lora, eps=1e-6)
        self.q_b = nn.Linear(q_lora, heads * (nope + rope), bias=False)
        self.kv_a, self.kv_norm = nn.Linear(dim, kv_lora + rope, bias=False), nn.RMSNorm(kv_lora, eps=1e-6)
        self.kv_b = nn.Linear(kv_lora, heads * (nope + v), bias=False)
        self.o = nn.Linear(heads * v, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_b(self.q_norm(self.q_a(x))).view(b, s, self.heads, -1).transpose(1, 2)
        q_nope, q_pe = q.split([self.nope, self.rope], -1)
        latent, k_pe = self.kv_a(x).split([self.kv_lora, self.rope], -1)
        kv = self.kv_b(self.kv_norm(latent)).view(b, s, self.heads, -1).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.v], -1)
        q = torch.cat((q_nope, rotate(q_pe, cos, sin)), -1)
        k = torch.cat((k_nope, rotate(k_pe[:, None], cos, sin).expand(-1, self.heads, -1, -1)), -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(b, s, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def saved_bytes(backend: str, block: PlainBlock, inputs: tuple[Tensor, ...]) -> int:
    """Bytes behind the tensors the compiled block's backward holds."""
    torch._dynamo.reset()
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = torch.compile(block, backend=backend)(*inputs)
    own = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *inputs)}
    del out
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments.parser("benchmarks.saved_for_backward", __doc__)
    parser.add_argument("--out", help="also write the figures as JSON")
    a = parser.parse_args(argv)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"dim": 512, "heads": 4, "q_lora": 384, "kv_lora": 256, "nope": 64, "rope": 32, "v": 64}
    block = PlainBlock(**sizes).to(device)
    b, s = 2, 256
    x = torch.randn(b, s, sizes["dim"], device=device, requires_grad=True)
    angle = torch.arange(s, device=device)[:, None] / 100 ** (torch.arange(0, sizes["rope"], 2, device=device) / 32)
    angle = torch.cat((angle, angle), -1)
    inputs = (x, angle.cos(), angle.sin())
    figures: dict[str, Any] = {name: saved_bytes(name, block, inputs) for name in ("inductor", "megacpp")}
    for name, n in figures.items():
        print(f"{name:9s} {n / 2**20:7.2f} MiB saved for backward ({n / (b * s):.0f} B a token)")
    print(f"ratio {figures['megacpp'] / figures['inductor']:.2f}")
    if a.out:
        with open(a.out, "w") as f:
            json.dump({"sizes": sizes, "tokens": b * s, "device": device, **figures}, f, indent=1)


if __name__ == "__main__":
    main()
