"""A plugin for pytest: collects files of some paths alone, and writes down the first test that fails.

Where the whole suite is asked for and these paths with it, a suite that leaves tests out of its runs leaves these out of
the paths, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--planted-only", action="append", default=[], metavar="PATH", help="collect nothing beside it")
    parser.addoption("--planted-seen", metavar="FILE", help="write the name of the first test that fails")


def _inside(config: pytest.Config, path: Path) -> bool:
    """Whether tests of `path` are asked for."""
    only = [config.rootpath / name for name in config.getoption("--planted-only")]
    return not only or any(path.is_relative_to(one) for one in only)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of folders those that hold such paths are gone through, too."""
    on_the_way = collection_path.is_dir() and any(
        (config.rootpath / name).is_relative_to(collection_path) for name in config.getoption("--planted-only")
    )
    return None if on_the_way or _inside(config, collection_path) else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is tested is the copy, whatever package is installed."""
    import megacpp_compile

    assert Path(megacpp_compile.__file__).is_relative_to(config.rootpath), megacpp_compile.__file__
    items[:] = [item for item in items if _inside(config, item.path)]


class _Seen:
    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.file.exists():
            self.file.write_text(report.nodeid)


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--planted-seen"):
        config.pluginmanager.register(_Seen(Path(file)), "the first test that fails")
