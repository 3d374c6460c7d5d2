"""The programs of README and docs/first_report.md run and print what the pages say they print."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor_config

import megacpp_compile
from megacpp_compile.report import pieces

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "first_report.md"


COSTLIEST = re.compile(r"costliest pieces of compiling.*?(?=\nmegacpp tags)", re.S)


def _settled(text):
    # Times vary, and with them and the path column widths, and which pieces are the costliest; words and numbers do not.
    text = COSTLIEST.sub("", text)
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
    printed = capsys.readouterr().out
    assert _settled(printed) == _settled(shown)
    for text in (printed, shown):
        rows = re.findall(r"^ (\d+\.\d\d) +0 ", COSTLIEST.search(text)[0], re.M)
        assert len(rows) == pieces.MOST and rows == sorted(rows, key=float, reverse=True)


@pytest.mark.end_to_end
def test_readme_s_report_is_part_of_what_is_printed(tmp_path, monkeypatch, no_kernels):
    pytest.importorskip("rich")
    text = (ROOT / "README.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "class Attention" in block)
    (tmp_path / "ex.py").write_text(f"import torch\n{code}")
    monkeypatch.setenv("COLUMNS", "120")
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False), megacpp_compile.record() as report:
        runpy.run_path(str(tmp_path / "ex.py"), run_name="__main__")
    shown = _settled(re.search(r"```text\n(.*?)```", text, re.S).group(1))
    line = next(line for line in shown if "ex.py:" in line)
    printed = [re.sub(r"ex\.py:\d+", re.search(r"ex\.py:\d+", line)[0], each) for each in _settled(str(report))]
    assert [each for each in shown if each not in printed] == []
