"""The graph of a site before and after: layers of boxes from top to bottom, as SVG, and the same as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megacpp_compile.fx.groups import by_key
from megacpp_compile.report.page.markup import Html, joined, tag
from megacpp_compile.report.text import plural

_WIDTH, _HEIGHT, _GAP, _BETWEEN, _BEND = 190, 58, 20, 34, 14
_CHARACTERS = 27  # of a line in a box
_LEAST = 0.85  # of its size that a drawing is shown at: what is wider is scrolled
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int64": "i64", "int32": "i32"}


def before_and_after(graph: Mapping[str, Any]) -> Html:
    """Both graphs of `Site.graph`, side by side where there is room."""
    titles = {"before": "Before: the plain code", "after": "After: what stands in its place"}
    return tag("div", (_figure(title, graph[key]) for key, title in titles.items()), class_="graphs")


def _figure(title: str, part: Mapping[str, Any]) -> Html:
    nodes: Sequence[Mapping[str, Any]] = part["nodes"]
    calls = sum(n["role"] in ("call", "output") for n in nodes) + part["left_out"]
    left_out = f", {part['left_out']} of them in the middle left out" if part["left_out"] else ""
    text = tag("details", tag("summary", "As text"), tag("pre", "\n".join(map(_line, nodes)), tabindex="0"))
    said = f"{title}: {plural(calls, 'call')}{left_out}"
    drawn = tag("div", _drawing(nodes, said), class_="scroll", tabindex="0", role="region", aria_label=said)
    return tag("figure", tag("figcaption", said), drawn, text)


def _line(node: Mapping[str, Any]) -> str:
    what = node["op"] if node["role"] == "input" else f"{node['op']}({', '.join(node['inputs'])})"
    note = {"input": "  # input", "reader": "  # reads the result", "output": "  # result"}.get(node["role"], "")
    return f"{node['name']}: {node['value'] or '-'} = {what}{note}"


def _drawing(nodes: Sequence[Mapping[str, Any]], label: str) -> Html:
    """Parameters and other inputs of the whole graph are a line in the boxes that read them; items of tuples are their
    tuple's."""
    known = {n["name"]: n for n in nodes}
    given = {n["name"]: n["op"] for n in nodes if n["role"] == "input" and not n["op"].startswith(_CALLS)}
    passed = {n["name"]: n["inputs"][0] for n in nodes if n["op"] == "getitem" and n["inputs"] and n["role"] == "call"}

    def base(name: str) -> str:
        while name in passed:
            name = passed[name]
        return name

    boxes = [name for name in known if name not in given and name not in passed]
    edges = {b: list(dict.fromkeys(s for i in known[b]["inputs"] if (s := base(i)) in known and s not in given))
             for b in boxes}  # fmt: skip
    layers, chains = _laid_out(boxes, edges)
    places, width, height = _places(layers)
    lines = [_edge([places[point] for point in chain]) for chain in chains]
    drawn = [_box(known[b], places[b], [given[i] for i in known[b]["inputs"] if i in given]) for b in boxes]
    size = f"max-width: {width}px; min-width: {_LEAST * width:.0f}px"
    return tag("svg", lines, drawn, viewBox=f"0 0 {width} {height}", role="img", aria_label=label, style=size)


_CALLS = ("aten.", "megacpp.", "prims.", "getitem")
_Layers = list[list[Any]]


def _laid_out(boxes: Sequence[str], edges: Mapping[str, Sequence[str]]) -> tuple[_Layers, list[list[Any]]]:
    """(what stands in each layer, from left to right: names, and pairs for edges that pass through; the points of each
    edge). `boxes` are in the order of the graph."""
    depth: dict[str, int] = {}
    for box in boxes:
        depth[box] = max((depth[i] + 1 for i in edges[box] if i in depth), default=0)
    readers = by_key((i, box) for box in boxes for i in edges[box])
    for box in reversed(boxes):  # what reads nothing stands right above its first reader
        if not edges[box] and readers.get(box):
            depth[box] = max(0, min(depth[r] for r in readers[box]) - 1)
    layers: _Layers = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for box in boxes:
        layers[depth[box]].append(box)
    chains: list[list[Any]] = []
    for box in boxes:
        for source in edges[box]:
            chain: list[Any] = [source, *((source, box, level) for level in range(depth[source] + 1, depth[box])), box]
            for level, point in zip(range(depth[source] + 1, depth[box]), chain[1:-1], strict=True):
                layers[level].append(point)
            chains.append(chain)
    above = by_key((lower, upper) for chain in chains for upper, lower in zip(chain, chain[1:], strict=False))
    for upper, layer in zip(layers, layers[1:], strict=False):
        at = {point: i / max(1, len(upper) - 1) for i, point in enumerate(upper)}
        layer.sort(key=lambda point: sum(at[p] for p in above[point]) / len(above[point]) if point in above else 1.0)
    return layers, chains


def _places(layers: _Layers) -> tuple[dict[Any, tuple[float, float, float, float]], int, int]:
    """(left, top, width, height) of each point, and the size of the whole."""
    widths = [sum(_width(p) + _GAP for p in layer) - _GAP for layer in layers] or [_WIDTH]
    whole, found = max(widths), {}
    for level, (layer, width) in enumerate(zip(layers, widths, strict=False)):
        left = (whole - width) / 2
        for point in layer:
            found[point] = (left + 2, level * (_HEIGHT + _BETWEEN) + 2.0, float(_width(point)), float(_HEIGHT))
            left += _width(point) + _GAP
    return found, whole + 4, max(len(layers), 1) * (_HEIGHT + _BETWEEN) - _BETWEEN + 4


def _width(point: Any) -> int:
    return _WIDTH if isinstance(point, str) else _BEND


def _edge(points: Sequence[tuple[float, float, float, float]]) -> Html:
    path = ""
    for upper, lower in zip(points, points[1:], strict=False):
        x, y = upper[0] + upper[2] / 2, upper[1] + upper[3]
        to_x, to_y = lower[0] + lower[2] / 2, lower[1]
        bend = (y + to_y) / 2
        path += f"{'L' if path else 'M'}{x:g} {y:g}C{x:g} {bend:g} {to_x:g} {bend:g} {to_x:g} {to_y:g}"
        if lower is not points[-1]:
            path += f"V{lower[1] + lower[3]:g}"
    return tag("path", d=path, class_="edge")


def _box(node: Mapping[str, Any], place: tuple[float, float, float, float], given: Sequence[str]) -> Html:
    left, top, width, height = place
    own = node["op"].startswith("megacpp.")
    name = ".".join(node["op"].split(".")[1:-1]) or node["op"] if node["op"].startswith(_CALLS) else node["op"]
    value = re.sub(r"\b(bfloat16|u?int\d+|float\d+)\b", lambda found: _SHORT.get(found[0], found[0]), node["value"])
    reads = ", ".join(".".join(name.split(".")[-2:]) for name in given)
    texts = [(name, "op"), (value, "value"), (f"+ {reads}" if reads else "", "given")]
    lines = [tag("text", _shortened(text), x=left + width / 2, y=top + 17 + 16 * i, class_=kind)
             for i, (text, kind) in enumerate(texts)]  # fmt: skip
    full = tag("title", _line(node) + (f"\nreads {', '.join(given)}" if given else ""))
    rect = tag("rect", x=left, y=top, width=width, height=height, rx=7)
    return tag("g", full, rect, joined(lines), class_=f"box {node['role']}{' own' if own else ''}")


def _shortened(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 1]}…"
