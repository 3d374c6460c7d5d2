"""Delayed scaling in a graph: what stands for the past until a frame is given one, and whose past it is.

A past belongs to the parameter that a linear's weight is made of by moving alone: views and casts, and of a DTensor its
local part (tensor parallelism) or all of it, gathered from the ranks' shards (FSDP where it is traced). FSDP2's hooks
gather a weight in front of a frame, into a parameter that stays the same from step to step.

Ranks need not agree on a scale, and nothing is reduced over them. A payload never leaves its rank: each GEMM multiplies
its result by both scales before anything is summed or gathered, forward and backward, so that shards of one tensor may
have scales of their own, as the blocks of a block-scaled one have, each as tight as its shard allows. What does have to
agree is what ranks hold alike, a replicated weight or an input gathered for a linear by column: replicas drift apart
where ranks round them differently. Their largest magnitudes are the same numbers on all ranks, and so are the scales,
wherever the pasts began alike: empty, or as `load_scaling_state` has them.
"""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile._torch.ops import aten
from megacpp_compile.frontend.capture import PARAMETER
from megacpp_compile.frontend.local_dtensors.rules import name_of
from megacpp_compile.fx.edit import Builder, value

# Calls that give a rank more or less of the one tensor whose parts the ranks hold.
_BETWEEN_RANKS = frozenset({"to_local", "full_tensor", "redistribute", "all_gather_into_tensor"})


def initial_amax(build: Builder, like: Node) -> Node:
    """The largest magnitudes of no tensor, 0."""
    return build(aten.new_zeros.default, like, [1], dtype=torch.float32)


def is_delayed(linear: Node) -> bool:
    """Whether an op `fp8_linear` takes a payload by delayed scaling."""
    return quantised(linear, 2).target is torch.ops.megacpp.fp8_quantize_delayed.default


def quantised(linear: Node, argument: int) -> Node:
    """The op that made the payload that `fp8_linear` takes as that argument: 2 is its input's, 4 its weights'."""
    payload = linear.args[argument]
    assert isinstance(payload, Node) and isinstance(payload.args[0], Node)
    return payload.args[0]


def parameter_of(weight: Node) -> Node | None:
    """The parameter among the frame's inputs that `weight` is made of alone, every element of it, as far as this rank
    holds it or the ranks have gathered it; None where there is none."""
    return None if no_parameter(weight) else _origin(weight)


def no_parameter(weight: Node) -> str:
    """Why no parameter's past is the weight's, "" where one is."""
    origin = _origin(weight)
    if origin.op != "placeholder":
        return "its weight is computed here"
    return "" if origin.meta.get(PARAMETER) else "its weight is no parameter, and may be another tensor in every call"


def _origin(weight: Node) -> Node:
    """The first node in front of `weight` that is an input, or made of more than the elements of one tensor."""
    node = weight
    while node.op in ("call_function", "call_method"):
        # In torch 2.11 a call of an `autograd.Function`, as one that waits for a collective, gives a tuple.
        of_tuple = node.target is operator.getitem and not isinstance(value(node.args[0]), Tensor)
        call = cast(Node, node.args[0]) if of_tuple else node
        tensors = [n for n in call.all_input_nodes if isinstance(value(n), Tensor)]
        if len(tensors) != 1 or not (_name(call) in _BETWEEN_RANKS or _as_many(node, tensors[0])):
            return node
        node = tensors[0]
    return node


def _name(node: Node) -> str:
    """What a call is called, whether it is DTensor's method or an op."""
    return getattr(node.target, "_opname", None) or name_of(node)


def _as_many(node: Node, operand: Node) -> bool:
    """Whether the result has as many elements as the operand."""
    made = value(node)
    return isinstance(made, Tensor) and statically_known_true(made.numel() == value(operand).numel())
