"""Fields of an estimate: streams of a residual, as in hyper-connections (arXiv:2409.19606).

What a block has computed is written to every one of a few streams with a weight of its own: an outer product that is
added to something as large. That sum are the streams, and what it was added to holds those of before, mixed or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megacpp_compile.memory.made import Made

_STREAMS, _MIXING = "residual streams", "stream mixing"


def mark_streams(order: Sequence[Made]) -> None:
    """Put streams and what mixes them in their fields. order: all that was made, as it was made."""
    streams, one = _streams(order)
    wide: set[Made] = set()  # made of streams and coefficients alone, and as large as streams
    coefficients: set[Made] = set()
    least = min((m.numel for m in streams), default=0)
    for made in order if streams else ():
        if made in streams:
            made.field = _STREAMS
            continue
        within = [p for p in made.parents if p in streams or p in wide or p in coefficients]
        others = [p for p in made.parents if p not in within and p.computed]  # the rest is of parameters
        if not within or others or made.field not in ("elementwise", "GEMM results"):
            continue
        made.field = _MIXING
        by_weights = made.gemm and not made.few
        if made.numel >= least and not by_weights and not all(p in coefficients for p in within):
            wide.add(made)
        elif by_weights or made.numel < one or all(p in coefficients for p in within):
            coefficients.add(made)  # else it is what a block reads, and what is made of that is the block's


def _streams(order: Sequence[Made]) -> tuple[set[Made], int]:
    """Results that are streams, and the elements of one stream."""
    found: set[Made] = set()
    one = 0
    for made in order if any(m.written for m in order) else ():
        alike = [p for p in made.parents if p.numel == made.numel]
        adds = [p for p in alike if p.written]
        if made.op == "aten::add" and len(alike) == 2 and len(adds) == 1:
            found.add(made)
            one = adds[0].written
            before = next(p for p in alike if p is not adds[0])
            if before not in found:
                found.update(_unmixed(before))
    return found, one


def _unmixed(before: Made) -> Iterator[Made]:
    """The streams that `before` is a mix of, or itself."""
    mixed = [before] if before.gemm else [p for p in before.parents if p.numel > before.numel]  # a weighted sum
    yield from (p for m in mixed for p in m.parents if p.numel == before.numel)
    if not mixed:
        yield before
