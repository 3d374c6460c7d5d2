"""`fit`: compile a model so that its training step fits into the memory there is, at the least cost in time.

Policies are tried in the order of their cost: none, cheap pointwise work recomputed, projections from a latent, whole
blocks (those without attention first), offload to main memory. Each is estimated on fake tensors, as `estimate` does;
the first that fits is compiled. Where the step still runs out of memory, `Fit.run` compiles the next one.
"""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, TypeVar

import torch
from torch import nn

from megacpp_compile.config.checkpointing import KINDS, CheckpointingPolicy
from megacpp_compile.config.options import Config, given_options
from megacpp_compile.errors import BadOptionError, FitError
from megacpp_compile.memory.estimate import Estimate, estimate
from megacpp_compile.passes._driver import pass_names
from megacpp_compile.regional.compile import compile, uncompile
from megacpp_compile.remat.across_ranks import of_ranks
from megacpp_compile.report import collector, log
from megacpp_compile.report.tables import table_text
from megacpp_compile.report.text import bytes_text

Result = TypeVar("Result")

# Entries that keep less and less; of those not here the user knows better.
_RANKS = {entry: i for i, entry in enumerate(("none", "selective", "full", "full_plus_norms"))}
# From cheap to expensive to recompute.
_ORDER = ("eblock", "mblock", "rblock", "ablock")
# Of a device's memory, what is left to the allocator's gaps where no limit is given.
_USABLE = 0.92
_SHORT_OF_MEMORY = re.compile(r"(CUDA|Triton) (error|Error).*: out of memory|_STATUS_ALLOC_FAILED")


@dataclasses.dataclass(frozen=True)
class PolicyCandidate:
    """A policy to try. name: what it recomputes, in words. estimate: its memory; None where it was not estimated."""

    name: str
    policy: CheckpointingPolicy | None
    estimate: Estimate | None = None


class Fit:
    """A model compiled to fit. `str(fit)` says which lever it is and why.

    Attributes:
        model: the model, compiled in place.
        limit: bytes.
        lever: what is in force.
        tried: the levers looked at, in order, `lever` among them.
    """

    def __init__(
        self, model: nn.Module, limit: int, settings: Mapping[str, Any], tried: list[PolicyCandidate],
        left: Iterator[PolicyCandidate], present: Set[str],
    ) -> None:  # fmt: skip
        self.model, self.limit, self.tried = model, limit, tried
        self._settings, self._left, self._present = dict(settings), left, present
        self._out_of_memory: list[str] = []
        self._compile()

    @property
    def lever(self) -> PolicyCandidate:
        return self.tried[-1]

    @property
    def policy(self) -> CheckpointingPolicy | None:
        """What is in force, to be given to another run as it is."""
        return self.lever.policy

    def run(self, step: Callable[[], Result]) -> Result:
        """Run `step()`; each time it is out of memory, compile the next policy and run it again.

        A step may be run again, so it is not to add to gradients of an earlier one: those that it made itself are
        dropped before. Its optimizer is best left out: no lever helps where that runs out of memory, and an update that
        was begun is not repeated. Raises the error of memory there, and where no lever is left.
        """
        while True:
            before = [(p, p._version, p.grad is None) for p in self.model.parameters()]
            try:
                return step()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if any(p._version != version for p, version, _ in before):
                    error.add_note("parameters had been updated by then: the step is not run again")
                    raise
                if not self.retry():
                    raise
            # Behind the handler, as the error's traceback holds all that the step had made.
            for parameter, _, bare in before:
                if bare:
                    parameter.grad = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def retry(self) -> bool:
        """Go one lever on and compile anew; False, and nothing done, where none is left."""
        further = (lever for lever in self._left if matters(lever.policy, self.policy, self._present))
        following = next(further, None)
        if following is None:
            return False
        self._out_of_memory.append(self.lever.name)
        log.logger.warning("out of memory under %r: one lever on, to %r", self.lever.name, following.name)
        self.tried.append(following)
        uncompile(self.model)
        # What was compiled before counts against Dynamo's limit, beyond which a model runs in eager and keeps all.
        torch.compiler.reset()
        self._compile()
        return True

    def _compile(self) -> None:
        options = {**self._settings.get("options", {}), "policy": self.policy}
        compile(self.model, **{**self._settings, "options": options})
        collector.emit_estimate(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, fit for JSON."""
        return {
            "limit": self.limit,
            "lever": self.lever.name,
            "policy": self.policy.to_dict() if self.policy else None,
            "out_of_memory": list(self._out_of_memory),
            "tried": [{"lever": t.name, "estimate": t.estimate and t.estimate.to_dict()} for t in self.tried],
        }

    def __str__(self) -> str:
        rows = []
        for lever in self.tried:
            peak = lever.estimate.peak if lever.estimate else None
            why = "in force" if lever is self.lever else "too much"
            if lever.name in self._out_of_memory:
                why = "out of memory"
            rows.append((lever.name, bytes_text(peak), why))
        title = f"fitted into {bytes_text(self.limit)}"
        return table_text(title, ("lever", "estimated peak", ""), rows)


def fit(
    model: nn.Module,
    *args: Any,
    limit_gib: float | None = None,
    options: Mapping[str, Any] | Config | None = None,
    settings: Mapping[str, Any] | None = None,
    optimizer: str | float = "adamw",
    device: str | torch.device | None = None,
    group: Any = None,
    **kwargs: Any,
) -> Fit:
    """Compile `model` in place with the cheapest policy under which a training step fits into `limit_gib`.

    model, args, kwargs: as in `estimate`; only shapes, dtypes and devices of inputs matter.
    limit_gib: GiB for all of parameters, gradients, optimizer state and activations; by default what the CUDA device
        has (of which the process may be allowed a fraction), less a twelfth.
    options: fields of `Config`, or one. A "policy" among them is where the search begins: no entry is ever weakened.
    settings: further arguments of `compile`, such as mode, blocks or rest.
    optimizer, device: as in `estimate`.
    group: a process group of torch.distributed, each of whose ranks calls `fit`: all take the policy of the rank that
        needs the costliest. What a step that is out of memory changes later, it changes on its own rank.

    Raises FitError where no lever is enough (on any rank of `group`: on all of them), and the errors of `estimate` and
    `compile`.
    """
    config = Config.from_options(options, pass_names())
    limit = _limit(limit_gib)
    given = {**(settings or {}), "options": given_options(options)}
    candidates = list(policy_candidates(config.own_policy))
    enough = len(candidates)
    tried: list[PolicyCandidate] = []
    present: set[str] = set(KINDS)
    for at, lever in enumerate(candidates):
        if not matters(lever.policy, tried[-1].policy if tried else None, present) and tried:
            continue
        # What nothing is asked of is estimated all the same, as the graph's own partitioner leaves it.
        policy = lever.policy or CheckpointingPolicy.of("none")
        found = estimate(model, *args, optimizer=optimizer, device=device,
                         options={**given["options"], "policy": policy}, **kwargs)  # fmt: skip
        present = set(found.levers) & set(KINDS) or present
        tried.append(dataclasses.replace(lever, estimate=found))
        if found.peak <= limit:
            enough = at
            break
    peaks = {lever.name: lever.estimate.peak for lever in tried if lever.estimate}
    lowest = min(peaks, key=peaks.__getitem__)
    chosen, short_of, needed, by = max(of_ranks((enough, limit, peaks[lowest], lowest), group))
    if chosen == len(candidates):
        raise FitError(short_of, needed, by)
    if chosen > enough:
        tried.append(candidates[chosen])  # another rank's
    return Fit(model, limit, given, tried, iter(candidates[chosen + 1 :]), present)


def policy_candidates(start: CheckpointingPolicy | None) -> Iterator[PolicyCandidate]:
    """Policies from `start` on, each of which keeps no more on the device than the one before it."""
    yield PolicyCandidate("as given" if start else "none", start)
    policy = start or CheckpointingPolicy(**dict.fromkeys(KINDS, "none"), recompute_kv_upproj=False)  # type: ignore
    policy = _raised(policy, "selective")
    yield PolicyCandidate("selective", policy)
    policy = dataclasses.replace(policy, recompute_kv_upproj=True)
    yield PolicyCandidate("selective, keys and values from the latent", policy)
    policy = dataclasses.replace(policy, recompute_q_upproj=True)
    yield PolicyCandidate("selective, queries from the latent too", policy)
    done: list[str] = []
    for kind in _ORDER:
        done.append(kind)
        policy = _raised(policy, "full", (kind,))
        yield PolicyCandidate(f"full: {', '.join(done)}", policy)
    if policy.last_layer not in ("full", "full_plus_norms"):
        policy = dataclasses.replace(policy, last_layer="full")
        yield PolicyCandidate("full, the last layer too", policy)
    policy = dataclasses.replace(_raised(policy, "full_plus_norms"), last_layer="full_plus_norms")
    yield PolicyCandidate("full, norms too", policy)
    if policy.offload == "none":
        yield PolicyCandidate(
            "full, what passes between layers in main memory", dataclasses.replace(policy, offload="inputs")
        )


def _raised(policy: CheckpointingPolicy, entry: str, kinds: tuple[str, ...] = KINDS) -> CheckpointingPolicy:
    """`policy` with `entry` for those of `kinds` that keep more. A budget, and what concerns some operations of a kind
    alone, is the user's own word."""
    weaker: dict[str, Any] = {k: entry for k in kinds if _RANKS.get(getattr(policy, k), len(_RANKS)) < _RANKS[entry]}
    return dataclasses.replace(policy, **weaker)


def matters(policy: CheckpointingPolicy | None, before: CheckpointingPolicy | None, present: Set[str]) -> bool:
    """Whether anything differs for the kinds of block there are."""
    if policy is None or before is None:
        return policy is not before
    one, other = policy.to_dict(), before.to_dict()
    belongs = {"recompute_kv_upproj": "ablock", "recompute_q_upproj": "ablock"} | {kind: kind for kind in KINDS}
    return any(one[k] != other[k] for k in one if k not in belongs or belongs[k] in present)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory is what was short: torch's own error, that error inside of one of its compiler's, or
    what libraries say that allocate by themselves (cuBLAS, cuDNN, Triton's launcher)."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, torch.OutOfMemoryError) or _SHORT_OF_MEMORY.search(str(chain)):
            return True
        chain = getattr(chain, "inner_exception", None) or chain.__cause__
    return False


def _limit(limit_gib: float | None) -> int:
    if limit_gib is None and torch.cuda.is_available():
        allowed: Callable[[], float] = getattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)
        return int(_USABLE * allowed() * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    if isinstance(limit_gib, bool) or not isinstance(limit_gib, (int, float)) or limit_gib <= 0:
        raise BadOptionError("limit_gib", limit_gib, "GiB, a number above 0")
    return int(limit_gib * 2**30)
