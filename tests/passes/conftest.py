"""Watches every test of a pass: `find` leaves the graph it reads, and the meta of all nodes, as they were."""

from __future__ import annotations

import pytest

from megacpp_compile.passes import _driver

from .contract import Watched


@pytest.fixture(autouse=True)
def find_changes_nothing(monkeypatch):
    watched, all_passes = {}, _driver.all_passes
    # A test may register rules: what is there is asked anew.
    monkeypatch.setattr(_driver, "all_passes", lambda: tuple(watched.setdefault(p, Watched(p)) for p in all_passes()))
    yield
    assert not {p.name: w.changed for p, w in watched.items() if w.changed}
