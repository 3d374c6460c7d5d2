"""`not` of what the graph computes, and `e not in indices`, as numbers of the graph: Dynamo asks for their values."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megacpp_compile._torch import translator as translation
from megacpp_compile._torch import variables


def negate(translator: Any, inst: Any) -> bool:
    """Whether the coming instruction is one of these, and was done here."""
    stack = translator.stack
    if inst.opname == "UNARY_NOT" and _unknown(stack[-1]):
        stack.append(variables.computed(translator, torch.sym_not, stack.pop()))
    elif inst.opname == "CONTAINS_OP" and inst.argval == 1 and _of_whole_numbers(stack[-1]):
        element, holder = stack[-2:]
        found = variables.contains(translator, variables.seen(holder), element)
        if not _unknown(found):
            return False  # what was emitted for it has no reader
        stack[-2:] = [variables.computed(translator, torch.sym_not, found)]
    else:
        return False
    translation.go_to(translator, translator.instructions[translator.instruction_pointer + 1])
    return True


def _unknown(variable: Any) -> bool:
    """Whether `variable` is a truth value that is known at run time only."""
    found = variables.number(variables.seen(variable)) if hasattr(variable, "is_realized") else None
    return found is not None and isinstance(found[1], torch.SymBool) and bool(free_unbacked_symbols(found[1]))


def _of_whole_numbers(variable: Any) -> bool:
    found = variables.tensor(variables.seen(variable)) if hasattr(variable, "is_realized") else None
    return found is not None and found[1].dtype in (torch.int32, torch.int64)
