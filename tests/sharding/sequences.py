"""Mixers over sequences of which each of two ranks has a part, compiled, beside one rank's eager over the whole."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.experimental import context_parallel

from megacpp_compile import record, sharded_sequences
from tests.corpus.delta.block import CHUNKED, LINEAR, TOKENS
from tests.corpus.scans import einsums as scan_by_einsums
from tests.corpus.selective_scans import PlainMamba1, einsums
from tests.passes import deltas
from tests.sharding.seen import RANKS

LENGTH = 16


class Convolving(nn.Module):
    """A causal convolution between two linears."""

    def __init__(self, taps=4):
        super().__init__()
        self.before, self.after = nn.Linear(12, 12), nn.Linear(12, 12)
        self.conv = nn.Conv1d(12, 12, taps, groups=12, padding=taps - 1)

    def forward(self, x):
        h = self.conv(self.before(x).transpose(1, 2))[..., : x.shape[1]]
        return self.after(F.silu(h).transpose(1, 2))


class Layers(nn.Module):
    """A convolution and a scan behind it, as in a layer of Mamba-2."""

    def __init__(self):
        super().__init__()
        self.first, (self.second, _) = Convolving(), scan(dim=12)

    def forward(self, x):
        return x + self.second(x + self.first(x))


def scan(**kwargs):
    return deltas.scan(scan_by_einsums, LENGTH, **kwargs)


def convolving(**kwargs):
    return Convolving(**kwargs), (torch.randn(2, LENGTH, 12),)


def layers():
    return Layers(), (torch.randn(2, LENGTH, 12),)


def selective():
    module = PlainMamba1(einsums)
    return module, module.example_inputs(LENGTH)


@dataclasses.dataclass(frozen=True)
class Case:
    """make: a model and its inputs, of which the first is [b, t, ...]. ops: what takes states of the rank before.
    torchs: whether torch's own context says that sequences are in parts. kernels: whether Inductor's C++ runs, else what
    its passes leave runs in eager."""

    make: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]
    ops: tuple[str, ...]
    order: str = "contiguous"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    torchs: bool = False
    dynamic: bool | None = None
    grad: bool = True
    kernels: bool = False


GLA = {"passes": {"gated_linear_attention": True}}
CASES = {
    "scan": Case(scan, ("ssd_scan",)),
    "scan_in_two_pieces": Case(scan, ("ssd_scan",), "head_tail", kernels=True),
    "scan_under_torchs": Case(scan, ("ssd_scan",), "head_tail", torchs=True),
    "convolution": Case(convolving, ("causal_conv1d",), kernels=True),
    "convolution_in_two_pieces": Case(convolving, ("causal_conv1d",), "head_tail", kernels=True),
    "delta_rule": Case(functools.partial(deltas.delta, CHUNKED["rows_in_place"], LENGTH), ("gated_delta_rule",)),
    "delta_rule_of_channels": Case(
        functools.partial(deltas.delta, CHUNKED["channel_gates"], LENGTH), ("gated_delta_rule",), "head_tail", kernels=True),
    "linear_attention": Case(
        functools.partial(deltas.linear, LINEAR["one_triangle"], LENGTH), ("gated_linear_attention",), options=GLA),
    "linear_attention_of_channels": Case(
        functools.partial(deltas.linear, LINEAR["by_token_channel_gates"], 8), ("gated_linear_attention",), kernels=True),
    "delta_rule_by_token": Case(
        functools.partial(deltas.delta, TOKENS["no_gate"], 8), ("gated_delta_rule",), kernels=True),
    "selective_scan": Case(selective, ("selective_scan",)),
    "selective_scan_in_two_pieces": Case(selective, ("selective_scan",), "head_tail", kernels=True),
    "layers": Case(layers, ("causal_conv1d", "ssd_scan"), "head_tail"),
    "layers_dynamic": Case(layers, ("causal_conv1d", "ssd_scan"), dynamic=True, kernels=True),
    "inference": Case(scan, ("ssd_scan",), grad=False, kernels=True),
}  # fmt: skip


def around() -> Any:
    return nullcontext()  # each case says what it is compiled with


def run(name: str, mesh: Any) -> dict[str, Any]:
    from tests.fixtures import kernels_left_out

    with nullcontext() if CASES[name].kernels else kernels_left_out():
        return _run(CASES[name], mesh)


def _run(case: Case, mesh: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, (x, *others) = case.make()
    seed = torch.randn_like(x)
    want = _step(copy.deepcopy(model).double(), x.double(), others, seed.double(), case.grad)
    eager = _step(copy.deepcopy(model), x, others, seed, case.grad)
    own = _part(case, mesh)
    compiled = copy.deepcopy(model)
    run = torch.compile(compiled, backend="megacpp", dynamic=case.dynamic, options={"strict": True, **case.options})
    with record() as report, _context(case, mesh):
        got = _step(compiled, own(x), others, own(seed), case.grad, run)
    whole = {}
    for key, tensor in got.items():
        if key not in ("output", "x"):
            dist.all_reduce(tensor)
        whole[key] = own(want[key]) if key in ("output", "x") else want[key]
    return {"errors": _errors(got, whole), "eager": _errors(eager, want), "misses": [m.reason for m in report.misses],
            "ops": [s.op.partition("::")[2] for s in report.sites]}  # fmt: skip


def _errors(got, want):
    """Of each tensor, relative to its largest value."""
    return {n: float((got[n] - t).abs().max() / t.abs().max().clamp_min(1e-12)) for n, t in want.items()}


def _step(model, x, others, seed, grad, run=None):
    x = x.detach().clone().requires_grad_(grad)
    model.zero_grad()
    with torch.set_grad_enabled(grad):
        out = (model if run is None else run)(x, *others)
    if not grad:
        return {"output": out}
    (out * seed[..., : out.shape[-1]]).sum().backward()
    return {"output": out.detach(), "x": x.grad} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _part(case, mesh):
    """What takes this rank's part of a tensor [b, t, ...]."""
    rank = mesh.get_local_rank()
    pieces = (rank, 2 * RANKS - 1 - rank) if case.order == "head_tail" else (rank,)
    return lambda t: torch.cat([t.chunk(len(pieces) * RANKS, 1)[i] for i in pieces], 1)


def _context(case, mesh):
    if case.torchs:
        return context_parallel(mesh, buffers=[torch.zeros(1, LENGTH)], buffer_seq_dims=[1])
    return sharded_sequences(mesh, case.order)
