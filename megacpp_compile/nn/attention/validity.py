"""Which tokens of a row are there at all: computed once, outside of compiled code, and handed along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megacpp_compile.errors import OperandError

Mode = Literal["none", "token prefix", "slot prefix"]


@dataclass(frozen=True)
class Validity:
    """The leading part of each row that holds tokens; what follows is padding.

    Attributes:
        mode: "none" (every token is there), "token prefix" or "slot prefix".
        counts: tokens, or slots, of each row; empty under "none".
        slot: tokens a slot, under "slot prefix" alone.

    Raises OperandError for an unknown mode, negative counts, a slot prefix without a positive size of its slots, and
    fields that the mode has no use for.
    """

    mode: Mode = "none"
    counts: tuple[int, ...] = ()
    slot: int = 0

    def __post_init__(self) -> None:
        problem = None
        if self.mode not in ("none", "token prefix", "slot prefix"):
            problem = f"mode is {self.mode!r}, wanted 'none', 'token prefix' or 'slot prefix'"
        elif any(count < 0 for count in self.counts):
            problem = f"counts are {self.counts}, wanted none below 0"
        elif self.mode == "slot prefix" and self.slot <= 0:
            problem = f"a slot prefix has slots of {self.slot} tokens, wanted a positive number"
        elif self.mode != "slot prefix" and self.slot:
            problem = f"slot is {self.slot} under {self.mode!r}, which has no slots"
        elif (self.mode == "none") != (not self.counts):
            problem = f"{len(self.counts)} counts under {self.mode!r}"
        if problem is not None:
            raise OperandError("attention validity", problem)

    @classmethod
    def of_tokens(cls, counts: Sequence[int] | Tensor) -> Validity:
        """A token prefix. A tensor of counts on a device is waited for, here and nowhere else."""
        return cls("token prefix", _numbers(counts))

    @classmethod
    def of_slots(cls, counts: Sequence[int] | Tensor, slot: int) -> Validity:
        """A slot prefix: `counts` slots of `slot` tokens a row."""
        return cls("slot prefix", _numbers(counts), slot)

    def tokens(self, width: int) -> tuple[int, ...]:
        """Tokens of each row that are there, in rows of `width`."""
        size = self.slot if self.mode == "slot prefix" else 1
        return tuple(min(count * size, width) for count in self.counts)

    def partial(self, width: int) -> bool:
        """Whether some row of `width` tokens is not full."""
        return any(count < width for count in self.tokens(width))

    def padded(self, doc_ids: Tensor | None, batch: int, width: int, device: torch.device) -> Tensor:
        """`doc_ids` [batch, width], or zeros, with -1 for every token that is not there, on `device`. Raises
        OperandError for counts of another number of rows."""
        if len(self.counts) != batch:
            raise OperandError("attention validity", f"counts of {len(self.counts)} rows for {batch}")
        rows = torch.tensor(self.tokens(width), device=device)
        there = torch.arange(width, device=device) < rows[:, None]
        ids = torch.zeros(batch, width, dtype=torch.long, device=device) if doc_ids is None else doc_ids.to(device)
        return ids.masked_fill(~there, -1)


def _numbers(counts: Sequence[int] | Tensor) -> tuple[int, ...]:
    return tuple(int(n) for n in (counts.tolist() if isinstance(counts, Tensor) else counts))
