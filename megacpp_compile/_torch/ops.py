"""The classes of what a graph calls, the ops it is made of, and functions of torch that have no public name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch import _assert_async as assert_async
    from torch import _check as torch_check
    from torch import _grouped_mm as grouped_mm
    from torch import _scaled_mm as scaled_mm
    from torch._C import _set_grad_enabled as set_grad_enabled
    from torch._C._nn import linear as nn_linear
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch.ops import _c10d_functional as collectives  # type: ignore[import-not-found]  # no module, but as one
else:
    __getattr__ = theme(__name__)

aten = torch.ops.aten
