"""Watches every test of a pass: `find` leaves the graph it reads, and the meta of all nodes, as they were."""

from __future__ import annotations

import pytest

from megacpp_compile.passes import _driver

from .contract import Watch, Watched


@pytest.fixture(autouse=True)
def find_changes_nothing(monkeypatch):
    watch, watched = Watch(), {}
    all_passes, enabled, drop_dead = _driver.all_passes, _driver.enabled_passes, _driver.drop_dead
    # A test may register rules: what is there is asked anew.
    monkeypatch.setattr(
        _driver, "all_passes", lambda: tuple(watched.setdefault(p, Watched(p, watch)) for p in all_passes())
    )
    monkeypatch.setattr(_driver, "enabled_passes", lambda config: watch.until_the_end(enabled(config)))
    monkeypatch.setattr(_driver, "drop_dead", lambda graph: watch.dropped(drop_dead(graph)))
    yield
    assert not watch.changed
