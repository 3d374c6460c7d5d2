"""What XLA is given of a plain MLA block, and what it makes of that, beside plain openxla."""

from __future__ import annotations

import pytest

from benchmarks.xla_programs import run

SMALL = "--tokens 16 --dim 64 --heads 2 --head 16 --steps 1".split()


@pytest.fixture(scope="module")
def rows(xla):
    return {name: run(name, SMALL) for name in ("openxla", "megacpp")}


def test_the_block_is_fused_with_static_shapes_and_nothing_on_the_host(rows):
    assert {name: row["sites"] for name, row in rows.items()} == {"openxla": 0, "megacpp": 4}
    assert {row["programs"] for row in rows.values()} == {2}  # forward and backward
    assert rows["megacpp"]["dynamic"] == 0 and rows["megacpp"]["fallen"] == [], rows


@pytest.mark.parametrize("kind", ["given elementwise", "given moves", "moves", "moves in all"])
def test_less_beside_the_products(rows, kind):
    assert rows["megacpp"][kind] < rows["openxla"][kind], rows


@pytest.mark.parametrize("kind", ["dots", "elementwise"])
def test_no_more_products_and_no_more_launched_outside_of_fusions(rows, kind):
    assert rows["megacpp"][kind] <= rows["openxla"][kind], rows
