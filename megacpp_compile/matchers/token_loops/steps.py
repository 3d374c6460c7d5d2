"""Finds loops over tokens, unrolled, by their steps: the state before and behind each, and which node of a step is
which of the next.

Nodes are given the last position that they are made of; a state is what a later position reads of an earlier one. Two
steps are alike if the graphs behind their states and outputs are, but for the position of what is read and the state
that enters. So one step stands for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import long_dimensions, value
from megacpp_compile.fx.groups import by_key
from megacpp_compile.fx.walks import descendants, made_from, reached
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_if
from megacpp_compile.matchers.token_loops.alike import Alignment, Different, like
from megacpp_compile.matchers.token_loops.first_step import Zeros, same_sizes
from megacpp_compile.matchers.token_loops.loops import Loop
from megacpp_compile.matchers.token_loops.tokens import Collected, Read, collected, part_of_several, reads_by_count


def find_loops(graph: fx.Graph) -> Iterator[Loop | MatchFailure]:
    """Every chain of states that `graph` carries over the positions of its tensors."""
    nodes = list(graph.nodes)
    but_first = reads_by_count(nodes, begin=1)
    for count, reads in reads_by_count(nodes).items():
        collectors = collected(nodes, count)
        found = list(_Steps(nodes, count, reads, collectors).loops())
        if count in but_first:
            further = list(_Steps(nodes, count, reads | but_first[count], collectors).loops())
            found = _with(found, further)
        yield from found


def _with(found: list[Loop | MatchFailure], further: list[Loop | MatchFailure]) -> list[Loop | MatchFailure]:
    """The loops of `further`, which know of more reads, and of `found` what is none of these."""
    new = [f for f in further if isinstance(f, Loop)]
    inside = {n for f in new for n in f.inside}
    return [f for f in found if (f.states[-1] if isinstance(f, Loop) else f.node) not in inside] + new


class _Steps:
    def __init__(self, nodes: list[Node], count: int, reads: dict[Node, Read], collectors: list[Collected]) -> None:
        self.count, self.reads, self.collectors = count, reads, collectors
        self.ends = {c.node for c in collectors} | {n for c in collectors for n in c.between}
        self.step: dict[Node, int] = {}  # the last position a node is made of; absent where it is made of none
        for node in nodes:
            if node in reads:
                self.step[node] = reads[node].at
            elif node not in self.ends and node.op == "call_function":
                made_of = [self.step[a] for a in node.all_input_nodes if a in self.step]
                if made_of:
                    self.step[node] = max(made_of)
        for node in reversed(nodes):
            self._sink(node)
        handed_on = by_key((at, node) for node, at in self.step.items() if self.carried(node))
        self.handed_on = {at: {*nodes} for at, nodes in handed_on.items()}

    def _sink(self, node: Node) -> None:
        """What only later positions read of one value, such as a state that decays at a constant rate, is theirs."""
        at = self.step.get(node)
        if at is None or node in self.reads or sum(a in self.step for a in node.all_input_nodes) != 1:
            return
        later = [self.step.get(u, -1) for u in node.users]
        if later and min(later) > at and not any(a in self.reads for a in node.all_input_nodes):
            self.step[node] = min(later)

    def carried(self, node: Node) -> bool:
        """Whether a later position reads `node`, a tensor: a number, such as a sum of sizes, is no state."""
        at = self.step.get(node)
        if node in self.reads or at is None or not isinstance(value(node), torch.Tensor):
            return False
        return any(self.step.get(u, at) > at for u in node.users)

    def _is_state(self, node: Node) -> bool:
        """Whether `node` is the first token of a tensor, and what the first step leaves: a later position reads it."""
        return node in self.reads and any(self.step.get(u, 0) > 0 for u in node.users)

    def loops(self) -> Iterator[Loop | MatchFailure]:
        several = False
        for first in [n for n in self.step if self.step[n] == 0 and (self.carried(n) or self._is_state(n))]:
            chain = [first]
            while len(chain) < self.count - 1:
                following = [n for n in self._ahead(chain[-1]) if self.carried(n)]
                if len(following) > 1:  # a state, and what is made of it for later
                    following = [n for n in following if n.target is first.target and like(n) == like(first)]
                told = several or first in self.reads or value(first).dim() <= 2
                if len(following) > 1 and not told and self._by_token(first):
                    several = True
                    yield MatchFailure(first, "carried", "more than a state is carried from token to token")
                if len(following) != 1:
                    break
                chain += following
            if len(chain) < self.count - 1:
                continue
            wide = self._is_wide(chain[-1])
            if self.step[chain[-1]] == self.count - 2 and wide is not None:
                found = self._loop(chain)
                if wide:
                    if isinstance(found, Loop):
                        yield dataclasses.replace(found, wide=True)
                    continue
                if isinstance(found, MatchFailure) and first in self.reads:
                    continue
                others = chain[1:] if len(chain) > 2 and same_sizes(*chain[:2]) else chain
                kinds = {(n.target, like(n)) for n in others}
                unlike = ("steps", "before-update")
                if isinstance(found, MatchFailure) and (len(kinds) > 1 or found.tag in unlike and len(chain) == 1):
                    continue  # of states that differ in kind nobody made a loop, nor of two positions that differ
                yield found

    def _by_token(self, state: Node) -> bool:
        """Whether what the last step reads is smaller than the state, as the tokens of a chunk are not, and more than
        the numbers of a list, as one of a scale for each of several streams."""
        return self._is_wide(state) is False

    def _is_wide(self, state: Node) -> bool | None:
        """Whether anything that the last step reads has as many dimensions as the state; None where it has more, or is
        no token's."""
        ahead = self._ahead(state)
        reads = {a for n in ahead for a in n.all_input_nodes if a in self.reads}
        most = max((long_dimensions(n) for n in reads), default=0)
        return most == long_dimensions(state) if most <= long_dimensions(state) and self._of_tokens(ahead) else None

    def _of_tokens(self, made: list[Node]) -> bool:
        """Whether any position that `made`, of one step, comes from is one of a tensor of several dimensions, and none
        of its operands is one of as many parts of another: a state that goes from chunk to chunk."""
        def of_step(n: Node) -> list[Node]:
            return [a for a in n.all_input_nodes if self.step.get(a) == self.step[n]] if n not in self.reads else []

        way = list(reached(made, of_step))
        given = {a for n in way if n not in self.reads for a in n.all_input_nodes if a not in self.step}
        of_tokens = any(value(self.reads[n].source).dim() > 1 for n in way if n in self.reads)
        return of_tokens and not any(part_of_several(a) == self.count for a in given)

    def _ahead(self, state: Node) -> list[Node]:
        """What the next step makes of `state`, in graph order."""
        at = self.step[state] + 1
        ahead = descendants([state], lambda n: self.step.get(n) == at and n not in self.reads)
        return sorted(n for n in ahead if n is not state)

    def _loop(self, chain: list[Node]) -> Loop | MatchFailure:
        # The last state is read by no later position: it is what is made as the one before is.
        last_step, refused = self._ahead(chain[-1]), None
        alike = [n for n in last_step if n.target is chain[-1].target]
        if len(chain) == 1:  # of two steps, the first may be made without a sum
            alike += [n for n in last_step if n.target is aten.add.Tensor and n not in alike]
        for last in alike:
            try:
                found = self._aligned([*chain, last], set(last_step))
            except Different:
                continue
            if isinstance(found, Loop):
                return found
            refused = refused or found
        if refused is None and self._reads_before(chain):
            return MatchFailure(chain[-1], "before-update", "a token's result is read of the state in front of it")
        reason = f"a value is carried over {self.count} tokens, but not each step is the same"
        return refused or MatchFailure(chain[-1], "steps", reason)

    def _reads_before(self, chain: list[Node]) -> bool:
        """Whether what each step collects is made of the state that enters it and not of the one behind it, as RWKV-6
        has it: what the last token adds is no part of the loop then."""
        for made in self.collectors:
            if any(self.step.get(part) != i for i, part in enumerate(made.parts)):
                continue  # it collects more than what its tokens are made into
            steps = [self._of_one_step([part]) for part in made.parts[1:]]
            if all(
                any(entering in n.all_input_nodes for n in own) and not own & set(chain)
                for own, entering in zip(steps, chain, strict=True)
            ):
                return True
        return False

    @or_failure
    def _aligned(self, states: list[Node], last_step: set[Node]) -> Loop | MatchFailure:
        outputs = [c for c in self.collectors if c.parts[-1] in last_step]
        Different.when(len(outputs) != 1)
        (made,) = outputs
        aligned: list[Alignment] = []
        for i in reversed(range(self.count - 1)):
            try:
                one = self._alignment(i, states, made)
                Different.when(one.entered is None)
            except Different:
                if i or not same_sizes(states[0], states[1]):
                    raise
                one = self._alignment(0, states, made, self._zeros(states[0]))
            aligned.insert(0, one)
        alike, initial = [one.pairs for one in aligned], aligned[0].entered
        everything = {n for pairs in alike for both in pairs.items() for n in both}
        if initial is None:
            everything |= self._of_one_step([states[1], made.parts[1]])  # with what is 0 of it
        inside = {n for n in everything if n in self.step and n not in self.reads}
        depends = self._depending(states[0], inside, initial)
        for n in sorted(depends - {states[-1]}):
            refuse_if(
                any(u not in inside and u is not made.node and u not in made.between for u in n.users),
                n, "escapes", "an intermediate of a step is used elsewhere too",
            )
        others = {n for one in aligned for n in one.carried}
        Different.when(others & depends)
        return Loop(self.count, initial, states, made, alike, self.reads, inside, others=others)

    def _alignment(
        self, i: int, states: list[Node], made: Collected, zeros: tuple[Zeros, Zeros] | None = None
    ) -> Alignment:
        one = Alignment(self.step, self.reads, i, states, self.handed_on.get(i, set()) - {states[i]}, zeros)
        for behind, before in ((states[i + 1], states[i]), (made.parts[i + 1], made.parts[i])):
            one.align(behind, before)
        return one

    def _of_one_step(self, ends: list[Node]) -> set[Node]:
        """`ends`, and what they are made of within their step."""
        def made_of(n: Node) -> list[Node]:
            return [a for a in n.all_input_nodes if self.step.get(a) == self.step[n]]

        return set(reached(ends, lambda n: made_of(n) if n in ends or n not in self.reads else []))

    def _zeros(self, first: Node) -> tuple[Zeros, Zeros]:
        """What is 0 in the second step where `first`, and what else enters it, is, and what is in the first."""
        return Zeros(self.step, self.reads, {first} | self.handed_on.get(0, set())), Zeros(self.step, self.reads)

    def _depending(self, first: Node, inside: set[Node], initial: Node | None) -> set[Node]:
        """The nodes that are made of a state."""
        return made_from((first, initial), sorted(inside)) | ({first} & inside)
