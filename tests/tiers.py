"""How much of the suite runs: `--tier unit`, `test` or `all`, by markers beside the tests.

    unit    what a change runs: no C++, no ranks, no other process (`make unit`)
    test    unit, and all that is marked `end_to_end` (`make test`, continuous integration)
    all     every test with all its parameters (`make test-all`, before a release)

Without the option the whole suite is `test`, and files or tests that are named run all they have. Markers:

    end_to_end          not in `unit`: through Inductor's C++, on two ranks, in another process, or seconds long
    exhaustive          in `all` alone: other tests take its branches
    sampled(n, unit=m)  of its sets of parameters one in n, and one in m (without, one in 3n) in `unit`; all in `all`. Of a
                        grid those run that bring values which none before them has: a diagonal first
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
        kept = sample(family, _ratio(tier, family[0]))
        yield from (item for item in family if item not in kept)


def _is_end_to_end(item: pytest.Item) -> bool:
    on_ranks = any("ranks" in mark.args for mark in item.iter_markers("xdist_group"))
    return on_ranks or item.get_closest_marker("end_to_end") is not None


def _ratio(tier: str, item: pytest.Item) -> int:
    mark = item.get_closest_marker("sampled")
    assert mark is not None
    (ratio,) = mark.args
    return mark.kwargs.get("unit", 3 * ratio) if tier == "unit" else ratio


def sample(family: list[pytest.Item], ratio: int) -> list[pytest.Item]:
    """One in `ratio` of a test's sets of parameters, rounded up: next is always the set with most values that no set before
    it has, and among equals every `ratio`th in order. Those of one decorator are one value."""
    # Values are told apart as objects: `callspec.indices` counts sets of parameters (pytest 9), not values.
    params = [item.callspec.params for item in family]  # type: ignore[attr-defined]
    together = [_names(mark) for mark in family[0].iter_markers("parametrize")]
    together += [[name] for name in params[0] if not any(name in names for names in together)]
    values = [{tuple((name, id(of[name])) for name in names) for names in together} for of in params]
    left = sorted(range(len(family)), key=lambda i: (i % ratio, i))
    kept: list[pytest.Item] = []
    seen: set[tuple[tuple[str, int], ...]] = set()
    for _ in range(-(-len(family) // ratio)):
        found = max(left, key=lambda i: len(values[i] - seen))
        left.remove(found)
        seen |= values[found]
        kept.append(family[found])
    return kept


def _names(mark: pytest.Mark) -> list[str]:
    names = mark.args[0] if mark.args else mark.kwargs["argnames"]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def case_of(item: pytest.Item) -> str | None:
    """The value of the test's parameter `case`."""
    return item.callspec.params.get("case") if hasattr(item, "callspec") else None
