"""Finds the blocks that repeat in Dynamo's graph, and cuts it into pieces of which equal ones are one graph.

A block is what one call of a module, or one checkpoint region, adds to the graph: neighbouring calls. Blocks are equal
where they are the same ops, call for call, of the same constants, on tensors of the same shapes, strides, dtypes and
devices, of which the same ask for a gradient; where one reads a value twice, or a result of it is read outside, so it
is with the other. Names and classes do not count, but for what rules over names say. Of blocks within blocks those are
taken that leave least to compile; what lies between them are pieces, too.

A graph is left whole where its pieces would not do what it does: where one writes to what others hold, a mode or a
transform goes on from one to the next, and where values pass between that are no plain tensors.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megacpp_compile._torch.attention import set_backends
from megacpp_compile._torch.dispatch import is_traceable_wrapper_subclass
from megacpp_compile._torch.functorch import is_functorch_wrapped_tensor
from megacpp_compile.frontend.calls_of_blocks import NotCut, Piece, Reader, Rules, Run, symbols_of
from megacpp_compile.frontend.hidden_writes import storage_of, written_tensors
from megacpp_compile.frontend.opaque_ops import is_body
from megacpp_compile.fx.edit import dynamo_value
from megacpp_compile.fx.groups import by_key

# With this many blocks fewer artifacts outweigh the calls between them, as in `megacpp_compile.compile`.
LEAST = 4


def cut(gm: GraphModule, example_inputs: Sequence[Any], rules: Rules = lambda *_: None) -> list[Piece]:
    """The pieces of Dynamo's graph `gm`, in order, with every call in one of them. Raises NotCut where it is to stay
    whole. rules: blocks of which they say different things are not equal."""
    reader = Reader(gm, example_inputs)
    chosen = _choose(reader, rules)
    pieces, at = [], 0
    for run in [*chosen, Run("", "", len(reader.calls), len(reader.calls))]:
        if at < run.first:
            pieces.append(reader.piece(Run("", "", at, run.first)))
        if run.first < run.end:
            pieces.append(reader.piece(run, reader.kind_of(run, rules)))
        at = run.end
    _check(gm, reader, pieces)
    return pieces


def _choose(reader: Reader, rules: Rules) -> list[Run]:
    """The blocks to take, in order: of each kind, from the largest, unless one within its blocks saves more of them."""
    kinds = by_key((reader.kind_of(run, rules), run) for run in reader.runs())
    open_ = sorted((runs for runs in kinds.values() if len(runs) > 1), key=lambda runs: runs[0].first - runs[0].end)
    taken: list[Run] = []
    free = [True] * len(reader.calls)
    for i, kind in enumerate(open_):
        runs = _apart(run for run in kind if all(free[run.first : run.end]))
        least = max((reader.saved(_within(runs, inner)) for inner in open_[i + 1 :] if runs), default=0)
        if reader.saved(runs) > max(least, 0):
            for run in runs:
                free[run.first : run.end] = [False] * (run.end - run.first)
            taken += runs
    if not taken:
        raise NotCut("no block repeats", few=True)
    if len(taken) < LEAST:
        raise NotCut(f"{len(taken)} blocks, fewer than {LEAST}", few=True)
    return sorted(taken, key=lambda run: run.first)


def _apart(runs: Iterable[Run]) -> list[Run]:
    """Those of `runs`, in order, that overlap none before them."""
    found: list[Run] = []
    for run in sorted(runs, key=lambda run: run.first):
        if not found or found[-1].end <= run.first:
            found.append(run)
    return found


def _within(outer: Sequence[Run], runs: Sequence[Run]) -> list[Run]:
    begins = [run.first for run in outer]
    around = ((outer[max(bisect.bisect(begins, run.first) - 1, 0)], run) for run in runs)
    return [run for out, run in around if out.first <= run.first and run.end <= out.end]


def _check(gm: GraphModule, reader: Reader, pieces: Sequence[Piece]) -> None:
    """Raise NotCut where the pieces would not do what the graph does."""
    states, ambient = reader.states, reader.ambient
    symbols = set(reader.symbols)
    for piece in pieces:
        if states[piece.calls[0]] != ambient or states[piece.calls[-1].next] != ambient:
            raise NotCut("a grad or autocast mode goes on from one block to the next")
        if sum(n.target is set_backends for n in piece.calls) % 2:
            raise NotCut("a choice of attention kernels goes on from one block to the next")
        values = [reader.gm if is_body(gm, n) else dynamo_value(n) for n in (*piece.inputs, *piece.outputs)
                  if n.op != "get_attr"]  # fmt: skip
        for value in values:
            _check_value(value)
        if any(not symbols_of(dynamo_value(n)) <= symbols for n in (*piece.inputs, *piece.outputs)):
            raise NotCut("sizes are known at run time only, or are no inputs")
        outside = {storage_of(n) for n in piece.inputs}
        for node in piece.calls:
            for inner in (node, *(n for body in reader.bodies(node) for n in body.graph.nodes)):
                if any(storage_of(w) in outside | {None} or inner is not node for w in written_tensors(inner)):
                    raise NotCut(f"{inner.name} writes to what is made elsewhere")


def _check_value(value: Any) -> None:
    if isinstance(value, torch.SymInt):
        return
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
    if not plain or is_traceable_wrapper_subclass(value) or is_functorch_wrapped_tensor(value):
        raise NotCut("what is no plain tensor passes between blocks")
    if free_unbacked_symbols(value):
        raise NotCut("sizes known at run time only pass between blocks")
