"""Widths of heads that are symbols, and could be numbers.

Under `dynamic=True` a number that crosses a graph break, as `head_dim` in a shape that was built before it, is an input
of the resumed frame with a symbol in its place, and so are the last dimensions of tables that come with it. Lanes of an
unknown number are no heads, and a rotation of such is not even near one. A width that would make one is therefore fixed
to what it is: Dynamo guards it, and the frame is captured again. Nothing changes for a frame without such a rotation.

A width is a symbol that stands for nothing but last dimensions of inputs and plain numbers: what is also a batch or a
length, or counts rows, stays one, but for quotients in which it falls out. One that the user marked as
dynamic stays one, too, and is a near miss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megacpp_compile._torch.guards import TracingContext
from megacpp_compile.config.options import Config
from megacpp_compile.frontend.capture import Captured, capture
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.numbers_for_symbols import Numbers, at_hints, expression, free_symbols
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.rope.heads import Head, find_heads
from megacpp_compile.passes._driver import enabled_passes, missed
from megacpp_compile.report.records import MissedFusion

_MARKED = "the width of these heads is marked as dynamic; marked as static it has a graph for each number"
_MIXED = (
    "the width of these heads is known at run time only: it follows from sizes before a graph break, one of which is "
    "also a batch or a length"
)
_PASSES = frozenset(("rope_qk", "mla_rope_q", "mla_rope_kv"))


def fixed(captured: Captured, gm: GraphModule, example_inputs: Sequence[Any], config: Config) -> Captured:
    """`captured`, the form of Dynamo's graph `gm`, with widths of heads that are numbers as far as they may be; the
    others' heads are among its `given_up`."""
    if _PASSES.isdisjoint(p.name for p in enabled_passes(config)):
        return captured
    guarded, misses = _guard(captured, example_inputs)
    captured = capture(gm, example_inputs) if guarded else captured
    return dataclasses.replace(captured, given_up=[*captured.given_up, *misses])


def _guard(captured: Captured, example_inputs: Sequence[Any]) -> tuple[bool, list[MissedFusion]]:
    """Guard the widths of rotated heads that are symbols. Returns whether any was, and the near misses of those that
    have to stay symbols."""
    symbols, others = _symbols(captured.gm.graph)
    if not symbols:
        return False, []
    heads = _heads_at_hints(captured, symbols)
    mixed = [root for root in _heads_at_hints(captured, symbols | others) if root not in heads]
    marked = _marked(captured.gm.graph, example_inputs) if heads else set()
    numbers = [symbols[s] for wanted in heads.values() if not wanted & marked for s in wanted]
    for number in numbers:
        int(number)  # is Dynamo's guard
    misses = [_missed(root, _MARKED) for root, wanted in heads.items() if wanted & marked]
    return bool(numbers), misses + [_missed(root, _MIXED) for root in mixed]


def _missed(root: Node, why: str) -> MissedFusion:
    return missed("rope_qk", MatchFailure(root, "dynamic-width", why))


def _symbols(graph: fx.Graph) -> tuple[Numbers, Numbers]:
    """The symbols of the inputs that may be widths of heads, and the others, each with its number. There are none of
    the former without a width."""
    found, others, last, counts = Numbers(), Numbers(), False, set[sympy.Symbol]()
    for node in graph.find_nodes(op="placeholder"):
        v = value(node)
        if isinstance(v, torch.Tensor):
            wide = v.dim() > 1 and v.is_floating_point()
            last |= wide and isinstance(v.shape[-1], torch.SymInt)
            _note(v.shape[-1:], found if wide else others)
            _note(v.shape[:-1], others)
            counts.update(*map(free_symbols, v.shape[: -1 if wide else None]))
        else:
            _note([v], found)
    widths = {s: n for s, n in found.items() if s not in counts}
    others |= {s: n for s, n in found.items() if s in counts}
    return (widths if last else {}), others


def _note(sizes: Sequence[Any], found: Numbers) -> None:
    for n in sizes:
        if (expr := expression(n)) is not None and expr.is_symbol and not free_unbacked_symbols(n):
            found[expr] = n


def _heads_at_hints(captured: Captured, symbols: Numbers) -> dict[Node, set[sympy.Symbol]]:
    """The rotated heads of the graph as it is where `symbols` are what they are now, each with those of them that its
    width and those of its tables depend on."""
    graph, given = at_hints(captured.gm.graph, captured.fake_mode, symbols)
    weights = frozenset(node for node, of in given.items() if of in captured.weights)
    found = dict[Node, set[sympy.Symbol]]()
    for head in find_heads(graph, weights).found:
        free = set().union(*(free_symbols(value(given[node]).shape[dim]) for node, dim in _lanes(head)))
        found[given[head.root]] = free & symbols.keys()
    return found


def _lanes(head: Head) -> list[tuple[Node, int]]:
    """The dimensions of tensors that `head` has for lanes."""
    r = head.rotation
    sources = [part.source for part in (r.rope, r.nope, r.cos, r.sin) if part is not None]
    return [(head.root, -1), *((s.node, d) for s in sources for d in s.lane_dims)]


def _marked(graph: fx.Graph, example_inputs: Sequence[Any]) -> set[sympy.Symbol]:
    """The symbols of sizes that the user marked as dynamic, for which a number is an error of Dynamo's."""
    context, found = TracingContext.try_get(), set[sympy.Symbol]()
    for node, x in zip(graph.find_nodes(op="placeholder"), example_inputs if context else (), strict=False):
        symbolic = context.tensor_to_context.get(x) if context and isinstance(x, torch.Tensor) else None
        constraints = getattr(symbolic, "constraint_sizes", None) or ()
        sizes = [dim for dim, constraint in enumerate(constraints) if constraint is not None]
        found.update(*(free_symbols(value(node).shape[dim]) for dim in sizes))
    return found
