"""`CompressionPlan`: which linears keep a random projection of their input in place of it. Frozen, checked, hashable.

The pass `compressed_linear` carries it out; `megacpp::compressed_linear` says what that does to gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megacpp_compile.config import checks, globs

REDRAWS = ("never", "update")


@dataclass(frozen=True, slots=True)
class CompressionPlan:
    """Linears whose input is saved for backward as a random projection, which makes their weights' gradients
    approximate: unbiased, and noisier the narrower the projection is. Outputs and all other gradients stay exact.

    Attributes:
        names: globs over module names, or one; `globs` defines the patterns. Routers, embeddings, heads, norms and
            LoRA's paths are left alone, whatever the globs hit, as is a linear whose input stays in memory anyway.
        ratio: channels of the projection over those of the input, above 0 and at most 1. At 1 nothing is saved, and
            gradients are approximate all the same.
        seed: of the projections, which are made from it and the names of the modules; no random state is touched.
        redraw: when a projection changes. "never": it is the same throughout a run, whose weights take the gradient in
            the directions that it keeps alone; "update": with the values of its linear's weight, so that each step has
            its own, and all micro-batches of a step the same. docs/compression.md has the loss of both.

    Raises BadOptionError for a value outside its domain, and for no pattern, one given twice or with an empty segment.
    """

    names: tuple[str, ...]
    ratio: float = 0.25
    seed: int = 0
    redraw: str = "never"

    def __post_init__(self) -> None:
        names = (self.names,) if isinstance(self.names, str) else self.names
        given = isinstance(names, (tuple, list)) and names and all(isinstance(name, str) for name in names)
        checks.fits("compress.names", names, given, "globs over module names, as in '*.mlp.down_proj'")
        globs.rules("compress.names", [(name, None) for name in names], "", "module names", "*.mlp.down_proj")
        number = isinstance(self.ratio, (int, float)) and not isinstance(self.ratio, bool)
        checks.fits("compress.ratio", self.ratio, number and 0 < self.ratio <= 1, "a fraction above 0 and at most 1")
        checks.settle(self, names=tuple(names), ratio=float(self.ratio))
        checks.count("compress.seed", self.seed)
        checks.choice("compress.redraw", self.redraw, REDRAWS)

    @classmethod
    def of(cls, value: Any) -> CompressionPlan | None:
        """A plan from itself, None, or a mapping of fields. Raises BadOptionError for anything else."""
        if value is None or isinstance(value, cls):
            return value
        named = isinstance(value, Mapping) and "names" in value
        checks.fits("compress", value, named, "a CompressionPlan, or a mapping with 'names' and 'ratio'")
        return checks.plan(cls, "compress", value)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain containers, fit for `of` and JSON."""
        return {"names": list(self.names), "ratio": self.ratio, "seed": self.seed, "redraw": self.redraw}

    def hits(self, fqn: str) -> bool:
        """Whether a glob hits the module."""
        return globs.first_hit(self.names, fqn) is not None

    def without_hit(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """The globs that hit none of the names."""
        return globs.without_hit(self.names, fqns)

    def rank(self, width: int) -> int:
        """The channels that are kept of `width`."""
        return max(1, round(self.ratio * width))

    def key(self, fqn: str) -> int:
        """The seed of a module's projection, from 0 to 2^63 - 1."""
        digest = hashlib.blake2b(f"{self.seed} {fqn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def rule(self) -> str:
        """What a projection is made from, in words."""
        given = f"seed {self.seed} and the module's name"
        return f"{given}, anew when the weight changes" if self.redraw == "update" else f"{given}, once"
