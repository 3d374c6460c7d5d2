"""Pictures of numbers: saved bytes as bars, compile time as a waterfall, the memory of a step over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megacpp_compile.report.auto_plan import AutoPlan
from megacpp_compile.report.page.markup import Html, joined, tag
from megacpp_compile.report.page.modules import FUSED, Entry
from megacpp_compile.report.pieces import STAGES
from megacpp_compile.report.records import Collected, Frame
from megacpp_compile.report.text import bytes_text, seconds_text


def saved(entries: Sequence[Entry]) -> Html:
    """Bytes saved for backward without megacpp and with it, by module and by site; nothing where none are known."""
    known = [e for e in entries if e.kind == FUSED and None not in (e.record.saved_before, e.record.saved_after)]
    if not known:
        return Html()
    by_site, by_module = [], dict[str, tuple[int, int]]()
    for e in known:
        before, after = e.record.saved_before * e.total, e.record.saved_after * e.total
        times = f" ×{e.total}" if e.total > 1 else ""
        by_site.append((tag("a", f"{e.title}{times}", href=f"#{e.anchor}"), _where(e), before, after))
        one = by_module.get(_where(e), (0, 0))
        by_module[_where(e)] = (one[0] + before, one[1] + after)
    both = (("site", by_site), ("module", [(path, "", *size) for path, size in by_module.items()]))
    choices = [
        tag("label", tag("input", type="radio", name="by", value=name, checked=name == "module"), f" by {name}")
        for name, _ in reversed(both)
    ]
    charts = [tag("div", _bars(rows), class_=f"bars by-{name}") for name, rows in both]
    key = tag("p", tag("span", "", class_="swatch before"), " without megacpp: what autograd keeps of the plain code ",
              tag("span", "", class_="swatch after"), " with it: what the op keeps", class_="key")  # fmt: skip
    return tag("div", tag("fieldset", tag("legend", "Bars"), choices), key, charts, class_="saved")


def _where(entry: Entry) -> str:
    return entry.path or "(the frame itself)"


def _bars(rows: Sequence[tuple[str | Html, str, int, int]]) -> Html:
    most = max(max(before, after) for *_, before, after in rows) or 1
    made = []
    for title, where, before, after in sorted(rows, key=lambda row: -row[2]):
        sizes = (("before", "without", before), ("after", "with", after))
        shares = [max(100 * size / most, 0.3 if size else 0) for *_, size in sizes]  # what is there is to be seen
        bars = [
            tag("div", tag("span", "", class_=f"bar {kind}", style=f"width: {share:.2f}%"),
                tag("span", f"{word} {bytes_text(size)}", class_="size"), class_="line")
            for (kind, word, size), share in zip(sizes, shares, strict=True)
        ]  # fmt: skip
        made.append(tag("div", tag("div", title, tag("small", where) if where else None, class_="what"),
                        tag("div", bars), class_="row"))  # fmt: skip
    return joined(made)


def waterfall(report: Collected) -> Html:
    """The stages of compiling, one frame after the other; nothing where no frame was timed."""
    timed = [frame for frame in report.frames if frame.seconds]
    whole = sum(sum(frame.seconds.values()) for frame in timed)
    if not whole:
        return Html()
    rows, began = [], 0.0
    for frame in timed:
        taken = sum(frame.seconds.values())
        rows.append(tag("div", f"{frame_title(frame)}, {seconds_text(taken)}", class_="frame"))
        for name, about, seconds in _stages(frame):
            left, width = 100 * began / whole, 100 * seconds / whole
            bar = tag("span", "", class_="bar", style=f"left: {left:.2f}%; width: {width:.2f}%")
            rows.append(tag("div", tag("span", name, class_="what"), tag("span", bar, class_="track"),
                            tag("span", seconds_text(seconds), class_="size"), class_="line", title=about))  # fmt: skip
            began += seconds
    return tag("div", rows, class_="waterfall")


def _stages(frame: Frame) -> list[tuple[str, str, float]]:
    """(stage, what it is, seconds) in the order in which they begin; the passes come after the capture."""
    passes = {name: s for name, s in frame.seconds.items() if name not in STAGES}
    found = []
    for name, about in STAGES.items():
        if name in frame.seconds:
            found.append((name, about, frame.seconds[name]))
        if name == "capture" and passes:
            longest = sorted(passes, key=lambda one: -passes[one])
            each = ", ".join(f"{one} {seconds_text(passes[one])}" for one in longest)
            found.append(("passes", each, sum(passes.values())))
    return found


def frame_title(frame: Frame) -> str:
    """What a frame is called here."""
    return f"frame {frame.index}: {frame.name or '(no source known)'}"


def memory(frame: Frame) -> Html:
    """The plan of a frame: the bytes of a step over time, and what the automatic policy chose; nothing without."""
    parts: list[Html] = []
    if frame.auto and (plan := AutoPlan(**frame.auto)).told and not frame.cached:
        words = (("Chosen", plan.chosen), ("Other choices", plan.other))
        parts.append(tag("dl", ((tag("dt", f"{what} (predicted)"), tag("dd", text)) for what, text in words)))
    if frame.peak and (levels := frame.peak.get("over_time")):
        parts.append(_over_time(frame.peak, levels))
    return joined(tag("h3", frame_title(frame)), parts) if parts else Html()


def _over_time(peak: dict[str, Any], levels: dict[str, list[int]]) -> Html:
    runs = [(name, levels[name]) for name in ("forward", "backward") if levels[name]]
    steps = [(name, i, size) for name, run in runs for i, size in enumerate(run)]
    top = max((size for *_, size in steps), default=0) or 1
    where = max(range(len(steps)), key=lambda i: steps[i][2], default=0)
    columns = [
        tag("rect", tag("title", f"{name}, step {i + 1} of {len(levels[name])}: {bytes_text(size)}"),
            x=x, y=f"{100 - 100 * size / top:.2f}", width=1, height=f"{100 * size / top:.2f}",
            class_=f"{name}{' top' if x == where else ''}")
        for x, (name, i, size) in enumerate(steps)
    ]  # fmt: skip
    ends = [tag("span", name, style=f"flex: {len(run)}") for name, run in runs]
    before, step, predicted = (bytes_text(peak[name]) for name in ("before", "step", "predicted"))
    limit = "" if peak["limit"] is None else f", under a limit of {bytes_text(peak['limit'])}"
    said = (f"The step's peak of {step} is in {steps[where][0] if steps else 'forward'}, on top of {before} that was "
            f"there before: {predicted} predicted{limit}.")  # fmt: skip
    picture = tag("svg", columns, viewBox=f"0 0 {max(len(steps), 1)} 100", preserveAspectRatio="none", role="img",
                  aria_label=said)  # fmt: skip
    axis = tag("div", tag("span", bytes_text(top)), tag("span", "0"), class_="axis")
    return tag("figure", tag("figcaption", said), tag("div", axis, picture, class_="plot"),
               tag("div", ends, class_="ends"), class_="memory")  # fmt: skip
