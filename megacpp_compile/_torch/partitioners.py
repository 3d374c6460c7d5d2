"""What a partitioner of torch's is about to make, told before it has made all of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx
from torch.fx import Node

from megacpp_compile._torch._registry import find

_WHERE = "torch._functorch.partitioners"
_EXTRACT = "_extract_graph_with_inputs_outputs"

# Is told the nodes of the joint graph that a backward takes, and that backward, whose inputs are those in their order.
Report = Callable[[Sequence[Node], fx.Graph], None]


# Of two threads the second would put back what the first had put there.
_lock = threading.RLock()


@contextlib.contextmanager
def reporting_backward(report: Report) -> Iterator[None]:
    """Call `report` once, of what is partitioned inside by this thread: when the partitioner has chosen what to save
    and made the backward to find out what of it is read, before it makes both halves. What `report` raises ends the
    partitioner. Never called on a torch that has no such step."""
    with _lock:
        yield from _reporting(report)


def _reporting(report: Report) -> Iterator[None]:
    module = find(_WHERE)
    extract = getattr(module, _EXTRACT, None)
    if extract is None:
        yield
        return
    thread, reported = threading.get_ident(), False

    def telling(graph: fx.Graph, inputs: Sequence[Node], *more: Any, **named: Any) -> fx.Graph:
        nonlocal reported
        made: fx.Graph = extract(graph, inputs, *more, **named)
        if not reported and "backward" in (*more[2:], *named.values()) and thread == threading.get_ident():
            reported = True
            report(inputs, made)
        return made

    setattr(module, _EXTRACT, telling)
    try:
        yield
    finally:
        setattr(module, _EXTRACT, extract)


def adds_to_what_is_saved() -> bool:
    """Whether torch's settings have a partitioner change what it saves when both halves are made: offload or quantize
    it."""
    patterns = find("torch._inductor.config.post_grad_fusion_options", {})
    return bool(find("torch._functorch.config.enable_activation_offloading", False)) or (
        "activation_quantization_aten_pass" in patterns
    )
