"""What eager autograd keeps, by what it is: a router's scores, gathered rows, attention, the head's logits.

A mode sees every op of a forward and follows what its results were made of, by meaning: a selection tells a router, the
GEMM behind it the router's scores; reading rows by a choice tells dispatch; gates on rows, and adding rows up by a
choice, tell combine; a running sum and its exponential tell a scan, what they scale B and C; a log-softmax tells the
head; arithmetic on ids tells rows of n-grams. Streams of a residual and loops over depth are told when the forward is
over (`streams`, `depths`). No name of a module or model counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megacpp_compile._torch.dispatch import TorchDispatchMode
from megacpp_compile._torch.ops import OpOverload
from megacpp_compile._torch.pytree import tree_leaves
from megacpp_compile.lowerings._traits import name_of, traits_of
from megacpp_compile.memory.depths import Calls, mark_depths
from megacpp_compile.memory.made import Made, mixes_few, written
from megacpp_compile.memory.streams import mark_streams

# In the order of a report. Every kept storage is in one of them.
FIELDS = {
    "router input": "what a router's GEMM reads",
    "router scores": "results of that GEMM up to the selection, casts to float32 included",
    "dispatch": "choices, gates, one-hot masks and places of rows; they grow with top-k, not with experts' weights",
    "gathered rows": "rows of tokens, read by a choice",
    "expert hiddens": "what experts compute of such rows",
    "combine": "rows times gates, and their sums for each token",
    "attention": "operands and results of attention cores, scores that are written out included",
    "in projections": "results of the projections that convolutions and scans read, as Mamba's in_proj",
    "convolution": "results of causal convolutions, their activation, and operands that are no projections",
    "B and C": "what the decays of a scan scale: B and C, keys and queries, and their products, made of those above",
    "scan states": "running sums along the tokens, decays made of them, and what is computed with either",
    "residual streams": "streams of a residual that blocks write to with weights, as they pass from block to block",
    "stream mixing": "what mixes such streams: normed copies, coefficients, and what a block reads of them",
    "n-gram memory": "rows read by hashed ids, and keys, values and gates made of them",
    "depth loop": "all that the calls of one block in a row keep, beside other layers: multi-token prediction",
    "head logits": "what a loss over classes keeps: logits, their float32 copy, log-probabilities",
    "GEMM results": "of other GEMMs, and their inputs",
    "elementwise": "norms, activations, sums, masks",
    "inputs": "what no op of the forward has made",
}
_GATHERS = ("aten::index", "aten::index_select", "aten::gather", "aten::embedding", "aten::take")
_ADDS = ("aten::index_add", "aten::scatter_add", "aten::index_put", "aten::scatter_reduce", "aten::scatter")
_BATCHED = ("aten::bmm", "aten::baddbmm")
_GEMMS = ("aten::mm", "aten::addmm", *_BATCHED)
_SOFTMAX = ("aten::_softmax", "aten::softmax", "aten::_safe_softmax")
_ADDITIONS = ("aten::add", "aten::sub", "aten::cat", "aten::where", "aten::lerp")
_PRODUCTS = ("aten::mul", "aten::div")
_HASHES = ("aten::bitwise_xor", "aten::remainder", "aten::fmod", "aten::bitwise_and")
_RUNNING = ("aten::cumsum", "aten::logcumsumexp", "aten::cumprod")
_LOSSES = ("aten::_log_softmax", "aten::log_softmax", "aten::nll_loss_forward", "aten::logsumexp")


class FieldWatch(TorchDispatchMode):
    """Follows the ops inside of a `with`; `of(tensor)` says what it has seen of a tensor that is alive."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Made] = {}  # by storage, whose address may be another's later: its maker says so again
        self._order: list[Made] = []
        self._calls = Calls()

    def __enter__(self) -> FieldWatch:
        self._calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._calls.__exit__()
        mark_streams(self._order)
        mark_depths(self._order)

    def of(self, t: Tensor) -> Made:
        return self._known(t) or Made()

    def _known(self, t: Tensor) -> Made | None:
        return self._made.get(t.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = list(_tensors((args, kwargs)))
        parents = tuple(dict.fromkeys(m for t in operands if (m := self._known(t))))
        known = {t.untyped_storage()._cdata for t in operands}
        result = func(*args, **(kwargs or {}))
        new = {t.untyped_storage()._cdata: t for t in _tensors(result)}
        new = {key: t for key, t in new.items() if key not in known or _writes(func)}  # else a view
        if new:
            first = next(iter(new.values()))
            made = self._classify(func, operands, parents)
            made.op, made.numel, made.calls = name_of(func).removesuffix("_"), first.numel(), self._calls.stack
            made.computed = made.gemm or made.op == "aten::convolution" or any(p.computed for p in parents)
            made.hash = _hash(made.op, parents) if _whole(first) else 0
            if made.op == "aten::mul":
                made.written = written(operands, [self.of(t).computed for t in operands], made.numel)
            self._order.append(made)
            self._made.update(dict.fromkeys(new, made))
        return result

    def _classify(self, func: Any, operands: list[Tensor], parents: tuple[Made, ...]) -> Made:
        name, traits = name_of(func).removesuffix("_"), traits_of(func)
        rows, choice = any(p.rows for p in parents), any(p.choice for p in parents)
        floats = [t for t in operands if t.is_floating_point()]
        if traits.selection:
            if floats:
                _router(parents)
            return Made("dispatch", parents, choice=True)
        if self._weighs_values(name, operands, parents) and not (rows or choice):
            scores = _back(parents, "attention")  # written out: softmax back to the GEMM of queries and keys
            _back(tuple(p for made in scores for p in made.parents), "attention")
            return Made("attention", parents, gemm=True, mixes=True)
        if traits.core:
            _back(parents, "attention")
            return Made("attention", parents, mixes=True)
        if any(p.hash == 2 for p in parents) and name in _GATHERS and floats and not choice:
            for index in (p for p in parents if p.hash):
                index.field = "n-gram memory"
            return Made("n-gram memory", parents, memory=True)
        if _remembers(name, parents, traits.gemm):
            return Made("n-gram memory", parents, gemm=traits.gemm, memory=True)
        if name == "aten::convolution":
            _back(parents, "convolution", "in projections")
            return Made("convolution", parents, mixes=True)
        if name in _LOSSES and not choice:
            _back(parents, "head logits")
            return Made("head logits", parents)
        if name in _GATHERS and choice:
            return self._gathered(floats, parents)
        if name in _ADDS and choice:
            return Made("combine", parents) if rows or _combined(parents) else Made("dispatch", parents, choice=True)
        if not rows and not choice and (scan := self._scanned(name, floats)) is not None:
            self._scales(name, traits.gemm, floats, parents)
            return Made("scan states", parents, gemm=traits.gemm, summed=scan, mixes=name in _RUNNING)
        if traits.gemm:
            field = "expert hiddens" if rows else "GEMM results"
            product = len(floats) > 1 and all(self.of(t).computed for t in floats)
            few = name in _GEMMS and mixes_few(operands)
            return Made(field, parents, gemm=True, rows=rows, product=product, few=few)
        weighed = any((made := self._made.get(t.untyped_storage()._cdata)) and made.choice for t in floats)
        hiddens = rows or any(not p.choice and p.field in ("GEMM results", "elementwise") for p in parents)
        if choice and weighed and hiddens:
            return Made("combine", parents, rows=rows)
        if rows:
            masked = choice and all(p.field == "gathered rows" for p in parents if p.rows)
            return Made(_rows_field(parents, masked), parents, rows=True)
        if choice:
            return Made("dispatch", parents, choice=True)
        if parents and all(p.field == "convolution" for p in parents) and any(p.mixes for p in parents):
            return Made("convolution", parents)  # its activation
        return Made("elementwise", parents, softmax=name in _SOFTMAX or any(p.softmax for p in parents))

    def _weighs_values(self, name: str, operands: list[Tensor], parents: tuple[Made, ...]) -> bool:
        """Whether it is the second GEMM of an attention that is written out; streams are mixed by softmaxes, too, but
        not by those of scores."""
        if name not in _BATCHED or not any(p.softmax for p in parents):
            return False
        return not mixes_few(operands) or any(m.product for m in _ancestors(p for p in parents if p.softmax))

    def _scales(self, name: str, gemm: bool, floats: list[Tensor], parents: tuple[Made, ...]) -> None:
        """Put what a scan's decays are made of and what they scale in their fields."""
        if name in _RUNNING:
            decayed = _ancestors(parents)
        elif name in _PRODUCTS or gemm:
            decayed = _ancestors(made for t in floats if not (made := self.of(t)).summed)
            if any(m.field == "scan states" for m in decayed):
                return  # a result of the scan, such as the states of the chunks before
            for made in decayed:
                if made.field in ("GEMM results", "elementwise") and (made.product or not made.gemm):
                    made.field = "B and C"
        else:
            return
        for made in decayed:
            if made.field == "GEMM results":
                made.field = "in projections"

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


def _back(parents: tuple[Made, ...], field: str, gemms: str = "") -> list[Made]:
    """Put what an op reads in `field`, back through elementwise results to the GEMMs that made it; returns those.
    gemms: the field of these, where it is another one."""
    found: list[Made] = []
    todo, seen = list(parents), set[Made]()
    while todo:
        made = todo.pop()
        if made in seen or made.field not in ("GEMM results", "elementwise"):
            continue
        seen.add(made)
        made.field = gemms if gemms and made.gemm else field
        if made.gemm:
            found.append(made)
        else:
            todo.extend(made.parents)
    return found


def _ancestors(parents: Iterable[Made]) -> set[Made]:
    """What these are made of, themselves included: back through elementwise results and GEMMs of two activations, up to
    anything else."""
    todo, seen = list(parents), set[Made]()
    while todo:
        made = todo.pop()
        if made not in seen:
            seen.add(made)
            if made.field in ("elementwise", "B and C", "GEMM results") and (made.product or not made.gemm):
                todo.extend(made.parents)
    return seen


def _remembers(name: str, parents: tuple[Made, ...], gemm: bool) -> bool:
    """Whether what an op makes of rows of n-grams is theirs: all but a sum with something as large."""
    rows = [p.numel for p in parents if p.memory]
    others = [p for p in parents if not p.memory]
    if not rows:
        return False
    if name in _ADDITIONS:
        return all(p.numel < max(rows) for p in others)
    return not gemm or all(not p.parents for p in others)


def _rows_field(parents: tuple[Made, ...], masked: bool) -> str:
    if _combined(parents):
        return "combine"
    return "gathered rows" if masked else "expert hiddens"


def _combined(parents: tuple[Made, ...]) -> bool:
    return any(p.field == "combine" for p in parents)


def _hash(op: str, parents: tuple[Made, ...]) -> int:
    """`Made.hash` of whole numbers."""
    most = max((p.hash for p in parents), default=0)
    if op in _HASHES and most:
        return 2
    return max(most, 1) if op == "aten::mul" else most


def _whole(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def _writes(func: Any) -> bool:
    return isinstance(func, OpOverload) and func._schema.is_mutable


def _tensors(values: Any) -> Iterator[Tensor]:
    return (t for t in tree_leaves(values) if isinstance(t, torch.Tensor))
