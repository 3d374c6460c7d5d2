"""Numbers of experts in the place of what tells them: lists of those that have tokens, arrays, keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile._torch import translator as translation
from megacpp_compile._torch import variables
from megacpp_compile._torch.dispatch import disable_current_modes
from megacpp_compile.frontend.expert_loops import origins
from megacpp_compile.frontend.expert_loops.truncated_counts import TruncatedCounts
from megacpp_compile.fx import assumptions

_ITERATES = (enumerate, zip, list, tuple)
_LISTS = (list, tuple, nn.ModuleList, nn.ParameterList)


def all_of(translator: Any, hits: Any, experts: int) -> Any:
    """What Dynamo holds for a list of all `experts`, whose numbers are known, in the place of those `hits` names."""
    found = variables.tensor(hits)
    assert found is not None
    fake, entries = found[1], list[Any]()
    with disable_current_modes():  # tracing on fake inputs has one
        device = "cpu" if fake.device.type == "meta" else fake.device
        numbers = [torch.full(fake.shape[1:], e, device=device) for e in range(experts)]
    for e, number in enumerate(numbers):
        entries.append(variables.computed(translator, assumptions.expert, hits, e))
        variables.make_known(entries[-1], number)
    return variables.row(entries)


def entry(translator: Any) -> Any:
    """The entry of a list of experts that an iteration has just been given."""
    if not translator.stack:
        return None
    given = variables.seen(translator.stack[-1])
    found = variables.tensor(given)
    return given if found is not None and found[0].target is assumptions.expert else None


def list_arrays(translator: Any, inst: Any, short: TruncatedCounts) -> None:
    """Put numbers in the place of an array of them that is iterated over."""
    calls = inst.opname.startswith("CALL") and translation.callee(translator, inst) in _ITERATES
    count = 1 if inst.opname == "GET_ITER" else inst.arg or 0 if calls else 0
    for at in range(-count, 0):
        array = variables.seen(translator.stack[at])
        found = variables.tensor(array)
        few = found is not None and statically_known_true(found[1].numel() <= origins.MOST)
        if found is not None and few and origins.about_tokens(found[0]):
            _list_array(translator, array, at, short)


def _list_array(translator: Any, array: Any, at: int, short: TruncatedCounts) -> None:
    if (listed := variables.entries(translator, array)) is not None:
        short.listed(array, variables.parts(listed) or [])
        translator.stack[at] = listed


def subscript(translator: Any) -> None:
    """Index tensors and lists by experts' numbers: indexing by a tensor asks for its value."""
    key = variables.seen(translator.stack[-1])
    if variables.known(key) is None and variables.parts(key) is None:
        return
    holder = variables.realized(translator.stack[-2])  # Dynamo is about to look at it
    if variables.tensor(holder) is not None:
        translator.stack[-1] = _numbers(key)
    elif (known := variables.known(key)) is not None and known.dtype == torch.int64:
        if variables.python_type(holder) in _LISTS:
            translator.stack[-1] = variables.constant(int(known))


def _numbers(key: Any) -> Any:
    """`key`, with numbers in the place of tensors without dimensions whose numbers are known."""
    known, parts = variables.known(key), variables.parts(key)
    if parts is not None:
        return variables.row([_numbers(variables.seen(part)) for part in parts])
    if known is None or known.dim() or known.dtype == torch.bool:
        return key
    return variables.constant(int(known))
