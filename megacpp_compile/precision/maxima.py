"""Amax history for delayed scaling: the largest magnitudes that a linear's tensors had in the last steps.

A compiled frame that has linears under "fp8_delayed" is called with an `AmaxHistory` appended to its own inputs, and
writes to it; one artifact may serve several blocks, so it belongs to the weights that a call brings, not to the code.
`scaling_state.py` carries it over a restart.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from megacpp_compile._torch.modules import gathered_parameter

# Steps that count: each call of a frame that trains is one.
HISTORY = 16

Kind = Literal["x", "w", "g"]


class Column(NamedTuple):
    """One tensor of a linear whose magnitudes are kept.

    weight: place of the linear's weight among the frame's inputs. kind: the linear's input, its weight, or the gradient
    of its result. turn: how many linears with this weight come before it in the frame.
    """

    weight: int
    kind: Kind
    turn: int


@dataclasses.dataclass(frozen=True)
class AmaxHistory:
    """The past of one frame, with a column for each of its tensors, those of gradients last.

    history: [HISTORY, n] float32. latest: what the last forward saw, [m]. grads: what the last backward saw, n - m of
    []; apart, as each is written on its own. owners: (weight, kind, turn) of each column.
    """

    history: Tensor
    latest: Tensor
    grads: list[Tensor]
    owners: tuple[tuple[TensorWeakRef, Kind, int], ...]

    def arguments(self) -> list[Tensor]:
        """In the order in which a compiled frame takes them."""
        return [self.history, self.latest, *self.grads]

    def column(self, i: int) -> Tensor:
        """What column i holds, newest first, [HISTORY + 1]."""
        m = self.latest.numel()
        newest = self.latest[i] if i < m else self.grads[i - m]
        return torch.cat([newest[None], self.history[:, i]])

    def fill(self, i: int, column: Tensor) -> None:
        m = self.latest.numel()
        (self.latest[i] if i < m else self.grads[i - m]).copy_(column[0])
        self.history[:, i].copy_(column[1:])


# Of each weight the frames it is an input of, the youngest last, and what was loaded for it before there was one.
_FRAMES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
LOADED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# The same for weights that FSDP2 has yet to gather for the first time, by its records of them.
AWAITED: weakref.WeakKeyDictionary[Any, dict[Any, Tensor]] = weakref.WeakKeyDictionary()


def maxima_of(columns: Sequence[Column], inputs: Sequence[Any]) -> AmaxHistory:
    """The past of a frame called with `inputs`: that of its last call with these weights; at first what another frame
    with one of them has, else what was loaded, else none, which is 0."""
    owners = tuple((inputs[c.weight], c.kind, c.turn) for c in columns)
    key = tuple((id(weight), kind, turn) for weight, kind, turn in owners)
    own: dict[Any, AmaxHistory] = _FRAMES.setdefault(owners[0][0], {})
    found = own.get(key)
    if found is not None and all(ref() is weight for (ref, *_), (weight, *_) in zip(found.owners, owners, strict=True)):
        return found
    device, n = inputs[columns[0].weight].device, len(columns)
    forward = sum(c.kind != "g" for c in columns)
    with torch.no_grad():
        made = AmaxHistory(
            torch.zeros(HISTORY, n, device=device), torch.zeros(forward, device=device),
            [torch.zeros((), device=device) for _ in range(n - forward)],
            tuple((TensorWeakRef(weight), kind, turn) for weight, kind, turn in owners),
        )  # fmt: skip
        for i, (weight, kind, turn) in enumerate(owners):
            if (known := _known(weight, kind, turn)) is not None:
                made.fill(i, known)
    for weight in {id(weight): weight for weight, _, _ in owners}.values():
        _FRAMES.setdefault(weight, {})[key] = made
    return made


def _known(weight: Tensor, kind: str, turn: int) -> Tensor | None:
    for maxima, i in reversed(list(columns_of(weight))):
        if maxima.owners[i][1:] == (kind, turn):
            return maxima.column(i)
    awaited = (columns for record, columns in AWAITED.items() if gathered_parameter(record) is weight)
    for loaded in (LOADED.get(weight, {}), *awaited):
        if (kind, turn) in loaded:
            found: Tensor = loaded[kind, turn]
            return found
    return None


def columns_of(weight: Tensor) -> Iterator[tuple[AmaxHistory, int]]:
    """(past, which column) of each tensor of a linear with that weight, of the youngest frame last."""
    for maxima in _FRAMES.get(weight, {}).values():
        for i, (owner, _, _) in enumerate(maxima.owners):
            if owner() is weight:
                yield maxima, i
