"""FlashAttention-4 on a machine without a GPU: a package of its name on the path, and a CPU that is taken for a Hopper."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

from megacpp_compile.nn.attention import fa4, fa4_runtime, switch

HERE = Path(__file__).parent / "stand_in"


def forget():
    """As in a process that has not asked yet."""
    for name in [n for n in sys.modules if n.split(".")[0] == "flash_attn"]:
        del sys.modules[name]
    fa4_runtime.forget()


@contextlib.contextmanager
def hopper_on_cpu(monkeypatch, capability=(9, 0)):
    """Yields the stand-in module."""
    forget()
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr(fa4, "DEVICES", ("cpu",))
    monkeypatch.setattr(fa4_runtime, "_capability", lambda index: capability)
    monkeypatch.setattr(fa4_runtime, "_device", lambda index: torch.device("cpu"))
    try:
        from flash_attn.cute import interface

        yield interface
    finally:
        switch.disable_fa4()
        forget()
