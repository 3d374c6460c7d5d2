"""`megacpp::sum_gradient`: a tensor that all ranks of a group hold alike, each of which computes something else of it.

    sum_gradient(x, group) -> x; its gradient is summed over the ranks of `group`

x has any shape and dtype; group is the name of a process group. It is Megatron's f: identity forward, all-reduce
backward (https://arxiv.org/abs/1909.08053, section 3). In a compiled graph nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from megacpp_compile._torch.ops import collectives
from megacpp_compile.lowerings._traits import OpTraits, declare


@torch.library.custom_op("megacpp::sum_gradient", mutates_args=())
def _sum_gradient(x: Tensor, group: str) -> Tensor:
    return x.clone()


@_sum_gradient.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group = inputs


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return summed(grad, ctx.group), None


def summed(x: Tensor, group: str) -> Tensor:
    """The sum of x over the ranks of `group`."""
    # A gradient may be a part of another's memory, as behind a concatenation. Inductor's passes let the collective
    # write to its operand, which takes for granted that it lies in one piece.
    result: Tensor = collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))
    return result


_sum_gradient.register_autograd(_gradient, setup_context=_keep)
declare({"megacpp::sum_gradient": OpTraits(kernel="pointwise")})
sum_gradient = torch.ops.megacpp.sum_gradient.default


def erase(graph: fx.Graph) -> None:
    """Read each operand in the place of its copy, in a graph that autograd has differentiated."""
    for node in graph.find_nodes(op="call_function", target=sum_gradient):
        if not any(user.op == "output" for user in node.users) or node.args[0].op != "placeholder":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
