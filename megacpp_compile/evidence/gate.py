"""What a promotion of FlashAttention-4 still lacks. Comparisons alone never suffice: rows that were executed in both
environments do, and no block may be active."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megacpp_compile.errors import EvidenceError
from megacpp_compile.evidence.catalog import NO_KV_CACHE
from megacpp_compile.evidence.record import CANONICAL_METRICS, Record, counting
from megacpp_compile.evidence.rollout import ENVIRONMENTS, standings, stops

# Promotion -> profiles that need a row in both environments, rungs that must have passed.
PROMOTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prefill_promotion": (("dense_fa4_forward",), ("L0", "L1", "R1", "R2", "R3", "R4", "R5", "R7")),
    "full_train_promotion": (
        ("dense_fa4_forward", "dense_fa4_train_100"), ("L0", "L1", "R1", "R2", "R3", "R4", "R5", "R6"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """Of one promotion. missing: rows and rungs. blocks: names of what is in the way whatever the rows say."""

    promotion: str
    ready: bool
    missing: tuple[str, ...]
    blocks: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain containers, fit for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.promotion}: {'ready' if self.ready else 'blocked'}"]
        lines += [f"  missing: {row}" for row in self.missing]
        lines += [f"  block: {name}" for name in self.blocks]
        return "\n".join(lines)


def check_environments(environments: Sequence[str]) -> None:
    """Raise EvidenceError unless these are the names of two environments."""
    if len(environments) != 2 or len(set(environments)) != 2 or not all(environments):
        raise EvidenceError("gate", f"environments are {', '.join(environments) or 'none'}, wanted two distinct ones")


def decide(records: Sequence[Record], environments: Sequence[str] = ENVIRONMENTS) -> list[Decision]:
    """The decision on each promotion. Raises EvidenceError unless there are two distinct environments."""
    check_environments(environments)
    counted = counting(records)
    stood = {standing.rung.id: standing for standing in standings(records, environments)}
    found = []
    for promotion, (profiles, rungs) in PROMOTIONS.items():
        missing = [line for profile in profiles for line in _rows(profile, counted, environments)]
        missing += [f"rung {rung}: {stood[rung].state}" for rung in rungs if stood[rung].state != "passed"]
        blocks = _blocks(records, counted, environments)
        found.append(Decision(promotion, not missing and not blocks, tuple(missing), blocks))
    return found


def _rows(profile: str, counted: Sequence[Record], environments: Sequence[str]) -> list[str]:
    """What is missing of the rows of `profile`."""
    lines, hosts = [], []
    for environment in environments:
        rows = [r for r in counted if r.profile == profile and r.environment == environment]
        measured = [r for r in rows if all(name in r.metrics for name in CANONICAL_METRICS)]
        if not rows:
            lines.append(f"an execute proof of {profile} in {environment}")
        elif not measured:
            lines.append(f"{', '.join(CANONICAL_METRICS)} of {profile} in {environment}: other names are no evidence")
        hosts.append({r.machine["host"] for r in measured})
    if all(hosts) and len(set().union(*hosts)) < 2:
        lines.append(f"{profile} in two environments that are one machine, {next(iter(hosts[0]))}")
    return lines


def _blocks(records: Sequence[Record], counted: Sequence[Record], environments: Sequence[str]) -> tuple[str, ...]:
    found = [] if any(r.line == "serving_decode" for r in counted) else [NO_KV_CACHE]
    tripped = [r for r in records if r.environment in environments and stops(r)]
    return tuple(found + sorted({f"stop rule tripped by {r.profile} in {r.environment}" for r in tripped}))
