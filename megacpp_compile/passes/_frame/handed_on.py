"""Hands states on between the ranks that have parts of a sequence, around ops that run over the tokens of one.

Every op here makes of a state that enters it `decay * state + added`: linear in the state. So a part is run from zeros
for what it adds, all ranks gather that and the decays (`megacpp::entering_states`), and it is run from what enters:

    added = op(..., None)[1]    entering = entering_states(added, decay)    y = op(..., entering)[0]

| op | decay | cost beside one run over the part |
|---|---|---|
| `ssd_scan`, `selective_scan` | exp(A sum dt) | a second run |
| `gated_linear_attention` | exp(sum g) | a second run |
| `gated_delta_rule` | a matrix [k, k] of a head: the final state of a run without values from the identity | two runs |
| `causal_conv1d` | none: the last steps of the part before, in front of the part | a copy of its operand |

Where a rank has two pieces of a sequence, they are two rows of the batch. What cannot be handed on is `problem`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx import short_loops
from megacpp_compile.fx.edit import Builder, arguments, replace, value
from megacpp_compile.lowerings._entering_states import entering_states
from megacpp_compile.lowerings._traits import name_of
from megacpp_compile.sharding.sequences import Parts

Operands = Mapping[str, Any]
# (builder, operands by piece, what a piece adds to a state) -> (what is left of a state, whether that is a matrix).
Decay = Callable[[Builder, Operands, Node], tuple[Node, bool]]


def problem(node: Node, new: list[Node], parts: Parts) -> str:
    """Why no state can be handed on to the op of `node`, in words; "" where one can be. new: what else reads the op."""
    if parts.unknown:
        return parts.unknown
    name, given = name_of(node), arguments(node.target, node.args, node.kwargs)
    if name not in _TOKENS:
        return "no state is handed on to it"
    tokens, device = value(given[_TOKENS[name][0]]).shape[1], value(node.args[0]).device.type
    if device not in ("cpu", "cuda"):
        return f"states are handed on between CPUs and CUDA devices, not on {device}"
    if any(given.get(documents) is not None for documents in ("seq_idx", "cu_seqlens")):
        return "packed documents may go on in the next part"
    if given.get("initial_state") is not None:
        return "it is given a state, and which part that belongs to is not known"
    if name != "megacpp::causal_conv1d" and any(n in new or n.users for n in _items(node, 1)):
        return "its final state is read, which the last part has"
    if parts.pieces > 1 and short_loops.marks(node.graph):
        return "a rank has two pieces, and a few steps of a loop are traced: set the option rolled_loops to False"
    if tokens % parts.pieces:
        return f"{tokens} tokens are no {parts.pieces} pieces of equal length"
    if name == "megacpp::causal_conv1d" and tokens // parts.pieces < value(given["weight"]).shape[1] - 1:
        return "a piece has fewer steps than the convolution reads"
    return ""


def hand_on(node: Node, parts: Parts, fake_mode: Any) -> tuple[Node, list[Node]]:
    """Have the op of `node` take what the parts before leave, in its graph: the op's new node, and all new nodes."""
    build = Builder(node.graph, fake_mode, node, node)
    name, given = name_of(node), arguments(node.target, node.args, node.kwargs)
    for token_operand in _TOKENS[name]:
        given[token_operand] = _apart(build, given[token_operand], parts)
    if name == "megacpp::causal_conv1d":
        op_node = result = _after_taps(build, node, given, parts)
        if result.target is not node.target:
            op_node = result.args[0]  # type: ignore[assignment]
        node.replace_all_uses_with(_together(build, result, parts))
    else:
        op_node = _from_state(build, node, given, parts)
        result = _together(build, build.item(op_node, 0), parts)
        for item in _items(node, 0):
            replace(item, result)
        for item in list(node.users):
            node.graph.erase_node(item)
    node.graph.erase_node(node)
    return op_node, build.emitted


def _items(node: Node, index: int) -> list[Node]:
    return [user for user in node.users if user.args[1:] == (index,)]


def _from_state(build: Builder, node: Node, given: Operands, parts: Parts) -> Node:
    alone = {**given, "D": None} if "D" in given else given
    added = build.item(_call(build, node, alone), 1)
    decay, matrix = _DECAYS[name_of(node)](build, given, added)
    return _call(build, node, {**given, "initial_state": _entering(build, added, decay, matrix, parts)})


def _after_taps(build: Builder, node: Node, given: Operands, parts: Parts) -> Node:
    """A convolution over the last steps of the part before and the part."""
    before = value(given["weight"]).shape[1] - 1
    if not before:
        return _call(build, node, given)
    last = build(aten.slice.Tensor, given["x"], 1, -before)
    taps = _entering(build, last, None, False, parts)
    whole = _call(build, node, {**given, "x": build(aten.cat.default, [taps, given["x"]], 1)})
    return build(aten.slice.Tensor, whole, 1, before)


def _entering(build: Builder, added: Node, decay: Node | None, matrix: bool, parts: Parts) -> Node:
    arguments = (added, decay, matrix, [*parts.places], [*parts.mine], parts.group)
    return build.item(build(entering_states, *arguments), 0)


def _call(build: Builder, node: Node, given: Operands) -> Node:
    return build(node.target, *given.values())


def _apart(build: Builder, x: Any, parts: Parts) -> Any:
    """[b, t, ...] -> [b * pieces, t / pieces, ...]."""
    if parts.pieces == 1 or x is None:
        return x
    return build(aten.flatten.using_ints, build(aten.unflatten.int, x, 1, [parts.pieces, -1]), 0, 1)


def _together(build: Builder, x: Node, parts: Parts) -> Node:
    if parts.pieces == 1:
        return x
    return build(aten.flatten.using_ints, build(aten.unflatten.int, x, 0, [-1, parts.pieces]), 1, 2)


def _of_steps(build: Builder, given: Operands, added: Node) -> tuple[Node, bool]:
    """Of ssd_scan: exp(A sum dt), [b, h, 1, 1]; of selective_scan [b, d, n]."""
    steps = build(aten.sum.dim_IntList, build.cast(given["dt"], value(added).dtype), [1])
    rates = build.cast(given["A"], value(added).dtype)
    if value(rates).dim() == 2:
        return build(aten.exp.default, build(aten.mul.Tensor, build.unsqueezed(steps, [2]), rates)), False
    return build.unsqueezed(build(aten.exp.default, build(aten.mul.Tensor, steps, rates)), [2, 3]), False


def _of_gates(build: Builder, given: Operands, added: Node) -> tuple[Node, bool]:
    """exp(sum g), [b, h, 1 or k, 1]."""
    if given["g"] is None:
        return build(aten.ones_like.default, build(aten.slice.Tensor, added, 3, 0, 1)), False
    total = build(aten.sum.dim_IntList, build.cast(given["g"], value(added).dtype), [1])
    return build.unsqueezed(build(aten.exp.default, total), [3] if value(total).dim() == 3 else [2, 3]), False


def _of_delta_rule(build: Builder, given: Operands, added: Node) -> tuple[Node, bool]:
    """The product of the tokens' matrices, [b, h, k, k]: a run over values of zeros, as many as keys have channels."""
    q, v, state = (value(given["q"]), value(given["v"]), value(added))
    nothing = build.cast(build(aten.zeros_like.default, given["q"]), v.dtype)
    if v.shape[2] != q.shape[2]:
        nothing = build(aten.repeat_interleave.self_int, nothing, v.shape[2] // q.shape[2], 2)
    one = build(aten.eye.default, q.shape[3], dtype=state.dtype, device=state.device)
    column = build(aten.zeros_like.default, build(aten.slice.Tensor, added, 3, 0, 1))
    run = {**given, "v": nothing, "initial_state": build(aten.add.Tensor, column, one)}
    return build.item(build(torch.ops.megacpp.gated_delta_rule.default, *run.values()), 1), True


# Op -> its operands [b, t, ...].
_TOKENS = {
    "megacpp::ssd_scan": ("x", "dt", "B", "C"),
    "megacpp::selective_scan": ("u", "dt", "B", "C"),
    "megacpp::gated_linear_attention": ("q", "k", "v", "g"),
    "megacpp::gated_delta_rule": ("q", "k", "v", "g", "beta"),
    "megacpp::causal_conv1d": ("x",),
}
_DECAYS: dict[str, Decay] = {
    "megacpp::ssd_scan": _of_steps,
    "megacpp::selective_scan": _of_steps,
    "megacpp::gated_linear_attention": _of_gates,
    "megacpp::gated_delta_rule": _of_delta_rule,
}
