"""Runs a profile and writes its record. What really ran is said by the tests themselves, as properties of pytest's XML:
`record_property("evidence", json)` with fields of `Record`."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from megacpp_compile.errors import EvidenceError, closest
from megacpp_compile.evidence.binding import launched, machine_binding
from megacpp_compile.evidence.catalog import PROFILES, profile_of
from megacpp_compile.evidence.kinds import Profile
from megacpp_compile.evidence.record import Record, verdict

PROPERTY = "evidence"


def run(
    id: str, environment: str, records: Path, root: Path, execute: Callable[[Profile, Path], str] | None = None,
    launch: Path | None = None,
) -> tuple[list[Record], str]:  # fmt: skip
    """Run the profile `id` from the checkout at `root`, and write a record into `records` for each piece of evidence
    that its tests left: (the records, a line for each).

    execute: called with the profile and `root`, returns the XML, in the place of pytest. launch: the launch record
    that was written at its start, which is named in the records. Raises EvidenceError for a profile that there is not,
    where nothing ran, and for a launch record of another machine or commit.
    """
    profile = profile_of(id)
    if profile is None:
        near = closest(id, [p.id for p in PROFILES])
        hint = f". Did you mean {near!r}?" if near else ""
        raise EvidenceError(f"profile {id!r}", f"there is none of that name{hint}")
    if not re.fullmatch(r"\w+", environment):
        raise EvidenceError(f"environment {environment!r}", "an id has letters, digits and underscores")
    binding = machine_binding(root, records)
    begun = {} if launch is None else {"launch": launched(launch, binding)}
    passed, left = read_xml((execute or _pytest)(profile, root))
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    own = {"profile": profile.id, "line": profile.line, "environment": environment, "machine": binding, "date": date,
           **begun}  # fmt: skip
    found = []
    for evidence in left or [{}]:
        if taken := sorted(set(own) & set(evidence)):
            raise EvidenceError(f"profile {id!r}", f"its tests claim {taken[0]!r}, which is not theirs to say")
        checks = {**evidence.get("checks", {}), "passed": passed and evidence.get("checks", {}).get("passed", True)}
        found.append(Record.of({**own, **evidence, "checks": checks}))
    records.mkdir(parents=True, exist_ok=True)
    for i, record in enumerate(found):
        tail = f"-{i}" if len(found) > 1 else ""
        (records / f"{environment}-{profile.id}{tail}.json").write_text(record.to_json())
    return found, "\n".join(map(line_of, found))


def line_of(record: Record) -> str:
    """ "dense_fa4_forward: actual fa4, counts", or why it does not."""
    found = verdict(record)
    return f"{record.profile}: actual {record.actual_backend or '-'}, {'counts' if found.counts else found.why}"


def read_xml(text: str) -> tuple[bool, list[dict[str, Any]]]:
    """(whether every test that ran passed, the evidence that they left) of pytest's XML. Raises EvidenceError where
    none ran: what was skipped proves nothing."""
    suites = list(ElementTree.fromstring(text).iter("testsuite"))

    def count(name: str) -> int:
        return sum(int(suite.get(name, 0)) for suite in suites)

    ran = count("tests") - count("skipped")
    if ran <= 0:
        why = next((s.get("message") for suite in suites for s in suite.iter("skipped")), None)
        raise EvidenceError("run", f"no test ran{f': {why}' if why else ''}")
    properties = (p for suite in suites for p in suite.iter("property") if p.get("name") == PROPERTY)
    return not count("failures") + count("errors"), [json.loads(p.get("value") or "{}") for p in properties]


def _pytest(profile: Profile, root: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "result.xml"
        command: Sequence[str] = (sys.executable, "-m", "pytest", *profile.arguments, "-q", "--junitxml", str(xml))
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if not xml.exists():
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            raise EvidenceError(f"profile {profile.id!r}", f"pytest did not run: {''.join(last)}")
        return xml.read_text()
