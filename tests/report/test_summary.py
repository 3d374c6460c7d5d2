"""`Report.summary()` and the process's last words: what was not compiled, and why."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megacpp_compile.report import at_exit
from megacpp_compile.report.at_exit import ENDING, Ending
from megacpp_compile.report.collector import aside, emit_frame, record
from megacpp_compile.report.records import Frame, MissedFusion, Site
from megacpp_compile.report.report import Report
from megacpp_compile.report.summary import LINES

MLA = {"down_norm_up": 2, "mla_rope_q": 0}


def site():
    return Site("down_norm_up", "megacpp::down_norm_up", "layers.0", "m.py:3", "reference", "reference")


def filled():
    with record() as report:
        for _ in range(2):
            emit_frame(Frame(name="forward (m.py:3)", passes=MLA), [site(), site()])
        emit_frame(Frame(name="loss (m.py:40)", passes={"down_norm_up": 0}))
        emit_frame(Frame(name="norm (m.py:44)", reason="too small to hold an idiom"))
        for _ in range(3):
            emit_frame(Frame(captured=False, reason="an autograd.Function", name="helper (m.py:9)", left_to="backend"))
        eager = Frame(captured=False, reason="it cannot be resumed", name="loop (m.py:60)", left_to="eager")
        eager.graph_break = "m.py:62, in loop: `print(x)`: print"
        emit_frame(eager)
        cut = "m.py:70, in forward: `x.item()`: a number"
        emit_frame(Frame(captured=False, reason="nothing before it", name="m.py:70", graph_break=cut, left_to="pieces"))
        found = {"kind": "lightning attention", "fqn": "layers.0.mixer", "source": "m.py:80"}
        emit_frame(Frame(name="mixer (m.py:80)", passes=MLA, recognised=[found]), [site(), site()],
                   [MissedFusion("rope_qk", "layers.0", "m.py:5", "cat", "escapes", "the table is returned")])  # fmt: skip
    return report


def test_what_became_of_every_frame():
    assert filled().summary().splitlines() == [
        "5 of 10 frames captured, 6 sites fused, 1 near miss",
        "fused (3):",
        "  forward (m.py:3): down_norm_up 2 ×2",
        "  mixer (m.py:80): down_norm_up 2",
        "captured, and nothing to fuse (2):",
        "  loss (m.py:40): no idiom found",
        "  norm (m.py:44): too small to hold an idiom",
        "fell back whole, compiled by the backend alone (3):",
        "  helper (m.py:9): an autograd.Function ×3",
        "ran in eager, given up by Dynamo (1):",
        "  loop (m.py:60): it cannot be resumed at m.py:62, in loop: `print(x)`: print",
        "in pieces, as the graph breaks (1):",
        "  m.py:70: nothing before it",
        "graph breaks (1):",
        "  m.py:70, in forward: `x.item()`: a number",
        "recognised, without a lowering (1):",
        "  lightning attention: layers.0.mixer",
        "nearest misses (1):",
        "  rope_qk: the table is returned [escapes]",
        "megacpp tags escapes: what they mean, and what to write instead",
    ]


def test_it_is_read_back_from_json_and_in_the_table_and_of_nothing():
    report = filled()
    assert Report.from_json(report.to_json()).summary() == report.summary()
    report.frames[4].left_to = ""  # an older release's
    assert "helper (m.py:9): an autograd.Function ×3" in report.summary()
    assert "ran in eager: it cannot be resumed; graph break at m.py:62" in filled().render(width=400)
    assert "fell back: an autograd.Function" in filled().render(width=400)
    assert Report().summary() == "0 of 0 frames captured, 0 sites fused, 0 near misses"


def test_a_section_is_short():
    with record() as report:
        for i in range(LINES + 3):
            emit_frame(Frame(captured=False, reason="why", name=f"f{i}", left_to="backend"))
    lines = report.summary().splitlines()
    assert lines[1].endswith(f"({LINES + 3}):") and lines[-1] == "  and 3 more" and len(lines) == LINES + 3


@pytest.fixture
def registered(monkeypatch):
    """What was registered to be called at exit."""
    calls: list[object] = []
    monkeypatch.setattr(at_exit.atexit, "register", calls.append)
    ENDING.clear()
    return calls


def lost(name="helper (m.py:9)", left_to="backend", lost=True):
    return Frame(name=name, captured=False, reason="why", left_to=left_to, lost=lost)


def test_last_words(registered, capsys):
    emit_frame(Frame(passes=MLA), [site(), site()], at_exit=True)
    for _ in range(2):
        emit_frame(lost(), at_exit=True)
    emit_frame(lost("loop", left_to="eager"), at_exit=True)
    assert registered == [ENDING.say]  # once
    for _ in range(2):
        ENDING.say()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "megacpp: 1 of 4 frames captured, 2 sites fused",
        "fell back whole, compiled by the backend alone (2):",
        "  helper (m.py:9): why ×2",
        "ran in eager, given up by Dynamo (1):",
        "  loop: why",
        "megacpp_compile.record() has the whole report; MEGACPP_SUMMARY=0 silences this.",
    ]


def test_nothing_is_said_where_nothing_was_lost(registered):
    emit_frame(Frame(passes=MLA), [site()], at_exit=True)
    emit_frame(lost(lost=False), at_exit=True)  # no idiom can have been in it
    emit_frame(lost())  # what asked for silence
    with record(), aside(), record():
        emit_frame(lost(), at_exit=True)  # a trial
    assert registered == [] and ENDING.text() == ""


def test_a_fork_says_nothing_of_what_its_parent_compiled_and_a_rank_is_named(registered, capsys, monkeypatch):
    emit_frame(lost(), at_exit=True)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    ENDING.say()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(at_exit, "_rank", lambda: 3)
    ending = Ending()
    ending.note(lost(), [])
    assert ending.text().startswith("megacpp, rank 3: 0 of 1 frame captured")


PROGRAM = """
import torch
from torch._inductor import compile_fx
compile_fx.compile_fx = lambda gm, inputs, **_: gm.forward

def breaks(x):
    for _ in range(2):
        x = x @ x
        torch._dynamo.graph_break()
    return x

torch.compile(breaks, backend="megacpp")(torch.eye(3))
torch._dynamo.reset()
torch.compile(breaks, backend="megacpp", options={"summary": False})(torch.eye(3))
"""


@pytest.mark.end_to_end
def test_a_process_ends_with_them():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    *_, headline, title, line, _ = run.stderr.splitlines()
    assert headline == "megacpp: 0 of 1 frame captured, 0 sites fused"
    assert title == "ran in eager, given up by Dynamo (1):" and line.startswith("  breaks (<string>:6): ")
    assert run.stdout == ""
