"""Takes casts of weights out of a frame: it is called with their results behind its inputs (`cache_weight_casts`).

Before: `w8, w_transposed, sw = megacpp.fp8_quantize_weights([detach(w)], True)`, of parameters by views and casts alone
After:  inputs `w8`, `w_transposed` and `sw`; what made them runs in front of each call, and in a context
        `cached_weight_casts` once for all calls with these weights

Results are equal: the same op casts the same weight. Backward has what its forward was called with, whatever becomes of
the weight between the two, as it has of every tensor that it keeps.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule, Node

from megacpp_compile.backends.more_inputs import add_inputs, called_with
from megacpp_compile.fx.edit import drop_dead, value
from megacpp_compile.lowerings._op import serve
from megacpp_compile.lowerings.fp8_weights import reference
from megacpp_compile.passes._rewrites.weight_casts import chain
from megacpp_compile.precision.weight_casts import cast

_CASTS = {
    getattr(torch.ops.megacpp, name).default: name for name in ("fp8_quantize_weights", "fp8_quantize_experts")
}


@dataclasses.dataclass(frozen=True)
class _Cast:
    """A cast in front of a frame. weights: places of what it casts among the frame's inputs. make: of these, the
    results. key: equal for casts that make the same of a weight. read: those of the results that the frame reads."""

    weights: tuple[int, ...]
    make: Callable[..., Sequence[Tensor]]
    key: Hashable
    read: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Casts:
    """What a frame is called with behind its inputs. fakes: these tensors, without data."""

    casts: tuple[_Cast, ...]
    fakes: list[Tensor]

    def adapt(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`, called with the frame's own inputs."""
        return called_with(compiled, self._made) if self.casts else compiled

    def _made(self, inputs: Sequence[Any]) -> list[Tensor]:
        made = [(cast(one.key, [inputs[i] for i in one.weights], one.make), one.read) for one in self.casts]
        return [results[i] for results, read in made for i in read]


def take_casts(gm: GraphModule) -> Casts:
    """Change `gm`, a rewritten graph, in place to one that is called with the results of its casts of weights; none
    where it has no op that makes them."""
    inputs = gm.graph.find_nodes(op="placeholder")
    nodes = [n for target in _CASTS for n in gm.graph.find_nodes(op="call_function", target=target)]
    casts, outputs = [], list[Node]()
    for node in nodes:
        weights = list(dict.fromkeys(chain(w)[0] for w in node.args[0]))  # type: ignore[union-attr]
        assert all(w.op == "placeholder" for w in weights), "the pass has seen that they are inputs"
        make, key = _in_front(node, weights)
        results = {u.args[1]: u for u in node.users if u.target is operator.getitem and u.users}
        read = tuple(sorted(results))  # type: ignore[type-var]
        casts.append(_Cast(tuple(inputs.index(w) for w in weights), make, key, read))  # type: ignore[arg-type]
        outputs += [results[i] for i in read]
    fakes = [value(o) for o in outputs]
    if casts:
        for old, new in zip(outputs, add_inputs(gm, "cast", fakes), strict=True):
            old.replace_all_uses_with(new)
        drop_dead(gm.graph)
        gm.graph.lint()
        gm.recompile()
    return Casts(tuple(casts), fakes)


def _in_front(node: Node, weights: Sequence[Node]) -> tuple[Callable[..., Sequence[Tensor]], Hashable]:
    """(what `node` does, of `weights`; a key of it)"""
    graph = fx.Graph()
    env = {w: graph.placeholder(f"w{i}") for i, w in enumerate(weights)}
    for operand in node.args[0]:  # type: ignore[union-attr]
        for step in chain(operand)[1]:  # type: ignore[arg-type]
            if step not in env:
                env[step] = graph.node_copy(step, env.__getitem__)
    args = fx.map_arg(node.args, env.__getitem__)
    graph.output(graph.call_function(_now, (_CASTS[node.target], *args)))
    gm = GraphModule(torch.nn.Module(), graph)
    return gm, (gm.code,)


def _now(name: str, *args: Any) -> Any:
    """The results of the op `megacpp::{name}`, outside of any graph."""
    return serve(name, reference, *args)
