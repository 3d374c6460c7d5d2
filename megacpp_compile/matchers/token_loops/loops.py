"""A loop over tokens, unrolled, as its steps; `steps` finds them."""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from megacpp_compile.fx import short_loops
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.walks import made_from
from megacpp_compile.matchers.token_loops.tokens import Collected, Read


@dataclasses.dataclass
class Loop:
    """states: behind each step; initial: what enters the first, None where nothing does and the first step is that of a
    state of 0. In the last step, `output` is what is collected.

    alike[i]: the nodes of step i + 1, each with that of step i. inside: all nodes of all steps, `reads` not included.
    wide: what a step reads is as large as a state, as what chunks leave, or all tokens' products of keys and values.
    others: what steps hand on beside the state, and do not make of it, such as a normaliser or a running maximum.
    read: in the last step, what is taken for its output, where that is made into what is collected within the step.
    """

    count: int
    initial: Node | None
    states: list[Node]
    outputs: Collected
    alike: list[dict[Node, Node]]
    reads: dict[Node, Read]
    inside: set[Node]
    wide: bool = False
    read: Node | None = None
    others: set[Node] = dataclasses.field(default_factory=set)

    @property
    def entering(self) -> Node:
        """The state that enters the last step."""
        return self.states[-2]

    @property
    def output(self) -> Node:
        return self.read or self.outputs.parts[-1]

    @property
    def tokens(self) -> int:
        """How many steps the loop has: `count`, unless these stand for more."""
        taken = (read.source for read in self.reads.values())
        return next((n.args[3] for n in taken if n.target is short_loops.shortened), self.count)  # type: ignore[return-value]

    def fix(self) -> None:
        """Have the frame compiled again for another number of tokens, of any tensor that the steps take apart."""
        taken = [self.reads[n] for n in self.taken() if n in self.reads]
        made = [] if self.outputs.merged else [(self.outputs.node, self.outputs.dim)]
        for node, dim in dict.fromkeys([*made, *((read.source, read.dim) for read in taken)]):
            int(value(node).shape[dim])

    def made_of_others(self) -> set[Node]:
        """What of a step is made of what else is handed on."""
        return made_from(self.others, sorted(self.inside)) | self.others

    def taken(self) -> set[Node]:
        """What takes every step's tokens out of whole tensors."""
        found = {n for pairs in self.alike for n in (*pairs, *pairs.values()) if n in self.reads}
        for n in list(found):
            source = self.reads[n].source
            while (n := n.all_input_nodes[0]) is not source:
                found.add(n)
        return found

    def everywhere(self, node: Node) -> list[Node]:
        """`node`, of the last step, in every step; in all but the first where that lacks it, as a decay of no state."""
        found = [node]
        for pairs in reversed(self.alike):
            if found[-1] not in pairs:
                break
            found.append(pairs[found[-1]])
        return found[::-1]

    def lacks_first(self, node: Node) -> bool:
        """Whether the first step has no `node`, of the last."""
        return len(self.everywhere(node)) < self.count
