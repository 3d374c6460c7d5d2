"""Modules that the forward calls several times in a row, each time on what came of the call before: a loop over depth.

So does multi-token prediction with one block for all depths (arXiv:2412.19437, 2.2, with the block shared), and a model
of recurrent depth. Dynamo numbers the calls of a module; what makes them a loop is told by the graph: tokens mix in
each call, each depends on the one before, and nowhere else do tokens mix between the first and the last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from torch.fx import Node

from megacpp_compile.fx.provenance import local_path

Value = TypeVar("Value", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """Call `number`, from 0, of `module` in its loop. beside: whether tokens mix outside of the loop, too."""

    module: str
    number: int
    beside: bool


def calls_of(forward: Sequence[Node], mixes: Callable[[Node], bool]) -> dict[Node, LayerCall]:
    """The call of every node that is in a loop over depth. forward: in graph order; mixes: whether in a node tokens
    mix."""
    return loops_of(
        forward, {n: _stack(n) for n in forward}, [n for n in forward if mixes(n)], lambda n: n.all_input_nodes
    )


def loops_of(
    forward: Sequence[Value],
    stacks: Mapping[Value, Mapping[str, int]],
    mixing: Sequence[Value],
    read: Callable[[Value], Iterable[Value]],
) -> dict[Value, LayerCall]:
    """What `calls_of` says, of values that need not be nodes. forward: in the order they are made; stacks: the modules
    around each, the outermost first, with the number of the call; mixing: those in which tokens mix; read: what a value
    is made of."""
    repeated = {name for stack in stacks.values() for name, number in stack.items() if number}
    if not repeated:
        return {}
    outermost = [next((name for name in stacks[n] if name in repeated), None) for n in mixing]
    found: dict[Value, LayerCall] = {}
    for module in dict.fromkeys(name for name in outermost if name is not None):
        numbers = {n: stack[module] for n, stack in stacks.items() if module in stack}
        if _is_loop(forward, numbers, mixing, read):
            beside = any(n not in numbers for n in mixing)
            found.update({n: LayerCall(module, number, beside) for n, number in numbers.items()})
    return found


def _stack(node: Node) -> dict[str, int]:
    """The modules around a node, the outermost first, with the number of the call."""
    found = {}
    for key, entry in (node.meta.get("nn_module_stack") or {}).items():
        name = local_path(str(entry[0] if isinstance(entry, tuple) else entry))[1]
        number = str(key).partition("@")[2]  # a second call of the module adds "@1"
        if name:
            found[name] = int(number) if number.isdigit() else 0
    return found


def _is_loop(
    forward: Sequence[Value],
    numbers: Mapping[Value, int],
    mixing: Sequence[Value],
    read: Callable[[Value], Iterable[Value]],
) -> bool:
    count = max(numbers.values()) + 1
    if {numbers[n] for n in mixing if n in numbers} != set(range(count)):
        return False
    place = {n: i for i, n in enumerate(forward)}
    first, last = (pick(place[n] for n in numbers) for pick in (min, max))
    if any(first < place[n] < last and n not in numbers for n in mixing):
        return False
    depends_on: dict[Value, set[int]] = {}  # the calls that a value depends on
    follows = {0}
    for value in forward:
        own = set().union(*(depends_on.get(a, ()) for a in read(value)))
        number = numbers.get(value)
        if number is not None:
            if number - 1 in own:
                follows.add(number)
            own.add(number)
        depends_on[value] = own
    return follows == set(range(count))
