"""Which lowerings an op has, which one a call site gets, and why.

An op's folder holds one file per target; a lowering is a function with the op's arguments that traces to the target's
own ops. Capability is asked of the lowering, on fake arguments. The order of preference is the target's
(`targets.Target.lowerings`) unless the folder defines its own as PREFERENCE; where the reference is to serve a target,
the folder's REFERENCE_SERVES says why. Other packages register lowerings, of these ops and of their own
(`lowerings/_registered.py`), which are asked first.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import torch

import megacpp_compile.lowerings as package
from megacpp_compile._torch.pytree import tree_leaves
from megacpp_compile.config import registered
from megacpp_compile.fx.edit import arguments
from megacpp_compile.targets import TARGETS

GROUP = "megacpp.ops"
# The key of an op node's meta where what it lowers to takes its place ahead of autograd (`Choice.ahead`).
AHEAD = "megacpp_ahead"


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a call site asked for and got. `reason` is empty where the two agree.

    `overwrites`: the arguments whose memory `body` returns its result in, if called with `in_place=True`. `traced`: a
    lowered graph holds the ops that `body` traces to; else it calls `body`, or on CUDA keeps the op, which calls it.
    `writes_into`: outputs that may be written straight into a slice of a later `cat`, whose buffer is passed as `into`
    and returned for them. Several have to fill it.
    `skippable_outputs`: the results that `body` does not make, and returns as empty, where `unread` has them. `added`:
    it is another package's. `ahead`: autograd is to differentiate what it traces to, where the graph is to be.
    """

    requested: str
    effective: str
    reason: str
    body: Callable[..., Any]
    overwrites: tuple[int, ...] = ()
    traced: bool = True
    writes_into: tuple[int, ...] = ()
    skippable_outputs: tuple[int, ...] = ()
    added: bool = False
    ahead: bool = False


@dataclasses.dataclass(frozen=True)
class Added:
    """A lowering of `op` that another package has registered. supports: says why it cannot serve a call with these
    arguments."""

    op: Any
    name: str
    body: Callable[..., Any]
    supports: Callable[..., str | None] | None

    def __call__(self, *args: Any) -> Any:
        return self.body(*arguments(self.op, args).values())


# (op, target) -> what other packages have registered, in this order.
ADDED: dict[tuple[Any, str], tuple[Added, ...]] = {}


def load_added() -> None:
    """Load the modules of entry points `megacpp.ops`, on the first call; they register what they define."""
    registered.load(GROUP, lambda _: None)


@functools.cache
def semantic_ops() -> dict[Any, tuple[str, str]]:
    """Every `megacpp::` op (forward and backward) -> (its folder, its name). Importing the folders registers them.

    An op of another package that has a lowering has no folder, and its qualified name.
    """
    load_added()
    ops = {op: ("", op.name()) for op, _ in ADDED}
    for folder in (m.name for m in pkgutil.iter_modules(package.__path__) if m.ispkg and not m.name.startswith("_")):
        module = importlib.import_module(f"{package.__name__}.{folder}")
        for name in vars(module):
            if isinstance(getattr(module, name), torch.library.CustomOpDef):
                ops[getattr(torch.ops.megacpp, name).default] = (folder, name)
    return ops


def preference(folder: str, target: str) -> tuple[str, ...]:
    """The names of an op's lowerings on `target` in order of preference, whether there are such files or not."""
    if reference_serves(folder, target):
        return ("reference",)
    own = getattr(importlib.import_module(f"{package.__name__}.{folder}"), "PREFERENCE", {})
    return own.get(target, TARGETS[target].lowerings)


def reference_serves(folder: str, target: str) -> str | None:
    """Why the reference serves on `target`, as the op's folder says; None where another lowering is preferred."""
    return getattr(importlib.import_module(f"{package.__name__}.{folder}"), "REFERENCE_SERVES", {}).get(target)


def choose(op: Any, target: str, args: Sequence[Any]) -> Choice:
    """The lowering of `op` on `target` for a call with (fake) `args`.

    A lowering file may define `supports(op name, args) -> reason or None`; the first one without an objection serves.
    Policy beside it: `MIN_BYTES`, the size of the largest operand from which it gains, and `loses(op name, args) ->
    reason or None`; where it would not gain, the next lowering serves. `OVERWRITES`: op name -> arguments it can
    overwrite. `TRACED`: false where no ATen graph can hold what it does. `writes_into(op name, args)`: results it can
    write to columns of a joined tensor (`_kernels/columns`). `SKIPPABLE_OUTPUTS`: op name -> results that it need not
    make. `AHEAD`: true where autograd's backward of the forward takes less time than the op's own.
    """
    folder, name = semantic_ops()[op]
    reasons: list[str] = []
    added = ADDED.get((op, target), ())
    if added and (served := _by_added(added, args, reasons)) is not None:
        return served
    if not folder:
        return Choice(added[0].name if added else name, name, "; ".join(reasons), op, traced=False)
    wanted = preference(folder, target)
    first = added[0].name if added else wanted[0]
    for lowering in wanted:
        try:
            module = importlib.import_module(f"{package.__name__}.{folder}.{lowering}")
        except ModuleNotFoundError as missing:
            own = (missing.name or "").startswith(package.__name__)
            why = "" if own else f" without {missing.name}"
            reasons.append(f"no-lowering: {folder} has no {lowering}{why}")
            continue
        objections = (getattr(module, asked, None) for asked in ("supports", "loses"))
        reason = _untaken(getattr(module, name, None), args)
        reason = reason or next((r for objects in objections if objects and (r := objects(name, args))), None)
        reason = reason or _too_small(args, getattr(module, "MIN_BYTES", 0))
        if reason is None:
            overwrites = getattr(module, "OVERWRITES", {}).get(name, ())
            traced = getattr(module, "TRACED", True)
            into = module.writes_into(name, args) if hasattr(module, "writes_into") else ()
            without = getattr(module, "SKIPPABLE_OUTPUTS", {}).get(name, ())
            why, body = "; ".join(reasons), getattr(module, name)
            ahead = getattr(module, "AHEAD", False)
            return Choice(first, lowering, why, body, overwrites, traced, into, without, ahead=ahead)
        reasons.append(f"{lowering}: {reason}")
    raise AssertionError("every op has a reference lowering")


def _by_added(added: Sequence[Added], args: Sequence[Any], reasons: list[str]) -> Choice | None:
    """The first of other packages' lowerings that serves a call, None where none does: `reasons` then says why."""
    for one in added:
        try:
            reason = one.supports(*arguments(one.op, args).values()) if one.supports is not None else None
        except Exception as error:
            reason = f"its 'supports' fails: {type(error).__name__}: {error}".splitlines()[0]
        if not reason:
            return Choice(added[0].name, one.name, "; ".join(reasons), one, added=True)
        reasons.append(f"{one.name}: {reason}")
    return None


def _untaken(body: Callable[..., Any] | None, args: Sequence[Any]) -> str | None:
    """Why a lowering that knows fewer arguments than a call has cannot serve it, or None: an op's optional arguments
    may be newer than its lowerings."""
    taken = inspect.signature(body).parameters.values() if body is not None else []
    if body is None or any(p.kind is p.VAR_POSITIONAL for p in taken) or len(args) <= len(taken):
        return None
    return f"it takes {len(taken)} of the call's {len(args)} arguments"


def _too_small(args: Sequence[Any], least: int) -> str | None:
    """Why operands below `least` bytes do not gain, or None: a kernel of its own costs a launch, which Inductor's
    fusion saves where there is little to move."""
    if not least:  # asked at every call that is not in a graph
        return None
    tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
    sizes = [t.numel() * t.element_size() for t in tensors]
    if not all(isinstance(n, int) for n in sizes) or max(sizes) >= least:
        return None
    return f"small: {max(sizes) / 2**20:.1f} MiB, of use from {least >> 20} MiB"
