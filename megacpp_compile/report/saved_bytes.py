"""Bytes a site keeps for backward, counted with torch's saved-tensor hooks on fake tensors.

Counted: every distinct storage autograd packs between the site's inputs and its outputs. Not counted: the inputs
themselves (x, weights, tables), which are alive anyway. Before: the plain subgraph in eager autograd. After: the op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from megacpp_compile._torch.dispatch import enable_python_dispatcher
from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.numbers_for_symbols import SYMBOLIC, with_numbers


def saved_bytes(module: GraphModule, order: Sequence[Node], mode: FakeTensorMode) -> int | None:
    """Bytes saved by running `module` on values like those of the nodes in `order`, as `fx.subgraph.Part` has
    both; None where sizes are symbolic without a known value."""
    values = [value(n) for n in order]
    with mode:
        if all(map(_has_hint, values)):  # with numbers for sizes it takes a tenth of the time, and nothing is guarded
            values = [with_numbers(v, lambda n: n.node.hint) for v in values]
        args = [_leaf(v) for v in values]
    kept: dict[Any, int] = {}
    own = {_storage(a) for a in args if isinstance(a, torch.Tensor)}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if (key := _storage(t)) not in own:
            if (size := _bytes(t)) is None:
                raise _SizeUnknown  # and the rest, such as all other experts' rows, makes no difference
            kept[key] = max(kept.get(key, 0), size)
        alive.append(t)
        return t

    alive: list[torch.Tensor] = []  # storages are told apart by address, so none may be freed while counting
    # Sizes known only at run time (`nonzero`) get names here that no graph will ever mention.
    unnamed = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env else contextlib.nullcontext()
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    # Without Python's own decompositions torch 2.9 asks for symbolic sizes as numbers, which they are from then on.
    with unnamed, mode, enable_python_dispatcher(), torch.enable_grad(), hooks:
        try:
            module(*args)
        except _SizeUnknown:
            return None
    return sum(kept.values())


class _SizeUnknown(Exception):
    """A tensor that is saved has a size known at run time only."""


def _numbers(fake: Any) -> list[Any]:
    """The sizes and numbers that may be symbols."""
    return [*fake.shape, *fake.stride()] if isinstance(fake, torch.Tensor) else [fake]


def _has_hint(fake: Any) -> bool:
    plain = not isinstance(fake, torch.Tensor) or fake.layout is torch.strided
    return plain and all(n.node.has_hint() for n in _numbers(fake) if isinstance(n, SYMBOLIC))


def _leaf(fake: Any) -> Any:
    if not isinstance(fake, torch.Tensor):
        return fake
    fake = fake.detach()
    return fake.requires_grad_() if fake.is_floating_point() and fake.requires_grad is False else fake


def _storage(t: torch.Tensor) -> Any:
    return t.untyped_storage()._cdata


def _bytes(t: torch.Tensor) -> int | None:
    n = t.untyped_storage().nbytes()
    if isinstance(n, int):
        return n
    return int(n.node.hint or 0) if n.node.has_hint() else None
