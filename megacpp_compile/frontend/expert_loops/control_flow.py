"""What bytecode says of a branch: where it leads, and which names are read behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from megacpp_compile.fx.walks import reached

_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", *_JUMPS)
_NOTHING = ("NOP", "CACHE", "EXTENDED_ARG", "NOT_TAKEN", *_JUMPS)


def skipped(instructions: Sequence[Any], jump: Any) -> tuple[Any, bool] | None:
    """(the instruction that both ways of a conditional jump come to, whether it jumps to get there at once); None where
    either way does something, as with an `else`."""
    at = next(i for i, inst in enumerate(instructions) if inst is jump)
    target, following = _arrival(instructions, jump.target), _arrival(instructions, instructions[at + 1])
    index = _index(instructions)
    for there, by_jump in ((target, True), (following, False)):
        if there.opname == "FOR_ITER" and index[id(there)] < at:
            return there, by_jump  # on with the loop
    ahead = index[id(target)] > at and _leads_to(instructions, instructions[at + 1], target)
    return (target, True) if ahead else None


def meeting(instructions: Sequence[Any], jump: Any) -> Any:
    """The first instruction that both ways of a conditional jump come to, whatever they do before; None where one
    leaves the function, or goes on with a loop that the other does not go on with."""
    index = _index(instructions)
    at = index[id(jump)]
    ways = [_arrival(instructions, jump.target), _arrival(instructions, instructions[at + 1])]
    heads = [i for i, inst in enumerate(instructions[:at]) if inst.opname == "FOR_ITER"]
    for candidate in (*range(at + 1, len(instructions)), *reversed(heads)):
        if all(_always(instructions, index[id(way)], candidate, at) for way in ways):
            return instructions[candidate]
    return None


def _always(instructions: Sequence[Any], start: int, there: int, branch: int) -> bool:
    """Whether every way from `start` comes to `there`, and to no loop's head from before `branch` ahead of that."""
    following = _following(instructions)
    way = reached([start], lambda at: following(at) if at != there else [])
    return not any(at <= branch or not following(at) for at in way if at != there)


def _leads_to(instructions: Sequence[Any], start: Any, end: Any) -> bool:
    """Whether the way from `start` comes to `end` further on, without going back."""
    following, index = _following(instructions), _index(instructions)
    last = index[id(end)]
    return last in reached([index[id(start)]], lambda at: [way for way in following(at) if at < way <= last])


def _following(instructions: Sequence[Any]) -> Callable[[int], list[int]]:
    """Of an instruction's place, those of what may come next."""
    index = _index(instructions)

    def following(at: int) -> list[int]:
        inst = instructions[at]
        jumps = [index[id(inst.target)]] if inst.target is not None else []
        return jumps if inst.opname in _ENDS else [at + 1, *jumps]

    return following


def _arrival(instructions: Sequence[Any], inst: Any) -> Any:
    """The first instruction from `inst` on that does anything."""
    index, seen = _index(instructions), set[int]()
    while inst.opname in _NOTHING and id(inst) not in seen:
        seen.add(id(inst))
        inst = inst.target if inst.opname in _JUMPS else instructions[index[id(inst)] + 1]
    return inst


def _index(instructions: Sequence[Any]) -> dict[int, int]:
    return {id(inst): i for i, inst in enumerate(instructions)}


def live_names(instructions: Sequence[Any], at: Any) -> frozenset[str]:
    """The local names whose values, as they are when `at` is come to, may be read from there on.

    No `with` is taken to swallow an exception: behind one that does, names may be read that it did not come to set.
    """
    index = _index(instructions)
    live = [frozenset[str]()] * len(instructions)
    effects = [_effect(inst) for inst in instructions]
    changed = True
    while changed:
        changed = False
        for i in range(len(instructions) - 1, -1, -1):
            inst = instructions[i]
            out = frozenset[str]()
            if inst.opname not in _ENDS and i + 1 < len(instructions):
                out |= live[i + 1]
            if inst.target is not None and not _swallows(instructions, i):
                out |= live[index[id(inst.target)]]
            reads, writes = effects[i]
            new = reads | (out - writes)
            if (handler := getattr(inst, "exn_tab_entry", None)) is not None:
                new |= live[index[id(handler.target)]]
            if new != live[i]:
                live[i], changed = new, True
    return live[index[id(at)]]


def _swallows(instructions: Sequence[Any], at: int) -> bool:
    """Whether the jump at `at` is taken where a context manager's `__exit__` returned true for an exception."""
    at -= 1
    while at > 0 and instructions[at].opname in ("TO_BOOL", *_NOTHING):
        at -= 1
    return at >= 0 and bool(instructions[at].opname == "WITH_EXCEPT_START")


@functools.cache
def _parts(opname: str) -> tuple[str, ...]:
    """The single steps of an instruction on locals: two of STORE_FAST_LOAD_FAST."""
    words = opname.split("_")
    return tuple(word for word in words if word in ("LOAD", "STORE", "DELETE"))


def _effect(inst: Any) -> tuple[frozenset[str], frozenset[str]]:
    """(names read before they are written, names written) by one instruction."""
    if not any(kind in inst.opname for kind in ("_FAST", "_DEREF", "_CLOSURE", "_CLASSDEREF")):
        return frozenset(), frozenset()
    names = inst.argval if isinstance(inst.argval, tuple) else (inst.argval,)
    reads, writes = set[str](), set[str]()
    for part, name in zip(_parts(inst.opname), names, strict=False):
        if part == "STORE":
            writes.add(name)
        elif name not in writes:
            reads.add(name)  # to delete one that is not there is an error, which is a way to read
    return frozenset(reads), frozenset(writes)
