"""Lets GEMMs run while ranks communicate, in graphs that hold collectives.

A functional collective is two nodes: its start, and the wait for its result. Autograd writes the wait right behind the
start, and Inductor keeps that order, so nothing runs in between. Here a wait moves down to its first reader, and GEMMs
move in front of it until they would take as long as the collective: from above, GEMMs that nothing before the wait
reads, as gradients of weights; from below, those that need no result of a collective, with what they are made of.
Starts stay in their order, which has to be the same on all ranks; results are the same to the bit.

Graphs whose sizes the host reads off the device, as experts' are that rows go to by all-to-all, stay as they are: what
runs before the host has read them is missing behind, where the device waits for the host. Moved there all the same, it
cost 8 % of a step of four layers on two H100s, which had been 5 % faster than Inductor's.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megacpp_compile._torch import pytree
from megacpp_compile._torch.ops import OpOverload
from megacpp_compile.fx.aliasing import memory_of
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.sizes import nbytes
from megacpp_compile.fx.walks import reached
from megacpp_compile.lowerings._traits import name_of
from megacpp_compile.remat.costs import flops

# FLOPs of GEMMs that take as long as a collective takes for a byte: 600 TFLOP/s beside 100 GB/s, which is slow for
# links within a host and fast for those between hosts.
FLOPS_PER_BYTE = 6000.0
_NAMESPACE = "_c10d_functional"
_WAIT = f"{_NAMESPACE}::wait_tensor"
_next, _previous = operator.attrgetter("next"), operator.attrgetter("prev")
_operands, _readers = operator.attrgetter("all_input_nodes"), operator.attrgetter("users")


def overlap(graph: fx.Graph) -> None:
    """Move waits down, and GEMMs in front of them, in place, in a graph that autograd has differentiated."""
    waits = [node for node in graph.nodes if name_of(node) == _WAIT]
    # A Triton kernel's results are a dict, which torch below 2.13 takes for no value.
    values = pytree.tree_leaves([value(node) for node in graph.nodes])
    if not waits or any(map(free_unbacked_symbols, values)):
        return
    for wait in waits:
        (start, *_) = wait.args
        if not isinstance(start, Node) or not _communicates(start) or not wait.users:
            continue
        min(wait.users).prepend(wait)
        between = itertools.takewhile(functools.partial(operator.is_not, wait), _calls(start, _next))
        left = FLOPS_PER_BYTE * nbytes(value(start)) - sum(map(flops, between))
        left = _delay(start, wait, left)
        if left > 0:
            _advance(wait, left)


def _delay(start: Node, wait: Node, left: float) -> float:
    """Move GEMMs of `left` FLOPs from before `start` to right before `wait`; what is left of them. Those between the
    collective before and its readers stay there."""
    late: set[Node] = set()
    written: set[Any] = set()
    for node in list(_calls(start, _previous)):
        if left <= 0 or _communicates(node):
            break
        read = {memory_of(a) for a in node.all_input_nodes}
        if _writes(node):
            written |= read
        elif _movable(node) and not written & read and all(user in late or user > wait for user in node.users):
            late.add(node)
            if done := flops(node):
                for moved in _reached(node, late, _readers):
                    wait.prepend(moved)
                    late.remove(moved)
                left -= done
    return left


def _advance(wait: Node, left: float) -> None:
    """Move GEMMs of `left` FLOPs from behind `wait` to right before it."""
    free: set[Node] = set()
    stays, written = {wait}, set[Any]()
    for node in list(_calls(wait, _next)):
        read = {memory_of(a) for a in node.all_input_nodes}
        if _writes(node):
            written |= read
        if _writes(node) or not _movable(node) or not stays.isdisjoint(node.all_input_nodes) or written & read:
            stays.add(node)
            continue
        free.add(node)
        if done := flops(node):
            for moved in _reached(node, free, _operands):
                wait.prepend(moved)
                free.remove(moved)
            left -= done
            if left <= 0:
                return


def _reached(node: Node, within: set[Node], next_to: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """`node` and those of `within` that `next_to` leads to from it, one by one, in the order of the graph."""
    return sorted(reached([node], lambda n: filter(within.__contains__, next_to(n))))


def _calls(node: Node, step: Callable[[Node], Node]) -> Iterable[Node]:
    """The calls that follow `node`, or stand before it, as `step` goes on."""
    while (node := step(node)).op == "call_function":
        yield node


def _communicates(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == _NAMESPACE


def _writes(node: Node) -> bool:
    """Whether `node` may write to what it reads: ops that say so, kernels, and regions."""
    if isinstance(node.target, OpOverload):
        return bool(node.target._schema.is_mutable)
    return node.target is not operator.getitem and any(isinstance(value(a), Tensor) for a in node.all_input_nodes)


def _movable(node: Node) -> bool:
    """Whether `node` computes the same wherever it stands."""
    if _communicates(node):
        return False
    return not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags
