"""Where a frame keeps packed documents apart, and where it reads across them.

An attention keeps them apart by a mask that compares the numbers of its tokens' documents, or by one that is an input
of the frame; any op by an operand that its schema names for it (`seq_idx`, `cu_seqlens`). What else reads other tokens
runs across documents, unless something of documents reaches it between the projections around it: flags that are
computed from what tells documents apart, numbers that are compared, or indices by which it is laid out anew.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import OpOverload, aten
from megacpp_compile.fx.arithmetic import NEGATIONS
from megacpp_compile.fx.edit import arguments, attribute_of, called, same_size, value
from megacpp_compile.fx.sizes import hint
from megacpp_compile.fx.views import PARTS, REARRANGEMENTS, SPLITS
from megacpp_compile.fx.walks import ancestors, descendants, made_from
from megacpp_compile.lowerings._traits import traits_of
from megacpp_compile.matchers.documents import decayed_away, is_constant
from megacpp_compile.matchers.latent_attention.core import SDPA, WHERES, arguments_of, constant, is_low
from megacpp_compile.matchers.latent_attention.integers import picked_along
from megacpp_compile.matchers.latent_attention.masks import AND, OR
from megacpp_compile.matchers.linear import is_projection
from megacpp_compile.matchers.softmax_attention.find import attentions
from megacpp_compile.matchers.softmax_attention.parts import Attention
from megacpp_compile.passes._driver import all_passes
from megacpp_compile.passes._frame import token_readers
from megacpp_compile.reader.links import through
from megacpp_compile.report.records import MissedFusion

NUMBERS, OFFSETS, MASK = "numbers", "offsets", "mask"
# Arguments by which ops are told of documents.
_OFFSETS = re.compile(r"cu_?seq_?len|cum_seq|query_start_loc")
_NUMBERS = re.compile(r"seq_idx|doc(ument)?(s|_?ids)|segment_ids")
# Of positions, they number chunks.
_CHUNKS = (aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode)
_INDEXED = (aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.index_put.default,
            aten.scatter.src, aten.take_along_dim.default)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Apart:
    """Where documents are kept apart. node: the attention or op. told: the tensor that says which tokens are of one
    document. form: NUMBERS, one a token, the same for a document's; OFFSETS, of the documents' first tokens; MASK, an
    input [..., queries, keys] of the frame, which may say other things."""

    node: Node
    told: Node
    form: str


@dataclasses.dataclass(frozen=True)
class Across:
    """What runs across documents: `what` of it computes that, at `node`."""

    node: Node
    what: str


def kept_apart(graph: fx.Graph, weights: frozenset[Node]) -> list[Apart]:
    """Where a captured graph keeps documents apart, in its order, as far as that is read."""
    found = []
    for node in graph.nodes:
        found += [Apart(node, told, form) for told, form in _operands(node)]
        found += [Apart(node, told, NUMBERS) for told in _flex_numbers(node)]
        found += [apart for mask, kind in _masks(node) for apart in _by_mask(node, mask, kind, weights)]
    for attention in attentions(graph, weights):
        if isinstance(attention, Attention) and attention.softmax.target is not SDPA:
            node = attention.softmax
            found += [apart for t in attention.scores.terms for apart in _by_mask(node, t.node, t.kind, weights)]
    place = {node: i for i, node in enumerate(graph.nodes)}
    return sorted(dict.fromkeys(found), key=lambda one: place[one.node])


def run_across(graph: fx.Graph, misses: Iterable[MissedFusion], apart: Iterable[Apart]) -> list[Across]:
    """What reads other tokens of a captured graph, where there are several, and is told of no documents. misses: what
    the passes nearly took. apart: where documents are kept apart in the frame."""
    told = list(apart)
    flags = _Flags(graph, told)
    near = token_readers.near((m for m in misses if m.tag != "documents"), graph.nodes)
    wide = [*token_readers.spelled(graph.nodes), *((miss.pass_name, node) for miss, node in near)]
    found = dict[Node, str]()
    for what, node in (*token_readers.named(graph.nodes), *_causal(graph), *wide):
        if node in found or _is_attention(what) or any(_operands(node)) or not _is_long(node):
            continue
        if _same_tokens(node, told) and not flags.reach(node, (what, node) in wide):
            found[node] = what
    return [Across(node, found[node]) for node in graph.nodes if node in found]


def _is_attention(what: str) -> bool:
    """Whether a reader is an attention or part of one, by its op or the pass that nearly took it. `_causal` has those
    that are read."""
    op = {p.name: p.op for p in all_passes()}.get(what, what)
    return traits_of(op).block_kind == "ablock"


CAUSAL = "causal attention"


def _causal(graph: fx.Graph) -> Iterator[tuple[str, Node]]:
    """Attentions of a sequence with itself, causal and without any other mask. What is attended across two sequences is
    not causal."""
    for node in graph.nodes:
        if node.target is SDPA:
            given = arguments_of(node)
            q, k = value(given["query"]), value(given["key"])
            if given["is_causal"] is True and given["attn_mask"] is None and same_size(q.shape[-2], k.shape[-2]):
                yield CAUSAL, node
        elif str(node.target) == "megacpp.attention.default":
            q, k, _, mask, bias, _, documents = node.args[:7]
            several = same_size(value(q).shape[2], value(k).shape[2]) and same_size(node.args[10], 0)
            if mask is None and bias is None and documents is None and several and len(node.args) < 15:
                yield CAUSAL, node


def _operands(node: Node) -> Iterator[tuple[Node, str]]:
    """(operand, its form) of an op that is told of documents."""
    if not isinstance(node.target, OpOverload) or node.target.namespace == "megacpp" and traits_of(node).tokens is None:
        return
    for name, given in arguments(node.target, node.args, node.kwargs).items():
        if isinstance(given, Node) and isinstance(value(given), torch.Tensor):
            if _OFFSETS.search(name):
                yield given, OFFSETS
            elif _NUMBERS.fullmatch(name):
                yield given, NUMBERS


def _masks(node: Node) -> Iterator[tuple[Node, str]]:
    """The masks of an attention that is one op, each with what it says (`Term.kind`)."""
    if node.target is SDPA:
        given = [arguments_of(node)["attn_mask"]]
    elif str(node.target) == "megacpp.attention.default":
        given = [*node.args[3:5]]
    else:
        return
    for mask in given:
        if isinstance(mask, Node):
            yield mask, "seen" if value(mask).dtype is torch.bool else "bias"


def _flex_numbers(node: Node) -> Iterator[Node]:
    """The numbers of documents that FlexAttention's mask compares, beside other conditions that have to hold."""
    if str(node.target) != "flex_attention":
        return
    blocks, captures = node.args[4], node.args[8] if len(node.args) > 8 else ()
    mask = attribute_of(node.graph.owning_module, blocks[-1].target)  # type: ignore[index, union-attr]
    # A comparison is a method, `__eq__`, where torch below 2.13 has it.
    calls = {called(n).partition(".")[0].strip("_") for n in mask.graph.nodes if n.op.startswith("call")}
    if "eq" in calls and not calls & {"or", "bitwise_or", "logical_or"}:
        tokens = value(node.args[0]).shape[2]
        given = (n for n in captures if isinstance(n, Node) and _whole(n))  # type: ignore[union-attr]
        yield from (n for n in given if value(n).dim() and same_size(value(n).shape[-1], tokens))


def _by_mask(node: Node, mask: Node, kind: str, weights: frozenset[Node]) -> Iterator[Apart]:
    yield from (Apart(node, told, NUMBERS) for told in _compared(mask, kind))
    yield from (Apart(node, given, MASK) for given in _given_masks(mask, weights))


def _compared(node: Any, kind: str) -> Iterator[Node]:
    """The numbers of tokens that have to be equal for a query to see a key. kind: what `node` says where it holds,
    "seen" or "hidden"; "bias" where it is added."""
    if not isinstance(node, Node) or node.op != "call_function":
        return
    target, args = node.target, node.args
    if target in REARRANGEMENTS:
        yield from _compared(args[0], kind)
    elif target in NEGATIONS or target is aten.rsub.Scalar and kind != "bias":
        yield from _compared(args[0], "hidden" if kind == "seen" else "seen")
    elif target in (AND if kind == "seen" else OR if kind == "hidden" else ()):
        yield from (told for a in args[:2] for told in _compared(a, kind))
    elif kind == "bias":
        yield from _compared_in_bias(node)
    elif target is (aten.eq.Tensor if kind == "seen" else aten.ne.Tensor):
        own = [_of_tokens(a) for a in args[:2]]
        if own[0] is own[1] and own[0] is not None and not is_constant(own[0]) and own[0].target not in _CHUNKS:
            yield own[0]


def _compared_in_bias(node: Node) -> Iterator[Node]:
    target, args = node.target, node.args
    if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        yield from _compared(args[1], "hidden")
        yield from _compared(args[0], "bias")
    elif target in WHERES:
        other = constant(args[2])
        yield from _compared(args[0], "seen" if other is not None and is_low(other) else "hidden")
    elif target in (aten.mul.Tensor, aten.mul.Scalar) and (factor := constant(args[1])) is not None and factor < -60000:
        yield from _compared(args[0], "hidden")
    elif target is aten.add.Tensor:
        yield from (told for a in args[:2] for told in _compared(a, "bias"))


def _of_tokens(node: Any) -> Node | None:
    """The row of integers, one for each sequence or one for all, that `node` is a view of."""
    node = through(node, _less_a_view)
    known = isinstance(node, Node) and value(node).dtype is not torch.bool and not value(node).is_floating_point()
    return node if known else None


def _less_a_view(node: Node) -> Any:
    """What integers `node` are a view of, or gathered from along dimensions."""
    if value(node).is_floating_point():
        return None
    picked = picked_along(node)
    return picked[0] if picked is not None else node.target in REARRANGEMENTS - PARTS - SPLITS


def _given_masks(mask: Node, weights: frozenset[Node]) -> Iterator[Node]:
    """The inputs of the frame, of queries and keys, that `mask` is computed from."""
    for node in ancestors([mask], _no_projection):
        held = value(node)
        if node.op == "placeholder" and node not in weights and isinstance(held, torch.Tensor) and held.dim() > 1:
            several = not same_size(held.shape[-1], 1) and same_size(held.shape[-1], held.shape[-2])
            if several and (held.dtype is torch.bool or held.dtype.is_floating_point):
                yield node


def _no_projection(node: Node) -> bool:
    return not is_projection(node)


def _goes_on(node: Node) -> bool:
    """Whether activations are the same thing in front of `node`: no projection, and nothing that reads other tokens."""
    others = (SDPA, aten.embedding.default, aten.conv1d.default)
    return _no_projection(node) and not str(node.target).startswith("megacpp.") and node.target not in others


class _Flags:
    """What is computed from that which tells documents apart, in flags and whole numbers alone."""

    def __init__(self, graph: fx.Graph, apart: Iterable[Apart]) -> None:
        roots = {n for one in apart if one.form != MASK for n in ancestors([one.told])}
        given = {n for n in roots if n.op == "placeholder" and _whole(n)}
        self.told = given | made_from(given, (n for n in graph.nodes if n.op == "call_function" and _whole(n)))

    def reach(self, site: Node, wide: bool) -> bool:
        """Whether documents reach `site` behind the projections in front of it. wide: it is one node of many, which may
        be reached further on, up to the next projections."""
        region = descendants([site], lambda u: u.op == "call_function" and _goes_on(u)) if wide else [site]
        return any(map(self._enter, ancestors(region, _goes_on)))

    def _enter(self, node: Node) -> bool:
        """Whether `node` brings documents to activations, or compares numbers that may be documents'."""
        if node.op != "call_function":
            return False
        if _whole(node) or decayed_away(node) is not None:
            numbers = node.target in (aten.eq.Tensor, aten.ne.Tensor) and all(map(_whole, node.all_input_nodes))
            return (numbers or not _whole(node)) and not is_constant(node)
        told = [a for a in node.all_input_nodes if a in self.told]
        if node.target in _INDEXED:
            return bool(told) and any(map(is_projection, ancestors([node.args[0]])))  # type: ignore[list-item]
        flags = any(value(through(a, REARRANGEMENTS)).dtype is torch.bool for a in told)
        return flags or bool(told) and not _pointwise(node)


def _pointwise(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace in ("aten", "prims")


def _whole(node: Node) -> bool:
    """Whether `node` is a tensor of flags or whole numbers."""
    held = value(node)
    return isinstance(held, torch.Tensor) and not held.is_floating_point() and not held.is_complex()


def _sizes(node: Node) -> list[Any]:
    held = [value(n) for n in (node, *node.all_input_nodes)]
    return [n for t in held if isinstance(t, torch.Tensor) and t.dim() > 2 for n in t.shape]


def _is_long(node: Node) -> bool:
    """Whether `node` may have several tokens: one new token of a decode step reads a state, and no token."""
    traits = traits_of(node)
    if traits.tokens is None:
        return True
    return not same_size(value(node.args[0]).shape[traits.tokens], 1)


def _same_tokens(node: Node, apart: Iterable[Apart]) -> bool:
    """Whether `node` may have as many tokens as a row in which documents are kept apart."""
    rows = {hint(n) for one in apart if one.form != OFFSETS for n in value(one.told).shape if not same_size(n, 1)}
    return not rows or any(hint(n) in rows for n in _sizes(node))
