"""The graph that is written with local tensors in the place of DTensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx import GraphModule, Node

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile.frontend.dtensors import is_dtensor
from megacpp_compile.frontend.local_dtensors import rules
from megacpp_compile.frontend.local_dtensors.hoist import hoist
from megacpp_compile.frontend.local_dtensors.rules import NeedsCommunication, name_of, part_of
from megacpp_compile.frontend.opaque_ops import refake
from megacpp_compile.fx.edit import dynamo_value
from megacpp_compile.lowerings._sum_gradient import sum_gradient


@dataclasses.dataclass(frozen=True)
class Local:
    """The local tensor, or tensors, of a DTensor. given: the DTensor as Dynamo knows it."""

    node: Node
    fake: Any
    given: Any


def dtensor_like(local: Tensor, source: Any, placements: Sequence[Any]) -> Tensor:
    """The DTensor of `local` on the mesh `source`, or on that of the DTensor `source`."""
    from torch.distributed.tensor import DTensor

    mesh = source.device_mesh if isinstance(source, DTensor) else source
    return DTensor.from_local(local, mesh, placements, run_check=False)


def _dtensors_of(mesh: Any, placements: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """`dtensor_like` for a mesh that no node of the graph knows."""

    def dtensor_of(local: Tensor) -> Tensor:
        return dtensor_like(local, mesh, placements)

    return dtensor_of


class LocalGraph:
    """The new graph of `gm`, node by node of the old one.

    Attributes:
        env: a node of the old graph -> the same value in the new one.
        local: a DTensor of the old graph -> its local tensor in the new one.
        made: nodes that the old graph has none for.
    """

    def __init__(self, gm: GraphModule, mode: FakeTensorMode) -> None:
        self.gm, self.mode, self.graph = gm, mode, fx.Graph()
        self.env: dict[Node, Node] = {}
        self.local: dict[Node, Local] = {}
        self.made: set[Node] = set()
        self._opened: dict[tuple[Node, tuple[int, ...]], Node] = {}  # what `to_local` makes, summed over mesh dims
        self._sums: dict[tuple[Node, str], Node] = {}  # a tensor and a group, over whose ranks its gradient is summed
        self._sources: dict[Any, Node] = {}  # mesh -> a node that knows it

    def copy(self, node: Node) -> None:
        """`node` as it is: on whole values."""
        if node.op == "output":
            self.graph.output(fx.map_arg(node.args[0], self.whole)).meta.update(node.meta)
        else:
            self.env[node] = self.graph.node_copy(node, self.whole)

    def finished(self) -> GraphModule:
        """The module of the new graph; `gm` itself where that is the old one."""
        if not self.made:
            return self.gm
        for node in reversed(self.graph.nodes):
            if not node.users and (node in self.made or node.target is getattr):
                self.graph.erase_node(node)
        hoist(self.graph)
        new = GraphModule(self.gm, self.graph)
        new.meta.update(self.gm.meta)
        return new

    def keep(self, node: Node, local: Node, fake: Any, grad: bool) -> None:
        """Let `local` be the local tensor of `node`. grad: as in `detached`."""
        self.local[node] = Local(self.detached(local, node, grad), fake, dynamo_value(node))

    def detached(self, local: Node, node: Node, grad: bool) -> Node:
        """`local`, which has a gradient if `grad`, as `node` passes it on: without one where gradients are off."""
        if not grad or dynamo_value(node).requires_grad:
            return local
        return self.add(self.graph.call_method("detach", (local,)), node, dynamo_value(local).detach())

    def opened_fake(self, node: Node) -> Any:
        """The fake value of what `opened` gives. Raises NeedsCommunication where `node` is no DTensor."""
        if node not in self.local:
            value = dynamo_value(node)
            NeedsCommunication.when(not is_dtensor(value))
            return self.fake_part(value)
        return self.local[node].fake

    def opened(self, node: Node, summed: tuple[int, ...]) -> Node:
        """The local tensor of `node`, whose gradient is to be summed over the mesh's dimensions `summed`."""
        if node in self.local:
            return self.summed(node, summed)
        if (node, summed) not in self._opened:
            value = dynamo_value(node)
            placements = rules.promised(value.placements, summed)
            kwargs = {"grad_placements": placements} if placements != tuple(value.placements) else {}
            with self._after(self.env[node]):
                new = self.graph.call_method("to_local", (self.env[node],), kwargs)
            self._opened[node, summed] = self.add(new, node, self.fake_part(value))
        return self._opened[node, summed]

    def summed(self, node: Node, summed: tuple[int, ...]) -> Node:
        """The local tensor that `node` has, with its gradient summed over the mesh's dimensions `summed`."""
        known = self.local[node]
        local = known.node
        for dim in summed:  # several DTensors may be made of one tensor, whose gradient is summed once
            group = known.given.device_mesh.get_group(dim).group_name
            if (local, group) not in self._sums:
                with self._after(local):
                    self._sums[local, group] = self.graph.call_function(sum_gradient, (local, group))
                self.add(self._sums[local, group], node, known.fake)
            local = self._sums[local, group]
        return local

    def whole(self, node: Node) -> Node:
        """The value of `node` as the frame has it: a DTensor is made of its local tensor where it has only that."""
        if node not in self.env:
            known = self.local[node]
            if not is_dtensor(known.given):
                raise AssertionError(f"{node} is read as a whole")
            with self._after(known.node):
                mesh, placements = known.given.device_mesh, tuple(known.given.placements)
                if (source := self._sources.get(mesh)) is not None:
                    made = self.graph.call_function(dtensor_like, (known.node, source, placements))
                else:
                    made = self.graph.call_function(_dtensors_of(mesh, placements), (known.node,))
            self.env[node] = self.add(made, node, known.given)
        return self.env[node]

    def remember_mesh(self, node: Node) -> None:
        """Note what `node` of the old graph, which has been dealt with, knows of a mesh."""
        if name_of(node) == "from_local" and is_dtensor(value := dynamo_value(node)):
            mesh = node.args[1] if len(node.args) > 1 else node.kwargs.get("device_mesh")
            if isinstance(mesh, Node) and mesh in self.env:
                self._sources.setdefault(value.device_mesh, self.env[mesh])
        elif node in self.env and is_dtensor(value := dynamo_value(node)):
            self._sources.setdefault(value.device_mesh, self.env[node])

    def add(self, new: Node, like: Node, value: Any) -> Node:
        """`new`, which was just made, with its fake `value`, and from the line of the model that `like` is from."""
        self.made.add(new)
        if like.op != "placeholder":
            new.meta.update({k: v for k, v in like.meta.items() if k != "val"})
        new.meta["example_value"] = value
        return new

    def _after(self, node: Node) -> Any:
        """To insert behind `node`, so with its grad mode; behind all placeholders where it is one."""
        while node.op == "placeholder" and node.next.op == "placeholder":
            node = node.next
        return self.graph.inserting_after(node)

    def fake_part(self, value: Any) -> Tensor:
        """The local tensor of a DTensor, which by itself does not say whether it has a gradient."""
        return refake(part_of(value), self.mode).requires_grad_(value.requires_grad)

    def fake(self, value: Tensor) -> Tensor:
        """`value` in the mode of the frame."""
        return value if getattr(value, "fake_mode", None) is self.mode else refake(value, self.mode)
