"""A frame's ATen graph by torch's export, in one run of the frame where the export makes two.

`aot_export_module` runs a frame to learn which inputs it writes to, and once more to record it. Through thousands of
nodes, as of a recurrence that loops over rows and chunks, the first run is the longer one. Where nothing seems to be
written it is given a graph without computation, of which the answer is "nothing", and the second run is held to that.

What makes it safe: of what the first run finds, an export before autograd and without a backward uses how many outputs
there are, which inputs are written to (they become outputs), and the tokens that order effects (they become inputs).
The outputs are as many, by construction. Functionalisation marks every input that is written to while the frame is
recorded, and tokens would be inputs that nobody counted: both are looked at, and a frame that has either is exported
again, in two runs. So is one that fails, as its error is to be that of the usual way. Sizes are numbers, so that no
guard is missed, and no tensor has a class of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node

from megacpp_compile._torch import modes
from megacpp_compile._torch._registry import present
from megacpp_compile._torch.dispatch import FunctionalTensor, is_traceable_wrapper_subclass, proxy_mode
from megacpp_compile._torch.functorch import (
    aot_export_module,
    has_changed_metadata,
    has_changed_storage,
    has_resized_storage,
    is_written_to,
)
from megacpp_compile.frontend.hidden_writes import storage_of, written_tensors
from megacpp_compile.fx.edit import dynamo_value

_MARKS = (is_written_to, has_changed_metadata, has_changed_storage, has_resized_storage)


def export(gm: GraphModule, fakes: Sequence[Any]) -> tuple[GraphModule, Any]:
    """(ATen graph, signature) of Dynamo's graph `gm`, which is left as it is; raises what torch's tracing raises."""
    if _may_run_once(gm, fakes):
        with modes.restored(), contextlib.suppress(Exception):  # whatever it is, the usual way raises it
            frame = _RunOnce(gm)
            exported, signature = _export(frame, fakes)
            own = (frame.named_parameters, frame.named_buffers)
            given = [*(name for of in own for name, _ in of(remove_duplicate=False)), *fakes]
            if frame.held and len(exported.graph.find_nodes(op="placeholder")) == len(given):
                return exported, signature
    return _export(gm, fakes)


def _export(gm: GraphModule, fakes: Sequence[Any]) -> tuple[GraphModule, Any]:
    exported, signature = aot_export_module(gm, fakes, trace_joint=False, pre_dispatch=True)
    assert isinstance(exported, GraphModule)
    return exported, signature


def _may_run_once(gm: GraphModule, fakes: Sequence[Any]) -> bool:
    """Whether one run may do: saves a run for nothing where a frame writes to an input in the open."""
    if not present(FunctionalTensor, proxy_mode, *_MARKS):
        return False
    values = [*fakes, *(dynamo_value(n) for n in gm.graph.nodes)]
    if any(map(_is_symbolic, values)) or any(map(_has_class, values)):
        return False
    given = {storage_of(n) for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")} - {None}
    return not any(storage_of(written) in given for n in gm.graph.nodes for written in written_tensors(n))


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not all(isinstance(n, int) for n in value.shape)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _has_class(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


class _RunOnce(GraphModule):
    """`gm` while it is recorded; before, a graph of as many outputs that computes nothing.

    held: whether the graph that was run last was the frame's own, to its end, without a write to what it is given.
    """

    held = False
    _nothing: fx.Graph | None = None

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, _with_check(gm, self._check))
        self._nothing = _computing_nothing(gm.graph)
        self._autocast = modes.autocast_state()

    @property
    def graph(self) -> fx.Graph:  # type: ignore[override]
        self.held = False
        return self._graph if self._nothing is None or proxy_mode() is not None else self._nothing

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        self._graph = graph  # without code: the export interprets it

    def _check(self, given: Sequence[Any], outputs: Any) -> Any:
        """Called with what the frame was given, and what it is about to return, which it returns."""
        self.held = self._autocast == modes.autocast_state() and not any(map(_is_changed, given))
        return outputs


def _is_changed(given: Any) -> bool:
    """Whether what a frame was given has been written to, or may have been."""
    if not isinstance(given, torch.Tensor):
        return False
    return not isinstance(given, FunctionalTensor) or any(mark(given.elem) for mark in _MARKS)


def _with_check(gm: GraphModule, check: Any) -> fx.Graph:
    graph = fx.Graph()
    outputs = graph.graph_copy(gm.graph, copies := dict[Node, Node]())
    given = [new for old, new in copies.items() if old.op in ("placeholder", "get_attr")]
    graph.output(graph.call_function(check, (given, outputs)))
    return graph


def _computing_nothing(of: fx.Graph) -> fx.Graph:
    graph = fx.Graph()
    for node in of.find_nodes(op="placeholder"):
        graph.placeholder(node.name)
    outputs = of.output_node().args[0]
    graph.output(fx.map_arg(outputs, lambda _: graph.call_function(torch.empty, ((),))))
    return graph
