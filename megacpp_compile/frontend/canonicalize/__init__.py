"""Stage 2: one spelling per idea, for what must be rewritten before anything can be matched or differentiated.

Most spellings need no rewriting here: the recognisers (`recognise/`) read a subgraph by what it computes.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from megacpp_compile.frontend.canonicalize.aliases import aliases
from megacpp_compile.frontend.canonicalize.functional_copies import functional_copies
from megacpp_compile.frontend.canonicalize.whole_slices import whole_slices
from megacpp_compile.fx.edit import drop_dead


def normalise(graph: fx.Graph, fake_mode: FakeTensorMode) -> None:
    """Drop tracing's assertions, slices of all, and dead values; let views copy where they must; rename aliases;
    rewrite copies."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        # A fused op may lay its result out otherwise than the plain ops did; a view of it must not fail.
        node.target = torch.ops.aten.reshape.default
    aliases(graph)
    whole_slices(graph)
    functional_copies(graph, fake_mode)
    drop_dead(graph)
