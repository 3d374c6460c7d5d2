"""What delayed scaling knows of the past: the largest magnitudes that a linear's tensors had in the last steps.

A compiled frame that has linears under "fp8_delayed" is called with a `Maxima` behind its own inputs, and writes to it;
one artifact may serve several blocks, so it belongs to the weights that a call brings, not to the code. `scaling_state`
and `load_scaling_state` carry it over a restart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from megacpp_compile.errors import NotAModuleError, ScalingStateError
from megacpp_compile.fx.module_names import canonical

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
class Maxima:
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
_LOADED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def maxima_of(columns: Sequence[Column], inputs: Sequence[Any]) -> Maxima:
    """The past of a frame called with `inputs`: that of its last call with these weights; at first what another frame
    with one of them has, else what was loaded, else none, which is 0."""
    owners = tuple((inputs[c.weight], c.kind, c.turn) for c in columns)
    key = tuple((id(weight), kind, turn) for weight, kind, turn in owners)
    own: dict[Any, Maxima] = _FRAMES.setdefault(owners[0][0], {})
    found = own.get(key)
    if found is not None and all(ref() is weight for (ref, *_), (weight, *_) in zip(found.owners, owners, strict=True)):
        return found
    device, n = inputs[columns[0].weight].device, len(columns)
    forward = sum(c.kind != "g" for c in columns)
    with torch.no_grad():
        made = Maxima(
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
    for maxima, i in reversed(list(_columns_of(weight))):
        if maxima.owners[i][1:] == (kind, turn):
            return maxima.column(i)
    loaded: Mapping[Any, Tensor] = _LOADED.get(weight, {})
    return loaded.get((kind, turn))


def _columns_of(weight: Tensor) -> Iterator[tuple[Maxima, int]]:
    for maxima in _FRAMES.get(weight, {}).values():
        for i, (owner, _, _) in enumerate(maxima.owners):
            if owner() is weight:
                yield maxima, i


def scaling_state(model: nn.Module) -> dict[str, Tensor]:
    """What delayed scaling knows of the linears of `model`, to be saved beside its state dict.

    Returns, by the weight's name and which of its linear's tensors it is ("layers.0.q_proj.weight:x", ":w", ":g"; from
    the second linear with a weight on ":x.1"), the largest magnitudes of the last HISTORY + 1 steps, newest first,
    float32 on CPU. Empty before the first step, and without delayed scaling. Raises NotAModuleError.
    """
    found: dict[str, Tensor] = {}
    for name, weight in _parameters(model):
        for maxima, i in _columns_of(weight):  # of frames with the same linear the youngest counts
            _, kind, turn = maxima.owners[i]
            found[f"{name}:{kind}" + (f".{turn}" if turn else "")] = maxima.column(i).cpu()
    return found


def load_scaling_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Have delayed scaling go on from what `scaling_state` returned, before or after the first step of `model`.

    Linears that the state does not name begin anew. Raises NotAModuleError; ScalingStateError, and changes nothing,
    for names that are no weight of the model and for tensors of another shape.
    """
    weights = dict(_parameters(model))
    wrong, columns = [], []
    for key, column in state.items():
        name, _, which = key.rpartition(":")
        kind, _, turn = which.partition(".")
        if kind not in ("x", "w", "g") or not (turn or "0").isdecimal() or name not in weights:
            wrong.append(f"{key}: no linear's weight here")
        elif not isinstance(column, Tensor) or tuple(column.shape) != (HISTORY + 1,):
            wrong.append(f"{key}: not a tensor of {HISTORY + 1} numbers")
        else:
            columns.append((weights[name], (kind, int(turn or 0)), column))
    if wrong:
        raise ScalingStateError(wrong)
    for weight, of, column in columns:
        _LOADED.setdefault(weight, {})[of] = column.detach().clone()
        with torch.no_grad():
            for maxima, i in _columns_of(weight):
                if maxima.owners[i][1:] == of:
                    maxima.fill(i, column)


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(model, nn.Module):
        raise NotAModuleError(model)
    return ((canonical(name), weight) for name, weight in model.named_parameters())
