"""What tests of passes share beside `contract`: the conditions of one pass as one test, parameters, and what is looked up
by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node

from megacpp_compile.config.options import Config
from tests.corpus.near_misses import NEAR_MISSES
from tests.frames import TOLERANCE, Frames, largest_error, train

from .contract import Args, assert_autocast, assert_autocast_inside, assert_disabled, assert_dynamic, assert_fires


def conditions(name: str, count: int = 1, config: Config | None = None, **blocks: Callable[[], Any]) -> Any:
    """A test of the pass `name` under each condition that is a key of `blocks`; under whatever else is a key it fires. A
    block makes a module and its arguments; with lengths that vary, a module and a function from a length to
    arguments; switched off, also other passes that are off throughout; elsewhere also how often the pass fires."""
    checks: dict[str, Callable[..., Any]] = {
        "disabled": lambda *block: assert_disabled(name, *block),
        "bfloat16": lambda *block: assert_fires(name, *block, count, config, dynamo=True),
        "inference": lambda *block: _assert_inference(name, *block, count, config),
        "autocast": lambda *block: assert_autocast(name, *block, count, config),
        "autocast_inside": lambda *block: assert_autocast_inside(name, *block, count),
        "length": lambda *block: assert_dynamic(name, *block, count, config=config),
        "everything": lambda *block: assert_dynamic(name, *block, count, config=config, everything=True),
    }

    def fires(module: nn.Module, args: Args, times: int = count) -> None:
        assert_fires(name, module, args, times, config)

    marked = [pytest.param(c, marks=pytest.mark.end_to_end if c in ("length", "everything") else ()) for c in blocks]

    @pytest.mark.parametrize("condition", marked)
    def test(condition: str) -> None:
        checks.get(condition, fires)(*blocks[condition]())

    return test


def _assert_inference(name: str, module: nn.Module, args: Args, count: int, config: Config | None) -> None:
    """Frozen, and without gradients."""
    args = tuple(a.detach() for a in args)
    assert_fires(name, module.requires_grad_(False), args, count, config)
    with torch.no_grad():
        assert_fires(name, module, args, count, config, dynamo=True)


def assert_serves(frames: Frames, module: nn.Module, *others: Args, graphs: int | None = 1) -> None:
    """What was compiled gives eager's results and gradients for other arguments, too, in so many graphs."""
    for args in others:
        error, which = largest_error(train(frames.compiled, module, args), train(module, module, args))
        assert error <= TOLERANCE[torch.float32], ([tuple(a.shape) for a in args], which, error)
    assert graphs is None or len(frames.graphs) == graphs, "compiled again"


def op_of(frames: Frames, name: str) -> Node:
    """The one call of the op `name` in the rewritten graph of a module that is one frame."""
    target = getattr(torch.ops.megacpp, name).default
    (node,) = frames.graph.graph.find_nodes(op="call_function", target=target)
    return node


def near_miss(name: str) -> tuple[nn.Module, Args]:
    """The corpus' near miss of this name, and its arguments."""
    (found,) = (n for n in NEAR_MISSES if n.name == name)
    return found.build()


def shown(parameter: Any) -> str:
    """The id of what a test is parametrised by: a function's name."""
    return getattr(parameter, "__name__", str(parameter))


def sampled(ratio: int, names: Any, values: Any, ids: Any = None) -> Callable[[Any], Any]:
    """Parametrises; of the sets of parameters all tiers but the last run one in `ratio`."""
    return lambda test: pytest.mark.sampled(ratio)(pytest.mark.parametrize(names, values, ids=ids)(test))


def cases(table: dict[str, dict[str, Any]], ratio: int) -> Callable[[Any], Any]:
    """`sampled` by (tag, body) of {tag: {name: body}}, with both names as the id."""
    rows = [(tag, name, body) for tag, bodies in table.items() for name, body in bodies.items()]
    return sampled(ratio, ("tag", "body"), [pytest.param(tag, body, id=f"{tag}-{name}") for tag, name, body in rows])
