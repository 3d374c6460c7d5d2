"""Which worker runs what: as pytest-xdist's `--dist loadgroup`, but that it takes no longer the more tests there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController


class Numbered(list[str]):
    """Names of all tests, of which each one's number is known."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._numbers = {name: i for i, name in enumerate(names)}

    def index(self, name: str, *_: Any) -> int:
        return self._numbers[name]


class Scheduling(LoadGroupScheduling):
    """At each test that ends, pytest-xdist counts what is open among all that the worker has ever been given, and looks for
    the next one's number from the first on: ten seconds of ten thousand tests. What is done is dropped here."""

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        if node in self.registered_collections:
            self.registered_collections[node] = Numbered(collection)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        name = self.registered_collections[node][item_index]
        units, scope = self.assigned_work[node], self._split_scope(name)
        units[scope][name] = True
        if all(units[scope].values()):
            del units[scope]
        self._reschedule(node)
