"""The call of compiled code that Dynamo is compiling a frame for, read off Python's stack."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

from megacpp_compile._torch import dynamo


@dataclass(frozen=True)
class CompiledCall:
    """A call of what `torch.compile` returned.

    Attributes:
        whole: whether the frame is entered from the call itself, and not from code that runs in eager.
        module: the module that was compiled; None for a function.
        context: torch's object for that `torch.compile`, the same in all its calls.
        enter: called at the beginning of each later call; what it returns is called at that call's end.
        leave: called at the end of this one.
        through: (file, function) of the code that runs in eager between the call and the frame.
    """

    whole: bool
    module: nn.Module | None
    context: Any
    enter: list[Callable[[], Callable[[], None]]]
    leave: list[Callable[[], None]]
    through: frozenset[tuple[str, str]]


def current() -> CompiledCall | None:
    """The innermost call; None where no frame is being compiled, or torch does not let it be found."""
    entry = _entry()
    caller = entry.f_back if entry is not None else None
    found = _outwards(caller, _file(dynamo.eval_frame))
    held = found.f_locals if found is not None else {}
    hooks = getattr(held.get("self"), "enter_exit_hooks", None)
    if entry is None or hooks is None or not isinstance(held.get("cleanups"), list):
        return None
    module = getattr(compiled := inspect.unwrap(held["fn"]), "__self__", compiled)
    module = module if isinstance(module, nn.Module) else None
    entered = {getattr(f, "__code__", None) for f in (held["fn"], getattr(module, "forward", None))}
    # How a module calls its forward is no code of the user's; a hook of the module is a frame of its own.
    called = _past(caller, inspect.getfile(nn.Module)) is found
    whole = called and getattr(entry.f_locals.get("frame"), "f_code", None) in entered
    through = set()
    while caller is not None and caller is not found:
        through.add((caller.f_code.co_filename, caller.f_code.co_name))
        caller = caller.f_back
    return CompiledCall(whole, module, held["self"], hooks, held["cleanups"], frozenset(through))


def _entry() -> FrameType | None:
    """The Python frame in which Dynamo is told to compile one; its caller is that one's caller."""
    code = getattr(dynamo.CatchErrorsWrapper.__call__, "__code__", None)
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def _outwards(frame: FrameType | None, file: str) -> FrameType | None:
    """The first frame of code in `file`, from `frame` outwards."""
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame


def _past(frame: FrameType | None, file: str) -> FrameType | None:
    """The first frame of code outside of `file`, from `frame` outwards."""
    while frame is not None and frame.f_code.co_filename == file:
        frame = frame.f_back
    return frame


def _file(module: Any) -> str:
    return getattr(module, "__file__", None) or ""
