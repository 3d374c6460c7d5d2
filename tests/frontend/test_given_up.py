"""Frames that Dynamo runs in eager, and frames that fall back whole: reported, said once, errors under `strict`."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch._inductor import compile_fx as compile_fx_module

from megacpp_compile import analysis, record
from megacpp_compile.errors import CaptureError, GraphBreakError, NotCapturedError
from megacpp_compile.frontend import graph_breaks
from megacpp_compile.frontend.fallbacks import may_hold_idiom
from megacpp_compile.report.at_exit import ENDING

pytestmark = pytest.mark.usefixtures("fresh", "eager_backend")


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "megacpp_compile" and r.levelno >= logging.WARNING]


def compiled(function, *args, **options):
    with record() as report:
        got = torch.compile(function, backend="megacpp", options=options)(*args)
    torch.testing.assert_close(got, function(*args))
    return report


# --- given up by Dynamo


def breaks_in_a_loop(x):
    for _ in range(2):
        x = x @ x
        torch._dynamo.graph_break()
    return x


def test_a_graph_break_in_a_loop(caplog):
    report = compiled(breaks_in_a_loop, torch.eye(3))
    (frame,) = report.frames
    assert frame.left_to == "eager" and frame.lost and "breaks_in_a_loop (test_given_up.py:" in frame.name
    assert "torch._dynamo.graph_break()" in frame.graph_break
    (said,) = warnings(caplog)
    assert said.startswith(f"{frame.name} runs in eager: ") and frame.graph_break in said and "out of the loop" in said
    assert "ran in eager, given up by Dynamo (1):" in report.summary()
    torch._dynamo.reset()
    compiled(breaks_in_a_loop, torch.eye(3))
    assert len(warnings(caplog)) == 1
    assert f"{frame.name}: {frame.reason}" in ENDING.text() and "×2" in ENDING.text()


def branches_in_a_loop(x):
    for _ in range(2):
        if x.sum() > 0:
            x = x @ x
    return x


@pytest.mark.parametrize("function", [breaks_in_a_loop, branches_in_a_loop], ids=lambda f: f.__name__)
def test_a_loop_under_strict(function):
    line = {breaks_in_a_loop: "graph_break()", branches_in_a_loop: "x.sum() > 0"}[function]
    (frame,) = compiled(function, torch.eye(3)).frames
    assert frame.left_to == "eager" and line in frame.graph_break
    torch._dynamo.reset()
    with pytest.raises(GraphBreakError) as caught:
        compiled(function, torch.eye(3), strict=True)
    assert line in caught.value.place and ("branch" in caught.value.reason) == (function is branches_in_a_loop)


def test_what_it_calls_is_compiled_by_itself():
    """And counts as any frame."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.down(nn.functional.silu(self.up(x)))

    inner = Inner().requires_grad_(False)

    def calls(x):
        for _ in range(2):
            x = inner(x)
            torch._dynamo.graph_break()
        return x

    report = compiled(calls, torch.eye(3))
    assert [f.captured for f in report.frames] == [False, True]


def test_the_environment_silences_the_end(monkeypatch):
    monkeypatch.setenv("MEGACPP_SUMMARY", "0")
    assert compiled(breaks_in_a_loop, torch.eye(3)).frames[0].lost
    assert ENDING.text() == ""


def test_code_that_is_not_the_users_is_in_the_report_alone(monkeypatch, caplog):
    monkeypatch.setattr(graph_breaks, "is_users", lambda filename: False)
    (frame,) = compiled(breaks_in_a_loop, torch.eye(3)).frames
    assert frame.left_to == "eager" and not frame.lost
    assert warnings(caplog) == [] and ENDING.text() == ""


def a_product(x):
    return (x @ x).sin() * 2 + x


def test_the_recompile_limit(caplog):
    function = torch.compile(a_product, backend="megacpp")
    with record() as report, torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        for n in range(2, 7):
            function(torch.eye(n))
    assert [f.left_to for f in report.frames] == ["", "", "eager"]
    assert "recompile_limit reached" in report.frames[2].reason and "mark_dynamic" in report.frames[2].reason
    assert "a_product (test_given_up.py:" in report.frames[2].name
    assert "recompile_limit reached" in ENDING.text()
    assert warnings(caplog) == []  # Dynamo warns of it


def test_the_recompile_limit_under_strict():
    function = torch.compile(a_product, backend="megacpp", options={"strict": True})
    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        function(torch.eye(2))
        with pytest.raises(GraphBreakError, match="recompile_limit reached"):
            function(torch.eye(3))


@pytest.fixture
def failing(monkeypatch):
    def fails(*_, **__):
        raise ValueError("Inductor's own")

    monkeypatch.setattr(compile_fx_module, "compile_fx", fails)


def test_an_error_that_dynamo_hides(failing):
    with torch._dynamo.config.patch(suppress_errors=True):
        report = compiled(a_product, torch.eye(3))
    (frame,) = report.frames
    assert frame.left_to == "eager" and frame.reason.endswith("suppress_errors hid ValueError: Inductor's own")
    assert "ValueError: Inductor's own" in ENDING.text()


def test_an_error_that_the_user_meets_is_no_frame(failing):
    with record() as report, pytest.raises(Exception, match="Inductor's own"):
        torch.compile(a_product, backend="megacpp")(torch.eye(3))
    assert report.frames == []


def test_all_is_well():
    report = compiled(nn.Sequential(nn.Linear(3, 3), nn.SiLU(), nn.Linear(3, 3)), torch.eye(3))
    assert [(f.left_to, f.lost) for f in report.frames] == [("", False)]
    assert ENDING.text() == "" and ENDING.frames == 1


# --- left to the backend


@pytest.fixture
def not_captured(monkeypatch):
    def refuses(*_):
        raise CaptureError("it holds a planted lie")

    monkeypatch.setattr(analysis, "capture", refuses)


def test_a_frame_that_may_have_lost_an_idiom_warns_once(not_captured, caplog):
    for _ in range(2):
        (frame,) = compiled(a_product, torch.eye(3)).frames
        torch._dynamo.reset()
    assert frame.left_to == "backend" and frame.lost
    (said,) = warnings(caplog)
    assert "a_product (test_given_up.py:" in said
    assert "compiled by Inductor alone: it holds a planted lie. Take " in said
    assert "it holds a planted lie ×2" in ENDING.text()


def test_a_frame_that_cannot_is_in_the_report_alone(not_captured, caplog):
    report = compiled(lambda x: x.sin().cos().tan() + x, torch.eye(3))
    (frame,) = report.frames
    assert frame.left_to == "backend" and not frame.lost and "a planted lie" in report.summary()
    assert warnings(caplog) == [] and ENDING.text() == ""


def test_strict(not_captured):
    with pytest.raises(NotCapturedError, match="a planted lie"):
        compiled(a_product, torch.eye(3), strict=True)


def test_what_multiplies():
    x = torch.ones(3)
    for function in (lambda a: a @ x, lambda a: a * a, lambda a: a.mul_(2), lambda a: torch.einsum("i,i", a, a),
                     lambda a: nn.functional.linear(a, a), lambda a: torch.ops.aten.mm.default(a, a)):  # fmt: skip
        assert may_hold_idiom(torch.fx.symbolic_trace(function))
    for function in (lambda a: a + 1, lambda a: a.sin().view(1, 3), lambda a: torch.cat([a, a]).sum()):
        assert not may_hold_idiom(torch.fx.symbolic_trace(function))


def test_a_graph_inside_of_a_call_counts():
    graph = torch.fx.Graph()
    graph.output(graph.call_module("inner", (graph.placeholder("a"),)))
    assert may_hold_idiom(torch.fx.GraphModule({"inner": torch.fx.symbolic_trace(lambda a: a @ a)}, graph))
