"""The lane interpreter: every rule says of each lane what the op computes, checked by evaluating the terms."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from megacpp_compile.fx.mode_states import mode_states
from megacpp_compile.matchers.rope.activations import activations
from megacpp_compile.matchers.rope.lane_interpreter import LaneInterpreter
from megacpp_compile.matchers.rope.lane_rules import RULES, arithmetic, assembly, complex_numbers, views
from megacpp_compile.matchers.rope.lanes import SEVERAL, Lanes, Opaque
from tests.matchers.graphs import aten, trace
from tests.seeds import Draws

BATCH, TIME, DIM = 2, 3, 8
draw = Draws(__name__)
X, TABLE = draw(BATCH, TIME, DIM, dtype=torch.float64), draw(TIME, DIM, dtype=torch.float64)


def interpreted(f, x=X, table=TABLE):
    """(graph, interpreter) of `f(x, table)` where x alone is computed from weights."""
    graph = trace(f, x, table)
    states = mode_states(graph.graph)
    return graph, LaneInterpreter(RULES, activations(graph.graph, frozenset({graph.inputs[0]})), states)


def values(graph: Graph, *args: torch.Tensor) -> dict[Node, torch.Tensor]:
    """What every node of `graph` computes from `args`."""
    seen: dict[Node, torch.Tensor] = {}

    class Recorder(Interpreter):
        def run_node(self, n: Node) -> Any:
            seen[n] = super().run_node(n)
            return seen[n]

    Recorder(GraphModule(nn.Module(), graph), garbage_collect_values=False).run(*args)
    return seen


def evaluated(it: LaneInterpreter, lanes: Lanes, known: dict[Node, torch.Tensor]) -> torch.Tensor:
    """The tensor that `lanes` describes, summed term by term from what its sources hold."""
    outer = [n for n, k in zip(lanes.sizes, lanes.kinds, strict=True) if k == "o"]

    def factor(ids: np.ndarray, index: np.ndarray) -> torch.Tensor:
        """For each lane its source's entry, as a tensor of the outer dimensions and then the lane dimensions."""
        out = torch.ones(*outer, *ids.shape, dtype=torch.float64)
        for at in np.ndindex(*ids.shape):
            if ids[at] < 0:
                continue
            source = it.sources[int(ids[at])]
            tensor = known[source.node]
            tensor = getattr(tensor, {"re": "real", "im": "imag"}[source.part]) if source.part else tensor
            own = [d for d in source.dims if d >= 0]
            ones = [d for d in range(tensor.dim()) if d not in (*own, *source.lane_dims)]
            rows = tensor.permute(*own, *ones, *source.lane_dims).reshape(*(tensor.shape[d] for d in own), -1)
            shape = [tensor.shape[d] if d >= 0 else 1 for d in source.dims]
            out[(..., *at)] = rows[..., int(index[at])].reshape(shape).expand(outer)
        return out

    total = sum(torch.tensor(t.coef) * factor(t.src, t.lane) * factor(t.tab, t.tlane) for t in lanes.terms)
    at = {"o": itertools.count(), "l": itertools.count(len(outer))}
    return total.permute([next(at[k]) for k in lanes.kinds])


FORMS = {
    "sum": lambda x, t: x * t + 2.0 * (x.flip(-1) * t),
    "difference": lambda x, t: x.roll(1, -1) * t - x / 4.0,
    "alpha": lambda x, t: torch.add(x * t, x.neg(), alpha=3),
    "table": lambda x, t: x * t,
    "table_first": lambda x, t: t[None] * x,
    "halves": lambda x, t: torch.cat((-x[..., 4:], x[..., :4]), -1),
    "chunks": lambda x, t: torch.cat(x.chunk(2, -1)[::-1], -1) * t,
    "pairs": lambda x, t: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * t,
    "unbound": lambda x, t: torch.stack(x.reshape(BATCH, TIME, 4, 2).unbind(-1)[::-1], -1).reshape(X.shape),
    "transposed": lambda x, t: x.unflatten(-1, (2, 4)).transpose(-1, -2).reshape(X.shape),
    "outer_permuted": lambda x, t: x.transpose(0, 1) * t[:, None],
    "addcmul": lambda x, t: torch.addcmul(x * t, x.flip(-1), t[..., :1]),
    "half_table_doubled": lambda x, t: x * torch.cat((t[:, :4], -t[:, :4]), -1),
    "repeated_table": lambda x, t: x * t[:, :4].repeat_interleave(2, -1),
    "complex": lambda x, t: torch.view_as_real(torch.view_as_complex(x.reshape(BATCH, TIME, 4, 2)) * torch.view_as_complex(
        t.reshape(TIME, 4, 2))).flatten(-2),
    "products_summed": lambda x, t: (x.unflatten(-1, (4, 2)) * t.unflatten(-1, (4, 2))).sum(-1).repeat_interleave(2, -1),
    "rows_of_matrices": lambda x, t: (torch.stack((t[:, :4], -t[:, 4:], t[:, 4:], t[:, :4]), -1).view(TIME, 4, 2, 2)
                                      * x.view(BATCH, TIME, 4, 1, 2)).sum(-1).flatten(-2),
    "columns_of_matrices": lambda x, t: (lambda m, y: m[..., 0] * y[..., 0] + m[..., 1] * y[..., 1])(
        torch.cat([t, -t], -1).view(TIME, 4, 2, 2), x.view(BATCH, TIME, 4, 1, 2)).flatten(-2),
    "tables_side_by_side": lambda x, t: x * torch.cat((t[:, :2].cos(), t[:, :2].sin(), t[:, :2].cos(), -t[:, :2].sin()), -1),
    "by_ones": lambda x, t: x * t * torch.ones(1, dtype=t.dtype) ** -1,
    "into_zeros": lambda x, t: torch.zeros_like(x) + x * t - x.flip(-1) * t[:, :1] / 2.0,
    "empty": lambda x, t: torch.slice_scatter(torch.slice_scatter(torch.empty_like(x), x[..., 4:], -1, 0, 4), x[..., :4] * t[:, :4], -1, 4),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("f", FORMS.values(), ids=FORMS)
def test_lanes_are_what_the_graph_computes(f):
    graph, it = interpreted(f)
    lanes = it(graph.output)
    assert lanes is not None and not it.opaque(graph.output)
    assert lanes.sizes == tuple(graph.output.meta["val"].shape)
    torch.testing.assert_close(evaluated(it, lanes, values(graph.graph, X, TABLE)), f(X, TABLE))


@pytest.mark.parametrize("f", [
    lambda x, t: x * x, lambda x, t: x + 1.0, lambda x, t: x.sin(), lambda x, t: x.softmax(-1),
    lambda x, t: x.repeat(1, 1, 2), lambda x, t: 2.0 * x, lambda x, t: x / 3.0, lambda x, t: x + x.flip(-1),
    lambda x, t: x.float(),
], ids=["square", "number_added", "sine", "softmax", "repeated", "scaled", "divided", "sum", "rounded"])  # fmt: skip
def test_what_no_rule_reads_is_a_source(f):
    graph, it = interpreted(f)
    lanes = it(graph.output)
    assert it.opaque(graph.output)
    assert {s.node for s in it.sources if (lanes.terms[0].src == it.sources.index(s)).any()} == {graph.output}


def test_a_cast_that_rounds_nothing_is_read_through():
    graph, it = interpreted(lambda x, t: x.double().neg().float(), X.float(), TABLE.float())
    assert it(graph.output) is not None and not it.opaque(graph.output)


def test_lanes_scaled_in_a_wider_dtype_are_rounded_to_a_source():
    graph, it = interpreted(lambda x, t: (x.double() * 0.3).float(), X.float(), TABLE.float())
    assert it(graph.output) is not None and it.opaque(graph.output)


def test_lanes_that_meet_two_tables_keep_the_first_products_in_mind():
    graph, it = interpreted(lambda x, t: (x * t).flip(-1) * t)
    first, second = (n for n in graph.graph.nodes if n.target is aten.mul.Tensor)
    assert (it(graph.output).terms[0].tab == SEVERAL).all() and it.scaled == {first} and graph.output is second


def test_equal_entries_of_tables_that_are_put_together_are_the_first_of_them():
    graph, it = interpreted(lambda x, t: x * torch.cat((t[:, :4], t[:, 4:6].sin(), -t[:, 4:6].sin()), -1))
    (term,) = it(graph.output).terms
    assert it.sources[int(term.tab[0])].node.target is aten.cat.default and len(set(term.tab.tolist())) == 1
    assert term.tlane.tolist() == [0, 1, 2, 3, 4, 5, 4, 5] and term.coef.tolist() == [1] * 6 + [-1] * 2


def test_stops_are_sources():
    graph = trace(lambda x, t: x * t, X, TABLE)
    acts = activations(graph.graph, frozenset({graph.inputs[0]}))
    it = LaneInterpreter(RULES, acts, mode_states(graph.graph), stops=frozenset({graph.output}))
    assert it(graph.output) is not None and it.opaque(graph.output)


def test_one_table_written_twice_is_one_source():
    graph, it = interpreted(lambda x, t: x * t.cos()[None] + x.flip(-1) * t.cos()[None])
    first, second = it(graph.output).terms
    assert (first.tab == second.tab).all() and (first.tab >= 0).all()


def test_a_table_of_rules_is_all_the_interpreter_knows():
    graph = trace(lambda x, t: -x, X, TABLE)
    acts = activations(graph.graph, frozenset({graph.inputs[0]}))
    it = LaneInterpreter({}, acts, mode_states(graph.graph))
    it(graph.output)
    assert it.opaque(graph.output)

    def refuse(context, node):
        raise Opaque

    ran = []
    rules = {aten.neg.default: lambda context, node: ran.append(node) or RULES[aten.neg.default](context, node)}
    it = LaneInterpreter(rules, acts, mode_states(graph.graph))
    assert (it(graph.output).terms[0].coef == -1).all() and ran == [graph.output]
    it = LaneInterpreter({aten.neg.default: refuse}, acts, mode_states(graph.graph))
    it(graph.output)
    assert it.opaque(graph.output)


def test_no_op_has_two_rules():
    modules = (arithmetic, assembly, complex_numbers, views)
    assert len(RULES) == sum(len(m.RULES) for m in modules)
