"""The model as a tree of its modules, with what the report says of each; equal repeated modules are one node."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megacpp_compile.report.attention import AttentionSite
from megacpp_compile.report.records import Collected, MissedFusion, Site
from megacpp_compile.report.tables import range_text
from megacpp_compile.report.text import plain

FUSED, MISSED, ATTENTION, RECOGNISED = "fused", "near miss", "attention", "recognised"

# Of equal layers these differ; a number at the end of a node's name does, too.
_OWN = ("fqn", "node", "frame", "graph")
_NUMBERED = re.compile(r"\b([a-z]\w*?)_\d+\b")


@dataclass
class Entry:
    """One thing that the report says of a module.

    Attributes:
        kind: one of the four above.
        title: the pass, what the model calls, or what was recognised.
        source: as in `Site`.
        record: the first of those that are equal.
        count: how many there are of them in this one module.
        total: how many in all modules that are shown as one; set with `anchor` and `path` by `walk`.
        anchor: its id in the page.
        path: the modules that are shown as one, "layers.{0..23}.attn".
    """

    kind: str
    title: str
    source: str
    record: Any
    count: int = 1
    total: int = 1
    anchor: str = ""
    path: str = ""


@dataclass
class Module:
    """A module, or several of equal content under one parent: `names` are theirs."""

    names: list[str]
    kind: str = ""
    children: dict[str, Module] = field(default_factory=dict)
    entries: dict[Hashable, Entry] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """ "attn", "{0..23}"."""
        return self.names[0] if len(self.names) == 1 else range_text(sorted(map(int, self.names)))

    def key(self) -> Hashable:
        """Equal for modules that are to be shown as one."""
        children = tuple((label, child.key()) for label, child in self.children.items())
        return self.kind, children, tuple((key, entry.count) for key, entry in self.entries.items())

    def counts(self) -> dict[str, int]:
        """Kind of entry -> how many there are in it and below, over all the modules it stands for."""
        found = dict.fromkeys((FUSED, MISSED, ATTENTION, RECOGNISED), 0)
        for entry in self.entries.values():
            found[entry.kind] += entry.total
        for child in self.children.values():
            for kind, count in child.counts().items():
                found[kind] += count
        return found


def tree(report: Collected) -> Module:
    """The root of the model as far as the report knows it."""
    root = Module([""])
    for frame in report.frames:
        for fqn, kind in frame.modules.items():
            _at(root, fqn).kind = kind
    for kind, title, record in _records(report):
        entries, key = _at(root, record.fqn).entries, _key(kind, title, record)
        if key in entries:
            entries[key].count += 1
        else:
            entries[key] = Entry(kind, title, record.source, record)
    for region in report.regions:  # a block's own class: its frame does not know it
        for fqn in region.fqns:
            if (found := _at(root, fqn, make=False)) is not None:
                found.kind = region.module
    _merge(root)
    for number, entry in enumerate(_placed(root, "", 1), 1):
        entry.anchor = f"entry-{number}"
    return root


def walk(module: Module) -> Iterator[Entry]:
    """All entries, in the order of the page."""
    yield from module.entries.values()
    for child in module.children.values():
        yield from walk(child)


@dataclass(slots=True)
class Found:
    """A row of `Frame.recognised`."""

    kind: str
    fqn: str
    source: str


def _records(report: Collected) -> Iterator[tuple[str, str, Any]]:
    """(kind of entry, title, record)."""
    yield from ((FUSED, site.pass_name, site) for site in report.sites)
    yield from ((MISSED, miss.pass_name, miss) for miss in report.misses)
    for frame in report.frames:
        yield from ((ATTENTION, row["call"], AttentionSite(**row)) for row in frame.attention)
        yield from ((RECOGNISED, row["kind"], Found(**row)) for row in frame.recognised)


def _key(kind: str, title: str, record: Site | MissedFusion | AttentionSite | Found) -> Hashable:
    values = {name: value for name, value in plain(record).items() if name not in _OWN}
    if isinstance(record, MissedFusion):
        values["reason"] = _NUMBERED.sub(r"\1", record.reason)
    return kind, title, *values.values()


def _at(root: Module, fqn: str, make: bool = True) -> Any:
    """The module of that name; None where there is none and none is to be made."""
    here = root
    for name in fqn.split(".") if fqn else ():
        if name not in here.children:
            if not make:
                return None
            here.children[name] = Module([name])
        here = here.children[name]
    return here


def _merge(module: Module) -> None:
    """Show numbered children of equal content as one."""
    first: dict[Hashable, Module] = {}
    kept: dict[str, Module] = {}
    for name, child in module.children.items():
        _merge(child)
        known = first.setdefault(child.key(), child) if name.isdecimal() else child
        if known is child:
            kept[name] = child
        else:
            known.names.append(name)
    module.children = {child.label: child for child in kept.values()}


def _placed(module: Module, above: str, times: int) -> Iterator[Entry]:
    """All entries, with their totals and paths."""
    path = f"{above}.{module.label}".strip(".")
    times *= len(module.names)
    for entry in module.entries.values():
        entry.total, entry.path = entry.count * times, path
        yield entry
    for child in module.children.values():
        yield from _placed(child, path, times)
