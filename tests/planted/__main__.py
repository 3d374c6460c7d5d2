"""Puts one fault after the other into a copy of the repository, runs pytest there, and says which test sees it.

A fault has tests of its own, the files most likely to notice; with --whole the tier is run where these do not. Exit
status 0 where all faults are seen.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.planted import seen
from tests.planted.faults import FAULTS, KINDS, Fault

ROOT = Path(__file__).parents[2]
PACKAGE = "megacpp_compile"
# What a copy is without: at the root, and anywhere. Faults that are planted have no `old` any more.
AT_THE_ROOT = (".git", ".venv*", ".*_cache", ".begun", "build", "dist", "site", PACKAGE)
ANYWHERE = ("__pycache__", "planted")
BROKEN = set[str]()  # tests that fail without a fault


@dataclasses.dataclass(frozen=True)
class Outcome:
    """by: the test that saw a fault; None where none did. seconds: of pytest. said: what pytest said where it ran no
    test to its end."""

    by: str | None
    seconds: float
    said: str = ""


class Copy:
    """A copy of the package and of `suite`, all that is beside it, which one fault at a time is planted in."""

    def __init__(self, suite: Path, folder: Path, given: argparse.Namespace) -> None:
        self.root, self.plugin, self.given = folder / "copy", folder / "plugin", given

        def ignored(at: str, names: list[str]) -> set[str]:
            patterns = (*ANYWHERE, *(AT_THE_ROOT if Path(at) == suite else ()))
            return {name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}

        shutil.copytree(suite, self.root, ignore=ignored, symlinks=True)
        shutil.copytree(ROOT / PACKAGE, self.root / PACKAGE, ignore=shutil.ignore_patterns(*ANYWHERE))
        self.plugin.mkdir()
        shutil.copy(Path(seen.__file__), self.plugin / "planted_seen.py")

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        path = self.root / fault.file
        plain = path.read_text()
        assert plain.count(fault.old) == 1, fault.name
        path.write_text(plain.replace(fault.old, fault.new))
        try:
            yield
        finally:
            path.write_text(plain)

    def tried(self, fault: Fault) -> Outcome:
        """Who sees `fault`: its own tests, else, if asked, the whole tier. If asked, a test that fails is run without the
        fault, and left out where it fails again."""
        own, thinned = [test for test in fault.tests if (self.root / test).exists()], self.given.thinned and not fault.interpreter
        asked, seconds, said = [(own, thinned)] * bool(own) + [(["tests"], False)] * self.given.whole, 0.0, list[str]()
        while asked:
            with self.planted(fault):
                found = self.run(fault, *asked[0])
            seconds, said = seconds + found.seconds, [*said, *filter(None, [found.said])]
            if found.by is None:
                asked.pop(0)
            elif self.given.confirm and self.run(fault, [found.by]).by is not None:
                BROKEN.add(found.by)
                said.append(f"{found.by} fails without the fault, too")
            else:
                return Outcome(found.by, seconds, "\n".join(said))
        return Outcome(None, seconds, "\n".join(said))

    def run(self, fault: Fault, tests: Sequence[str], thinned: bool = False) -> Outcome:
        """The first of `tests` that fails; thinned: of those that are left of them where all tests are asked for."""
        file = self.plugin / "seen"
        file.unlink(missing_ok=True)
        asked = ["tests", *(f"--planted-only={test}" for test in tests)] if thinned else tests
        tier = ["--tier", self.given.tier] if self.given.tier else []
        how = ["-q", "-x", "-p", "no:cacheprovider", "-p", "planted_seen", f"--planted-seen={file}", *tier]
        how += [f"--deselect={test}" for test in sorted(BROKEN.difference(tests))]
        # As the suite is run: memory that nobody has written holds large numbers, but for the interpreter's arrays.
        kernels = {"TRITON_INTERPRET": "1"} if fault.interpreter else {"MALLOC_PERTURB_": "1"}
        paths = os.pathsep.join([str(self.root), str(self.plugin)])
        env = {**os.environ, **kernels, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": paths}
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", *how, *asked]
        done = subprocess.run(command, cwd=self.root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        by = file.read_text() if file.exists() else None
        broken = done.returncode not in (0, 1) or (done.returncode == 1) != (by is not None)
        said = f"pytest, status {done.returncode}:\n{done.stdout[-2000:]}" if broken else ""
        return Outcome(by, time.monotonic() - began, said)


def table(results: dict[str, dict[str, object]], faults: Sequence[Fault]) -> str:
    """A line a fault, by kind, and how many are seen."""
    lines = []
    for kind in KINDS:
        rows = [(fault.name, results[fault.name]) for fault in faults if fault.kind == kind]
        if rows:
            lines.append(f"{kind}: {sum(bool(row['seen']) for _, row in rows)} of {len(rows)} seen")
            lines += [f"  {row['seconds']:6.1f} s  {name}: {row['by'] or 'not seen'}" for name, row in rows]
    found = sum(bool(results[fault.name]["seen"]) for fault in faults)
    return "\n".join([*lines, f"{found} of {len(faults)} seen"])


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.planted", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tier", help="unit, test or all: the suite's own option, which a suite without tiers lacks")
    parser.add_argument("--suite", type=Path, default=ROOT, metavar="DIR", help="another checkout, whose tests and all else but the package are taken")
    parser.add_argument("--thinned", action="store_true", help="of a suite that leaves tests out where all are asked for: leave these out of a fault's own tests, too")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", choices=[f.name for f in FAULTS], help="these faults")
    parser.add_argument("--kind", choices=list(KINDS), help="faults of this kind")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="how many faults at a time, each in a process of pytest (default 2)")
    parser.add_argument("--whole", action="store_true", help="run the whole tier where a fault's own tests do not see it")
    parser.add_argument("--confirm", action="store_true", help="run a test that fails once more without the fault, where it has to pass to count")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write who saw what; of faults that are not run it keeps what it holds")
    parser.add_argument("--continue", action="store_true", dest="go_on", help="leave out the faults that FILE has already")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = parsed(argv)
    faults = [f for f in FAULTS if f.name in (given.only or {f.name}) and f.kind == (given.kind or f.kind)]
    kept = json.loads(given.json.read_text()) if given.json is not None and given.json.exists() else {}
    left = [f for f in faults if not (given.go_on and f.name in kept)]
    lock, copies = threading.Lock(), queue.SimpleQueue[Copy]()

    def tried(fault: Fault) -> None:
        copy = copies.get()
        try:
            found = copy.tried(fault)
        finally:
            copies.put(copy)
        with lock:
            kept[fault.name] = {"seen": found.by is not None, "by": found.by, "seconds": round(found.seconds, 1)}
            unseen = "not seen" if given.whole else "not seen by its tests"
            print(f"{found.seconds:6.1f} s  {fault.name}: {found.by or unseen}", *filter(None, [found.said]), sep="\n", flush=True)
            if given.json is not None:
                given.json.write_text(json.dumps(kept, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        for i in range(min(given.jobs, len(left))):
            copies.put(Copy(given.suite.resolve(), Path(folder).resolve() / str(i), given))
        with ThreadPoolExecutor(max(given.jobs, 1)) as pool:
            for done in as_completed([pool.submit(tried, fault) for fault in left]):
                done.result()
    print(table(kept, faults))
    return 0 if all(kept[f.name]["seen"] for f in faults) else 1


if __name__ == "__main__":
    sys.exit(main())
