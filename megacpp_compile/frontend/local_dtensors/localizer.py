"""Writes a graph anew, with local tensors for the DTensors of calls that each rank computes its own part of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule, Node

from megacpp_compile._torch.dispatch import enable_python_dispatcher
from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile.frontend.dtensors import is_dtensor, leaves, writes
from megacpp_compile.frontend.local_dtensors import rules
from megacpp_compile.frontend.local_dtensors.hoist import hoist
from megacpp_compile.frontend.local_dtensors.rules import Moves, name_of, part_of
from megacpp_compile.frontend.opaque_ops import refake
from megacpp_compile.fx.edit import dynamo_value
from megacpp_compile.lowerings._sharded_logsumexp import logsumexp_of_words
from megacpp_compile.lowerings._sharded_loss import loss_of_words
from megacpp_compile.lowerings._sum_gradient import sum_gradient


@dataclasses.dataclass(frozen=True)
class _Local:
    """The local tensor, or tensors, of a DTensor. given: the DTensor as Dynamo knows it."""

    node: Node
    fake: Any
    given: Any


def localize(gm: GraphModule, mode: FakeTensorMode, found: frozenset[Node]) -> GraphModule:
    """`gm` with its local calls on local tensors; `gm` itself where none is. found: what `calls_on_dtensors` says."""
    if not found:
        return gm
    with enable_python_dispatcher():  # else calls made of others would ask symbolic sizes for numbers
        return _Localizer(gm, mode, found).run()


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


class _Localizer:
    def __init__(self, gm: GraphModule, mode: FakeTensorMode, found: frozenset[Node]) -> None:
        self.gm, self.mode, self.found = gm, mode, found
        self.graph = fx.Graph()
        self.env: dict[Node, Node] = {}  # the same value in the new graph
        self.local: dict[Node, _Local] = {}
        self.opened: dict[tuple[Node, tuple[int, ...]], Node] = {}  # what `to_local` makes, summed over mesh dims
        self.sums: dict[tuple[Node, str], Node] = {}  # a tensor and a group, over whose ranks its gradient is summed
        self.sources: dict[Any, Node] = {}  # mesh -> a node that knows it
        self.made: set[Node] = set()

    def run(self) -> GraphModule:
        for node in self.gm.graph.nodes:
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self._whole)).meta.update(node.meta)
            elif node not in self.found or node.op == "placeholder" or not self._localized(node):
                self.env[node] = self.graph.node_copy(node, self._whole)
            self._remember_mesh(node)
        if not self.made:
            return self.gm
        for node in reversed(self.graph.nodes):
            if not node.users and (node in self.made or node.target is getattr):
                self.graph.erase_node(node)
        hoist(self.graph)
        new = GraphModule(self.gm, self.graph)
        new.meta.update(self.gm.meta)
        return new

    def _localized(self, node: Node) -> bool:
        name = name_of(node)
        if writes(node):
            return False
        try:
            if name == "from_local":
                return self._enter(node)
            if name == "to_local":
                return self._leave(node)
            if name == "redistribute":
                return self._stay(node)
            if name == "cross_entropy":
                return self._of_words(node, rules.words_of_ranks(node), loss_of_words)
            if name == "logsumexp" and (found := rules.logsumexp_of_ranks(node)) is not None:
                return self._of_words(node, found, logsumexp_of_words)
            return self._call(node, name)
        except Moves:
            return False

    # ------------------------------------------------------------------------------------- between local and global

    def _enter(self, node: Node) -> bool:
        """`DTensor.from_local`: its local tensor is what it is made of."""
        (x, *more), kwargs = rules.spelled_out(node)
        known = {k for k, v in kwargs.items() if v is not None and not (k == "run_check" and v is False)}
        if not isinstance(x, Node) or len(more) > 2 or not is_dtensor(dynamo_value(node)):
            return False
        if x in self.found and is_dtensor(dynamo_value(x)):
            return False
        if known - {"device_mesh", "placements"} or not isinstance(given := dynamo_value(x), Tensor):
            return False
        self._keep(node, self.env[x], self._fake(given), given.requires_grad)
        return True

    def _leave(self, node: Node) -> bool:
        """`to_local` of what is local already."""
        (x, *more), kwargs = rules.spelled_out(node)
        if not isinstance(x, Node) or x not in self.local or more or set(kwargs) - {"grad_placements"}:
            return False
        known, wanted = self.local[x], kwargs.get("grad_placements")
        summed: tuple[int, ...] = ()
        have = known.given.placements
        if wanted is None and any(p.is_partial() for p in have):
            return False  # releases of torch differ in what its gradient is then
        if wanted is not None:
            promised = rules.promised(have)
            summed = tuple(i for i, (w, p) in enumerate(zip(wanted, promised, strict=True)) if w != p)
            if not all(have[i].is_replicate() and wanted[i].is_partial() for i in summed):
                return False
        local = self._summed(x, summed)
        self.env[node] = self._detached(local, node, known.given.requires_grad)
        self.made.add(local)
        return True

    def _stay(self, node: Node) -> bool:
        """`redistribute` to the placements it has."""
        (x, *_), kwargs = rules.spelled_out(node)
        if not isinstance(x, Node) or x not in self.local:
            return False
        if {k for k, v in kwargs.items() if v is not None} - {"device_mesh", "placements", "async_op"}:
            return False
        if dynamo_value(node).device_mesh != self.local[x].given.device_mesh:
            return False
        if dynamo_value(node).placements != self.local[x].given.placements:
            return False
        known = self.local[x]
        self._keep(node, known.node, known.fake, known.given.requires_grad)
        return True

    def _keep(self, node: Node, local: Node, fake: Any, grad: bool) -> None:
        self.local[node] = _Local(self._detached(local, node, grad), fake, dynamo_value(node))

    def _detached(self, local: Node, node: Node, grad: bool) -> Node:
        """`local`, which has a gradient if `grad`, as `node` passes it on: without one where gradients are off."""
        if not grad or dynamo_value(node).requires_grad:
            return local
        return self._made(self.graph.call_method("detach", (local,)), node, dynamo_value(local).detach())

    # -------------------------------------------------------------------------------------------------------- calls

    def _call(self, node: Node, name: str) -> bool:
        """A call every rank computes its part of."""
        results = list(leaves(dynamo_value(node)))
        if name not in rules.KNOWN or not results or not all(map(is_dtensor, results)) or "out" in node.kwargs:
            return False
        operands = node.all_input_nodes
        tensors = [a for a in operands if a in self.found or isinstance(dynamo_value(a), Tensor)]
        given = {a: list(leaves(dynamo_value(a))) for a in tensors}
        if not given or not all(is_dtensor(v) for values in given.values() for v in values):
            return False
        if rules.along_shards(name, node, given, results):
            return False
        summed = rules.gradients_to_sum(name, given, results)
        cut = {a: sizes for a in tensors if name in rules.BROADCAST and (sizes := rules.cut(a, results[0])) is not None}
        fakes = {a: self._opened_fake(a) for a in tensors if a not in cut}
        fakes |= {a: self._opened_fake(a.args[0]).expand(sizes) for a, sizes in cut.items()}
        args, kwargs = rules.local_sizes(name, node, results)
        try:
            with self.mode, torch.set_grad_enabled(any(v.requires_grad for v in results)):
                values = fx.map_arg((args, kwargs), lambda a: fakes[a] if a in fakes else dynamo_value(a))
                fake = _function(node)(*values[0], **values[1])
        except Moves:
            raise
        except Exception as error:  # sizes that fit globally alone
            raise Moves from error
        for mine, theirs in zip(leaves(fake), results, strict=True):
            part = part_of(theirs)
            if mine.dtype != part.dtype or not rules.same_sizes(mine.shape, part.shape):
                return False
        places = {a: self._opened(a, summed[a]) for a in tensors if a not in cut}
        for a, sizes in cut.items():
            expanded = self.graph.call_method("expand", (self._opened(a.args[0], summed[a]), *sizes))
            places[a] = self._made(expanded, a, fakes[a])
        args, kwargs = fx.map_arg((args, kwargs), lambda a: places[a] if a in places else self.env[a])
        new = self.graph.create_node(node.op, node.target, tuple(args), kwargs)
        self.local[node] = _Local(self._made(new, node, fake), fake, dynamo_value(node))
        return True

    def _of_words(self, node: Node, found: rules.WordsOfRanks | None, of_words: Callable[..., Tensor]) -> bool:
        """What is read of logits whose words are sharded: of the rank's words, which is then of all ranks'."""
        if found is None:
            return False
        operands = {a: is_dtensor(dynamo_value(a)) for a in found.operands}
        fakes = [self._opened_fake(a) if of else self._fake(dynamo_value(a)) for a, of in operands.items()]
        with self.mode, torch.set_grad_enabled(dynamo_value(node).requires_grad):
            fake = of_words(*fakes, *found.settings)
        if fake.dtype != dynamo_value(node).dtype or not rules.same_sizes(fake.shape, dynamo_value(node).shape):
            return False
        places = [self._opened(a, ()) if of else self.env[a] for a, of in operands.items()]
        new = self.graph.call_function(of_words, (*places, *found.settings))
        self.local[node] = _Local(self._made(new, node, fake), fake, dynamo_value(node))
        return True

    def _opened_fake(self, node: Node) -> Any:
        if node not in self.local:
            value = dynamo_value(node)
            if not is_dtensor(value):
                raise Moves
            return self._fake_part(value)
        return self.local[node].fake

    def _opened(self, node: Node, summed: tuple[int, ...]) -> Node:
        """The local tensor of `node`, whose gradient is to be summed over the mesh's dimensions `summed`."""
        if node in self.local:
            return self._summed(node, summed)
        if (node, summed) not in self.opened:
            value = dynamo_value(node)
            placements = rules.promised(value.placements, summed)
            kwargs = {"grad_placements": placements} if placements != tuple(value.placements) else {}
            with self._behind(self.env[node]):
                new = self.graph.call_method("to_local", (self.env[node],), kwargs)
            self.opened[node, summed] = self._made(new, node, self._fake_part(value))
        return self.opened[node, summed]

    def _summed(self, node: Node, summed: tuple[int, ...]) -> Node:
        """The local tensor that `node` has, with its gradient summed over the mesh's dimensions `summed`."""
        known = self.local[node]
        local = known.node
        for dim in summed:  # several DTensors may be made of one tensor, whose gradient is summed once
            group = known.given.device_mesh.get_group(dim).group_name
            if (local, group) not in self.sums:
                with self._behind(local):
                    self.sums[local, group] = self.graph.call_function(sum_gradient, (local, group))
                self._made(self.sums[local, group], node, known.fake)
            local = self.sums[local, group]
        return local

    def _whole(self, node: Node) -> Node:
        """The value of `node` as the frame has it: a DTensor is made of its local tensor where it has only that."""
        if node not in self.env:
            known = self.local[node]
            if not is_dtensor(known.given):
                raise AssertionError(f"{node} is read as a whole")
            with self._behind(known.node):
                mesh, placements = known.given.device_mesh, tuple(known.given.placements)
                if (source := self.sources.get(mesh)) is not None:
                    made = self.graph.call_function(dtensor_like, (known.node, source, placements))
                else:
                    made = self.graph.call_function(_dtensors_of(mesh, placements), (known.node,))
            self.env[node] = self._made(made, node, known.given)
        return self.env[node]

    # -------------------------------------------------------------------------------------------------------- nodes

    def _behind(self, node: Node) -> Any:
        """To insert behind `node`, so with its grad mode; behind all placeholders where it is one."""
        while node.op == "placeholder" and node.next.op == "placeholder":
            node = node.next
        return self.graph.inserting_after(node)

    def _made(self, new: Node, like: Node, value: Any) -> Node:
        self.made.add(new)
        if like.op != "placeholder":
            new.meta.update({k: v for k, v in like.meta.items() if k != "val"})
        new.meta["example_value"] = value
        return new

    def _remember_mesh(self, node: Node) -> None:
        if name_of(node) == "from_local" and is_dtensor(value := dynamo_value(node)):
            mesh = node.args[1] if len(node.args) > 1 else node.kwargs.get("device_mesh")
            if isinstance(mesh, Node) and mesh in self.env:
                self.sources.setdefault(value.device_mesh, self.env[mesh])
        elif node in self.env and is_dtensor(value := dynamo_value(node)):
            self.sources.setdefault(value.device_mesh, self.env[node])

    def _fake_part(self, value: Any) -> Tensor:
        """The local tensor of a DTensor, which by itself does not say whether it has a gradient."""
        return refake(part_of(value), self.mode).requires_grad_(value.requires_grad)

    def _fake(self, value: Tensor) -> Tensor:
        return value if getattr(value, "fake_mode", None) is self.mode else refake(value, self.mode)


def _function(node: Node) -> Callable[..., Any]:
    if node.op == "call_method":
        return lambda x, *args, **kwargs: getattr(x, str(node.target))(*args, **kwargs)
    return node.target  # type: ignore[return-value]
