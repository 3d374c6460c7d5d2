"""Frames that are not captured, rewritten or lowered as they should be, and what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megacpp_compile.errors._attempts import GivenUp
from megacpp_compile.errors._base import MegacppError, place


class CaptureError(GivenUp, MegacppError):
    """Internal: why a frame cannot be captured. It compiles as plain Inductor would and `reason` goes to the report;
    under `strict` the user meets it as the reason of a NotCapturedError.

    Args:
        reason: one sentence.
        where: node, module or source line it is about, "" when it is about the whole frame.
    """

    def __init__(self, reason: str, where: str = "") -> None:
        self.reason, self.where = reason, where
        super().__init__(f"{reason} (at {where})" if where else reason)


class NotCapturedError(MegacppError):
    """A frame that cannot be rewritten, under `strict`.

    Args:
        frame: the function it compiles and where that stands.
        reason: why not, as a sentence without its full stop.
    """

    def __init__(self, frame: str, reason: str) -> None:
        self.frame, self.reason = frame, reason
        super().__init__(
            f"{frame} cannot be rewritten: {reason}. Change what the reason names, or compile without 'strict': "
            "Inductor then compiles the frame alone."
        )


class GraphBreakError(MegacppError):
    """The model's code cuts its graph in pieces, under `strict`.

    Args:
        place: the line that does.
        reason: why, as a sentence without its full stop.
    """

    def __init__(self, place: str, reason: str) -> None:
        self.place, self.reason = place, reason
        super().__init__(
            f"the graph breaks at {place}: {reason}. Take that out of the compiled code, or compile without 'strict'."
        )


class SequenceShardedError(MegacppError):
    """Blocks that read other tokens of a sequence, of which each rank holds a part, under `strict`.

    Args:
        blocks: (module, what it computes) of each.
        why: how the sequence is sharded, as a sentence without its full stop.
    """

    def __init__(self, blocks: Sequence[tuple[str, str]], why: str) -> None:
        self.blocks, self.why = tuple(blocks), why
        named = ", ".join(f"{fqn or 'the frame itself'} ({op})" for fqn, op in dict.fromkeys(self.blocks))
        super().__init__(
            f"{why}, and what reads other tokens would read those of one rank's part alone: {named}. Numbers are wrong "
            "in eager, too. Gather the sequence in front of such a block and shard it again behind, or leave context "
            "parallelism off for the model."
        )


class OtherPartsError(MegacppError):
    """A frame that takes states of other ranks' parts of a sequence, called where sequences are in other parts.

    Args:
        blocks: (module, what it computes) of each.
        then: what split sequences when the frame was compiled, as a sentence without its full stop.
        now: what splits them in this call; "" for nothing.
    """

    def __init__(self, blocks: Sequence[tuple[str, str]], then: str, now: str) -> None:
        self.blocks, self.then, self.now = tuple(blocks), then, now
        named = ", ".join(f"{fqn or 'the frame itself'} ({op})" for fqn, op in dict.fromkeys(self.blocks))
        super().__init__(
            f"compiled where {then}, with states that go from one rank's part of a sequence to the next, and called "
            f"where {now or 'sequences are whole'}, or their parts are others: {named}. Call torch.compiler.reset() in "
            "between, or compile another copy of the model."
        )


class RanksDifferError(MegacppError):
    """Ranks that communicate in a frame do not compile it alike.

    Args:
        frame: the function it compiles and where that stands.
        ranks: those that differ from this one.
        how: what they did, as a predicate without its full stop.
    """

    def __init__(self, frame: str, ranks: Sequence[int], how: str) -> None:
        self.frame, self.ranks, self.how = frame, tuple(ranks), how
        named = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks[:8]))}"
        more = f" and {len(self.ranks) - 8} more" * (len(self.ranks) > 8)
        super().__init__(
            f"{frame} communicates with {named}{more}, which {how}. Ranks that do not run the same wait for each other "
            "without end: call the model on all of them, with the same options and packages, and see what the other "
            "rank logged. How long one may take to compile is the `timeout` of torch.distributed's init_process_group."
        )


class MixedDocumentsError(MegacppError):
    """Layers that run across packed documents which another layer of the model keeps apart, under `strict`.

    Args:
        blocks: (module, what it computes) of each.
        keeper: the module that keeps documents apart.
    """

    def __init__(self, blocks: Sequence[tuple[str, str]], keeper: str) -> None:
        self.blocks, self.keeper = tuple(blocks), keeper
        named = ", ".join(f"{fqn or 'the frame itself'} ({what})" for fqn, what in dict.fromkeys(self.blocks))
        super().__init__(
            f"a row holds several documents, which {keeper or 'the frame itself'} keeps apart, and these layers run "
            f"across their bounds: {named}. So they do in eager: a document begins with what the one before has left. "
            "Give these layers the documents, as masks of a convolution's taps and of a recurrence's decays, or put "
            "one document in a row."
        )


class DroppedOutputError(MegacppError, AttributeError):
    """Something reads an output that the option 'drop_outputs' has dropped. Who asks by `hasattr` whether it is a
    tensor, as accelerate does of every output, is told that it is not.

    Args:
        name: the output's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the output {name!r} is read, and the option 'drop_outputs' has dropped it: it was never made as a whole. "
            f"Take {name!r} out of 'drop_outputs', or do not read it."
        )
        self.name = name  # which AttributeError has a place of its own for

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name,)


class VerificationError(MegacppError):
    """`verify="each"` found a pass that changed a result beyond its tolerance.

    Args:
        pass_name: the pass.
        fqn: module of the site, "" when unresolved.
        source: source line of the site, "" when unknown.
        tensor: which result differs ("output 0", "grad of q_proj.weight").
        error: the error measured.
        tolerance: the error allowed, in the same measure.
    """

    def __init__(self, pass_name: str, fqn: str, source: str, tensor: str, error: float, tolerance: float) -> None:
        self.pass_name, self.fqn, self.source = pass_name, fqn, source
        self.tensor, self.error, self.tolerance = tensor, error, tolerance
        super().__init__(
            f"pass {pass_name!r} changed {tensor} at {place(fqn, source)}: "
            f"error {error:.3g}, tolerance {tolerance:.3g}. "
            f"Turn the pass off with options={{'disable': {pass_name!r}}} and report the module."
        )


class UnfoundedSiteError(MegacppError):
    """A pass reported an op that it has not put into the graph; raised under `strict`.

    Args:
        pass_name: the pass.
        op: qualified name of the op.
        node: name of the node it was said to be.
        fqn: module of the site, "" when unresolved.
        source: source line of the site, "" when unknown.
        problem: what is wrong, as the rest of a sentence.
    """

    def __init__(self, pass_name: str, op: str, node: str, fqn: str, source: str, problem: str) -> None:
        self.pass_name, self.op, self.node = pass_name, op, node
        self.fqn, self.source, self.problem = fqn, source, problem
        super().__init__(
            f"pass {pass_name!r} reported {op} ({node}) at {place(fqn, source)}, but {problem}. "
            f"This is a defect of megacpp_compile: turn the pass off with options={{'disable': {pass_name!r}}}."
        )


class NotLoweredError(MegacppError):
    """A `megacpp::` op was handed to a backend without a lowering; a defect of this package.

    Args:
        op: the op's qualified name.
        target: the target compiled for.
        fqn: module of the node, "" when unresolved.
        source: source line of the node, "" when unknown.
    """

    def __init__(self, op: str, target: str, fqn: str = "", source: str = "") -> None:
        self.op, self.target, self.fqn, self.source = op, target, fqn, source
        super().__init__(
            f"{op} at {place(fqn, source)} was left without a lowering for target {target!r}. "
            "Every op has at least its reference lowering, so this is a defect: please report it, "
            "and disable the pass that made the op."
        )


class CompileCacheError(MegacppError, ValueError):
    """A file of compiled code that cannot be written, or is of no use in this process.

    Args:
        path: of the file.
        reason: why, as a sentence without its full stop.
        remedy: what to do, likewise.
    """

    def __init__(self, path: str, reason: str, remedy: str) -> None:
        self.path, self.reason, self.remedy = path, reason, remedy
        super().__init__(f"{path}: {reason}. {remedy}.")


class ReportFormatError(MegacppError, ValueError):
    """Text or data that is not a report written by this version's `Report.to_json`.

    Args:
        problem: what is wrong with it.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"not a megacpp report: {problem}. Write it anew with Report.to_json().")
