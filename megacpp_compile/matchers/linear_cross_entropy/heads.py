"""Linears whose output losses read, and what the losses read of them, put together by rows and targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.groups import by_key
from megacpp_compile.lowerings._sharded_logsumexp import sharded_logsumexp
from megacpp_compile.lowerings._sharded_loss import sharded_cross_entropy
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.linear import Linear, match_linear
from megacpp_compile.matchers.linear_cross_entropy import logits as logits_of
from megacpp_compile.matchers.linear_cross_entropy.logits import Logits
from megacpp_compile.matchers.linear_cross_entropy.reads import SEVERAL, Read, read_of, same_elements
from megacpp_compile.matchers.linear_cross_entropy.rows import first_of, keys
from megacpp_compile.matchers.linear_cross_entropy.sums import summed


@dataclasses.dataclass(frozen=True)
class Head:
    """A linear that at least one loss reads. sizes: what reads sizes of rows alone; blanks: what takes no more than a
    dtype and a device from its logits, such as zeros to add losses to; others: what else reads its logits. failures:
    losses of other kinds."""

    linear: Linear
    reads: tuple[Read, ...]
    sizes: dict[Node, Logits]
    blanks: tuple[Node, ...]
    others: tuple[Node, ...]
    failures: tuple[MatchFailure, ...]


@dataclasses.dataclass(frozen=True)
class Output:
    """A read of the rows of a site; of the rows `part` of the first dimension only, where that is not None."""

    read: Read
    part: int | None = None


@dataclasses.dataclass(frozen=True)
class HeadLoss:
    """What one op computes: reads of the same rows with the same targets. logits: those rows. sizes: as in `Head`;
    blanks: as there, of one of its sites.

    targets: nodes whose elements, one tensor after the other, are the targets of the rows; () where there are none.
    mask: what chooses the rows that count, in the shape of the targets; None where all do.
    """

    logits: Logits
    outputs: tuple[Output, ...]
    targets: tuple[Node, ...]
    sizes: dict[Node, Logits]
    blanks: tuple[Node, ...] = ()
    mask: Node | None = None

    @property
    def of_targets(self) -> Read:
        """The read that says how targets count."""
        losses = [o.read for o in self.outputs if o.read.kind == "loss"]
        return (losses or [self.outputs[0].read])[0]

    @property
    def summed(self) -> bool:
        """Whether the losses' sum over rows is all that is read of rows."""
        return all(o.read.reduction != "none" for o in self.outputs)

    def inside(self) -> list[Node]:
        """The nodes that compute what is read, without views of targets."""
        found = [n for o in self.outputs for n in (o.read.logits.linear.node, *o.read.logits.path,
                                                   *o.read.through, o.read.node)]  # fmt: skip
        return list(dict.fromkeys(found))


def find_heads(graph: fx.Graph) -> Iterator[Head]:
    if not any(node.target in _LOSSES for node in graph.nodes):
        return
    for node in graph.nodes:
        linear = match_linear(node)
        if linear is not None and value(node).is_floating_point() and (head := _head(linear)) is not None:
            yield head


# One of these is in every loss that is found.
_LOSSES = {aten.cross_entropy_loss.default, aten.log_softmax.int, aten._log_softmax.default, aten.logsumexp.default,
           aten.log.default, sharded_cross_entropy, sharded_logsumexp}  # fmt: skip


def _head(linear: Linear) -> Head | None:
    reads, blanks, others, failures = list[Read](), list[Node](), list[Node](), list[MatchFailure]()
    several = list[MatchFailure]()
    sizes = dict[Node, Logits]()
    for logits, reader in logits_of.readers(logits_of.of(linear)):
        found = read_of(logits, reader)
        if reader.target is aten.sym_size.int and reader.args[1] % value(logits.node).dim() != logits.dim:  # type: ignore
            sizes[reader] = logits
        elif isinstance(found, Read):
            reads.append(found)
        elif reader.target in _BLANKS and len(reader.all_input_nodes) == 1:
            blanks.append(reader)
        elif found is not None and found.tag == SEVERAL and not logits.normalised:
            several.append(found)
        elif found is not None:
            failures.append(found)
        else:
            others.append(reader)
    # Zeros shaped like the logits, the largest of them.
    spelled = {node for read in reads for node in (*read.through, *read.logits.beside)}
    others = [node for node in others if node not in spelled]
    if others:  # what is computed from the logits themselves, such as their entropy
        failures = [f for f in failures if f.node.target is not aten.mul.Tensor or f.tag == "rows"]
    kinds = {read.kind for read in reads}
    if "logsumexp" in kinds and not others:
        failures += several
    else:  # the scores of experts that were chosen
        others += [miss.node for miss in several]
    by_hand = kinds >= {"logit", "logsumexp"} and not others  # else it may be a router
    if not failures and not kinds & {"loss", "log-probability"} and not by_hand:
        return None
    return Head(linear, tuple(reads), sizes, tuple(blanks), tuple(others), tuple(failures))


_BLANKS = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)


def sites(head: Head, has_gradient: Callable[[Node], bool]) -> list[HeadLoss]:
    """All reads of `head`, as few sites as possible. Log-sum-exps are of the site that has their rows."""
    found = list[HeadLoss]()
    for same_rows in by_key((piece.rows, piece) for piece in _lifted(head.reads)).values():
        by_target = by_key((piece.counts, piece) for piece in same_rows if piece.targets)
        without = [piece for piece in same_rows if not piece.targets]
        groups = list(by_target.values()) or [[]]
        groups[0] = groups[0] + without
        for group in groups:
            outputs = _added_up([output for piece in group for output in piece.outputs], has_gradient)
            blanks = () if found else head.blanks
            found.append(HeadLoss(group[0].logits, outputs, group[0].targets, head.sizes, blanks))
    return found


def _added_up(outputs: Sequence[Output], has_gradient: Callable[[Node], bool]) -> tuple[Output, ...]:
    """`outputs` as sums over rows, where all are and rows count alike in them; else as they are."""
    sums = [o if o.part is not None else Output(summed(o.read, has_gradient)) for o in outputs]
    alike = len({o.read.weights for o in sums}) == 1 and all(o.read.reduction != "none" for o in sums)
    return tuple(sums if alike else outputs)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A read, or reads of all parts of the same rows. targets: roots (`same_elements`), in the order of rows."""

    logits: Logits
    outputs: tuple[Output, ...]
    targets: tuple[Node, ...]

    @property
    def rows(self) -> Any:
        # Of a rank's words and of all ranks' the same rows are something else.
        part = self.outputs[0].read.part
        return keys(self.logits.views), self.logits.scale, self.logits.softcap, self.logits.steps, part

    @property
    def counts(self) -> Any:
        read = self.outputs[0].read
        return self.targets, read.ignore_index, read.label_smoothing, read.part


def _lifted(reads: Iterable[Read]) -> Iterator[_Piece]:
    """Every read, those of `rows[0]`, `rows[1]`, ... together where they are of all such rows and are alike."""
    def kind(read: Read) -> Any:
        moves = read.logits.moves()
        if not moves or read.reduction != "none" or moves[-1].index is None:
            return read
        own = keys(moves[:-1]), read.logits.scale, read.logits.softcap, read.logits.steps
        return own, read.kind, read.logits.sign, read.keepdim, read.exp, read.logits.dim

    for group in by_key((kind(read), read) for read in reads).values():
        yield from _together(group) or (_Piece(r.logits, (Output(r),), _roots([r])) for r in group)


def _together(group: Sequence[Read]) -> list[_Piece]:
    moves = group[0].logits.moves()
    if len(group) < 2 or group[0].reduction != "none" or not moves or moves[-1].index is None:
        return []
    parts = {read.logits.moves()[-1].index: read for read in group}
    count = value(moves[-1].source).shape[0]
    if not isinstance(count, int) or set(parts) != set(range(count)) or len(group) != count:
        return []
    ordered = [parts[i] for i in range(count)]
    logits = ordered[0].logits
    whole = dataclasses.replace(logits, views=moves[:-1], node=moves[-1].source, dim=moves[-1].before)
    return [_Piece(whole, tuple(Output(read, i) for i, read in enumerate(ordered)), _roots(ordered))]


def _roots(reads: Sequence[Read]) -> tuple[Node, ...]:
    """The targets' roots; one for all where they are its rows in order."""
    found = tuple(same_elements(read.target) for read in reads if read.target is not None)
    rows = [first_of(node) for node in found]
    wholes = {row[0] for row in rows if row is not None}
    if len(found) > 1 and len(wholes) == 1 and [row and row[1] for row in rows] == list(range(len(found))):
        return (same_elements(wholes.pop()),)
    return found
