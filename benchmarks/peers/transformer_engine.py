"""The block as an expert wires it today: Transformer Engine's modules and attention, Megatron's RoPE kernels. And its
GEMMs in float8 alone.

Only on request (`--with-te`): importing Transformer Engine can bring a second cuDNN into the process, and then torch's
own attention falls silently to a slower kernel, in the other rows too. Which kernel ran is in the table.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import FORWARD, STEP, Contestant, Missing, Runner
from benchmarks.models import MLA
from benchmarks.peers import megatron
from benchmarks.variants import FP8_BOUND

RECIPES = {"bf16": None, "fp8 current": "Float8CurrentScaling", "fp8 delayed": "DelayedScaling"}


def block(model: MLA, inputs: Sequence[Tensor], grad: Tensor, wanted: bool) -> list[Contestant]:
    def contestant(name: str, recipe: str | None) -> Contestant:
        bound = FP8_BOUND if recipe else None
        title = f"Transformer Engine and Megatron, {name}"
        return Contestant(title, "peer", lambda: _build(model, inputs, grad, recipe, wanted), bound)

    return [contestant(name, recipe) for name, recipe in RECIPES.items()]


def load(wanted: bool = True) -> Any:
    """Transformer Engine's PyTorch part; to be called before the first attention of the process."""
    if not wanted:
        raise Missing("asked for with --with-te only: it can change which attention kernel torch uses")
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        raise Missing(f"transformer_engine: {type(error).__name__}: {error}") from None


class Expert(nn.Module):
    """Same weights as `plain`, with the rope channels in Megatron's order. Tokens come before batch."""

    def __init__(self, plain: MLA, te: Any, rope: Any) -> None:
        super().__init__()
        self.rope_q, self.rope_kv = rope
        self.sizes = plain.heads, plain.kv_lora, plain.nope, plain.rope, plain.v
        device, dtype = plain.o.weight.device, plain.o.weight.dtype
        heads, _, nope, rope_dim, v = self.sizes

        def linear(like: nn.Linear) -> Any:
            return te.Linear(like.in_features, like.out_features, bias=False, params_dtype=dtype, device=device)

        def normed(like: nn.Linear) -> Any:
            return te.LayerNormLinear(like.in_features, like.out_features, bias=False, normalization="RMSNorm",
                                      eps=1e-6, params_dtype=dtype, device=device)  # fmt: skip

        def narrow(like: nn.Linear) -> nn.Linear:
            return nn.Linear(like.in_features, like.out_features, bias=False, device=device, dtype=dtype)

        self.q_lora = plain.q_lora
        if self.q_lora:
            self.q_a, self.q_b = narrow(plain.q_a), normed(plain.q_b)
        else:
            self.q = linear(plain.q)
        self.kv_a, self.kv_b, self.o = narrow(plain.kv_a), normed(plain.kv_b), linear(plain.o)
        self.attend = te.DotProductAttention(heads, (nope + rope_dim, v), qkv_format="sbhd", attn_mask_type="causal")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tokens, batch, _ = x.shape
        heads, kv_lora, nope, rope, v = self.sizes
        q = self.q_b(self.q_a(x)) if self.q_lora else self.q(x)
        latent, k_pe = self.kv_a(x).split([kv_lora, rope], -1)
        kv = self.kv_b(latent.contiguous()).view(tokens, batch, heads, nope + v)
        q = self.rope_q(q.view(tokens, batch, heads, nope + rope), cos, sin, nope, rope)
        k, value = self.rope_kv(kv, k_pe.reshape(tokens, batch, 1, rope), cos, sin, rope, nope, v)
        return self.o(self.attend(q, k, value))

    def pairs(self, plain: MLA) -> dict[str, tuple[nn.Parameter, Tensor | None]]:
        """Parameter name of the plain block -> the one here, and the order of its rows (None: the same)."""
        heads, kv_lora, nope, rope, _ = self.sizes
        device = plain.o.weight.device
        order = megatron.paired(rope, device)
        head = torch.cat((torch.arange(nope, device=device), nope + order))
        q_rows = (torch.arange(heads, device=device)[:, None] * (nope + rope) + head).flatten()
        kv_rows = torch.cat((torch.arange(kv_lora, device=device), kv_lora + order))
        found = {"kv_a.weight": (self.kv_a.weight, kv_rows), "kv_norm.weight": (self.kv_b.layer_norm_weight, None),
                 "kv_b.weight": (self.kv_b.weight, None), "o.weight": (self.o.weight, None)}  # fmt: skip
        if self.q_lora:
            found |= {"q_a.weight": (self.q_a.weight, None), "q_norm.weight": (self.q_b.layer_norm_weight, None),
                      "q_b.weight": (self.q_b.weight, q_rows)}  # fmt: skip
        else:
            found["q.weight"] = (self.q.weight, q_rows)
        return {name: found[name] for name, _ in plain.named_parameters()}


def _build(model: MLA, inputs: Sequence[Tensor], grad: Tensor, recipe: str | None, wanted: bool) -> Runner:
    te = load(wanted)
    rope = megatron.functions(inputs[0].device)
    expert = Expert(model, te, rope)
    pairs = expert.pairs(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            mine, rows = pairs[name]
            mine.copy_(weight if rows is None else weight[rows])
    x = inputs[0].detach().transpose(0, 1).contiguous().requires_grad_()
    cos, sin = (t.view(t.shape[0], 1, 1, -1).contiguous() for t in inputs[1:])
    given = grad.transpose(0, 1).contiguous()
    leaves = [x, *(mine for mine, _ in pairs.values())]

    def precision() -> contextlib.AbstractContextManager[Any]:
        if recipe is None:
            return contextlib.nullcontext()
        made = getattr(importlib.import_module("transformer_engine.common.recipe"), recipe)()
        return te.autocast(enabled=True, recipe=made)

    def forward() -> Tensor:
        with precision():
            return expert(x, cos, sin)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, given)

    def results() -> list[Tensor]:
        if recipe == "DelayedScaling":
            step()  # its scales are those of the step before
        out = forward()
        d_x, *others = torch.autograd.grad(out, leaves, given)
        orders = [rows for _, rows in pairs.values()]
        plain = [g if rows is None else g[torch.argsort(rows)] for g, rows in zip(others, orders, strict=True)]
        return [out.detach().transpose(0, 1), d_x.transpose(0, 1), *plain]

    return Runner({FORWARD: forward, STEP: step}, results)


def gemms(x: Any, w: Any, grad: Any, wanted: bool) -> list[Callable[[], Tensor]]:
    """y = x w', the gradient of x, and that of w, by the GEMM that its modules use, with their accumulation.

    Operands have `payload` [rows, channels], `transposed` [channels, rows] and `scale`, which become its tensors as
    they are: one that multiplies rows by columns only takes the transposed payload for a transposed operand.
    """
    te = load(wanted)
    general_gemm: Any = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
    formats = {torch.float8_e4m3fn: te.DType.kFloat8E4M3, torch.float8_e5m2: te.DType.kFloat8E5M2}

    def tensor(operand: Any) -> Any:
        format = formats[operand.payload.dtype]
        data, transposed = (t.view(torch.uint8) for t in (operand.payload, operand.transposed))
        return te.Float8Tensor(
            shape=data.shape, dtype=torch.bfloat16, data=data, data_transpose=transposed, fp8_dtype=format,
            fp8_scale_inv=operand.scale.reshape(1), quantizer=te.Float8CurrentScalingQuantizer(format, data.device),
            device=data.device,
        )  # fmt: skip

    def gemm(a: Any, b: Any, layout: str, exact: bool) -> Callable[[], Tensor]:
        # Of column-major matrices: the result is b a, in the layout's letters of a and b.
        return lambda: general_gemm(a, b, out_dtype=torch.bfloat16, layout=layout, use_split_accumulator=exact)[0]

    x, w, grad = (tensor(operand) for operand in (x, w, grad))
    return [gemm(w, x, "TN", False), gemm(w, grad, "NN", True), gemm(x, grad, "NT", True)]
