"""What Inductor decides on CUDA graphs, of each frame, for the report: captured, or why not.

Asked for by `mode="reduce-overhead"`, "max-autotune", or `inductor={"triton.cudagraphs": True}`. Inductor decides when
it has made the code of a graph, and says so in the box that it is given; it records graphs in the first calls. A call
then runs the code itself where an input it writes to may have moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule

from megacpp_compile._torch.inductor import config as inductor_config
from megacpp_compile._torch.inductor import decision_on_cuda_graphs
from megacpp_compile.lowerings._traits import name_of, traits_of

SETTING = "triton.cudagraphs"
# What is told before there is code: of a frame for CUDA until it is made, of another for good.
UNTOLD, ELSEWHERE = "not known: the code came from a cache", "not captured: cpu"


def asked(patches: Mapping[str, Any]) -> bool:
    """Whether Inductor's settings ask for CUDA graphs. patches: those of the frame, before the global ones."""
    return bool(patches.get(SETTING, inductor_config.triton.cudagraphs))


class Watched:
    """In the place of what makes code of a partitioned graph: the same, which tells `on_cuda_graph` of the frame."""

    def __init__(self, inner_compile: Callable[..., Any], on_cuda_graph: Callable[[str], None]) -> None:
        self.inner_compile, self.report = inner_compile, on_cuda_graph
        self.found: dict[str, str] = {}

    def __call__(self, gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        part = "backward" if kwargs.get("is_backward") else "forward"
        held = outside(gm.graph)
        code = self.inner_compile(gm, *args, **kwargs)
        self.found[part] = _text(code, kwargs, held or outside(gm.graph))
        reported = set(self.found.values())
        parts = "; ".join(f"{part} {text}" for part, text in self.found.items())
        self.report(reported.pop() if len(reported) == 1 else parts)
        return code


def _text(code: Any, given: Mapping[str, Any], held: Mapping[str, str]) -> str:
    decision = decision_on_cuda_graphs(code, given)
    if decision.captured and decision.writes:
        return (
            f"captured where the {decision.writes} inputs that it writes to do not move: "
            "torch._dynamo.mark_static_address(input) promises so"
        )
    but = "".join(f", without {op} ({why})" for op, why in held.items())
    if decision.captured:
        return "captured" + (f" in {decision.parts} parts" if decision.parts > 1 else "") + but
    return f"not captured: {decision.reason or 'Inductor does not say why'}{but}"


def outside(graph: fx.Graph) -> dict[str, str]:
    """Op -> why no CUDA graph can hold it, of those in `graph` that are declared so."""
    found = {name_of(node): traits_of(node).uncapturable for node in graph.nodes if node.op == "call_function"}
    return {name: why for name, why in found.items() if why}


def is_for_cuda(inputs: Any) -> bool:
    """Whether there is a tensor on a GPU among `inputs`."""
    return any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in inputs)
