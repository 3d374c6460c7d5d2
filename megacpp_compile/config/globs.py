"""Globs over module names, segment by segment, and tables of rules that go by them."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megacpp_compile.errors import BadOptionError


@functools.lru_cache(maxsize=1 << 14)
def hits(pattern: str, fqn: str) -> bool:
    """Whether the module `fqn` is meant. A star that is a whole segment stands for one or more segments, in front of
    others for none, too; within a segment `*`, `?` and `[...]` stay within it. All of the name has to match, so
    "*.mlp.gate" is not "model.layers.0.mlp.gate_proj", nor anything under "gate"."""
    first, *rest = pattern.split(".")
    if first == "*" and rest and _match(rest, fqn.split(".")):
        return True  # "*.mlp.gate" means "mlp.gate" too, as a block by itself calls it
    return _match([first, *rest], fqn.split("."))


def _match(parts: Sequence[str], segments: Sequence[str]) -> bool:
    if not parts or not segments:
        return not parts and not segments
    if parts[0] == "*":
        return any(_match(parts[1:], segments[i:]) for i in range(1, len(segments) + 1))
    return fnmatch.fnmatchcase(segments[0], parts[0]) and _match(parts[1:], segments[1:])


def inside_segment(word: str, fqn: str) -> bool:
    """Whether a segment of the name holds `word`, in any case: "router" is in "layers.0.moe_router.weight"."""
    return any(word.lower() in segment for segment in fqn.lower().split("."))


def pairs(key: str, value: Any, what: str) -> tuple[tuple[str, Any], ...]:
    """`value`, a mapping or (name, something) pairs, as pairs. key: the option, and what: the something, for messages.

    Raises BadOptionError for anything else.
    """
    items = value.items() if isinstance(value, Mapping) else value
    try:
        found = tuple((name, other) for name, other in items)
    except (TypeError, ValueError):
        raise BadOptionError(key, value, f"a mapping, or pairs, of str and {what}") from None
    for name, _ in found:
        if not isinstance(name, str):
            raise BadOptionError(key, name, "str keys")
    return found


def rules(key: str, value: Any, what: str, names: str, example: str) -> tuple[tuple[str, Any], ...]:
    """`pairs`, whose first halves are globs, each once. names, example: what the globs are over and one of them, for
    messages."""
    found = pairs(key, value, what)
    seen = set()
    for pattern, _ in found:
        if pattern in seen:
            raise BadOptionError(key, pattern, "every pattern once: the first wins")
        if not pattern or "" in pattern.split("."):
            raise BadOptionError(key, pattern, f"a glob over {names}, as in {example!r}")
        seen.add(pattern)
    return found


def first_hit(patterns: Iterable[str], fqn: str) -> str | None:
    """The first of `patterns` that means `fqn`."""
    return next((pattern for pattern in patterns if hits(pattern, fqn)), None)


def without_hit(patterns: Iterable[str], fqns: Iterable[str]) -> tuple[str, ...]:
    """The patterns that mean none of the names."""
    names = list(fqns)
    return tuple(pattern for pattern in patterns if not any(hits(pattern, name) for name in names))
