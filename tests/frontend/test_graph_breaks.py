"""Where the model's code breaks its graph: in the report, and an error under `strict`."""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, Unsupported

from megacpp_compile import record
from megacpp_compile.backend import megacpp
from megacpp_compile.errors import GraphBreakError, MegacppError

pytestmark = pytest.mark.usefixtures("fresh", "eager_backend")


def prints_inside(x):
    y = x.sin()
    print("a line of the model's")
    return y.cos()


def prints_first(x):
    print("a line of the model's")
    return x.cos()


def branches_on_data(x):
    if x.sum() > 0:
        return x.cos()
    return x.sin()


def breaks_in_a_try(x):
    try:
        print("a line of the model's")
        return x.cos()
    except ValueError:
        return x


def calls_what_breaks(x):
    return prints_inside(x) + 1


BREAKS = {
    prints_inside: ("print(", "print"), prints_first: ("print(", "print"), branches_on_data: ("x.sum() > 0", "branch"),
    breaks_in_a_try: ("print(", "print"), calls_what_breaks: ("print(", "print"),
}  # fmt: skip


def met(call):
    """The error of ours that `call` meets, however Dynamo wraps it."""
    with pytest.raises((MegacppError, BackendCompilerFailed)) as caught:
        call()
    return getattr(caught.value, "inner_exception", caught.value)


@pytest.mark.parametrize("function", BREAKS, ids=lambda f: f.__name__)
def test_the_report_has_the_place_and_the_reason(function):
    x = torch.ones(3)
    with record() as report:
        torch.testing.assert_close(torch.compile(function, backend="megacpp")(x), function(x))
    code, reason = BREAKS[function]
    cut = [f for f in report.frames if f.graph_break]
    assert cut and "test_graph_breaks.py" in cut[0].graph_break
    assert code in cut[0].graph_break and reason in cut[0].graph_break
    assert "graph break at test_graph_breaks.py" in report.render(width=500)
    assert len(cut[0].graph_break) < 350


@pytest.mark.parametrize("function", BREAKS, ids=lambda f: f.__name__)
def test_strict_makes_it_an_error(function):
    error = met(lambda: torch.compile(function, backend="megacpp", options={"strict": True})(torch.ones(3)))
    code, reason = BREAKS[function]
    assert isinstance(error, GraphBreakError)
    assert "test_graph_breaks.py" in error.place and code in error.place and reason in error.reason
    assert "without 'strict'" in str(error) and "\n" not in str(error)


def test_strict_by_the_environment_and_by_other_ways_to_give_options(monkeypatch):
    partial = functools.partial(megacpp, options={"strict": True})
    for marked in (partial, lambda gm, inputs: partial(gm, inputs)):
        torch._dynamo.reset()
        assert isinstance(met(lambda: torch.compile(prints_inside, backend=marked)(torch.ones(3))), GraphBreakError)  # noqa: B023
    monkeypatch.setenv("MEGACPP_STRICT", "1")
    torch._dynamo.reset()
    assert isinstance(met(lambda: torch.compile(prints_first, backend="megacpp")(torch.ones(3))), GraphBreakError)


def test_sizes_known_at_run_time_break_a_strict_model():
    """This package has such a frame traced again with breaks: they are the model's, and named."""

    def rows(x, keep):
        return x[keep.nonzero()[:, 0]] * 2

    keep = torch.tensor([True, False, True])
    error = met(lambda: torch.compile(rows, backend="megacpp", options={"strict": True})(torch.ones(3), keep))
    assert isinstance(error, GraphBreakError) and "keep.nonzero()" in error.place


def test_whole_frames_have_none():
    def whole(x):
        return x.sin().cos()

    with record() as report:
        torch.compile(whole, backend="megacpp", options={"strict": True})(torch.ones(3))
        torch.compile(nn.Linear(3, 2), backend="megacpp", options={"strict": True})(torch.ones(3))
    assert [f.graph_break for f in report.frames] == ["", ""]


def test_fullgraph_has_an_error_of_dynamos_own():
    with pytest.raises(Unsupported):
        torch.compile(prints_inside, backend="megacpp", options={"strict": True}, fullgraph=True)(torch.ones(3))


def test_breaks_of_other_backends_are_theirs():
    with record() as report:
        torch.compile(prints_first, backend="eager")(torch.ones(3))
        torch.compile(lambda x: x.sin().cos(), backend="megacpp")(torch.ones(3))
    assert [f.graph_break for f in report.frames] == [""]


def prints_in_a_loop(x):
    for row in (x, x):
        try:
            print("a line of the model's")
        finally:
            x = row.cos()
    return x


def raises_on_sizes(x):
    if x.shape[0] == 2:
        raise ValueError("more rows, please")
    return x.sin()


@pytest.mark.parametrize("function, error", [(raises_on_sizes, pytest.raises(ValueError)), (prints_in_a_loop, nullcontext())])
def test_advice_fits_what_stopped_dynamo(function, error, caplog):
    """A line that raises stands in no loop."""
    with caplog.at_level(logging.WARNING, "megacpp_compile"), error:
        torch.compile(function, backend=megacpp)(torch.randn(2, 3))
    assert ("Dynamo saw it raise" in caplog.text) == (function is raises_on_sizes)
    assert ("out of the loop" in caplog.text) == (function is prints_in_a_loop)
