"""The fuzz driver itself: a short run of it, and that it would notice."""

from __future__ import annotations

import pytest

from tests.seeds import seed_of

from . import fuzz as driver
from .agreement import CUDA, DEVICE, OF_KERNELS, module_of, seldom
from .fuzz import fuzz
from .fuzz_draw import OPS

pytestmark = OF_KERNELS


@seldom
def test_short_run(request):
    """Each case of another kind; a failure prints the command that repeats it. Every lowering is asked for in one of
    five runs: four calls of an op, eight of a rotation, may miss the few sizes that a kernel takes. Runs after the
    first are of ops with a lowering that was not."""
    count = 4 * len(OPS)
    # GEMMs in float8 are cuBLASLt's, which no interpreter runs, and the scan's kernels take few sizes. What is in Gluon
    # takes no sizes that are drawn, nor an interpreter, and has tests of its own; and what takes a group of ranks, none
    # of which is drawn, has its own too.
    some = ("ssd_scan", "linear_fp8_weight", *(() if CUDA else ("fp8_", "push_maxima")))
    elsewhere = "cuda_gluon", "cuda_triton_ranks"
    idle: set[str] = set()
    for turn in range(5):
        ops = {label.split()[0] for label in idle} if turn else OPS
        outcome = fuzz(count, DEVICE, seed_of(request.node.name) + turn, kinds=count, room=6, quiet=True, ops=ops)
        print(outcome.text())
        assert not outcome.failures, "\n".join(outcome.failures)
        now = {label for label in outcome.idle() if not label.startswith(some) and not label.endswith(elsewhere)}
        if not turn:
            kernels = {label: count for label, count in outcome.served.items() if label.endswith("cuda_triton")}
            assert sum(kernels.values()) > 30
            assert outcome.in_place.total() > 0  # nine of ten calls of a rotation ask for it
        idle = idle & now if turn else now
        if not idle:
            break
    assert not idle


def test_the_command(capsys):
    assert driver.main(["--device", DEVICE, "--seed", "1", "--kinds", "4", "--room", "6", "--only", "2"]) == 0
    assert capsys.readouterr().out.startswith("seed 1\n")


@pytest.mark.parametrize("broken", ["result", "input", "in place", "error"])
def test_faults_are_found(monkeypatch, capsys, broken):
    """One lowering gets a fault; every case it serves fails, with the command that repeats it."""
    module = module_of("mla_rope_q", "cuda_triton")
    plain = module.mla_rope_q

    def faulty(q, *args, in_place=False):
        if broken == "error":
            raise RuntimeError("out of luck")
        if broken == "input" and q.numel():
            q[(0,) * q.dim()] = 1000
        out = plain(q, *args)
        if broken == "result" and out.numel():
            out[(0,) * out.dim()] += 1
        return out

    monkeypatch.setattr(module, "mla_rope_q", faulty)
    monkeypatch.setattr(driver, "MOST_FAILURES", 1)
    (message,) = fuzz(200, DEVICE, 3, kinds=60, room=6, quiet=True).failures
    command, call, *faults = message.splitlines()
    assert command.startswith(f"python -m tests.lowerings.fuzz --device {DEVICE} --seed 3 --kinds 60 --room 6 --only ")
    assert call.strip().startswith("mla_rope_q(")
    assert {"result": "off by", "input": "written to", "in place": "is not argument",
            "error": "out of luck"}[broken] in " ".join(faults)
    assert message in capsys.readouterr().out
    number = int(command.split()[-1])
    assert fuzz(200, DEVICE, 3, kinds=60, room=6, only=number, quiet=True).failures == [message]
