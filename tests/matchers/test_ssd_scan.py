"""`find_scans`: the operands of a scan, told by what they do; and that the rules of sizes are the interpreter's to be given."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.matchers.ssd.atoms import NoAxes, flat, fresh
from megacpp_compile.matchers.ssd.axes import AxisEquations
from megacpp_compile.matchers.ssd.resize import Resized
from megacpp_compile.matchers.ssd.resize_rules import RULES, contractions, elementwise, lengths, views, writes
from megacpp_compile.matchers.ssd.scan import NoScan, Scan, find_scans
from tests.corpus.scans import CHUNK, FORMS, NEAR_SCANS
from tests.matchers.graphs import aten, trace
from tests.seeds import Draws

B, T, H, P, G, N = 2, 8, 4, 3, 2, 5
draw = Draws(__name__)
OPERANDS = {
    "x": draw(B, T, H, P), "dt": draw(B, T, H).sigmoid(), "A": -draw(H).exp(), "B": draw(B, T, G, N),
    "C": draw(B, T, G, N), "D": draw(H), "initial_state": draw(B, H, P, N),
}  # fmt: skip


def scans(form, operands=OPERANDS, size=CHUNK):
    """(graph, what is found in `form` of `operands`); dt as a model computes it."""
    graph = trace(lambda x, dt, A, *rest: form(x, F.softplus(dt), A, *rest, size), *operands.values())
    return graph, list(find_scans(graph.graph))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["einsums", "matrix_products_heads_first", "one_triangle"])
def test_operands(name):
    graph, (scan,) = scans(FORMS[name])
    assert isinstance(scan, Scan), scan
    operands = dict(zip(OPERANDS, graph.inputs, strict=True))
    operands["dt"] = graph.only(aten.softplus.default)
    for role, node in operands.items():
        assert getattr(scan, role).node is node, role
    y, state = graph.outputs
    assert scan.y.node is y and [s.node for s in scan.final_states] == [state]
    sizes = [[a.size for a in flat(d)] for d in (scan.b, scan.h, scan.p, scan.n)]
    assert sizes == [[B], [G, H // G], [P], [N]]
    assert scan.chunk == (T if name == "one_triangle" else CHUNK)


def recurrent(step):
    """`step` of the quadratic form, whose decay and scores it may change."""

    def form(x, dt, A, B, C, D, state, size):
        sums = (dt * A).cumsum(1)
        mask = torch.ones(T, T).tril()[None, :, :, None]
        decay = torch.exp(sums[:, :, None] - sums[:, None]) * mask
        scores = torch.einsum("blgn,bsgn->blsg", C, B).repeat_interleave(H // G, -1)
        return torch.einsum("blsh,bshp->blhp", step(scores, decay, dt[:, None]), x) + D[:, None] * x

    return form


def test_a_scan_without_states():
    _, (scan,) = scans(recurrent(lambda scores, decay, dt: scores * decay * dt))
    assert isinstance(scan, Scan) and scan.initial_state is None and not scan.final_states


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("tag", "step"), [
    ("differs", lambda scores, decay, dt: scores * decay * decay * dt),
    ("differs", lambda scores, decay, dt: scores * (decay + 1) * dt),
    ("no-step", lambda scores, decay, dt: scores * decay),
    ("roles", lambda scores, decay, dt: (scores * decay * dt).softmax(2)),
], ids=["decays_twice", "offset", "no_step", "softmax"])  # fmt: skip
def test_near_misses(tag, step):
    _, found = scans(recurrent(step))
    assert found and all(isinstance(f, NoScan) for f in found)
    assert tag in {f.tag for f in found}, found


@pytest.mark.sampled(9)
@pytest.mark.parametrize("turn", range(6))
@pytest.mark.parametrize("near", ["diagonal_left_out", "not_causal", "decay_a_position_late"])
def test_near_misses_show_at_every_size(near, turn, monkeypatch):
    """No state grows in a trial: beside one that does, a token that is left out is within rounding."""
    solve = Resized.solve
    monkeypatch.setattr(Resized, "solve", lambda self, own: solve(self, own + turn))
    operands = {name: tensor.repeat(1, 2, *[1] * (tensor.dim() - 2)) if name in ("x", "dt", "B", "C") else tensor
                for name, tensor in OPERANDS.items()}  # fmt: skip
    _, found = scans(NEAR_SCANS[near][0], operands)
    assert all(isinstance(one, NoScan) for one in found) and found


def test_without_decays_over_positions_nothing_is_found():
    graph = trace(lambda x, y: (x * y.exp()).sum(1), OPERANDS["x"], OPERANDS["x"])
    assert list(find_scans(graph.graph)) == []


# --- running a subgraph at other sizes


def resized(f, *args, rules=RULES):
    graph = trace(f, *args)
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    return graph, Resized(rules, nodes, graph.inputs)


@pytest.mark.parametrize("f", [
    lambda a, b: torch.einsum("bik,bjk->bij", a, b), lambda a, b: a @ b.transpose(1, 2),
    lambda a, b: (a[:, :, None] * b[:, None]).sum(-1),
], ids=["einsum", "matmul", "products"])  # fmt: skip
def test_the_same_function_at_small_sizes(f):
    graph, r = resized(f, torch.randn(16, 64, 128), torch.randn(16, 32, 128))
    for turn in (0, 1):
        r.solve(turn)
        a, b = (torch.randn(r.shape(r.of(n)), dtype=torch.float64) for n in graph.inputs)
        assert a.shape[0] == b.shape[0] and a.shape[2] == b.shape[2] and max(a.shape) < 10
        (out,) = r.run(dict(zip(graph.inputs, (a, b), strict=True)), [graph.output])
        torch.testing.assert_close(out, f(a, b))


def test_views_split_what_they_split():
    graph, r = resized(lambda a, b: a.reshape(2, 4, 16, 8) * b, torch.randn(2, 64, 8), torch.randn(16, 8))
    (batch,), (chunk, inner), (width,) = r.of(graph.inputs[0])
    assert [batch.size, chunk.size, inner.size, width.size] == [2, 4, 16, 8]
    assert r.of(graph.inputs[1]) == [[inner], [width]]


def test_what_has_no_rule_cannot_be_resized():
    a = torch.randn(3, 4)
    with pytest.raises(NoAxes):
        resized(lambda a: a.softmax(-1), a)
    with pytest.raises(NoAxes):
        resized(lambda a: a * 2.0, a, rules={})
    rules = {aten.mul.Tensor: RULES[aten.mul.Tensor]}
    assert resized(lambda a: a * 2.0, a, rules=rules)[1].rules is rules


def test_no_op_has_two_rules():
    assert len(RULES) == sum(len(m.RULES) for m in (contractions, elementwise, lengths, views, writes))


def test_sizes_that_do_not_agree_are_told():
    axes = AxisEquations()
    with pytest.raises(NoAxes, match="divide"):
        axes.regroup([fresh(4), fresh(6)], [3, 8])
    with pytest.raises(NoAxes, match="divide"):
        axes.same([*fresh(2), *fresh(3)], [*fresh(3), *fresh(5)])
    with pytest.raises(NoAxes, match="agree"):
        axes.same([*fresh(2), *fresh(3)], fresh(2))
