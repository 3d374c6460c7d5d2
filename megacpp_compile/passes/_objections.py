"""What a rule may emit: results of the shape, dtype, layout, memory and gradients of those that it replaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.errors import RegistrationError
from megacpp_compile.fx.edit import Builder, has_effects, same_size, same_sizes, value
from megacpp_compile.fx.subgraph import between, inside
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.passes._rule import Match, Recognised, in_other_modes
from megacpp_compile.report.saved_bytes import differentiable


def check_found(name: str, found: Sequence[Any]) -> None:
    """Raises RegistrationError for what is no match and no near miss, or has no nodes of the graph where it should."""
    for one in found:
        if not isinstance(one, (Match, MatchFailure, Recognised)):
            problem = f"yields a {type(one).__name__}, not a Match or a MatchFailure"
        elif not isinstance(one.node, Node):
            problem = f"yields a {type(one).__name__} at a {type(one.node).__name__}, not at a node"
        elif isinstance(one, Match) and not (one.inputs and all(isinstance(n, Node) for n in one.inputs)):
            problem = "yields a match whose inputs are not nodes, or none"
        elif isinstance(one, Match) and not (one.outputs and all(_computed(n) for n in one.outputs)):
            problem = "yields a match whose outputs are not calls of the graph, or none"
        else:
            continue
        raise RegistrationError(f"rule {name!r}", problem)


def _computed(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function"


def objection(view: GraphView, match: Match, op_node: Node, new: Sequence[Node], build: Builder) -> MatchFailure | None:
    """Why what a rule emitted cannot stand in for the match's outputs, None where it can: it reads other values than
    the match's inputs, or has another shape, dtype, layout, memory or other gradients."""

    def no(tag: str, reason: str) -> MatchFailure:
        return MatchFailure(match.node, tag, reason)

    if len(new) != len(match.outputs):
        return no("rule-result", f"the rule returned {len(new)} results for {len(match.outputs)} outputs")
    emitted, given = set(build.emitted), set(match.inputs)
    if not emitted.issuperset([op_node, *new]):
        return no("rule-result", "the rule returned a node that it has not emitted")
    others = {n for e in emitted for n in e.all_input_nodes} - emitted - given
    if odd := min(others, default=None):
        return no("rule-result", f"the rule reads {odd.name}, which is none of the match's inputs")
    plain = inside(match.inputs, match.outputs)
    if odd := min(filter(_writes, emitted), default=None):
        return no("rule-result", f"{odd.target} writes to a tensor: emit an op that returns its result")
    if not match.draws and (odd := min(filter(_draws, emitted | plain), default=None)):
        return no("rule-result", f"{odd.target} draws random numbers, and the match has none in 'draws'")
    for old, node in zip(match.outputs, new, strict=True):
        if (problem := _differs(value(old), value(node), [value(n) for n in given])) is not None:
            return no("rule-result", f"{node.name} {problem}")
    if (refusal := in_other_modes(view, sorted(plain), match.node)) is not None:
        return refusal
    if (problem := _gradients_differ(view, match, new)) is not None:
        return no("rule-result", problem)
    return None


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _draws(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and has_effects(node)


def _differs(old: Any, new: Any, given: Sequence[Any]) -> str | None:
    """What is another about a fake result than about the plain one."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return None if type(old) is type(new) else f"is a {type(new).__name__}, and the code has a {type(old).__name__}"
    if not same_sizes(old.shape, new.shape):
        return f"has the shape {tuple(new.shape)}, and the code has {tuple(old.shape)}"
    if (old.dtype, old.device) != (new.dtype, new.device):
        return f"is of {new.dtype} on {new.device}, and the code has {old.dtype} on {old.device}"
    if old.layout is torch.strided and not all(
        same_size(n, 1) or same_size(a, b) for n, a, b in zip(old.shape, old.stride(), new.stride(), strict=True)
    ):
        return f"has the strides {new.stride()}, and the code has {old.stride()}"
    if _shares(old, given) != _shares(new, given):
        return "shares memory with other inputs than the code does"
    return None


def _shares(result: torch.Tensor, given: Sequence[Any]) -> list[bool]:
    """Which of the inputs have the memory of a result."""
    strided = [isinstance(t, torch.Tensor) and t.layout is torch.strided for t in (result, *given)]
    memory = [t.untyped_storage()._cdata if yes else None for t, yes in zip((result, *given), strided, strict=True)]
    return [memory[0] is not None and other == memory[0] for other in memory[1:]]


def _gradients_differ(view: GraphView, match: Match, new: Sequence[Node]) -> str | None:
    """What gets no gradient, or one that the code does not give, with the rule's results in place of the match's."""
    trained = {n for n in match.inputs if view.has_backward(n)}
    if not trained or not any(map(view.has_backward, match.outputs)):
        return None
    gm = view.graph.owning_module
    try:
        by_code = differentiable(between(gm, match.inputs, match.outputs), view.fake_mode, trained)
        by_rule = differentiable(between(gm, match.inputs, new), view.fake_mode, trained)
    except Exception as error:
        return f"its gradient fails: {type(error).__name__}: {error}".splitlines()[0][:200]
    if by_code is None or by_rule is None:
        return None
    (plain_results, plain), (results, made) = by_code, by_rule
    if plain_results != results:
        return "its result is differentiable where the code's is not, or the other way around"
    if odd := min(plain ^ made, default=None):
        return f"{odd.name} gets {'no' if odd in plain else 'a'} gradient, unlike by the code"
    return None
