"""The rungs of FlashAttention-4's rollout, what each waits for, and the rules that stop one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megacpp_compile.evidence.catalog import profile_of
from megacpp_compile.evidence.record import CANONICAL_METRICS, REFERENCE, Record, counting, verdict
from megacpp_compile.targets import chips

State = Literal["not started", "pending", "passed", "stopped"]
# The canonical environment, and a second one that is no part of it; `gate` takes others.
ENVIRONMENTS = ("h200_canonical", "h200_detached")

# Configurations of the comparison without keys and values kept, channels and tokens, and for each its baseline: torch's
# own attention at the same shape.
MATRIX = tuple(f"{widths} x {tokens}" for widths in ("192/128", "128/128", "64/64") for tokens in (4096, 16384))
_BASELINE = "baseline of "
BASELINES = tuple(_BASELINE + configuration for configuration in MATRIX)
# What the second environment runs: batch, heads, queries, keys, channels.
DETACHED_SHAPE, DETACHED_DTYPE = (1, 8, 128, 128, 64, 64), "bfloat16"

# Bounds of the stop rules: crossed is stopped, at the bound is not.
MAX_ABS_DIFF, SLOWER_PERCENT, LARGER_PERCENT, LOSS_RATIO = 0.01, 10, 5, 1.05


@dataclass(frozen=True)
class Rung:
    """One step of the rollout.

    Attributes:
        id: "L0" to "R7".
        passes_when: in words.
        needs: the rungs below that must have passed.
        profiles: what has to have a record.
        place: "canonical", "detached", or "" for any environment.
        metrics: that each of those records has to have.
        configurations: of a matrix, each of which has to have a record.
        comparison: whether its records are compared with a baseline, and so do not have to count by themselves.
    """

    id: str
    passes_when: str
    needs: tuple[str, ...]
    profiles: tuple[str, ...]
    place: str = ""
    metrics: tuple[str, ...] = ()
    configurations: tuple[str, ...] = ()
    comparison: bool = False

    @property
    def commands(self) -> tuple[str, ...]:
        """What runs it."""
        return tuple(found.command for p in self.profiles if (found := profile_of(p)) is not None)


RUNGS: tuple[Rung, ...] = (
    Rung("L0", "the dispatcher's contract tests are green for fixed lengths without a KV cache", (),
         ("dense_fa4_contract", "attention_sites_contract")),
    Rung("L1", "the schema of evidence is stable, and a row fails closed where FlashAttention-4 did not run", ("L0",),
         ("evidence_contract",)),
    Rung("R1", "a bounded forward ran on the canonical machine", ("L0", "L1"), ("dense_fa4_forward",), "canonical",
         ("max_abs_diff",)),
    Rung("R2", "the rows of R1 are bound to the environment, and two training steps ran", ("R1",),
         ("dense_fa4_forward", "dense_fa4_train_2"), "canonical"),
    Rung("R3", "the same forward ran in the second environment: batch 1, 128 tokens, 8 heads of 64, bfloat16", ("R1",),
         ("dense_fa4_forward",), "detached", ("max_abs_diff",)),
    Rung("R4", "six configurations and their baselines have speed, memory and difference, each with its actual backend",
         ("R2",), ("dense_fa4_matrix",), "canonical", (*CANONICAL_METRICS, "max_abs_diff"), MATRIX + BASELINES, True),
    Rung("R5", "the profiler saw the kernels on the canonical stack", ("R2",), ("dense_fa4_profile",), "canonical",
         comparison=True),
    Rung("R6", "2 and 100 steps trained, without NaN, at a loss ratio of 1.05 at most to the dense reference", ("R4",),
         ("dense_fa4_train_2", "dense_fa4_train_100"), "canonical", ("loss_ratio",)),
    Rung("R7", "a hybrid model's prefill has a record that says what decode does, and the gate passes",
         ("R3", "R4", "R5", "R6"), ("dense_fa4_hybrid_prefill",), "canonical", CANONICAL_METRICS),
)  # fmt: skip


def stops(record: Record, reference: Record | None = None) -> list[str]:
    """The stop rules that `record` trips, in words. reference: of the dense baseline on the same machine, at the
    same shape."""
    return [found for rule in _RULES if (found := rule(record, reference))]


def _differs(record: Record, _: Record | None) -> str:
    worst = record.metrics.get("max_abs_diff")
    return f"max_abs_diff {worst:g} is above {MAX_ABS_DIFF:g}" if worst is not None and worst > MAX_ABS_DIFF else ""


def _not_finite(record: Record, _: Record | None) -> str:
    odd = [name for name, value in sorted(record.metrics.items()) if not math.isfinite(value)]
    if odd:
        return f"{odd[0]} is no finite number"
    return "the result has NaN or Inf" if record.checks.get("finite") is False else ""


def _slower(record: Record, reference: Record | None) -> str:
    own, other = (r.metrics.get("median_tok_per_sec") if r else None for r in (record, reference))
    if own is None or other is None or own * 100 >= other * (100 - SLOWER_PERCENT):
        return ""
    return f"{own:g} tokens a second are more than {SLOWER_PERCENT} % below the reference's {other:g}"


def _larger(record: Record, reference: Record | None) -> str:
    own, other = (r.metrics.get("peak_memory_mib") if r else None for r in (record, reference))
    if own is None or other is None or own * 100 <= other * (100 + LARGER_PERCENT):
        return ""
    return f"{own:g} MiB are more than {LARGER_PERCENT} % above the reference's {other:g}"


def _two_steps_failed(record: Record, _: Record | None) -> str:
    failed = record.profile == "dense_fa4_train_2" and record.checks.get("passed") is False
    return "the training of two steps failed" if failed else ""


def _loss(record: Record, _: Record | None) -> str:
    ratio = record.metrics.get("loss_ratio")
    return f"loss ratio {ratio:g} is above {LOSS_RATIO:g}" if ratio is not None and ratio > LOSS_RATIO else ""


def _claims_decode(record: Record, _: Record | None) -> str:
    claimed = sorted({"decode", "kv_cache"} & set(record.claims))
    executed = record.phase == "decode" and verdict(record).counts
    if record.line != "dense_full_fa4" or not claimed or executed:
        return ""
    return f"it claims {' and '.join(claimed)} of the dense line, and executed none"


_RULES: tuple[Callable[[Record, Record | None], str], ...] = (
    _differs, _not_finite, _slower, _larger, _two_steps_failed, _loss, _claims_decode,
)  # fmt: skip


@dataclass(frozen=True)
class Standing:
    """Where a rung stands. missing: what it still needs. stopped: the rules that were tripped."""

    rung: Rung
    state: State
    missing: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()


def standings(records: Sequence[Record], environments: Sequence[str] = ENVIRONMENTS) -> list[Standing]:
    """Where each rung stands, from the lowest.

    Raises TargetMismatchError where records of these environments that count are of different targets: what one has
    shown is no evidence for another.
    """
    counted = (r for r in counting(records) if r.environment in environments)
    chips.one_label("a rollout", (r.machine for r in counted))
    found: dict[str, Standing] = {}
    for rung in RUNGS:
        own = [r for r in records if r.profile in rung.profiles and _in_place(r, rung, environments)]
        baselines = {r.configuration: r for r in own if r.configuration in BASELINES}
        stopped = tuple(
            f"{' '.join(filter(None, (r.profile, r.configuration)))}: {why}"
            for r in own for why in stops(r, baselines.get(_BASELINE + r.configuration))
        )  # fmt: skip
        missing = tuple(_missing(rung, own)) + tuple(f"{b} has not passed" for b in rung.needs if not _passed(found, b))
        state: State = "stopped" if stopped else "passed" if not missing else "pending" if own else "not started"
        found[rung.id] = Standing(rung, state, missing, stopped)
    return list(found.values())


def _passed(found: dict[str, Standing], rung: str) -> bool:
    return found[rung].state == "passed"


def _in_place(record: Record, rung: Rung, environments: Sequence[str]) -> bool:
    wanted = {"canonical": environments[:1], "detached": environments[1:]}.get(rung.place)
    return wanted is None or record.environment in wanted


def _missing(rung: Rung, records: Sequence[Record]) -> list[str]:
    """What the rung's own records lack."""
    lacks = []
    for profile in rung.profiles:
        for configuration in rung.configurations or ("",):
            name = f"{profile}, {configuration}" if configuration else profile
            rows = [r for r in records if r.profile == profile and r.configuration == configuration]
            reasons = [_lacks(rung, row) for row in rows]
            if not rows:
                lacks.append(f"no record of {name}")
            elif all(reasons):
                lacks.append(f"{name}: {reasons[-1]}")
    return lacks


def _lacks(rung: Rung, record: Record) -> str:
    """Why a record does not do for a rung; "" where it does."""
    profile = profile_of(record.profile)
    if profile is None:
        return "its profile is gone"
    if profile.proof_class == "planner":
        return "it is planned, and nothing ran"
    if profile.proof_class == "execute" and (found := verdict(record)).counts is False:
        return found.why
    if record.machine.get("clean") is not True:
        return "the tree was dirty"
    if record.checks.get("passed") is not True:
        return "it did not pass"
    if rung.comparison and record.is_manifest:
        return "it is a manifest"
    if rung.comparison and record.actual_backend != ("sdpa" if record.configuration in BASELINES else "fa4"):
        return f"its actual backend is {record.actual_backend!r}"
    if rung.place == "detached" and (record.shape, record.dtype) != (DETACHED_SHAPE, DETACHED_DTYPE):
        return f"it is {record.shape} in {record.dtype}, not {DETACHED_SHAPE} in {DETACHED_DTYPE}"
    if absent := [name for name in rung.metrics if name not in record.metrics]:
        return f"it has no {', '.join(absent)}"
    if "max_abs_diff" in rung.metrics and record.difference_against != REFERENCE:
        return f"max_abs_diff is not against {REFERENCE}"
    return ""
