"""The choice among torch's attention kernels, as a graph and the process have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch.nn.attention import _backend_from_string as backend_from_string
    from torch.nn.attention import _cur_sdpa_kernel_backends as current_backends
    from torch.nn.attention import _sdpa_kernel as set_backends
else:
    __getattr__ = theme(__name__)
