"""The example that trains on several ranks: it trains to the losses of one rank, fuses on each, and says what is wrong
with its options."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
import socket
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.fixtures import kernels_left_out, quick_compilers
from tests.ranks import ON_ONE_WORKER, start

pytestmark = [pytest.mark.skipif(not dist.is_gloo_available(), reason="no gloo"), ON_ONE_WORKER]

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = "--device cpu --steps 2 --batch 4 --length 16 --dim 32 --layers 1 --experts 4".split()


def started(arguments: list[str], **environment: str) -> tuple[int, str, str]:
    """Exit status, output and errors of the example, run as torchrun runs it with that environment."""
    out, errors = io.StringIO(), io.StringIO()
    path, argv, before = list(sys.path), sys.argv, dict(os.environ)
    sys.path.insert(0, str(EXAMPLES))
    os.environ |= environment
    sys.argv = ["train_parallel.py", *arguments]
    settings = torch._dynamo.config.patch(capture_scalar_outputs=torch._dynamo.config.capture_scalar_outputs)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), settings:
            runpy.run_path(str(EXAMPLES / "train_parallel.py"), run_name="__main__")
        raise AssertionError("it says how it went")
    except SystemExit as left:
        return int(left.code or 0), out.getvalue(), errors.getvalue()
    finally:
        sys.path[:], sys.argv = path, argv
        os.environ.clear()
        os.environ |= before


def _rank(rank: int, ports: list[int], folder: str, runs: list[list[str]]) -> None:
    dist.init_process_group = functools.partial(dist.init_process_group, timeout=timedelta(seconds=120))
    for i, (port, options) in enumerate(zip(ports, runs, strict=True)):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        with quick_compilers(), kernels_left_out():
            code, out, errors = started([*SMALL, *options], **{name: str(value) for name, value in place.items()})
        Path(folder, f"{i}.{rank}").write_text(f"{code}\n{out}{errors}")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("localhost", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture
def of_two(tmp_path):
    """What two ranks print: with heads cut over them, and with experts."""
    runs = [["--tp", "2", "--policy", "selective"], ["--ep", "2"]]
    start(_rank, (free_ports(len(runs)), str(tmp_path), runs), 2)
    return [[(tmp_path / f"{i}.{rank}").read_text() for rank in range(2)] for i in range(len(runs))]


def losses(printed: str, name: str) -> list[float]:
    (row,) = re.findall(rf"^{name} +([\d.]+) +([\d.]+) .*", printed, re.M)
    return [float(loss) for loss in row]


@pytest.mark.end_to_end
def test_ranks_train_to_the_losses_of_one_and_fuse(of_two, no_kernels):
    torch._dynamo.reset()
    code, alone, errors = started([*SMALL, "--compare", "inductor"])
    assert code == 0, alone + errors
    assert "OK: the loss curves agree" in alone and "fused on every rank: moe 1, down_norm_up 1" in alone
    first, last = losses(alone, "megacpp")
    assert first != last
    for first_rank, other in of_two:
        assert first_rank.startswith("0\n") and other.startswith("0\n") and "loss" not in other
        for name in ("eager", "megacpp"):
            assert losses(first_rank, name) == pytest.approx([first, last], abs=1e-3)
    by_heads, by_experts = (first for first, _ in of_two)
    assert "fused on every rank: moe 1, down_norm_up 1, mla_rope_q 1, mla_rope_kv 1" in by_heads
    # FSDP2 leaves the experts a frame of their own, which is compiled once more for another number of rows.
    assert "fused on every rank: moe 2, down_norm_up 1, mla_rope_q 1, mla_rope_kv 1" in by_experts
    for printed in (by_heads, by_experts):
        assert "OK: the loss curves agree" in printed and "MiB" in printed
        assert re.findall(r"^ +(\w+) 2/2 loss", printed, re.M) == ["eager", "megacpp"]


@pytest.mark.parametrize(("options", "ranks", "words"), [
    ("--tp 3", 2, "--tp 3 does not divide 2 ranks: start with torchrun --nproc-per-node 3"),
    ("--tp 2 --fsdp 2", 2, "not the number of ranks, 2: start with torchrun --nproc-per-node 4, or leave out --fsdp"),
    ("--tp 2 --heads 3", 2, "--tp 2 does not divide --heads 3"),
    ("--ep 2 --experts 3", 2, "--ep 2 does not divide --experts 3"),
    ("--ep 2 --tp 2", 2, "--ep 2 does not divide --fsdp 1"), ("--batch 3", 2, "--fsdp 2 does not divide --batch 3"),
    ("--dim 24", 1, "--dim 24 is no multiple of 16"), ("--steps 1", 1, "--steps must be at least 2"),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_said_once(options, ranks, words):
    code, out, errors = started([*SMALL, *options.split()], RANK="0", WORLD_SIZE=str(ranks))
    assert code == 2 and not out and words in " ".join(errors.split())
    if ranks > 1:
        assert started([*SMALL, *options.split()], RANK="1", WORLD_SIZE=str(ranks)) == (2, "", "")
