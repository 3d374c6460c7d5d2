"""Tensors that hold one number everywhere, or none that matters, and what a tensor is padded with."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import PADS

ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})
ONES = frozenset({aten.ones.default, aten.ones_like.default, aten.new_ones.default})
_EMPTY = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
FULL = frozenset({aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default})


def fill_of(node: Any) -> Any:
    """What every element of `node` is, a number or a node; None where it is nothing that fills a tensor."""
    if not isinstance(node, Node) or node.target not in (*ZEROS, *ONES, *FULL):
        return None
    return 0 if node.target in ZEROS else 1 if node.target in ONES else node.args[-1]


def is_filled(node: Any, number: float) -> bool:
    """Whether every element of `node` is `number`."""
    fill = fill_of(node)
    return isinstance(fill, (int, float)) and fill == number


def is_blank(node: Node) -> bool:
    """Whether `node` holds nothing that matters: zeros, or uninitialised memory."""
    return is_filled(node, 0.0) or node.target in _EMPTY


def padded_with(node: Node) -> Any:
    """The number, perhaps a node, with which `node` pads its first argument; None for another node, or one that pads
    otherwise than with a constant."""
    if node.target is aten.constant_pad_nd.default:
        return node.args[2] if len(node.args) > 2 else node.kwargs.get("value", 0)
    if node.target is not aten.pad.default:
        return None
    mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
    given = node.args[3] if len(node.args) > 3 else node.kwargs.get("value")
    return None if mode != "constant" else 0 if given is None else given


def padded_in_front(node: Node, dim: int, zeros: bool = True) -> tuple[Node, int] | None:
    """(tensor, entries put before it) where `node` pads the tensor along `dim` alone, at its end as well perhaps, or is
    something before it; with `zeros`, if these are zeros."""
    rank, args = value(node).dim(), node.args
    if node.target in PADS:
        fill, sizes = padded_with(node), [*args[1], *[0] * (2 * rank - len(args[1]))]  # type: ignore[arg-type, misc]
        at = 2 * (rank - 1 - dim)
        known = isinstance(sizes[at], int) and sizes[at] >= 0 and not any(sizes[:at] + sizes[at + 2 :])
        return (args[0], sizes[at]) if known and fill is not None and (fill == 0 or not zeros) else None  # type: ignore[return-value]
    if node.target is not aten.cat.default or len(args[0]) != 2 or [*args, 0][1] % rank != dim:  # type: ignore[arg-type, operator]
        return None
    before, x = args[0]  # type: ignore[misc]
    steps = value(before).shape[dim]
    return (x, steps) if isinstance(steps, int) and (is_filled(before, 0.0) or not zeros) else None  # type: ignore[return-value]
