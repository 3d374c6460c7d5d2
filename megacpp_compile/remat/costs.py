"""The time to recompute a node, in seconds of an idle device: a roofline over FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from megacpp_compile.fx.edit import value
from megacpp_compile.fx.sizes import hint, nbytes
from megacpp_compile.fx.views import is_view
from megacpp_compile.lowerings._traits import traits_of
from megacpp_compile.targets.rates import rates

# Bytes/s between a device and pinned main memory: PCIe 5.0 x16 without other traffic.
TO_MAIN_MEMORY = 50e9


def seconds(nodes: Iterable[Node], device: str) -> float:
    """The time to run `nodes` one after the other, unfused; views take none."""
    speed = rates(device)
    return sum(max(flops(n) / speed.flops, moved(n) / speed.bytes) for n in nodes if not is_view(n))


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
