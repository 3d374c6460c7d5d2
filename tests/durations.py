"""Where a run's time goes, by folder and by what takes it: a plugin for pytest.

    python -m pytest -n 2 -p tests.durations --time-table durations.json

prints a table of CPU seconds (of all workers together, and of processes they waited for; ranks are a server's, and are
not in it) and writes those of each test. A kind's seconds are its own: what it calls of another kind counts there.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from time import process_time  # as it is now: a test may put another in its place
from typing import Any

import pytest

# Kind -> functions whose time it is. What this torch has under another name counts as its caller's.
KINDS: dict[str, tuple[str, ...]] = {
    "Dynamo": ("torch._dynamo.convert_frame:_compile",),
    "capture": (
        "megacpp_compile.frontend.capture:capture",
        "megacpp_compile.analysis:capture",
        "tests.capture:aot_export_module",
    ),
    "passes": (
        "megacpp_compile.analysis:run_passes",
        "tests.frames:run_passes",
    ),
    "AOTAutograd": ("torch._functorch.aot_autograd:aot_module_simplified", "torch._functorch.aot_autograd:create_aot_state"),
    "Inductor": ("torch._inductor.compile_fx:compile_fx_inner", "torch._inductor.compile_fx:_compile_fx_inner"),
    "C++": ("torch._inductor.cpp_builder:CppBuilder.build",),
    "Triton": ("triton.runtime.interpreter:GridExecutor.__call__", "triton.compiler.compiler:compile"),
    "ranks": ("tests.ranks:start",),
    "subprocess": ("subprocess:Popen.communicate", "subprocess:Popen.wait"),
}

spent: Counter[str] = Counter()
_running: list[list[Any]] = []  # [kind, start of what has not been counted yet]


def clock() -> float:
    """CPU seconds of this process and of those it started and waited for: cores may be shared."""
    children = getrusage(RUSAGE_CHILDREN)
    return process_time() + children.ru_utime + children.ru_stime


def _switch(now: float) -> None:
    if _running:
        kind, since = _running[-1]
        spent[kind] += now - since
        _running[-1][1] = now


def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose time is added to `spent[kind]`, less that of other kinds inside it."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        now = clock()
        _switch(now)
        _running.append([kind, now])
        try:
            return function(*args, **kwargs)
        finally:
            now = clock()
            _switch(now)
            _running.pop()
            if _running:
                _running[-1][1] = now

    return run


def _install() -> None:
    for kind, names in KINDS.items():
        for name in names:
            module, path = name.split(":")
            try:
                owner: Any = importlib.import_module(module)
                *inner, last = path.split(".")
                for part in inner:
                    owner = getattr(owner, part)
                setattr(owner, last, counted(kind, getattr(owner, last)))
            except (ImportError, AttributeError):
                continue


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--time-table", metavar="FILE", help="write seconds of each test, by kind, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--collect-only"):
        config.pluginmanager.register(_Times(config), "times of tests")


class _Times:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.tests: dict[str, dict[str, float]] = defaultdict(dict)
        self.installed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        if not self.installed:
            _install()
            self.installed = True
        spent.clear()
        self.began = clock()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        if call.when == "teardown":
            item.user_properties.append(("kinds", {"whole": clock() - self.began, **spent}))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.tests[report.nodeid].update(dict(report.user_properties).get("kinds", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.tests and not hasattr(self.config, "workerinput"):
            terminalreporter.section("seconds by folder and kind")
            terminalreporter.write_line(table(self.tests))
            if file := self.config.getoption("--time-table"):
                Path(file).write_text(json.dumps(self.tests, indent=0))


def table(tests: Mapping[str, Mapping[str, float]]) -> str:
    """A line a folder: how many tests, their seconds, and how many of those each kind takes."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for name, times in tests.items():
        folder = "/".join(name.split("::")[0].split("/")[1:-1]) or "(top)"
        for row in (folder, "all"):
            rows[row].update({"tests": 1, **times, "rest": times["whole"] - sum(v for k, v in times.items() if k != "whole")})
    rows["all"] = rows.pop("all")
    columns = ["tests", "whole", *KINDS, "rest"]
    lines: list[Iterable[str]] = [["folder", *columns]]
    lines += [[name, *(f"{row[c]:.0f}" for c in columns)] for name, row in sorted(rows.items(), key=lambda r: -r[1]["whole"])]
    return "\n".join("| " + " | ".join(line) + " |" for line in (list(lines[0]), ["---", *["---:"] * len(columns)], *lines[1:]))
