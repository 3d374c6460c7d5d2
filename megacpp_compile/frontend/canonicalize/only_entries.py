"""What is written over the only entry of a dimension is all that is left there.

Before: `h = bmm(w, x); h = select_scatter(h, select(h, -1, 0) + b, -1, 0); select(h, -1, 0)`, as in-place ops on views
        of one entry become: `bmm(w, x)[..., 0].add_(b)`
After:  `select(bmm(w, x), -1, 0) + b`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, replace, value
from megacpp_compile.fx.views import CASTS, is_elementwise
from megacpp_compile.reader.links import through


def only_entries(graph: fx.Graph, fake_mode: FakeTensorMode) -> None:
    """Give readers of such writes what was written, with a dimension of its own. What is an
    output stays: it must not become a view of an input."""
    for node in list(graph.find_nodes(op="call_function", target=aten.select_scatter.default)):
        whole, written, dim, _ = node.args
        alike = _is_only(value(whole), dim) and value(whole).dtype == value(written).dtype
        if not alike or not _is_computed(written) or _is_output(node):
            continue
        dims = value(whole).dim()
        build = Builder(graph, fake_mode, node, node)
        entry = build(aten.unsqueeze.default, written, dim % dims)
        for reader in list(node.users):
            again = reader.target is aten.select.int and reader.args[1] % dims == dim % dims  # type: ignore[operator]
            if again and not _is_output(reader):
                replace(reader, written)
        replace(node, entry)


def _is_only(fake: Any, dim: Any) -> bool:
    return isinstance(fake, torch.Tensor) and isinstance(fake.shape[dim], int) and fake.shape[dim] == 1


def _is_computed(node: Any) -> bool:
    """Whether an op on numbers makes `node`, perhaps in another dtype."""
    node = through(node, CASTS)
    return is_elementwise(node)


def _is_output(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)
