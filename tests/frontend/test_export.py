"""A frame that writes to nothing is run once to be traced, and any other as often as torch's export runs it."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch import fx

from megacpp_compile._torch._registry import Symbol
from megacpp_compile.errors import CaptureError
from megacpp_compile.frontend import export
from megacpp_compile.frontend.capture import capture, fake_inputs
from tests.frames import render


def counted(function):
    """`function`, as a frame calls it; `runs` is how often it has run."""

    def call(*args):
        call.runs += 1
        return function(*args)

    call.runs = 0
    return call


def frame(function, *values, output=lambda result, *inputs: (result,)):
    """(Dynamo's graph of one call of `function`, which Dynamo could not look into, the call)."""
    call, graph = counted(function), fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(values))]
    for node, value in zip(inputs, values, strict=True):
        node.meta["example_value"] = value
    graph.output(output(graph.call_function(call, tuple(inputs)), *inputs))
    return fx.GraphModule({}, graph), call


def test_one_run_where_nothing_is_written_to(monkeypatch):
    """Not even where results are views of inputs, or inputs; what a frame makes itself it may write to."""

    def of(x, y):
        return torch.zeros_like(x).add_(y).mul_(x).t()

    args = (torch.ones(3, 4), torch.ones(4))
    gm, call = frame(of, *args, output=lambda r, x, y: (r, None, x, [y, 3]))
    traced = render(capture(gm, args).gm)
    assert call.runs == 1
    monkeypatch.setattr(export, "_may_run_once", lambda *_: False)
    assert traced == render(capture(gm, args).gm) and "mul" in traced
    assert call.runs == 3


def hidden_write(x):
    return x.mul_(2) + 1


def hidden_write_to_a_view(x):
    x[0].detach().add_(1)
    return x + 1


def write_unsaid_by_a_whole_op(x):
    return torch.instance_norm(torch.ones(2, 3, 4), None, None, x, torch.ones(3), True, 0.1, 1e-5, False).sum() + x


@pytest.mark.parametrize("of", [hidden_write, hidden_write_to_a_view, write_unsaid_by_a_whole_op])
def test_a_write_that_only_shows_while_it_is_recorded(of):
    """What writes is an argument of nothing that Dynamo's graph says to write."""
    x = torch.ones(3)
    gm, call = frame(of, x)
    captured = capture(gm, [x]).gm
    assert call.runs == 3, "once in vain, and then as torch's export does"
    want = x.clone()
    (result,) = captured(given := x.clone())
    assert torch.equal(result, of(want)) and torch.equal(given, want)


def frame_that_writes(*values, to=0):
    """A frame that calls a function of its inputs, and writes to a part of one of them in the open."""
    gm, call = frame(torch.cos, values[0])
    graph, holders = gm.graph, gm.graph.find_nodes(op="placeholder")
    with graph.inserting_after(holders[-1]):
        holders += [graph.placeholder(f"y{i}") for i in range(1, len(values))]
    for node, value in zip(holders, values, strict=True):
        node.meta["example_value"] = value
    with graph.inserting_before(graph.output_node()):
        part = graph.call_method("select", (holders[to], 0, 1))
        part.meta["example_value"] = values[to].select(0, 1)
        graph.call_method("add_", (part, 1))
    return gm, call


def test_a_write_in_the_open_costs_no_run(monkeypatch):
    args = torch.ones(3, 4), torch.ones(3, 4)
    gm, call = frame_that_writes(*args, to=1)
    captured = capture(gm, args).gm
    assert call.runs == 1
    captured(*(given := [x.clone() for x in args]))
    assert torch.equal(given[0], args[0]) and torch.equal(given[1][1], torch.full((4,), 2.0))
    monkeypatch.setattr(export, "_may_run_once", lambda *_: False)
    assert render(captured) == render(capture(gm, args).gm)


def test_a_write_to_a_parameter_costs_no_run():
    """As under `no_grad`: it asks for a gradient, and nobody may write to it but so."""
    weight = torch.nn.Parameter(torch.ones(3))

    def of(w):
        with torch.no_grad():
            w.mul_(2)
        return w + 1

    gm, call = frame(of, weight)
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_method("zero_", (gm.graph.find_nodes(op="placeholder")[0],))
    captured = capture(gm, [weight]).gm
    assert call.runs == 1
    assert any(n.target is torch.ops.aten.copy_.default for n in captured.graph.nodes)


def test_two_runs_where_inputs_share_what_is_written_to():
    """Torch's export refuses it, or not, by whether gradients are asked for, which it learns in the first run."""
    x = torch.ones(3, 4)
    for args, once in (((x, x.clone()), True), ((x, x[1:]), False)):
        gm, _ = frame_that_writes(*args, to=1)
        assert export._may_run_once(gm, fake_inputs(args)[1]) is once


def test_a_buffer_that_is_written_to():
    call, graph = counted(lambda steps, x: steps.add_(1) + x), fx.Graph()
    x, steps = graph.placeholder("x"), graph.get_attr("steps")
    graph.output((graph.call_function(call, (steps, x)),))
    for runs, value in ((3, None), (1, torch.zeros(3))):  # what Dynamo knows of the memory
        call.runs = 0
        if value is not None:
            steps.meta["example_value"] = value
            with graph.inserting_after(steps):
                graph.call_method("add_", (steps, 1))
        root = torch.nn.Module()
        root.register_buffer("steps", torch.zeros(3))
        captured = capture(fx.GraphModule(root, graph), [torch.ones(3)]).gm
        assert call.runs == runs
        captured(torch.ones(3))
        assert torch.equal(root.steps, torch.full((3,), 1.0 if value is None else 2.0))


def test_what_fails_says_what_it_says_in_two_runs():
    def shaped_anew(x):
        x.transpose_(0, 1)
        return x + 1

    gm, _ = frame(shaped_anew, x := torch.ones(2, 3))
    with pytest.raises(CaptureError, match="metadata mutation"):
        capture(gm, [x])


def test_a_switch_that_is_left_on_is_seen_in_two_runs():
    """Of autocast, which not every torch refuses."""

    def switched(x):
        torch.autocast("cpu").__enter__()
        return x + 1

    gm, call = frame(switched, x := torch.ones(3))
    with contextlib.suppress(CaptureError):
        capture(gm, [x])
    assert call.runs > 1 and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("op", [torch.linalg.inv, torch.linalg.cholesky])
def test_tokens_of_what_an_op_does_within_itself_are_no_inputs(op, monkeypatch):
    """A check of the result, which is recorded with the op, but that the run before the recording looks into."""
    monkeypatch.setattr(export, "_may_run_once", lambda *_: False)
    gm, _ = frame(op, x := 2 * torch.eye(3))
    captured = capture(gm, [x]).gm
    assert len(captured.graph.find_nodes(op="placeholder")) == 1
    torch.testing.assert_close(captured(x)[0], op(x))


def test_two_runs_on_a_torch_that_cannot_tell(monkeypatch):
    gone = Symbol("theme.gone", "torch._functionalize_gone", "a test", "it is run twice", seen="99.0-99.0").get()
    monkeypatch.setattr(export, "is_written_to", gone)
    gm, call = frame(torch.cos, x := torch.ones(3))
    capture(gm, [x])
    assert call.runs == 2


def captured_with_symbols(function, look=lambda x: None):
    """(graph of `function` of [s, 3] where s is a symbol, how often it has run); `look` is given the fake in each."""
    found = {}

    def backend(gm, inputs):
        node, *_ = gm.graph.find_nodes(op="call_function", target=torch.cos)
        node.target = call = counted(lambda x: (look(x), torch.cos(x))[1])
        found["traced"], found["runs"] = capture(gm, inputs).gm, call
        node.target = torch.cos
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=True, fullgraph=True)(torch.ones(5, 3))
    return found["traced"], found["runs"].runs


def once_and_twice(monkeypatch, of, *look):
    """(graph, how often `of` has run) as it is captured, and where every frame is exported in two runs."""
    once = captured_with_symbols(of, *look)
    monkeypatch.setattr(export, "_may_run_once", lambda *_: False)
    return once, captured_with_symbols(of, *look)


def of_rows(x):
    return torch.cos(x).reshape(-1)[: x.shape[0]].sum() + x.shape[0] * x


def test_one_run_with_symbolic_sizes(monkeypatch):
    (traced, runs), (twice, usually) = once_and_twice(monkeypatch, of_rows)
    assert (runs, usually) == (1, 2) and render(traced) == render(twice) and "s" in render(traced)


def test_a_symbol_that_is_found_to_be_a_number_while_it_is_recorded(monkeypatch):
    """The graph is the one of two runs, the second of which knows it from the beginning."""
    fixed = lambda x: int(x.shape[0])  # noqa: E731
    (traced, runs), (twice, usually) = once_and_twice(monkeypatch, of_rows, fixed)
    assert runs == usually == 2 and render(traced) == render(twice) and "f32[5, " in render(traced)


def test_two_runs_where_a_number_is_returned():
    _, runs = captured_with_symbols(lambda x: (torch.cos(x), x.shape[0] + 1))
    assert runs == 2


def rows_of_experts(x):
    y = torch.zeros_like(x)
    for e in range(3):
        (rows,) = torch.where(x[:, 0] > e)
        y = y.index_add(0, rows, torch.cos(x[rows]) * e)
    return y


def number_of_a_tensor(x):
    count = (x > 0).sum().item()
    torch._check(count >= 0)
    return torch.cos(x), x.new_ones(count + 1)


@pytest.mark.parametrize("of", [rows_of_experts, number_of_a_tensor, lambda x: torch.cos(x)[x[:, 0] > 0]])
def test_one_run_where_sizes_are_known_at_run_time_only(monkeypatch, of):
    """In the graph of two runs they have other names, those of the second."""

    def names(gm):
        found = {}
        return re.sub(r"\b(u|zuf)\d+", lambda name: found.setdefault(name[0], f"u{len(found)}"), render(gm))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        (traced, runs), (twice, usually) = once_and_twice(monkeypatch, of)
    assert (runs, usually) == (1, 2) and names(traced) == names(twice) and "u0" in names(traced)


def test_nothing_is_looked_up_where_sizes_are_known_at_run_time_only(monkeypatch):
    """Torch's cache of results would be asked for each, and grow by it."""
    asked = []
    made = export.aot_export_module

    def exported(gm, fakes, **how):
        asked.append([mode.cache_enabled for mode in export._modes(fakes)])
        return made(gm, fakes, **how)

    monkeypatch.setattr(export, "aot_export_module", exported)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        captured_with_symbols(rows_of_experts)
        captured_with_symbols(of_rows)
    assert asked == [[False], [True]]
