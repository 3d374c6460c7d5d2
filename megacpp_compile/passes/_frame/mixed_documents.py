"""Warns of layers that run across packed documents which other layers of the model keep apart.

In a hybrid model attention tells documents apart, by positions that start anew or by offsets, and a convolution or a
recurrence in plain PyTorch has no argument for them: each document then begins with the state that the one before has
left. Eager computes the same, so the code stays as it is: a warning and a near miss name the layers, and `strict` makes
it an error.

Whether a row holds several documents is data. What tells them apart is computed once more beside the compiled code, of
whole numbers alone, in the first call and in each whose number is a power of two, until several are seen. Frames of one
model, such as its blocks, share a `Ledger`; those that run from then on are told of.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from megacpp_compile._torch import calls
from megacpp_compile._torch.fakes import FakeTensor
from megacpp_compile._torch.guards import TracingContext
from megacpp_compile.config.options import Config
from megacpp_compile.config.warn_once import raise_or_warn
from megacpp_compile.errors import MixedDocumentsError
from megacpp_compile.frontend.capture import Captured
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.provenance import module_fqn, source_line
from megacpp_compile.fx.sizes import elements
from megacpp_compile.fx.walks import ancestors
from megacpp_compile.passes._frame.document_sites import CAUSAL, MASK, OFFSETS, Apart, kept_apart, run_across
from megacpp_compile.report import collector, log
from megacpp_compile.report.records import Frame, MissedFusion

TAG = "mixed-documents"
# Elements of what documents are told by: more is no row of numbers.
_MOST = 1 << 24


@dataclasses.dataclass
class Mixed:
    """A frame's part. across: near misses of what runs across documents. keeper: who keeps them apart, "" where nobody
    does here; `told(*inputs)` then gives what they are told by, each as `forms` has it."""

    across: list[MissedFusion]
    keeper: str = ""
    told: GraphModule | None = None
    forms: tuple[str, ...] = ()


class Ledger:
    """What is known of one model's documents: who was seen to keep several apart, and what was said."""

    def __init__(self) -> None:
        self.keeper = ""
        self.said = set[tuple[str, str]]()

    def tell(self, across: Sequence[MissedFusion], frame: Frame, config: Config) -> None:
        """Warn of what runs across documents now and was not said. Raises MixedDocumentsError under `strict`."""
        new = {(miss.fqn or miss.source, miss.pass_name): miss for miss in across} if self.keeper else {}
        if not (new.keys() - self.said):
            return
        blocks = [block for block in new if block not in self.said]
        self.said |= new.keys()
        rows = [dataclasses.replace(new[block], reason=_reason(new[block], self.keeper)) for block in blocks]
        collector.emit_misses(frame, rows)
        raise_or_warn(MixedDocumentsError(blocks, self.keeper), config.strict)


def mixed(captured: Captured | None, misses: Sequence[MissedFusion], whole: bool, config: Config) -> Mixed | None:
    """What a frame, after the passes, has to do with documents; None where nothing. misses: what the passes nearly
    took. whole: whether it is all of a model. What goes wrong here is not worth a frame, but under `strict`."""
    if captured is None:
        return None
    try:
        return _mixed(captured, misses, whole)
    except Exception as error:
        if config.strict:
            raise
        log.logger.warning("documents are not looked for: %s: %s", type(error).__name__, str(error)[:300])
        return None


def _mixed(captured: Captured, misses: Sequence[MissedFusion], whole: bool) -> Mixed | None:
    graph = captured.gm.graph
    if whole and not run_across(graph, misses, ()):
        return None
    apart = [one for one in kept_apart(graph, captured.weights) if _is_told(one)]
    # Attention is compiled again for a mask: a frame without one runs where a row holds one document.
    found = [one for one in run_across(graph, misses, apart) if whole or one.what != CAUSAL]
    across = [_row(one.node, one.what) for one in found]
    if not apart or whole and not across:
        return Mixed(across) if across and not whole else None
    first = apart[0].node
    told = _computing(captured.gm, [one.told for one in apart])
    return Mixed(across, module_fqn(first) or source_line(first), told, tuple(one.form for one in apart))


def watching(
    compiled: Callable[..., Any], found: Mixed | None, frame: Frame, config: Config, model: Any = None
) -> Callable[..., Any]:
    """`compiled`, which looks for several documents in a row until it has seen them. model: whose frame it is; None for
    that of the call of torch's."""
    if found is None:
        return compiled
    return _Watched(compiled, found, frame, config, _ledger(model))


class _Watched:
    """A frame's code that looks for several documents, and tells of them, ahead of each call."""

    def __init__(
        self, compiled: Callable[..., Any], found: Mixed, frame: Frame, config: Config, ledger: Ledger
    ) -> None:
        self.compiled, self.found, self.frame, self.config, self.ledger = compiled, found, frame, config, ledger
        self.count = 0

    def __call__(self, *args: Any) -> Any:
        told, ledger = self.found.told, self.ledger
        if told is not None and not ledger.keeper:
            self.count += 1
            looks = self.count & (self.count - 1) == 0 and not _is_traced(args)
            if looks and several_documents(told(*args), self.found.forms):
                ledger.keeper = self.found.keeper
        ledger.tell(self.found.across, self.frame, self.config)
        return self.compiled(*args)

    def __reduce__(self) -> Any:
        """Code in a file is run by processes that have no report to tell."""
        return _itself, (self.compiled,)


def _itself(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return compiled


def if_several(found: Mixed | None) -> list[MissedFusion]:
    """What a frame that is not run would warn of, if a row of it held several documents."""
    rows = found.across if found is not None and found.keeper else []
    return [dataclasses.replace(miss, reason=f"{_reason(miss, found.keeper)}, if there are several") for miss in rows]  # type: ignore[union-attr]


def several_documents(told: Sequence[Tensor], forms: Sequence[str]) -> bool:
    """Whether any row holds several documents, by the tensors that tell, each of the form that it has."""
    return any(bool(_READ.get(form, _by_numbers)(x)) for x, form in zip(told, forms, strict=True))


def _by_numbers(x: Tensor) -> Tensor:
    """Where a number is another than the one before. Negative numbers, zeros behind all others, and tokens at the end
    that all differ, as padding by position 0 does, are no documents."""
    tokens = max((i for i, n in enumerate(x.shape) if n > 1), default=0)
    rows = x.movedim(tokens, -1).reshape(-1, x.shape[tokens]) if x.dim() else x.reshape(1, 1)
    padding = (rows < 0) | (rows.flip(-1).abs().cumsum(-1).flip(-1) == 0) & (rows != 0).any(-1, keepdim=True)
    begins = (rows[:, 1:] != rows[:, :-1]) & ~padding[:, 1:] & ~padding[:, :-1]
    alone = begins.flip(-1).cumprod(-1).flip(-1).bool()
    return (begins & ~alone).any()


def _by_offsets(x: Tensor) -> Tensor:
    return (x.reshape(-1).diff() > 0).sum() > 1


def _by_mask(x: Tensor) -> Tensor:
    """Where a token does not see the one before, nor that it, though each sees itself: padding is seen by nobody, and
    a window has the token before in it."""
    diagonals = [x.diagonal(at, -2, -1) for at in (0, -1, 1)]
    own, before, behind = (d if d.dtype is torch.bool else d > -1e4 for d in diagonals)
    if x.dtype is torch.bool and not own.any():  # it says what is hidden
        own, before, behind = ~own, ~before, ~behind
    apart = own[..., 1:] & own[..., :-1] & ~before & ~behind
    return (apart.any(-1) & ~apart.all(-1)).any()


_READ = {OFFSETS: _by_offsets, MASK: _by_mask}


def _is_told(one: Apart) -> bool:
    """Whether it can be told by computing little more than it."""
    for node in ancestors([one.told]):
        held = value(node)
        if node.op == "call_function" and isinstance(held, Tensor):
            if held.is_floating_point() or held.is_complex() or elements(held) > _MOST:
                return False
    size = value(one.told).shape[0] if one.form == OFFSETS else 0
    return not (isinstance(size, int) and 0 < size < 3)


def _computing(gm: GraphModule, results: Sequence[Node]) -> GraphModule:
    """What computes `results` alone of the inputs of `gm`."""
    needed = set(ancestors(results))
    graph, copies = Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    return GraphModule(gm, graph)


def _is_traced(args: Sequence[Any]) -> bool:
    """Whether nothing may be read of the call's tensors: they are fakes, or a CUDA graph is being recorded."""
    if TracingContext.try_get() is not None or any(isinstance(a, FakeTensor) for a in args):
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _row(node: Node, what: str) -> MissedFusion:
    return MissedFusion(what, module_fqn(node), source_line(node), node.name, TAG, "")


def _reason(miss: MissedFusion, keeper: str) -> str:
    return f"{miss.pass_name} runs across the documents of a row, which {keeper} keeps apart, as it does in eager"


def _ledger(model: Any) -> Ledger:
    call = calls.current() if model is None else None
    owner = model if call is None else call.context
    return Ledger() if owner is None else _ledgers.setdefault(owner, Ledger())


_ledgers: weakref.WeakKeyDictionary[Any, Ledger] = weakref.WeakKeyDictionary()
