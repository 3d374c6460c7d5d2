"""The three switches of a run, in one line at its start: what was asked of Transformer Engine, and what is active."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.precision import engine
from megacpp_compile.precision.layer_spec import te_layer_spec
from megacpp_compile.precision.survey import why_bf16
from megacpp_compile.report import log


@dataclass(frozen=True, slots=True)
class Switch:
    """One switch.

    Attributes:
        name: "block layers by Transformer Engine", "linears by Transformer Engine" or "fp8 plan".
        asked: whether it was asked for.
        why: why it is not active though it was asked for, "" where it is.
    """

    name: str
    asked: bool
    why: str

    @property
    def active(self) -> bool:
        return self.asked and not self.why

    def __str__(self) -> str:
        return f"{self.name}: " + ("on" if self.active else f"off ({self.why})" if self.asked else "off, not asked for")


def announce_switches(
    model: nn.Module, *, te_layers: bool = False, te_linears: bool = False, precision: Any = None,
    target: str = "auto",
) -> tuple[Switch, Switch, Switch]:  # fmt: skip
    """What is asked of Transformer Engine and what is active, in one line of the log; call it once, at start-up.

    te_layers: whether blocks are built from `te_layer_spec`. te_linears: whether `replace_linears` is called.
    precision: the plan, as `replace_linears` and `compile` take it. target: as in `replace_linears`; on TPU and CPU
    all three are inactive, by design. Raises the errors of a bad plan.
    """
    plan = PrecisionPlan.of(precision)
    nowhere = why_bf16(model, target)
    te, missing = (None, nowhere) if nowhere else engine.load()
    reasons = te_layer_spec().reasons if te is not None else {}
    recipes = sorted(plan.recipes() - {"bf16"}) if plan is not None else []
    lacking = next(filter(None, (engine.lacks(te, recipe) for recipe in recipes)), "") if te is not None else missing
    first = next((f"{key}: {why}" for key, why in reasons.items() if why), "")
    made = (
        Switch("block layers by Transformer Engine", te_layers, missing or first),
        Switch("linears by Transformer Engine", te_linears, missing),
        Switch("fp8 plan", bool(recipes), lacking),
    )
    log.logger.info("switches: %s", "; ".join(map(str, made)))
    return made
