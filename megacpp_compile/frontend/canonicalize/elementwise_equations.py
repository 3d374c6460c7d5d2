"""Equations that sum nothing are products, element by element, of tensors that are broadcast: what `einsum` makes of
them itself.

Before: `einsum("te,t->te", [gates, scale])`          After: `gates * scale.unsqueeze(1)`
"""

from __future__ import annotations

from torch import fx
from torch.fx import Node

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, replace
from megacpp_compile.fx.mode_states import mode_states


def elementwise_equations(graph: fx.Graph, fake_mode: FakeTensorMode) -> None:
    """Rewrite in place. Those whose operands would have to be turned, or that say in which
    order several are multiplied, stay."""
    products = graph.find_nodes(op="call_function", target=aten.einsum.default)
    found = [(node, equation) for node in products if (equation := _of(node)) is not None]
    states = mode_states(graph) if found else {}
    for node, equation in found:
        terms, out = equation
        build = Builder(graph, fake_mode, node, node, states)
        operands: list[Node] = list(node.args[1])  # type: ignore[arg-type]
        product = _spread(build, operands[0], terms[0], out)
        for operand, term in zip(operands[1:], terms[1:], strict=True):
            product = build(aten.mul.Tensor, product, _spread(build, operand, term, out))
        replace(node, product)


def _of(node: Node) -> tuple[list[str], str] | None:
    """(the terms of the operands, that of the result) of an equation that sums nothing."""
    equation, operands = node.args[:2]
    if len(node.args) > 2 or node.kwargs or not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    given, out = equation.replace(" ", "").split("->")
    terms = given.split(",")
    # One operand has the result's shape, so that no other is broadcast to more than that.
    plain = len(operands) > 1 and out in terms and len(set(out)) == len(out)  # type: ignore[arg-type]
    return (terms, out) if plain and all(_within(term, out) for term in terms) else None


def _within(term: str, out: str) -> bool:
    """Whether the letters of `term` come in `out`, in the same order."""
    rest = iter(out)
    return all(letter in rest for letter in term)


def _spread(build: Builder, operand: Node, term: str, out: str) -> Node:
    for at, letter in enumerate(out):
        if letter not in term and (at or term):  # a number is broadcast anyway
            operand = build(aten.unsqueeze.default, operand, at)
    return operand
