"""How much of the suite runs: `--tier unit`, `test` or `all`, by markers beside the tests.

    unit    what a change runs: no C++, no ranks, no other process (`make unit`)
    test    unit, and all that is marked `end_to_end` (`make test`, continuous integration)
    all     every test with all its parameters (`make test-all`, before a release)

Without the option the whole suite is `test`, and files or tests that are named run all they have. Markers:

    end_to_end          not in `unit`: through Inductor's C++, on two ranks, in another process, or seconds long
    exhaustive          in `all` alone: other tests take its branches
    sampled(n, unit=m)  of its sets of parameters one in n, and one in m (without, one in 3n) in `unit`; all in `all`. Of a
                        grid a diagonal runs, so that values of one parameter come beside several of another
    rare(*cases)        sets with these values of the parameter `case` are in `all` alone
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TIERS = ("unit", "test", "all")


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="how much of the suite runs; see tests/tiers.py")


def tier_of(config: pytest.Config) -> str:
    asked = {(config.invocation_params.dir / arg).resolve() for arg in config.args}
    return config.getoption("--tier") or ("test" if asked == {Path(__file__).parent} else "all")


def left_out(tier: str, items: list[pytest.Item]) -> list[pytest.Item]:
    """What a tier does not run of `items`."""
    return [] if tier == "all" else list(_left_out(tier, items))


def _left_out(tier: str, items: list[pytest.Item]) -> Iterator[pytest.Item]:
    families: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        rare = {case for mark in item.iter_markers("rare") for case in mark.args}
        if item.get_closest_marker("exhaustive") or case_of(item) in rare or (tier == "unit" and _is_end_to_end(item)):
            yield item
        elif item.get_closest_marker("sampled"):
            families[str(item.path), getattr(item, "originalname", item.name)].append(item)
    for family in families.values():
        ratio = _ratio(tier, family[0])
        yield from (item for item, place in zip(family, places(family), strict=True) if place % ratio)


def _is_end_to_end(item: pytest.Item) -> bool:
    on_ranks = any("ranks" in mark.args for mark in item.iter_markers("xdist_group"))
    return on_ranks or item.get_closest_marker("end_to_end") is not None


def _ratio(tier: str, item: pytest.Item) -> int:
    mark = item.get_closest_marker("sampled")
    assert mark is not None
    (ratio,) = mark.args
    return mark.kwargs.get("unit", 3 * ratio) if tier == "unit" else ratio


def places(family: list[pytest.Item]) -> list[int]:
    """For each set of parameters of a test the sum of its values' places, in which those that vary as one count once."""
    indices = [item.callspec.indices for item in family]  # type: ignore[attr-defined]
    return [sum(place) for place in zip(*{tuple(of[name] for of in indices) for name in indices[0]}, strict=True)]


def case_of(item: pytest.Item) -> str | None:
    """The value of the test's parameter `case`."""
    return item.callspec.params.get("case") if hasattr(item, "callspec") else None
