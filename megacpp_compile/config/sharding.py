"""`ShardingPlan`: how each parameter is laid out over a mesh of XLA devices. Frozen, checked, hashable.

    rules = {"*.q_b.weight": ("model", None), "*.o.weight": (None, "model")}
    plan = ShardingPlan(mesh={"data": 1, "model": 4}, rules=rules)

A partition spec has an entry for each dimension: the mesh axis it is cut over, a tuple of several, or None; the spec
None is a whole copy on every device (GSPMD, arXiv:2105.04663). `megacpp_compile.sharding` pins tensors to the specs;
XLA's sharding propagation does not decide about pinned ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megacpp_compile.config import checks, globs
from megacpp_compile.config._deprecated import moved
from megacpp_compile.errors import BadOptionError, RuleWithoutHitError, ShardingError
from megacpp_compile.report.records import Pinned

if TYPE_CHECKING:
    import torch
    from torch import nn

Entry = None | str | tuple[str, ...]
Spec = tuple[Entry, ...] | None

_FIELDS = ("mesh", "rules", "batch", "devices")


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """A partition spec for every parameter, by its name.

    Attributes:
        mesh: (axis, number of devices) pairs, or a mapping; their product is the number of devices.
        rules: (glob over parameter names, spec) pairs, or a mapping; the first that matches the whole of a name wins.
            `globs` defines the patterns.
        batch: axes of the mesh that the batch is cut over. A parameter cut over one of them is gathered where it is
            used, once in forward and once in backward, and its gradient is cut like the parameter (FSDP,
            arXiv:2304.11277); otherwise XLA may gather the activations instead. `sharding.pin` pins the batch itself.
        devices: the runtime's numbers of the devices, in the mesh's row-major order; ascending when empty.

    Raises BadOptionError for a mesh without axes or with an axis twice, axes the mesh lacks, a pattern given twice, a
    spec that is none, and devices that are not each number once.
    """

    mesh: tuple[tuple[str, int], ...]
    rules: tuple[tuple[str, Spec], ...] = ()
    batch: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        mesh = globs.pairs("sharding.mesh", self.mesh, "int")
        for axis, size in mesh:
            count = isinstance(size, int) and not isinstance(size, bool) and size >= 1
            checks.fits(f"sharding.mesh[{axis!r}]", size, count, "a number of devices, 1 or more")
        once = mesh and len(dict(mesh)) == len(mesh)
        checks.fits("sharding.mesh", self.mesh, once, "at least one axis, each once")
        batch = (self.batch,) if isinstance(self.batch, str) else _several("sharding.batch", self.batch, "axes")
        for axis in batch:
            wanted = "axes of the mesh: " + ", ".join(map(repr, dict(mesh)))
            checks.fits("sharding.batch", axis, axis in dict(mesh), wanted, tuple(dict(mesh)))
        rules = globs.rules("sharding.rules", self.rules, "partition spec", "parameter names", "*.q_b.weight")
        count = math.prod(dict(mesh).values())
        devices = _several("sharding.devices", self.devices, "device numbers") or tuple(range(count))
        each = set(devices) == set(range(count)) and len(devices) == count
        checks.fits("sharding.devices", self.devices, each, f"each of 0 to {count - 1} once, as the mesh is")
        checks.settle(self, mesh=mesh, batch=batch, devices=devices)
        checks.settle(self, rules=tuple((p, self.checked(f"sharding.rules[{p!r}]", spec)) for p, spec in rules))

    @classmethod
    def of(cls, value: Any) -> ShardingPlan | None:
        """A plan from itself, None, or a mapping of fields. Raises BadOptionError for anything else."""
        if value is None or isinstance(value, cls):
            return value
        plain = isinstance(value, Mapping)
        checks.fits("sharding", value, plain, "a ShardingPlan, or a mapping with 'mesh' and 'rules'")
        complete = "mesh" in value or not {*value} <= {*_FIELDS}  # an unknown field is told first
        checks.fits("sharding", value, complete, "a mapping with 'mesh', as in {'data': 1, 'model': 4}")
        return checks.plan(cls, "sharding", value)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain containers, fit for `of` and JSON."""
        rules = [[p, s and [list(e) if isinstance(e, tuple) else e for e in s]] for p, s in self.rules]
        mesh = [list(axis) for axis in self.mesh]
        return {"mesh": mesh, "rules": rules, "batch": list(self.batch), "devices": list(self.devices)}

    def checked(self, key: str, spec: Any) -> Spec:
        """`spec` as tuples. key: the option, for messages. Raises BadOptionError for what is no spec, names an axis the
        mesh lacks, or names one twice."""
        axes = tuple(dict(self.mesh))
        wanted = "a tuple with an axis of the mesh (" + ", ".join(map(repr, axes)) + "), several, or None a dimension"
        if spec is None:
            return None
        if not isinstance(spec, list | tuple):
            raise BadOptionError(key, spec, f"{wanted}; or None for a whole copy on every device")
        entries = tuple(tuple(e) if isinstance(e, list | tuple) else e for e in spec)
        used = [axis for e in entries for axis in (e if isinstance(e, tuple) else (e,)) if axis is not None]
        for axis in used:
            checks.fits(key, axis, axis in axes, wanted, axes)
        checks.fits(key, spec, len(set(used)) == len(used), "every axis of the mesh once at most")
        return entries

    def decide(self, name: str) -> tuple[Spec, str]:
        """(spec, pattern that gives it) of the parameter `name`; (None, "") where no rule hits it."""
        pattern = globs.first_hit(dict(self.rules), name)
        return (dict(self.rules)[pattern], pattern) if pattern is not None else (None, "")

    def check_hits(self, parameters: Iterable[str]) -> None:
        """Raise RuleWithoutHitError for a rule that hits none of the names. parameters: all names there are."""
        known = list(parameters)
        for pattern in globs.without_hit(dict(self.rules), known):
            raise RuleWithoutHitError(pattern, known, "sharding", "parameter")

    def whole(self, name: str, shape: Iterable[int], spec: Spec) -> tuple[Entry, ...]:
        """`spec` with an entry for each dimension of `shape`; name: for messages.

        Raises ShardingError for another number of dimensions, or a size not divisible by its number of devices: XLA
        would pad it, and every collective with it.
        """
        sizes = tuple(shape)
        if spec is None:
            return (None,) * len(sizes)
        if len(spec) != len(sizes):
            problem = f"it has {len(sizes)} dimensions, {tuple(sizes)}, and the spec {len(spec)} entries"
            raise ShardingError(name, spec, problem, "Give an entry for each dimension, None for one that stays whole.")
        for i, (size, entry) in enumerate(zip(sizes, spec, strict=True)):
            over = entry if isinstance(entry, tuple) else (entry,)
            parts = math.prod(dict(self.mesh)[axis] for axis in over if axis is not None)
            if size % parts:
                problem = f"dimension {i} has {size} elements, not divisible by the {parts} devices of {entry!r}"
                raise ShardingError(name, spec, problem, "Cut another dimension, or change the mesh.")
        return spec

    def gathered(self, spec: Spec) -> Spec:
        """A parameter's `spec` where it is used: without the axes of the batch, over which it is gathered."""
        if spec is None:
            return None
        axes = ((e,) if isinstance(e, str) else e or () for e in spec)
        left = (tuple(axis for axis in found if axis not in self.batch) for found in axes)
        return tuple(found[0] if len(found) == 1 else found or None for found in left)

    def describe(self) -> str:
        """The mesh and the rules in words."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh)
        return "\n".join((f"sharding plan over {mesh}:", *(f"  {p} -> {text(spec)}" for p, spec in self.rules)))

    def pin(self, tensor: torch.Tensor, spec: Any, name: str = "") -> None:
        """Deprecated: `megacpp_compile.sharding.pin(plan, tensor, spec)`."""
        moved("ShardingPlan.pin", "sharding", "pin")(self, tensor, spec, name)

    def apply(self, model: nn.Module) -> tuple[Pinned, ...]:
        """Deprecated: `megacpp_compile.sharding.apply(plan, model)`."""
        pinned: tuple[Pinned, ...] = moved("ShardingPlan.apply", "sharding", "apply")(self, model)
        return pinned

    def constructing(self, fqn: str) -> AbstractContextManager[None]:
        """Deprecated: `megacpp_compile.sharding.constructing(plan, fqn)`."""
        replacement = moved("ShardingPlan.constructing", "sharding", "constructing")
        context: AbstractContextManager[None] = replacement(self, fqn)
        return context


def _several(key: str, value: Any, what: str) -> tuple[Any, ...]:
    return tuple(checks.fits(key, value, isinstance(value, list | tuple), f"a tuple of {what}"))


def text(spec: Spec) -> str:
    """A spec in words: "model, -" is cut in the first of two dimensions, "whole" in none."""
    if spec is None or not any(spec):
        return "whole"
    return ", ".join("-" if e is None else e if isinstance(e, str) else "+".join(e) for e in spec)
