"""Inputs that a rewritten frame has behind those that Dynamo calls it with, and the call that brings them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node


def add_inputs(gm: GraphModule, name: str, fakes: Sequence[Tensor], static: bool = False) -> list[Node]:
    """Inputs `name`_0, ... of `gm`, behind those that it has, with these fake values. AOTAutograd reads off them that
    they have no source in the user's code; static: that they stay where they are, so that CUDA graphs may write to
    them."""
    last, made = gm.graph.find_nodes(op="placeholder")[-1], []
    for i, fake in enumerate(fakes):
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"{name}_{i}")
        last.meta["val"] = fake
        if static:
            last.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        last._dynamo_source = None  # type: ignore[attr-defined]
        made.append(last)
    return made


def called_with(compiled: Callable[..., Any], more: Callable[[Sequence[Any]], Sequence[Tensor]]) -> Callable[..., Any]:
    """`compiled`, called with a frame's own inputs: `more` makes of these what it takes behind them."""
    return functools.partial(_with_more, compiled, more)


def _with_more(compiled: Callable[..., Any], more: Callable[[Sequence[Any]], Sequence[Tensor]], *inputs: Any) -> Any:
    return compiled(*inputs, *more(inputs))
