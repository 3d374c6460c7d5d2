"""Stage 2: one spelling per idea, for what must be rewritten before anything can be matched or differentiated.

Most spellings need no rewriting here: the recognisers (`recognise/`) read a subgraph by what it computes.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from megacpp_compile.normalise.aliases import aliases
from megacpp_compile.normalise.functional_copies import functional_copies


def normalise(graph: fx.Graph, fake_mode: FakeTensorMode) -> None:
    """Drop tracing's metadata assertions and dead values, rename aliases, and rewrite functional copies."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
    aliases(graph)
    functional_copies(graph, fake_mode)
    graph.eliminate_dead_code()
