"""Checks `Config.inductor`, names and types, against what the installed torch's Inductor knows."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from megacpp_compile.config import checks
from megacpp_compile.errors import BadOptionError, closest

_PLAIN = (bool, int, float, str, type(None))


def check(settings: Mapping[str, Any]) -> None:
    """Raise BadOptionError for a setting that Inductor does not have, and for a value of another type than it has.

    A name may have a dot ("triton.cudagraphs"). Types are checked where Inductor declares bool, int, float, str, None,
    literals, or a union of these.
    """
    known = _types()
    for name, value in settings.items() if known else ():
        checks.fits("inductor", name, name in known, "settings of torch._inductor.config", tuple(known))
        wanted = _allowed(known[name]) if known[name] is not type(None) else ()  # else nobody has declared it
        if wanted and not any(_fits(value, one) for one in wanted):
            words = ", ".join(one.__name__ if isinstance(one, type) else repr(one) for one in wanted)
            texts = [one for one in wanted if isinstance(one, str)]
            raise BadOptionError(f"inductor[{name!r}]", value, words.replace("NoneType", "None"), texts)


def hint(key: str, value: Any, own: Sequence[str]) -> str:
    """How to give the setting of Inductor's that an option `key` is, or is nearer to than to any of `own`; "" where it
    is none."""
    from megacpp_compile._torch.inductor import config

    known = _types() or dict.fromkeys(dir(config))
    if key in known:
        return f"It is a setting of Inductor's: options={{'inductor': {{{key!r}: {value!r}}}}}."
    if any(name.startswith(f"{key}.") for name in known) or hasattr(config, key):
        return f"It has settings of Inductor's: options={{'inductor': {{'{key}.…': …}}}}."
    if (found := closest(key, known, cutoff=0.8)) is not None and closest(key, (*own, found)) == found:
        return f"Did you mean a setting of Inductor's, options={{'inductor': {{{found!r}: {value!r}}}}}?"
    return ""


@functools.cache
def _types() -> dict[str, Any]:
    """Setting -> its type, of all there are; empty where this torch does not tell."""
    from megacpp_compile._torch.inductor import config

    try:
        return {name: config.get_type(name) for name in config.get_config_copy()}  # type: ignore[attr-defined]
    except AttributeError:
        return {}


def _allowed(kind: Any) -> tuple[Any, ...]:
    """The plain types and the literals that `kind` consists of; nothing where it has others."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        parts = [_allowed(part) for part in typing.get_args(kind)]
        return tuple(one for part in parts for one in part) if all(parts) else ()
    return (kind,) if kind in _PLAIN else ()


def _fits(value: Any, one: Any) -> bool:
    return value == one if not isinstance(one, type) else isinstance(value, (int, float) if one is float else one)
