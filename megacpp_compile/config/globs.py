"""The dialect of globs over dotted names ("model.layers.0.mlp.up_proj"), and tables of rules in it.

Every option that names modules or parameters by patterns uses this one dialect. A name is a sequence of segments
between dots, and so is a pattern:

=====================  =====================================================================================
`*` as a segment       one or more segments; as the first of several also none
`*` inside a segment   any characters of that segment, also none; it never crosses a dot
`?`                    one character of a segment
`[0-3]`, `[!0-3]`      one character of a segment that is, or is not, among these
anything else          itself, case included
=====================  =====================================================================================

The whole name has to match: "*.mlp.gate" hits "mlp.gate" and "model.layers.0.mlp.gate", not
"model.layers.0.mlp.gate_proj", nor a module inside the gate.

What an option makes of several hits:

=============================  =============================================================================
`PrecisionPlan.rules`          modules; the first pattern that hits wins (`first_hit`)
`CompressionPlan.names`        modules; any hit (`hits`)
`ShardingPlan.rules`           parameters; the first pattern that hits wins (`first_hit`)
`exclude` of a replacement     modules; any hit (`hits`), beside words that are looked for in any segment
`Config.block_kinds`           a block, by itself or a module around it; the longest pattern wins (`longest_hit`)
`blocks` of `compile`          modules; the outermost of those that are hit (`outermost_hits`), so that "layers.*" is
                               the layers and nothing inside them
`allow_modules` of a sentinel  the innermost running module; any hit (`hits`)
=============================  =============================================================================
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megacpp_compile.config import checks
from megacpp_compile.config._deprecated import star_across_segments
from megacpp_compile.errors import BadOptionError


@functools.lru_cache(maxsize=1 << 14)
def hits(pattern: str, fqn: str) -> bool:
    """Whether `pattern` matches the whole of the name `fqn`, in the dialect above."""
    first, *rest = pattern.split(".")
    if first == "*" and rest and _match(rest, fqn.split(".")):
        return True  # a block by itself calls "model.layers.0.mlp.gate" only "mlp.gate"
    return _match([first, *rest], fqn.split("."))


def _match(parts: Sequence[str], segments: Sequence[str]) -> bool:
    if not parts or not segments:
        return not parts and not segments
    if parts[0] == "*":
        return any(_match(parts[1:], segments[i:]) for i in range(1, len(segments) + 1))
    return fnmatch.fnmatchcase(segments[0], parts[0]) and _match(parts[1:], segments[1:])


def first_hit(patterns: Iterable[str], fqn: str) -> str | None:
    """The first of `patterns` that hits `fqn`, or None."""
    return next((pattern for pattern in patterns if hits(pattern, fqn)), None)


def without_hit(patterns: Iterable[str], fqns: Iterable[str]) -> tuple[str, ...]:
    """The patterns that hit none of the names."""
    names = list(fqns)
    return tuple(pattern for pattern in patterns if not any(hits(pattern, name) for name in names))


def outermost_hits(pattern: str, fqns: Iterable[str]) -> list[str]:
    """The names that `pattern` hits and that do not lie inside another it hits, in the order of `fqns`."""
    found = [fqn for fqn in fqns if hits(pattern, fqn)]
    every = set(found)
    return [fqn for fqn in found if not any(outer in every for outer in _around(fqn))]


def longest_hit(patterns: Iterable[str], fqn: str) -> tuple[str, str] | None:
    """(name, pattern) of the longest of `patterns` that hits `fqn` or a module around it, or None; ties go by the
    alphabet. name: the outermost module that the pattern hits. See `block_hit` for what counts as a hit."""
    names = [*_around(fqn), fqn]
    longest = sorted(patterns, key=lambda p: (-len(p), p))
    return next(((name, pattern) for pattern in longest for name in names if block_hit(pattern, name)), None)


def block_hit(pattern: str, fqn: str) -> bool:
    """Whether `pattern`, of `Config.block_kinds`, hits the module `fqn`.

    A frame that is one layer by itself knows its modules only by the end of their names ("mixer" for
    "layers.3.mixer"). So a name without a numbered segment may be hit by any end of the pattern ("layers.*.mixer").
    """
    parts = pattern.split(".")
    numbered = any(segment.isdigit() for segment in fqn.split("."))
    ends = [pattern] if numbered else [".".join(parts[i:]) for i in range(len(parts))]
    return any(hits(end, fqn) for end in ends) or any(star_across_segments("block_kinds", end, fqn) for end in ends)


def _around(fqn: str) -> list[str]:
    """The names of the modules around `fqn`, outermost first."""
    parts = fqn.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def inside_segment(word: str, fqn: str) -> bool:
    """Whether a segment of `fqn` holds `word`, in any case: "router" is in "layers.0.moe_router.weight"."""
    return any(word.lower() in segment for segment in fqn.lower().split("."))


def pairs(key: str, value: Any, what: str) -> tuple[tuple[str, Any], ...]:
    """`value`, a mapping from str or an iterable of pairs, as a tuple of pairs.

    key: the option; what: the second half of a pair, in words; both for messages. Raises BadOptionError for anything
    else.
    """
    items = value.items() if isinstance(value, Mapping) else value
    try:
        found = tuple((name, other) for name, other in items)
    except (TypeError, ValueError):
        raise BadOptionError(key, value, f"a mapping, or pairs, of str and {what}") from None
    for name, _ in found:
        checks.fits(key, name, isinstance(name, str), "str keys")
    return found


def rules(key: str, value: Any, what: str, names: str, example: str) -> tuple[tuple[str, Any], ...]:
    """`pairs` whose first halves are globs.

    names, example: what the globs are over, and one of them, for messages. Raises BadOptionError as `pairs`, and for a
    pattern that is there twice or has an empty segment.
    """
    found = pairs(key, value, what)
    seen = set()
    for pattern, _ in found:
        checks.fits(key, pattern, pattern not in seen, "every pattern once: the first wins")
        checks.fits(key, pattern, "" not in pattern.split("."), f"a glob over {names}, as in {example!r}")
        seen.add(pattern)
    return found
