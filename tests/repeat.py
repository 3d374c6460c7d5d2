"""The suite several times over, each time in another order: `python -m tests.repeat 20`, or `make test-repeat N=20`.

Prints how often each test failed. Arguments after the number go to pytest: `python -m tests.repeat 5 tests/lowerings`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter


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


def main(arguments: list[str]) -> int:
    runs, rest, failures = int(arguments[0]), arguments[1:], Counter[str]()
    for order in range(1, runs + 1):
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-n", os.environ.get("WORKERS", "2"), "--dist", "loadgroup", *rest]
        done = subprocess.run(command, env={**os.environ, "TEST_ORDER": str(order)}, capture_output=True, text=True)
        found = failed_in(done.stdout) or ([f"pytest itself, status {done.returncode}"] if done.returncode else [])
        failures.update(found)
        print(f"run {order}: {time.monotonic() - began:.0f} s, {len(found)} failed", *found, sep="\n  ", flush=True)
    print(table(failures, runs))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["1"]))
