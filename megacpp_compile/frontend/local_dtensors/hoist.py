"""Moves the sums of gradients in front of what is linear, so that what an idiom is made of stands together."""

from __future__ import annotations

from torch import Tensor, fx
from torch.fx import Node

from megacpp_compile.frontend.local_dtensors.rules import differentiable, is_linear
from megacpp_compile.fx.edit import dynamo_value
from megacpp_compile.lowerings._sum_gradient import sum_gradient


def hoist(graph: fx.Graph) -> None:
    """Move each sum in Dynamo's graph in front of what is linear, such as RoPE, where one sum stays one, in place."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for summed_up in graph.find_nodes(op="call_function", target=sum_gradient):
        reached: set[Node] = {summed_up}  # all that is made of them is summed
        waiting = {summed_up.args[0]}
        while waiting:
            node = max(waiting, key=order.__getitem__)
            waiting.remove(node)
            if all(user in reached and (user is summed_up or is_linear(user)) for user in node.users):
                reached.add(node)
                waiting |= set(differentiable(node)) if is_linear(node) else set()
        reached.remove(summed_up)
        first = [n for n in reached if not is_linear(n) or not reached.issuperset(differentiable(n))]
        if len(first) != 1 or first[0] is summed_up.args[0] or not isinstance(dynamo_value(first[0]), Tensor):
            continue
        (source,), result = first, summed_up.args[0]
        summed_up.replace_all_uses_with(result)
        source.append(summed_up)
        source.replace_all_uses_with(summed_up, delete_user_cb=lambda user, own=summed_up: user is not own)
        summed_up.args = (source, *summed_up.args[1:])
        summed_up.meta["example_value"] = dynamo_value(source)
