"""What to write in the place of a loop over experts that reads data and so breaks the graph, told by its lines of code:
of a frame in pieces these are all there is to go by."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from typing import Any

# How a sum over rows that were picked is written, with which a loop over experts ends.
_SUMS = ("index_add", "scatter_add", "index_put", "scatter_reduce", "] +=", "]+=")
_BODY = 25  # lines of a loop's body to look for one in
# How the sizes of experts' groups are read as numbers. Of a frame in pieces names are all there is to go by.
_READS = ("tolist()", ".item()")
_LISTS = ("tolist()", "numpy()")
_EXCHANGES = ("all_to_all", "alltoall")  # of rows, between the ranks of expert parallelism
_FOUND = ("unique(", "nonzero(", "where(")  # how the experts that have tokens, or an expert's rows, are listed
_FOR = re.compile(r"\s*for (.+?) in ")
_LOOP = (
    "this depends on data and breaks the graph; loop over all experts, `for e in range(num_experts):`, "
    "without a branch on how many tokens an expert has"
)
_LISTED = (
    "which experts have tokens is read as numbers here, which breaks the graph; loop over the tensor itself, "
    "`for e in hit:`, or over all experts, `for e in range(num_experts):`"
)
_ROWS = (
    "which rows an expert has is read as numbers here, which breaks the graph; index by the tensor itself, "
    "`rows, choice = torch.where(indices == e)`, in a loop over all experts, `for e in range(num_experts):`, "
    "without a branch on how many rows there are"
)
_SIZES = (
    "how many rows each expert has is read as a number here, which breaks the graph; multiply by "
    "`torch._grouped_mm(rows, weights, offs=counts.cumsum(0))`, or `for e in range(num_experts):` take the rows that "
    "`torch.where(indices == e)` finds"
)
_SENT = (
    "how many rows go to each rank is read as a number here, which breaks the graph; with "
    "`torch._dynamo.config.capture_scalar_outputs = True` what stands before and behind stays in one graph"
)


def advice(why: str, at: Any) -> str:
    """What to write in the place of the line `at` (a `FrameSummary`) of a loop over experts, which Dynamo could not
    trace because of `why`; "" where it is none."""
    before, body = (
        "".join(linecache.getline(at.filename, at.lineno + i) for i in lines)
        for lines in (range(-_BODY, 0), range(_BODY))
    )
    loop = any(text in body for text in _SUMS)
    experts = "expert" in (before + body).lower()
    sizes = experts and any(text in f"{why} {at.line}" for text in _READS)
    if loop and "tolist()" in at.line and _finds_rows(before, body.partition("\n")[0]):
        return _ROWS
    if loop and "tolist()" in at.line and any(text in before + at.line for text in _FOUND) and "for " in at.line:
        return _LISTED
    if experts and "unique(" in at.line and any(text in at.line for text in _LISTS):
        return _LISTED
    if sizes and any(text in before + body for text in _EXCHANGES):
        return _SENT
    listed = sizes and "= " in at.line and "tolist()" in at.line  # to be cut by, not to be looped over
    if not loop and not sizes:
        return ""
    return _LOOP if loop and not listed else _SIZES


def _finds_rows(before: str, line: str) -> bool:
    """Whether `line`, or what stands above it in the same loop, looks for that loop's own variable: one expert's rows
    are found there, not the experts that have rows. before: the code in front of `line`."""
    body, depth = [line], _indent(line)
    for above in reversed(before.splitlines()):
        if above.strip() and _indent(above) < depth:
            depth = _indent(above)
            if (loop := _FOR.match(above)) is not None:
                return _looks_for(_words(loop[1]), body[::-1])
            if above.lstrip().startswith("def "):
                return False
        body.append(above)
    return False


def _looks_for(names: set[str], lines: Sequence[str]) -> bool:
    """Whether something is looked for in `lines` by one of `names`, or by what is made of one."""
    for code in lines:
        if names & _words(code):
            if any(text in code for text in _FOUND):
                return True
            made, equals, _ = code.partition(" = ")
            names = names | (_words(made) if equals else set())
    return False


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _words(code: str) -> set[str]:
    return set(re.findall(r"\w+", code))
