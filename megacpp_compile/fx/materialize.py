"""What is to be in memory before it is read, in graphs that Inductor is about to lower.

A kernel that Inductor has not written reads memory. Where its operand is a view of what Inductor has only the formula
of, Inductor writes a copy for this operand alone: tables of cosines, read as `cos[:, None]`, twice for each layer, and
the embeddings that three linears read three times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile._torch.pytree import tree_leaves
from megacpp_compile.fx.aliasing import memory_of
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.groups import by_key
from megacpp_compile.fx.size_nodes import size_node
from megacpp_compile.fx.views import is_elementwise

_LOOKUPS = {aten.embedding.default, aten.index.Tensor, aten.gather.default, aten.index_select.default}
# What Inductor keeps as a formula, beside elementwise ops, until something reads it from memory.
_FORMULAS = _LOOKUPS | {
    torch.ops.prims.convert_element_type.default, aten.clone.default, aten.cat.default, aten.constant_pad_nd.default
}  # fmt: skip


def put_into_memory(graph: fx.Graph, node: Node) -> None:
    """Have all readers of `node` read it from memory: `as_strided` puts it there and changes nothing else."""
    made = value(node)
    if any(user.target is aten.as_strided.default for user in node.users):
        return
    build = Builder(graph, made.fake_mode, node.next, node)
    try:
        shape, strides = ([size_node(build, n) for n in sizes] for sizes in (made.shape, made.stride()))
    except LookupError:  # of symbols that nothing in front has
        return
    there = build(aten.as_strided.default, node, shape, strides)
    there.meta.update(node.meta)
    own = set(build.emitted)
    node.replace_all_uses_with(there, delete_user_cb=lambda user: user not in own)


def operands_of(graph: fx.Graph, is_kernel: Callable[[Node], bool]) -> None:
    """Put what several operands of kernels read through views into memory, once."""
    read = (operand for kernel in filter(is_kernel, graph.nodes) for operand in _only_read(kernel))
    for made, operands in by_key((memory_of(operand), operand) for operand in read).items():
        if not is_elementwise(made) and made.target not in _FORMULAS:
            continue
        if len(operands) > 1 and any(operand is not made for operand in operands):
            put_into_memory(graph, made)


def _only_read(kernel: Node) -> Iterator[Node]:
    """The operands that `kernel` does not write to."""
    schema, written = getattr(kernel.target, "_schema", None), kernel.kwargs.get("tensors_to_clone", ())
    if schema is not None and schema.is_mutable:
        return
    named = kernel.kwargs if schema is not None else kernel.kwargs["kwargs"]
    for operand in tree_leaves((kernel.args, {k: v for k, v in named.items() if k not in written})):
        if isinstance(operand, Node) and isinstance(value(operand), torch.Tensor):
            yield operand
