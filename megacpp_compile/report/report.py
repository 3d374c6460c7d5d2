"""What a compilation did: sites fused, near misses, frames; printed, and saved as JSON."""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megacpp_compile.errors import ReportFormatError
from megacpp_compile.report.attention import AttentionCall
from megacpp_compile.report.pieces import MOST, Cost, costs
from megacpp_compile.report.records import CompiledRegion, Frame, MissedFusion, Site, lock
from megacpp_compile.report.text import plain

if TYPE_CHECKING:
    import torch

_FORMAT = 2  # version of the JSON; raise it when a key changes its meaning or goes
_OLDEST = 1  # that is read: the release before this one wrote it


@dataclass
class Report:
    """Everything collected, in order of compilation. `str(report)` is a table.

    Attributes:
        known_passes: passes that `counts` lists even when no frame ran them.
        frames: one per graph compiled.
        sites: one per op put in place.
        misses: one per near miss.
        regions: the parts that `megacpp_compile.compile` made of its models.
        estimate: the last that `megacpp_compile.estimate` or `fit` said inside, as plain data.
        measured: bytes at the peak of the step that `measure` ran: "before", allocated on the device when it began,
            "step", allocated by it on top, and "peak", the sum. On CPU, where only changes are known, "before" and
            "peak" are None.
        attention: calls of `megacpp_compile.attention` outside of compiled code, equal ones counted once.
    """

    known_passes: tuple[str, ...] = ()
    frames: list[Frame] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    misses: list[MissedFusion] = field(default_factory=list)
    regions: list[CompiledRegion] = field(default_factory=list)
    estimate: dict[str, Any] | None = None
    measured: dict[str, int | None] | None = None
    attention: list[AttentionCall] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Pass name -> times fired over all frames; 0 for every known pass that did not."""
        counts = Counter(dict.fromkeys(self.known_passes, 0))
        own = {frame.index: frame.passes for frame in self.frames}
        for passes in own.values():
            counts.update(passes)
        for site in self.sites:
            # Where the frame counted for itself that stands: a pass may fire and leave no op behind.
            if site.pass_name not in own.get(site.frame, {}):
                counts[site.pass_name] += 1
        return dict(counts)

    def add(self, frame: Frame, sites: Iterable[Site] = (), misses: Iterable[MissedFusion] = ()) -> None:
        """Append copies numbered for this report; a later `Site.set_saved` reaches the copy."""
        with lock:
            index = len(self.frames)
            self.frames.append(replace(frame, index=index, passes=dict(frame.passes), seconds=dict(frame.seconds)))
            for site in sites:
                copy = replace(site, frame=index)
                site._copies.append(copy)
                self.sites.append(copy)
            self.misses.extend(replace(miss, frame=index) for miss in misses)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain containers, as in the JSON."""
        return {
            "format": _FORMAT,
            "known_passes": list(self.known_passes),
            "counts": self.counts,
            "frames": [plain(frame) for frame in self.frames],
            "sites": [plain(site) for site in self.sites],
            "misses": [plain(miss) for miss in self.misses],
            "regions": [{**plain(region), "fqns": list(region.fqns)} for region in self.regions],
            "estimate": self.estimate,
            "measured": self.measured,
            "attention": [plain(call) for call in self.attention],
            "costs": [asdict(cost) for cost in self.costs()],
        }

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON; `from_json` reads it back equal."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote, this release's or the one's before; raises `ReportFormatError` for
        anything else."""
        try:
            data = json.loads(text)
            if data["format"] not in range(_OLDEST, _FORMAT + 1):
                raise ReportFormatError(f"format {data['format']!r}, this version reads {_OLDEST} to {_FORMAT}")
            return cls(
                tuple(data["known_passes"]),
                [_from_plain(Frame, item) for item in data["frames"]],
                [_from_plain(Site, item) for item in data["sites"]],
                [_from_plain(MissedFusion, item) for item in data["misses"]],
                [CompiledRegion(**{**item, "fqns": tuple(item["fqns"])}) for item in data.get("regions", ())],
                data.get("estimate"),
                data["measured"] if data["format"] > 1 else _measured_once(data),
                [AttentionCall.of(item) for item in data.get("attention", ())],
            )
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ReportFormatError(f"{type(error).__name__}: {error}") from error

    @property
    def predicted_peak(self) -> int | None:
        """Bytes at the predicted peak of the frame that needs the most, what its graph reads and what it allocates;
        None where no policy said anything. A limit (`peak_gib`) is on this."""
        return max((frame.peak["predicted"] for frame in self.frames if frame.peak), default=None)

    @property
    def predicted_step(self) -> int | None:
        """Bytes that the step is predicted to allocate at its peak, beyond what was there before it: the quantity of
        `measured["step"]`. None where that is not known: without a policy, for code from a cache, and where several
        frames make up the step, whose peaks do not add up."""
        training = [frame for frame in self.frames if frame.grad]
        found = training[0].peak if len(training) == 1 else None
        return found["step"] if found else None

    @property
    def measured_peak(self) -> int | None:
        """Deprecated: `measured["peak"]` on CUDA, `measured["step"]` elsewhere."""
        warnings.warn('measured_peak is now measured["step"], or measured["peak"]', FutureWarning, stacklevel=2)
        found = self.measured or {}
        return found.get("step") if found.get("peak") is None else found["peak"]

    def costs(self, most: int | None = MOST) -> list[Cost]:
        """The pieces of compiling that took the longest, the costliest first, and for each what would avoid it; all of
        them where `most` is None: of a frame they add up to its `seconds`.

        Seconds are wall-clock, of the thread that compiles. What Inductor's workers compile beside it counts as far as
        it is waited for, with the first kernel in the code's order that is not ready.
        """
        return costs(self)[:most]

    def measure(self, step: Callable[[], Any], device: str | torch.device) -> int:
        """Run `step`, a training step that ran before and that begins without gradients (`zero_grad()`), and note the
        peak of its memory in `measured`.

        Returns `measured["step"]`, the bytes that the step allocates at its peak beyond what was there before, on any
        device: parameters, optimizer state and whatever else existed are not in it, and not in `predicted_step`.
        Raises DeviceNotMeasuredError for a device other than CUDA's or the CPU.
        """
        from megacpp_compile.report.measure import at_peak

        self.measured = at_peak(step, device)
        assert self.measured["step"] is not None
        return self.measured["step"]

    def observe(self, step: Callable[[], Any], device: str | torch.device) -> tuple[str, ...]:
        """Run `step`, a step that ran before, under torch's profiler, and note in the frames' rows of attention which
        family of kernels served each (`AttentionSite.observed`).

        Returns the families seen, sorted: "cudnn", "flash", "efficient", "fa4", "flex", "unfused", "other". Warns
        where a frame was compiled to a kernel that did not run, as when the process has a second cuDNN. Raises
        DeviceNotMeasuredError for a device other than CUDA's or the CPU.
        """
        from megacpp_compile.report.observed import observed

        return observed(step, device, (row for frame in self.frames for row in frame.attention))

    def summary(self) -> str:
        """What was compiled and what was not, and why, in a few lines: frames fused with their sites, frames that fell
        back whole, frames that Dynamo gave up or ran in eager, graph breaks, what has no lowering, near misses."""
        from megacpp_compile.report.summary import summary

        return summary(self)

    def render(self, width: int | None = None) -> str:
        """The report as tables, by rich where it is installed, plain otherwise.

        Args:
            width: columns to fold rich's tables to; the terminal's, at least 100, when None.
        """
        from megacpp_compile.report.summary import headline
        from megacpp_compile.report.tables import tables
        from megacpp_compile.report.tags import pointer

        tags = pointer(self)
        return f"{tables(self, width)}{tags}{chr(10) if tags else ''}megacpp: {headline(self)}"

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as one HTML page, which needs no network: modules with their sites and near misses on their source
        lines, each site's graph before and after, saved bytes, compile time, attention's kernels, memory of a step.

        path: a file to write it to as well. Raises OSError where that cannot be written.
        """
        from megacpp_compile.report.page import page

        text = page(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        """What a notebook shows: the page of `to_html`, in a frame."""
        from megacpp_compile.report.page import notebook

        return notebook(self)

    def __str__(self) -> str:
        return self.render()


def _measured_once(data: dict[str, Any]) -> dict[str, int | None] | None:
    """`Report.measured` of format 1, which had one number: the sum on CUDA, elsewhere the step's own."""
    if (peak := data.get("measured_peak")) is None:
        return None
    known = {"before": None, "step": None, "peak": None}
    return known | {"peak" if any(frame["target"] == "cuda" for frame in data["frames"]) else "step": peak}


Item = TypeVar("Item", Site, MissedFusion, Frame)


def _from_plain(cls: type[Item], values: dict[str, Any]) -> Item:
    return cls(**{"pass_name" if name == "pass" else name: value for name, value in values.items()})
