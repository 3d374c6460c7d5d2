"""What `policy="auto"` chose for a frame, as it is recorded and as it is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from megacpp_compile.report.text import bytes_text, plural

SMALL = "backward reads less than"  # how the reason begins where there is nothing to spare


@dataclass(slots=True)
class AutoPlan:
    """What was chosen, and what the other choice would give; all of it predicted.

    Attributes:
        taken: whether there is a plan; False where the partitioner of torch decides, as under `policy="none"`.
        reason: why it does, "" for a plan.
        recomputed: values that backward recomputes under the plan.
        saved, peak: bytes saved for backward and bytes of a step at its peak under the plan, also of one that was not
            taken; None where none was made.
        saved_none, peak_none: likewise under `policy="none"`.
        more: seconds that the plan takes more, latents that it keeps included: less than nothing where those outweigh
            what is recomputed.
        seconds_none: of a step under `policy="none"`.
        latents: of `down_norm_up`: how many are "kept" and "recomputed", the "bytes" held for those kept and the
            "seconds" that recomputing them would take. With the plan or without, they are kept. "held": (place of the
            op among those that could keep one, bytes) of each.
        rates: whose rates times go by, "sm_90".
    """

    taken: bool = False
    reason: str = ""
    recomputed: int = 0
    saved: int | None = None
    peak: int | None = None
    saved_none: int | None = None
    peak_none: int | None = None
    more: float | None = None
    seconds_none: float | None = None
    latents: dict[str, Any] = field(default_factory=dict)
    rates: str = ""

    @classmethod
    def of(cls, taken: bool, plan: Any, none: Any, seconds: float, latents: Any, rates: str) -> AutoPlan:
        """plan, none: objects with `saved`, `peak`, `more` and `recomputed`. latents: a dataclass with the keys of
        `latents`."""
        reason = "" if taken else "recomputing more would not lower the peak"
        return cls(taken, reason, plan.recomputed, plan.saved, plan.peak, none.saved, none.peak, plan.more, seconds,
                   asdict(latents), rates)  # fmt: skip

    @property
    def told(self) -> bool:
        """Whether a report's text speaks of it: not of frames too small for a choice."""
        return not self.reason.startswith(SMALL)

    @property
    def chosen(self) -> str:
        """What was chosen, in words."""
        text = self._plan() if self.taken else "torch's partitioner" + (f": {self.reason}" if self.reason else "")
        return f"{text}; {self._latents()}" if self.latents.get("kept") else text

    @property
    def other(self) -> str:
        """What the other choice would give, in words; "-" where nothing is known of it."""
        if self.saved_none is None or self.peak_none is None:
            return "-"
        none = f"none: saves {bytes_text(self.saved_none)}, peak {bytes_text(self.peak_none)}"
        return none if self.taken else self._plan()

    def _plan(self) -> str:
        saved, peak = bytes_text(self.saved), bytes_text(self.peak)
        time = f"{self._percent(self.more):+.2f} % time"
        return f"recompute {plural(self.recomputed, 'value')}: saves {saved}, peak {peak}, {time}"

    def _latents(self) -> str:
        kept, held, seconds = (self.latents[name] for name in ("kept", "bytes", "seconds"))
        return f"{plural(kept, 'latent')} kept: {bytes_text(held)}, recomputing {self._percent(seconds):+.2f} % time"

    def _percent(self, seconds: float | None) -> float:
        return 100 * (seconds or 0.0) / self.seconds_none if self.seconds_none else 0.0
