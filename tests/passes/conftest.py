"""Watches every test of a pass: `find` leaves the graph it reads, and the meta of all nodes, as they were."""

from __future__ import annotations

import pytest

from megacpp_compile.passes import _driver

from .contract import Watched


@pytest.fixture(autouse=True)
def find_changes_nothing(monkeypatch):
    passes = tuple(Watched(p) for p in _driver.all_passes())
    monkeypatch.setattr(_driver, "all_passes", lambda: passes)
    yield
    assert not {p.name: p.changed for p in passes if p.changed}
