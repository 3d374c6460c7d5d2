"""The tutorial of rules: its files are the example package, which is run as if it were installed."""

from __future__ import annotations

import importlib
import sys
import tomllib

import pytest
import torch

import megacpp_compile
from megacpp_compile.config import registered
from megacpp_compile.config.options import Config
from megacpp_compile.passes._driver import pass_names
from tests.docs.commands import ROOT
from tests.frames import Function, check

PACKAGE = ROOT / "examples" / "rule_package"
FILES = ("pyproject.toml", "clamp_rules.py", "test_clamp_rules.py")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package's files and metadata on the path, as pip leaves them."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"clamp_rules-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    (info / "entry_points.txt").write_text(
        "\n".join(f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in points.items()) for group, points in groups)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(PACKAGE))
    for name in ("clamp_rules", "test_clamp_rules"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    registered._loaded.clear()
    torch.compiler.reset()


def test_the_page_has_the_package_s_files_which_are_short():
    page = (ROOT / "docs" / "rules.md").read_text()
    texts = [(PACKAGE / name).read_text() for name in FILES]
    assert all(f"\n{text.rstrip()}\n```" in page for text in texts), "docs/rules.md shows examples/rule_package"
    assert sorted(FILES) == sorted(path.name for path in PACKAGE.iterdir() if path.is_file())
    assert sum(len(text.splitlines()) for text in texts) <= 60 and len(texts[1].splitlines()) <= 40


def test_the_package_s_own_test(installed, no_kernels):
    importlib.import_module("test_clamp_rules").test_two_clamps_become_one()
    assert "merge_clamps" in pass_names()


BOUNDS = [(-0.5, 0.9), (None, 0.3), (-0.2, None), (0.0, 0.4), (0.1, -0.1), (1.0, 2.0), (-2.0, -1.0), (-0.5, 0.0)]


def test_what_the_rule_makes_is_what_it_replaces(installed, no_kernels):
    """Every pair of bounds, at the bounds themselves, on infinities and NaN, with gradients."""
    x = torch.tensor([*torch.linspace(-2.2, 2.2, 45), *{b for pair in BOUNDS for b in pair if b is not None}, -torch.inf, torch.inf])
    fired = 0
    for first in BOUNDS:
        for second in BOUNDS:
            frames = check(Function(lambda x, a=first, b=second: x.neg().clamp(*a).clamp(*b)), (x.clone().requires_grad_(),),
                           Config(strict=True), tolerance=0.0)  # fmt: skip
            fired += frames.counts["merge_clamps"]
            assert frames.counts["merge_clamps"] or frames.tags("merge_clamps") == {"bounds"}
    assert fired == 29
    nan = torch.tensor([torch.nan, 1.0, -1.0])
    for of in (torch.float32, torch.bfloat16, torch.int64):
        given = nan.nan_to_num(3).to(of) if of is torch.int64 else nan.to(of)
        f = Function(lambda x: x.neg().clamp(0, 4).clamp(max=2))
        assert fired_exactly(f, given) == 1


def fired_exactly(f, given):
    """How often the rule fires in `f`, whose result is eager's bit for bit."""
    with megacpp_compile.record() as report:
        got = torch.compile(f, backend="megacpp")(given)
    assert torch.equal(got.nan_to_num(77), f(given).nan_to_num(77)) and got.dtype == f(given).dtype
    return report.counts["merge_clamps"]
