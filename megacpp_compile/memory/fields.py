"""What eager autograd keeps, by what it is: a router's scores, gathered rows, attention, the head's logits.

A mode sees every op of a forward and follows what its results were made of, by meaning: a selection tells a router, the
GEMM behind it the router's scores; reading rows by a choice tells dispatch; gates on rows, and adding rows up by a
choice, tell combine; a running sum and its exponential tell a scan; a log-softmax tells the head. No name of a module
or model counts.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megacpp_compile._torch.dispatch import TorchDispatchMode
from megacpp_compile._torch.ops import OpOverload
from megacpp_compile._torch.pytree import tree_leaves
from megacpp_compile.lowerings._traits import name_of, traits_of

# In the order of a report. Every kept storage is in one of them.
FIELDS = {
    "router input": "what a router's GEMM reads",
    "router scores": "results of that GEMM up to the selection, casts to float32 included",
    "dispatch": "choices, gates, one-hot masks and places of rows; they grow with top-k, not with experts' weights",
    "gathered rows": "rows of tokens, read by a choice",
    "expert hiddens": "what experts compute of such rows",
    "combine": "rows times gates, and their sums for each token",
    "attention": "operands and results of attention cores, scores that are written out included",
    "convolution": "operands and results of causal convolutions",
    "scan states": "running sums along the tokens, decays made of them, and what is computed with either",
    "head logits": "what a loss over classes keeps: logits, their float32 copy, log-probabilities",
    "GEMM results": "of other GEMMs, and their inputs",
    "elementwise": "norms, activations, sums, masks",
    "inputs": "what no op of the forward has made",
}
_GATHERS = ("aten::index", "aten::index_select", "aten::gather", "aten::embedding", "aten::take")
_ADDS = ("aten::index_add", "aten::scatter_add", "aten::index_put", "aten::scatter_reduce", "aten::scatter")
_BATCHED = ("aten::bmm", "aten::baddbmm")
_SOFTMAX = ("aten::_softmax", "aten::softmax", "aten::_safe_softmax")
_RUNNING = ("aten::cumsum", "aten::logcumsumexp", "aten::cumprod")
_LOSSES = ("aten::_log_softmax", "aten::log_softmax", "aten::nll_loss_forward", "aten::logsumexp")


@dataclasses.dataclass(eq=False)
class Made:
    """One result of an op, or a tensor that came from outside.

    Attributes:
        field: of FIELDS.
        parents: what it was made of, without views.
        gemm: whether a GEMM made it.
        choice: whether it says who goes where, or with which weight.
        rows: whether it holds rows in the order of a choice.
        softmax: whether it is a softmax's result, or an elementwise function of one.
        summed: whether it is a running sum, a function of such alone, or the exponential of one.
    """

    field: str = "inputs"
    parents: tuple[Made, ...] = ()
    gemm: bool = False
    choice: bool = False
    rows: bool = False
    softmax: bool = False
    summed: bool = False


class FieldWatch(TorchDispatchMode):
    """Follows the ops inside of a `with`; `of(tensor)` says what it has seen of a tensor that is alive."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Made] = {}  # by storage, whose address may be another's later: its maker says so again

    def of(self, t: Tensor) -> Made:
        return self._made.get(t.untyped_storage()._cdata) or Made()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = list(_tensors((args, kwargs)))
        parents = tuple(dict.fromkeys(m for t in operands if (m := self._made.get(t.untyped_storage()._cdata))))
        known = {t.untyped_storage()._cdata for t in operands}
        result = func(*args, **(kwargs or {}))
        made = self._classify(func, operands, parents)
        for t in _tensors(result):
            key = t.untyped_storage()._cdata
            if key not in known or _writes(func):  # else a view
                self._made[key] = made
        return result

    def _classify(self, func: Any, operands: list[Tensor], parents: tuple[Made, ...]) -> Made:
        name, traits = name_of(func).removesuffix("_"), traits_of(func)
        rows, choice = any(p.rows for p in parents), any(p.choice for p in parents)
        floats = [t for t in operands if t.is_floating_point()]
        if traits.selection:
            if floats:
                _router(parents)
            return Made("dispatch", parents, choice=True)
        if name in _BATCHED and any(p.softmax for p in parents) and not (rows or choice):
            scores = _back(parents, "attention")  # written out: softmax back to the GEMM of queries and keys
            _back(tuple(p for made in scores for p in made.parents), "attention")
            return Made("attention", parents, gemm=True)
        if traits.core:
            _back(parents, "attention")
            return Made("attention", parents)
        if name == "aten::convolution":
            _back(parents, "convolution")
            return Made("convolution", parents)
        if name in _LOSSES and not choice:
            _back(parents, "head logits")
            return Made("head logits", parents)
        if name in _GATHERS and choice:
            return self._gathered(floats, parents)
        if name in _ADDS and choice:
            return Made("combine", parents) if rows or _combined(parents) else Made("dispatch", parents, choice=True)
        if not rows and not choice and (scan := self._scanned(name, floats)) is not None:
            return Made("scan states", parents, gemm=traits.gemm, summed=scan)
        if traits.gemm:
            return Made("expert hiddens" if rows else "GEMM results", parents, gemm=True, rows=rows)
        weighed = any((made := self._made.get(t.untyped_storage()._cdata)) and made.choice for t in floats)
        hiddens = rows or any(not p.choice and p.field in ("GEMM results", "elementwise") for p in parents)
        if choice and weighed and hiddens:
            return Made("combine", parents, rows=rows)
        if rows:
            masked = choice and all(p.field == "gathered rows" for p in parents if p.rows)
            return Made(_rows_field(parents, masked), parents, rows=True)
        if choice:
            return Made("dispatch", parents, choice=True)
        return Made("elementwise", parents, softmax=name in _SOFTMAX or any(p.softmax for p in parents))

    def _scanned(self, name: str, floats: list[Tensor]) -> bool | None:
        """Whether what an op of a scan makes is `summed`; None for an op of none."""
        if name in _RUNNING and floats:
            return True
        sources = [(made := self._made.get(t.untyped_storage()._cdata)) is not None and made.summed for t in floats]
        return all(sources) if any(sources) else None

    def _gathered(self, floats: list[Tensor], parents: tuple[Made, ...]) -> Made:
        """Of reading by a choice: gates where scores are read, the order of tokens where rows are, else rows."""
        sources = [self._made.get(t.untyped_storage()._cdata) for t in floats]
        if any(s is not None and (s.field in ("router scores", "dispatch") or s.choice) for s in sources):
            return Made("dispatch", parents, choice=True)
        if any(s is not None and s.rows for s in sources):
            return Made("combine", parents)
        return Made("gathered rows", parents, rows=True) if floats else Made("dispatch", parents, choice=True)


def by_field(kept: Iterable[tuple[Made | None, int]]) -> dict[str, int]:
    """Bytes by field, of those that have any, in the order of FIELDS. To be asked when the forward is over: what is a
    router's is known at its selection."""
    sizes = Counter[str]()
    for made, size in kept:
        sizes[made.field if made is not None else "inputs"] += size
    return {field: sizes[field] for field in FIELDS if sizes[field]}


def _router(parents: tuple[Made, ...]) -> None:
    """Behind a selection: scores back to their GEMM, and what that reads."""
    todo, seen = list(parents), set[Made]()
    while todo:
        made = todo.pop()
        if made in seen or made.choice or made.rows:
            continue
        seen.add(made)
        made.field = "router scores"
        if not made.gemm:
            todo.extend(made.parents)
            continue
        for read in made.parents:
            read.field = "router input"


def _back(parents: tuple[Made, ...], field: str) -> list[Made]:
    """Put what an op reads in `field`, back through elementwise results to the GEMMs that made it; returns those."""
    found: list[Made] = []
    todo, seen = list(parents), set[Made]()
    while todo:
        made = todo.pop()
        if made in seen or made.field not in ("GEMM results", "elementwise"):
            continue
        seen.add(made)
        made.field = field
        if made.gemm:
            found.append(made)
        else:
            todo.extend(made.parents)
    return found


def _rows_field(parents: tuple[Made, ...], masked: bool) -> str:
    if _combined(parents):
        return "combine"
    return "gathered rows" if masked else "expert hiddens"


def _combined(parents: tuple[Made, ...]) -> bool:
    return any(p.field == "combine" for p in parents)


def _writes(func: Any) -> bool:
    return isinstance(func, OpOverload) and func._schema.is_mutable


def _tensors(values: Any) -> Iterator[Tensor]:
    return (t for t in tree_leaves(values) if isinstance(t, torch.Tensor))
