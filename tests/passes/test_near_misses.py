"""What stands right beside an idiom stays plain; the idiom beside it is found."""

from __future__ import annotations

import functools

from tests.corpus.near_misses import NEAR_MISSES
from tests.frames import check_graph, run

from .conditions import sampled


@functools.cache
def _fired(body, arguments) -> dict[str, int]:
    """What fires in a control; many near misses share one."""
    near_miss = next(n for n in NEAR_MISSES if n.control is not None and _key(n.control) == (body, arguments))
    return run(*near_miss.control()).fired


def _key(control):
    return control.args, tuple(sorted(control.keywords.items()))


@sampled(5, "near_miss", NEAR_MISSES, ids=lambda n: n.name)
def test_near_miss(near_miss):
    frames = check_graph(*near_miss.build())
    false = {name: frames.counts[name] for name in near_miss.must_not_fire if frames.counts[name]}
    assert not false, f"fired although {near_miss.why}"
    if near_miss.control is not None:
        fired = _fired(*_key(near_miss.control))
        assert set(near_miss.must_not_fire) <= fired.keys(), "the idiom itself is not found, so silence proves nothing"
