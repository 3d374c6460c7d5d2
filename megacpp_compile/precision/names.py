"""Globs over module names, segment by segment."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Sequence


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
