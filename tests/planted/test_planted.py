"""Every fault fits the package as it is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.planted.faults import FAULTS, KINDS

ROOT = Path(__file__).parents[2]


def test_there_are_as_many_as_promised():
    assert Counter(fault.kind for fault in FAULTS) == KINDS
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 40


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_can_be_planted(fault):
    """Its line is there once, what becomes of it is Python, and the tests that it names are there."""
    source = (ROOT / fault.file).read_text()
    assert source.count(fault.old) == 1 and fault.old != fault.new
    compile(source.replace(fault.old, fault.new), fault.file, "exec")
    assert fault.tests and all((ROOT / test).exists() for test in fault.tests)
    assert fault.why.endswith(".") and fault.name == fault.name.lower().replace(" ", "-")
