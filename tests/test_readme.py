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
    text = re.sub(r"\b\d+\.\d\d\b", "T", text)
    return [line for line in (" ".join(re.sub("[─]+", "", line).split()) for line in text.splitlines()) if line]


def test_the_example_prints_what_it_says(tmp_path, monkeypatch, capsys, no_kernels):
    """Kernels are left out: the report is made before there are any."""
    pytest.importorskip("rich")  # without it the same table is printed plainly
    text = PAGE.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    shown = re.search(r"```text\n(.*?)```", text, re.S).group(1)
    (tmp_path / "example.py").write_text(code)
    torch._dynamo.reset()
    monkeypatch.setenv("COLUMNS", "120")
    with inductor_config.patch(fx_graph_cache=False):  # as on its first run
        runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
    assert _settled(capsys.readouterr().out) == _settled(shown)
