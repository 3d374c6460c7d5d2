"""What there is to prove about attention, and by what: pure data, and the check that it hangs together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megacpp_compile.errors import EvidenceError
from megacpp_compile.evidence.kinds import LINES, Profile, Surface
from megacpp_compile.nn.attention import eligibility as tags

_ON_GPU = "tests/nn/test_fa4_cuda.py"
NO_KV_CACHE = "no_kv_cache_support"

SURFACES: tuple[Surface, ...] = (
    Surface(
        "dense_fa4", "dense_full_fa4", "dense attention", "prefill, train", "opt-in", "conditional", "wired",
        "a bounded run on two machines, with the kernel's name", "actual backend and observed kernel are fa4",
        ("fa4", "auto"), ("fa4",), tuple(t for t in tags.TAGS if t != tags.FP4), (NO_KV_CACHE,),
    ),
    Surface(
        "dense_fa4_fp4", "dense_full_fa4", "dense attention", "prefill", "other", "non_applicable", "not started",
        "none", "refused on every device", ("fa4_fp4",), (), (tags.FP4,), ("there is no 4-bit path",),
    ),
    Surface(
        "dense_default", "dense_full_fa4", "dense attention", "prefill, train", "baseline", "applicable", "wired",
        "the reference of comparisons", "never evidence of FlashAttention-4", ("sdpa", "auto"), ("sdpa",),
    ),
    Surface(
        "blockized_sparse", "blockized_sparse_cuda", "block-sparse attention", "prefill", "other", "conditional",
        "not wired", "requested, actual, mode and fallback reason of a run", "all four are present",
        ("blockized",), ("blockized",),
    ),
    Surface(
        "exact_token", "exact_token_dsa", "top-k sparse attention", "prefill, train", "other", "applicable", "wired",
        "a run on the gather path", "actual path is the gather path, with an empty fallback reason",
        ("sparse_mla",), ("gather",),
    ),
    Surface(
        "serving", "serving_decode", "paged KV cache", "decode", "other", "conditional", "not started",
        "a run of an engine with paged keys and values", "an engine's run, no configuration and no contiguous smoke",
        ("paged",), ("paged",), (), ("no decode path calls FlashAttention-4",),
    ),
    Surface(
        "tpu_pallas", "non_applicable", "dense attention", "prefill, train", "none", "non_applicable", "wired",
        "none", "a row of a TPU is never one of FlashAttention-4", ("pallas",), ("pallas",),
    ),
    Surface(
        "mamba3", "non_applicable", "state-space scan", "prefill, train", "none", "non_applicable", "not wired",
        "none", "a scan has no attention backend",
    ),
    Surface(
        "gated_deltanet", "non_applicable", "delta rule", "prefill, train", "none", "non_applicable", "wired",
        "none", "a recurrence has no attention backend",
    ),
)  # fmt: skip


def _executed(id: str, surface: str, line: Any, *arguments: str) -> Profile:
    return Profile(id, surface, line, arguments, 2, "execute", "validated_remote_execution", "execute", True, True)


def _contract(id: str, surface: str, line: Any, *arguments: str, kind: str = "contract_test") -> Profile:
    return Profile(id, surface, line, arguments, 1, "validation", kind, "validation")


PROFILES: tuple[Profile, ...] = (
    _contract("dense_fa4_contract", "dense_fa4", "dense_full_fa4", "tests/nn/test_fa4.py"),
    _contract("attention_sites_contract", "dense_fa4", "dense_full_fa4", "tests/passes/test_attention_sites.py"),
    _contract("evidence_contract", "dense_fa4", "dense_full_fa4", "tests/evidence"),
    _executed("dense_fa4_forward", "dense_fa4", "dense_full_fa4", _ON_GPU, "-k", "forward"),
    _executed("dense_fa4_train_2", "dense_fa4", "dense_full_fa4", _ON_GPU, "-k", "two_steps"),
    _executed("dense_fa4_train_100", "dense_fa4", "dense_full_fa4", _ON_GPU, "-k", "hundred_steps"),
    Profile("dense_fa4_matrix", "dense_fa4", "dense_full_fa4", (_ON_GPU, "-k", "matrix"), 3, "observational",
            "matrix_summary_record", "observational", False, True),
    Profile("dense_fa4_profile", "dense_fa4", "dense_full_fa4", (_ON_GPU, "-k", "profile"), 3, "observational",
            "observational_profile_record", "observational", False, True),
    # No test runs a hybrid model's prefill yet: planned, so that its rung cannot pass.
    Profile("dense_fa4_hybrid_prefill", "dense_fa4", "dense_full_fa4", (_ON_GPU,), 3, "planner",
            "launch_manifest_pending", "planner"),
    _executed("exact_token_gather", "exact_token", "exact_token_dsa", "tests/nn/test_sparse_mla_cuda.py"),
    _contract("dense_fa4_fp4_refused", "dense_fa4_fp4", "dense_full_fa4", "tests/nn/test_fa4.py", "-k", "eligibility",
              kind="negative_guard"),
    *(
        _contract(f"{surface}_guard", surface, "non_applicable", "tests/evidence", "-k", "guard", kind="negative_guard")
        for surface in ("tpu_pallas", "mamba3", "gated_deltanet")
    ),
)  # fmt: skip


def check(surfaces: Sequence[Surface] = SURFACES, profiles: Sequence[Profile] = PROFILES) -> None:
    """Raise EvidenceError where the catalog does not hang together: ids that are there twice, a profile of no surface
    or of another line, unknown tags, an opt-in surface that nothing executes."""
    by_id = {surface.id: surface for surface in surfaces}
    for kind, ids in (("surface", [s.id for s in surfaces]), ("profile", [p.id for p in profiles])):
        if twice := sorted({i for i in ids if ids.count(i) > 1}):
            raise EvidenceError(f"{kind} {twice[0]!r}", "its id is there twice")
    for surface in surfaces:
        if surface.line not in LINES:
            raise EvidenceError(f"surface {surface.id!r}", f"line {surface.line!r} is none of {', '.join(LINES)}")
        if unknown := sorted(set(surface.constraints) - set(tags.TAGS)):
            raise EvidenceError(f"surface {surface.id!r}", f"no eligibility has the tag {unknown[0]!r}")
        if surface.fit == "non_applicable" and surface.relation == "opt-in":
            raise EvidenceError(f"surface {surface.id!r}", "it is opt-in, and applies to nothing")
        if surface.relation == "opt-in" and not any(
            p.surface == surface.id and p.proof_class == "execute" for p in profiles
        ):
            raise EvidenceError(f"surface {surface.id!r}", "it is opt-in, and no profile executes it")
    for profile in profiles:
        if profile.surface not in by_id:
            raise EvidenceError(f"profile {profile.id!r}", f"there is no surface {profile.surface!r}")
        if profile.line != by_id[profile.surface].line:
            raise EvidenceError(f"profile {profile.id!r}", f"its line is not that of surface {profile.surface!r}")
        if profile.counts_for_status and by_id[profile.surface].fit == "non_applicable":
            raise EvidenceError(f"profile {profile.id!r}", "it would count for a surface that does not apply")


def profile_of(id: str, profiles: Iterable[Profile] = PROFILES) -> Profile | None:
    """The profile of that id, None where there is none."""
    return next((p for p in profiles if p.id == id), None)


def surface_of(id: str, surfaces: Iterable[Surface] = SURFACES) -> Surface:
    """The surface of that id, which `check` has seen to be there."""
    return next(s for s in surfaces if s.id == id)
