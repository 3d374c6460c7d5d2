"""The time to recompute a node, in seconds of an idle device: a roofline over FLOPs and bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import fx
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from megacpp_compile._torch import present
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.sizes import hint, nbytes
from megacpp_compile.fx.views import is_view
from megacpp_compile.lowerings._traits import traits_of
from megacpp_compile.targets import gpus
from megacpp_compile.targets.rates import rates as rates_of_target

# FLOP/s and bytes/s where nothing is known of the device. Only the order of costs matters.
_FLOPS, _BYTES = 500e12, 3e12
# Bytes/s between a device and pinned main memory: PCIe 5.0 x16 without other traffic.
TO_MAIN_MEMORY = 50e9


def rates(device: str) -> tuple[float, float]:
    """(FLOP/s of 16-bit GEMMs, bytes/s) of a device type ("cuda"), by torch's own estimate where there is such a
    device; of the GPU that is supposed, where one is."""
    if gpus.supposed() is not None:
        found = rates_of_target(device)
        return found.flops, found.bytes
    return _rates(device)


@functools.cache
def _rates(device: str) -> tuple[float, float]:
    if device == "cuda" and torch.cuda.is_available():
        from megacpp_compile._torch.inductor import get_device_tflops, get_gpu_dram_gbps

        if present(get_device_tflops, get_gpu_dram_gbps):
            return get_device_tflops(torch.bfloat16) * 1e12, get_gpu_dram_gbps() * 1e9
    return _FLOPS, _BYTES


def seconds(nodes: Iterable[Node], device: str) -> float:
    """The time to run `nodes` one after the other, unfused; views take none."""
    per_flop, per_byte = (1 / rate for rate in rates(device))
    return sum(max(flops(n) * per_flop, moved(n) * per_byte) for n in nodes if not is_view(n))


def flops(node: Node) -> float:
    """FLOPs of a 16-bit GEMM that takes as long as `node`; 0 for an op that only moves bytes."""
    own = traits_of(node).flops
    if own is not None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        return own(*args, **kwargs)
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        found = formula(*args, **kwargs, out_val=node.meta["val"])
        return float(hint(found) if isinstance(found, torch.SymInt) else found)  # `float` of it would be a guard
    except Exception:  # torch's formula does not know these arguments: as good as none
        return 0.0


def moved(node: Node) -> int:
    """Bytes that `node` reads and writes."""
    read = sum(nbytes(value(a)) for a in node.all_input_nodes)
    return read + nbytes(node.meta.get("val"))
