"""What the process says when it ends, on stderr: frames that may have lost an idiom, and why. Nothing where there are
none; `Config.summary` is the switch."""

from __future__ import annotations

import atexit
import os
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megacpp_compile.report.records import Frame, Site, lock
from megacpp_compile.report.summary import line_of, not_captured
from megacpp_compile.report.text import plural


class Ending:
    """What was compiled in this process, as far as its last words need it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget it, and say nothing."""
        self.frames = self.captured = self.sites = 0
        self.lost: Counter[tuple[str, str]] = Counter()
        self.process: int | None = None
        self.rank: int | None = None

    def note(self, frame: Frame, sites: Sequence[Site]) -> None:
        """A frame was compiled, or left alone."""
        with lock:
            self.frames += 1
            self.captured += frame.captured
            self.sites += len(sites)
            if frame.lost:
                self.lost[line_of(frame)] += 1
                if self.process is None:
                    self.process, self.rank = os.getpid(), _rank()
                    atexit.register(self.say)

    def text(self) -> str:
        """The last words, "" for a process in which all is well."""
        if not self.lost:
            return ""
        who = "megacpp" if self.rank is None else f"megacpp, rank {self.rank}"
        first = f"{who}: {self.captured} of {plural(self.frames, 'frame')} captured, {plural(self.sites, 'site')} fused"
        hint = "megacpp_compile.record() has the whole report; MEGACPP_SUMMARY=0 silences this."
        return "\n".join((first, *not_captured(self.lost), hint, ""))

    def say(self) -> None:
        """Print the text, once, in the process that it is about: not in one that was forked from it."""
        if self.process == os.getpid() and (text := self.text()):
            sys.stderr.write(text)
        self.clear()


def _rank() -> int | None:
    dist: Any = sys.modules.get("torch.distributed")
    return dist.get_rank() if dist is not None and dist.is_available() and dist.is_initialized() else None


ENDING = Ending()
