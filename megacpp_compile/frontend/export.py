"""A frame's ATen graph by torch's export, in one run of the frame where the export makes two.

`aot_export_module` runs a frame to learn which inputs it writes to, and once more to record it. Through thousands of
nodes, as of a recurrence that loops over rows and chunks, the first run is the longer one. Here it is given a graph
that does nothing but write to what the frame is seen to write to, and the second run is held to that answer.

What makes it safe: of what the first run finds, an export before autograd and without a backward uses how many outputs
there are, which inputs are written to (they become outputs), and the tokens that order effects (they become inputs).
The outputs are as many, by construction. Functionalisation marks every input that is written to while the frame is
recorded, an op that is recorded whole and writes unsaid (`instance_norm`) counts up the version of what it is given, as
no functional op does, and tokens would be inputs that nobody counted: all are looked at, and a frame that is otherwise
than it seemed is exported again, in two runs. So is one that fails, as its error is to be that of the usual way. Guards
on symbolic sizes are those of the recorded run, which meets all that the first would; where it finds that an input's
symbol is a number or another symbol, the frame is recorded once more, for the graph to say so from its beginning on.
What is known at run time only, as how many tokens an expert has, gets its symbols in the run that is recorded. No
tensor has a class of its own; and what shares memory, where any is written to, is left to torch, which then asks for
gradients, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megacpp_compile._torch import modes
from megacpp_compile._torch._registry import present
from megacpp_compile._torch.dispatch import FunctionalTensor, is_traceable_wrapper_subclass, proxy_mode
from megacpp_compile._torch.fakes import FakeTensor, FakeTensorMode, disable_fake_tensor_cache
from megacpp_compile._torch.functorch import (
    aot_export_module,
    has_changed_metadata,
    has_changed_storage,
    has_resized_storage,
    is_written_to,
)
from megacpp_compile.frontend.hidden_writes import storage_id, storage_of, written_tensors
from megacpp_compile.fx.edit import dynamo_value

# One value in so many that has a size known at run time only is many.
MANY = 4
# What an input must not be, written to or not.
_REFUSED = (has_changed_metadata, has_changed_storage, has_resized_storage)


def export(gm: GraphModule, fakes: Sequence[Any]) -> tuple[GraphModule, Any]:
    """(ATen graph, signature) of Dynamo's graph `gm`, which is left as it is; raises what torch's tracing raises."""
    with _without_lookups(gm, fakes):
        if _may_run_once(gm, fakes):
            with modes.restored(), contextlib.suppress(Exception):  # whatever it is, the usual way raises it
                known = _numbers_known(fakes)
                exported = _export_once(gm, fakes)
                if exported is not None and known != _numbers_known(fakes):
                    exported = _export_once(gm, fakes)
                if exported is not None:
                    return exported
        return _export(gm, fakes)


@contextlib.contextmanager
def _without_lookups(gm: GraphModule, fakes: Sequence[Any]) -> Iterator[None]:
    """Fake tensors without torch's cache of results where many sizes are known at run time only: each expert's rows are
    a number of their own, so that nothing is found there, and all of it is entered."""
    unbacked = sum(_is_unbacked(dynamo_value(n)) for n in gm.graph.nodes)
    with contextlib.ExitStack() as stack:
        if unbacked > len(gm.graph.nodes) // MANY:
            for mode in _modes(fakes):
                stack.enter_context(disable_fake_tensor_cache(mode))
        yield


def _modes(fakes: Sequence[Any]) -> list[FakeTensorMode]:
    return list({id(x.fake_mode): x.fake_mode for x in fakes if isinstance(x, FakeTensor)}.values())


def _export_once(gm: GraphModule, fakes: Sequence[Any]) -> tuple[GraphModule, Any] | None:
    """The export in one run; None where the frame was otherwise than it seemed."""
    frame, versions = _RunOnce(gm), _versions(fakes)
    exported, signature = _export(frame, fakes)
    own = (frame.named_parameters, frame.named_buffers)
    given = [*(name for of in own for name, _ in of(remove_duplicate=False)), *fakes]
    counted = len(exported.graph.find_nodes(op="placeholder")) == len(given)
    return (exported, signature) if frame.held and counted and versions == _versions(fakes) else None


def _numbers_known(fakes: Sequence[Any]) -> list[Any]:
    """What is known of the symbols of the frame's inputs: another symbol, or a number, that each is."""
    envs = (mode.shape_env for mode in _modes(fakes))
    known = (env.replacements.items() for env in envs if env is not None)
    return [{old: new for old, new in each if not free_unbacked_symbols(old)} for each in known]


def _export(gm: GraphModule, fakes: Sequence[Any]) -> tuple[GraphModule, Any]:
    exported, signature = aot_export_module(gm, fakes, trace_joint=False, pre_dispatch=True)
    assert isinstance(exported, GraphModule)
    _drop_idle_tokens(exported, signature)
    return exported, signature


def _drop_idle_tokens(gm: GraphModule, signature: Any) -> None:
    """Take tokens that order effects off inputs and outputs, where none is used in between: an op that is recorded
    whole (`linalg.inv`, which checks its result) has its effects within itself, and gets tokens when it is lowered."""
    if not (names := list(getattr(signature, "input_tokens", ()))):
        return
    tokens = [n for n in gm.graph.find_nodes(op="placeholder") if n.name in names]
    output = gm.graph.output_node()
    passed_on, rest = output.args[0][: len(names)], output.args[0][len(names) :]  # type: ignore[index]
    if list(passed_on) != tokens or any(set(token.users) != {output} or token in rest for token in tokens):
        return
    output.args = (tuple(rest),)
    for token in tokens:
        gm.graph.erase_node(token)
    gm.recompile()


def _versions(fakes: Sequence[Any]) -> list[int]:
    return [x._version for x in fakes if isinstance(x, torch.Tensor) and not x.is_inference()]


def _may_run_once(gm: GraphModule, fakes: Sequence[Any]) -> bool:
    values = [*fakes, *(dynamo_value(n) for n in gm.graph.nodes)]
    if not present(FunctionalTensor, proxy_mode, is_written_to, *_REFUSED):
        return False
    if any(map(_has_class, values)) or any(map(_is_number, _returned(gm.graph))):
        return False
    memory = [m for x in (*fakes, *gm.buffers()) if (m := storage_id(x)) is not None]
    return len(set(memory)) == len(memory) or not _writes(gm.graph).intersection(map(storage_of, _given(gm.graph)))


def _given(graph: fx.Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]


def _writes(graph: fx.Graph) -> set[int]:
    """The memory that the calls of `graph` say they write to."""
    memory = (storage_of(written) for n in graph.nodes for written in written_tensors(n))
    return {m for m in memory if m is not None}


def _returned(graph: fx.Graph) -> list[Any]:
    return [dynamo_value(n) for n in graph.output_node().all_input_nodes]


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_unbacked(value: Any) -> bool:
    return bool(free_unbacked_symbols(value)) if _is_number(value) or isinstance(value, torch.Tensor) else False


def _has_class(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


class _RunOnce(GraphModule):
    """`gm` while it is recorded; before, a graph of as many outputs that only writes to what `gm` is seen to write to.

    held: whether the graph that was run last was the frame's own, to its end, and wrote to that and nothing else of
    what it is given.
    """

    held = False
    _writing: fx.Graph | None = None

    def __init__(self, gm: GraphModule) -> None:
        given, memory = _given(gm.graph), _writes(gm.graph)
        self._written = [storage_of(n) in memory for n in given]
        super().__init__(gm, _with_check(gm.graph, given, self._check))
        self._writing = _writing_alone(gm.graph, given, self._written)
        self._autocast = modes.autocast_state()

    @property
    def graph(self) -> fx.Graph:  # type: ignore[override]
        self.held = False
        return self._graph if self._writing is None or proxy_mode() is not None else self._writing

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        self._graph = graph  # without code: the export interprets it

    def _check(self, given: Sequence[Any], outputs: Any) -> Any:
        """Called with what the frame was given, and what it is about to return, which it returns."""
        tensors = [(x, written) for x, written in zip(given, self._written, strict=True) if isinstance(x, torch.Tensor)]
        seen = all(isinstance(x, FunctionalTensor) and _is_as_seen(x.elem, written) for x, written in tensors)
        self.held = seen and self._autocast == modes.autocast_state()
        return outputs


def _is_as_seen(tensor: torch.Tensor, written: bool) -> bool:
    return is_written_to(tensor) is written and not any(changed(tensor) for changed in _REFUSED)


def _with_check(of: fx.Graph, given: Sequence[Node], check: Any) -> fx.Graph:
    graph, copies = fx.Graph(), dict[Node, Node]()
    outputs = graph.graph_copy(of, copies)
    graph.output(graph.call_function(check, ([copies[n] for n in given], outputs)))
    return graph


def _writing_alone(of: fx.Graph, given: Sequence[Node], written: Sequence[bool]) -> fx.Graph:
    graph = fx.Graph()
    for node, is_written in zip(given, written, strict=True):
        if is_written or node.op == "placeholder":
            copy = graph.node_copy(node)
        if is_written:
            graph.call_function(_write, (copy,))
    outputs = of.output_node().args[0]
    graph.output(fx.map_arg(outputs, lambda _: graph.call_function(torch.empty, ((),))))
    return graph


def _write(tensor: torch.Tensor) -> None:
    with torch.no_grad():  # what asks for a gradient itself is written to in no other way
        tensor.zero_()
