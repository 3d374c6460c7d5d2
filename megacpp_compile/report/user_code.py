"""Where in the user's code an error was raised."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch

_OTHERS = tuple(str(Path(file).parent) + "/" for file in (torch.__file__, Path(__file__).parent))
# As in "Dynamo failed to run FX node with fake tensors: call_function ...: got RuntimeError('sizes differ')".
_QUOTED = re.compile(r": got (\w+)\((['\"])(.*?)\2\)")


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line of the traceback that is neither torch's nor this package's; None where there is none."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename) and f.filename[:1] != "<"]
    return own[-1] if own else None


def is_users(filename: str) -> bool:
    """Whether code is neither torch's nor this package's."""
    return not filename.startswith(_OTHERS)


def place_of(frame: traceback.FrameSummary | None) -> str:
    """"moe.py:51, in forward: `if mask.any():`", "" for None."""
    return f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}: `{frame.line}`" if frame else ""


def first_line(error: BaseException) -> str:
    """Class and first line of an error, without its full stop; of one that Dynamo quotes, the quoted one's."""
    if quoted := _QUOTED.search(str(error)):
        return f"{quoted[1]}: {quoted[3].rstrip('.')}"
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
