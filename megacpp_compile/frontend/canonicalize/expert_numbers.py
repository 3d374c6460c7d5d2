"""Writes the numbers of experts that a loop was traced for as numbers, where they came as entries of a list."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx import Node

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile._torch.ops import aten
from megacpp_compile.fx import assumptions
from megacpp_compile.fx.edit import Builder, replace, same_size, value
from megacpp_compile.fx.walks import descendants

_KEEPS = (aten.select.int, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.view.default,
          aten.reshape.default, aten.unsqueeze.default, aten.alias.default, aten.clone.default, aten.detach.default,
          aten._to_copy.default, aten.to.dtype, aten.expand.default)  # fmt: skip


def expert_numbers(graph: fx.Graph, fake_mode: FakeTensorMode) -> None:
    """Replace what reads an entry, and not what marks it, by what reads a number."""
    for entry in assumptions.experts(graph):
        number = entry.args[1]
        for tensor in descendants([entry], _is_same_number):
            for user in list(tensor.users):
                build = Builder(graph, fake_mode, user, user)
                if user.target is assumptions.iteration or _is_same_number(user):
                    continue
                if (new := _by_number(build, user, tensor, number)) is not None:
                    replace(user, new)
                    _drop_squeezes(new)
                else:
                    fake = value(tensor)
                    full = build(aten.full.default, list(fake.shape), number, dtype=fake.dtype, device=fake.device)
                    user.replace_input_with(tensor, full)


def _is_same_number(user: Node) -> bool:
    return user.target in _KEEPS and same_size(value(user).numel(), 1) and not value(user).is_floating_point()


def _by_number(build: Builder, user: Node, tensor: Node, number: Any) -> Node | None:
    """What `user` computes from `tensor`, which holds `number`."""
    args, one = user.args, value(tensor).dim() == 1
    if user.target is aten.index.Tensor and args[0] is not tensor:
        positions: list[Any] = [i for i, index in enumerate(args[1]) if index is not None]  # type: ignore[arg-type]
        if len(positions) == 1 and args[1][positions[0]] is tensor and value(tensor).dim() <= 1:  # type: ignore[index]
            return _row(build, args[0], positions[0], number, one)
    if user.target is aten.index_select.default and args[0] is not tensor and value(args[0]).dim():
        return _row(build, args[0], args[1], number, True)
    if user.target is aten.embedding.default and args[1] is tensor and len(args) == 2 and value(tensor).dim() <= 1:
        return _row(build, args[0], 0, number, one)
    if user.target in _COMPARED and args[0] is not tensor and _broadcasts(user, args[0]):
        return build(_COMPARED[user.target], args[0], number)
    if user.target in _COMPARED and user.target in (aten.eq.Tensor, aten.ne.Tensor) and args[1] is not tensor:
        return build(_COMPARED[user.target], args[1], number) if _broadcasts(user, args[1]) else None
    return None


_COMPARED: dict[Any, Any] = {aten.eq.Tensor: aten.eq.Scalar, aten.ne.Tensor: aten.ne.Scalar}


def _broadcasts(user: Node, other: Any) -> bool:
    return isinstance(other, Node) and value(other).dim() == value(user).dim()


def _row(build: Builder, source: Any, dim: Any, number: Any, keep: bool) -> Node:
    row = build(aten.select.int, source, dim, number)
    return build(aten.unsqueeze.default, row, dim) if keep else row


def _drop_squeezes(row: Node) -> None:
    """Let what takes the one entry of `row`, which has a dimension of one for the number, read the entry itself."""
    if row.target is not aten.unsqueeze.default:
        return
    entry, dim = row.args
    for user in list(row.users):
        one = user.target is aten.squeeze.dim or user.target is aten.select.int and user.args[2] in (0, -1)
        if one and user.args[1] % value(row).dim() == dim:  # type: ignore[operator]
            replace(user, entry)
