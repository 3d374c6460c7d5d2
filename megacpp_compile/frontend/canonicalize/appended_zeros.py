"""What is concatenated with zeros behind it is padded.

Before: `cat((x, zeros(b, pad, d)), 1)`
After:  `pad(x, (0, 0, 0, pad))`
"""

from __future__ import annotations

from typing import Any

from torch import fx

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.filled import is_filled


def appended_zeros(graph: fx.Graph, fake_mode: FakeTensorMode) -> None:
    """Rewrite every concatenation of one tensor and zeros of its dtype."""
    for node in list(graph.find_nodes(op="call_function", target=aten.cat.default)):
        parts: Any = node.args[0]
        if len(parts) != 2 or is_filled(parts[0], 0.0) or not is_filled(parts[1], 0.0):
            continue
        x, zeros = parts
        rank = value(node).dim()
        if value(x).dim() != rank or value(zeros).dim() != rank or value(x).dtype != value(zeros).dtype:
            continue  # an empty tensor of one dimension goes with any
        dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % rank  # type: ignore[operator]
        size = value(zeros).shape[dim]
        if not isinstance(size, int):
            size = Builder(graph, fake_mode, node, node)(aten.sym_size.int, zeros, dim)
        # The node itself, with its fake value: of symbolic sizes the op makes one under the dispatcher in Python alone.
        node.target, node.args, node.kwargs = aten.pad.default, (x, [0, 0] * (rank - 1 - dim) + [0, size]), {}
