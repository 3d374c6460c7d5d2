"""Writes a graph anew, with local tensors for the DTensors of calls that each rank computes its own part of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule, Node

from megacpp_compile._torch.dispatch import enable_python_dispatcher
from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile.frontend.dtensors import is_dtensor, leaves, writes
from megacpp_compile.frontend.local_dtensors import rules
from megacpp_compile.frontend.local_dtensors.local_graph import Local, LocalGraph
from megacpp_compile.frontend.local_dtensors.rules import NeedsCommunication, name_of, part_of
from megacpp_compile.fx.edit import dynamo_value, same_sizes
from megacpp_compile.lowerings._sharded_logsumexp import logsumexp_of_words
from megacpp_compile.lowerings._sharded_loss import loss_of_words


def localize(gm: GraphModule, mode: FakeTensorMode, found: frozenset[Node]) -> GraphModule:
    """`gm` with its local calls on local tensors; `gm` itself where none is. found: what `calls_on_dtensors` says."""
    if not found:
        return gm
    with enable_python_dispatcher():  # else calls made of others would ask symbolic sizes for numbers
        return _Localizer(gm, mode, found).run()


class _Localizer:
    def __init__(self, gm: GraphModule, mode: FakeTensorMode, found: frozenset[Node]) -> None:
        self.gm, self.mode, self.found = gm, mode, found
        self.new = LocalGraph(gm, mode)

    def run(self) -> GraphModule:
        for node in self.gm.graph.nodes:
            if node not in self.found or node.op in ("placeholder", "output") or not self._localized(node):
                self.new.copy(node)
            self.new.remember_mesh(node)
        return self.new.finished()

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
        except NeedsCommunication:
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
        self.new.keep(node, self.new.env[x], self.new.fake(given), given.requires_grad)
        return True

    def _leave(self, node: Node) -> bool:
        """`to_local` of what is local already."""
        (x, *more), kwargs = rules.spelled_out(node)
        if not isinstance(x, Node) or x not in self.new.local or more or set(kwargs) - {"grad_placements"}:
            return False
        known, wanted = self.new.local[x], kwargs.get("grad_placements")
        summed: tuple[int, ...] = ()
        have = known.given.placements
        if wanted is None and any(p.is_partial() for p in have):
            return False  # releases of torch differ in what its gradient is then
        if wanted is not None:
            promised = rules.promised(have)
            summed = tuple(i for i, (w, p) in enumerate(zip(wanted, promised, strict=True)) if w != p)
            if not all(have[i].is_replicate() and wanted[i].is_partial() for i in summed):
                return False
        local = self.new.summed(x, summed)
        self.new.env[node] = self.new.detached(local, node, known.given.requires_grad)
        self.new.made.add(local)
        return True

    def _stay(self, node: Node) -> bool:
        """`redistribute` to the placements it has."""
        (x, *_), kwargs = rules.spelled_out(node)
        if not isinstance(x, Node) or x not in self.new.local:
            return False
        if {k for k, v in kwargs.items() if v is not None} - {"device_mesh", "placements", "async_op"}:
            return False
        if dynamo_value(node).device_mesh != self.new.local[x].given.device_mesh:
            return False
        if dynamo_value(node).placements != self.new.local[x].given.placements:
            return False
        known = self.new.local[x]
        self.new.keep(node, known.node, known.fake, known.given.requires_grad)
        return True

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
        fakes = {a: self.new.opened_fake(a) for a in tensors if a not in cut}
        fakes |= {a: self.new.opened_fake(a.args[0]).expand(sizes) for a, sizes in cut.items()}
        args, kwargs = rules.local_sizes(name, node, results)
        try:
            with self.mode, torch.set_grad_enabled(any(v.requires_grad for v in results)):
                values = fx.map_arg((args, kwargs), lambda a: fakes[a] if a in fakes else dynamo_value(a))
                fake = _function(node)(*values[0], **values[1])
        except NeedsCommunication:
            raise
        except Exception as error:  # sizes that fit globally alone
            raise NeedsCommunication from error
        for mine, theirs in zip(leaves(fake), results, strict=True):
            part = part_of(theirs)
            if mine.dtype != part.dtype or not same_sizes(mine.shape, part.shape):
                return False
        places = {a: self.new.opened(a, summed[a]) for a in tensors if a not in cut}
        for a, sizes in cut.items():
            expanded = self.new.graph.call_method("expand", (self.new.opened(a.args[0], summed[a]), *sizes))
            places[a] = self.new.add(expanded, a, fakes[a])
        args, kwargs = fx.map_arg((args, kwargs), lambda a: places[a] if a in places else self.new.env[a])
        new = self.new.graph.create_node(node.op, node.target, tuple(args), kwargs)
        self.new.local[node] = Local(self.new.add(new, node, fake), fake, dynamo_value(node))
        return True

    def _of_words(self, node: Node, found: rules.VocabParallelCall | None, of_words: Callable[..., Tensor]) -> bool:
        """What is read of logits whose words are sharded: of the rank's words, which is then of all ranks'."""
        if found is None:
            return False
        operands = {a: is_dtensor(dynamo_value(a)) for a in found.operands}
        fakes = [self.new.opened_fake(a) if of else self.new.fake(dynamo_value(a)) for a, of in operands.items()]
        with self.mode, torch.set_grad_enabled(dynamo_value(node).requires_grad):
            fake = of_words(*fakes, *found.settings)
        if fake.dtype != dynamo_value(node).dtype or not same_sizes(fake.shape, dynamo_value(node).shape):
            return False
        places = [self.new.opened(a, ()) if of else self.new.env[a] for a, of in operands.items()]
        new = self.new.graph.call_function(of_words, (*places, *found.settings))
        self.new.local[node] = Local(self.new.add(new, node, fake), fake, dynamo_value(node))
        return True


def _function(node: Node) -> Callable[..., Any]:
    if node.op == "call_method":
        return lambda x, *args, **kwargs: getattr(x, str(node.target))(*args, **kwargs)
    return node.target  # type: ignore[return-value]
