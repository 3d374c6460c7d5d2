"""What a subgraph was found to be holds for each that is the same: a model's layers are proved once.

Subgraphs are the same where their ops, constants, sizes and dtypes are, whatever their nodes are called. Only a digest
of these is kept, and nodes by their places. Sizes that are symbols are compared within one graph alone: what is known
of a symbol is known of that graph's.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value

MOST = 64  # verdicts kept


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Nodes by their places in the subgraph. `roles` of a delta rule's operands, before norms are looked through, and
    `scale`, and whether loops were kept `apart`; or why it is none: `node`, `tag`, `reason` and `stage` of a
    NoDeltaRule."""

    roles: Mapping[str, int] | None = None
    scale: float = 1.0
    node: int = 0
    tag: str = ""
    reason: str = ""
    stage: int = 0
    apart: bool = True


class _NotCompared(Exception):
    """A value that no two subgraphs can be compared by."""


class Structure:
    """`nodes`, in graph order, each with its place. `digest` of what they compute, and of `marks` (tuples of nodes and
    of what has a repr); None where that can't be told."""

    def __init__(self, nodes: Iterable[Node], marks: Sequence[Any]) -> None:
        self.nodes = sorted(set(nodes))
        self.place = {n: i for i, n in enumerate(self.nodes)}
        self.symbolic = False
        try:
            text = repr(([self._computed(n) for n in self.nodes], self._code(marks)))
        except _NotCompared:
            self.digest = None
        else:
            self.digest = hashlib.sha256(text.encode()).digest()

    def _computed(self, n: Node) -> Any:
        target = str(n.target) if n.op == "call_function" else n.op
        return target, self._code(n.args), self._code(n.kwargs), self._code(value(n))

    def _code(self, x: Any) -> Any:
        """`x` as what has the same repr wherever it means the same."""
        if isinstance(x, Node):
            return f"%{self.place[x]}" if x in self.place else ("%", self._code(value(x)))
        if isinstance(x, torch.Tensor):
            return str(x.dtype), [self._code(s) for s in x.shape]
        if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            self.symbolic = True
            return f"${x.node.expr}"
        if isinstance(x, (tuple, list)):
            return [self._code(a) for a in x]
        if isinstance(x, dict):
            return [(k, self._code(a)) for k, a in sorted(x.items())]
        if x is None or isinstance(x, (bool, int, float, str)):
            return x
        if isinstance(x, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return f"{x}"
        raise _NotCompared(f"{type(x)} has no repr of its meaning")


class Verdicts:
    """Those of one graph's subgraphs, and the process' of what has no symbolic sizes."""

    _kept: ClassVar[OrderedDict[bytes, Verdict]] = OrderedDict()

    def __init__(self) -> None:
        self._own: dict[bytes, Verdict] = {}

    def get(self, structure: Structure) -> Verdict | None:
        if structure.digest is None:
            return None
        return (self._own if structure.symbolic else self._kept).get(structure.digest)

    def keep(self, structure: Structure, verdict: Verdict) -> None:
        if structure.digest is None:
            return
        (self._own if structure.symbolic else self._kept)[structure.digest] = verdict
        while len(self._kept) > MOST:
            self._kept.popitem(last=False)

    @classmethod
    def forget(cls) -> None:
        cls._kept.clear()
