"""Ops that are other names of ops: `concat`, `multiply`, `swapaxes` become `cat`, `mul`, `transpose`; `tile`, which
may leave leading dimensions out, becomes `repeat`.

Before: `concat([a, b], -1)`          After: `cat([a, b], -1)`
"""

from __future__ import annotations

from torch import fx

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import value

_NAMES = {
    "concat.default": "cat.default",
    "concatenate.default": "cat.default",
    "multiply.Tensor": "mul.Tensor",
    "multiply.Scalar": "mul.Scalar",
    "divide.Tensor": "div.Tensor",
    "divide.Scalar": "div.Scalar",
    "true_divide.Tensor": "div.Tensor",
    "true_divide.Scalar": "div.Scalar",
    "subtract.Tensor": "sub.Tensor",
    "negative.default": "neg.default",
    "swapaxes.default": "transpose.int",
    "swapdims.default": "transpose.int",
    "linalg_matmul.default": "matmul.default",
}


def _overload(name: str) -> object:
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet, None), overload, None)


ALIASES = {old: _overload(new) for name, new in _NAMES.items() if (old := _overload(name)) is not None}


def aliases(graph: fx.Graph) -> None:
    """Rename in place. Schemas agree, so arguments stay as they are, but for `tile`'s."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in ALIASES:
            node.target = ALIASES[node.target]
    for node in graph.find_nodes(op="call_function", target=aten.tile.default):
        x, repeats = node.args
        missing = value(x).dim() - len(repeats)  # type: ignore[arg-type]
        node.target, node.args = aten.repeat.default, (x, [*(1,) * missing, *repeats])  # type: ignore[misc]
