"""A measured table as text: with rich where it is installed, plain otherwise, Markdown for the documentation."""

from __future__ import annotations

from typing import Any

from benchmarks.observe import fused

COLUMNS = ("", "ms", "min..max", "x floor", "/ Inductor", "error", "bound", "peak MiB", "saved MiB")


def title(table: dict[str, Any]) -> str:
    return f"{table['subject']}: {table['case']}, {table['measure']}"


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def cells(table: dict[str, Any]) -> list[list[str]]:
    """The floor first, then a line for every row that took part."""
    lines = []
    if table["floor_ms"]:
        lines.append(["floor", number(table["floor_ms"]), "", "1.00", *[""] * (len(COLUMNS) - 4)])
    for row in table["rows"]:
        if "ms" not in row:
            continue
        wrong = " WRONG" if row.get("ok") is False else ""
        ms = row["ms"]
        error, bound = (f"{row[k]:.1e}" if k in row else "" for k in ("error", "bound"))
        mib = [f"{row[k]:.4g}" if k in row else "" for k in ("peak_mib", "saved_mib")]
        lines.append([
            row["name"], number(ms["median"]), f"{ms['min']:.3f}..{ms['max']:.3f}", number(row.get("x_floor"), 2),
            number(row.get("per_inductor"), 3), error + wrong, bound, *mib,
        ])  # fmt: skip
    return lines


def notes(table: dict[str, Any]) -> list[str]:
    """What the columns cannot hold: what is missing and why, what was fused, which attention ran, what is wrong.

    Said once a case, under the last of its tables.
    """
    said: list[str] = []
    if not table["last_of_case"]:
        return said
    for row in table["rows"]:
        name = row["name"]
        if "missing" in row:
            said.append(f"{name}: {'FAILED' if row.get('failed') else 'not here'}: {row['missing']}")
        if row.get("ok") is False:
            said.append(f"{name}: WRONG: {row['worst']} errs by {row['error']:.2e}, bound {row['bound']:.2e}")
        if "predicted_mib" in row:
            said.append(f"{name}: peak {row['peak_mib']:.4g} MiB measured, {row['predicted_mib']:.4g} predicted "
                        f"({row['predicted_by_measured']:.3f}x){_limit(row)}")  # fmt: skip
        if "sites" in row:
            said.append(f"{name}: fused {fused(row)}")
        if row["kind"] == "ours" and "near_misses" in row:
            said.append(f"{name}: near misses: {'; '.join(row['near_misses'])}")
        if "sites" not in row and row["kind"] == "ours" and "ms" in row and "compile" not in table["subject"]:
            said.append(f"{name}: fused nothing")
        if "not_observed" in row:
            said.append(f"{name}: memory and kernels could not be observed: {row['not_observed']}")
        if row.get("fell_back"):
            said.append(f"{name}: compiled by Inductor alone: {'; '.join(row['fell_back'])}")
    attention: dict[str, list[str]] = {}
    for row in table["rows"]:
        if "attention" in row:
            attention.setdefault(", ".join(row["attention"]) or "none found", []).append(row["name"])
    said += [f"attention of {', '.join(names)}: {kernels}" for kernels, names in attention.items()]
    return said


def plain(table: dict[str, Any]) -> str:
    lines = [list(COLUMNS), *cells(table)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    text = [title(table)]
    for line in lines:
        first, *others = zip(line, widths, strict=True)
        text.append("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]))
    return "\n".join([*text, *("  " + note for note in notes(table)), ""])


def show(table: dict[str, Any], force_plain: bool) -> None:
    try:
        if force_plain:
            raise ImportError
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain(table), flush=True)
        return
    drawn = Table(title=title(table), title_justify="left")
    for i, column in enumerate(COLUMNS):
        drawn.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for line in cells(table):
        drawn.add_row(*line, style="bold red" if "WRONG" in line[5] else None)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file has no width of its own
    console.print(drawn)
    for note in notes(table):
        console.print("  " + note, markup=False, highlight=False)
    console.print()


def markdown(table: dict[str, Any]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    lines += ["| " + " | ".join(line) + " |" for line in cells(table)]
    said = [f"- {note}" for note in notes(table)]
    return "\n".join([*lines, "", *said, ""] if said else [*lines, ""])


def _limit(row: dict[str, Any]) -> str:
    if "limit_mib" not in row:
        return ""
    verdict = "met" if row["met"] else "MISSED"
    return f"; limit {row['limit_mib']:.5g} on the device, {row['device_mib']:.5g} there: {verdict}"
