"""Sums over residual streams: the input of a block, and the streams behind it.

The letters of a sum tell what is what: the streams are summed over one dimension that the weights share with them, and
have one of their own, the channels; weights with another dimension of their own are a mixing matrix.
"""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import Builder, of_tensors, same_shape, same_size, value
from megacpp_compile.fx.views import is_cast, uncast
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse, refuse_if
from megacpp_compile.matchers.hyper_connections.maps import bare
from megacpp_compile.matchers.hyper_connections.products import Letters, Place, Product, deepest, product_of
from megacpp_compile.matchers.linear import match_linear
from megacpp_compile.matchers.silu import match_sigmoid

# Streams there may be: more are dimensions of something else.
MOST = 8


@dataclasses.dataclass(frozen=True)
class StreamSum:
    """`node[..., (i), d] = sum_j weights[..., (i), j] * streams[..., j, d]`, `weights` in the order of `order`."""

    node: Node
    weights: Node
    order: tuple[int, ...]
    streams: Node
    mixes: bool
    internal: frozenset[Node]


def stream_sum(product: Product) -> StreamSum | MatchFailure | None:
    """The sum over streams that a product is; a failure where it is one of tensors that lie otherwise."""
    summed = {c for letters in product.letters for c in letters} - {*product.out, None}
    if len(summed) != 1 or None in product.out or len(product.out) < 2:
        return None
    found = []
    for w, x in ((0, 1), (1, 0)):
        weights, streams = product.letters[w], product.letters[x]
        own = [c for c in streams if c in product.out and c not in weights]
        rows = [c for c in weights if c in product.out and c not in streams]
        if not own or len(rows) > 1 or not summed <= {*weights} & {*streams}:
            continue
        if len(own) == 1:
            found.append(_arranged(product, w, x, own[0], rows, *summed))
        elif rows and {*product.out} == {*own, *rows}:
            found.append(MatchFailure(product.node, "static", "the matrix is the same for all tokens"))
    return min((one for one in found if one is not None), key=lambda one: isinstance(one, MatchFailure), default=None)


@or_failure
@or_none
def _arranged(product: Product, w: int, x: int, channel, rows, stream) -> StreamSum | MatchFailure | None:  # type: ignore[no-untyped-def]
    tokens = [c for c in product.out if c != channel and c not in rows]
    n = value(product.factors[x]).shape[product.letters[x].index(stream)]
    NoMatch.when(not isinstance(n, int) or not 2 <= n <= MOST or not tokens)
    NoMatch.when(rows and value(product.factors[w]).shape[product.letters[w].index(rows[0])] != n)
    streams = deepest(product.places(x), (*tokens, stream, channel), True, False)
    weights = deepest(product.places(w), (*tokens, *rows, stream), not rows, True)
    if streams is None or product.out != (*tokens, *rows, channel):
        refuse(product.node, "layout", "streams and channels are not the last two dimensions")
    if weights is None:
        refuse(product.node, "layout", "weights are not of each token, or in another order")
    order = tuple(weights.letters.index(c) for c in (*tokens, *rows, stream))
    internal = {*product.internal, *streams.through, *weights.through}
    return StreamSum(product.node, weights.node, order, streams.node, bool(rows), frozenset(internal))


@or_failure
@or_none
def weights_of_channels(node: Node) -> MatchFailure | None:
    """The near miss of streams that are summed with a sigmoid for each channel of each, made by a linear."""
    NoMatch.when(node.target not in (aten.sum.dim_IntList, aten.mean.dim) or len(node.args) > 2 and node.args[2])
    product = uncast(node.args[0])
    axis, rank = node.args[1], value(node.args[0]).dim()
    NoMatch.when(not isinstance(product, Node) or product.target is not aten.mul.Tensor or not of_tensors(product))
    if rank < 3 or [d % rank for d in axis] != [rank - 2] or not same_shape(*product.args):  # type: ignore[union-attr, operator, arg-type]
        return None
    n, d = value(product).shape[-2:]
    for weights in map(bare, product.args):
        gate = match_sigmoid(weights)
        linear = match_linear(bare(gate[0])) if gate is not None else None
        refuse_if(
            linear is not None and isinstance(n, int) and n <= MOST and same_size(linear.out_features, n * d),
            node, "channel-weights", "each channel of each stream has a weight of its own",
        )
    return None


@dataclasses.dataclass(frozen=True)
class Update:
    """`node = mix @ streams + post ⊗ block`."""

    node: Node
    mixed: StreamSum
    block: Node
    post: Node
    internal: frozenset[Node]

    def mix(self, build: Builder) -> Node:
        """The mixing matrix with rows for the new streams and columns for the old ones."""
        return build.permuted(self.mixed.weights, self.mixed.order)


@or_none
def match_update(node: Node) -> Update | MatchFailure | None:
    """The update of the streams that ends at `node`, a sum."""
    NoMatch.when(node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(a, Node) for a in node.args))
    products = [product_of(a) for a in node.args]
    NoMatch.when(products[0] is None or products[1] is None or not same_shape(*node.args))  # type: ignore[arg-type]
    for mixing, adding in (products, products[::-1]):
        mixed = stream_sum(mixing)  # type: ignore[arg-type]
        if mixed is None or isinstance(mixed, StreamSum) and not mixed.mixes:
            continue
        outer = _outer(adding, mixing.out)  # type: ignore[arg-type, union-attr]
        if outer is None:
            continue
        if isinstance(mixed, MatchFailure):
            return mixed
        post, block = outer
        internal = {*mixed.internal, *adding.internal, *post.through, *block.through, node}  # type: ignore[union-attr]
        end, more = rounded(node)
        return Update(end, mixed, block.node, post.node, frozenset(internal | more))
    return None


def match_unmixed(node: Node) -> Node | None:
    """The weights `post` where `node` is `streams + post ⊗ block`."""
    if node.target is not aten.add.Tensor or node.kwargs or not of_tensors(node) or not same_shape(*node.args):  # type: ignore[arg-type]
        return None
    for factor in node.args:
        product = product_of(factor)
        outer = _outer(product, product.out) if product is not None and len(product.out) > 2 else None
        if outer is not None:
            return outer[0].node
    return None


def _outer(product: Product, mixed: Letters) -> tuple[Place, Place] | None:
    """(weights of each new stream, the block's output) where `product` is that of the two."""
    if len(product.out) != len(mixed) or {*product.letters[0], *product.letters[1]} - {*product.out, None}:
        return None
    *tokens, stream, channel = product.out
    for w, b in ((0, 1), (1, 0)):
        post = deepest(product.places(w), (*tokens, stream), True, True)
        block = deepest(product.places(b), (*tokens, channel), True, False)
        if post is not None and block is not None:
            return post, block
    return None


def rounded(node: Node) -> tuple[Node, set[Node]]:
    """The cast to fewer bits that alone reads `node`, and what lies between; else `node`."""
    if len(node.users) == 1:
        (user,) = node.users
        if is_cast(user) and value(user).dtype.itemsize < value(node).dtype.itemsize:
            return user, {node, user}
    return node, {node}
