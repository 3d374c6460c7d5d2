"""Numbers and records as text and plain data."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def bytes_text(n: int | None) -> str:
    """`n` bytes for people, three significant digits: "512 B", "1.5 KiB", "780 MiB"; None is "?"."""
    if n is None:
        return "?"
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1023.5 or unit == "TiB":
            break
        value /= 1024
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {unit}"


def seconds_text(seconds: float) -> str:
    """A time for people, three significant digits: "0 s", "81 ns", "1.5 ms", "2.03 s"."""
    value, unit = seconds, "s"
    for smaller, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9)):
        value, unit = seconds * scale, smaller
        if abs(value) >= 1:
            break
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}" if seconds else "0 s"


def plural(count: int, one: str, many: str | None = None) -> str:
    """ "1 frame", "2 frames"."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def plain(item: Any) -> dict[str, Any]:
    """The public fields of a record as plain data; "pass" stands for `pass_name`."""
    values = {f.name: getattr(item, f.name) for f in fields(item) if not f.name.startswith("_")}
    return {"pass" if name == "pass_name" else name: v for name, v in values.items()}
