"""Experts split over ranks: tokens go to them and back by all-to-all, and lie there sorted by expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

DIM, HIDDEN, EXPERTS, ACTIVE = 32, 16, 4, 2


class Experts(nn.Module):
    """Experts between grouped GEMMs, in bfloat16: torch traces those in nothing else. The weights may be DTensors."""

    def __init__(self, experts: int = EXPERTS):
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(experts, HIDDEN, DIM) / DIM**0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(experts, DIM, HIDDEN) / HIDDEN**0.5)

    def forward(self, rows, counts):
        gate, up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.gate, self.up, self.down))
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        hidden = F.silu(torch._grouped_mm(rows.bfloat16(), gate.bfloat16().transpose(-2, -1), offs=ends))
        hidden = hidden * torch._grouped_mm(rows.bfloat16(), up.bfloat16().transpose(-2, -1), offs=ends)
        return torch._grouped_mm(hidden, down.bfloat16().transpose(-2, -1), offs=ends).type_as(rows)


class MoE(nn.Module):
    """Top-k routed experts, of which each rank of a group has as many, behind an exchange of rows."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.mesh = mesh
        self.router, self.experts = nn.Linear(DIM, EXPERTS, bias=False), Experts()

    def dispatched(self, rows, counts):
        """Rows for this rank's experts, sorted by these; how many each has; and how to send them back."""
        ranks, group = self.mesh.size(), self.mesh.get_group()
        with torch.no_grad():
            received = all_to_all_single(counts, None, None, group)
            sent_to = counts.view(ranks, -1).sum(1).tolist()
            got_from = received.view(ranks, -1).sum(1).tolist()
        rows = all_to_all_single_autograd(rows, got_from, sent_to, group)
        own = torch.arange(EXPERTS // ranks, device=rows.device).repeat(ranks)
        order = torch.argsort(own.repeat_interleave(received, output_size=rows.shape[0]), stable=True)

        def returned(out):
            return all_to_all_single_autograd(torch.empty_like(out).index_copy(0, order, out), sent_to, got_from, group)

        return rows[order], received.view(ranks, -1).sum(0), returned

    def forward(self, x, *_):
        shape, x = x.shape, x.reshape(-1, DIM)
        gates, chosen = self.router(x).sigmoid().topk(ACTIVE, -1)
        counts = torch.histc(chosen.flatten().float(), bins=EXPERTS, min=0, max=EXPERTS).long()
        order = torch.argsort(chosen.flatten(), stable=True)
        rows, counts, returned = self.dispatched(x[order // ACTIVE], counts)
        out = returned(self.experts(rows, counts)) * gates.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // ACTIVE, out).view(shape)


def expert_parallel(mesh: DeviceMesh, dtensors: bool = True, mla: nn.Module | None = None) -> nn.Module:
    """Experts of which this rank has its own alone, as DTensors or as plain tensors; behind `mla`, if there is one."""
    model = MoE(mesh)
    for name, whole in list(model.experts.named_parameters()):
        part = distribute_tensor(whole.detach(), mesh, [Shard(0)])
        setattr(model.experts, name, nn.Parameter(part if dtensors else part.to_local().clone()))
    return model if mla is None else Block(mla, model)


class Block(nn.Module):
    def __init__(self, mla: nn.Module, moe: nn.Module):
        super().__init__()
        self.mla, self.moe = mla, moe
        self.mla_norm, self.moe_norm = (nn.RMSNorm(DIM, eps=1e-6) for _ in range(2))

    def forward(self, x, cos, sin):
        x = x + self.mla(self.mla_norm(x), cos, sin)
        return x + self.moe(self.moe_norm(x))
