"""A module's parameters and buffers as fake tensors, so that its forward runs on shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megacpp_compile._torch.fakes import FakeTensorMode

# The attribute of a fake that has the tensor it stands for.
STANDS_FOR = "_megacpp_stands_for"


class fake_state:
    """Inside `with fake_state(model, mode)` the parameters and buffers of `model` are fake tensors of `mode`.

    model: a module; anything else is left as it is. device: where the fakes are said to lie, by default where each
    tensor does. Tied weights stay tied.
    """

    def __init__(self, model: Any, mode: FakeTensorMode, device: torch.device | None = None) -> None:
        self.mode, self.device = mode, device
        self.modules = list(model.modules()) if isinstance(model, nn.Module) else []
        self.kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._memo: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # holds the tensors, so that no id is used twice

    def fake(self, value: Any) -> Any:
        """The fake in the place of a tensor, the same one every time; anything else as it is. For a model's inputs."""
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._memo:
            self._memo[id(value)] = value, self._made(value)
            setattr(self._memo[id(value)][1], STANDS_FOR, value)
        return self._memo[id(value)][1]

    def _made(self, value: torch.Tensor) -> torch.Tensor:
        if self.device is None:
            return self.mode.from_tensor(value, static_shapes=True)
        with self.mode:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)
        if isinstance(value, nn.Parameter):
            return nn.Parameter(made, value.requires_grad)
        return made.requires_grad_(value.requires_grad)

    def __enter__(self) -> None:
        for module in self.modules:
            for table in (module._parameters, module._buffers):
                self.kept.append((table, dict(table)))
                table.update({name: self.fake(value) for name, value in table.items()})

    def __exit__(self, *_: object) -> None:
        for table, values in self.kept:
            table.update(values)
