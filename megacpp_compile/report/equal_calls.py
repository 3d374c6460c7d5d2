"""A graph that one frame calls several times: the report has what each call adds to the whole, under its own names.

Sites, near misses and the rows of attention and of precision are those of every call, numbers of what is saved and
recomputed their sums. What the graph itself costs, its nodes and seconds, is there once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from megacpp_compile.fx.module_names import renamed
from megacpp_compile.report.auto_plan import AutoPlan, times
from megacpp_compile.report.records import Frame, MissedFusion, Site

# Name of a module in the first call -> what that module is called in another.
Names = Mapping[str, str]
Record = TypeVar("Record", Site, MissedFusion)


def of_all(
    frame: Frame, sites: Sequence[Site], misses: Sequence[MissedFusion], others: Sequence[Names]
) -> tuple[Frame, list[Site], list[MissedFusion]]:
    """What a frame, its sites and its near misses are over all of its calls. others: of each call but the first."""
    if not others:
        return frame, [*sites], [*misses]
    calls = 1 + len(others)
    whole = replace(
        frame, calls=calls, passes=times(frame.passes, calls),
        expert_loops=calls * frame.expert_loops, recognised=_rows(frame.recognised, others),
        precision=_rows(frame.precision, others), attention=_rows(frame.attention, others),
        modules=frame.modules | {renamed(n, names): kind for names in others for n, kind in frame.modules.items()},
        remat=times(frame.remat, calls),
        auto=frame.auto and asdict(AutoPlan(**frame.auto).of_calls(calls)),
    )  # fmt: skip
    return whole, records(sites, others), records(misses, others)


def records(of: Sequence[Record], others: Sequence[Names]) -> list[Record]:
    """Those of every call; bytes that are counted later reach all of them."""
    found = list(of)
    for names in others:
        found += [replace(one, fqn=renamed(one.fqn, names)) for one in of]
    return found


def _rows(rows: Sequence[dict[str, Any]], others: Sequence[Names]) -> list[dict[str, Any]]:
    return [*rows, *({**row, "fqn": renamed(row["fqn"], names)} for names in others for row in rows)]
