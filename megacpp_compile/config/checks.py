"""Checks of a setting's value: each returns what the setting holds, or raises BadOptionError with its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from megacpp_compile.errors import BadOptionError

T = TypeVar("T")
_BOOLS = {"0": False, "false": False, "1": True, "true": True}


def boolean_text(key: str, text: str) -> bool:
    """The truth value that the text of an environment variable stands for."""
    if text.lower() not in _BOOLS:
        raise BadOptionError(key, text, "0, 1, false or true", tuple(_BOOLS))
    return _BOOLS[text.lower()]


def fits(key: str, value: T, holds: object, wanted: str, valid: Sequence[str] = ()) -> T:
    """`value`, of which `holds` says whether it is what is `wanted`."""
    if not holds:
        raise BadOptionError(key, value, wanted, valid)
    return value


def boolean(key: str, value: Any) -> bool:
    """`value`, True or False."""
    return bool(fits(key, value, isinstance(value, bool), "True or False"))


def boolean_or_auto(key: str, value: Any) -> Any:
    """`value`, True, False or "auto"."""
    return fits(key, value, value == "auto" or isinstance(value, bool), "True, False or 'auto'", ("auto",))


def count(key: str, value: Any) -> int:
    """`value`, an int from 0 on."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return int(fits(key, value, whole and value >= 0, "an int, 0 or more"))


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
    several = isinstance(value, list | tuple | set | frozenset) and all(isinstance(name, str) for name in value)
    return list(fits(key, value, several, f"{what}: a list of str, or one comma-separated str"))


def mapping(key: str, value: Any, check: Callable[[str, Any], Any]) -> Mapping[str, Any]:
    """A read-only copy of `value`, with each of its values as `check` returns it."""
    named = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    fits(key, value, named, "a mapping with str keys")
    return MappingProxyType({name: check(f"{key}[{name!r}]", item) for name, item in value.items()})


def plan(cls: type[T], key: str, value: Mapping[str, Any]) -> T:
    """The dataclass `cls` with the fields that `value` has."""
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in value:
        fits(key, name, name in known, f"fields of {cls.__name__}: " + ", ".join(known), known)
    return cls(**value)


def settle(frozen: object, **values: Any) -> None:
    """Set fields of a frozen dataclass that is being made."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


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
