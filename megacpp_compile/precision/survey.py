"""Compares a model with a `PrecisionPlan`: what the plan asks of each linear, what rules that out, and what the linear
computes in now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megacpp_compile.config.precision import DEFAULT_EXCLUSIONS, PrecisionPlan
from megacpp_compile.config.roles import role_of
from megacpp_compile.config.rules import modules_with_weights
from megacpp_compile.errors import PlanMismatchError
from megacpp_compile.lowerings._gemm.float8_support import FP8_GEMM_ALIGNMENT
from megacpp_compile.precision import engine
from megacpp_compile.targets import family

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
          "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """One linear of a model.

    Attributes:
        fqn: its name.
        module: its class.
        role: one of `roles.ROLES`.
        shape: (out features, in features).
        requested: recipe the plan asks for.
        effective: recipe it has to hold; "bf16" (its own dtype) where `reason` rules out the one asked for.
        rule: what asks for it: a pattern of the plan, or "role attention".
        reason: what rules it out, "" if nothing does.
        holds: recipe it computes in now; "autocast" for a module of Transformer Engine that follows its context.
        found: the linear itself.
    """

    fqn: str
    module: str
    role: str
    shape: tuple[int, int]
    requested: str
    effective: str
    rule: str
    reason: str
    holds: str
    found: nn.Module = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """All but `found` as plain containers."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "found"}
        return {**values, "shape": list(self.shape)}


def survey(
    plan: PrecisionPlan, model: nn.Module, exclude: Sequence[str] = DEFAULT_EXCLUSIONS, target: str = "auto"
) -> list[Found]:
    """Every linear module of `model`, in order; one that two names reach is there twice.

    exclude, target: as in `replace_linears`. Raises RuleWithoutHitError for a rule of the plan, or a pattern of
    `exclude` beside the defaults, that hits no module with a weight.
    """
    plan.check_hits(modules_with_weights(model), [pattern for pattern in exclude if pattern not in DEFAULT_EXCLUSIONS])
    nowhere = why_bf16(model, target)
    ties = _Ties(model)
    found = []
    for fqn, module, parents in _linears(model):
        role = role_of(fqn, [type(p).__name__ for p in parents], tuple(parents[0]._modules) if parents else ())
        shape = (module.out_features, module.in_features)
        decision = plan.decide(fqn, role, (None, *shape), exclude)
        reason = decision.excluded and f"excluded by {decision.excluded!r}"
        if not reason and decision.requested != "bf16":
            reason = nowhere or decision.reason or _unfit(module, parents[0], ties)
        holds = getattr(module, "recipe", "autocast") if engine.is_of_transformer_engine(module) else "bf16"
        effective = "bf16" if reason else decision.requested
        name = type(module).__name__
        found.append(
            Found(fqn, name, role, shape, decision.requested, effective, decision.rule, reason, holds, module)
        )
    return found


def assert_plan(
    plan: PrecisionPlan, model: nn.Module, exclude: Sequence[str] = DEFAULT_EXCLUSIONS, target: str = "auto"
) -> None:
    """Raise PlanMismatchError, which lists the differences, unless every linear module of `model` holds the recipe that
    the plan and the limits of a replacement give it.

    exclude, target: as in `replace_linears`. This looks at modules; what a compiled graph runs in is in the report of
    its frame. Raises RuleWithoutHitError as `survey`.
    """
    lines = []
    for f in survey(plan, model, exclude, target):
        if f.holds != f.effective:
            why = f" ({f.reason})" if f.reason else ""
            lines.append(f"{f.fqn}: the plan says {f.effective} by {f.rule}{why}, {f.module} holds {f.holds}")
    if lines:
        raise PlanMismatchError(lines)


def manifest(
    plan: PrecisionPlan, model: nn.Module, exclude: Sequence[str] = DEFAULT_EXCLUSIONS, target: str = "auto"
) -> str:
    """The plan as JSON with a `Found` for every linear of `model`; `PrecisionPlan.from_manifest` reads the plan back.

    exclude, target: as in `replace_linears`. Raises RuleWithoutHitError as `survey`.
    """
    return plan.manifest_with([found.to_dict() for found in survey(plan, model, exclude, target)])


def why_bf16(model: nn.Module, target: str = "auto") -> str:
    """Why no linear of `model` can run in fp8 by Transformer Engine's modules, "" if some can. target: "auto" goes by
    the device of the parameters; "cuda" is for a model that is to be moved there."""
    if target == "auto":
        kinds = {p.device.type for p in model.parameters()} - {"meta"}
        target = family(kinds).name if kinds else "cuda"
    return "" if target == "cuda" else f"target {target}: no float8 here"


def _linears(model: nn.Module) -> Iterator[tuple[str, Any, list[nn.Module]]]:
    """(name, module, modules around it with the innermost first) of `nn.Linear`s and Transformer Engine's."""
    every = dict(model.named_modules(remove_duplicate=False))
    for fqn, module in every.items():
        ours = engine.is_of_transformer_engine(module) and hasattr(module, "in_features") and hasattr(module, "weight")
        if isinstance(module, nn.Linear) or ours:
            parts = fqn.split(".")
            above = [every[".".join(parts[:i])] for i in range(len(parts) - 1, 0, -1)]
            yield fqn, module, [*above, model]


def _unfit(module: nn.Module, parent: nn.Module, ties: _Ties) -> str:
    """Why a linear cannot be replaced, the most general reason first; "" where it can."""
    if parent is module:
        return "the model itself: there is no module to put another one in"
    replaced = hasattr(module, "recipe")
    if type(module) is not nn.Linear and not replaced:
        return f"{type(module).__name__} is not nn.Linear itself: its forward may differ"
    if any(getattr(module, name) for name in HOOKS):
        return "has hooks, which would be lost"
    if "weight" not in module._parameters:
        return "its weight is computed (a parametrisation)"
    names = (*parent._modules, *parent._parameters, *module._parameters)
    if any("lora" in name.lower() for name in names):
        return "wrapped by LoRA"
    if tied := ties.of(module):
        return tied
    if type(module.weight) is not nn.Parameter:
        return f"its weight is a {type(module.weight).__name__}: linears are to be replaced before sharding"
    if module.weight.dtype not in _DTYPES:
        return f"weight in {module.weight.dtype}"
    if any(size % FP8_GEMM_ALIGNMENT for size in module.weight.shape):
        out, inner = module.weight.shape
        return f"{out}x{inner}: fp8 takes multiples of {FP8_GEMM_ALIGNMENT}"
    return ""


class _Ties:
    """Which parameters have several names, or share their memory with others."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters(remove_duplicate=False))
        self.objects = Counter(id(p) for _, p in named)
        distinct = {id(p): p for _, p in named}
        self.addresses = Counter(filter(None, map(self._address, distinct.values())))

    @staticmethod
    def _address(p: torch.Tensor) -> tuple[int, Any] | None:
        try:
            return p.untyped_storage()._cdata, p.storage_offset()
        except (NotImplementedError, RuntimeError):  # wrapper tensors may have none
            return None

    def of(self, module: nn.Module) -> str:
        """Which of the module's own parameters is tied, as a reason; "" where none is."""
        for name, p in module.named_parameters(recurse=False):
            address = self._address(p)
            if self.objects[id(p)] > 1 or (address is not None and self.addresses[address] > 1):
                return f"{name} is tied: another name holds it too"
        return ""
