"""What it takes to compute a node again, in seconds of an idle device: a roofline over FLOPs and bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from megacpp_compile.fx.edit import value
from megacpp_compile.remat.nodes import is_view, name_of, nbytes

# Where nothing is known of the device. Only the order of costs matters.
_FLOPS, _BYTES = 500e12, 3e12
# Bytes/s between a device and pinned main memory; PCIe 5.0 x16, which nobody else uses.
TO_MAIN_MEMORY = 50e9
# What a forward of routed experts takes in fp8 of what it takes in 16 bits: products of 2.0 ms and casts of 0.6, where
# products took 3.25 (docs/precision.md).
_EXPERTS_IN_FP8 = 0.8


@functools.cache
def rates(device: str) -> tuple[float, float]:
    """(FLOP/s of 16-bit products, bytes/s) by torch's own estimate of the device that is there."""
    if device == "cuda" and torch.cuda.is_available():
        from torch._inductor.utils import get_device_tflops, get_gpu_dram_gbps

        return get_device_tflops(torch.bfloat16) * 1e12, get_gpu_dram_gbps() * 1e9
    return _FLOPS, _BYTES


def seconds(nodes: Iterable[Node], device: str) -> float:
    per_flop, per_byte = (1 / rate for rate in rates(device))
    return sum(max(flops(n) * per_flop, moved(n) * per_byte) for n in nodes if not is_view(n))


def flops(node: Node) -> float:
    """Of a product or an attention core, in 16 bits; 0 for what moves bytes."""
    name = name_of(node)
    if name == "megacpp::down_norm_up":
        x, down, ups = value(node.args[0]), value(node.args[1]), node.args[4]
        return 2 * _rows(x) * (_elements(down) + _all_elements(ups))
    if name in ("megacpp::fp8_linear", "megacpp::fp8_block_linear"):
        return _rows(value(node.args[0])) * _elements(value(node.args[1]))  # in half the time of 16 bits
    if name == "megacpp::moe":
        weights = [w for given in node.args[3:6] for w in given]  # type: ignore[union-attr]
        down = [value(w) for w in node.args[5]]  # type: ignore[union-attr]
        experts = len(down) if down[0].dim() == 2 else _int(down[0].shape[0])
        share = _EXPERTS_IN_FP8 if len(node.args) > 10 and node.args[10] else 1.0  # precision
        return share * 2 * _elements(value(node.args[1])) * _all_elements(weights) / experts
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        return float(formula(*args, **kwargs, out_val=node.meta["val"]))
    except Exception:  # a formula that does not know these arguments: as good as none
        return 0.0


def moved(node: Node) -> int:
    read = sum(nbytes(value(a)) for a in node.all_input_nodes)
    return read + nbytes(node.meta.get("val"))


def _rows(x: torch.Tensor) -> float:
    return _elements(x) / _int(x.shape[-1])


def _all_elements(weights: Any) -> int:
    return sum(_elements(value(w)) for w in weights)


def _elements(t: torch.Tensor) -> int:
    return math.prod(_int(n) for n in t.shape)


def _int(n: object) -> int:
    return n if isinstance(n, int) else int(n.node.hint or 1)  # type: ignore[attr-defined]
