import math

import torch

from megacpp_compile import Match, MatchFailure, register

clamp = torch.ops.aten.clamp.default


@register
def merge_clamps(view):
    """Two clamps by numbers, as in `x.clamp(0, 6).clamp(max=4)`, become one."""
    for node in view.graph.find_nodes(op="call_function", target=clamp):
        inner = node.args[0]
        if inner.target is not clamp:
            continue
        (low, high), (first_low, first_high) = bounds(node), bounds(inner)
        if not all(isinstance(b, int | float) and b == b for b in (low, high, first_low, first_high)):
            yield MatchFailure(node, "bounds", "a bound is known at run time only, or no number")
            continue
        low, high = (min(max(bound, low), high) for bound in (first_low, first_high))
        if low >= high:
            yield MatchFailure(node, "bounds", f"the result is {low} for any input")
            continue
        yield Match(node, [inner.args[0]], [node], emit(inner.args[0], low, high))


def bounds(node):
    low, high = (*node.args[1:], None, None)[:2]
    return -math.inf if low is None else low, math.inf if high is None else high


def emit(x, low, high):
    numbers = [bound if math.isfinite(bound) else None for bound in (low, high)]
    return lambda build: build(clamp, x, *numbers)
