"""The surfaces of attention and the profiles that prove them, as frozen, checked types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megacpp_compile.errors import EvidenceError

Line = Literal["dense_full_fa4", "blockized_sparse_cuda", "exact_token_dsa", "serving_decode", "non_applicable"]
ProofClass = Literal["planner", "observational", "validation", "execute"]
Fit = Literal["applicable", "conditional", "non_applicable"]
Relation = Literal["opt-in", "baseline", "other", "none"]
LINES: tuple[str, ...] = get_args(Line)

# What each class of proof may call its artifact.
ARTIFACTS: dict[str, tuple[str, ...]] = {
    "planner": ("planner_manifest", "launch_manifest_pending"),
    "observational": ("observational_profile_record", "matrix_summary_record"),
    "validation": ("contract_test", "negative_guard"),
    "execute": ("microbenchmark_case_record", "validated_remote_execution"),
}


@dataclass(frozen=True)
class Surface:
    """Something that attention can be asked for.

    Attributes:
        id: its name.
        line: the one line that its evidence belongs to.
        family: the part of a model, "dense attention".
        stage: "prefill", "train", "decode".
        relation: to FlashAttention-4: "opt-in" (it is), "baseline", "other", "none".
        fit: whether it can be an attention backend at all.
        state: of the implementation, "wired", "not wired", "not started".
        wanted: the evidence that would prove it, in words.
        policy: what counts as proof, in words.
        requested: names that may be requested.
        reported: names that may be reported as what ran.
        constraints: tags of `nn.attention.eligibility` that keep it from serving.
        blocked: why it is not promoted, whatever its records say.
    """

    id: str
    line: Line
    family: str
    stage: str
    relation: Relation
    fit: Fit
    state: str
    wanted: str
    policy: str
    requested: tuple[str, ...] = ()
    reported: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """A way to prove a surface: what is run, and what its record is worth.

    Attributes:
        id: its name.
        surface: id of the surface.
        line: the surface's line.
        arguments: of pytest, rendered by `command`.
        tier: 1 contract tests, 2 bounded runs, 3 rollout.
        proof_class: what kind of proof a record of it is.
        artifact_kind: what the record is called, one of the class's own ARTIFACTS.
        evidence_grade: the proof class again, as records carry it.
        counts_for_status: whether a record of it may count: of an "execute" with runtime truth alone.
        runtime_truth: whether its records carry actual backend, shape, fallback reason and prefill or decode.

    Raises EvidenceError for a combination that claims what it cannot.
    """

    id: str
    surface: str
    line: Line
    arguments: tuple[str, ...]
    tier: int
    proof_class: ProofClass
    artifact_kind: str
    evidence_grade: str
    counts_for_status: bool = False
    runtime_truth: bool = False

    def __post_init__(self) -> None:
        problem = None
        if self.line not in LINES:
            problem = f"line {self.line!r} is none of {', '.join(LINES)}"
        elif self.proof_class not in ARTIFACTS:
            problem = f"proof_class {self.proof_class!r} is none of {', '.join(ARTIFACTS)}"
        elif self.evidence_grade != self.proof_class:
            problem = f"evidence_grade is {self.evidence_grade!r} and proof_class {self.proof_class!r}"
        elif self.artifact_kind not in ARTIFACTS[self.proof_class]:
            kinds = ", ".join(ARTIFACTS[self.proof_class])
            problem = f"artifact_kind {self.artifact_kind!r} of proof_class {self.proof_class!r}, which has {kinds}"
        elif self.counts_for_status and self.proof_class != "execute":
            problem = f"it would count for status, and is {self.proof_class}: only what was executed counts"
        elif self.counts_for_status and not self.runtime_truth:
            problem = "it would count for status, and its records carry no runtime truth"
        elif self.counts_for_status and self.line == "non_applicable":
            problem = "it would count for status on a line where nothing applies"
        elif self.tier not in (1, 2, 3):
            problem = f"tier is {self.tier}, wanted 1, 2 or 3"
        if problem is not None:
            raise EvidenceError(f"profile {self.id!r}", problem)

    @property
    def command(self) -> str:
        """What runs it, as a line of a shell."""
        quoted = (f"'{a}'" if " " in a else a for a in self.arguments)
        return " ".join(("python -m pytest", *quoted))
