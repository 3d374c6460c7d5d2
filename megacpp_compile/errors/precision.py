"""Precision plans, Transformer Engine, and tensors that hold fp8."""

from __future__ import annotations

from collections.abc import Sequence

from megacpp_compile.errors._base import SHOWN, MegacppError


class PlanMismatchError(MegacppError):
    """A model that does not hold what its precision plan says.

    Args:
        differences: one line for each linear that differs.
    """

    def __init__(self, differences: Sequence[str]) -> None:
        self.differences = tuple(differences)
        shown = [f"  {line}" for line in self.differences[: 4 * SHOWN]]
        rest = len(self.differences) - len(shown)
        super().__init__(
            "\n".join((f"{len(self.differences)} linears differ from the precision plan:", *shown))
            + (f"\n  and {rest} more" if rest else "")
        )


class ManifestError(MegacppError, ValueError):
    """Text that is not a manifest of a precision plan.

    Args:
        problem: what is wrong with it.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"not a precision manifest: {problem}. Write it anew with PrecisionPlan.manifest().")


class EngineError(MegacppError):
    """Something that Transformer Engine cannot do, or cannot do here.

    Args:
        what: what was asked for.
        reason: why it cannot be.
        remedy: what to do.
    """

    def __init__(self, what: str, reason: str, remedy: str) -> None:
        self.what, self.reason, self.remedy = what, reason, remedy
        super().__init__(f"{what}: {reason}. {remedy}")


class StockCheckpointError(EngineError):
    """A block with fp8 modules of Transformer Engine under a checkpoint that is not Transformer Engine's own."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} computes in fp8 under torch.utils.checkpoint",
            "the second forward would quantise with other scales than the first, and count its maxima twice",
            "Call the block through megacpp_compile.precision.checkpoint.checkpoint_for(block), or let "
            "megacpp_compile.apply_checkpoints(model) do so for every block, with fp8_wrapper='auto' or "
            "'te_checkpoint'.",
        )


class WrapperError(MegacppError):
    """A wrapper tensor that does not hold what it should.

    Args:
        name: the tensor's name, "" when unknown.
        kind: its package and class.
        problem: what is wrong, as the rest of a sentence.
    """

    def __init__(self, name: str, kind: str, problem: str) -> None:
        self.name, self.kind, self.problem = name, kind, problem
        super().__init__(f"{name or 'a tensor without a name'} ({kind}) {problem}.")


class DequantisationError(MegacppError):
    """An fp8 payload was widened where nobody allowed it, under `strict`.

    Args:
        findings: each of them as a line.
    """

    def __init__(self, findings: Sequence[str]) -> None:
        self.findings = tuple(findings)
        lines = [f"{len(self.findings)} fp8 payload{'' if len(self.findings) == 1 else 's'} widened in silence:"]
        lines += [f"  {finding}" for finding in self.findings[:SHOWN]]
        if len(self.findings) > SHOWN:
            lines.append(f"  and {len(self.findings) - SHOWN} more")
        lines.append("Give the payload and its scale to an op with an fp8 lane, or allow the op or the module.")
        super().__init__("\n".join(lines))


class ScalingStateError(MegacppError, ValueError):
    """A state of delayed scaling that does not fit the model, told before anything is loaded.

    Args:
        lines: what does not fit, a line each.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = tuple(lines)
        shown = [*self.lines[:6], *([f"and {len(self.lines) - 6} more"] if len(self.lines) > 6 else [])]
        super().__init__(
            "\n".join(("the scaling state does not fit the model, and nothing was loaded:", *(f"  {x}" for x in shown)))
            + "\nIt is what `scaling_state` returned of the same model; leave the line out to begin anew."
        )
