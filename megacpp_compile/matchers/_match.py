"""What a matcher answers where an idiom is nearly there."""

from __future__ import annotations

import dataclasses

from torch.fx import Node


@dataclasses.dataclass(frozen=True)
class MatchFailure:
    """A near miss: the first node that differs from the idiom, and why. `tag` is machine-readable."""

    node: Node
    tag: str
    reason: str
