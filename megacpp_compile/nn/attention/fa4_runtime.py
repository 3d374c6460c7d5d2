"""The one door to the package flash-attn-4 (`flash_attn.cute`), FlashAttention in CuTe's Python DSL.

Its functions below the autograd function are called, as an op that a graph can hold brings a backward of its own:
https://github.com/Dao-AILab/flash-attention, flash_attn/cute/interface.py of release 4.0.0b36. They take [B, S, H, D].
Nothing is loaded, and no device is touched, before somebody asks.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacpp_compile._torch.dispatch import disable_current_modes
from megacpp_compile.nn.attention.eligibility import Runtime
from megacpp_compile.report.user_code import first_line

PACKAGE = "flash-attn-4"
_INTERFACE = "flash_attn.cute.interface"
_TRIED = (1, 128, 1, 64)  # [B, S, H, D] of what is compiled to find out whether anything can be


def installed() -> bool:
    """Whether the package is there, by its files alone: `flash_attn` may be an older release's, which takes long."""
    try:
        spec = importlib.util.find_spec("flash_attn")
    except ValueError:  # a module without a spec stands in its place
        spec = None
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    return any((Path(place) / "cute" / "interface.py").exists() for place in places)


@functools.cache
def _interface() -> tuple[Any, str]:
    """(the package's module, "") or (None, why it cannot be loaded)."""
    if not installed():
        return None, f"the package {PACKAGE} is not installed"
    try:
        found = importlib.import_module(_INTERFACE)
        assert callable(found._flash_attn_fwd)
    except Exception as error:  # whatever a package that is half there raises
        return None, f"{_INTERFACE} cannot be loaded: {first_line(error)}"
    return found, ""


@functools.cache
def probe(index: int) -> Runtime:
    """What this process can run on CUDA device `index`. Asked once: the first question compiles a kernel for it, and a
    failure's text is kept."""
    with disable_current_modes():
        return _probe(index)


def _probe(index: int) -> Runtime:
    capability = _capability(index)
    interface, failure = _interface()
    if interface is None:
        return Runtime(failure, capability)
    try:
        tensor = torch.zeros(_TRIED, dtype=torch.bfloat16, device=_device(index))
        forward(tensor, tensor, tensor, 1.0, 0.0, True)
        if tensor.is_cuda:
            torch.cuda.synchronize(index)
    except Exception as error:
        return Runtime(f"{PACKAGE} compiles nothing for this device: {first_line(error)}", capability)
    backward = getattr(interface, "_flash_attn_bwd", None)
    takes = inspect.signature(backward).parameters if backward is not None else {}
    return Runtime("", capability, "softcap" in takes, backward is not None)


def _capability(index: int) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else None


def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


def failure() -> str:
    """Why the package cannot be loaded, "" where it can."""
    return _interface()[1]


def forget() -> None:
    """Ask anew what can be loaded and run."""
    _interface.cache_clear()
    probe.cache_clear()


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(out [B, S, H, E] in q's dtype, lse [B, H, S] float32) of q [B, S, H, D], k [B, S, G, D], v [B, S, G, E]."""
    found = _kernel("_flash_attn_fwd")(
        q, k, v, softmax_scale=scale, causal=causal, softcap=softcap or None, return_lse=True
    )
    # Releases return two to five values; none of them is to be cast before it is taken out.
    out, lse = found[0], found[1]
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, softcap: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, all in the layout of `forward`."""
    sure = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
    found = _kernel("_flash_attn_bwd")(
        q, k, v, out, grad, lse, softmax_scale=scale, causal=causal, **({"softcap": softcap} if softcap else {}), **sure
    )
    return found[0], found[1], found[2]


def _kernel(name: str) -> Any:
    interface, failure = _interface()
    if interface is None:
        raise AssertionError(failure)
    return getattr(interface, name)
