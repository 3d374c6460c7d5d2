"""Stand-ins for Megatron's modules on two tensor-parallel ranks under `plain_mla`, beside the whole model on one."""

from __future__ import annotations

import copy
import dataclasses
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from megacpp_compile.lowerings._sum_gradient import sum_gradient
from tests.adapters import fake_megatron as fake
from tests.fixtures import kernels_left_out, quick_compilers
from tests.ranks import start

RANKS = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """te: whose linears. compiled: in one graph, else eager. dynamic: with symbolic sizes."""

    te: bool
    compiled: bool = True
    dynamic: bool | None = None


CASES = {
    "local_eager": Case(False, False), "te_eager": Case(True, False), "local": Case(False), "te": Case(True),
    "te_dynamic": Case(True, dynamic=True),
}


def whole(te: bool) -> fake.GPTModel:
    torch.manual_seed(0)
    model = fake.GPTModel(fake.Config(heads=4), 1, te)
    # Rows are scattered with the sequence alone.
    model.embedding.reduce_scatter_embeddings = False
    model.embedding.register_forward_hook(lambda module, args, rows: rows.transpose(0, 1).contiguous())
    return fake.off_one(model)


def shard(model: nn.Module, te: bool, rank: int, group: Any) -> dict[str, int]:
    """Leave this rank's part of the model on it, as Megatron does. Returns parameter -> dimension it is split along."""
    split: dict[str, int] = {}

    def cut(name: str, module: Any, dim: int, gated: bool = False) -> None:
        def part(t: torch.Tensor) -> torch.Tensor:
            halves = t.chunk(2) if gated else (t,)
            return torch.cat([half.chunk(RANKS, dim)[rank] for half in halves], 0 if gated else dim)

        split[f"{name}.weight"] = dim
        module.weight = nn.Parameter(part(module.weight.detach()).clone())
        module.tp_group = group
        if isinstance(module, fake._Engine):
            module.tp_size, module.parallel_mode = RANKS, "column" if dim == 0 else "row"

    for name, module in list(model.named_modules()):
        last = name.rpartition(".")[2]
        if last in ("linear_q_up_proj", "linear_kv_up_proj", "linear_fc1", "output_layer"):
            cut(name, module, 0, gated=last == "linear_fc1")
        elif last in ("linear_proj", "linear_fc2"):
            cut(name, module, 1)
        elif last in ("linear_q_down_proj", "linear_kv_down_proj") and not te:  # Transformer Engine's are whole
            cut(name, module, 0)
            module.gather_output = True  # Megatron's MLA gathers behind them
        elif isinstance(module, fake.VocabParallelEmbedding):
            cut(name, module, 0)
            module.vocab_start_index = rank * module.weight.shape[0]
    model.pg_collection.tp = group
    for attention in (m for m in model.modules() if isinstance(m, fake.MultiLatentAttention)):
        attention.shared = lambda k_rope: sum_gradient(k_rope, group.group_name)
        attention.config = dataclasses.replace(attention.config, heads=attention.config.heads // RANKS)
    return split


def step(model: Any, call: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(0, 64, (3, 7), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = call(ids, labels=ids.roll(-1, 1))
    loss.square().sum().backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def run_model(case: Case, rank: int, group: Any) -> dict[str, Any]:
    import megacpp_compile
    from megacpp_compile.adapters.megatron import plain_mla

    model = whole(case.te)
    reference = copy.deepcopy(model)
    want, grads = step(reference, reference)
    split, table = shard(model, case.te, rank, group), plain_mla(model)
    torch._dynamo.reset()
    counters.clear()
    with megacpp_compile.record() as report:
        call = torch.compile(model, backend="megacpp", dynamic=case.dynamic) if case.compiled else model
        loss, own = step(model, call)
    errors = {"loss": relative(loss, want)}
    for name, grad in own.items():
        full = grads[name]
        if name in split:
            halves = full.chunk(2) if name.endswith("linear_fc1.weight") else (full,)
            full = torch.cat([h.chunk(RANKS, split[name])[rank] for h in halves], split[name])
        errors[name] = relative(grad, full)
    return {
        "errors": errors, "left": table.left, "now": sorted({row.now for row in table}),
        "graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values()),
        "fired": fake.fired(report),
        "misses": [f"{m.node} {m.tag}: {m.reason}" for m in report.misses], "undone": _undone(table, model),
    }


def _undone(table: Any, model: nn.Module) -> bool:
    table.undo()
    return not any(type(m).__name__.startswith("Plain") or hasattr(m, "plain_group") for m in model.modules())


def run_sequence(te: bool, rank: int, group: Any) -> dict[str, Any]:
    """Two linears between which the sequence is whole: input and output are this rank's part of it."""
    from megacpp_compile.adapters.megatron import plain_mla

    torch.manual_seed(3)
    config = fake.Config(sequence_parallel=True)
    kinds = (fake.TELayerNormColumnParallelLinear, fake.TELinear) if te else (fake.ColumnParallelLinear, fake.RowParallelLinear)
    up, down = kinds[0](8, 12, config=config), kinds[1](12, 8, config=config, bias=True)
    x = torch.randn(6, 2, 8)
    whole_x = x.clone().requires_grad_()
    want = down(torch.tanh(up(whole_x)[0]))[0]
    want.square().sum().backward()
    full = {"up": up.weight.grad.chunk(RANKS)[rank], "down": down.weight.grad.chunk(RANKS, 1)[rank]}
    for module, dim in ((up, 0), (down, 1)):
        module.weight = nn.Parameter(module.weight.detach().chunk(RANKS, dim)[rank].clone())
        module.tp_group = group
        if te:
            module.tp_size, module.parallel_mode = RANKS, "column" if dim == 0 else "row"
    plain_mla(nn.ModuleList([up, down]))
    own_x = x.chunk(RANKS)[rank].clone().requires_grad_()
    y = down(torch.tanh(up(own_x)[0]))[0]
    y.square().sum().backward()
    return {"errors": {
        "y": relative(y.detach(), want.detach().chunk(RANKS)[rank]),
        "x": relative(own_x.grad, whole_x.grad.chunk(RANKS)[rank]),
        "up": relative(up.weight.grad, full["up"]), "down": relative(down.weight.grad, full["down"]),
    }}  # fmt: skip


def run_moves(rank: int, group: Any) -> dict[str, Any]:
    """A head that gathers its output, a linear that is given the whole of its input, and rows scattered by sequence."""
    from megacpp_compile.adapters.megatron import plain_mla

    torch.manual_seed(4)
    head = fake.ColumnParallelLinear(8, 6, config=fake.Config(), tp_group=group)
    row = fake.RowParallelLinear(8, 6, config=fake.Config(), tp_group=group)
    x, weights = torch.randn(5, 8), [m.weight.detach().clone() for m in (head, row)]
    row.input_is_parallel = False
    head.weight, row.weight = (nn.Parameter(w.chunk(RANKS, dim)[rank].clone()) for w, dim in zip(weights, (0, 1), strict=True))
    plain_mla(nn.ModuleList([head, row]))
    inputs = [x.clone().requires_grad_() for _ in range(4)]
    got = head(inputs[0], runtime_gather_output=True)[0], row(inputs[1])[0]
    want = inputs[2] @ weights[0].T, inputs[3] @ weights[1].T
    for y in (*got, *want):
        y.square().sum().backward()
    errors = {f"y{i}": relative(a.detach(), b.detach()) for i, (a, b) in enumerate(zip(got, want, strict=True))}
    errors |= {f"x{i}": relative(inputs[i].grad, inputs[i + 2].grad) for i in range(2)}
    words, ids = torch.randn(6, 3), torch.tensor([[0, 5, 2, 3], [4, 1, 1, 5]])
    rows = fake.VocabParallelEmbedding(6, 3, scatter=True)
    rows.weight = nn.Parameter(words.chunk(RANKS)[rank].clone())
    rows.tp_group, rows.vocab_start_index = group, 3 * rank
    plain_mla(rows)
    found, full = rows(ids), words.clone().requires_grad_()
    wanted = full[ids].transpose(0, 1)
    for y in (found, wanted):
        y.square().sum().backward()
    errors["rows"] = relative(found.detach(), wanted.detach().chunk(RANKS)[rank])
    errors["words"] = relative(rows.weight.grad, full.grad.chunk(RANKS)[rank])
    return {"errors": errors}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def _rank(rank: int, store: str, names: tuple[str, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=rank, world_size=RANKS)
    group, found = dist.new_group(list(range(RANKS))), {}
    with pytest.MonkeyPatch.context() as patch, quick_compilers(), kernels_left_out():
        fake.install(patch)
        for name in names:
            found[name] = run_model(CASES[name], rank, group) if name in CASES else OTHERS[name](rank, group)
    Path(store, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


OTHERS = {
    "sequence": lambda rank, group: run_sequence(False, rank, group),
    "sequence_te": lambda rank, group: run_sequence(True, rank, group), "moves": run_moves,
}


def outcomes(names: tuple[str, ...] = (*CASES, *OTHERS)) -> list[dict[str, Any]]:
    """What each rank saw of each case."""
    with tempfile.TemporaryDirectory() as store:
        start(_rank, (store, names), RANKS)
        return [json.loads(Path(store, f"{rank}.json").read_text()) for rank in range(RANKS)]
