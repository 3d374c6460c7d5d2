"""`CheckpointingPolicy`: what to keep for backward, in the words of the model. Frozen, checked, hashable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megacpp_compile.errors import BadOptionError

# What an entry may say. Each is defined by `plan.py`.
ENTRIES = ("none", "selective", "expert_gemm_only", "conv_bc_only", "full", "full_plus_norms")
KINDS = ("ablock", "mblock", "eblock", "rblock")
# Entries that name operations of one kind of block only.
_ONLY = {"expert_gemm_only": "eblock", "conv_bc_only": "mblock"}


@dataclass(frozen=True, slots=True)
class CheckpointingPolicy:
    """What each kind of block keeps for its backward; what is not kept is computed again there.

    An entry is one of

    - "none": left to the compiler's own partitioner;
    - "selective": attention cores, scans and matrix products are kept; what is cheap by bytes per FLOP is computed
      again: norms, activations and their products, rotated queries and keys, and, as below, projections;
    - "expert_gemm_only": only the experts' matrix products are computed again;
    - "conv_bc_only": only Mamba's convolution, its SiLU, norms and biases are computed again, never the scan;
    - "full": the whole block is computed again from what it reads, but for the norm in front of it;
    - "full_plus_norms": the norm in front of it, too.

    or a budget, as a fraction from 0 to 1 of the bytes of all that backward reads of such blocks: what costs the least
    time a byte is computed again until the rest fits, or nothing is left to; see `budget.py`. A budget knows no last
    layer.

    Never computed again, whatever an entry says: a router's choice and the scores it is made from (a second result
    could differ), random draws, writes, communication, and operations of other libraries.

    Attributes:
        ablock: attention blocks.
        mblock: Mamba and other state-space blocks.
        eblock: expert and feed-forward blocks.
        rblock: recurrent blocks.
        last_layer: entry for every block of the last layer. "never", as its activations are consumed at once: none
            of its products, cores, projections or reductions is computed again, whatever its kinds say; only what
            a fused kernel has while it reads what is saved.
        recompute_kv_upproj: under "selective", compute keys and values of latent attention again from the latent.
        recompute_q_upproj: likewise the queries.
        budget: a fraction for the whole model, in the place of "selective" for every kind.

    Source of the idea: Korthikanti et al., arXiv:2205.05198; of the mechanism: `torch.utils.checkpoint`'s
    `CheckpointPolicy` tags, which torch's partitioner obeys.
    """

    ablock: str | float = "selective"
    mblock: str | float = "selective"
    eblock: str | float = "selective"
    rblock: str | float = "selective"
    last_layer: str = "never"
    recompute_kv_upproj: bool = True
    recompute_q_upproj: bool = False
    budget: float | None = None

    def __post_init__(self) -> None:
        for kind in KINDS:
            entry = getattr(self, kind)
            valid = [e for e in ENTRIES if _ONLY.get(e, kind) == kind]
            if _is_fraction(entry):
                object.__setattr__(self, kind, float(entry))
            elif entry not in valid:
                raise BadOptionError(
                    f"policy.{kind}", entry, "a fraction from 0 to 1, or one of " + ", ".join(map(repr, valid)), valid
                )
        last = ("never", *(e for e in ENTRIES if e not in _ONLY))
        if self.last_layer not in last:
            raise BadOptionError("policy.last_layer", self.last_layer, "one of " + ", ".join(map(repr, last)), last)
        if self.budget is not None:
            if not _is_fraction(self.budget):
                raise BadOptionError("policy.budget", self.budget, "a fraction from 0 to 1")
            object.__setattr__(self, "budget", float(self.budget))
        for name in ("recompute_kv_upproj", "recompute_q_upproj"):
            if not isinstance(getattr(self, name), bool):
                raise BadOptionError(f"policy.{name}", getattr(self, name), "True or False")

    @classmethod
    def of(cls, value: Any) -> CheckpointingPolicy | None:
        """A policy from itself, None, the name of an entry for every kind that has it, or a mapping of fields.

        Raises BadOptionError for anything else.
        """
        if value is None or isinstance(value, cls):
            return value
        if _is_fraction(value):
            return cls(budget=value)
        if isinstance(value, str) and value in ENTRIES:
            return cls(**dict.fromkeys((k for k in KINDS if _ONLY.get(value, k) == k), value))  # type: ignore[arg-type]
        if isinstance(value, Mapping):
            known = [f.name for f in fields(cls)]
            for key in value:
                if key not in known:
                    raise BadOptionError("policy", key, "fields of CheckpointingPolicy: " + ", ".join(known), known)
            return cls(**value)
        raise BadOptionError(
            "policy",
            value,
            "a CheckpointingPolicy, its fields, a fraction from 0 to 1, or one of " + ", ".join(ENTRIES),
            ENTRIES,
        )

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def entry(self, kind: str, last: bool) -> str:
        """What holds for a block of `kind`; "none" for one of no kind."""
        given = getattr(self, kind) if kind in KINDS else "none"
        if isinstance(given, float) or self.budget is not None and kind in KINDS and given == "selective":
            return "never"  # where a budget begins
        entry: str = given
        # "never" holds back what the kind asks for; it asks for nothing by itself.
        return self.last_layer if last and (self.last_layer != "never" or entry != "none") else entry

    def asked(self, kind: str, last: bool) -> str:
        """`entry` for people: a budget by its fraction."""
        given = getattr(self, kind)
        if isinstance(given, float):
            return f"{given:g}"
        return f"{self.budget:g}" if self.budget is not None and given == "selective" else self.entry(kind, last)

    def budgets(self) -> list[tuple[str | None, float]]:
        """(kind, or None for the whole model; fraction) of every budget."""
        kinds: list[tuple[str | None, float]] = [(k, v) for k in KINDS if isinstance(v := getattr(self, k), float)]
        return kinds + ([(None, self.budget)] if self.budget is not None else [])


def _is_fraction(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
