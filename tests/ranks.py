"""Ranks of tests: forks of a server that has imported what they need and compiled a first frame, as either takes seconds of
each rank. The server is a process of its own: nothing that tests have done in this one comes along."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch


def start(function: Callable[..., None], args: tuple[Any, ...], ranks: int) -> None:
    """`function(rank, *args)` in as many processes, until all have ended; the error of one is raised here."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.ranks_loaded"])
    torch.multiprocessing.start_processes(function, args, ranks, start_method="forkserver")
