"""Predicts the time of a training step under a plan, for plans of one graph to be compared by.

A roofline, kernel by kernel: a GEMM, a core or another kernel of its own takes the longer of its FLOPs and its bytes;
pointwise nodes and reductions that Inductor fuses read what the kernel reads once and write what others read of it, as
`liveness.py` and `fusion.py` have it. So a value that a kernel of backward computes anyway while it reads its operands
costs nothing there, and one that a GEMM reads costs its writing. Rates come from a table (`targets.rates`), never from
the machine: every rank predicts the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.fx.sizes import hint, nbytes
from megacpp_compile.fx.view_chains import base_of
from megacpp_compile.lowerings._traits import name_of, traits_of
from megacpp_compile.remat import costs
from megacpp_compile.remat.liveness import Facts, Run
from megacpp_compile.remat.peak import PeakModel
from megacpp_compile.remat.plan import Plan
from megacpp_compile.targets.rates import Rates

# Attention's backward multiplies five times where its forward does twice, that of a product twice where it does once.
_BACKWARD_OF_ATTENTION, _BACKWARD_OF_PRODUCT = 2.5, 2.0


def step_time(model: PeakModel, plan: Plan, rates: Rates) -> float:
    """The predicted seconds of forward and backward of the joint graph of `model` under `plan`."""
    of_forward = _of_forward(model.forward)
    return sum(_seconds(run, model.facts, rates, of_forward) for run in model.runs(plan))


def _of_forward(forward: Sequence[Node]) -> dict[str, float]:
    """The FLOPs of ops of ours by name, the mean of all their sites."""
    found: dict[str, list[float]] = {}
    for node in forward:
        if traits_of(node).flops is not None:
            found.setdefault(name_of(node), []).append(flops(node))
    return {name: sum(each) / len(each) for name, each in found.items()}


def _seconds(run: Run, facts: Facts, rates: Rates, of_forward: Mapping[str, float]) -> float:
    """Of the kernels of `run`. of_forward: of `_of_forward`."""
    groups, reads = run.kernels()
    stays = {p for n in run.lasting for p in run.memory(n)}
    place = {n: i for i, group in enumerate(groups) for n in group}
    last: dict[object, int] = {}
    for node, pieces in reads.items():
        for piece in pieces:
            last[piece] = max(last.get(piece, -1), place[node])
    seconds = 0.0
    for i, group in enumerate(groups):
        node = group[0]
        if facts.kinds[node] in ("kernel", "in place"):
            seconds += max(flops(node, of_forward) / rates.flops, costs.moved(node) / rates.bytes)
            continue
        own = {p for n in group for p in facts.pieces[n]}
        moved = sum(_size(facts, p) for p in {p for n in group for p in reads[n]} - own)
        moved += sum(_size(facts, p) for p in own if p in stays or last.get(p, -1) != i)
        given = {base_of(a, through_items=False) for n in group for a in facts.inputs[n]}
        moved += sum(nbytes(n.meta.get("val")) for n in given if n.op == "placeholder")
        seconds += moved / rates.bytes
    return seconds


def _size(facts: Facts, piece: tuple[Node, tuple[int, ...]]) -> int:
    return facts.pieces[piece[0]][piece]


def flops(node: Node, of_forward: Mapping[str, float] = MappingProxyType({})) -> float:
    """`costs.flops`; of attention cores that torch has no formula for, such as the CPU's, what their shapes say; of a
    backward op of ours, as many times those of its forward (`of_forward`, by name) as its kind has."""
    found = costs.flops(node)
    if found or traits_of(node).core:
        return found or _of_attention(node)
    forward = name_of(node).removesuffix("_backward")
    if forward == name_of(node) or forward not in of_forward:
        return 0.0
    core = traits_of(forward).core
    return of_forward[forward] * (_BACKWARD_OF_ATTENTION if core else _BACKWARD_OF_PRODUCT)


def _of_attention(node: Node) -> float:
    if "attention" not in name_of(node):
        return 0.0
    backward = "backward" in name_of(node)
    operands: Sequence[torch.Tensor] = [value(a) for a in node.args if isinstance(a, Node)]
    q, k, v = operands[1:4] if backward else operands[:3]
    each = 2 * hint(q.shape[-2]) * hint(k.shape[-2]) * (hint(q.shape[-1]) + hint(v.shape[-1]))
    heads = nbytes(q) // q.element_size() // max(hint(q.shape[-2]) * hint(q.shape[-1]), 1)
    return heads * each * (_BACKWARD_OF_ATTENTION if backward else 1.0)
