"""Large outputs beside a loss, such as logits, whose gradient nobody asks for in most steps.

AOTAutograd makes one backward of all outputs of a frame. Where a step calls `loss.backward()` alone, autograd hands it
zeros for the logits beside the loss, as large as they are, which are held to the end of backward. Such an output leaves
the frame's graph detached here. What the caller is given has its place in autograd's graph by itself: a gradient that
does arrive there runs the frame once more, as it came, in which everything has gradients, and from then on the frame
is compiled like that.

Not for frames that draw random numbers or write to what they are given, which would not be the same once more; not
among ranks, whose parameters may be gone by then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from megacpp_compile._torch import modes
from megacpp_compile._torch.dispatch import is_traceable_wrapper_subclass
from megacpp_compile.frontend.dropped_outputs import computed_from, is_loss
from megacpp_compile.frontend.hidden_writes import has_gradient, storage_of, written_tensors
from megacpp_compile.frontend.hoisted_input_writes import RANDOM
from megacpp_compile.frontend.undeclared_aliases import drops
from megacpp_compile.fx.copies import copied, in_place_of
from megacpp_compile.fx.differentiated import trains
from megacpp_compile.fx.edit import argument, called, dynamo_value
from megacpp_compile.fx.sizes import nbytes
from megacpp_compile.report import log

# Bytes of an output for which a step takes a node more in autograd's graph, some 0.1 ms of the host's time.
LARGE = 2**26


class LaterGradients:
    """A frame whose outputs at `places` have no gradients in its graph `gm`, the frame's own `whole` where there are
    none. backend: of Dynamo's, for `whole` with gradients of all outputs."""

    def __init__(self, whole: GraphModule, places: Sequence[int], backend: Callable[..., Any]) -> None:
        self.whole, self.places, self.backend = whole, tuple(places), backend
        self.gm = _detached(whole, self.places) if places else whole
        self.asked: Callable[..., Any] | None = None

    def adapt(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`, with outputs at `places` that can be differentiated."""
        if not self.places:
            return compiled

        def run(*args: Any) -> Any:
            if self.asked is not None:
                return self.asked(*args)
            results = list(compiled(*args))
            if torch.is_grad_enabled():
                later = _Later.apply(self, [results[i] for i in self.places], *args)
                for i, result in zip(self.places, later, strict=True):
                    results[i] = result
            return tuple(results)

        return run

    def again(self, args: Sequence[Any]) -> Sequence[Tensor]:
        """The outputs at `places` of the frame as it came."""
        if self.asked is None:
            names = ", ".join(n.name for n in _outputs(self.whole) if isinstance(n, Node))
            log.logger.info("compiled again, as gradients are asked of more than the loss: %s", names)
            self.asked = torch.compile(self.whole, backend=self.backend)
        results = self.asked(*args)
        return [results[i] for i in self.places]


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, frame: LaterGradients, results: list[Tensor], *args: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.frame, ctx.autocast = frame, modes.autocast_state()
        ctx.tensors = [isinstance(a, Tensor) for a in args]
        ctx.others = [a for a in args if not isinstance(a, Tensor)]
        ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)))
        return tuple(r.view_as(r) for r in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        saved, others, wanted = iter(ctx.saved_tensors), iter(ctx.others), ctx.needs_input_grad[2:]
        args = [next(saved if one else others) for one in ctx.tensors]
        with torch.enable_grad(), _autocast(ctx.autocast):
            results = ctx.frame.again(args)
        pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if g is not None]
        leaves = [a for a, asks in zip(args, wanted, strict=True) if asks]
        found = iter(torch.autograd.grad([r for r, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True))
        return None, None, *(next(found) if asks else None for asks in wanted)


def places_of(gm: GraphModule, example_inputs: Sequence[Any]) -> list[int]:
    """The places of large outputs of Dynamo's graph `gm` that a loss beside them is computed from, and that a second
    run of the frame would make again."""
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not trains(example_inputs) or ranks or any(map(is_traceable_wrapper_subclass, example_inputs)):
        return []
    outputs = _outputs(gm)
    losses = [n for n in outputs if isinstance(n, Node) and is_loss(dynamo_value(n)) and has_gradient(n)]
    memory = [storage_of(n) for n in {*outputs, *gm.graph.find_nodes(op="placeholder")} if isinstance(n, Node)]
    found = [
        i for i, n in enumerate(outputs)
        if isinstance(n, Node) and n not in losses and has_gradient(n) and nbytes(dynamo_value(n)) >= LARGE
        and outputs.count(n) == memory.count(storage_of(n)) == 1 and computed_from(losses, n)
    ]  # fmt: skip
    if not found or any(_differs(m) for m in gm.modules() if isinstance(m, GraphModule)):
        return []
    log.logger.info("without a gradient until one is asked for: %s", ", ".join(outputs[i].name for i in found))
    return found


def _outputs(gm: GraphModule) -> list[Any]:
    return list(gm.graph.output_node().args[0])  # type: ignore[arg-type]


def _differs(gm: GraphModule) -> bool:
    """Whether a second run of `gm` would not be the first's: it draws random numbers or writes to what it was given."""
    given = {storage_of(n) for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")} - {None}
    return any(_draws(n) or any(storage_of(w) in given for w in written_tensors(n)) for n in gm.graph.nodes)


def _draws(node: Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = called(node)
    if "scaled_dot_product" in name:
        return argument(node, 4, "dropout_p", 0.0) != 0
    if name.removesuffix("_").endswith("dropout"):
        return drops(node)
    seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return seeded or RANDOM.search(name) is not None or "rrelu" in name


def _detached(gm: GraphModule, places: Sequence[int]) -> GraphModule:
    """A copy of Dynamo's graph `gm` whose outputs at `places` are detached."""
    graph, copies = copied(gm.graph)
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    with graph.inserting_before(output):
        for i in places:
            old, results[i] = results[i], graph.call_method("detach", (results[i],))
            results[i].meta |= old.meta | {"example_value": dynamo_value(old).detach()}
    output.args = (tuple(results),)
    return in_place_of(gm, graph, copies)


@contextlib.contextmanager
def _autocast(states: Sequence[tuple[str, bool, torch.dtype]]) -> Iterator[None]:
    with contextlib.ExitStack() as opened:
        for kind, enabled, dtype in set(states) - set(modes.autocast_state()):
            opened.enter_context(torch.autocast(kind, dtype, enabled))
        yield
