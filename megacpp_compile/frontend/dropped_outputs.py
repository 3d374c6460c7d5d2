"""Outputs of a training frame that the user says nobody reads (`drop_outputs`), such as logits beside a loss.

transformers' models return logits beside the loss, and what is returned stays in memory. Named in the option, an output
that a loss in the same frame is computed from leaves the frame's graph, and a `DroppedOutput` stands in its place.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from megacpp_compile._torch.pytree import tree_leaves
from megacpp_compile.config.options import Config
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.errors import BadOptionError, DroppedOutputError, closest
from megacpp_compile.errors._base import listed
from megacpp_compile.fx.copies import copied, in_place_of
from megacpp_compile.fx.differentiated import trains
from megacpp_compile.fx.edit import dynamo_value, same_size
from megacpp_compile.fx.walks import ancestors
from megacpp_compile.reader.links import chain


class DroppedOutput:
    """Stands for an output that was dropped: any use of it raises DroppedOutputError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}, dropped by the option 'drop_outputs'>"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # protocols that a trainer asks every output for; an AttributeError
            return object.__getattribute__(self, attribute)
        raise DroppedOutputError(self._name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        raise DroppedOutputError(next((t._name for t in given if isinstance(t, cls)), "an output"))


def _raises(self: DroppedOutput, *args: Any) -> Any:
    raise DroppedOutputError(self._name)


for _operator in ("getitem", "iter", "len", "float", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "matmul",
                  "neg", "bool", "lt", "gt", "array"):  # fmt: skip
    setattr(DroppedOutput, f"__{_operator}__", _raises)


# Methods that hand the same numbers on in another dtype, as accelerate does with outputs under mixed precision.
_CASTS = frozenset(("float", "double", "half", "bfloat16", "to", "type", "type_as"))


class Outputs:
    """A frame without the outputs at the places of `dropped`, by name; `gm` is the frame's own where there are none."""

    def __init__(self, gm: GraphModule, dropped: dict[int, str]) -> None:
        self.gm, self.dropped = gm, dropped

    def adapt(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`, with an object in the place of each output that it does not have."""
        return functools.partial(_call_without, compiled, self.dropped) if self.dropped else compiled


def _call_without(compiled: Callable[..., Any], dropped: Mapping[int, str], *args: Any) -> Any:
    return tuple(DroppedOutput(dropped[i]) if i in dropped else result for i, result in enumerate(compiled(*args)))


def without(gm: GraphModule, example_inputs: Sequence[Any], config: Config) -> Outputs:
    """Dynamo's graph `gm` without the outputs that `config` drops. Never changes `gm`. Raises
    BadOptionError for a name that is nearly that of an output.

    An output has the name of the variable that held it, also where the caller is given a cast of that. It stays where
    the frame records no gradients, as evaluation reads it, and where no loss, one number, is computed from it: what
    leaves such a frame is on its way to one.
    """
    if not config.drop_outputs or not trains(example_inputs):
        return Outputs(gm, {})
    outputs = gm.graph.output_node().args[0]
    losses = [n for n in outputs if isinstance(n, Node) and is_loss(dynamo_value(n))]  # type: ignore[union-attr]
    dropped = {
        i: name for i, node in enumerate(outputs)  # type: ignore[arg-type]
        if isinstance(node, Node) and (name := _dropped(node, losses, config))
    }  # fmt: skip
    if not dropped:
        beside = [n for n in outputs if isinstance(n, Node) and computed_from(losses, n)]  # type: ignore[union-attr]
        if beside:
            _check_names(config, sorted({re.sub(r"_\d+$", "", n.name) for n in beside}))
        return Outputs(gm, {})
    graph, copies = copied(gm.graph)
    output = graph.output_node()
    output.args = (tuple(None if i in dropped else result for i, result in enumerate(output.args[0])),)  # type: ignore[arg-type]
    return Outputs(in_place_of(gm, graph, copies), dropped)


def _check_names(config: Config, beside: Sequence[str]) -> None:
    """Of a frame without an output that the option names: raises BadOptionError where one is nearly so called, and
    warns where none is."""
    for name in config.drop_outputs:
        if closest(name, beside, cutoff=0.8) is not None:
            wanted = f"variables that hold outputs beside a loss, here {listed(map(repr, beside))}"
            raise BadOptionError("drop_outputs", name, wanted, beside)
    named = listed(map(repr, config.drop_outputs))
    warn_once(f"option 'drop_outputs' names {named}; the outputs beside the loss are {listed(map(repr, beside))}")


def _dropped(output: Node, losses: Sequence[Node], config: Config) -> str:
    """The name by which `output`, or what it is a cast of, is dropped; "" where it stays."""
    nodes = chain(output, lambda n: n.op == "call_method" and n.target in _CASTS)
    found = (name for n in nodes if isinstance(n, Node) and (name := _named(n, config)) and computed_from(losses, n))
    return "" if output in losses else next(found, "")


def _named(node: Node, config: Config) -> str:
    """The name in `drop_outputs` that `node` has; Dynamo counts what is assigned again: logits, logits_1."""
    return next((n for n in config.drop_outputs if re.fullmatch(rf"{re.escape(n)}(_\d+)?", node.name)), "")


def is_loss(fake: Any) -> bool:
    return isinstance(fake, torch.Tensor) and fake.is_floating_point() and same_size(fake.numel(), 1)


def computed_from(losses: Sequence[Node], output: Node) -> bool:
    return output not in losses and output in ancestors(losses)
