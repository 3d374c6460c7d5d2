"""What other packages add: their entry points, each loaded once, and a digest of their code for cache keys."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import CodeType
from typing import Any

from megacpp_compile.config import checks
from megacpp_compile.config.warn_once import warn_once

# What was registered -> a digest of its code, as "rule NAME" or "lowering OP TARGET NAME".
CODE: dict[str, str] = {}
_loaded: set[str] = set()


def load(group: str, take: Callable[[Any], Any]) -> list[tuple[metadata.EntryPoint, Any]]:
    """Hand `take` what each entry point of `group` names, on the first call; returns what was taken. One that cannot be
    loaded or taken is left out, with a warning that names the package."""
    taken: list[tuple[metadata.EntryPoint, Any]] = []
    if group in _loaded:
        return taken
    _loaded.add(group)  # first: what is loaded may ask for what is registered
    for point in sorted(metadata.entry_points(group=group), key=lambda p: (p.name, p.value)):
        try:
            take(made := point.load())
            taken.append((point, made))
        except Exception as error:
            left_out(point, error)
    return taken


def left_out(point: metadata.EntryPoint, error: Exception) -> None:
    """Warn of an entry point that is of no use."""
    package = point.dist.name if point.dist is not None else "an unknown package"
    reason = f"{type(error).__name__}: {error}".rstrip(".")
    warn_once(
        f"the entry point {point.name} = {point.value} ({point.group}) of {package} is left out: {reason}. Frames "
        f"compile without it. Update or uninstall {package}, or run `python -c 'import {point.module}'` to see where "
        "it fails."
    )


def digest(made: Any) -> str:
    """Text that differs, also across processes, where the code of a function or of an object's class does, or what
    they hold: closures, defaults and attributes. Objects without a `uuid()` count by their repr."""
    return hashlib.sha256(checks.canonical(list(_parts(made, set()))).encode()).hexdigest()


def _parts(made: Any, seen: set[int]) -> Iterator[Any]:
    """What `made` is made of, functions within it included."""
    held: list[Any] = []
    if isinstance(made, functools.partial):
        held = [made.func, *made.args, made.keywords]
    elif inspect.ismethod(made):
        held = [made.__func__, made.__self__]
    elif inspect.isfunction(made):
        cells = [_content(cell) for cell in made.__closure__ or ()]
        yield from (made.__qualname__, _source(made))
        held = [made.__defaults__, made.__kwdefaults__, cells]
    elif inspect.ismodule(made) or inspect.isclass(made):
        yield from (made.__name__, _source(made))
    elif isinstance(made, (list, tuple)):
        held = [*made]
    elif isinstance(made, dict):
        held = [part for item in made.items() for part in item]
    elif hasattr(made, "__dict__") and not callable(getattr(made, "uuid", None)):
        held = [type(made), vars(made)]
    else:
        yield checks.canonical(made)
    if held and id(made) not in seen:
        seen.add(id(made))
        for part in held:
            yield from _parts(part, seen)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _source(made: Any) -> str:
    """A digest of the file that defines `made`, whose helpers count, too; of its own code where there is no file."""
    module = made if inspect.ismodule(made) else sys.modules.get(made.__module__)
    path = Path(getattr(module, "__file__", None) or "")
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return repr(_code(made.__code__)) if inspect.isfunction(made) else repr(made)


def _code(code: CodeType) -> tuple[Any, ...]:
    constants = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, code.co_names, constants
