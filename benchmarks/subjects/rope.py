"""Split-RoPE-concat of MLA, alone: plain code under each compiler, our kernels, Megatron's.

The inputs are leaves here, so a compiler has to keep them and copy all of q; the kernels work in place, as they may
inside a model. The floor is that of working in place: the rope channels of q, and K, which is written once; V is a
view.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import kernels, models
from benchmarks.ceilings import Work
from benchmarks.harness import FORWARD, STEP, Case, Contestant, Runner, Settings, reference, run_case
from benchmarks.peers import megatron
from benchmarks.variants import contestants

NOPE, ROPE, V = 128, 64, 128


@dataclasses.dataclass(frozen=True)
class Layout:
    """`packed`: one token dimension and tables gathered by position. `heads_first`: transposed, as SDPA wants it."""

    name: str
    heads: int = 64
    style: str = "half"
    heads_first: bool = False
    packed: bool = False


LAYOUTS = (
    Layout("tokens first"),
    Layout("heads first, strided", heads_first=True),
    Layout("packed, gathered tables", packed=True),
    Layout("interleaved", style="interleaved"),
    Layout("28 heads", heads=28),
    Layout("1 head", heads=1),
    Layout("float32 tables", style="wide"),
)


@dataclasses.dataclass
class Problem:
    layout: Layout
    model: models.Rope
    inputs: tuple[Tensor, ...]  # q, kv, k_pe, cos, sin
    grads: tuple[Tensor, Tensor, Tensor]  # of q, k, v

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.inputs[:3]

    def reference(self) -> list[Tensor]:
        return reference(self.model, self.inputs, lambda wide: wide[:3], self.grads)


def problem(layout: Layout, batch: int, tokens: int, settings: Settings) -> Problem:
    device, dtype, heads = settings.device, torch.bfloat16, layout.heads
    outer = (batch * tokens,) if layout.packed else (batch, tokens)
    q, kv, k_pe = (
        torch.randn(*outer, *channels, device=device, dtype=dtype, requires_grad=True)
        for channels in ((heads, NOPE + ROPE), (heads, NOPE + V), (ROPE,))
    )
    cos, sin = models.rotary_tables(tokens, ROPE, device, torch.float32 if layout.style == "wide" else dtype)
    if layout.packed:  # sequences of many lengths, one behind the other
        position = torch.randint(tokens, outer, device=device)
        cos, sin = cos[position], sin[position]
    outer_out = (batch, heads, tokens) if layout.heads_first else (*outer, heads)
    grads = [torch.randn(*outer_out, n, device=device, dtype=dtype) for n in (NOPE + ROPE, NOPE + ROPE, V)]
    model = models.Rope(NOPE, ROPE, V, layout.style, layout.heads_first)
    return Problem(layout, model, (q, kv, k_pe, cos, sin), (grads[0], grads[1], grads[2]))


def work(p: Problem) -> dict[str, Work]:
    """Bytes: q's rope channels read and written; kv's nope channels and the shared row read, K written; and so back."""
    q, kv, k_pe, cos, sin = p.inputs
    tables = (cos.numel() + sin.numel()) * cos.element_size()
    forward, backward = moved(q[..., 0, 0].numel(), p.layout.heads, NOPE, ROPE, V, q.element_size(), tables)
    return {FORWARD: Work(bytes=forward), STEP: Work(bytes=forward + backward)}


def moved(tokens: int, heads: int, nope: int, rope: int, v: int, size: int, tables: int) -> tuple[int, int]:
    """Bytes of forward and backward, in place; `size` of an element, `tables` of both tables."""
    q_channels, k_channels = 2 * heads * rope, heads * (nope + rope)
    forward = tokens * size * (q_channels + heads * nope + rope + k_channels) + tables
    backward = tokens * size * (q_channels + k_channels + heads * v + heads * (nope + v) + rope) + tables
    return forward, backward


def ours_alone(p: Problem, tuned: bool) -> Callable[[], Runner]:
    """Our lowerings called directly, in place on q and on its gradient."""
    return lambda: kernels.mla_rope(p.layout, p.inputs, p.grads, NOPE, ROPE, tuned)


def cases(settings: Settings) -> Iterator[Case]:
    batch, tokens = (1, 16) if settings.quick else (4, 8192)
    times = kernels.times_eager(settings.device)
    for number, layout in enumerate(LAYOUTS):
        if settings.quick:
            layout = dataclasses.replace(layout, heads=min(layout.heads, 3))
        p = problem(layout, batch, tokens, settings)
        rows = contestants("rope", p.model, p.inputs, p.leaves, p.grads)
        rows.append(Contestant("our kernels, in place", "kernels", ours_alone(p, False), times_eager=times))
        if number == 0:
            tuned = Contestant("our kernels, in place, tuned", "kernels", ours_alone(p, True), times_eager=times)
            rows.append(tuned)
        rows += megatron.rope(layout, p.inputs, p.grads, NOPE, ROPE, V)
        sizes: dict[str, Any] = {"batch": batch, "tokens": tokens, "nope": NOPE, "rope": ROPE, "v": V}
        sizes["layout"] = dataclasses.asdict(layout)
        names = ("q", "k", "v", "grad q", "grad kv", "grad k_pe")
        yield Case("rope", layout.name, sizes, work(p), p.reference, rows, torch.bfloat16, names)


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    for case in cases(settings):
        yield from run_case(case, settings)
