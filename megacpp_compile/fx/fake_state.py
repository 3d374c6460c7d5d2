"""A module's parameters and buffers as fake tensors, so that its forward runs on shapes alone."""

from __future__ import annotations

from typing import Any

import torch

from megacpp_compile._torch.fakes import FakeTensorMode


class fake_state:
    """Inside `with fake_state(model, mode)` the parameters and buffers of `model` are fake tensors of `mode`.

    model: a module; anything else is left as it is. Tied weights stay tied.
    """

    def __init__(self, model: Any, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
        self.kept: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> None:
        memo: dict[int, Any] = {}
        for module in self.modules:
            for table in (module._parameters, module._buffers):
                self.kept.append((table, dict(table)))
                for name, value in table.items():
                    if value is not None:
                        if id(value) not in memo:
                            memo[id(value)] = self.mode.from_tensor(value, static_shapes=True)
                        table[name] = memo[id(value)]

    def __exit__(self, *_: object) -> None:
        for table, values in self.kept:
            table.update(values)
