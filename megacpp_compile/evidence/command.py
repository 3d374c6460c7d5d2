"""`megacpp evidence run|status|gate`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megacpp_compile.evidence import gate, status
from megacpp_compile.evidence.record import read
from megacpp_compile.evidence.rollout import ENVIRONMENTS
from megacpp_compile.evidence.run import run


def evidence(given: argparse.Namespace) -> int:
    """Carry out the command; returns the exit status: 0, or 1 where the gate is blocked or a run has failed."""
    folder = Path(given.records)
    if given.action == "run":
        begun = Path(given.launch) if given.launch else None
        found, lines = run(given.profile, given.environment, folder, Path.cwd(), launch=begun)
        print(lines)
        return 0 if all(record.checks.get("passed") for record in found) else 1
    records = read(folder)
    environments = ENVIRONMENTS if given.environments is None else tuple(given.environments.split(","))
    gate.check_environments(environments)
    if given.action == "gate":
        decisions = gate.decide(records, environments)
        print(json.dumps([d.to_dict() for d in decisions], indent=1) if given.json else "\n".join(map(str, decisions)))
        return 0 if all(decision.ready for decision in decisions) else 1
    if given.page:
        Path(given.page).write_text(status.page(records, environments))
        print(f"wrote {given.page}")
    elif given.json:
        print(json.dumps(status.as_data(records, environments), indent=1))
    else:
        print(status.text(records, environments))
    return 0
