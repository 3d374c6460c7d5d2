"""Targets spelled out: a row a token with a one at its word and zeros elsewhere."""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.filled import ZEROS
from megacpp_compile.fx.views import CASTS, is_identity
from megacpp_compile.reader.links import chain


@dataclasses.dataclass(frozen=True)
class OneHot:
    """target: the words, int64. inside: the nodes that spell them out. sign: of the one. every: whether each row is
    known to have a word."""

    target: Node
    inside: tuple[Node, ...]
    sign: float = 1.0
    every: bool = True


@or_none
def one_hot(node: Node) -> OneHot | None:
    """The words whose rows `node` [..., words] has a one at, or minus one."""
    *_, node = inside = chain(node, CASTS, is_identity, aten.neg.default)
    sign = (-1.0) ** sum(n.target is aten.neg.default for n in inside)
    if node.target is aten.one_hot.default:
        return OneHot(node.args[0], tuple(inside), sign)  # type: ignore[arg-type]
    NoMatch.when(node.target is not aten.scatter.value or node.kwargs or node.args[3] != 1)
    zeros, dim, index = node.args[:3]
    last = value(node).dim() - 1
    sizes, given = value(node).shape, value(index).shape
    NoMatch.when(
        zeros.target not in ZEROS or dim % (last + 1) != last or given[-1] != 1  # type: ignore[union-attr, operator]
    )
    every = all(map(same_size, sizes[:-1], given[:-1]))
    return OneHot(index, (*inside, zeros), sign, every)  # type: ignore[arg-type]
