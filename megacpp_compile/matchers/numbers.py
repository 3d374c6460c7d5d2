"""Numbers that a model computes with: written in the graph, or floats of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.fx.walks import reached


def is_number(given: Any) -> bool:
    """Whether `given` is a number that a match may rest on: one written in the graph, or what was computed from floats
    of the model, which `dynamic=True` makes inputs. One computed from a size may change from call to call."""
    if not isinstance(given, Node):
        return isinstance(given, (int, float)) and not isinstance(given, bool)
    number = value(given)
    if not isinstance(number, torch.SymFloat) or not number.node.has_hint():
        return False
    made_of = reached([given], lambda n: n.all_input_nodes if not isinstance(value(n), torch.Tensor) else [])
    return not any(isinstance(value(n), torch.SymInt) for n in made_of)


def number_of(given: Any) -> float | None:
    """The number that `given` is, None where it is none. A float of the model is fixed to what it is now: the frame is
    compiled again for another."""
    if not is_number(given):
        return None
    return float(value(given) if isinstance(given, Node) else given)
