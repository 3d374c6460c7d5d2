"""The launch record: one JSON file of what a training run was about to do, written before its first step."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megacpp_compile._torch.pytree import tree_leaves
from megacpp_compile.config.options import Config
from megacpp_compile.errors import EstimateError, ForwardError, TargetUnavailableError
from megacpp_compile.evidence.binding import digest, machine_binding
from megacpp_compile.memory.estimate import estimate
from megacpp_compile.passes._driver import pass_names

FORMAT = 1


@dataclass(frozen=True)
class LaunchRecord:
    """What a run was about to do, as plain containers.

    Attributes:
        format: version of the file.
        date: UTC.
        machine: its binding: label, device, driver, packages, commit and whether the tree was clean
            (`evidence.binding.machine_binding`).
        model: "class", number of "parameters" and of "trainable" ones.
        inputs: shape and dtype of each tensor among the inputs.
        estimate: `Estimate.to_dict()`, activations by field included; {"refused": why} where the model cannot be
            estimated.
        options: every field of `Config` in force, defaults included; what is no plain data by its repr.
        policy: the policy in force, field by field, or "auto", None without one; the same as in `options`.
        precision: likewise the precision plan, whose rows `precision.survey.manifest` has.
    """

    format: int
    date: str
    machine: Mapping[str, Any]
    model: Mapping[str, Any]
    inputs: tuple[Mapping[str, Any], ...]
    estimate: Mapping[str, Any]
    options: Mapping[str, Any]
    policy: Mapping[str, Any] | str | None
    precision: Mapping[str, Any] | None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True, default=repr) + "\n"

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits of the JSON, by which a record of evidence names its launch."""
        return digest(self.to_json())


def launch_record(
    model: nn.Module,
    *args: Any,
    path: str | Path,
    options: Mapping[str, Any] | Config | None = None,
    optimizer: str | float = "adamw",
    device: str | torch.device | None = None,
    folder: str | Path = ".",
    **kwargs: Any,
) -> LaunchRecord:
    """Write what a training run with `model(*args, **kwargs)` is about to do to `path`, and return it. Call it once, on
    one rank, before the model is compiled; nothing is allocated, and the model is left alone.

    args, kwargs: inputs of a step; only shapes, dtypes and devices matter.
    options: as given to `torch.compile(..., backend="megacpp", options=...)` or `compile`.
    optimizer, device: as in `estimate`.
    folder: of the checkout whose commit is recorded.

    The estimate is eager's, with fields; `compiled` is None in it, as nothing is traced. Raises what `estimate` raises
    for a model that is none and for bad options, but not where a model cannot be run on shapes: then the record says
    why.
    """
    config = Config.from_options(options, pass_names())
    try:
        estimated = estimate(model, *args, optimizer=optimizer, device=device, compiled=False, options=config, **kwargs)
        found = estimated.to_dict()
    except (EstimateError, ForwardError, TargetUnavailableError) as error:
        found = {"refused": str(error)}
    parameters = list(model.parameters())
    plain = config.to_dict()
    record = LaunchRecord(
        FORMAT,
        datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine_binding(Path(folder)),
        {
            "class": type(model).__name__,
            "parameters": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        },
        tuple(
            {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
            for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        ),
        found, plain, plain["policy"], plain["precision"],
    )  # fmt: skip
    Path(path).write_text(record.to_json())
    return record
