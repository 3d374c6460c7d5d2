"""Checks that only the given linears save an activation, so that compressing it there frees it."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.dispatch import enable_python_dispatcher
from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile.fx.aliasing import memory_of
from megacpp_compile.fx.arithmetic import SUMS_OF_TENSORS
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.provenance import module_fqn
from megacpp_compile.fx.walks import descendants
from megacpp_compile.lowerings._sum_gradient import sum_gradient
from megacpp_compile.lowerings._traits import name_of
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.linear import match_linear
from megacpp_compile.reader.links import chain, through

# Their gradients take neither operand, and no kernel makes one of these back from what they return.


def storage_owner(x: Node) -> Node:
    """The node whose memory is kept where `x` is: `sum_gradient` copies nothing in a compiled graph."""
    base: Node = through(memory_of(x), lambda n: n.target is sum_gradient and memory_of(n.args[0]))
    return base


@or_failure
def saved_elsewhere(view: GraphView, x: Node, linears: Iterable[Node]) -> MatchFailure | None:
    """Why the memory of `x` is kept for backward even if `linears`, which read it, do not ask for it; None where it is
    not."""
    base, asking = storage_owner(x), set(linears)
    refuse_if(base.op != "call_function", x, "input", "its input is one of the frame, whose caller holds it")
    memory = list(descendants([base], lambda user: storage_owner(user) is base))
    for user in (user for n in memory for user in n.users if user not in memory and user not in asking):
        if not _keeps_nothing(view, user, base):
            return MatchFailure(user, "alive", _why(user))
    if _keeps_its_result(base, view.fake_mode):
        made = f"{name_of(_made_by(base)[0])}, which made its input"
        return MatchFailure(base, "alive", f"{made}, keeps it for its own backward")
    return None


def _keeps_nothing(view: GraphView, user: Node, base: Node) -> bool:
    """Whether the backward of `user`, a reader of `base`, does without it."""
    if user.target in SUMS_OF_TENSORS:
        return all(isinstance(value(a), torch.Tensor) for a in user.args[:2])
    linear = match_linear(user)
    return linear is not None and not view.has_backward(linear.w) and storage_owner(linear.w) is not base


def _why(user: Node) -> str:
    if user.op == "output":
        return "the frame returns its input, which stays in memory then"
    fqn = module_fqn(user)
    reader = f"the linear {fqn}" if match_linear(user) is not None and fqn else name_of(user)
    return f"{reader} reads its input too, and may keep it for backward"


def _keeps_its_result(base: Node, mode: FakeTensorMode) -> bool:
    """Whether autograd saves `base` for the backward of what computes it: tried on fakes, with its operands as leaves;
    true where that fails."""
    source, path = _made_by(base)
    kept: list[torch.Tensor] = []  # held, as storages are told apart by address

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    # Sizes known only at run time get names here that no graph will ever mention.
    unnamed = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env else contextlib.nullcontext()
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    try:
        with unnamed, mode, enable_python_dispatcher(), torch.enable_grad():
            args, kwargs = fx.map_arg((source.args, source.kwargs), lambda n: _leaf(value(n)))
            with hooks:
                result = source.target(*args, **kwargs)  # type: ignore[operator]
        for index in path:
            result = result[index]
    except Exception:
        return True
    return any(_storage(t) == _storage(result) for t in kept)


def _made_by(item: Node) -> tuple[Node, list[Any]]:
    """The op that `item` is a result of, and where among its results."""
    *items, made = chain(item, {operator.getitem})
    return made, [n.args[1] for n in reversed(items)]


def _leaf(fake: Any) -> Any:
    if isinstance(fake, (list, tuple)):
        return [_leaf(one) for one in fake]
    if not isinstance(fake, torch.Tensor):
        return fake
    return fake.detach().requires_grad_(fake.is_floating_point())


def _storage(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata)
