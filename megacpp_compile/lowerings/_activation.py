"""What lies between an expert's GEMMs: `f(gate) * (up + offset)`, with bounds on gate, on f's result and on up, and on
the factor of silu that is no sigmoid.

Ops take it as a string: `str(Activation("silu"))` is "silu", and SwiGLU as OpenAI's open-weight models clamp it is
"silu(alpha=1.702, gate=clamp -inf 7.0, up=clamp -7.0 7.0, offset=1.0)". `Activation.parse` reads both.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# What a bound passes on of a gradient at one of its ends, as the function of torch that it is called after.
AT_AN_END = {"clamp": 1.0, "minimum": 0.5, "hardtanh": 0.0}
KINDS = (*AT_AN_END, "tanh")


@dataclasses.dataclass(frozen=True)
class Bound:
    """`min(max(x, low), high)`, or of the kind "tanh" `high * tanh(x / high)`, whose `low` is `-high`."""

    low: float = -math.inf
    high: float = math.inf
    kind: str = "clamp"

    def __post_init__(self) -> None:
        assert self.kind in KINDS and self.low <= self.high, self

    def __bool__(self) -> bool:
        return (self.low, self.high) != (-math.inf, math.inf)

    def __str__(self) -> str:
        return f"{self.kind} {self.low!r} {self.high!r}"

    @classmethod
    def parse(cls, text: str) -> Bound:
        kind, low, high = text.split(" ")
        return cls(float(low), float(high), kind)

    def of(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(bounded x, its derivative); no derivative where there is no bound. NaN stays NaN."""
        if not self:
            return x, None
        if self.kind == "tanh":
            t = torch.tanh(x / self.high)
            return self.high * t, 1 - t * t
        inside, at_an_end = (x > self.low) & (x < self.high), AT_AN_END[self.kind]
        slope = inside.to(x.dtype)
        if at_an_end:
            slope = torch.where((x == self.low) | (x == self.high), at_an_end, slope)
        return x.clamp(self.low, self.high), slope


def _silu(h: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    if alpha != 1:
        s = torch.sigmoid(alpha * h)
        return h * s, s * (1 + alpha * h * (1 - s))
    s = torch.sigmoid(h)
    return h * s, s * (1 + h * (1 - s))


def _gelu(h: Tensor, _: float) -> tuple[Tensor, Tensor]:
    below = 0.5 * (1 + torch.erf(h * 0.5**0.5))
    return h * below, below + h * torch.exp(-0.5 * h * h) * 0.3989422804014327


def _gelu_tanh(h: Tensor, _: float) -> tuple[Tensor, Tensor]:
    t = torch.tanh(0.7978845608028654 * (h + 0.044715 * h * h * h))
    inner = 0.7978845608028654 * (1 + 3 * 0.044715 * h * h)
    return 0.5 * h * (1 + t), 0.5 * (1 + t) + 0.5 * h * (1 - t * t) * inner


def _relu(h: Tensor, _: float) -> tuple[Tensor, Tensor]:
    return F.relu(h), (h > 0).to(h.dtype)


def _relu2(h: Tensor, _: float) -> tuple[Tensor, Tensor]:
    r = F.relu(h)
    return r * r, 2 * r


# name -> (h, alpha) -> (f(h), its derivative)
FUNCTIONS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu": _relu, "relu2": _relu2}


def passed_on(gradient: Tensor, slope: Tensor | None, selects: bool = True) -> Tensor:
    """`gradient`, which is a product with `slope` (None for 1), that is 0 where the slope is, of an activation that
    `selects`."""
    return torch.where(slope == 0, 0, gradient) if selects and slope is not None else gradient


@dataclasses.dataclass(frozen=True)
class Activation:
    """`result(f(gate(h))) * (up(h) + offset)`.

    Attributes:
        name: of f, one of `FUNCTIONS`.
        alpha, linear: of silu, which is `linear(h) * sigmoid(alpha * h)`.
        gate, result, up, linear: bounds.
    """

    name: str
    alpha: float = 1.0
    gate: Bound = Bound()
    result: Bound = Bound()
    up: Bound = Bound()
    offset: float = 0.0
    linear: Bound = Bound()

    def __post_init__(self) -> None:
        assert self.name in FUNCTIONS and (self.alpha == 1 and not self.linear or self.name == "silu"), self

    def __str__(self) -> str:
        others = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)[1:])
        said = ", ".join(f"{name}={value}" for name, value, default in others if value != default)
        return f"{self.name}({said})" if said else self.name

    @staticmethod
    @functools.cache
    def parse(text: str) -> Activation:
        """The activation whose string is `text`."""
        name, _, others = text.removesuffix(")").partition("(")
        said: dict[str, Any] = dict(part.split("=") for part in others.split(", ") if part)
        for key, value in said.items():
            said[key] = float(value) if key in ("alpha", "offset") else Bound.parse(value)
        return Activation(name, **said)

    @property
    def constants(self) -> tuple[float | None, ...] | None:
        """What kernels are specialised by besides the name; None where all is as usual. Alpha, the offset, and of gate,
        result and up the ends (None for infinity) and the share of a gradient that passes there."""
        if str(self) == self.name:
            return None
        ends = [
            (None if math.isinf(bound.low) else bound.low, None if math.isinf(bound.high) else bound.high,
             AT_AN_END[bound.kind])
            for bound in (self.gate, self.result, self.up)
        ]  # fmt: skip
        return (self.alpha, self.offset, *(number for bound in ends for number in bound))

    @property
    def soft(self) -> bool:
        """Whether a bound is a tanh, or on one factor of silu: kernels have neither."""
        return bool(self.linear) or any(bound.kind == "tanh" for bound in (self.gate, self.result, self.up))

    @property
    def selects(self) -> bool:
        """Whether it passes on some gradients and no others, as ReLU does and what is between two ends: others are 0,
        be they no numbers."""
        return self.name in ("relu", "relu2") or any(b and b.kind != "tanh" for b in (self.gate, self.result, self.up))

    def of_gate(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """(the factor that `h`, the gate or the only GEMM's result, makes; its derivative)"""
        h, before = self.gate.of(h)
        f, slope = self._of_factors(h) if self.linear else FUNCTIONS[self.name](h, self.alpha)
        f, behind = self.result.of(f)
        for other in (before, behind):
            slope = slope if other is None else passed_on(slope * other, other)
        return f, slope

    def _of_factors(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """(`linear(h) * sigmoid(alpha * h)`, its derivative)"""
        x, within = self.linear.of(h)
        assert within is not None, self
        s = torch.sigmoid(self.alpha * h)
        return x * s, s * (within + self.alpha * x * (1 - s))

    def of_up(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """(the factor that `h`, the result of up, makes; its derivative, None for 1)"""
        h, slope = self.up.of(h)
        return h + self.offset if self.offset else h, slope
