"""The report as tables: rich where it is installed, plain text otherwise."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from megacpp_compile.fx.groups import by_key
from megacpp_compile.report.attention import AttentionSite
from megacpp_compile.report.auto_plan import AutoPlan
from megacpp_compile.report.columns import COLUMNS, FQN
from megacpp_compile.report.pieces import LEAST, MOST, STAGES, costs
from megacpp_compile.report.records import Collected, Frame, Pinned, Precision
from megacpp_compile.report.text import bytes_text, plain

COSTS = "costliest pieces of compiling"


class _Section(NamedTuple):
    title: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def _section(name: str, rows: Sequence[tuple[str, ...]]) -> _Section:
    return _Section(name, tuple(COLUMNS[name]), rows)


def tables(report: Collected, width: int | None = None) -> str:
    """All sections of `report` that have rows; `width` columns for rich, the terminal's (at least 100) when None."""
    return _text(sections(report), width)


def sections(report: Collected) -> list[_Section]:
    """The sections that have rows: title, headers, and rows of text."""
    made = (_regions(report), _fused(report), _recognised(report), _precision(report), _attention(report),
            _eager(report), _missed(report), _verified(report), _frames(report), _again(report), _seconds(report),
            _costs(report), _auto(report), _remat(report), _peaks(report), _measured(report),
            _sharded(report))  # fmt: skip
    return [section for section in made if section.rows]


def costs_text(report: Collected) -> str:
    """The costliest pieces of compiling; "" where none took long enough to name."""
    return _text([section for section in [_costs(report)] if section.rows], None)


def table_text(title: str, headers: Sequence[str], rows: Sequence[tuple[str, ...]], width: int | None = None) -> str:
    """One table."""
    return _text([_Section(title, tuple(headers), rows)], width)


def _text(sections: Sequence[_Section], width: int | None) -> str:
    try:
        return _rich_text(sections, width or max(100, shutil.get_terminal_size((160, 24)).columns))
    except ImportError:
        return _plain_text(sections)


def _regions(report: Collected) -> _Section:
    rows = []
    for region in report.regions:
        name = family(region.fqns) if any(region.fqns) else "(the model)"
        name += f" ×{len(region.fqns)}" if len(region.fqns) > 1 else ""
        reason = region.reason or "repeated block"
        rows.append((name, region.module, f"{region.parameters:,}", region.treatment, reason))
    return _section("regions", rows)


def family(fqns: Sequence[str]) -> str:
    """ "layers.{0..23}", or the first of names that differ in more than one number."""
    split = [fqn.split(".") for fqn in fqns]
    columns = [sorted(set(column)) for column in zip(*split, strict=False)]
    varying = [i for i, column in enumerate(columns) if len(column) > 1]
    if len({len(parts) for parts in split}) > 1 or len(varying) > 1 or any(
        not value.isdecimal() for i in varying for value in columns[i]
    ):
        return f"{fqns[0]} and others"
    parts = split[0]
    for i in varying:
        parts[i] = range_text(sorted(map(int, columns[i])))
    return ".".join(parts)


def _fused(report: Collected) -> _Section:
    rows = []
    for fqn, site, count in grouped(report.sites):
        unknown = site.saved_before is None and site.saved_after is None
        saved = "-" if unknown else f"{bytes_text(site.saved_before)} → {bytes_text(site.saved_after)}"
        saved += f" ({site.saved_reason})" if site.saved_reason else ""
        op = site.op.removeprefix("megacpp::")
        backward = report.frames[site.frame].backward.get(site.op, [])
        others = [f"backward {lowering}" for lowering in backward if lowering != site.lowering]
        lowering = "; ".join(text for text in (site.lowering, *others, site.note) if text)
        rows.append((site.pass_name, times(fqn, count), _place(site.source), op, lowering, saved))
    return _section("fused", rows)


def _recognised(report: Collected) -> _Section:
    rows = [
        (found["kind"], found["fqn"] or "(the frame itself)", _place(found["source"]))
        for frame in report.frames
        for found in frame.recognised
    ]
    return _section("recognised, without a lowering", rows)


def _precision(report: Collected) -> _Section:
    rows = []
    for fqn, one, count in grouped([Precision(**row) for frame in report.frames for row in frame.precision]):
        shape = one.shape.replace("x", " x ") or "-"
        rows.append((one.kind, times(fqn, count), shape, one.rule, one.requested, one.effective, one.reason or "-"))
    return _section("precision", rows)


def _attention(report: Collected) -> _Section:
    rows = []
    for fqn, one, count in grouped([AttentionSite(**row) for frame in report.frames for row in frame.attention]):
        reason = f"{one.reason} [{one.tag}]" if one.tag else "-"
        place = _place(one.source)
        served = one.requested, one.effective, one.kernel, one.observed or "-"
        rows.append((one.call, times(fqn, count), place, *served, reason))
    return _section("attention", rows)


def _eager(report: Collected) -> _Section:
    rows = []
    for call in report.attention:
        shape = " x ".join(map(str, call.shape))
        rows.append((call.requested, call.effective, shape, call.dtype, call.kind, str(call.calls), call.reason or "-"))
    return _section("attention, eager calls", rows)


def _missed(report: Collected) -> _Section:
    rows = []
    for fqn, miss, count in grouped(report.misses):
        reason = f"{miss.reason} [{miss.tag}]"
        rows.append((miss.pass_name, times(fqn, count), _place(miss.source), miss.node or "-", reason))
    return _section("nearest misses", rows)


def _verified(report: Collected) -> _Section:
    rows = []
    for frame in report.frames:
        if found := frame.verified:
            numbers = f"{found['difference']:.1e}", f"{found['tolerance']:.0e}"
            place = found["fqn"] or "(the frame itself)"
            rows.append((str(frame.index), str(found["sites"]), *numbers, found["tensor"], found["pass_name"], place))
    return _section("verified on the first call", rows)


def _frames(report: Collected) -> _Section:
    rows = []
    for frame in report.frames:
        fired = ", ".join(f"{name} {count}" for name, count in frame.passes.items() if count)
        target = ", ".join([frame.target, *(name for name, choice in frame.chosen.items() if choice is True)])
        seconds = f"{sum(frame.seconds.values()):.2f}" if frame.seconds else "-"
        name = frame.name
        if frame.block:
            name += f", {frame.block}" + (f", one of {frame.blocks} equal blocks" if frame.blocks > 1 else "")
        name += f" ×{frame.calls}" if frame.calls > 1 else ""
        rows.append(
            (str(frame.index), name, frame.outcome, fired or "-", str(frame.nodes), target, frame.mode, seconds)
        )
    return _section("frames", rows)


def _again(report: Collected) -> _Section:
    rows = [(str(frame.index), frame.name, frame.recompiled) for frame in report.frames if frame.recompiled]
    return _section("compiled again", rows)


def _seconds(report: Collected) -> _Section:
    rows = []
    for frame in report.frames:
        passes = [s for name, s in frame.seconds.items() if name not in STAGES]
        found = {**frame.seconds, **({"passes": sum(passes)} if passes else {})}
        if found:
            cells = (f"{found[name]:.2f}" if name in found else "-" for name in list(COLUMNS["compile time"])[1:])
            rows.append((str(frame.index), *cells))
    return _section("compile time", rows)


def _costs(report: Collected) -> _Section:
    found = costs(report)
    shown = [cost for cost in found[:MOST] if cost.seconds >= LEAST]
    rows = [(f"{cost.seconds:.2f}", str(cost.frame), cost.kind, cost.where, cost.avoid) for cost in shown]
    part, whole = (sum(cost.seconds for cost in those) for those in (shown, found))
    return _section(COSTS, rows)._replace(title=f"{COSTS}: {part:.2f} of {whole:.2f} seconds")


def _auto(report: Collected) -> _Section:
    found = [(frame, plan) for frame in report.frames if frame.auto and (plan := AutoPlan(**frame.auto)).told]
    rows = [(str(frame.index), *("-" if frame.cached else text for text in (plan.chosen, plan.other)))
            for frame, plan in found]  # fmt: skip
    return _section("policy auto", rows)


def _remat(report: Collected) -> _Section:
    rows = []
    for frame in report.frames:
        for kind, found in (frame.remat or {}).items():
            blocks = str(found["blocks"]) if kind else "-"
            entries, nodes = ", ".join(found["entries"]), str(found["recomputed"])
            levers = [bytes_text(found[lever]) for lever in ("saved", "again", "offloaded")]
            rows.append((str(frame.index), kind or "between", blocks, entries, *levers, nodes))
        if _undecided(frame):
            rows.append((str(frame.index), "from cache", *["-"] * 6))
    return _section("remat", rows)


def _peaks(report: Collected) -> _Section:
    rows = []
    for frame in report.frames:
        if frame.peak:
            found = [bytes_text(frame.peak[name]) for name in ("before", "step", "predicted")]
            limit = "-" if frame.peak["limit"] is None else bytes_text(frame.peak["limit"])
            rows.append((str(frame.index), *found, limit))
        elif _undecided(frame):
            rows.append((str(frame.index), "from cache", "-", "-", "-"))
    return _section("predicted memory at the peak of a step", rows)


def _measured(report: Collected) -> _Section:
    if report.measured is None:
        return _section("measured memory at the peak of a step", [])
    found = ["-" if (n := report.measured[name]) is None else bytes_text(n) for name in ("before", "step", "peak")]
    beside = "-" if report.predicted_step is None else bytes_text(report.predicted_step)
    return _section("measured memory at the peak of a step", [(*found, beside)])


def _undecided(frame: Frame) -> bool:
    """Whether a policy's decisions are in code that came from a cache, and not known here."""
    return frame.cached and frame.grad and frame.policy is not None and frame.remat is None


def _sharded(report: Collected) -> _Section:
    rows = []
    for frame in report.frames:
        pinned = [Pinned(**{**row, "shape": tuple(row["shape"])}) for row in (frame.sharding or {}).get("pinned", ())]
        for fqn, row, count in grouped(pinned):
            shape, asked = "x".join(map(str, row.shape)), row.rule or "(no rule)"
            rows.append((str(frame.index), times(fqn, count), shape, row.spec, asked, row.by or "-"))
    meshes = {" x ".join(f"{a} {n}" for a, n in f.sharding["mesh"].items()) for f in report.frames if f.sharding}
    return _section("sharding", rows)._replace(title=f"sharding over {', '.join(sorted(meshes))}")


def _place(source: str) -> str:
    """File and line; the code itself is in the JSON."""
    return source.partition(",")[0] or "-"


def times(text: str, count: int) -> str:
    """A module pattern of `grouped`, and how many it stands for."""
    return f"{text or '(the frame itself)'} ×{count}" if count > 1 else text or "(the frame itself)"


class Named(Protocol):
    """A record of one module."""

    @property
    def fqn(self) -> str: ...


Member = TypeVar("Member", bound=Named)


def grouped(items: Sequence[Member]) -> Iterator[tuple[str, Member, int]]:
    """(module pattern, first of the group, size) of items that differ only in the numbers of their module."""
    def kind(item: Member) -> tuple[Any, ...]:
        skeleton = tuple("#" if part.isdecimal() else part for part in item.fqn.split("."))
        rest = tuple(value for key, value in plain(item).items() if key not in ("fqn", "node", "frame", "graph"))
        return skeleton, rest

    for members in by_key((kind(item), item) for item in items).values():
        yield from _merged(members)


def _merged(items: Sequence[Member]) -> Iterator[tuple[str, Member, int]]:
    numbers = [tuple(int(part) for part in item.fqn.split(".") if part.isdecimal()) for item in items]
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if len(set(numbers)) < math.prod(map(len, columns)):
        # "{0..1}.experts.{0..3}" would claim modules that are not among the items.
        varying = next(i for i, column in enumerate(columns) if len(column) > 1)
        for value in columns[varying]:
            yield from _merged([item for item, n in zip(items, numbers, strict=True) if n[varying] == value])
        return
    ranges = iter(columns)
    parts = [range_text(next(ranges)) if part.isdecimal() else part for part in items[0].fqn.split(".")]
    yield ".".join(parts), items[0], len(items)


def range_text(numbers: Sequence[int]) -> str:
    """Sorted distinct numbers as `7`, `{0..23}` or `{0..2,7}`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"


def _rich_text(sections: Sequence[_Section], width: int) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    sink = io.StringIO()
    console = Console(file=sink, width=width, color_system=None, force_terminal=False, force_jupyter=False)
    for section in sections:
        # Text: the brackets of a code line are no markup.
        title = Text(section.title)
        table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
        for header, *cells in zip(section.headers, *section.rows, strict=True):
            # A module name broken over two lines cannot be searched for; other columns give way to it.
            whole = header in ("module", FQN) and max(map(len, cells)) <= width // 3
            table.add_column(Text(header), overflow="fold", no_wrap=whole)
        for row in section.rows:
            table.add_row(*map(Text, row))
        console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in sink.getvalue().splitlines())


def _plain_text(sections: Sequence[_Section]) -> str:
    lines = []
    for section in sections:
        table = [section.headers, *section.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        table.insert(1, tuple("-" * width for width in widths))
        lines.append(section.title)
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        lines.append("")
    return "".join(f"{line}\n" for line in lines)
