"""Autocast's switches as a graph calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch._C import _autocast_supported_devices as supported_devices
    from torch._C import _DisableAutocast as DisableAutocast
    from torch.amp import _enter_autocast as enter_autocast
    from torch.amp import _exit_autocast as exit_autocast
else:
    __getattr__ = theme(__name__)
