"""`aten.copy(dst, src)`, what functionalisation makes of a slice assignment, is `src` in dst's shape and dtype.

Before: `sl = slice(k, -1, 0, n); c = copy(sl, nope); k1 = slice_scatter(k, c, -1, 0, n)`
After:  `c = expand(_to_copy(nope, dtype), shape); k1 = slice_scatter(k, c, -1, 0, n)`

`aten.copy` has no derivative formula, so a training graph that keeps one can't be differentiated again.
"""

from __future__ import annotations

from torch import fx

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, replace, same_sizes, value


def functional_copies(graph: fx.Graph, fake_mode: FakeTensorMode) -> None:
    """Rewrite every functional copy."""
    for node in list(graph.find_nodes(op="call_function", target=aten.copy.default)):
        destination, source = node.args[:2]
        to, have = value(destination), value(source)
        build = Builder(graph, fake_mode, node, node)
        new = source
        if have.dtype != to.dtype or have.device != to.device:
            new = build(aten._to_copy.default, source, dtype=to.dtype, device=to.device)
        if not same_sizes(have.shape, to.shape):
            new = build(aten.expand.default, new, [build.size(destination, i) for i in range(to.dim())])
        replace(node, new)
