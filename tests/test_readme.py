"""The program of docs/first_report.md runs and prints what the page says it prints."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor_config

PAGE = Path(__file__).parent.parent / "docs" / "first_report.md"


def _settled(text):
    # Times vary, and with them and the path column widths; words and numbers do not.
    lines = re.sub("[─]+", "", re.sub(r"\b\d+\.\d\d\b", "T", text)).splitlines()
    return [" ".join(line.split()) for line in lines if line.split()]


@pytest.mark.end_to_end
def test_the_example_prints_what_it_says(tmp_path, monkeypatch, capsys, no_kernels):
    """Kernels are left out: the report is made before there are any."""
    pytest.importorskip("rich")  # without it the same table is printed plainly
    code, shown = (re.search(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.S).group(1) for kind in ("python", "text"))
    (tmp_path / "example.py").write_text(code)
    torch._dynamo.reset()
    monkeypatch.setenv("COLUMNS", "120")
    with inductor_config.patch(fx_graph_cache=False):  # as on its first run
        runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
    assert _settled(capsys.readouterr().out) == _settled(shown)
