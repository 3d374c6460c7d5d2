"""Rewrites a captured graph to one spelling per idea, where it must be before anything is matched or differentiated.

Most spellings stay as they are: the matchers read a subgraph by what it computes.
"""

from __future__ import annotations

import torch
from torch import fx

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile.frontend.canonicalize.aliases import aliases
from megacpp_compile.frontend.canonicalize.appended_zeros import appended_zeros
from megacpp_compile.frontend.canonicalize.detached_rows import detached_rows
from megacpp_compile.frontend.canonicalize.divided_sizes import divided_sizes
from megacpp_compile.frontend.canonicalize.elementwise_equations import elementwise_equations
from megacpp_compile.frontend.canonicalize.empty_parts import empty_parts
from megacpp_compile.frontend.canonicalize.equations import equations
from megacpp_compile.frontend.canonicalize.expert_numbers import expert_numbers
from megacpp_compile.frontend.canonicalize.functional_copies import functional_copies
from megacpp_compile.frontend.canonicalize.idle_dropouts import idle_dropouts
from megacpp_compile.frontend.canonicalize.only_entries import only_entries
from megacpp_compile.frontend.canonicalize.put_back import put_back
from megacpp_compile.frontend.canonicalize.whole_slices import whole_slices
from megacpp_compile.fx.edit import drop_dead
from megacpp_compile.fx.size_checks import drop_counts_of_masks


def canonicalize(graph: fx.Graph, fake_mode: FakeTensorMode) -> None:
    """Drop tracing's assertions, those on how many rows a mask chooses, slices of whole dimensions, dropouts that drop
    nothing, concatenations with nothing and dead values; pad where zeros are concatenated behind; write experts'
    numbers, and sizes that are one, as numbers; let views copy where they must; rename aliases; write equations in
    full, and those that sum nothing as products; make copies into slices functional; fold
    `select_scatter` into dimensions of size 1; detach tensors before their rows are picked; give buffers that are
    scattered by a permutation their static size."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        # A fused op may lay its result out otherwise than the plain ops did; a view of it must not fail.
        node.target = torch.ops.aten.reshape.default
    divided_sizes(graph, fake_mode)
    expert_numbers(graph, fake_mode)
    aliases(graph)
    equations(graph)
    elementwise_equations(graph, fake_mode)
    whole_slices(graph)
    idle_dropouts(graph)
    empty_parts(graph)
    appended_zeros(graph, fake_mode)
    functional_copies(graph, fake_mode)
    only_entries(graph, fake_mode)
    put_back(graph, fake_mode)
    drop_dead(graph)
    drop_counts_of_masks(graph)
    detached_rows(graph)  # last: what is dead reads nothing
