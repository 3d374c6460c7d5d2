"""The suite several times over, each time in another order; at the end, how often each test failed. What pytest told
of a run in which one did is kept in a file.

    make test-repeat N=20                      # a run takes some ten minutes
    python -m tests.repeat 5 tests/lowerings   # some minutes; what follows the number goes to pytest
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence


def failed_in(output: str) -> list[str]:
    """Names of the tests that failed, out of pytest's summary."""
    return [line.split(" ", 1)[1].split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]


def table(failures: Counter[str], runs: int) -> str:
    """One line a test, the most frequent first."""
    if not failures:
        return f"{runs} runs, none failed"
    width = len(str(runs))
    return "\n".join(
        [f"{runs} runs, failures by test:", *(f"  {count:{width}}  {name}" for name, count in failures.most_common())]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.repeat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=int, nargs="?", default=1, help="how often (default 1); WORKERS=2 processes each")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="arguments of pytest (default: all tests)")
    given = parser.parse_args(argv)
    runs, rest, failures = given.runs, given.rest, Counter[str]()
    for order in range(1, runs + 1):
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-n", os.environ.get("WORKERS", "2"), "--dist", "loadgroup", *rest]
        done = subprocess.run(command, env={**os.environ, "TEST_ORDER": str(order)}, capture_output=True, text=True)
        found = failed_in(done.stdout) or ([f"pytest itself, status {done.returncode}"] if done.returncode else [])
        failures.update(found)
        if found:
            with tempfile.NamedTemporaryFile("w", prefix=f"tests-in-order-{order}-", suffix=".txt", delete=False) as kept:
                kept.write(done.stdout)
            print(f"order {order} failed, as told in {kept.name}:")
        print(f"run {order}: {time.monotonic() - began:.0f} s, {len(found)} failed", *found, sep="\n  ", flush=True)
    print(table(failures, runs))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
