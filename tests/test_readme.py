"""The program of docs/first_report.md runs and prints what the page says it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "first_report.md"


def _settled(text):
    # Times vary, and with them and the path column widths; words and numbers do not.
    text = re.sub(r"\d+\.\d+$", "T", text, flags=re.M)
    return [line for line in (" ".join(re.sub("[─]+", "", line).split()) for line in text.splitlines()) if line]


def test_the_example_prints_what_it_says(tmp_path):
    pytest.importorskip("rich")  # without it the same table is printed plainly
    text = PAGE.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    shown = re.search(r"```text\n(.*?)```", text, re.S).group(1)
    (tmp_path / "example.py").write_text(code)
    # As on its first run, when nothing comes from a cache.
    caches = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    env = {**os.environ, **caches, "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert _settled(done.stdout) == _settled(shown)
