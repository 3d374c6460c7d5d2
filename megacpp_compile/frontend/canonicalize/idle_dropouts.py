"""Dropouts that drop nothing: in evaluation, and of probability 0.

Before: `y = dropout(down(a), 0.0, True); return y * gate, y`
After:  `y = dropout(down(a), 0.0, True); return down(a) * gate, y`
Torch returns the input itself there, and draws nothing.
"""

from __future__ import annotations

from torch import fx

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import has_effects


def idle_dropouts(graph: fx.Graph) -> None:
    """Let readers have what such dropouts get. What is returned stays: an output must not
    become an input."""
    for node in graph.find_nodes(op="call_function", target=aten.dropout.default):
        if not has_effects(node):
            node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output")
