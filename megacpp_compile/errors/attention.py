"""Attention, its evidence, and operands of ops that a model calls."""

from __future__ import annotations

from megacpp_compile.errors._base import MegacppError


class AttentionError(MegacppError, ValueError):
    """A backend of `attention` that was asked for by name and cannot serve the call.

    Args:
        backend: its name.
        tag: why, for machines: one of `nn.attention.bodies.TAGS`, or of `nn.attention.eligibility.TAGS` of "fa4".
        reason: why, in words.
        remedy: what to do, as a sentence, where it was not a call's argument that asked.
    """

    def __init__(self, backend: str, tag: str, reason: str, remedy: str = "") -> None:
        self.backend, self.tag, self.reason = backend, tag, reason
        remedy = remedy or "Let attention(..., backend='auto') choose what can."
        super().__init__(f"attention by {backend!r}: {reason} [{tag}]. {remedy}")


class EvidenceError(MegacppError, ValueError):
    """A profile, a surface or a record of evidence that claims what it cannot, or that there is none of.

    Args:
        what: which of them, "profile 'dense_fa4_forward'".
        problem: what is wrong with it.
    """

    def __init__(self, what: str, problem: str) -> None:
        self.what, self.problem = what, problem
        super().__init__(f"{what}: {problem}.")


class OperandError(MegacppError, ValueError):
    """Operands that an op called by the user cannot mean anything with.

    Args:
        op: the op's qualified name.
        problem: what is wrong with which of them, and what it should be.
    """

    def __init__(self, op: str, problem: str) -> None:
        self.op, self.problem = op, problem
        super().__init__(f"{op}: {problem}.")


class ForwardOnlyError(MegacppError):
    """A gradient was asked of an op that has none for such operands.

    Args:
        op: the op's qualified name.
        operands: what about them, in words.
        remedy: what to do.
    """

    def __init__(self, op: str, operands: str, remedy: str) -> None:
        self.op, self.operands, self.remedy = op, operands, remedy
        super().__init__(f"{op} has no gradient for {operands}: {remedy}, or call it under torch.no_grad().")


class AbsorbedInTrainingError(MegacppError):
    """Attention with absorbed weights was asked to train.

    Args:
        where: the op or function.
        score_channels: of a query and a row.
        value_channels: of a row's values.
    """

    def __init__(self, where: str, score_channels: int, value_channels: int) -> None:
        self.where, self.score_channels, self.value_channels = where, score_channels, value_channels
        super().__init__(
            f"{where} is for decoding, and an operand or weight requires a gradient: with absorbed weights a score "
            f"takes {score_channels} channels and a value {value_channels} instead of one head's own, no flash kernel "
            "takes the two parts of a score, and the memory it saves is not held in training where keys and values are "
            "recomputed from the latent. Decode under torch.no_grad(), or expand keys and values to train."
        )
