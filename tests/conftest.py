"""How the suite is run: what has to be said before torch is imported, and which tests run. What they are run with is in
`tests/fixtures.py`, and left to the processes that run tests: one that hands them out to workers would import torch first,
for seconds in which no test runs.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import tempfile

import pytest

from tests import tiers

# A process that was killed may leave half a library behind in Inductor's cache, which every later run would load. Workers
# inherit the variable, and share what they compile. Torch sets it by itself while it is imported.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="megacpp_suite_")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

# Which vector instructions the compiler takes is otherwise tried out, for seconds in each new cache.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Tables are searched for words, which a narrow terminal would break.
os.environ["COLUMNS"] = "200"


def pytest_addoption(parser):
    tiers.add_option(parser)


def pytest_configure(config):
    if hasattr(config, "workerinput") or config.option.collectonly or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.fixtures")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getoption("dist") == "loadgroup":
        from tests.scheduling import Scheduling

        return Scheduling(config, log)


def pytest_collection_modifyitems(config, items):
    """Leaves out what the tier does not run. `TEST_ORDER=7` shuffles: no test needs another before it. Every worker does
    alike."""
    if left := set(tiers.left_out(tiers.tier_of(config), items)):
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=list(left))
    if order := os.environ.get("TEST_ORDER"):
        random.Random(order).shuffle(items)
