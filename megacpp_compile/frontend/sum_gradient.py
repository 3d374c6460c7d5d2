"""`megacpp::sum_gradient`: a tensor that all ranks of a group hold alike, each of which computes something else of it.

    sum_gradient(x, group) -> x; its gradient is summed over the ranks of `group`

x has any shape and dtype; group is the name of a process group. It is Megatron's f: identity forward, all-reduce
backward (https://arxiv.org/abs/1909.08053, section 3). In a compiled graph nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from megacpp_compile.frontend.dtensors import leaves, writes
from megacpp_compile.fx.edit import dynamo_value
from megacpp_compile.lowerings._traits import OpTraits, declare

# Calls of Dynamo's graph that are linear in their tensors.
VIEWS = frozenset(
    "view reshape expand unflatten transpose permute movedim swapaxes t flatten squeeze unsqueeze getitem chunk split "
    "tensor_split unbind narrow select contiguous clone alias".split()
)
CASTS = frozenset("to float bfloat16 half double type type_as".split())
LINEAR = VIEWS | CASTS | {"neg", "add", "sub", "cat", "stack", "view_as_complex", "view_as_real"}


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
    collectives = torch.ops._c10d_functional
    result: Tensor = collectives.wait_tensor(collectives.all_reduce(x, "sum", group))
    return result


_sum_gradient.register_autograd(_gradient, setup_context=_keep)
declare({"megacpp::sum_gradient": OpTraits(kernel="pointwise")})
sum_gradient = torch.ops.megacpp.sum_gradient.default


def hoist(graph: fx.Graph) -> None:
    """Move each sum in Dynamo's graph in front of what is linear, such as RoPE, where one sum stays one: what an idiom
    is made of then stands together."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for summed_up in graph.find_nodes(op="call_function", target=sum_gradient):
        reached: set[Node] = {summed_up}  # all that is made of them is summed
        waiting = {summed_up.args[0]}
        while waiting:
            node = max(waiting, key=order.__getitem__)
            waiting.remove(node)
            if all(user in reached and (user is summed_up or _is_linear(user)) for user in node.users):
                reached.add(node)
                waiting |= set(_differentiable(node)) if _is_linear(node) else set()
        reached.remove(summed_up)
        first = [n for n in reached if not _is_linear(n) or not reached.issuperset(_differentiable(n))]
        if len(first) != 1 or first[0] is summed_up.args[0] or not isinstance(dynamo_value(first[0]), Tensor):
            continue
        (source,), result = first, summed_up.args[0]
        summed_up.replace_all_uses_with(result)
        source.append(summed_up)
        source.replace_all_uses_with(summed_up, delete_user_cb=lambda user, own=summed_up: user is not own)
        summed_up.args = (source, *summed_up.args[1:])
        summed_up.meta["example_value"] = dynamo_value(source)


def _is_linear(node: Node) -> bool:
    """Whether a call is linear in all its operands that have a gradient."""
    name = (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")).strip("_")
    if node.op not in ("call_function", "call_method") or writes(node):
        return False
    if name in ("mul", "div", "truediv"):
        return len(found := _differentiable(node)) == 1 and (name == "mul" or node.args[0] is found[0])
    return name in LINEAR


def _differentiable(node: Node) -> list[Node]:
    return [a for a in node.all_input_nodes if any(getattr(v, "requires_grad", False) for v in leaves(dynamo_value(a)))]


def erase(graph: fx.Graph) -> None:
    """Read each operand in the place of its copy, in a graph that autograd has differentiated."""
    for node in graph.find_nodes(op="call_function", target=sum_gradient):
        if not any(user.op == "output" for user in node.users) or node.args[0].op != "placeholder":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
