"""A loop over tokens, unrolled, as its steps: the state before and behind each, and which node of a step is which of
the next.

Nodes are given the last position that they are made of; a state is what a later position reads of an earlier one. Two
steps are alike if the graphs behind their states and outputs are, but for the position of what is read and the state
that enters. So one step stands for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.matchers.token_loops.tokens import Collected, Read, collected, part_of_several, reads_by_count


@dataclasses.dataclass(frozen=True)
class NoLoop:
    """Why values that are carried from token to token are no known recurrence."""

    node: Node
    tag: str
    reason: str


@dataclasses.dataclass
class Loop:
    """states: behind each step; initial: what enters the first. In the last step, `output` is what is collected.

    alike[i]: the nodes of step i + 1, each with that of step i. inside: all nodes of all steps, `reads` not included.
    wide: what a step reads is as large as a state, as what chunks leave, or all tokens' products of keys and values.
    read: in the last step, what is taken for its output, where that is made into what is collected within the step.
    """

    count: int
    initial: Node
    states: list[Node]
    outputs: Collected
    alike: list[dict[Node, Node]]
    reads: dict[Node, Read]
    inside: set[Node]
    wide: bool = False
    read: Node | None = None

    @property
    def entering(self) -> Node:
        """The state that enters the last step."""
        return self.states[-2]

    @property
    def output(self) -> Node:
        return self.read or self.outputs.parts[-1]

    def taken(self) -> set[Node]:
        """What takes every step's tokens out of whole tensors."""
        found = {n for pairs in self.alike for n in (*pairs, *pairs.values()) if n in self.reads}
        return found | {a for n in found for a in n.all_input_nodes if a is not self.reads[n].source}

    def everywhere(self, node: Node) -> list[Node]:
        """`node`, of the last step, in every step."""
        found = [node]
        for pairs in reversed(self.alike):
            found.append(pairs[found[-1]])
        return found[::-1]


class _Different(Exception):
    """Two steps differ."""


def find_loops(graph: fx.Graph) -> Iterator[Loop | NoLoop]:
    """Every chain of states that `graph` carries over the positions of its tensors."""
    nodes = list(graph.nodes)
    for count, reads in reads_by_count(nodes).items():
        collectors = collected(nodes, count)
        yield from _Steps(nodes, count, reads, collectors).loops()


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

    def loops(self) -> Iterator[Loop | NoLoop]:
        several = False
        for first in [n for n in self.step if self.step[n] == 0 and self.carried(n)]:
            chain = [first]
            while len(chain) < self.count - 1:
                following = [n for n in self._ahead(chain[-1]) if self.carried(n)]
                if len(following) > 1:  # a state, and what is made of it for later
                    following = [n for n in following if n.target is first.target and _like(n) == _like(first)]
                if len(following) > 1 and not several and value(first).dim() > 2 and self._by_token(first):
                    several = True
                    yield NoLoop(first, "carried", "more than a state is carried from token to token")
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
                kinds = {(n.target, _like(n)) for n in chain}
                if isinstance(found, NoLoop) and (len(kinds) > 1 or found.tag == "steps" and len(chain) == 1):
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
        most = max((dimensions(n) for n in reads), default=0)
        return most == dimensions(state) if most <= dimensions(state) and self._of_tokens(ahead) else None

    def _of_tokens(self, made: list[Node]) -> bool:
        """Whether any position that `made`, of one step, comes from is one of a tensor of several dimensions, and none
        of its operands is one of as many parts of another: a state that goes from chunk to chunk."""
        pending, seen, found = list(made), set(made), False
        while pending:
            node = pending.pop()
            if node in self.reads:
                found = found or value(self.reads[node].source).dim() > 1
                continue
            if any(a not in self.step and part_of_several(a) == self.count for a in node.all_input_nodes):
                return False
            new = [a for a in node.all_input_nodes if self.step.get(a) == self.step[node] and a not in seen]
            seen.update(new)
            pending += new
        return found

    def _ahead(self, state: Node) -> list[Node]:
        """What the next step makes of `state`, in graph order."""
        at, found, pending = self.step[state] + 1, set[Node](), [state]
        while pending:
            for user in pending.pop().users:
                if self.step.get(user) == at and user not in found and user not in self.reads:
                    found.add(user)
                    pending.append(user)
        return sorted(found)

    def _loop(self, chain: list[Node]) -> Loop | NoLoop:
        # The last state is read by no later position: it is what is made as the one before is.
        last_step = self._ahead(chain[-1])
        for last in [n for n in last_step if n.target is chain[-1].target]:
            try:
                found = self._aligned([*chain, last], set(last_step))
            except _Different:
                continue
            return found
        return NoLoop(chain[-1], "steps", f"a value is carried over {self.count} tokens, but not each step is the same")

    def _aligned(self, states: list[Node], last_step: set[Node]) -> Loop | NoLoop:
        outputs = [c for c in self.collectors if c.parts[-1] in last_step]
        if len(outputs) != 1:
            raise _Different
        (made,) = outputs
        alike, initial = [], None
        for i in range(self.count - 1):
            pairs, entered = self._alike(i, states, made)
            alike.append(pairs)
            initial = entered if i == 0 else initial
        if initial is None:
            raise _Different
        everything = {n for pairs in alike for n in pairs} | set(alike[0].values())
        inside = {n for n in everything if n in self.step and n not in self.reads}
        depends = self._depending(states[0], inside, initial)
        for n in sorted(depends - {states[-1]}):
            if any(u not in inside and u is not made.node and u not in made.between for u in n.users):
                return NoLoop(n, "escapes", "an intermediate of a step is used elsewhere too")
        return Loop(self.count, initial, states, made, alike, self.reads, inside)

    def _depending(self, first: Node, inside: set[Node], initial: Node) -> set[Node]:
        """The nodes that are made of a state."""
        found: set[Node] = set()
        for n in sorted(inside):
            if n is first or any(a in found or a is initial for a in n.all_input_nodes):
                found.add(n)
        return found

    def _alike(self, i: int, states: list[Node], made: Collected) -> tuple[dict[Node, Node], Node | None]:
        """(the nodes of step i + 1 with those of step i, the state that enters step i)."""
        pairs: dict[Node, Node] = {}
        entered = states[i - 1] if i else None

        def pair(b: Any, a: Any) -> None:
            """`b`, of step i + 1, has to be `a` of step i."""
            nonlocal entered
            if not isinstance(b, Node) or not isinstance(a, Node):
                if type(a) is not type(b) or a != b:
                    raise _Different
                return
            if b is states[i]:
                entered = a if entered is None else entered
                if a is not entered:
                    raise _Different
                return
            if b in pairs:
                if pairs[b] is not a:
                    raise _Different
                return
            if b in self.reads or a in self.reads:
                one, other = self.reads.get(b), self.reads.get(a)
                if one is None or other is None or (one.at, other.at) != (i + 1, i):
                    raise _Different
                if dataclasses.replace(one, at=i) != other:
                    raise _Different
                pairs[b] = a
                return
            if b is a:
                if b in self.step:
                    raise _Different  # of one position, in both steps
                pairs[b] = a
                return
            if a.op != "call_function" or a.target is not b.target or a.kwargs.keys() != b.kwargs.keys():
                raise _Different
            before, behind = _arguments(a), _arguments(b)
            if len(before) != len(behind) or _like(a) != _like(b):
                raise _Different
            pairs[b] = a
            todo.extend(zip(behind, before, strict=True))

        todo: list[tuple[Any, Any]] = []
        for behind, before in ((states[i + 1], states[i]), (made.parts[i + 1], made.parts[i])):
            todo.append((behind, before))
            while todo:
                pair(*todo.pop())
        return pairs, entered


def dimensions(node: Node) -> int:
    """How many dimensions are more than one element long."""
    return sum(not same_size(n, 1) for n in value(node).shape)


def _arguments(node: Node) -> list[Any]:
    flat: list[Any] = []
    for a in [*node.args, *node.kwargs.values()]:
        flat += a if isinstance(a, list | tuple) else [a]
    return flat


def _like(node: Node) -> Any:
    fake = value(node)
    return (fake.dtype, fake.dim()) if isinstance(fake, torch.Tensor) else None
