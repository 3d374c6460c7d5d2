"""Has each block that repeats make its own mask.

A model of transformers makes one mask ahead of its layers, and each layer reads it. To attention in a block that is cut
from the rest that mask is data, which is read in full, and all it hides is computed: no kernel is told that it is
causal. In the block's graph the mask is code again, of positions, and of flags and numbers of words that are inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from megacpp_compile.frontend.calls_of_blocks import Piece
from megacpp_compile.frontend.hidden_writes import has_gradient, storage_of, written_tensors
from megacpp_compile.fx.copies import copied, in_place_of
from megacpp_compile.fx.edit import called, dynamo_value
from megacpp_compile.fx.mode_states import mode_states
from megacpp_compile.fx.provenance import local_path
from megacpp_compile.fx.sizes import elements

# What masks are made by: of these each gives equal values wherever it is called, and takes a kernel little.
_COMPARES = frozenset("le lt ge gt eq ne __le__ __lt__ __ge__ __gt__ __eq__ __ne__ tril triu".split())
_MAKES = _COMPARES | frozenset(
    "arange zeros ones full tensor new_zeros new_ones new_full zeros_like ones_like full_like to bool int long float "
    "type type_as getitem __getitem__ select narrow expand expand_as view reshape unsqueeze squeeze transpose permute "
    "contiguous clone detach flatten cat stack repeat repeat_interleave roll pad diff cumsum add sub mul floordiv "
    "floor_divide neg abs clamp minimum maximum and_ or_ xor invert logical_and logical_or logical_not logical_xor "
    "bitwise_and bitwise_or bitwise_not where masked_fill size sym_size".split()
)
# Calls that make one mask.
MOST = 64


def with_own_masks(gm: GraphModule, pieces: Sequence[Piece]) -> GraphModule:
    """Dynamo's graph `gm` itself where no block among its `pieces` reads a mask that is made outside of it of positions
    and other integers, else a copy in which each does what makes it."""
    written = {storage_of(w) for node in gm.graph.nodes for w in written_tensors(node)} - {None}
    states = mode_states(gm.graph)
    made: dict[Node, list[Node]] = {}
    for piece in pieces:
        for node in piece.inputs if piece.name else ():
            if node not in made:
                made[node] = _mask(node, written)
                if any(states[n] != states[piece.calls[0]] for n in made[node]):
                    made[node] = []
    made = {node: calls for node, calls in made.items() if calls}
    makers = {n for calls in made.values() for n in calls}
    in_order = [n for n in gm.graph.nodes if n in makers]
    wanting = [piece for piece in pieces if piece.name and not made.keys().isdisjoint(piece.inputs) and _stack(piece)]
    if not wanting:
        return gm
    graph, copies = copied(gm.graph)
    for piece in wanting:
        own: dict[Node, Node] = {}
        calls = {n for node in piece.inputs for n in made.get(node, ())}
        with graph.inserting_before(copies[piece.calls[0]]):
            for node in in_order:
                if node in calls:
                    own[node] = graph.node_copy(node, lambda n, own=own: own.get(n, copies[n]))  # type: ignore[misc]
                    own[node].meta["nn_module_stack"] = _stack(piece)
        for call in piece.calls:
            for node in made.keys() & set(call.all_input_nodes):
                copies[call].replace_input_with(copies[node], own[node])
    for node in reversed(in_order):
        if not copies[node].users:
            graph.erase_node(copies[node])
    return in_place_of(gm, graph, {old: new for old, new in copies.items() if not new._erased})


def _mask(node: Node, written: set[int | None]) -> list[Node]:
    """The calls that make the mask `node`; none where it is another value, or is not made of integers alone."""
    calls, open_, inputs, compares = dict[Node, None](), [node], list[Node](), False
    while open_:
        at = open_.pop()
        if at in calls or at in inputs:
            continue
        if at.op == "placeholder" and _integers(dynamo_value(at)):
            inputs.append(at)
            continue
        plain = at.op in ("call_function", "call_method") and called(at) in _MAKES and not has_gradient(at)
        if not plain or storage_of(at) in written or len(calls) >= MOST:
            return []
        calls[at] = None
        compares = compares or called(at) in _COMPARES
        open_ += at.all_input_nodes
    mask = dynamo_value(node)
    read = (v for n in inputs if isinstance(v := dynamo_value(n), torch.Tensor))
    large = isinstance(mask, torch.Tensor) and elements(mask) > sum(map(elements, read))
    return list(calls) if compares and large else []


def _integers(value: object) -> bool:
    """Whether an input is a size, or a tensor of integers or flags."""
    if isinstance(value, torch.Tensor):
        return not value.dtype.is_floating_point and not value.dtype.is_complex
    return isinstance(value, torch.SymInt)


def _stack(piece: Piece) -> dict[str, object]:
    """The modules around a block's calls, its own the innermost; none where its first call is in another."""
    around: dict[str, object] = {}
    for key, entry in (piece.calls[0].meta.get("nn_module_stack") or {}).items():
        around[key] = entry
        if isinstance(entry, tuple) and local_path(str(entry[0]))[1] == piece.name:
            return around
    return {}
