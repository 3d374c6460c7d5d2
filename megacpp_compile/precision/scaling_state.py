"""The past of a model under delayed scaling as a state, saved and loaded by names that no wrapper changes.

`torch.compile`, DDP and checkpoint wrappers put segments into names; FSDP2 calls a forward with parameters that it
gathers, which the model's own names do not lead to. A state has the plain model's names, and both lead to them.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from megacpp_compile._torch.modules import gathered_parameter, sharded_parameters
from megacpp_compile.errors import NotAModuleError, ScalingStateError
from megacpp_compile.fx.module_names import named_parameters
from megacpp_compile.precision.maxima import AWAITED, HISTORY, LOADED, AmaxHistory, Kind, columns_of

KINDS = get_args(Kind)


def scaling_state(model: nn.Module) -> dict[str, Tensor]:
    """What delayed scaling knows of the linears of `model`, to be saved beside its state dict.

    Returns, by the weight's name and which of its linear's tensors it is ("layers.0.q_proj.weight:x", ":w", ":g"; from
    the second linear with a weight on ":x.1"), the largest magnitudes of the last HISTORY + 1 steps, newest first,
    float32 on CPU. Names are those of the plain model, whatever wraps it (`torch.compile`, DDP, FSDP2, checkpoint
    wrappers); a weight with several is under the first. Empty before the first step, and without delayed scaling. Each
    rank has its own, and nothing is communicated. Raises NotAModuleError.
    """
    found: dict[str, Tensor] = {}
    for name, weight in _weights(model, once=True).items():
        for maxima, i in weight.columns():  # of frames with the same linear the youngest counts
            _, kind, turn = maxima.owners[i]
            found[f"{name}:{kind}" + (f".{turn}" if turn else "")] = maxima.column(i).cpu()
    return found


def load_scaling_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Have delayed scaling go on from what `scaling_state` returned, before or after the first step of `model`, which
    may be wrapped in another way than the model that was saved; wrap it first.

    Linears that the state does not name begin anew. Raises NotAModuleError; ScalingStateError, and changes nothing,
    for names that are no linear's weight in the model and for tensors of another shape.
    """
    weights = _weights(model)
    wrong, columns = [], []
    for key, column in state.items():
        name, _, which = key.rpartition(":")
        kind, _, turn = which.partition(".")
        if kind not in KINDS or not (turn or "0").isdecimal():
            wrong.append(f"{key}: does not end with a tensor of a linear, {', '.join(':' + kind for kind in KINDS)}")
        elif name not in weights:
            near = difflib.get_close_matches(name, weights, 1)
            wrong.append(f"{key}: no parameter of the model" + (f" (the closest is {near[0]})" if near else ""))
        elif weights[name].parameter.dim() < 2:
            wrong.append(f"{key}: no linear's weight, but of shape {tuple(weights[name].parameter.shape)}")
        elif not isinstance(column, Tensor) or tuple(column.shape) != (HISTORY + 1,):
            wrong.append(f"{key}: not a tensor of {HISTORY + 1} numbers")
        else:
            columns.append((weights[name], (kind, int(turn or 0)), column.detach()))
    if wrong:
        raise ScalingStateError(wrong)
    for weight, of, column in columns:
        weight.loaded()[of] = column.clone()
        with torch.no_grad():
            for maxima, i in weight.columns():
                if maxima.owners[i][1:] == of:
                    maxima.fill(i, column)


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A parameter of a model. record: FSDP2's, where `fully_shard` has cut it: frames are called with what that
    gathers, not with the parameter."""

    parameter: Tensor
    record: Any = None

    def called(self) -> Tensor | None:
        """What frames are called with, None where that is yet to be made."""
        return self.parameter if self.record is None else gathered_parameter(self.record)

    def columns(self) -> list[tuple[AmaxHistory, int]]:
        called = self.called()
        return [] if called is None else list(columns_of(called))

    def loaded(self) -> dict[Any, Tensor]:
        """Where what is loaded for it is kept."""
        called = self.called()
        kept: dict[Any, Tensor] = (
            AWAITED.setdefault(self.record, {}) if called is None else LOADED.setdefault(called, {})
        )
        return kept


def _weights(model: nn.Module, once: bool = False) -> dict[str, _Weight]:
    """The parameters of `model` by the names of the plain model. once: those with several by the first one alone."""
    if not isinstance(model, nn.Module):
        raise NotAModuleError(model)
    records = {}
    for record, parameter in sharded_parameters(model):
        records.update({id(own): record for own in (parameter, gathered_parameter(record)) if own is not None})
    found: dict[str, _Weight] = {}
    seen: set[int] = set()
    for name, parameter in named_parameters(model):
        record = records.get(id(parameter))
        owner = id(parameter if record is None else record)
        if not once or owner not in seen:
            found.setdefault(_plain(name), _Weight(parameter, record))
        seen.add(owner)
    return found


def _plain(name: str) -> str:
    """The name that a parametrised weight has without its parametrisation."""
    return re.sub(r"\bparametrizations\.([^.]+)\.original$", r"\1", name)
