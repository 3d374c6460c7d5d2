"""The status of each surface, profile and rung, as text and as the page docs/generated/evidence.md: made of the catalog
and the records alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megacpp_compile.evidence.catalog import PROFILES, SURFACES
from megacpp_compile.evidence.gate import decide
from megacpp_compile.evidence.kinds import LINES, Surface
from megacpp_compile.evidence.record import Record, verdict
from megacpp_compile.evidence.rollout import ENVIRONMENTS, standings

_PAGE = """# Evidence

Written by `megacpp evidence status --page docs/generated/evidence.md`.

What is proved of attention on which machine: made of the catalog in `megacpp_compile/evidence` and of the records in
docs/evidence, {records} of them, of which {counting} count. [Attention that tells](../attention.md#evidence) says what
counts. Environments: {environments}.

## Surfaces

{surfaces}

## Profiles

{profiles}

## Records

{rows}

## Rollout of FlashAttention-4

{rungs}

## Gate

{gate}
"""


def page(records: Sequence[Record], environments: Sequence[str] = ENVIRONMENTS) -> str:
    """The page. Equal for equal records, in whatever order they come."""
    records = sorted(records, key=lambda r: r.to_json())
    found = [verdict(record) for record in records]
    return _PAGE.format(
        records=len(records), counting=sum(v.counts for v in found),
        environments=", ".join(f"`{name}`" for name in environments),
        surfaces=_table(
            ("surface", "line", "stage", "fit", "state", "proved", "blocked by"),
            [_surface(surface, records) for surface in sorted(SURFACES, key=lambda s: LINES.index(s.line))],
        ),
        profiles=_table(
            ("profile", "proof", "counts", "arguments of pytest"),
            [(f"`{p.id}`", p.proof_class, "yes" if p.counts_for_status else "no",
              f"`{p.command.removeprefix('python -m pytest ')}`") for p in PROFILES],
        ),
        rows=_table(
            ("profile", "environment", "device", "actual backend", "commit", "counts"),
            [(f"`{r.profile}`", f"`{r.environment}`", str(r.machine.get("device", "-")), r.actual_backend or "-",
              str(r.machine.get("commit") or "-"), _counts(v.counts, v.why, v.stale))
             for r, v in zip(records, found, strict=True)],
        ) if records else "None.",
        rungs=_table(
            ("rung", "state", "passes when", "missing"),
            [(s.rung.id, s.state, s.rung.passes_when, "; ".join(s.stopped or s.missing) or "-")
             for s in standings(records, environments)],
        ),
        gate="\n\n".join(_gate(decision.to_dict()) for decision in decide(records, environments)),
    )  # fmt: skip


def as_data(records: Sequence[Record], environments: Sequence[str] = ENVIRONMENTS) -> dict[str, Any]:
    """The same as plain containers, fit for JSON."""
    return {
        "surfaces": {s.id: _proved(s, records) for s in SURFACES},
        "records": [
            {"profile": r.profile, "environment": r.environment, "counts": (v := verdict(r)).counts, "why": v.why,
             "stale": v.stale} for r in records
        ],
        "rungs": {s.rung.id: {"state": s.state, "missing": s.missing, "stopped": s.stopped, "commands": s.rung.commands}
                  for s in standings(records, environments)},
    }  # fmt: skip


def text(records: Sequence[Record], environments: Sequence[str] = ENVIRONMENTS) -> str:
    """The rungs and the surfaces in a few lines."""
    lines = [f"{s.rung.id} {s.state}: {'; '.join(s.stopped or s.missing) or s.rung.passes_when}"
             for s in standings(records, environments)]  # fmt: skip
    return "\n".join(lines + [f"{s.id}: {_proved(s, records)}" for s in SURFACES])


def _surface(surface: Surface, records: Sequence[Record]) -> tuple[str, ...]:
    blocked = ", ".join(surface.blocked) or "-"
    proved = _proved(surface, records)
    return f"`{surface.id}`", f"`{surface.line}`", surface.stage, surface.fit, surface.state, proved, blocked


def _proved(surface: Surface, records: Sequence[Record]) -> str:
    """The environments with a record that counts."""
    if surface.fit == "non_applicable":
        return "does not apply"
    profiles = {p.id for p in PROFILES if p.surface == surface.id}
    found = sorted({r.environment for r in records if r.profile in profiles and verdict(r).counts})
    return ", ".join(found) or "nowhere"


def _counts(counts: bool, why: str, stale: bool) -> str:
    return "yes" if counts else f"stale: {why}" if stale else f"no: {why}"


def _gate(decision: dict[str, Any]) -> str:
    lines = [f"- `{decision['promotion']}`: {'ready' if decision['ready'] else 'blocked'}"]
    lines += [f"    - missing: {row}" for row in decision["missing"]]
    lines += [f"    - block: `{name}`" for name in decision["blocks"]]
    return "\n".join(lines)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    return "\n".join(lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows])
