"""`CheckpointingPolicy`: what each kind of block saves for backward. Frozen, checked, hashable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from megacpp_compile.config import checks
from megacpp_compile.errors import BadOptionError

# What an entry may say; `remat/planner.py` carries each out.
ENTRIES = ("none", "selective", "expert_gemm_only", "conv_bc_only", "full", "full_plus_norms")
KINDS = ("ablock", "mblock", "eblock", "rblock")
OFFLOADS = ("none", "inputs", "all")
FP8_WRAPPERS = ("auto", "none", "te_checkpoint")
# What `recompute` may name -> the kind of block that has it.
OPERATIONS = {"core_attn": "ablock", "mlp": "eblock", "moe": "eblock"}
# What the option takes beside a policy: a plan by predicted time and memory (`remat/automatic.py`).
AUTO: Literal["auto"] = "auto"
# The fraction of a step's predicted time up to which a plan of "auto" counts as free.
FREE = 0.005
# Entries that name operations of one kind of block only.
_ONLY = {"expert_gemm_only": "eblock", "conv_bc_only": "mblock"}


@dataclass(frozen=True, slots=True)
class CheckpointingPolicy:
    """What each kind of block saves for its backward; backward recomputes the rest.

    An entry is one of

    - "none": left to the compiler's own partitioner;
    - "selective": attention cores, scans and GEMMs are saved; values that are cheap by FLOPs per byte are recomputed:
      norms, activations and their elementwise products, rotated queries and keys, and projections as said below;
    - "expert_gemm_only": only the experts' GEMMs are recomputed;
    - "conv_bc_only": only Mamba's convolution, its SiLU, norms and biases are recomputed, never the scan;
    - "full": the whole block is recomputed from its inputs, except the norm in front of it;
    - "full_plus_norms": the norm in front of it, too;
    - "never": GEMMs, attention cores, scans, projections and reductions are saved, and only values that a fused kernel
      computes anyway while it reads saved ones are recomputed;

    or a budget, a fraction from 0 to 1 of the bytes of all values of such blocks that backward reads: values are
    recomputed in the order of time per byte until the rest fits, or none is left; see `remat/solver.py`. A budget knows
    no last layer.

    Never recomputed, even if an entry says so: a router's choice and the scores it is made from (a second result could
    differ), random draws, writes, communication, and operations of other libraries.

    Attributes:
        ablock: attention blocks.
        mblock: Mamba and other state-space blocks.
        eblock: expert and feed-forward blocks.
        rblock: recurrent blocks.
        recompute: operations that are recomputed whatever their kinds' entries say, and nothing else on their account;
            the default entries recompute more, "none" nothing beside them. "core_attn": attention cores, from queries,
            keys and values, which costs little memory to give up, as flash attention recomputes scores anyway; "mlp":
            blocks of GEMMs that do not route, from their input; "moe": those that do, from their input and the
            router's choice. A name, or several. `last_layer` "never" takes them back in the last layer.
        last_layer: entry for every block of the last layer. By default "never", since backward consumes its activations
            at once, even if its kinds' entries say otherwise; over "none" there is nothing that it takes back.
        depth_loop: entry, in the place of "selective", for every block of a module that the forward calls several times
            in a row beside other layers, as multi-token prediction does; "kinds": that of the block's kind. Each call
            is a layer.
        stream_group: after how many layers each the values that pass from layer to layer are saved, and recomputed
            together from there between: None, by their bytes, as all that is cheap; -1, after each. For streams of a
            residual that layers mix, as in hyper-connections, which are several times as wide as a block's output.
        recompute_kv_upproj: under "selective", recompute keys and values of latent attention from the latent; where it
            is over listed latents, the queries by the keys' up-projection.
        recompute_q_upproj: likewise the queries.
        budget: a fraction for the whole model, in the place of "selective" for every kind.
        peak_gib: likewise a limit, in GiB, on the memory allocated on the device at the peak of a training step: the
            bytes allocated when the model is compiled (parameters, its inputs, and optimizer state and gradients if
            they exist by then) and those that forward and backward allocate, gradients included. `reserve_gib` covers
            later allocations, such as the state that an optimizer makes in its first step. A limit that cannot be met
            is a PeakUnreachableError, which names the lowest that can.
        reserve_gib: GiB that `peak_gib` leaves free for allocations after the model is compiled.
        same_on_ranks: under `peak_gib`, plan by the bytes of that rank of the default process group that has most
            allocated when the model is compiled, so that equal graphs have one plan on every rank. Every rank has to
            compile the same frames in the same order, as pipeline stages do not. By default each plans by its own
            bytes: plans that differ still meet, as communication is never recomputed.
        offload: which saved values wait in pinned main memory from forward to backward: "none"; "inputs", the values
            that pass from layer to layer; or "all".
        fp8_wrapper: which checkpoint `apply_checkpoints` calls a block with Transformer Engine's modules through:
            "auto", Transformer Engine's where its fp8 is in force and torch's elsewhere; "te_checkpoint", Transformer
            Engine's wherever a block holds its modules; "none", torch's, which is an error where fp8 is in force.
            Compiled code calls no block through a checkpoint.

    Raises BadOptionError for a value outside its domain, and for `budget` and `peak_gib` together.

    Source of the idea: Korthikanti et al., arXiv:2205.05198; of the mechanism: `torch.utils.checkpoint`'s
    `CheckpointPolicy` tags, which torch's partitioner obeys.
    """

    ablock: str | float = "selective"
    mblock: str | float = "selective"
    eblock: str | float = "selective"
    rblock: str | float = "selective"
    recompute: tuple[str, ...] = ()
    last_layer: str = "never"
    depth_loop: str = "full"
    stream_group: int | None = None
    recompute_kv_upproj: bool = True
    recompute_q_upproj: bool = False
    budget: float | None = None
    peak_gib: float | None = None
    reserve_gib: float = 0.0
    same_on_ranks: bool = False
    offload: str = "none"
    fp8_wrapper: str = "auto"

    def __post_init__(self) -> None:
        for kind in KINDS:
            entry = getattr(self, kind)
            valid = [*(e for e in ENTRIES if _ONLY.get(e, kind) == kind), "never"]
            wanted = "a fraction from 0 to 1, or one of " + ", ".join(map(repr, valid))
            fraction = _is_fraction(entry)
            checks.fits(f"policy.{kind}", entry, fraction or entry in valid, wanted, valid)
            checks.settle(self, **{kind: float(entry) if fraction else entry})
        names = (self.recompute,) if isinstance(self.recompute, str) else self.recompute
        wanted = f"names among {', '.join(map(repr, OPERATIONS))}"
        for name in checks.fits("policy.recompute", names, isinstance(names, (tuple, list)), wanted):
            checks.choice("policy.recompute", name, tuple(OPERATIONS))
        checks.settle(self, recompute=tuple(dict.fromkeys(names)))
        last = ("never", *(e for e in ENTRIES if e not in _ONLY))
        for name, choices in (
            ("last_layer", last), ("depth_loop", ("kinds", *last[1:])), ("offload", OFFLOADS),
            ("fp8_wrapper", FP8_WRAPPERS),
        ):  # fmt: skip
            checks.choice(f"policy.{name}", getattr(self, name), choices)
        group = self.stream_group is None or _is_group(self.stream_group)
        checks.fits("policy.stream_group", self.stream_group, group, "a number of layers, -1 or None")
        if self.budget is not None:
            checks.fits("policy.budget", self.budget, _is_fraction(self.budget), "a fraction from 0 to 1")
            checks.settle(self, budget=float(self.budget))
        if (peak := self.peak_gib) is not None:
            checks.fits("policy.peak_gib", peak, _is_size(peak) and peak != 0, "GiB, a number above 0")
            checks.fits("policy.peak_gib", peak, self.budget is None, "None, as policy.budget is given, too")
            checks.settle(self, peak_gib=float(peak))
        checks.fits("policy.reserve_gib", self.reserve_gib, _is_size(self.reserve_gib), "GiB, a number from 0")
        checks.settle(self, reserve_gib=float(self.reserve_gib))
        for name in ("recompute_kv_upproj", "recompute_q_upproj", "same_on_ranks"):
            checks.boolean(f"policy.{name}", getattr(self, name))

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
            return checks.plan(cls, "policy", value)
        raise BadOptionError(
            "policy",
            value,
            "a CheckpointingPolicy, its fields, a fraction from 0 to 1, or one of " + ", ".join((AUTO, *ENTRIES)),
            (AUTO, *ENTRIES),
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain containers, fit for `of` and JSON."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**found, "recompute": list(self.recompute)}

    def entry(self, kind: str, last: bool, repeated: bool = False) -> str:
        """The entry in force for a block of `kind`: "none" for one of no kind, "never" under a budget, where the
        solver starts. last: whether the block is in the last layer; repeated: whether it is in a loop over depth."""
        given = getattr(self, kind) if kind in KINDS else "none"
        solved = self.budget is not None or self.peak_gib is not None
        if isinstance(given, float) or solved and kind in KINDS and given == "selective":
            return "never"
        entry: str = self.depth_loop if repeated and given == "selective" and self.depth_loop != "kinds" else given
        # "never" takes back what the kind's entry recomputes; over "none" there is nothing to take back.
        return self.last_layer if last and (self.last_layer != "never" or entry != "none") else entry

    def again(self, operation: str, last: bool) -> bool:
        """Whether `recompute` has `operation` recomputed. last: as in `entry`."""
        return operation in self.recompute and not (last and self.last_layer == "never")

    def of_last_layer(self) -> CheckpointingPolicy:
        """The policy for a graph that is the last layer alone: what `entry` and `again` say of that for every kind."""
        if self.budget is not None or self.peak_gib is not None:
            return self
        entries = {k: self.entry(k, True) for k in KINDS if not isinstance(getattr(self, k), float)}
        again = tuple(operation for operation in self.recompute if self.again(operation, True))
        return replace(self, recompute=again, **entries)  # type: ignore[arg-type]

    def asked(self, kind: str, last: bool, repeated: bool = False) -> str:
        """`entry` for reports: a budget as its fraction, a limit in GiB."""
        given = getattr(self, kind)
        if isinstance(given, float):
            return f"{given:g}"
        if given == "selective" and self.budget is not None:
            return f"{self.budget:g}"
        if given == "selective" and self.peak_gib is not None:
            return f"{self.peak_gib:g} GiB"
        return self.entry(kind, last, repeated)

    def solves(self) -> bool:
        """Whether a budget or a limit has to be met."""
        return bool(self.budgets()) or self.peak_gib is not None

    def budgets(self) -> list[tuple[str | None, float]]:
        """(kind, or None for the whole model; fraction) of every budget."""
        kinds: list[tuple[str | None, float]] = [(k, v) for k in KINDS if isinstance(v := getattr(self, k), float)]
        return kinds + ([(None, self.budget)] if self.budget is not None else [])


def _is_fraction(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _is_group(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value > 0)


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


@dataclass(frozen=True, slots=True)
class AutoPolicy:
    """`policy={"auto": time}`: as "auto", where recomputing may take this fraction of a step's predicted time."""

    time: float

    def __post_init__(self) -> None:
        checks.fits("policy.auto", self.time, _is_fraction(self.time), "a fraction of a step's time, from 0 to 1")
        checks.settle(self, time=float(self.time))

    def to_dict(self) -> dict[str, float]:
        return {AUTO: self.time}


def policy_option(value: Any) -> CheckpointingPolicy | AutoPolicy | Literal["auto"] | None:
    """The option `policy`: "auto", or with a fraction of time an `AutoPolicy`; None for None and "none", which leave
    all of a frame to torch's partitioner; else what `CheckpointingPolicy.of` makes of it, whose error it raises."""
    if isinstance(value, AutoPolicy) or isinstance(value, str) and value == AUTO:
        return value  # type: ignore[return-value]
    if isinstance(value, Mapping) and AUTO in value:
        checks.fits("policy", dict(value), len(value) == 1, "fields of CheckpointingPolicy, or 'auto' by itself")
        return AutoPolicy(value[AUTO])
    if isinstance(value, str) and value == "none":
        return None
    return CheckpointingPolicy.of(value)
