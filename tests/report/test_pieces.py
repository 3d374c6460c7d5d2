"""Which pieces of compiling cost the most: they add up, the costliest is first, and what is said to avoid one does."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future

import pytest
import torch
from torch import nn
from torch._dynamo.utils import dynamo_timed
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile

import megacpp_compile
from megacpp_compile.passes import mla_rope_q
from megacpp_compile.report import pieces, stages
from megacpp_compile.report.pieces import Cost, costs, of_event
from megacpp_compile.report.records import Frame, MissedFusion
from megacpp_compile.report.report import Report
from megacpp_compile.report.stages import heard, piece, stage, timed

WIDTH, RANK = 48, 12


class LowRank(nn.Module):
    """A projection that is rewritten."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(width, RANK), nn.RMSNorm(RANK), nn.Linear(RANK, width)

    def forward(self, x):
        return self.up(self.norm(self.down(x))).tanh()


def tokens(width=WIDTH):
    return torch.randn(2, 6, width)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until the test moves it."""
    now = [0.0]
    monkeypatch.setattr(stages.time, "perf_counter", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    return passes


def add_up(report):
    """Every second of a frame is in one piece, and the costliest come first."""
    found = report.costs(None)
    assert [cost.seconds for cost in found] == sorted((cost.seconds for cost in found), reverse=True)
    for frame in report.frames:
        whole = sum(frame.seconds.values())
        assert sum(cost.seconds for cost in found if cost.frame == frame.index) == pytest.approx(whole, abs=1e-6)
        assert all(found["seconds"] >= 0 for found in frame.pieces)
        for name, seconds in frame.seconds.items():
            assert sum(p["seconds"] for p in frame.pieces if p["stage"] == name) <= seconds + 1e-6
    assert report.costs() == found[: pieces.MOST]
    return found


# --- the clock


def test_phases_of_torch_are_pieces_of_the_half_they_are_for(clock):
    seconds, found = {}, []
    with timed(seconds, "torch", found), heard():
        clock(1)
        with dynamo_timed("aot_trace_joint_graph"):
            clock(2)
        with dynamo_timed("compile_fx.<locals>.bw_compiler"):
            clock(4)
            with stage("code"), dynamo_timed("a phase nobody knows"):
                clock(8)
                with dynamo_timed("GraphLowering.run"), dynamo_timed("mm_template_autotuning"):
                    clock(16)
                with stage("lowering"), piece(pieces.OP, "an op at a module"):
                    clock(32)
        clock(64)
    assert seconds == {"torch": 71, "code": 24, "lowering": 32}
    assert {(p["stage"], p["kind"], p["where"]): p["seconds"] for p in found if p["seconds"]} == {
        ("torch", "tracing the gradient", ""): 2,
        ("code", "autotuning", "mm, backward"): 16,
        ("lowering", "lowering an op", "an op at a module, backward"): 32,
    }


def test_a_phase_that_fails_or_never_ends_is_over_with_what_it_is_in(clock):
    seconds, found = {}, []
    log = torch._dynamo.utils.get_chromium_event_logger()
    with timed(seconds, "torch", found), heard():
        with contextlib.suppress(ZeroDivisionError), dynamo_timed("GraphLowering.run"):
            clock(1)
            raise ZeroDivisionError
        with stage("code"):
            log.log_event_start("Scheduler.__init__", time.time_ns(), {})
            clock(2)
        clock(4)
        stages._event_ends("Scheduler.__init__")  # which ended with its stage
        clock(8)
    assert seconds == {"torch": 13, "code": 2}
    assert {p["kind"]: p["seconds"] for p in found} == {"lowering to loops": 1, "fusing kernels": 2}


def test_other_threads_and_what_is_not_timed_are_not_told(clock):
    seconds, found = {}, []

    def phase():
        with dynamo_timed("GraphLowering.run"), piece(pieces.OP, "there"):
            clock(1)

    with timed(seconds, "torch", found), heard():
        for context in (None, stages.contextvars.copy_context()):
            thread = threading.Thread(target=phase if context is None else lambda run=context.run: run(phase))
            thread.start()
            thread.join()
    phase()
    assert found == [] and seconds == {"torch": 2}


def test_a_kernel_is_told_by_what_is_waited_for_it_and_not_by_its_worker(clock):
    """The workers compile side by side: the second is ready by the time that the first is."""

    class Worked(Future):
        def __init__(self, seconds):
            super().__init__()
            self.seconds = seconds

        def result(self, timeout=None):
            clock(self.seconds)
            return f"{self.seconds} s"

    seconds, found, scope = {}, [], {"first": Worked(3), "second": Worked(0), "number": 7}
    with inductor_config.patch(compile_threads=2), timed(seconds, "code", found), heard():
        AsyncCompile().wait(scope)
    assert scope == {"first": "3 s", "second": "0 s", "number": 7}
    assert {p["where"]: p["seconds"] for p in found if p["kind"] == pieces.KERNEL} == {"first": 3, "second": 0}


def test_nothing_of_torchs_is_left_replaced():
    before = AsyncCompile.wait
    with heard(), heard():
        assert AsyncCompile.wait is not before
    assert AsyncCompile.wait is before


def test_events_that_are_known():
    assert of_event("pass.post_grad_passes.remove_noop_ops") == ("Inductor's graph passes", "remove_noop_ops")
    assert of_event("triton_flash_template_precompiling") == ("autotuning", "triton_flash")
    assert of_event("entire_frame_compile") is None


# --- the list


def frame(**more):
    given = {"name": "forward (model.py:1)", "seconds": {"dynamo": 1.0, "capture": 0.5, "moe": 0.25, "code": 8.0, "torch": 2.0}}
    return Frame(**{**given, **more})


def row(report, kind):
    (found,) = [cost for cost in costs(report) if cost.kind == kind]
    return found


def test_what_is_left_of_a_stage_is_a_piece_too():
    known = [{"stage": "code", "kind": pieces.KERNEL, "where": "cpp_0, forward", "seconds": 6.0}]
    report = Report(frames=[frame(pieces=known, passes={"moe": 3})])
    assert [(c.seconds, c.kind, c.where) for c in add_up(report)] == [
        (6.0, pieces.KERNEL, "cpp_0, forward"), (2.0, "Inductor, the rest", "forward (model.py:1)"),
        (2.0, "AOTAutograd and the rest", "forward (model.py:1)"), (1.0, "Dynamo's translation", "forward (model.py:1)"),
        (0.5, "capturing the frame", "forward (model.py:1)"), (0.25, "pass", "moe"),
    ]  # fmt: skip
    assert row(report, "pass").avoid == "`disable=('moe',)`: it put 3 ops here"
    again = Report.from_json(report.to_json())
    assert again.costs(None) == report.costs(None) and again.to_dict()["costs"] == report.to_dict()["costs"]
    assert report.to_dict()["costs"][0] == {
        "seconds": 6.0, "frame": 0, "kind": pieces.KERNEL, "where": "cpp_0, forward", "avoid": pieces._KEPT,
    }  # fmt: skip


def test_layers_that_are_equal_are_to_be_compiled_once_unless_they_are():
    layers = {"": "Model", **{f"layers.{i}": "Layer" for i in range(4)}}
    avoid = row(Report(frames=[frame(modules=layers)]), "Dynamo's translation").avoid
    assert avoid.startswith(pieces._BLOCKS) and avoid.endswith(pieces._FILE)
    assert row(Report(frames=[frame(modules=layers)]), "pass").avoid.startswith("`disable=")
    few = {name: kind for name, kind in layers.items() if name != "layers.3"}
    for other in (frame(modules=few), frame(modules=layers, block="model.layers.0")):
        assert pieces._BLOCKS not in row(Report(frames=[other]), "Dynamo's translation").avoid


def test_a_file_holds_one_graph():
    """What keeps frames of a function that breaks is Dynamo's own cache."""
    broken = Report()
    broken.add(frame(graph_break="model.py:3, in forward: `print(x)`", cached=True))
    broken.add(frame())
    for report, held in ((broken, pieces._FILES), (Report(frames=[frame(cached=True)]), pieces._FILE)):
        kinds = "Dynamo's translation", "capturing the frame", "loading from a cache"
        assert all(cost.avoid.endswith(held) for cost in costs(report) if cost.kind in kinds)


def test_a_loop_traced_step_by_step_is_told_where_it_takes_time():
    loop = MissedFusion("token_loop", "", "model.py:12, in forward: `for`", "", "step-by-step", "each step is another")
    avoid = row(Report(frames=[frame()], misses=[loop]), "Dynamo's translation").avoid
    assert "loop at model.py:12" in avoid and "step-by-step" in avoid
    assert "loop" not in row(Report(frames=[frame()], misses=[loop]), "Inductor, the rest").avoid


def test_what_came_from_a_cache_was_loaded():
    report = Report(frames=[frame(cached=True)])
    kinds = {cost.kind for cost in add_up(report)}
    assert kinds == {"loading from a cache", "Dynamo's translation", "capturing the frame", "pass"}
    assert all("it is loaded" in cost.avoid for cost in costs(report) if cost.kind == "loading from a cache")


@pytest.mark.parametrize(("said", "avoid"), [
    ("x has size 9 in dimension 1, and had 6", "`torch._dynamo.mark_dynamic(x, 1)` ahead of the first call"),
    ("x has size 1 in dimension 0, and had 2", "nothing: sizes 0 and 1"),
    ("x has size 9 in dimension 0, and had 1", "nothing: sizes 0 and 1"),
    ("x has size 19 in dimension 0, and had 11", "`torch._dynamo.mark_dynamic(x, 0)`"),
    ("mask is Float, and was Bool", "mask of one kind in all calls"),
    ("mask is no longer None", "mask in every call, or in none"),
    ("`self.dropout.training == True` no longer holds", "train() and eval() take one each"),
    ("`self.adapter.scale == 0.5` no longer holds", "once for each value"),
    ("self.down.weight requires no gradient, and did", "self.down.weight frozen, or not, before the first call"),
    ("x has 2 dimensions, and had 3", "x with as many dimensions"),
    ("x has stride 1 in dimension 0, and had 6", "x laid out alike"),
    ("grad mode has changed", "calls under the same grad mode"),
    ("Dynamo does not say why", "the same guards in all calls"),
])  # fmt: skip
def test_a_frame_that_is_compiled_again_is_one_piece(said, avoid):
    report = Report()
    report.add(frame())
    report.add(frame(recompiled=said, pieces=[{"stage": "code", "kind": "fusing kernels", "where": "", "seconds": 1.0}]))
    first = add_up(report)[0]
    assert (first.seconds, first.frame, first.kind) == (11.75, 1, "compiled again")
    assert avoid in first.avoid and said in first.avoid


def test_a_frame_left_to_graph_breaks_is_one_piece():
    report = Report(frames=[frame(captured=False, left_to="pieces", reason="sizes are known at run time only")])
    (only,) = add_up(report)
    assert only == Cost(11.75, 0, "traced in vain", "forward (model.py:1)", "sizes are known at run time only")


def test_pieces_too_short_to_name_are_no_rows():
    report = Report(frames=[frame(seconds={"code": 0.009, "torch": 3.0})])
    text = str(report).partition(pieces_title())[2]
    assert "AOTAutograd" in text and "Inductor, the rest" not in text and len(costs(report)) == 2
    assert pieces_title() not in str(Report(frames=[frame(seconds={"code": 0.009})]))


def pieces_title():
    return "costliest pieces of compiling"


# --- real compilations


def test_a_pass_that_takes_long_is_named_first(monkeypatch, no_kernels):
    find, compiled = mla_rope_q.find, torch.compile(LowRank(), backend="megacpp")
    compiled(tokens())  # with what is done once a process
    torch._dynamo.reset()

    def slowly(view):
        time.sleep(3)
        return find(view)

    monkeypatch.setattr(mla_rope_q, "find", slowly)
    with megacpp_compile.record() as report:
        compiled(tokens()).sum().backward()
    first = add_up(report)[0]
    assert (first.kind, first.where, first.frame) == ("pass", "mla_rope_q", 0) and first.seconds >= 3
    assert first.avoid == "`disable=('mla_rope_q',)`: it did not fire here"
    assert report.counts["down_norm_up"] == 1
    page = report.to_html()
    assert page.index("Compile time") < page.index(pieces_title()) and first.avoid.split(":")[1].strip() in page
    torch._dynamo.reset()
    with megacpp_compile.record() as report:  # and what avoids it does
        torch.compile(LowRank(), backend="megacpp", options={"disable": ("mla_rope_q",)})(tokens())
    assert "mla_rope_q" not in {cost.where for cost in add_up(report)}


def test_explain_names_what_it_does_without_compiling():
    report = megacpp_compile.explain(LowRank(), tokens())
    kinds = {cost.kind for cost in add_up(report)}
    assert {"Dynamo's translation", "capturing the frame", "pass", "analysis"} == kinds


@pytest.mark.parametrize("mark", [False, True])
def test_a_dimension_marked_dynamic_is_not_compiled_again(no_kernels, mark):
    compiled = torch.compile(LowRank(), backend="megacpp")
    with megacpp_compile.record() as report:
        for length in (6, 9):
            x = torch.randn(2, length, WIDTH)
            if mark:
                torch._dynamo.mark_dynamic(x, 1)
            compiled(x).sum().backward()
    again = [(cost.frame, "mark_dynamic(x, 1)" in cost.avoid) for cost in add_up(report) if cost.kind == "compiled again"]
    assert (len(report.frames), again) == ((1, []) if mark else (2, [(1, True)]))


def test_each_of_several_frames_has_its_pieces(no_kernels):
    first, second = LowRank(), LowRank()

    def model(x):
        x = first(x)
        torch._dynamo.graph_break()
        return second(x)

    with megacpp_compile.record() as report:
        torch.compile(model, backend="megacpp")(tokens()).sum().backward()
    assert len(report.frames) == 2
    assert {cost.frame for cost in add_up(report) if cost.kind == "lowering an op"} == {0, 1}


def test_it_costs_next_to_nothing(monkeypatch, no_kernels):
    """As many looks at the clock as there are phases, whoever asks."""
    asked = []

    def perf_counter(now=time.perf_counter):
        asked.append(now())
        return asked[-1]

    monkeypatch.setattr(stages.time, "perf_counter", perf_counter)
    torch.compile(LowRank(), backend="megacpp")(tokens()).sum().backward()
    assert 10 < len(asked) < 1000


@pytest.mark.end_to_end
@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_in_c_plus_plus_are_waited_for_and_then_loaded(tmp_path, threads, monkeypatch):
    """By one thread each is compiled where its code is loaded, which does not say its name."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compilers, model, reports = [pieces.CPP, pieces.KERNEL][threads - 1], LowRank(width=WIDTH + threads), []
    for _ in range(2):
        torch._dynamo.reset()
        with inductor_config.patch(compile_threads=threads), megacpp_compile.record() as report:
            torch.compile(model, backend="megacpp")(tokens(width=WIDTH + threads)).sum().backward()
        reports.append(report)
    made = [cost for cost in add_up(reports[0]) if cost.kind == compilers]
    halves = {cost.where.rpartition(", ")[2] for cost in made if cost.where.startswith(("cpp_fused", "a kernel"))}
    assert halves == {"forward", "backward"} and sum(cost.seconds for cost in made) > 0.5
    assert reports[1].frames[0].cached
    loaded = add_up(reports[1])
    assert not {"generating code", "fusing kernels", pieces.OP, pieces.CPP} & {cost.kind for cost in loaded}
    assert "loading from a cache" in {cost.kind for cost in loaded}
