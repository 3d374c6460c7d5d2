"""Which attention reads a head, and as queries or keys: the score products downstream of a node."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import CASTS, COPIES, EXPANSIONS, PADS, PERMUTATIONS, REPETITIONS, RESHAPES, UNIT_DIMS
from megacpp_compile.reader.dims import permutation
from megacpp_compile.reader.links import through

_SDPA = {aten.scaled_dot_product_attention.default}
_PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default, aten.mm.default}
_TRANSPARENT = {
    *RESHAPES, *PERMUTATIONS, *UNIT_DIMS, *EXPANSIONS, *REPETITIONS, *COPIES, *CASTS - {aten.to.dtype},
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor,
    aten.rms_norm.default,  # of a head: queries and keys may be normed behind their rotation
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Reader:
    """A score product reading a head as its operand `side` ("q", "k", or "0"/"1" of a plain product)."""

    node: Node
    side: str


def is_attention(node: Node) -> bool:
    """Whether `node` is the output of an attention kernel, which saves it for its own backward."""
    return node.target in _SDPA or any(name in str(node.target) for name in ("flex_attention", "fa4_attention"))


# (op, place of what is put in, place of the dimension it is put along): into a tensor of more rows, such as a cache.
_APPENDS = {aten.index_copy.default: (3, 1), aten.slice_scatter.default: (1, 2)}
# Where weights are looked for behind an operand of a product.
_VIEWS = {*RESHAPES, *PERMUTATIONS, *UNIT_DIMS, *EXPANSIONS, *COPIES, *CASTS}


def readers(root: Node, weights: frozenset[Node] = frozenset()) -> list[Reader]:
    """The score products that read `root` through views, casts, copies, scalings and norms, alone or as some of the
    rows of a cache. A product with one of `weights` is none."""
    found = _follow(root)[0]
    return [r for r in found if is_attention(r.node) or not _multiplies_by(r, weights)]


def is_attended(node: Node, weights: frozenset[Node]) -> bool:
    """Whether `node` is what an attention made: the result of its kernel, or of a product of two activations."""
    node = _views(node)
    return is_attention(node) or node.target in _PRODUCTS and not any(_views(a) in weights for a in _operands(node))


def _operands(product: Node) -> list[Node]:
    operands = product.args[1] if product.target is aten.einsum.default else product.args
    return [a for a in operands[-2:] if isinstance(a, Node)]  # type: ignore[index]  # baddbmm's first is added


def _views(node: Node) -> Node:
    return through(node, _VIEWS)


def _multiplies_by(reader: Reader, weights: frozenset[Node]) -> bool:
    return _views(_operands(reader.node)[1 - int(reader.side)]) in weights


def _appended(node: Node, user: Node) -> bool:
    """Whether `user` is `node` as some of the rows of a larger tensor, each with its channels."""
    args: list[Any] = [*user.args, *(None,) * 4]
    if user.target is aten.cat.default:
        fits, dim = node in args[0], args[1] or 0
    elif user.target in _APPENDS:
        place, along = _APPENDS[user.target]
        fits, dim = args[place] is node, args[along] or 0
    else:
        return False
    return fits and isinstance(dim, int) and dim % value(node).dim() != value(node).dim() - 1


def _is_rows(node: Node, user: Node) -> bool:
    """Whether `user` is some rows of `node`, each with its channels, or rows beside it: a window of the keys, all
    windows, those that an index lists, or as many as make whole blocks."""
    args: list[Any] = [*user.args, *(None,) * 2]
    last = value(node).dim() - 1
    if args[0] is not node:
        return False
    if user.target in PADS:
        return list(args[1][:2]) == [0, 0]
    if user.target in (aten.slice.Tensor, aten.index_select.default, aten.gather.default, aten.unfold.default):
        return isinstance(args[1] or 0, int) and (args[1] or 0) % (last + 1) != last
    if user.target is not aten.index.Tensor or len(args[1]) > last:
        return False
    return all(i is None or value(i).dtype != torch.bool for i in args[1])


def leaves_graph(root: Node) -> bool:
    """Whether the graph returns `root`, perhaps through views, casts, copies and scalings, so that another graph may
    hold its readers."""
    return any(user.op == "output" for node in _follow(root)[1] for user in node.users)


def _follow(root: Node) -> tuple[list[Reader], set[Node]]:
    """(the score products that read `root`, what it passes through on its way)."""
    found, seen, stack = list[Reader](), {root}, [(root, True)]
    while stack:
        node, last = stack.pop()  # last: whether channels are the last dimension still
        for user in node.users:
            if is_attention(user):
                side = next((s for s, a in zip("qkv", user.args, strict=False) if a is node), None)
                if side in ("q", "k"):
                    found.append(Reader(user, side))
            elif user.target in _PRODUCTS:
                # Factors of heads, as tensor-product attention rotates them, are read by what heads are made in.
                heads = _follow(user)[0] if last and _sums_rows(node, user) else []
                found += heads or [Reader(user, str(i)) for i, a in enumerate(_operands(user)) if a is node]
            elif user.target in _TRANSPARENT and user not in seen and user.args and user.args[0] is node:
                if isinstance(value(user), torch.Tensor):
                    seen.add(user)
                    stack.append((user, last and _keeps_last(node, user)))
            elif user not in seen and (_appended(node, user) or _is_rows(node, user) or _is_gain_of(user)):
                seen.add(user)
                stack.append((user, last))
    return found, seen


def _keeps_last(node: Node, user: Node) -> bool:
    """Whether the last dimension of `user`, a view or as many elements, is that of `node`."""
    rank = value(node).dim()
    if (order := permutation(user)) is not None:
        return order[-1] == rank - 1
    return value(user).dim() > 0 and same_size(value(user).shape[-1], value(node).shape[-1])


def _sums_rows(node: Node, product: Node) -> bool:
    """Whether `product` weights and sums rows of `node`, each with its channels."""
    operands = _operands(product)
    if product.target is aten.einsum.default:
        given, _, made = str(product.args[0]).replace(" ", "").partition("->")
        terms = given.split(",")
        channels = next((t[-1:] for t, a in zip(terms, operands, strict=False) if a is node), "")
        return len(terms) == 2 and made[-1:] == channels != "" and given.count(channels) == 1
    return operands[-1] is node and operands[0] is not node


def _is_gain_of(user: Node) -> bool:
    return user.target is aten.mul.Tensor and value(user.args[0]).dim() <= 1
