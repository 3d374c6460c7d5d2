"""What a run found, as JSON, and whether it counts: every guard is code here, and says its reason."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megacpp_compile.errors import EvidenceError
from megacpp_compile.evidence.catalog import PROFILES, profile_of, surface_of
from megacpp_compile.evidence.kinds import Profile
from megacpp_compile.targets import chips

# What a record needs to be more than a manifest, whatever it calls itself.
TRUTH = ("actual_backend", "shape", "fallback_reason", "phase")
CANONICAL_METRICS = ("median_tok_per_sec", "peak_memory_mib")
# They parse, and are no evidence: which GB is meant is not known.
LEGACY_METRICS = ("throughput_toks", "peak_memory_gb")
# Of an executed proof; `passed` is for both of the others: that it ran through, and that the result is right.
CHECKS = ("imported", "synchronised", "shape", "finite", "passed")
SERVING_KINDS = ("config acceptance", "contiguous-KV smoke", "paged-KV run")
# What `max_abs_diff` is a difference from, so that 0.01 means something: operands are normal times 0.5, the gradient
# of the output normal times 0.1.
REFERENCE = "float32"


@dataclass(frozen=True)
class Record:
    """One run of a profile on one machine.

    Attributes:
        profile, line: what was run, and the line it belongs to.
        environment: id of the environment, "h200_canonical".
        machine: its binding: host, device, kind ("cuda", "cpu", "tpu"), capability, label ("sm_90"), driver, torch,
            packages, commit, clean.
        date: of the run.
        shape: batch, heads, queries, keys, channels of queries and of values; None if absent.
        dtype: of the operands.
        requested_backend, actual_backend: asked for, and what ran.
        mode: of the runtime, of a sparse line.
        fallback_reason: "" where nothing fell back; None if absent.
        phase: "prefill" or "decode".
        kernel_family: as the profiler saw it.
        shadow: whether the result was thrown away beside another's.
        donor: whether it was the side that a comparison is made against.
        serving_kind: one of SERVING_KINDS, of a serving line.
        claims: what it says it supports, "decode", "kv_cache".
        configuration: of a matrix, which one.
        difference_against: what `max_abs_diff` is a difference from.
        launch: digest of the launch record of its run (`launch.LaunchRecord.digest`), None where there was none.
        checks: name -> whether it held.
        metrics: name -> number.
    """

    profile: str
    line: str
    environment: str
    machine: dict[str, Any] = field(default_factory=dict)
    date: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    requested_backend: str | None = None
    actual_backend: str | None = None
    mode: str | None = None
    fallback_reason: str | None = None
    phase: str | None = None
    kernel_family: str | None = None
    shadow: bool = False
    donor: bool = False
    serving_kind: str | None = None
    claims: tuple[str, ...] = ()
    configuration: str = ""
    difference_against: str | None = None
    launch: str | None = None
    checks: dict[str, bool] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def is_manifest(self) -> bool:
        """Whether it says what was to be run, and not what ran."""
        return any(getattr(self, name) is None for name in TRUTH)

    def to_json(self) -> str:
        """The record as JSON; `of` reads it back equal."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def of(cls, values: Any) -> Record:
        """The record in plain `values`. Raises EvidenceError for a key that a record does not have, and without
        profile, line and environment."""
        if not isinstance(values, dict):
            raise EvidenceError("record", f"it is {type(values).__name__}, not a mapping")
        name = f"record of {values.get('profile', '?')!r}"
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise EvidenceError(name, f"there is no key {unknown[0]!r}")
        if absent := [key for key in ("profile", "line", "environment") if not isinstance(values.get(key), str)]:
            raise EvidenceError(name, f"{absent[0]!r} is absent")
        tuples = {key: tuple(values[key]) for key in ("shape", "claims") if values.get(key) is not None}
        return cls(**{**values, **tuples})


@dataclass(frozen=True)
class Verdict:
    """Whether a record counts, and why not. stale: whether the code has moved on from under it."""

    counts: bool
    why: str = ""
    stale: bool = False


def verdict(record: Record, profiles: Sequence[Profile] = PROFILES) -> Verdict:
    """Whether `record` counts for status."""
    profile = profile_of(record.profile, profiles)
    if profile is None:
        return Verdict(False, f"the catalog has no profile {record.profile!r}", stale=True)
    for guard in (_of_line, _of_profile, _of_run, _of_tree, _of_backend, _of_checks):
        if why := guard(record, profile):
            return Verdict(False, why)
    return Verdict(True)


def _of_line(record: Record, profile: Profile) -> str:
    if record.line != profile.line:
        return f"evidence of {record.line!r} does not cross to {profile.line!r}"
    if surface_of(profile.surface).fit == "non_applicable":
        return f"{profile.surface!r} has no attention backend of this kind"
    if record.machine.get("kind") == "tpu":
        return "a row of a TPU is never one of FlashAttention-4 or of a CUDA line"
    return ""


def _of_profile(record: Record, profile: Profile) -> str:
    if profile.proof_class != "execute":
        return f"it is {profile.proof_class}, and only what was executed counts"
    if not profile.counts_for_status:
        return "its profile does not count for status"
    if record.is_manifest:
        absent = ", ".join(name for name in TRUTH if getattr(record, name) is None)
        return f"it is a manifest: {absent} absent"
    return ""


def _of_run(record: Record, _: Profile) -> str:
    if record.shadow:
        return "a shadow run never counts"
    if record.donor:
        return "the donor's side of a comparison never counts"
    return ""


def _of_tree(record: Record, _: Profile) -> str:
    for name in ("host", "device", "torch", "commit"):
        if not record.machine.get(name):
            return f"it is not bound to a machine: {name!r} is absent"
    told = chips.label_of({**record.machine, "label": None})
    if told and (label := record.machine.get("label")) and label != told:
        return f"its label is {label!r}, and its capability that of {told!r}"
    if record.machine.get("clean") is not True:
        return "the tree was dirty: kept, and never counts"
    return ""


def _of_backend(record: Record, profile: Profile) -> str:
    allowed = surface_of(profile.surface).reported
    if record.actual_backend not in allowed:
        return f"actual backend is {record.actual_backend!r}, not {' or '.join(map(repr, allowed))}"
    if record.line == "dense_full_fa4" and record.kernel_family != "fa4":
        return f"the kernel that was seen is {record.kernel_family!r}: a name is no proof of one"
    if record.line == "blockized_sparse_cuda" and not (record.requested_backend and record.mode):
        return "requested backend or mode is absent"
    if record.line == "exact_token_dsa" and record.fallback_reason != "":
        return f"it fell back: {record.fallback_reason}"
    if record.line == "serving_decode" and record.serving_kind != "paged-KV run":
        return f"a {record.serving_kind or 'run of no known kind'} is no paged-KV run"
    return ""


def _of_checks(record: Record, _: Profile) -> str:
    for name in CHECKS:
        if record.checks.get(name) is not True:
            return f"the check {name!r} {'failed' if name in record.checks else 'is absent'}"
    if not record.dtype:
        return "its dtype is not named"
    if any(not math.isfinite(value) for value in record.metrics.values()):
        return "a metric is no finite number"
    return ""


def read(folder: Path) -> list[Record]:
    """The records in the JSON files of `folder`, in the order of their names. Raises EvidenceError for a file that
    holds none, and for a `folder` that is none."""
    if not folder.is_dir():
        problem = "there is no such folder. A checkout has one, and --records says where"
        raise EvidenceError(f"records {str(folder)!r}", problem)
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(Record.of(json.loads(path.read_text())))
        except (ValueError, TypeError, RecursionError) as error:
            raise EvidenceError(f"file {path.name!r}", str(error).rstrip(".")) from error
    return found


def counting(records: Iterable[Record], profiles: Sequence[Profile] = PROFILES) -> list[Record]:
    """Those that count."""
    return [record for record in records if verdict(record, profiles).counts]
