"""Attention that is written out with its heads over two ranks, which run it in eager and compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megacpp_compile import record
from tests.sharding.seen import RANKS

DIM, HEADS, GROUPS, D, TOKENS, INF = 24, 4, 2, 6, 7, float("-inf")


class Grouped(nn.Module):
    """Of HEADS heads over GROUPS of keys, and `body(module, q, k, v, there)` on as many as its projections make."""

    def __init__(self, body):
        super().__init__()
        self.body, self.o = body, nn.Linear(HEADS * D, DIM, bias=False)
        self.q, self.k, self.v = (nn.Linear(DIM, n * D, bias=False) for n in (HEADS, GROUPS, GROUPS))
        self.bias, self.sinks = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS)), nn.Parameter(torch.randn(HEADS))

    def forward(self, x, there):
        q, k, v = (proj(x).view(*x.shape[:2], -1, D).transpose(1, 2) for proj in (self.q, self.k, self.v))
        k, v = (t[:, :, None].expand(-1, -1, HEADS // GROUPS, -1, -1).reshape(q.shape) for t in (k, v))
        return self.o(self.body(self, q, k, v, there).transpose(1, 2).flatten(2))


class Latent(Grouped):
    """MLA: keys and values of a latent, and rows that the keys of all heads share."""

    def __init__(self, body):
        super().__init__(body)
        del self.k, self.v
        self.down, self.up = nn.Linear(DIM, 8 + 2, bias=False), nn.Linear(8, HEADS * (2 * D - 2), bias=False)
        self.norm = nn.RMSNorm(8, eps=1e-6)

    def forward(self, x, there):
        q = self.q(x).view(*x.shape[:2], -1, D).transpose(1, 2)
        latent, rope = self.down(x).split([8, 2], -1)
        kv = self.up(self.norm(latent)).view(*x.shape[:2], -1, 2 * D - 2).transpose(1, 2)
        k, v = kv.split([D - 2, D], -1)
        k = torch.cat([k, rope[:, None].expand(-1, k.shape[1], -1, -1)], -1)
        return self.o(self.body(self, q, k, v, there).transpose(1, 2).flatten(2))


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def like(q, t):
    """`t`, the same on all ranks, beside queries that may be a DTensor."""
    return DTensor.from_local(t, q.device_mesh, [Replicate()], run_check=False) if isinstance(q, DTensor) else t


def of_heads(q, t):
    """A parameter of heads, as `q` has them."""
    return t if isinstance(q, DTensor) else local(t)


def scored(q, k):
    return q @ k.transpose(-1, -2) * D**-0.5


def later(q, window=TOKENS):
    n = torch.arange(TOKENS, device=q.device)
    return like(q, (n > n[:, None]) | (n[:, None] - n >= window))


def causal(m, q, k, v, there):
    return scored(q, k).masked_fill(later(q), INF).softmax(-1) @ v


def window(m, q, k, v, there):
    return scored(q, k).masked_fill(later(q, 3), INF).softmax(-1) @ v


def padding(m, q, k, v, there):
    return scored(q, k).masked_fill(like(q, ~there[:, None, None]), torch.finfo(q.dtype).min).softmax(-1) @ v


def sinks(m, q, k, v, there):
    more = of_heads(q, m.sinks).view(1, -1, 1, 1).expand(q.shape[0], -1, TOKENS, 1)
    return torch.cat([scored(q, k).masked_fill(later(q), INF), more], -1).softmax(-1)[..., :-1] @ v


def bias(m, q, k, v, there):
    return (scored(q, k) + of_heads(q, m.bias)).masked_fill(later(q), INF).softmax(-1) @ v


def rows_of_all(m, q, k, v, there):
    """A rank has the biases of all heads, and reads those of its own."""
    first = m.bias.device_mesh.get_local_rank() * q.shape[1]
    own = local(m.bias)[first : first + q.shape[1]]
    return (scored(q, k) + own).masked_fill(later(q), INF).softmax(-1) @ v


def module_of(kind, **more):
    """A model of transformers, whose attention is written out."""
    settings = {"num_key_value_heads": GROUPS, "hidden_size": 32, "intermediate_size": 32} | more

    def make(mesh, case):
        config = transformers.AutoConfig.for_model(
            kind, num_attention_heads=HEADS, num_hidden_layers=2, vocab_size=40, pad_token_id=0, **settings
        )
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        names = [name for name, _ in model.named_modules() if name.endswith(COLUMNS + ROWS)]
        plan = {name: ColwiseParallel() if name.endswith(COLUMNS) else RowwiseParallel() for name in names}
        model = parallelize_module(model, mesh, plan)
        for m in model.modules():
            if hasattr(m, "sinks"):
                m.sinks = nn.Parameter(m.sinks.detach().chunk(RANKS)[mesh.get_local_rank()].clone())
        return model

    return make


COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"), ("o_proj",)


def parallel(mesh, case):
    """Of which queries, keys and values are columns, and so heads."""
    model = case.kind(case.body)
    column = ColwiseParallel(use_local_output=not case.whole)
    model = parallelize_module(model, mesh, dict.fromkeys(("q", "k", "v", "up"), column) | {"o": RowwiseParallel()})
    for name in ("bias", "sinks"):
        placed = distribute_tensor(getattr(model, name).detach(), mesh, [case.placed])
        model.register_parameter(name, nn.Parameter(placed))
    return model


@dataclasses.dataclass(frozen=True)
class Case:
    """body: of a `kind`. whole: attention is on DTensors, too. placed: how a bias and sinks are. make: the model."""

    body: Callable[..., Any] | None = None
    kind: Any = Grouped
    whole: bool = False
    placed: Any = Shard(0)
    make: Callable[..., nn.Module] = parallel
    fires: int = 1


BODIES = {"causal": causal, "window": window, "padding": padding, "sinks": sinks, "bias": bias}
CASES = {
    **{f"grouped_{name}": Case(body) for name, body in BODIES.items()},
    **{f"latent_{name}": Case(body, Latent) for name, body in BODIES.items()},
    **{f"whole_{name}": Case(body, whole=True) for name, body in BODIES.items()},
    "rows_of_all": Case(rows_of_all, placed=Replicate()),
    # What a rank has whole beside its own heads, DTensor cuts; gradients are gathered.
    "whole_bias_of_all": Case(bias, whole=True, placed=Replicate(), fires=0),
    "whole_sinks_of_all": Case(sinks, whole=True, placed=Replicate(), fires=0),
    "mistral": Case(make=module_of("mistral", sliding_window=3), fires=2),
    "gpt_oss": Case(
        make=module_of("gpt_oss", head_dim=8, sliding_window=3, num_local_experts=2, num_experts_per_tok=1), fires=2
    ),
    "deepseek_v3": Case(
        make=module_of("deepseek_v3", q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
                       v_head_dim=8, first_k_dense_replace=2, num_key_value_heads=HEADS), fires=2,
    ),  # fmt: skip
}  # fmt: skip


def around() -> Any:
    from tests.fixtures import kernels_left_out

    return kernels_left_out(lambda gm: None)


def run(name: str, mesh: Any) -> dict[str, Any]:
    case, values = CASES[name], []
    torch._dynamo.reset()
    torch.manual_seed(3)
    model: Any = case.make(mesh, case)
    there = torch.arange(TOKENS) < torch.tensor([[7], [4]])
    x = torch.randn(2, TOKENS, DIM, requires_grad=True) if case.body else torch.randint(2, 40, (2, TOKENS))
    for compiled in (False, True):
        model.zero_grad()
        x.grad = None
        with record() as report:
            run = torch.compile(model, backend="megacpp") if compiled else model
            out = run(x, there) if case.body else run(input_ids=x, attention_mask=there.long(), use_cache=False).logits
            out.square().sum().backward()
        found = {"out": out.detach(), "x": x.grad} | {n: p.grad for n, p in model.named_parameters()}
        values.append({n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in found.items() if t is not None})
    eager, ours = values
    assert eager.keys() == ours.keys()
    errors = {n: float((ours[n] - t).abs().max() / t.abs().max().clamp_min(1e-6)) for n, t in eager.items()}
    return {"error": max(errors.values()), "errors": errors,
            "ops": [site.op for site in report.sites if site.pass_name == "attention"],
            "misses": [[m.tag, m.reason] for m in report.misses if m.pass_name == "attention"],
            "frames": [[f.captured, f.reason] for f in report.frames]}  # fmt: skip
