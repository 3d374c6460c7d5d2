"""The report as a short text: what was compiled, what was not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megacpp_compile.report.records import Collected, Frame
from megacpp_compile.report.tags import pointer
from megacpp_compile.report.text import bytes_text, plural

LINES = 8  # of a section; how many more there are is said

# Who ran what was not captured (`Frame.left_to`) -> the section's title.
TITLES = {
    "backend": "fell back whole, compiled by the backend alone",
    "eager": "ran in eager, given up by Dynamo",
    "pieces": "in pieces, as the graph breaks",
}


def headline(report: Collected) -> str:
    """One line: frames, sites, misses, bytes saved for backward."""
    captured = sum(frame.captured for frame in report.frames)
    text = f"{captured} of {plural(len(report.frames), 'frame')} captured, "
    text += f"{plural(len(report.sites), 'site')} fused, {plural(len(report.misses), 'near miss', 'near misses')}"
    if again := sum(bool(frame.recompiled) for frame in report.frames):
        text += f", {again} compiled again"
    before, after, known = saved_bytes(report)
    if known:
        text += f", saved for backward {bytes_text(before)} → {bytes_text(after)}"
        if known < len(report.sites):
            text += f" over the {plural(known, 'site')} where known"
    return text


def saved_bytes(report: Collected) -> tuple[int, int, int]:
    """Bytes that the plain code of all sites saves for backward, bytes that their ops save, and over how many sites
    both are known."""
    all_sites = ((s.saved_before, s.saved_after) for s in report.sites)
    both = [(before, after) for before, after in all_sites if before is not None and after is not None]
    return sum(before for before, _ in both), sum(after for _, after in both), len(both)


def summary(report: Collected) -> str:
    """The headline, and what became of the frames, with equal lines counted."""
    frames = report.frames
    lines = [headline(report)]
    lines += section("fused", (f"{f.name}: {_fired(f)}" for f in frames if f.captured and _fired(f)))
    lines += section("verified on the first call", (f"{f.name}: {_agrees(f.verified)}" for f in frames if f.verified))
    plain = (f"{f.name}: {f.reason or 'no idiom found'}" for f in frames if f.captured and not _fired(f))
    lines += section("captured, and nothing to fuse", plain)
    lines += not_captured(Counter(map(line_of, (frame for frame in frames if not frame.captured))))
    lines += section("compiled again", (f"{f.name}: {f.recompiled}" for f in frames if f.recompiled))
    cut = (f.graph_break for f in frames if f.graph_break and left_to(f) in ("", "pieces"))
    lines += section("graph breaks", cut)
    found = (f"{r['kind']}: {r['fqn'] or '(the frame itself)'}" for frame in frames for r in frame.recognised)
    lines += section("recognised, without a lowering", found)
    lines += section("attention, unfused", unfused(report))
    misses = (f"{miss.pass_name}: {miss.reason} [{miss.tag}]" for miss in report.misses)
    lines += section("nearest misses", misses)
    return "\n".join([*lines, *filter(None, [pointer(report)])])


def unfused(report: Collected) -> Iterator[str]:
    """A line for each attention of the frames that multiplies all scores out."""
    for frame in report.frames:
        for row in frame.attention:
            if row["kernel"] == "unfused":
                yield f"{row['fqn'] or '(the frame itself)'}: {row['reason']} [{row['tag']}]"


def left_to(frame: Frame) -> str:
    """`Frame.left_to`, which reports of older releases do not have."""
    return frame.left_to or ("" if frame.captured else "backend")


def line_of(frame: Frame) -> tuple[str, str]:
    """(who ran it, the frame and why) of one that was not captured."""
    why = f"{frame.reason} at {frame.graph_break}" if frame.left_to == "eager" and frame.graph_break else frame.reason
    return left_to(frame), f"{frame.name}: {why}"


def not_captured(counts: Mapping[tuple[str, str], int]) -> Iterator[str]:
    """The sections of frames that were not captured, of lines as `line_of` has them."""
    for who, title in TITLES.items():
        yield from _section(title, Counter({line: n for (by, line), n in counts.items() if by == who}))


def section(title: str, lines: Iterable[str]) -> Iterator[str]:
    """A title and its lines, equal ones once; nothing where there are none."""
    return _section(title, Counter(lines))


def _section(title: str, counts: Counter[str]) -> Iterator[str]:
    if counts:
        yield f"{title} ({counts.total()}):"
    for line, count in list(counts.items())[:LINES]:
        yield f"  {line}" + (f" ×{count}" if count > 1 else "")
    if len(counts) > LINES:
        yield f"  and {len(counts) - LINES} more"


def _agrees(found: Mapping[str, Any]) -> str:
    worst = f"{found['difference']:.1e} of {found['tolerance']:.0e} in {found['tensor']} of {found['pass_name']}"
    return f"{plural(found['sites'], 'site')}, worst difference {worst}"


def _fired(frame: Frame) -> str:
    return ", ".join(f"{name} {count}" for name, count in frame.passes.items() if count)
