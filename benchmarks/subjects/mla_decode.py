"""Absorbed attention of one new token over cached latent rows, alone: rows in bfloat16, in fp8 and at 4 bits a channel.

The plain form is scaled_dot_product_attention over the rows in bfloat16, shared by all heads, of which all are valid.
It is judged, as ours is, against the op's reference in float32 on the same rows. Bytes are those of the rows as they
are stored, read once, and of queries and results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.ceilings import Work
from benchmarks.harness import FORWARD, Case, Contestant, Runner, Settings, run_case


@dataclasses.dataclass(frozen=True)
class Size:
    name: str
    batch: int
    heads: int
    rows: int
    d_qk: int = 576
    d_v: int = 512


SIZES = tuple(
    Size(f"{heads} heads, batch {batch}, {rows} rows", batch, heads, rows)
    for heads, batch, rows in ((16, 1, 65536), (16, 16, 8192), (16, 16, 65536), (16, 64, 65536), (128, 16, 65536))
)
QUICK = (Size("3 heads, batch 2, 40 rows", 2, 3, 40, 24, 16),)
KINDS = ("bfloat16", "fp8", "4 bits")


def stored(kind: str, size: Size, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(rows, row_scale, codebook) as `megacpp::mla_decode` takes them."""
    shape = size.batch, size.rows
    if kind == "4 bits":
        payload = torch.randint(0, 256, (*shape, size.d_qk // 2), device=device, dtype=torch.uint8)
        return payload, torch.rand(*shape, 2, device=device) + 0.5, torch.linspace(-2, 2, 16, device=device)
    rows = torch.randn(*shape, size.d_qk, device=device, dtype=torch.bfloat16)
    if kind == "bfloat16":
        return rows, None, None
    scale = rows.abs().amax(-1, keepdim=True).float() / 448
    return (rows / scale).to(torch.float8_e4m3fn), scale, None


def case(kind: str, size: Size, device: torch.device) -> Case:
    from megacpp_compile.lowerings.mla_decode import reference

    rows, row_scale, codebook = stored(kind, size, device)
    q = torch.randn(size.batch, 1, size.heads, size.d_qk, device=device, dtype=torch.bfloat16)
    lengths = torch.full((size.batch,), size.rows, dtype=torch.int32, device=device)
    rest: Any = lengths, row_scale, codebook, size.d_qk**-0.5, size.d_v
    wide = reference.decoded(rows, row_scale, codebook, size.d_v, torch.bfloat16)

    def plain() -> Tensor:
        keys = wide.unsqueeze(1)
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), keys.expand(-1, size.heads, -1, -1), keys[..., : size.d_v].expand(-1, size.heads, -1, -1)
        )
        return out.transpose(1, 2)

    def row(name: str, what: str, call: Callable[[], Tensor]) -> Contestant:
        return Contestant(name, what, lambda: Runner({FORWARD: call}, lambda: [call()]))

    contestants = [
        row("eager, rows in bfloat16", "eager", plain),
        row(f"megacpp::mla_decode, rows in {kind}", "ours", lambda: torch.ops.megacpp.mla_decode(q, rows, *rest)[0]),
    ]
    flops = 2.0 * size.batch * size.heads * size.rows * (size.d_qk + size.d_v)
    held = rows.nbytes + (0 if row_scale is None else row_scale.nbytes)
    work = {FORWARD: Work(held + q.nbytes + q.nbytes * size.d_v // size.d_qk, flops)}

    def judged() -> list[Tensor]:
        exact = rows.float() if kind == "bfloat16" else rows
        return [reference.mla_decode(q.float(), exact, *rest)[0]]

    return Case("mla_decode", f"{size.name}, {kind}", dataclasses.asdict(size), work, judged, contestants,
                torch.bfloat16, ("output",))  # fmt: skip


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    for size in QUICK if settings.quick else SIZES:
        for kind in KINDS:
            yield from run_case(case(kind, size, settings.device), settings)
