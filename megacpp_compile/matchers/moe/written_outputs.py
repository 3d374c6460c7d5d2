"""Matches buffers that a loop over experts has written their outputs to, one for every choice."""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.fx.filled import is_blank
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.moe.combines import unsorted
from megacpp_compile.matchers.moe.experts import Expert
from megacpp_compile.matchers.moe.iterations import in_order, iterations_of
from megacpp_compile.matchers.moe.row_updates import RowUpdate, row_update
from megacpp_compile.matchers.moe.segments import segments


@dataclasses.dataclass(frozen=True)
class Written:
    """Outputs for every choice, in its place.

    Attributes:
        rows: what experts read: of every choice a row in the same place, or with `by_token` the tokens.
        first: the first expert's number.
        flat: outputs have one dimension for all choices, whatever the shape of these.
    """

    choices: Node
    rows: Node
    experts: list[Expert]
    first: int
    by_token: bool
    flat: bool = False


def written_to(node: Node) -> Written | None:
    """What experts have written to `node`; None for anything else."""
    chain: list[RowUpdate] = []
    if (put := unsorted(node)) is not None:
        chain = segments(*put)
    else:
        while (update := row_update(node)) is not None and update.overwrites:
            chain.insert(0, update)
            node = update.previous
        chain = chain if is_blank(node) else []
    if not chain:
        return None
    by_slot = chain[0].by_slot
    if any(update.by_slot != by_slot for update in chain) or not by_slot and value(chain[0].token.indices).dim() != 1:
        return None
    iterations = iterations_of(chain, gated=False)
    ordered = iterations if isinstance(iterations, MatchFailure) else in_order(iterations)
    if isinstance(ordered, MatchFailure):
        return None
    mask = ordered[0].update.token
    assert mask.expert is not None
    experts = [t.expert for t in ordered if t.expert is not None]
    return Written(mask.indices, ordered[0].x, experts, mask.expert, by_slot, flat=put is not None)
