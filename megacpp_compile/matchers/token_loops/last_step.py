"""The last step of a loop over tokens as a subgraph, and its operands."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import long_dimensions, value
from megacpp_compile.fx.views import SAME_VALUES, is_cast
from megacpp_compile.fx.walks import made_from, reached
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra, constants_of, read_operand, tensors
from megacpp_compile.matchers.ssd.tensor_ops import CONTRACTIONS, ELEMENTWISE, EXPONENTIALS, VIEWS
from megacpp_compile.matchers.token_loops.loops import Loop


class LastStep:
    """The last step as a subgraph: `leaves` are its operands, what enters from the step before excluded.

    whole: what is made of one of them within the step, such as keys 1 - f beside a decay f, is an operand by itself.
    """

    def __init__(self, algebra: Algebra, loop: Loop, whole: bool) -> None:
        self.algebra, self.loop, self.whole = algebra, loop, whole
        self.taken_whole = False
        self.inside: set[Node] = set()
        self.leaves: list[Node] = []
        self.again: dict[Node, Node] = {}  # reads of what one of the leaves reads
        self.strange: Node | None = None
        self.own = of_state(loop)
        self.of_others = loop.made_of_others() if loop.others else set[Node]()
        for n in sorted(self.own):
            if n not in algebra.nodes:
                self.strange = self.strange or n
            self.inside.add(n)
            for a in tensors(n):
                if a not in self.own and a is not loop.entering:
                    self._descend(a)
        self.outer = sum(value(n).dim() >= 2 for n in self.leaves) >= 3

    def _descend(self, n: Node) -> None:
        """Follow `n`, which the state does not reach, to operands."""
        if n in self.inside or n in self.leaves or n in self.again:
            return
        if n in self.algebra.constants:
            made = constants_of(self.algebra, n)
            if any(a.target in EXPONENTIALS for a in made):  # a table of rates, whose sizes are the operands'
                self.leaves.append(n)
            else:
                self.inside |= made
        elif self.loop.wide and n in self.loop.reads and long_dimensions(n) == long_dimensions(self.loop.entering):
            source = self.loop.reads[n].source
            self.inside |= {n, *(a for a in n.all_input_nodes if a is not source)}
            self._open(source)
        elif self._is_operand(n):
            read = self.loop.reads.get(n)
            same = next((m for m in self.leaves if read and self.loop.reads.get(m) == read), None)
            if same is None:
                self.leaves.append(n)
            else:
                self.again[n] = same
        else:
            self.inside.add(n)
            for a in tensors(n):
                self._descend(a)

    def _open(self, n: Node) -> None:
        """Follow `n`, a state for every token, to the operands of a product that makes it."""
        opens = n in self.algebra.nodes and n.target in VIEWS | SAME_VALUES | CONTRACTIONS | {aten.mul.Tensor}
        if not opens or long_dimensions(n) <= long_dimensions(self.loop.entering):
            leaf = read_operand(self.algebra, n, self.inside)
            self.leaves += [leaf] * (leaf not in self.leaves)
            return
        self.inside.add(n)
        for a in tensors(n):
            self._open(a)

    def _is_operand(self, n: Node) -> bool:
        """Whether `n` is taken as it is: what is read of a tensor, what is no algebra, and what is as large as the one
        tensor that it is made of (a norm within the step, for one), and what is made of more that steps hand on."""
        if n in self.loop.reads or n not in self.algebra.nodes:
            return True
        if n in self.of_others:
            return long_dimensions(n) < long_dimensions(self.loop.entering)
        if self.whole and len(tensors(n)) == 1 and n.target in ELEMENTWISE - EXPONENTIALS:
            self.taken_whole = True
            return True
        if is_cast(n) or n.target in EXPONENTIALS or len(tensors(n)) == 1 and n.target is not aten.sum.dim_IntList:
            return False
        sources = {self.loop.reads[r].source for r in self.algebra.ancestors([n]) if r in self.loop.reads}
        if len(sources) > 1:
            return False
        return value(n).numel() == max((value(a).numel() for a in tensors(n)), default=0)


def of_state(loop: Loop) -> set[Node]:
    """The nodes of the last step that are made of the state that enters it, up to the next and the output."""
    def within(nodes: Iterable[Node]) -> list[Node]:
        return [n for n in nodes if n is not loop.entering and n in loop.inside]

    wanted = set(reached(within([loop.states[-1], loop.output]), lambda n: within(n.all_input_nodes)))
    return made_from([loop.entering], sorted(wanted))
