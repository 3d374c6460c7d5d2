"""Whether a value of Dynamo's graph may say which experts have tokens: a guess, to leave other loops alone.

What it says is for matchers to show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import called
from megacpp_compile.fx.walks import ancestors, nearest
from megacpp_compile.reader.links import through

MOST = 1024  # experts whose iterations are traced
_NEAR = 24  # nodes to look at
_LISTS = ("nonzero", "where", "argwhere")
_KEEPS = ("getitem", "select", "squeeze", "flatten", "view", "reshape", "ravel", "detach", "cpu", "to", "long", "int",
          "contiguous", "clone", "t")  # fmt: skip
_VIEWS = ("transpose", "permute", "movedim", "unsqueeze", *_KEEPS)
_SELECTS = ("one_hot", "eq", "bincount", "histc", "where", "nonzero", "argwhere", "scatter", "scatter_add")
_CHOOSES = ("topk", "argmax", "sort", "argsort", "one_hot", "bincount", "histc", "unique")
_PUTS = ("index_put", "setitem")
_ADDS = ("index_add", "scatter_add", "scatter_reduce", *_PUTS)
_DISTINCT = {"sorted": True, "return_counts": True}
_NONE = ("eq", "le", "lt", "logical_not", "not_", "__not__")
_WRITES = ("scatter_", "scatter_add_")  # to a tensor whose later readers name it as it was made
# What a mask of choices, and the counts of it, go through without becoming another one's.
_TELLS = ("one_hot", "eq", "bincount", "histc", "sum", "any", "amax", "gt", "greater", "ne", "permute", "transpose",
          "movedim", "unsqueeze", "bool", "float", *_KEEPS[1:])  # fmt: skip


def listed(node: Node, fake: torch.Tensor) -> int | None:
    """Of how many places `node` lists, as [n] or [n, 1], those that are not zero, or of how many experts those that
    were chosen; None where it does no such thing."""
    if fake.dtype != torch.int64 or not 0 < fake.dim() <= 2 or isinstance(fake.shape[0], int):
        return None
    if fake.shape[1:].numel() != 1:
        return None
    for _ in range(_NEAR):
        if not node.args or not isinstance(node.args[0], Node):
            return None
        source, name = node.args[0], _name(node)
        if name == "unique" and len(node.args) == 1 and node.kwargs.items() <= _DISTINCT.items():
            chosen_from = _scores(source)
            return chosen_from if 2 <= chosen_from <= MOST else None
        if name == "getitem" and _name(source) == "unique" and node.args[1] != 0:
            return None  # how often each comes
        if name in _LISTS and len(node.args) == 1:
            counts = source.meta.get("example_value")
            known = isinstance(counts, torch.Tensor) and counts.dim() == 1 and isinstance(counts.shape[0], int)
            if not known or not 2 <= counts.shape[0] <= MOST or not about_tokens(source):
                return None
            return min(counts.shape[0], _choosable(source) or MOST)
        if name not in _KEEPS:
            return None
        node = source
    return None


def about_tokens(node: Node) -> bool:
    """Whether `node` is computed, not far back, from which token chose which expert."""
    for n in _near(node, lambda n: True):
        if _name(n) in _SELECTS and (_name(n) != "eq" or _of_choices(n)):
            return True
        if any(_name(u) in _WRITES and u.args[0] is n for u in n.users):
            return True
    return False


def _near(node: Node, within: Callable[[Node], bool]) -> Iterator[Node]:
    """`node` and the calls that it is computed from by way of such of which `within` holds, not far back."""
    def calls(nodes: Iterable[Node]) -> list[Node]:
        return [n for n in nodes if n.op in ("call_function", "call_method")]

    return nearest(calls([node]), _NEAR, lambda n: calls(n.all_input_nodes) if within(n) else [])


def _of_choices(eq: Node) -> bool:
    """Whether `eq` compares several integers at once: one, or a number with a fraction, is no list of choices."""
    fakes = [a.meta.get("example_value") for a in eq.all_input_nodes]
    tensors = [f for f in fakes if isinstance(f, torch.Tensor)]
    return any(f.dim() > 0 and not (f.is_floating_point() or f.is_complex()) for f in tensors)


def of_experts(conditions: Iterable[Node], made: Iterable[Node]) -> bool:
    """Whether experts are seen in a branch by `conditions` in which the nodes `made` are: something was chosen for it,
    or rows are added up."""
    within = set(made)
    chosen = any(_name(node) in _CHOOSES for node in ancestors(conditions))
    return chosen or any(_adds_up(node, within) for node in within)


def _adds_up(node: Node, within: set[Node]) -> bool:
    """Whether `node` may add rows to a sum: what the branch itself has made (`within`) and then puts rows into is
    none."""
    if (name := _name(node).rstrip("_")) not in _PUTS:
        return name in _ADDS
    into = through(node.args[0] if node.args else None, lambda n: n in within and _name(n) in _VIEWS and n.args)
    return into not in within


def some_when(node: Node, number: tuple[Node, Any] | None) -> bool:
    """What the condition `node`, a tensor or a `number`, most likely is where an expert has tokens."""
    value = number[1] if number is not None else None
    if isinstance(value, torch.SymBool):
        symbols = sorted(value.node.expr.free_symbols, key=str)
        ends = [value.node.expr.subs(dict.fromkeys(symbols[:1], n)) for n in (0, 1)]
        return ends != [True, False] or len(symbols) != 1
    return _name(node) not in _NONE


def _choosable(counts: Node) -> int:
    """Among how many experts the choices that `counts` tells were made; 0 where that cannot be seen."""
    return next((int(experts) for n in _near(counts, lambda n: _name(n) in _TELLS) if (experts := _scores(n))), 0)


def _name(node: Node) -> str:
    """The op's name, also of an operator's method such as `__eq__`."""
    name = called(node)
    return str(name).removeprefix("__").removesuffix("__")


def bins(node: Node, fake: torch.Tensor) -> int | None:
    """How many entries `node`, a count of the choices made among as many scores, has, or could have at most; None where
    it is no such count, or its length is known while tracing."""
    if _name(node) != "bincount" or isinstance(fake.shape[0], int) or not isinstance(node.args[0], Node):
        return None
    if len(node.args) > 1 and node.args[1] is not None or node.kwargs.get("weights") is not None:
        return None
    experts = _scores(node.args[0])
    return int(experts) if 0 < experts <= MOST and minlength(node) in (0, experts) else None


def minlength(bincount: Node) -> Any:
    """How many entries `bincount` has at least."""
    return bincount.args[2] if len(bincount.args) > 2 else bincount.kwargs.get("minlength", 0)


def _scores(indices: Node) -> Any:
    """Among how many scores each of `indices` was chosen; 0 where that cannot be seen."""
    for _ in range(_NEAR):
        source = indices.args[0] if indices.args else None
        if not isinstance(source, Node):
            return 0
        if _name(indices) == "getitem" and indices.args[1] == 1 and _name(source) == "topk":
            scores = source.args[0].meta.get("example_value") if isinstance(source.args[0], Node) else None
            dim = source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", -1)
            last = isinstance(scores, torch.Tensor) and dim in (-1, scores.dim() - 1)
            return scores.shape[-1] if last and isinstance(scores.shape[-1], int) else 0  # type: ignore[union-attr]
        if _name(indices) == "getitem":  # sorted choices, or some of them by their places
            if _name(source) == "sort" and indices.args[1] == 0 and isinstance(source.args[0], Node):
                source = source.args[0]
            elif not isinstance(indices.args[1], Node):
                return 0
        elif _name(indices) not in _KEEPS:
            return 0
        indices = source
    return 0
