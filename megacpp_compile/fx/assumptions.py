"""What tracing assumed of a graph's data, marked in the graph by ops that compute nothing.

A region is what ran between a mark and its `end`: an iteration for an expert of a list (`iteration`), or what a branch
on data would have skipped (`branch`, `size_branch`, `truth_branch`), with the numbers that it leaves behind changed
(`carried`, `carried_into`, `carried_tensor`) and the tensors that may be without rows (`rowless`). It was traced as if
it ran, and computes the same only where that changes nothing; who reads the marks has to show this, or give the graph
back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule, Node

from megacpp_compile.fx.edit import all_nodes

_library = torch.library.Library("megacpp_assumed", "DEF")
_SCHEMAS = (
    "expert(Tensor hits, int number) -> Tensor",
    "counts(Tensor counts, int experts) -> Tensor",
    "filled_counts(Tensor counts, int experts) -> Tensor",
    "iteration(Tensor expert, int region) -> ()",
    "branch(Tensor condition, bool taken, int region) -> ()",
    "size_branch(SymInt condition, bool taken, int region) -> ()",
    "truth_branch(SymBool condition, bool taken, int region) -> ()",
    "carried(SymInt before, SymInt after, int region) -> ()",
    "carried_into(SymInt before, Tensor after, int region) -> ()",
    "carried_tensor(Tensor before, Tensor after, int region) -> ()",
    "rowless(Tensor left, bool shown, int region) -> ()",
    "end(int region) -> ()",
)


def _expert(hits: Tensor, number: int) -> Tensor:
    return hits.new_full(hits.shape[1:], number)


def _counts(counts: Tensor, experts: int) -> Tensor:
    return counts[:experts].clone()


def _filled_counts(counts: Tensor, experts: int) -> Tensor:
    return torch.nn.functional.pad(counts, (0, experts))[:experts].clone()


def _fake_counts(counts: Tensor, experts: int) -> Tensor:
    return counts.new_empty((experts,))


def _mark(*_: Any) -> None:
    return None


_BODIES: dict[str, tuple[Any, Any]] = {"expert": (_expert, _expert), "counts": (_counts, _fake_counts),
                                 "filled_counts": (_filled_counts, _fake_counts)}  # fmt: skip
for _schema in _SCHEMAS:
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    _body, _fake = _BODIES.get(_name, (_mark, _mark))
    _library.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megacpp_assumed::{_name}", _fake, lib=_library)
    if _body is _mark:
        fx.node.has_side_effect(getattr(torch.ops.megacpp_assumed, _name).default)

ops = torch.ops.megacpp_assumed
expert, counts, end = ops.expert.default, ops.counts.default, ops.end.default
filled_counts = ops.filled_counts.default  # with zeros for experts behind the last that was chosen
iteration, branch = ops.iteration.default, ops.branch.default
size_branch, truth_branch = ops.size_branch.default, ops.truth_branch.default
carried, carried_into, carried_tensor = ops.carried.default, ops.carried_into.default, ops.carried_tensor.default
rowless = ops.rowless.default  # what a region leaves behind that holds nothing where it is skipped, as `shown` or not
COUNTS = (counts, filled_counts)
_CARRIED = (carried, carried_into, carried_tensor)
_BEGINS = (iteration, branch, size_branch, truth_branch)
_MARKS = (*_BEGINS, *_CARRIED, rowless, end)


@dataclasses.dataclass(frozen=True)
class Region:
    """What was traced as if it ran.

    Attributes:
        condition: the list whose iteration for `number` it is, or what a branch goes by.
        number: the list's entry; None for a branch.
        taken: of a branch, whether `condition` was taken to hold.
        nodes: what was traced in it, in order, without marks.
        carried: numbers that are read later, each before the region and behind it.
        rowless: values that are read later, and hold nothing where the region is skipped, nor do those without it.
        alike: values that are read later, and shaped as those without the region, which are the same without rows.
    """

    condition: Any
    number: int | None
    taken: bool
    nodes: frozenset[Node]
    carried: tuple[tuple[Any, Any], ...] = ()
    rowless: frozenset[Node] = frozenset()
    alike: frozenset[Node] = frozenset()


def marked(gm: GraphModule) -> int:
    """How many marks there are in `gm` and in the graphs that it holds."""
    return sum(node.target in _MARKS for node in all_nodes(gm))


def filled(gm: GraphModule) -> bool:
    """Whether counts in `gm` may have more entries than the model's."""
    return any(node.target is filled_counts for node in gm.graph.nodes)


def take_regions(graph: fx.Graph) -> list[Region] | None:
    """The regions of `graph`, whose marks are erased; None, and the graph as it was, where one has no end or reaches
    into another."""
    begun: dict[int, tuple[Node, list[Node]]] = {}
    open_: list[int] = []
    kept: dict[int, list[tuple[Any, Any]]] = {}
    empty: dict[tuple[int, bool], set[Node]] = {}
    regions = list[Region]()
    for node in graph.nodes:
        if node.target in _BEGINS:
            open_.append(node.args[-1])
            begun[open_[-1]] = node, []
        elif node.target in _CARRIED:
            kept.setdefault(node.args[2], []).append((node.args[0], node.args[1]))
        elif node.target is rowless:
            empty.setdefault((node.args[2], node.args[1]), set()).add(node.args[0])
        elif node.target is end:
            if not open_ or open_.pop() != node.args[0]:
                return None
            region = _region(*begun[node.args[0]])
            carried = tuple(kept.get(node.args[0], ()))
            rowless_, alike = (frozenset(empty.get((node.args[0], shown), ())) for shown in (True, False))
            regions.append(dataclasses.replace(region, carried=carried, rowless=rowless_, alike=alike))
        elif node.target is not expert:
            for number in open_:
                begun[number][1].append(node)
    if open_:
        return None
    for node in reversed(graph.nodes):
        if node.target in _MARKS or node.target is expert and not node.users:
            graph.erase_node(node)
    return regions


def _region(begin: Node, nodes: Sequence[Node]) -> Region:
    condition = begin.args[0]
    if begin.target is not iteration:
        return Region(condition, None, bool(begin.args[1]), frozenset(nodes))
    assert isinstance(condition, Node)
    hits, number = condition.args
    return Region(hits, number, True, frozenset(nodes))  # type: ignore[arg-type]


def experts(graph: fx.Graph) -> Iterator[Node]:
    """The entries of lists of experts, each known by its number."""
    yield from graph.find_nodes(op="call_function", target=expert)
