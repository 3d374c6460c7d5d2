"""Ranks of tests: forks of a server that has imported what they need and compiled a first frame, as either takes seconds of
each rank. The server is a process of its own: nothing that tests have done in this one comes along.

`TEST_RANKS=cuda` gives each rank a GPU, and NCCL in place of gloo. The server's forks could not use one: each rank is
then a process that begins anew."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
import torch

DEVICE = os.environ.get("TEST_RANKS", "cpu")
GROUPS = {"cpu": "gloo", "cuda": "nccl"}
# For tests of ranks: one worker starts them all, and so there is one server.
ON_ONE_WORKER = pytest.mark.xdist_group("ranks")


def start(function: Callable[..., None], args: tuple[Any, ...], ranks: int) -> None:
    """`function(rank, *args)` in as many processes, until all have ended; the error of one is raised here."""
    how = "spawn" if DEVICE == "cuda" else "forkserver"
    if how == "forkserver":
        multiprocessing.get_context(how).set_forkserver_preload(["tests.ranks_loaded"])
    torch.multiprocessing.start_processes(function, args, ranks, start_method=how)


def see_cases(
    rank: int, ranks: int, folder: str, names: Iterable[str], run: Callable[[str, Any], Any],
    around: Callable[[], AbstractContextManager[Any]], seconds: int = 120,
) -> dict[str, Any]:  # fmt: skip
    """Name of a case -> what `run(name, mesh)` gives on this rank, or how it failed. Within `around`, with quick
    compilers. On a GPU, a case of more than 100 s says where it is."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from tests.fixtures import quick_compilers

    warnings.simplefilter("ignore")
    if DEVICE == "cuda":
        _on_a_gpu(rank)
    store, ends = (dist.FileStore(f"{folder}/{name}", ranks) for name in ("groups", "ends"))
    ends.set_timeout(timedelta(seconds=2 * seconds))
    seen: dict[str, Any] = {}
    begin, mesh = True, None
    for name in names:
        if DEVICE == "cuda":
            print(f"rank {rank}: {name}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(100)  # replaces that of the case before
        if begin:
            within = dist.PrefixStore(name, store)
            dist.init_process_group(GROUPS[DEVICE], rank=rank, world_size=ranks, store=within, timeout=timedelta(seconds=seconds))
            mesh = init_device_mesh(DEVICE, (ranks,))
        with quick_compilers(), around():
            try:
                seen[name] = run(name, mesh)
            except Exception:
                seen[name] = {"failed": traceback.format_exc()}
        # Collectives of a rank that failed alone are out of step: its group ends, which ranks that wait for it see.
        if "failed" in seen[name]:
            dist.destroy_process_group()
        ends.set(f"{name}/{rank}", str("failed" in seen[name]))
        begin = any(ends.get(f"{name}/{other}") == b"True" for other in range(ranks))
        if begin and dist.is_initialized():
            dist.destroy_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    return seen


def _on_a_gpu(rank: int) -> None:
    """What is made without a device is made on the rank's."""
    place = torch.device("cuda", rank)
    torch.cuda.set_device(place)
    torch.set_default_device(place)
