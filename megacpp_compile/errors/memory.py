"""What a training step saves and recomputes, and estimates of its memory."""

from __future__ import annotations

from collections.abc import Sequence

from megacpp_compile.errors._base import MegacppError, listed


class BlockKindError(MegacppError, ValueError):
    """A pattern of `block_kinds` that hits no module.

    Args:
        pattern: the pattern as given.
        close: names of modules that it may have been meant for.
    """

    def __init__(self, pattern: str, close: Sequence[str]) -> None:
        self.pattern, self.close = pattern, tuple(close)
        super().__init__(
            f"block_kinds: the pattern {pattern!r} hits no module of the compiled code. Names there: "
            f"{listed(self.close)}. Patterns are globs over the full name of a block, e.g. 'model.layers.*.mixer'."
        )


class TwoPoliciesError(MegacppError, ValueError):
    """Something beside the policy also says what backward recomputes.

    Args:
        what: what else says it, in words.
        remedy: what to do.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self.what, self.remedy = what, remedy
        super().__init__(f"options['policy'] decides what backward recomputes, and so does {what}: {remedy}.")


class CheckpointedTwiceError(MegacppError, ValueError):
    """A block that is recomputed already was to be wrapped in a checkpoint once more.

    Args:
        fqn: the block's name.
        module: the class that recomputes, or is set to.
    """

    def __init__(self, fqn: str, module: str) -> None:
        self.fqn, self.module = fqn, module
        super().__init__(
            f"{fqn or 'the model'} is checkpointed already, by {module}: backward would recompute it twice. Apply "
            "checkpoints once, and switch the model's own off (gradient_checkpointing_disable() in transformers)."
        )


class StagesOffError(MegacppError, ValueError):
    """Inductor's settings switch off a stage that this package's passes are part of, under `strict`.

    Args:
        settings: their names.
        problem: what does not run, in words.
    """

    def __init__(self, settings: Sequence[str], problem: str) -> None:
        self.settings, self.problem = tuple(settings), problem
        super().__init__(
            f"{problem}. Set {'it' if len(settings) == 1 else 'them'} to True, choose another mode than 'lite', or "
            "compile without 'strict': Inductor then compiles the frame alone."
        )


class PeakUnreachableError(MegacppError):
    """A limit on peak memory that no plan of what to recompute meets.

    Args:
        limit: bytes asked for.
        lowest: bytes of the lowest peak that can be promised.
        before: bytes of it that are allocated before the step.
    """

    def __init__(self, limit: int, lowest: int, before: int) -> None:
        self.limit, self.lowest, self.before = limit, lowest, before
        asked, least, given = (f"{n / 2**30:.3g} GiB" for n in (limit, lowest, before))
        super().__init__(
            f"policy.peak_gib: {asked} cannot be met. The lowest peak that can be promised is {least}, of which "
            f"{given} are allocated before the step. Make the batch smaller, shard the model, or offload."
        )


class FitError(MegacppError):
    """No policy makes a training step fit into the memory there is.

    Args:
        limit: bytes there are.
        lowest: bytes of the lowest estimated peak.
        lever: the policy that has it, in words.
    """

    def __init__(self, limit: int, lowest: int, lever: str) -> None:
        self.limit, self.lowest, self.lever = limit, lowest, lever
        super().__init__(
            f"no policy fits a training step into {limit / 2**30:.3g} GiB: the lowest estimated peak is "
            f"{lowest / 2**30:.3g} GiB ({lever}). Make the batch smaller, shard the model, or choose an optimizer with "
            "less state."
        )


class EstimateError(MegacppError):
    """The model's forward depends on the values of its tensors, so that its memory cannot be told from shapes.

    Args:
        problem: what asked for a value.
        where: source line that did, "" when unknown.
        advice: what to do, as a sentence without its full stop.
    """

    def __init__(self, problem: str, where: str = "", advice: str = "") -> None:
        self.problem, self.where, self.advice = problem, where, advice
        super().__init__(
            f"the model cannot run on shapes alone: {where or 'its forward'} reads values ({problem}). "
            f"{advice or 'Let shapes decide instead, or estimate the model without that part'}."
        )


class ForwardError(MegacppError):
    """The model's own forward raised when it ran on fake tensors of the shapes of its inputs.

    Args:
        model: the model's class.
        problem: what it raised, without a full stop.
        where: source line that raised, "" when unknown.
    """

    def __init__(self, model: str, problem: str, where: str = "") -> None:
        self.model, self.problem, self.where = model, problem, where
        super().__init__(
            f"{model} cannot run on these inputs: {problem}{f' (at {where})' if where else ''}. "
            "Give it the inputs of a training step; only shapes, dtypes and devices matter."
        )


class BuilderError(MegacppError, ValueError):
    """A `module:callable` of the command line that gives no model and inputs.

    Args:
        target: as given.
        problem: what is wrong with it, without a full stop.
        remedy: what to do, as a sentence.
    """

    def __init__(self, target: str, problem: str, remedy: str) -> None:
        self.target, self.problem, self.remedy = target, problem, remedy
        super().__init__(f"cannot build {target!r}: {problem}. {remedy}")
