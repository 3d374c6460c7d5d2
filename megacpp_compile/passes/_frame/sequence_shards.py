"""Refuses and reports what reads other tokens of a sequence of which each rank holds a part.

Under torch's context parallelism attention is torch's to communicate; a causal convolution, a scan, a delta rule or an
attention that is written out runs over the tokens of one rank as if there were no others. So it does in eager: the code
stays as it is written, which the report and a warning say, and an error under `strict`. Which ops read other tokens is
a trait of theirs (`OpTraits.tokens`), and what nearly is one is a near miss of a pass that makes such an op.

Sequences may be sharded by hand, too: an activation that is a DTensor, sharded along another dimension than its last
one, shows how many tokens a rank has.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from megacpp_compile._torch import context_parallel
from megacpp_compile.config.options import Config
from megacpp_compile.config.warn_once import raise_or_warn
from megacpp_compile.errors import OtherPartsError, SequenceShardedError
from megacpp_compile.frontend.capture import Captured
from megacpp_compile.frontend.dtensors import activations_in, leaves
from megacpp_compile.frontend.local_dtensors.rules import part_of
from megacpp_compile.fx.edit import all_nodes, dynamo_value, same_size
from megacpp_compile.fx.provenance import module_fqn, source_line
from megacpp_compile.fx.subgraph import inside
from megacpp_compile.lowerings._traits import traits_of
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.passes._driver import Outcome, Review, all_passes
from megacpp_compile.passes._frame import handed_on, token_readers
from megacpp_compile.passes._rule import Match, Pass
from megacpp_compile.report.records import MissedFusion, Site
from megacpp_compile.sharding.sequences import Parts, parts_in_force

TAG = "sequence-sharded"
BY_HAND = "a DTensor of this frame is sharded along its tokens"


@dataclasses.dataclass
class SequenceShards:
    """How the sequences of a frame are sharded.

    why: in words, as a sentence without its full stop. tokens: how many of a sequence a rank has, by which those that
    are sharded are told; None where all are. within: plain nodes of what was refused. parts: the order of the parts,
    where that is known. handed: nodes of ops that take the state of the part before.
    """

    why: str
    tokens: Sequence[Any] | None = None
    parts: Parts | None = None
    handed: set[Node] = dataclasses.field(default_factory=set)
    within: set[Node] = dataclasses.field(default_factory=set)

    def refusing(self, review: Review) -> Review:
        """`review` of rewrites that are right on the tokens of one rank; the others are refused."""

        def reviewed(p: Pass, match: Match, new: list[Node], site: Site) -> MatchFailure | None:
            op_node = next(n for n in new[0].graph.nodes if n.name == site.node)
            problem = self._problem(op_node, new)
            if problem is None:
                return review(p, match, new, site)
            self.within |= inside(match.inputs, match.outputs)
            return MatchFailure(match.node, TAG, self._reason(site.op, problem))

        return reviewed

    def hand_on(self, captured: Captured, outcome: Outcome) -> None:
        """Have ops that read other tokens take the state of the part before, where they can."""
        sites = dict(zip(outcome.op_nodes, outcome.sites, strict=True))
        for node in list(captured.gm.graph.nodes):
            if self.parts is None or not self._splits(node) or handed_on.problem(node, [], self.parts):
                continue
            op_node, emitted = handed_on.hand_on(node, self.parts, captured.fake_mode)
            self.handed |= set(emitted)
            if node in sites:
                sites[node].node = op_node.name
                outcome.op_nodes[outcome.op_nodes.index(node)] = op_node
        if self.handed:
            captured.gm.graph.lint()
            captured.gm.recompile()

    def tell(
        self, gm: GraphModule, captured: Captured | None, outcome: Outcome | None, config: Config
    ) -> list[MissedFusion]:
        """The near misses of what else reads other tokens in a frame; all are warned of once. gm: Dynamo's graph.

        Raises SequenceShardedError where there is any, under `strict`.
        """
        misses = outcome.misses if outcome is not None else []
        told = {(miss.fqn, miss.source): miss for miss in misses if miss.tag == TAG}
        found: dict[tuple[str, str], MissedFusion] = {}
        for row in (*self._near(misses, captured), *self._unmatched(gm, captured if outcome is not None else None)):
            if (row.fqn, row.source) not in told:
                found.setdefault((row.fqn, row.source), row)
        if told or found:
            every = [(miss.fqn or miss.source, miss.pass_name) for miss in (*told.values(), *found.values())]
            raise_or_warn(SequenceShardedError(every, self.why), config.strict)
        return list(found.values())

    def _near(self, misses: Iterable[MissedFusion], captured: Captured | None) -> Iterator[MissedFusion]:
        """What passes that make such ops came near to; convolutions are told of as such."""
        # Of sequences sharded by hand an attention may be a step of a ring's, and what a rank has a part of its heads.
        passes = {p.name: traits_of(p.op) for p in all_passes()}
        for miss, node in token_readers.near(misses, captured.gm.graph.nodes if captured is not None else ()):
            if self._by_hand and passes[miss.pass_name].block_kind == "ablock":
                continue
            if miss.tag != TAG and node not in self.within and self._has_part(node):
                reason = self._reason(f"what nearly is {miss.pass_name} ({miss.reason})")
                yield dataclasses.replace(miss, tag=TAG, reason=reason)

    def _unmatched(self, gm: GraphModule, captured: Captured | None) -> Iterator[MissedFusion]:
        """What no pass came near to, in the captured graph or, where there is none, in Dynamo's."""
        nodes = captured.gm.graph.nodes if captured is not None else all_nodes(gm)
        spelled = token_readers.spelled(nodes) if captured is not None else ()
        for what, node in itertools.chain(token_readers.named(nodes), spelled):
            split = self._splits(node) and node not in self.handed if what.startswith("megacpp::") else True
            if split and node not in self.within and self._has_part(node):
                yield self._row(what, node)

    def _splits(self, node: Node) -> bool:
        """Whether the op of `node` reads other tokens of what is a part of a sequence here. Where sequences are sharded
        by hand, an attention may be a step of a ring's."""
        traits, first = traits_of(node), node.args[0] if node.args else None
        if traits.tokens is None or self._by_hand and traits.block_kind == "ablock":
            return False
        return self.tokens is None or self._is_part(_shape(first)[traits.tokens])

    @property
    def _by_hand(self) -> bool:
        return self.tokens is not None or self.parts is not None and self.parts.by_user

    def _problem(self, op_node: Node, new: list[Node]) -> str | None:
        """Why an op would read the tokens of one part alone; None where it does not."""
        if not self._splits(op_node):
            return None
        return "" if self.parts is None else handed_on.problem(op_node, new, self.parts) or None

    def _has_part(self, node: Node) -> bool:
        """Whether a tensor that `node` takes or gives may have tokens of a rank."""
        held = [leaf for n in (node, *node.all_input_nodes) for leaf in leaves(dynamo_value(n))]
        sizes = [size for t in held if isinstance(t, torch.Tensor) and t.dim() > 2 for size in t.shape]
        return self.tokens is None or any(map(self._is_part, sizes))

    def _is_part(self, size: Any) -> bool:
        return any(same_size(size, tokens) for tokens in self.tokens or ())

    def _reason(self, what: str, problem: str = "") -> str:
        reason = f"{self.why}: {what} reads other tokens, and here those of one rank's part alone, as in eager"
        return f"{reason}; no state is handed on: {problem}" if problem else reason

    def _row(self, what: str, node: Node) -> MissedFusion:
        return MissedFusion(what, module_fqn(node), source_line(node), node.name, TAG, self._reason(what))


def sequence_shards(gm: GraphModule, example_inputs: Sequence[Any]) -> SequenceShards | None:
    """How the sequences of a frame are sharded, by Dynamo's graph; None where nothing says that they are."""
    if not context_parallel.several_ranks():
        return None
    if parts := parts_in_force():
        return SequenceShards(parts.why, parts=parts)
    tokens = [size for value in activations(gm, example_inputs) for size in _tokens_of(value)]
    return SequenceShards(BY_HAND, tokens) if tokens else None


def watching(
    compiled: Callable[..., Any], op_nodes: Iterable[tuple[str, Node]], shards: SequenceShards | None, config: Config
) -> Callable[..., Any]:
    """`compiled`, which tells where sequences are in other parts than `shards`, for which its ops were put in place:
    nothing compiles it anew then."""
    parts, handed = (shards.parts, shards.handed) if shards is not None else (None, set())
    nodes = [(name, n) for name, n in op_nodes if traits_of(n).tokens is not None]
    reads = [(module_fqn(n) or source_line(n), name) for name, n in nodes if parts is None or n in handed]
    if not reads or not context_parallel.several_ranks():
        return compiled
    return functools.partial(_call_watched, compiled, reads, parts, config.strict)


def _call_watched(
    compiled: Callable[..., Any], reads: list[tuple[str, str]], parts: Parts | None, strict: bool, *args: Any
) -> Any:
    now = parts_in_force()
    if now != parts:
        if parts is not None:
            raise OtherPartsError(reads, parts.why, now.why if now else "")
        raise_or_warn(SequenceShardedError(reads, now.why if now else ""), strict)
    return compiled(*args)


def activations(gm: GraphModule, example_inputs: Sequence[Any]) -> Iterator[Any]:
    """The DTensors of a frame with tokens and channels that are no parameters."""
    holders = gm.graph.find_nodes(op="placeholder")
    given = {n for n, x in zip(holders, example_inputs, strict=True) if isinstance(x, torch.nn.Parameter)}
    for node in gm.graph.nodes:
        yield from activations_in(dynamo_value(node) if node not in given else None)


def _tokens_of(value: Any) -> Iterator[Any]:
    """The local sizes of the dimensions that `value` is sharded along, but for its last one's, which are channels."""
    for axis, placed in enumerate(value.placements):
        if placed.is_shard() and placed.dim % value.dim() < value.dim() - 1 and value.device_mesh.size(axis) > 1:
            yield part_of(value).shape[placed.dim]


def _shape(node: Any) -> Sequence[Any]:
    return dynamo_value(node).shape  # type: ignore[no-any-return]
