"""Gives a frame under delayed scaling its past: tensors behind its inputs, which it reads and writes.

Before: `x8, _, sx, seen = megacpp.fp8_quantize_delayed(x, 0, ...)`, and of w; `fp8_linear(x, [w], x8, sx, ...)`
After:  `history', largest = megacpp.push_maxima(history, latest, grads)` in front of all else;
        `fp8_quantize_delayed(x, largest[i], ...)`; `fp8_linear(x, [w], x8, sx, ..., largest[j], grads[j])`;
        behind all else `history` becomes history', and `latest` what each `seen` is. Backward writes `grads`.

So a step's forward takes over what the step before has seen, and nothing is written that the same step reads later:
backward, and whatever recomputes a cast in it, has the scales of its forward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.backends.more_inputs import add_inputs, called_with
from megacpp_compile.frontend.capture import Captured
from megacpp_compile.fx.edit import Builder, drop_dead, value
from megacpp_compile.passes._rewrites.delayed_scaling import is_delayed, parameter_of, quantised
from megacpp_compile.precision.maxima import HISTORY, Column, Kind, maxima_of


@dataclasses.dataclass(frozen=True)
class Past:
    """What a frame under delayed scaling is called with beside its inputs. fakes: these tensors, without data."""

    columns: tuple[Column, ...]
    fakes: list[Tensor]

    def adapt(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`, called with the frame's own inputs."""
        return called_with(compiled, functools.partial(_arguments, self.columns)) if self.columns else compiled


def _arguments(columns: tuple[Column, ...], inputs: Sequence[Any]) -> list[Tensor]:
    return maxima_of(columns, inputs).arguments()


def thread_amax_history(gm: GraphModule, captured: Captured | None) -> Past:
    """Change `gm`, the rewritten graph of `captured`, in place to one that has its past behind its inputs; a past of
    nothing where nothing in it has delayed scaling. captured: None where no pass saw the frame."""
    if captured is None:
        return Past((), [])
    graph, mode, ops = gm.graph, captured.fake_mode, torch.ops.megacpp
    linears = [n for n in graph.nodes if n.target is ops.fp8_linear.default and is_delayed(n)]
    if not linears:
        return Past((), [])
    inputs = graph.find_nodes(op="placeholder")
    forward, backward = _columns(linears, inputs)
    order = [*forward.values(), *backward.values()]
    device = value(linears[0])[0].device
    with mode, torch.no_grad():
        fakes = [torch.zeros(s, device=device) for s in ((HISTORY, len(order)), (len(forward),), *[()] * len(backward))]
    history, latest, *grads = add_inputs(gm, "maxima", fakes, static=True)

    first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    build = Builder(graph, mode, first, history)  # in no checkpoint's region: recomputed, it would push once more
    pushed = build(ops.push_maxima.default, history, latest, grads)
    newest, largest = build.item(pushed, 0), build.item(pushed, 1)
    each = [build(aten.select.int, largest, 0, i) for i in range(len(order))]
    for node, own in zip(forward, each, strict=False):
        node.args = (node.args[0], own, *node.args[2:])
    for node, own, seen in zip(backward, each[len(forward) :], grads, strict=True):
        node.args = (*node.args[:9], own, seen, *node.args[11:])

    output = graph.output_node()
    build = Builder(graph, mode, output, history)
    seen_now = build(aten.stack.default, [build.item(node, 3) for node in forward])
    for old, new in ((latest, seen_now), (history, newest)):
        build(aten.copy_.default, old, new)
    drop_dead(graph)
    graph.lint()
    gm.recompile()
    return Past(tuple(order), fakes)


def _columns(linears: Sequence[Node], inputs: Sequence[Node]) -> tuple[dict[Node, Column], dict[Node, Column]]:
    """Columns of what is cast in forward, by its op, and of gradients, by their linear's op. A tensor that several
    linears read is the first one's."""
    forward: dict[Node, Column] = {}
    backward: dict[Node, Column] = {}
    turns: dict[tuple[Node, Kind], int] = {}

    def column(weight: Node, kind: Kind) -> Column:
        turn = turns[weight, kind] = turns.get((weight, kind), -1) + 1
        return Column(inputs.index(weight), kind, turn)

    for linear in linears:
        weight = parameter_of(linear.args[1][0])  # type: ignore[index, arg-type]
        assert weight is not None, "the pass has seen that it is an input"
        for kind, argument in (("x", 2), ("w", 4)):
            if linear.args[argument].op == "placeholder":  # type: ignore[union-attr]
                continue  # cast in front of the frame, by the values it has now
            if (cast := quantised(linear, argument)) not in forward:
                forward[cast] = column(weight, kind)  # type: ignore[arg-type]
        backward[linear] = column(weight, "g")
    return forward, backward
