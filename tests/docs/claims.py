"""Claims of README and docs/ that something has not run, has passed or is within so many percent, and the records that
they cite.

A claim is followed, in its paragraph, list item or cell, by a link to the record it speaks of, whose title says what is
to be found there:

    [rungs](generated/evidence.md "rungs: R1 R2 passed, R5 pending")   states of FlashAttention-4's rollout
    [row](h200/block.json "ratio: megacpp / Inductor, forward")        medians, in every case, for "within N %"
    [rows](h200/remat_peaks.json "field: predicted_by_measured")       a ratio of every row, for "within N %"
    [kernels](kernels.md#moe "says: 14.36 ms")                         words of a page's section
    [record](evidence/x.json "row: device=NVIDIA H200 & fa4")          a row of a JSON file of docs/
    [no row](h200/moe.json "no row: subject=moe & sorted")             none of any file, nor a time on the pages of records

Patterns are regular expressions; " or " stands for "|", which ends a table's cell.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megacpp_compile.evidence.record import read
from megacpp_compile.evidence.rollout import standings
from tests.docs.commands import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.glob("*.md")])
# Pages that are records themselves: a figure there is the first that anybody wrote down, with the card or machine and
# torch's release that it was measured with.
RECORDS = (DOCS / "kernels.md", DOCS / "measurements.md")

_NOT_RUN = (
    r"(?<!does )(?<!do )\b(?:not|never)\s+(?:yet\s+)?(?:been\s+)?(?:run|timed)\b|n['’]t\s+(?:yet\s+)?(?:been\s+)?(?:run|timed)\b|"
    r"\b(?:nobody|no one|nothing|none|no (?:GPU|TPU))\s+has\s+(?:yet\s+)?(?:run|timed|measured)\b|"
    r"\byet\s+to\s+(?:be\s+)?(?:run|timed)\b|\bno hardware\b|\buntimed\b|\bunmeasured\b"
)
_PASSED = r"\bpassed\b(?!\s+(?:through|over|on\s+to|along|to|in|as|by)\b)"
_WITHIN = r"\bwithin\s+(?P<percent>[\d.]+)\s*(?:%|per\s?cent\b)"
_CLAIM = re.compile(f"(?P<absent>{_NOT_RUN})|(?P<passed>{_PASSED})|{_WITHIN}", re.I)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]*)(?:\s+\"(?P<title>[^\"]*)\")?\)")
_QUERY = re.compile(r"(no row|row|rungs|ratio|field|says): (.+)", re.S)
_RUNG = re.compile(r"\b[LR]\d\b")
_TIME = re.compile(r"\d ?(?:ms|µs|us|s|k? ?tokens/s|TFLOP/s|TB/s)\b")


class ClaimError(Exception):
    """A claim without a record, or beside one that says something else."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a page claims. place: page and line. block: its paragraph, item or cell. kind: "absent", "passed", "within".
    percent: of the last. target, query: of the link that follows it."""

    place: str
    page: Path
    block: str
    text: str
    before: str
    kind: str
    percent: str
    target: str
    query: str


def claims_of(page: Path, text: str | None = None) -> list[Claim]:
    """Every claim of a page, with the first link behind or around it that has a query, up to the next claim."""
    text = page.read_text() if text is None else text
    found = []
    for start, block, row in _blocks(text):
        links = [m for m in _LINK.finditer(block) if _QUERY.fullmatch(" ".join((m["title"] or "").split()))]
        heading = block.startswith("#")
        matches = [m for m in _CLAIM.finditer(block) if not _quoted(block, m) and not _in_title(block, m)]
        for index, match in enumerate(matches):
            end = matches[index + 1].start() if index + 1 < len(matches) else len(block)
            link = next((one for one in links if match.start() < one.end() and one.start() < end), None)
            if heading:  # what it says is of its whole section
                link = next((m for m in _LINK.finditer(_section(text, start)) if (m["title"] or "").startswith("no row: ")), None)
            kind = "absent" if match["absent"] else "passed" if match["passed"] else "within"
            line = text.count("\n", 0, start + match.start()) + 1
            before = re.split(r"(?<=[.;]) ", " ".join(f"{row} {block[: match.start()]}".split()))[-1]
            query = " ".join((link["title"] if link else "").split())
            found.append(Claim(f"{page.relative_to(ROOT)}:{line}", page, block, " ".join(match[0].split()), before, kind,
                               match["percent"] or "", link["target"] if link else "", query))  # fmt: skip
    return found


def check(claim: Claim) -> None:
    """Raise ClaimError unless the record that the claim cites says the same."""
    if not claim.query:
        if claim.kind != "absent" and claim.page in RECORDS and not _RUNG.search(claim.before):
            return
        raise ClaimError(f"{claim.place}: {claim.text!r} cites no record: {' '.join(claim.block.split())[:200]}")
    verb, rest = _QUERY.fullmatch(claim.query).groups()  # type: ignore[union-attr]
    wanted = {"absent": ("no row",), "passed": ("rungs", "says", "row"), "within": ("ratio", "field", "says")}[claim.kind]
    if verb not in wanted:
        raise ClaimError(f"{claim.place}: {claim.text!r} is shown by {' or '.join(wanted)}, not by {verb!r}")
    problem = check_query(claim.page, claim.target, claim.query, claim)
    if problem:
        raise ClaimError(f"{claim.place}: {claim.text!r}: {problem}")


def queries_of(page: Path) -> list[tuple[str, str]]:
    """(target, query) of every link of a page that has one, claims or not."""
    links = ((m["target"], " ".join((m["title"] or "").split())) for m in _LINK.finditer(page.read_text()))
    return [(target, title) for target, title in links if _QUERY.fullmatch(title)]


def check_query(page: Path, target: str, query: str, claim: Claim | None = None) -> str:
    """What is wrong with a query against the record it links to, "" where nothing is."""
    verb, rest = _QUERY.fullmatch(query).groups()  # type: ignore[union-attr]
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return f"there is no {target}"
    if verb == "rungs":
        return _rungs(rest, claim)
    if verb == "ratio":
        return _percent(_ratios(file, rest), claim)
    if verb == "field":
        return _percent([float(row[rest]) for row in _dicts(json.loads(file.read_text())) if rest in row], claim)
    if verb == "says":
        section = " ".join(_of_anchor(file, anchor).split())
        number = rf"(?<![\d.]){re.escape(claim.percent)}(?![\d.])" if claim is not None else ""
        missing = rest not in section or not re.search(number, rest)
        return f"{target} does not say {rest!r}" if missing else ""
    patterns = [re.compile(one.replace(" or ", "|"), re.I) for one in rest.split(" & ")]
    rows = rows_of(file) if verb == "row" else _all_rows()
    hit = next((row for row in rows if all(p.search(row) for p in patterns)), "")
    if verb == "row":
        return "" if hit else f"{target} has no row of {rest!r}"
    times = (block for one in {*RECORDS, file} for block in _timed(one) if claim is None or block != claim.block)
    hit = hit or next((b for b in times if all(p.search(" ".join(b.split())) for p in patterns)), "")
    if hit:
        return f"there is a record of {rest!r}: {' '.join(hit.split())[:160]}"
    unknown = [p.pattern for p in patterns if not p.search(_all_text())]
    return f"nothing is called {unknown[0]!r} on any page, nor in any record" if unknown else ""


def _rungs(rest: str, claim: Claim | None) -> str:
    said = {name: state for part in rest.split(", ") for *names, state in [_state(part)] for name in names}
    stands = {one.rung.id: one.state for one in standings(read(DOCS / "evidence"))}
    for name, state in said.items():
        if stands.get(name) != state:
            return f"{name} is {stands.get(name)!r}, not {state!r}"
    named = _RUNG.findall(claim.before) if claim is not None else []
    wrong = [name for name in named if said.get(name) != "passed"]
    return f"{', '.join(wrong)} said to have passed, and cited otherwise" if wrong else ""


def _state(part: str) -> tuple[str, ...]:
    names = _RUNG.findall(part)
    return *names, re.sub(r"^(?:[LR]\d )+", "", part)


def _percent(values: list[float], claim: Claim | None) -> str:
    """The bound that a page states has to hold, and be the least of as many digits."""
    if not values:
        return "the record has no such number"
    if claim is None or claim.kind != "within":
        return ""
    digits = len(claim.percent.partition(".")[2])
    largest = max(abs(value - 1) for value in values) * 100
    bound = math.ceil(round(largest * 10**digits, 6)) / 10**digits
    return "" if bound == float(claim.percent) else f"the record has up to {largest:.3g} %, so within {bound:g} %"


def _ratios(file: Path, rest: str) -> list[float]:
    pair, _, measure = rest.rpartition(", ")
    ours, _, theirs = pair.partition(" / ")
    found = []
    for table in json.loads(file.read_text())["tables"]:
        ms = {row["name"]: row["ms"]["median"] for row in table["rows"] if row.get("ms")}
        if table["measure"] == measure and ours in ms and theirs in ms:
            found.append(ms[ours] / ms[theirs])
    return found


@functools.cache
def rows_of(file: Path) -> tuple[str, ...]:
    """The dicts of a JSON file as text, each with its path and the scalars of what it lies in and of its conditions."""
    if file.suffix != ".json":
        return ()

    def walk(value: Any, above: str) -> Iterator[str]:
        if isinstance(value, dict):
            beside = [value, *(v for k in ("conditions", "machine") if isinstance(v := value.get(k), dict))]
            own = above + " ".join(f"{k}={v}" for one in beside for k, v in one.items() if isinstance(v, str | int | float)) + " "
            inner = [(k, v) for k, v in value.items() if isinstance(v, dict | list) and k not in ("conditions", "machine")]
            yield own
            for key, one in inner:
                yield from walk(one, own + f"{key}: ")
        elif isinstance(value, list):
            for one in value:
                yield from walk(one, above)

    return tuple(walk(json.loads(file.read_text()), f"{file.name} "))


@functools.cache
def _all_rows() -> tuple[str, ...]:
    return tuple(row for one in sorted(DOCS.glob("*/*.json")) for row in rows_of(one))


@functools.cache
def _timed(file: Path) -> tuple[str, ...]:
    """The blocks of a page that have a time in them."""
    if file.suffix != ".md":
        return ()
    return tuple(block for _, block, _ in _blocks(file.read_text()) if _TIME.search(block))


@functools.cache
def _all_text() -> str:
    """Every record and every page, without its links."""
    return _LINK.sub("", "\n".join([*_all_rows(), *(page.read_text() for page in PAGES)]))


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _dicts(one)


def _blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """(offset, text, what stands before it in its row) of paragraphs, list items and tables' cells; fenced code is left
    out."""
    fenced = [m.span() for m in re.finditer(r"^```.*?^```", text, re.M | re.S)]
    for match in re.finditer(r"(?:^(?!\s*$).*\n?)+", text, re.M):
        if any(a <= match.start() < b for a, b in fenced):
            continue
        lines = re.compile(r"^ *\|.*\n?|^ *- (?:(?!^ *(?:- |\|)).*\n?)+|(?:^(?! *(?:- |\|)).*\n?)+", re.M)
        for part in lines.finditer(match[0]):
            if not part[0].lstrip().startswith("|"):
                yield match.start() + part.start(), part[0], ""
                continue
            for cell in re.finditer(r"[^|\n]+", part[0]):
                yield match.start() + part.start() + cell.start(), cell[0], part[0][: cell.start()].replace("|", " ")


def _quoted(block: str, match: re.Match[str]) -> bool:
    return block[match.start() - 1 : match.start()] == '"' and block[match.end() : match.end() + 1] == '"'


def _in_title(block: str, match: re.Match[str]) -> bool:
    return any(m["title"] and m.start("title") <= match.start() < m.end("title") for m in _LINK.finditer(block))


def _section(text: str, start: int) -> str:
    """The text below the heading that begins at `start`, up to the next of its level or above."""
    heading = text[start:].partition("\n")[0]
    begin, level = start + len(heading), len(heading) - len(heading.lstrip("#"))
    rest = re.search(rf"^#{{1,{level}}} ", text[begin:], re.M)
    return text[begin : begin + rest.start()] if rest else text[begin:]


def _of_anchor(file: Path, anchor: str) -> str:
    text = file.read_text()
    for match in re.finditer(r"^#+ (.*)$", text, re.M) if anchor else ():
        if re.sub(r"[^\w\- ]", "", match[1].lower()).replace(" ", "-") == anchor:
            return _section(text, match.start())
    return text
