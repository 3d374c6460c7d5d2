"""The report as one HTML page that needs nothing else: modules, graphs, bytes, seconds, attention, memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from megacpp_compile.report.page import charts
from megacpp_compile.report.page.graphs import before_and_after
from megacpp_compile.report.page.markup import Content, Html, joined, spaced, table, tag
from megacpp_compile.report.page.modules import ATTENTION, FUSED, MISSED, Entry, Module, tree, walk
from megacpp_compile.report.records import Collected
from megacpp_compile.report.summary import headline, saved_bytes
from megacpp_compile.report.tables import COSTS, sections
from megacpp_compile.report.tags import meaning
from megacpp_compile.report.text import bytes_text, plural, seconds_text

_SOURCE = re.compile(r"(.*?):(\d+), in (.*?): (.*)", re.DOTALL)
_ATTENTION = ("attention", "attention, eager calls")
_BADGES = {MISSED: ("near miss", "near misses"), ATTENTION: ("attention call",)}


def page(report: Collected) -> str:
    """A whole HTML document. Everything that is not this package's own text is escaped."""
    root = tree(report)
    entries = list(walk(root))
    tables = sections(report)
    costliest = [one for one in tables if one.title.startswith(COSTS)]
    parts = [
        _part("modules", "Modules", _root(root), "Fused sites, near misses and attention in the modules that hold "
              "their code; a fused site opens to its graph before and after. Equal repeated modules are shown as one."),
        _part("lines", "Source lines", _lines(entries), "The same by file and line."),
        _part("saved", "Saved for backward", charts.saved(entries)),
        _part("attention", "Attention", [_table(one) for one in tables if one.title in _ATTENTION],
              "Which kernels were chosen, and why not others. A kernel that is \"unfused\" multiplies all scores out."),
        _part("time", "Compile time", [charts.waterfall(report), *map(_table, costliest)], "Wall-clock seconds of each "
              "frame by stage, in the order in which the stages begin, and the pieces that cost the most. Compile "
              "workers count as far as they are waited for."),
        _part("memory", "Memory of a step", [charts.memory(frame) for frame in report.frames],
              "Predicted from the plan of what backward recomputes."),
        _part("tables", "Tables", [tag("details", tag("summary", one.title), _table(one)) for one in tables
                                   if one.title not in _ATTENTION and one not in costliest],
              "Everything that the text report has beside it."),
    ]  # fmt: skip
    links = [tag("a", title, href=f"#{anchor}") for anchor, title, body in parts if body]
    body = joined(_tiles(report), _callouts(report), (body for *_, body in parts))
    template = Template(files(__package__).joinpath("page.html").read_text("utf-8"))
    return template.substitute(headline=escape(headline(report)), links=joined(links), body=body)


def notebook(report: Collected) -> str:
    """The page in a frame of its own, so that its style and a notebook's do not meet."""
    return tag("iframe", srcdoc=page(report), title="megacpp report", sandbox="allow-scripts", width="100%", height=720,
               style="border: 1px solid #8886; border-radius: 8px")  # fmt: skip


def _part(anchor: str, title: str, content: Content, about: str = "") -> tuple[str, str, Html]:
    """(anchor, title, section), which is empty where there is nothing in it."""
    body = joined(content)
    if body:
        note = tag("p", about, class_="about") if about else None
        body = tag("section", tag("h2", title), note, body, id=anchor, aria_label=title)
    return anchor, title, body


def _tiles(report: Collected) -> Html:
    captured = sum(frame.captured for frame in report.frames)
    seconds = sum(sum(frame.seconds.values()) for frame in report.frames)
    before, after, known = saved_bytes(report)
    found = [("frames captured", f"{captured} of {len(report.frames)}"), ("sites fused", str(len(report.sites))),
             ("near misses", str(len(report.misses)))]  # fmt: skip
    if known:
        over = f" over {plural(known, 'site')}" if known < len(report.sites) else ""
        found.append((f"saved for backward{over}", f"{bytes_text(before)} → {bytes_text(after)}"))
    if seconds:
        found.append(("compile time", seconds_text(seconds)))
    return tag("div", (tag("div", tag("b", text), tag("span", what)) for what, text in found), class_="tiles")


def _callouts(report: Collected) -> Html:
    """What needs to be seen first: frames that were not captured, and graph breaks."""
    if not report.frames:
        return tag("p", "Nothing was compiled while this report was open.", class_="callout quiet")
    lost = [frame for frame in report.frames if not frame.captured or frame.graph_break]
    lines = [tag("li", tag("b", charts.frame_title(frame)), tag("br"), frame.outcome) for frame in lost]
    title = tag("b", f"{plural(len(lost), 'frame')} not captured, or cut by a graph break")
    return tag("div", title, tag("ul", lines), class_="callout", role="note") if lost else Html()


def _root(root: Module) -> Html:
    if not root.children and not root.entries:
        return Html()
    return tag("ul", _module(root, root.kind or "the model"), class_="tree")


def _module(module: Module, label: str) -> Html:
    counts = {kind: count for kind, count in module.counts().items() if count}
    badges = [tag("span", plural(count, *_BADGES.get(kind, (kind, kind))), class_=f"badge {_css(kind)}")
              for kind, count in counts.items()]  # fmt: skip
    times = tag("span", f"×{len(module.names)}", class_="times") if len(module.names) > 1 else None
    shown = {name: child for name, child in module.children.items() if any(child.counts().values())}
    quiet = [f"{name} {child.kind}".strip() for name, child in module.children.items() if name not in shown]
    inside = joined(
        (tag("li", _entry(entry)) for entry in module.entries.values()),
        (_module(child, name) for name, child in shown.items()),
        tag("li", f"Nothing found in {', '.join(quiet)}.", class_="quiet") if quiet else None,
    )
    kind = tag("span", module.kind, class_="kind") if module.kind != label else None
    head = tag("summary", spaced(tag("span", label, class_="name"), times, kind, *badges))
    return tag("li", tag("details", head, tag("ul", inside), open=bool(counts)), class_="module")


def _css(kind: str) -> str:
    return kind.replace(" ", "-")


def _entry(entry: Entry) -> Html:
    place, code = _place(entry.source)
    times = tag("span", f"×{entry.total}", class_="times") if entry.total > 1 else None
    head = tag("summary", spaced(
        tag("span", entry.kind, class_=f"badge {_css(entry.kind)}"), tag("b", entry.title), times,
        tag("span", place, class_="place"), tag("code", code) if code else None,
        tag("span", entry.record.reason, class_="why") if entry.kind == MISSED else None,
    ))  # fmt: skip
    facts = [(what, text) for what, text in _facts(entry) if text]
    listed = tag("dl", ((tag("dt", what), tag("dd", text)) for what, text in facts))
    graph = before_and_after(entry.record.graph) if entry.kind == FUSED and entry.record.graph else None
    return tag("details", head, listed, graph, id=entry.anchor, class_=f"entry {_css(entry.kind)}")


def _facts(entry: Entry) -> Iterator[tuple[str, str]]:
    r: Any = entry.record
    yield "Module", entry.path or "(the frame itself)"
    yield "Source", entry.source
    if entry.kind == FUSED:
        yield "Op", r.op
        yield "Lowering", r.lowering
        yield "Decided", r.note
        known = r.saved_before is not None or r.saved_after is not None
        each = " each" if entry.total > 1 else ""
        saved = f"{bytes_text(r.saved_before)} → {bytes_text(r.saved_after)}{each}" if known else "not counted"
        yield "Saved for backward", saved + (f" ({r.saved_reason})" if r.saved_reason else "")
    elif entry.kind == MISSED:
        yield "Why not", r.reason
        yield "Tag", r.tag
        yield from zip(("It means", "To write instead"), meaning(r.tag) or (), strict=False)
        yield "First node", r.node
    elif entry.kind == ATTENTION:
        yield "Asked", r.requested
        yield "Serves", r.effective
        yield "Kernel", r.kernel + (f", {r.observed} in the step that was observed" if r.observed else "")
        yield "Why", f"{r.reason} [{r.tag}]" if r.tag else r.reason
    else:
        yield "Note", "recognised, and there is no lowering for it"


def _lines(entries: Sequence[Entry]) -> Html:
    """By file, the lines that something was said of."""
    by_file: dict[str, dict[tuple[int, str], list[Entry]]] = {}
    for entry in entries:
        if found := _SOURCE.fullmatch(entry.source):
            by_file.setdefault(found[1], {}).setdefault((int(found[2]), found[4]), []).append(entry)
    made = []
    for file in sorted(by_file):
        rows = []
        for (number, code), here in sorted(by_file[file].items(), key=lambda item: item[0]):
            marks = [tag("a", f"{e.title}{f' ×{e.total}' if e.total > 1 else ''}", href=f"#{e.anchor}",
                         class_=f"badge {_css(e.kind)}", title=e.kind) for e in here]  # fmt: skip
            rows.append(tag("li", tag("span", str(number), class_="number"), tag("code", code), tag("span", marks)))
        made.append(joined(tag("h3", file), tag("ol", rows, class_="lines")))
    return joined(made)


def _place(source: str) -> tuple[str, str]:
    """("file.py:12", the code)."""
    found = _SOURCE.fullmatch(source)
    return (f"{found[1]}:{found[2]}", found[4]) if found else (source, "")


def _table(section: Any) -> Html:
    return table(section.title, section.headers, section.rows)
