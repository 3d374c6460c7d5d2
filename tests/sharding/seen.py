"""What two ranks see of a module's CASES: it has `run(name, mesh)`, which gives plain numbers, and `around()`."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ON_ONE_WORKER, see_cases, start
from tests.tiers import case_of

RANKS = 2
ON_RANKS = [pytest.mark.skipif(not dist.is_gloo_available(), reason="no gloo"), ON_ONE_WORKER]


@pytest.fixture(scope="module")
def seen(request):
    """Case -> what each rank saw, of those that tests of this run are about and those that the test module has in READ;
    its CASES_OF is the module of the cases."""
    of, about = request.module.CASES_OF, {case_of(item) for item in request.session.items} | {*request.module.READ}
    found = outcomes(of, [name for name in (*of.CASES, *getattr(of, "OPS", ())) if name in about])

    def seen_of(case: str) -> list[dict[str, Any]]:
        for rank in found[case]:
            assert "failed" not in rank, rank["failed"]
        return found[case]

    return seen_of


def outcomes(of: ModuleType, names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Case -> what each rank saw. A rank that fails says so in place of what it saw."""
    with tempfile.TemporaryDirectory() as folder:
        start(_rank, (folder, of.__name__, tuple(names)), RANKS)
        found = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False, map_location="cpu") for rank in range(RANKS)]
    return {name: [of_rank[name] for of_rank in found] for name in names}


def _rank(rank: int, folder: str, module: str, names: tuple[str, ...]) -> None:
    of = importlib.import_module(module)
    torch.save(see_cases(rank, RANKS, folder, names, of.run, of.around), Path(folder, f"{rank}.pt"))
