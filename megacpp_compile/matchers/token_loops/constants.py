"""What a graph makes of numbers alone, such as the rates of RetNet's heads, `1 - 2 ** (-5 - arange(heads))`."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from megacpp_compile._torch.ops import OpOverload
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.walks import ancestors

_MOST_NODES = 64
_MOST_ELEMENTS = 1 << 14

_A = torch.ops.aten
# Their values are whatever memory holds.
_UNSET = {
    _A.empty.memory_format, _A.empty_like.default, _A.empty_strided.default, _A.new_empty.default,
    _A.new_empty_strided.default, _A.empty_permuted.default,
}  # fmt: skip


def is_positive(node: Node) -> bool:
    """Whether every element of `node` is known to be above 0 and finite, as it is made of numbers alone."""
    made = _made_of_numbers(node)
    if made is None:
        return False
    with torch.no_grad():
        values: dict[Node, Any] = {}
        for n in made:
            args, kwargs = map_arg((n.args, n.kwargs), values.__getitem__)
            kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
            values[n] = n.target(*args, **kwargs)  # type: ignore[operator]
        result = values[node]
    return bool((result > 0).all() and result.isfinite().all())


def _made_of_numbers(node: Node) -> list[Node] | None:
    """`node` and all that it is made of, in graph order; None where that is more than numbers, or random."""
    found = [*itertools.islice(ancestors([node]), _MOST_NODES + 1)]
    return sorted(found) if len(found) <= _MOST_NODES and all(map(_is_known, found)) else None


def _is_known(n: Node) -> bool:
    if not isinstance(n.target, OpOverload) or n.target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in n.target.tags or n.target in _UNSET:
        return False
    fake = value(n)
    sizes = fake.shape if isinstance(fake, Tensor) else ()
    return isinstance(fake, Tensor) and all(isinstance(s, int) for s in sizes) and fake.numel() <= _MOST_ELEMENTS
