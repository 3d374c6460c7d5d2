"""Checks of a setting's value: each returns what the setting holds, or raises BadOptionError with its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megacpp_compile.errors import BadOptionError

_BOOLS = {"0": False, "false": False, "1": True, "true": True}


def boolean_text(key: str, text: str) -> bool:
    """The truth value that the text of an environment variable stands for."""
    if text.lower() not in _BOOLS:
        raise BadOptionError(key, text, "0, 1, false or true", tuple(_BOOLS))
    return _BOOLS[text.lower()]


def boolean(key: str, value: Any) -> bool:
    """`value`, True or False."""
    if not isinstance(value, bool):
        raise BadOptionError(key, value, "True or False")
    return value


def boolean_or_auto(key: str, value: Any) -> Any:
    """`value`, True, False or "auto"."""
    if value != "auto" and not isinstance(value, bool):
        raise BadOptionError(key, value, "True, False or 'auto'", ("auto",))
    return value


def count(key: str, value: Any) -> int:
    """`value`, an int from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadOptionError(key, value, "an int, 0 or more")
    return value


def choice(key: str, value: Any, valid: Sequence[str], meant: Mapping[str, str] | None = None) -> str:
    """`value`, one of `valid`; meant: other words for these, for the error to name."""
    if not isinstance(value, str) or value not in valid:
        wanted = "one of " + ", ".join(map(repr, valid))
        known = (meant or {}).get(value.lower()) if isinstance(value, str) else None
        raise BadOptionError(key, value, wanted, valid, known)
    return value


def names(key: str, value: Any, what: str = "pass names") -> list[str]:
    """The names of a list, or of a text with commas between them."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in value):
        raise BadOptionError(key, value, f"{what}: a list of str, or one comma-separated str")
    return list(value)


def mapping(key: str, value: Any, check: Callable[[str, Any], Any]) -> Mapping[str, Any]:
    """A read-only copy of `value`, with each of its values as `check` returns it."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise BadOptionError(key, value, "a mapping with str keys")
    return MappingProxyType({name: check(f"{key}[{name!r}]", item) for name, item in value.items()})


def canonical(value: Any) -> str:
    """Text that is equal for equal settings, also across processes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{canonical(k)}: {canonical(v)}" for k, v in value.items())) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(canonical, value)) + "]"
    if isinstance(value, set | frozenset):
        return "set(" + ", ".join(sorted(map(canonical, value))) + ")"
    uuid = getattr(value, "uuid", None)
    if callable(uuid) and not isinstance(value, type):
        identity = uuid()
        if identity is not None:  # None means "cannot be cached", which the repr's address gives
            return f"{type(value).__qualname__}:{identity!r}"
    return repr(value)
