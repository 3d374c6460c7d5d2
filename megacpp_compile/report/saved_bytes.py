"""Bytes a site keeps for backward, counted with torch's saved-tensor hooks on fake tensors.

Counted: every distinct storage autograd packs between the site's inputs and its outputs, with gradients asked for where
the call asks for them; of a checkpoint region, what its policy saves. Not counted: the inputs themselves (x, weights,
tables), which are alive anyway. Before: the plain subgraph in eager autograd. After: the op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.checkpoint import CheckpointPolicy

from megacpp_compile._torch.dispatch import enable_python_dispatcher
from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile._torch.pytree import tree_leaves
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.numbers_for_symbols import SYMBOLIC, with_numbers
from megacpp_compile.fx.subgraph import Part

SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def saved_bytes(part: Part, mode: FakeTensorMode, trained: Container[Node]) -> int | None:
    """Bytes saved by running `part` on values like those of its inputs; None where sizes are symbolic without a known
    value. trained: the nodes that a gradient flows to or through."""
    args = _leaves(part, mode, trained)
    counting = _Counting(part.module(), args, [n in trained for n in part.calls])
    # Sizes known only at run time (`nonzero`) get names here that no graph will ever mention.
    unnamed = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env else contextlib.nullcontext()
    hooks = torch.autograd.graph.saved_tensors_hooks(counting.pack, lambda t: t)
    # Without Python's own decompositions torch 2.9 asks for symbolic sizes as numbers, which they are from then on.
    with unnamed, mode, enable_python_dispatcher(), torch.enable_grad(), hooks:
        try:
            counting.run(*args)
        except _SizeUnknown:
            return None
    return sum(counting.kept.values())


def differentiable(part: Part, mode: FakeTensorMode, trained: Container[Node]) -> tuple[list[bool], set[Node]] | None:
    """(which outputs of `part` are differentiable, the inputs that get a gradient); None where sizes are symbolic
    without a known value. Raises what torch raises of an op without a gradient."""
    if not all(_has_hint(value(n)) for n in part.inputs):
        return None
    leaves = _leaves(part, mode, trained)
    asked = {n: t for n, t in zip(part.inputs, leaves, strict=True) if _differentiable(t)}
    with mode, enable_python_dispatcher(), torch.enable_grad():
        results = part.module()(*leaves)
        ends = [r for r in results if _differentiable(r)]
        given = [torch.empty_like(r) for r in ends]
        grads = torch.autograd.grad(ends, [*asked.values()], given, allow_unused=True) if ends else [None] * len(asked)
    return [*map(_differentiable, results)], {n for n, g in zip(asked, grads, strict=True) if g is not None}


def _differentiable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _leaves(part: Part, mode: FakeTensorMode, trained: Container[Node]) -> list[Any]:
    """Values for the inputs of `part`, as leaves."""
    values = [value(n) for n in part.inputs]
    with mode:
        if all(map(_has_hint, values)):  # with numbers for sizes it takes a tenth of the time, and nothing is guarded
            values = [with_numbers(v, lambda n: n.node.hint) for v in values]
        return [_leaf(v, n in trained) for v, n in zip(values, part.inputs, strict=True)]


class _Counting(Interpreter):
    """Runs a graph and notes the storages that are kept for its backward, but for those of its inputs."""

    def __init__(self, module: GraphModule, args: Sequence[Any], recorded: Sequence[bool]) -> None:
        super().__init__(module)
        calls = (n for n in module.graph.nodes if n.op not in ("placeholder", "output"))
        self.recorded = dict(zip(calls, recorded, strict=True))
        self.kept: dict[Any, int] = {}
        self.own = {_storage(a) for a in args if isinstance(a, torch.Tensor)}
        self.alive: list[torch.Tensor] = []  # storages are told apart by address, so none may be freed while counting
        self.region: CheckpointPolicy | None = None

    def run_node(self, n: Node) -> Any:
        self.region = n.meta.get("recompute")
        with torch.set_grad_enabled(self.recorded.get(n, True)):
            result = super().run_node(n)
        if self.region in SAVED:
            for t in tree_leaves(result):
                if isinstance(t, torch.Tensor) and t.requires_grad:
                    self.keep(t)
        return result

    def pack(self, t: torch.Tensor) -> torch.Tensor:
        if self.region is None:  # else computed again
            self.keep(t)
        return t

    def keep(self, t: torch.Tensor) -> None:
        if (key := _storage(t)) not in self.own:
            if (size := _bytes(t)) is None:
                raise _SizeUnknown  # and the rest, such as all other experts' rows, makes no difference
            self.kept[key] = max(self.kept.get(key, 0), size)
        self.alive.append(t)


class _SizeUnknown(Exception):
    """A tensor that is saved has a size known at run time only."""


def _numbers(fake: Any) -> list[Any]:
    """The sizes and numbers that may be symbols."""
    return [*fake.shape, *fake.stride()] if isinstance(fake, torch.Tensor) else [fake]


def _has_hint(fake: Any) -> bool:
    plain = not isinstance(fake, torch.Tensor) or fake.layout is torch.strided
    return plain and all(n.node.has_hint() for n in _numbers(fake) if isinstance(n, SYMBOLIC))


def _leaf(fake: Any, trained: bool) -> Any:
    return fake.detach().requires_grad_(trained) if isinstance(fake, torch.Tensor) else fake


def _storage(t: torch.Tensor) -> Any:
    return t.untyped_storage()._cdata


def _bytes(t: torch.Tensor) -> int | None:
    n = t.untyped_storage().nbytes()
    if isinstance(n, int):
        return n
    return int(n.node.hint or 0) if n.node.has_hint() else None
