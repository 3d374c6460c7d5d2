"""What a policy decides of every forward node: save it, recompute it, or leave it to torch's partitioner.

Under "selective" the bytes decide: a node is recomputed if the saved values it depends on hold at most `_WORTH` times
its own bytes, as one fused kernel then reads those instead of it. So a residual sum, which runs through all layers, is
saved in every other layer, and a norm's statistics, one number a row, always.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy as Tag

from megacpp_compile.config.checkpointing import CheckpointingPolicy
from megacpp_compile.fx.sizes import elements, nbytes
from megacpp_compile.fx.view_chains import base_of, beyond_views
from megacpp_compile.fx.views import is_cast, is_view
from megacpp_compile.fx.walks import ancestors, reached
from megacpp_compile.lowerings._traits import name_of, traits_of
from megacpp_compile.remat.nodes import is_core, is_gemm, is_pinned, is_selection
from megacpp_compile.remat.plan import FREE, RECOMPUTE, SAVE, BlockRef, last_layer, leaves_layer

# A value is worth recomputing where what is read for it holds at most this many times its bytes.
_WORTH = 2.5


class SaveDecisions:
    """What `policy` decides. `of`: forward node -> SAVE, RECOMPUTE or FREE."""

    def __init__(self, forward: Sequence[Node], blocks: Mapping[Node, BlockRef], policy: CheckpointingPolicy) -> None:
        self.blocks, self.policy, self.inner = blocks, policy, set(forward)
        self.last = last_layer(blocks.values())
        self.upward = up_projections(forward, policy.recompute_kv_upproj, policy.recompute_q_upproj)
        self.chosen_from = selection_inputs(forward)
        self.layers = list(dict.fromkeys(b.layer for b in blocks.values() if b.layer))
        self.carried = {n for n in forward if blocks[n].layer and _is_carried(n, blocks)}
        self.wide = {elements(n.meta["val"]) for n in self.carried}
        self.entries: dict[str, set[str]] = {}
        for block in set(blocks.values()):
            if block.kind:
                entry = policy.entry(block.kind, block.layer == self.last, block.repeated)
                self.entries.setdefault(block.layer, set()).add(entry)
        self.routing = {blocks[n] for n in forward if is_selection(n) or traits_of(n).routed is not None}
        self.anywhere = set().union(*self.entries.values()) if self.entries else {"selective"}
        self.read_by_full = {a for n in forward if self._entry(n) == "full" for a in _sources(n)}
        self.of: dict[Node, str] = {}
        # The saved values that a node is recomputed from; of a saved node itself.
        self.leaves: dict[Node, frozenset[Node]] = {}
        # The layers with a GEMM or a core that recomputing a node runs again.
        self.heavy: dict[Node, frozenset[str]] = {}
        for node in forward:
            decision = self.of[node] = self._decide(node)
            recompute = decision == RECOMPUTE
            self.leaves[node] = self._read(node) if recompute else frozenset({node})
            self.heavy[node] = self._layers_run_again(node) if recompute else frozenset()

    def _entry(self, node: Node) -> str:
        """What the policy says of the node's block; "between" for a node between blocks that asks for remat."""
        block = self.blocks[node]
        if block.kind:
            last = block.layer == self.last
            if block.kind == "eblock" and self.policy.again("moe" if block in self.routing else "mlp", last):
                return "full"
            return self.policy.entry(block.kind, last, block.repeated)
        # Norms and sums between blocks follow the blocks of their layer: any that asks for remat is enough.
        if not self.entries.get(block.layer, self.anywhere) - {"none"}:
            return "none"
        return "never" if block.layer == self.last and "never" in self.entries.get(block.layer, ()) else "between"

    def _decide(self, node: Node) -> str:
        if not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            return SAVE  # a size, which holds no bytes
        if node.target is operator.getitem and not is_view(node.args[0]):  # type: ignore[arg-type]
            # A number, as a cast's scale is, costs nothing; the cast would be run for it alone where backward reads no
            # more of it, as of a weight.
            if _is_number(node) and checkpointed(node) is None:
                return SAVE
            return self.of.get(node.args[0], SAVE)  # type: ignore[arg-type]
        if is_view(node) or node.target is operator.getitem:
            # It moves no bytes; its base is what is saved.
            return FREE if self.of.get(base_of(node)) == FREE else RECOMPUTE
        if (asked := checkpointed(node)) is not None:
            # What backward recomputes in a region is the user's choice; a second choice of the router's is nobody's.
            return SAVE if is_selection(node) or node in self.chosen_from else asked
        entry = self._entry(node)
        if is_core(node) and self._core_again(node):
            return RECOMPUTE
        if is_pinned(node) or node in self.chosen_from:
            return FREE if entry == "none" else SAVE
        if entry == "none":
            return FREE
        block = self.blocks[node]
        if leaves_layer(node, self.blocks) and self._layers_run_again(node):
            return SAVE  # otherwise the backward of one layer would recompute the layers before it
        if self.policy.stream_group is not None and entry != "never" and self._is_stream(node):
            return SAVE if node in self.carried and self._ends_group(block.layer) else RECOMPUTE
        if entry in ("full", "full_plus_norms") and block.kind:
            return RECOMPUTE
        if node in self.read_by_full and block.kind == "":
            return SAVE
        if entry == "expert_gemm_only":
            return RECOMPUTE if is_gemm(node) else SAVE
        if is_core(node):
            return SAVE
        if is_gemm(node):
            return RECOMPUTE if node in self.upward and entry != "never" else SAVE
        if entry == "conv_bc_only" and self._depends_on_core(node):
            return SAVE
        return RECOMPUTE if self._is_cheap(node) else SAVE

    def _is_stream(self, node: Node) -> bool:
        """Whether it is what passes from layer to layer, or as large and made without a GEMM or a core."""
        if is_gemm(node) or is_core(node) or not isinstance(node.meta["val"], torch.Tensor):
            return False
        return elements(node.meta["val"]) in self.wide and not self._layers_run_again(node)

    def _ends_group(self, layer: str) -> bool:
        """Whether `layer` is the last of a group of `policy.stream_group` layers."""
        size = self.policy.stream_group or -1
        return size < 0 or (self.layers.index(layer) + 1) % size == 0

    def _core_again(self, node: Node) -> bool:
        """Whether `policy.recompute` names attention cores, and this is one."""
        last = self.blocks[node].layer == self.last
        return traits_of(node).block_kind == "ablock" and self.policy.again("core_attn", last)

    def _is_cheap(self, node: Node) -> bool:
        """Whether recomputing it reads little, as `_WORTH` has it."""
        return sum(nbytes(n.meta.get("val")) for n in self._read(node)) <= _WORTH * nbytes(node.meta.get("val"))

    def _read(self, node: Node) -> frozenset[Node]:
        """The saved activations that recomputing a node reads. Inputs of the graph, such as weights, do not count."""
        return frozenset().union(*(self.leaves[a] for a in node.all_input_nodes if a in self.inner))

    def _layers_run_again(self, node: Node) -> frozenset[str]:
        """The layers with a GEMM or a core that recomputing `node` runs again."""
        found: set[str] = {self.blocks[node].layer} if is_gemm(node) or is_core(node) else set()
        for a in node.all_input_nodes:
            if a in self.inner:
                found |= self.heavy[a]
        return frozenset(found)

    def _depends_on_core(self, node: Node) -> bool:
        """Whether it depends on a core of its own block."""
        before = ancestors([node], lambda a: a in self.inner and self.blocks[a] == self.blocks[node])
        return any(is_core(a) for a in before if a is not node)


def checkpointed(node: Node) -> str | None:
    """What `torch.utils.checkpoint` in the model decides of a node; None outside of its regions. A region's results are
    saved, as they would be without a policy."""
    tag = node.meta.get("recompute")
    if tag is None or "ac_graph_id" not in node.meta:
        return None
    if tag in (Tag.MUST_SAVE, Tag.PREFER_SAVE):
        return SAVE
    region = node.meta["ac_graph_id"]
    forward = [u for u in beyond_views(node) if "recompute" in u.meta or not _late(u)]
    return RECOMPUTE if all(u.meta.get("ac_graph_id") == region for u in forward) else SAVE


def _late(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward" or node.op == "output"


def _is_carried(node: Node, blocks: Mapping[Node, BlockRef]) -> bool:
    """Whether it is a tensor of numbers that passes from its layer to another, and no view."""
    held = node.meta.get("val")
    if not isinstance(held, torch.Tensor) or not held.is_floating_point() or is_view(node):
        return False
    return leaves_layer(node, blocks)


def _is_number(node: Node) -> bool:
    held = node.meta.get("val")
    return isinstance(held, torch.Tensor) and held.dim() == 0


def _sources(node: Node) -> list[Node]:
    return [base_of(a) for a in node.all_input_nodes]


def up_projections(forward: Iterable[Node], kv: bool, q: bool) -> set[Node]:
    """The GEMMs of latent attention's up-projections: those of keys and values with `kv`, of queries with `q`. Where
    attention is over the latents, its queries were multiplied by the keys' up-projection."""
    wanted = {"kv": kv, "q": q}
    readers = (n for n in forward if wanted.get(traits_of(n).up_projection))
    return {source for reader in readers for source in _put_together(reader.args[0]) if is_gemm(source)}


def _put_together(node: Any) -> Iterator[Node]:
    """The nodes whose results, laid side by side or cast, `node` is."""
    source = base_of(node)
    if not isinstance(source, Node):
        return
    if name_of(source) == "aten::cat":
        for part in source.args[0]:  # type: ignore[union-attr]
            yield from _put_together(part)
    elif is_cast(source):
        yield from _put_together(source.args[0])
    else:
        yield source


def selection_inputs(forward: Iterable[Node]) -> set[Node]:
    """The values that selections choose by, back to the GEMM that computes the scores; views are left out."""
    chosen_by = [a for n in forward if is_selection(n) for a in n.all_input_nodes]
    found = reached(chosen_by, lambda n: n.all_input_nodes if not is_gemm(n) and not is_core(n) else [])
    return {n for n in found if n.op == "call_function" and not is_view(n)}
