"""torch's own cut of a joint graph, looked at before it is made.

What a partitioner saves is known when it has chosen, in two thirds of its time. There the cut is held against what else
may be made of the graph: where it stands the partitioner goes on, else it stops, and what was made instead is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megacpp_compile._torch.functorch import fx_graph_cse
from megacpp_compile._torch.partitioners import adds_to_what_is_saved, reporting_backward
from megacpp_compile.fx.copies import module_like
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.numbers_for_symbols import SYMBOLIC
from megacpp_compile.remat.automatic import as_partitioned, plan_of_backward
from megacpp_compile.remat.joint_graph import joint
from megacpp_compile.remat.plan import Plan

Halves = tuple[GraphModule, GraphModule]
Cut = Callable[[GraphModule], Halves]


class FirstCut:
    """The cut that `cut` makes of the graph of `gm` as it is now. `gm` has another graph from then on, in which layers
    compute once what they do alike: the partitioner makes the same one of what it is given, which is thus copied once.
    outputs: how many of the forward's results are the model's own."""

    def __init__(self, cut: Cut, gm: GraphModule, outputs: int) -> None:
        given = gm.graph
        given.eliminate_dead_code()  # as the partitioner begins: of equal nodes the first that is read is kept
        self.cut, self.outputs, self.given = cut, outputs, module_like(gm, given)
        gm.graph = fx_graph_cse(given)
        self.forward = joint(gm.graph)[0]

    def halves(self) -> Halves:
        return self.cut(self.given)

    def where(self, stands: Callable[[Plan], bool]) -> Halves | None:
        """The halves if `stands`, asked once with the plan that the cut carries out in the graph of `gm`; else None."""
        asked: list[bool] = []

        def ask(plan: Plan) -> bool:
            asked.append(stands(plan))
            return asked[0]

        def report(inputs: Sequence[Node], backward: fx.Graph) -> None:
            if not ask(plan_of_backward(self.forward, inputs, backward)):
                raise _Stopped

        if adds_to_what_is_saved() or _makes_sizes(self.given.graph):
            halves = self.halves()
        else:
            try:
                with reporting_backward(report):
                    halves = self.halves()
            except _Stopped:
                return None
        return halves if asked or ask(as_partitioned(self.forward, halves, self.outputs)) else None


class _Stopped(Exception):
    """The partitioner is not to go on."""


def _makes_sizes(graph: fx.Graph) -> bool:
    """Whether there are sizes known at run time only, which a partitioner saves wherever a saved tensor has them."""
    made = (value(n) for n in graph.nodes if n.op == "call_function")
    return any(isinstance(v, SYMBOLIC) and free_unbacked_symbols(v) for v in made)
