"""What `policy="auto"` chose for a frame, as it is recorded and as it is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from megacpp_compile.report.text import bytes_text, plural

SMALL = "backward reads less than"  # how the reason begins where there is nothing to spare
_NAMED = 3  # of what is recomputed, in words


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
        saved_selective, peak_selective, more_selective: likewise of `policy="selective"` with the same latents kept,
            and the seconds that it takes more.
        given_up: bytes that the plan does not save of what the partitioner does, by op and module: {"mul in mlp":
            ...}.
        allowed: the fraction of `seconds_none` that recomputing may take.
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
    saved_selective: int | None = None
    peak_selective: int | None = None
    more_selective: float | None = None
    given_up: dict[str, int] = field(default_factory=dict)
    allowed: float = 0.0

    @classmethod
    def of(
        cls, taken: bool, plan: Any, none: Any, selective: Any, seconds: float, latents: Any, rates: str
    ) -> AutoPlan:  # fmt: skip
        """plan, none, selective: objects with `saved`, `peak`, `more` and `recomputed`. latents: a dataclass with the
        keys of `latents`."""
        reason = "" if taken else "what may be recomputed in the time allowed would not lower the peak"
        return cls(taken, reason, plan.recomputed, plan.saved, plan.peak, none.saved, none.peak, plan.more, seconds,
                   asdict(latents), rates, selective.saved, selective.peak, selective.more)  # fmt: skip

    def of_calls(self, calls: int) -> AutoPlan:
        """It for a graph that runs so often in a step; peaks are of all of them already."""
        once = ("taken", "reason", "rates", "peak", "peak_none", "peak_selective", "allowed")
        return AutoPlan(**{name: value if name in once else times(value, calls)
                           for name, value in asdict(self).items()})  # fmt: skip

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
        """What the other choices would give, in words; "-" where nothing is known of them."""
        if self.saved_none is None:
            return "-"
        none = f"none: {_memory(self.saved_none, self.peak_none)}" if self.taken else self._plan()
        if self.saved_selective is None:
            return none
        selective = _memory(self.saved_selective, self.peak_selective)
        return f"{none}; selective: {selective}, {self._percent(self.more_selective):+.2f} % time"

    def _plan(self) -> str:
        most = list(self.given_up)[:_NAMED]
        what = f" ({', '.join(most)}{', ...' if len(self.given_up) > len(most) else ''})" if most else ""
        time = f"{self._percent(self.more):+.2f} % time"
        return f"recompute {plural(self.recomputed, 'value')}{what}: {_memory(self.saved, self.peak)}, {time}"

    def _latents(self) -> str:
        kept, held, seconds = (self.latents[name] for name in ("kept", "bytes", "seconds"))
        return f"{plural(kept, 'latent')} kept: {bytes_text(held)}, recomputing {self._percent(seconds):+.2f} % time"

    def _percent(self, seconds: float | None) -> float:
        return 100 * (seconds or 0.0) / self.seconds_none if self.seconds_none else 0.0


def times(value: Any, calls: int) -> Any:
    """A number, or those in dicts, of so many calls; what is none stays as it is."""
    if isinstance(value, dict):
        return {name: times(part, calls) for name, part in value.items()}
    return calls * value if isinstance(value, (int, float)) else value


def _memory(saved: int | None, peak: int | None) -> str:
    return f"saves {bytes_text(saved)}, peak {bytes_text(peak)}"
