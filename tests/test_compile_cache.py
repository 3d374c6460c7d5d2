"""Compiled code that goes from one process to another in a file, and files that are of no use."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megacpp_compile import load_cache, save_cache
from megacpp_compile.errors import CompileCacheError

ROOT = Path(__file__).parents[1]
# Both processes are forks of one that has torch loaded, and nothing compiled.
PROCESSES = """
import json, os, sys
import torch
import torch._inductor.compile_fx
import megacpp_compile
from torch import nn

path, *folders = sys.argv[1:]
torch._inductor.config.cpp.simdlen = 1  # scalar C++ compiles in a part of the time


def run(action):
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.Linear(32, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, 32, bias=False)), torch.randn(4, 32)
    loaded = megacpp_compile.load_cache(path, strict=True) if action == "load" else None
    with megacpp_compile.record() as report:
        out = torch.compile(block, backend="megacpp")(x)
        out.square().sum().backward()
    held = megacpp_compile.save_cache(path) if action == "save" else loaded
    torch.testing.assert_close(out, block(x))
    return {
        "out": out.tolist(), "grad": block[0].weight.grad.tolist(), "artifacts": held.artifacts, "bytes": held.bytes,
        "cached": [frame.cached for frame in report.frames], "fired": report.counts["down_norm_up"],
    }


torch.set_num_threads(1)
for action, folder in zip(("save", "load"), folders):
    if (child := os.fork()) == 0:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        print(json.dumps(run(action)), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, action
"""


def saved_and_loaded(path, *caches):
    """What the one process made and the other found; each has a folder of its own for what Inductor keeps."""
    environ = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "1")}
    command = [sys.executable, "-c", PROCESSES, str(path), *map(str, caches)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.end_to_end
def test_code_goes_from_one_process_to_another(tmp_path):
    path = tmp_path / "model.cache"
    first, again = saved_and_loaded(path, tmp_path / "first", tmp_path / "second")
    assert list((tmp_path / "first").iterdir()) and list((tmp_path / "second").iterdir())
    assert first["cached"] == [False] and again["cached"] == [True]
    assert first["fired"] == again["fired"] == 1
    assert first["artifacts"]["inductor"] >= 1 and first["artifacts"] == again["artifacts"]
    assert first["bytes"] == again["bytes"] == path.stat().st_size
    assert (first["out"], first["grad"]) == (again["out"], again["grad"])
    assert list(tmp_path.glob("*.partial")) == []


@pytest.fixture
def file(tmp_path, monkeypatch):
    info = torch.compiler._cache.CacheInfo()
    info.artifacts["inductor"].append("key")
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"payload", info))
    read = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda payload: read.append(payload) or info)
    save_cache(tmp_path / "code")
    assert load_cache(tmp_path / "code", strict=True).artifacts == {"inductor": 1} and read == [b"payload"]
    return tmp_path / "code"


@pytest.mark.parametrize("what", ["device", "machine", "python", "torch", "megacpp_compile"])
def test_a_file_of_something_else(what, file, caplog):
    magic, head, payload = file.read_bytes().split(b"\n", 2)
    found = json.loads(head)
    found["made_by"][what] = "another"
    file.write_bytes(b"\n".join((magic, json.dumps(found).encode(), payload)))
    with pytest.raises(CompileCacheError, match=rf"{re.escape(str(file))}: {what} was 'another' where it was made"):
        load_cache(file, strict=True)
    with caplog.at_level(logging.WARNING, "megacpp_compile"):
        assert load_cache(file) is None
    assert "The model is compiled anew." in caplog.text


@pytest.mark.parametrize(("blob", "why"), [
    *((blob, "it is no file of `save_cache`") for blob in (
        b"", b"a model's weights", b"megacpp_compile cache 1\nhead without end",
    )),
    *((b"megacpp_compile cache 1\n" + head, "its header cannot be read") for head in (b"{}\n", b"not json\n")),
])  # fmt: skip
def test_a_file_that_is_none(blob, why, tmp_path):
    (tmp_path / "code").write_bytes(blob)
    with pytest.raises(CompileCacheError, match=why):
        load_cache(tmp_path / "code", strict=True)


@pytest.mark.parametrize("answer", [None, ValueError("truncated")])
def test_artifacts_that_torch_cannot_read(answer, file, monkeypatch):
    def read(payload):
        if answer is not None:
            raise answer

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", read)
    with pytest.raises(CompileCacheError, match="torch cannot read its artifacts" + (": ValueError: truncated" if answer else "")):
        load_cache(file, strict=True)
    assert load_cache(file) is None


def test_no_file_and_nothing_to_save(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        load_cache(tmp_path / "none")
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    with pytest.raises(CompileCacheError, match="nothing has been compiled in this process"):
        save_cache(tmp_path / "code")
    assert not (tmp_path / "code").exists()
