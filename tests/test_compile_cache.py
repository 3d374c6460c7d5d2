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
from megacpp_compile._torch._registry import release
from megacpp_compile.errors import CompileCacheError

ROOT = Path(__file__).parents[1]
CALLABLES = release(torch.__version__) >= (2, 13)
# Every process is a fork of one that has torch loaded, and Dynamo and Inductor's passes set up by a linear, of which no
# code was made and nothing is kept.
PROCESSES = """
import contextlib, copy, functools, io, json, os, shutil, sys
import torch
import torch._inductor.compile_fx
import megacpp_compile
from functorch.compile import make_boxed_func
from megacpp_compile import cli
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder

torch._inductor.config.cpp.simdlen = 1  # scalar C++ compiles in a part of the time


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(32, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, 32, bias=False)

    def forward(self, x):
        self.up.weight.data.clamp_(-0.3, 0.3)  # runs ahead of the frame
        logits = self.up(self.norm(self.down(x)))
        return logits.square().sum(), logits


def build():
    torch.manual_seed(0)
    return Block(), (torch.randn(4, 32),)


def error(call):
    try:
        call()
    except Exception as found:
        return f"{type(found).__name__}: {found}"


def without_compilers(action):
    # Nothing is captured here, and no compiler runs.
    built, build_command = [], cpp_builder.run_compile_cmd
    cpp_builder.run_compile_cmd = lambda *args: built.append(args) or build_command(*args)
    model, (x,) = build()
    with megacpp_compile.record() as report:
        if action == "ahead":
            model = megacpp_compile.load_compiled(path, model, options={"drop_outputs": "logits"})
        else:
            torch._dynamo.config.caching_precompile = True
            model = torch.compile(model, backend="megacpp", options={"drop_outputs": "logits"})
        loss, dropped = model(x)
        loss.backward()
    eager, _ = build()
    (expected, _) = eager(x)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, p in eager.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, p.grad)
    found = {"built": len(built), "frames": len(report.frames), "stats": dict(counters["stats"]), "dropped": repr(dropped)}
    if action == "ahead":
        with torch.no_grad():
            for p in (*model.parameters(), *eager.parameters()):
                p.mul_(0.5)
            inference = error(lambda: model(x))
            copied = copy.deepcopy(model)
            copied.up.weight.zero_()
        assert copied(x)[0].item() == 0 != model(x)[0].item()
        torch.testing.assert_close(model(x)[0], eager(x)[0])
        found["errors"] = {
            "inference": inference,
            "shape": error(lambda: model(x[:3])),
            "dtype": error(lambda: model(x.double())),
            "option": error(lambda: megacpp_compile.load_compiled(path, eager, options={"policy": "selective"})),
            "class": error(lambda: megacpp_compile.load_compiled(path, nn.Linear(1, 1))),
        }
        del model.forward
        found["undone"] = model(x[:3])[0].item() == eager(x[:3])[0].item()
    return found


def written(action):
    model, (x,) = build()
    if action == "compile":
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert cli.main(["compile", "__main__:build", "-o", path, "--option", "drop_outputs=logits", "--json"]) == 0
        printed = json.loads(out.getvalue())
        return {"file": printed["file"], "costs": printed["costs"]}
    else:
        torch._dynamo.config.caching_precompile = True
        torch.compile(model, backend="megacpp", options={"drop_outputs": "logits"})(x)[0].backward()
        assert torch.compiler.save_cache_artifacts()[1].artifacts["precompile"]
    return {}


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
code = lambda gm, inputs, **_: make_boxed_func(gm.forward)
with torch._functorch.config.patch(enable_autograd_cache=False):
    plain = functools.partial(torch._inductor.compile_fx.compile_fx, inner_compile=code)
    torch.compile(nn.Linear(2, 2), backend=plain)(torch.ones(1, 2)).sum().backward()
torch._dynamo.reset()
counters.clear()
what = {"save": run, "load": run, "compile": written, "ahead": without_compilers,
        "precompile": written, "precompiled": without_compilers}
before = None
for action, folder, path in (place.split("=") for place in sys.argv[1:]):
    if action == "precompiled":
        shutil.move(before, folder)  # Dynamo's own cache is a part of the folder, wherever that is
    before = folder
    if (child := os.fork()) == 0:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        print(json.dumps({action: what[action](action)}), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, action
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """(a folder, what each process says, by its action). Each has a folder there for what Inductor keeps, and a file that
    it writes or reads."""
    home = tmp_path_factory.mktemp("compiled")
    places = [("save", "first", "model.cache"), ("load", "second", "model.cache")]
    if CALLABLES:
        places += [("compile", "third", "model.code"), ("ahead", "fourth", "model.code"),
                   ("precompile", "third", "model.code"), ("precompiled", "moved", "model.code")]  # fmt: skip
    environ = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "1")}
    environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # scalar code asks for none
    asked = [f"{action}={home / folder}={home / file}" for action, folder, file in places]
    command = [sys.executable, "-c", PROCESSES, *asked]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    return home, {action: said for line in lines for action, said in line.items()}


@pytest.mark.end_to_end
@pytest.mark.xdist_group("compiled code")
def test_code_goes_from_one_process_to_another(processes):
    home, said = processes
    first, again = said["save"], said["load"]
    assert list((home / "first").iterdir()) and list((home / "second").iterdir())
    assert first["cached"] == [False] and again["cached"] == [True]
    assert first["fired"] == again["fired"] == 1
    assert first["artifacts"]["inductor"] >= 1 and first["artifacts"] == again["artifacts"]
    assert first["bytes"] == again["bytes"] == (home / "model.cache").stat().st_size
    assert (first["out"], first["grad"]) == (again["out"], again["grad"])
    assert list(home.glob("*.partial")) == []


@pytest.mark.skipif(not CALLABLES, reason="torch has no callables for what runs beside a graph")
@pytest.mark.end_to_end
@pytest.mark.xdist_group("compiled code")
def test_code_compiled_ahead_runs_elsewhere(processes):
    """Whole graphs, from a file and from Dynamo's own cache, with what runs around them, in a process with an empty
    folder: no frame is captured, nothing is compiled, gradients are eager's, and a call that does not fit is told."""
    home, said = processes
    path = home / "model.code"
    costs = said["compile"]["costs"]
    assert said["compile"]["file"] == str(path) and len(costs) == 10
    assert [cost["seconds"] for cost in costs] == sorted((cost["seconds"] for cost in costs), reverse=True)
    assert "C++ compiler" in {cost["kind"] for cost in costs}
    for action in ("ahead", "precompiled"):
        found = said[action]
        assert (found["built"], found["frames"], found["stats"]) == (0, 0, {}), found
        assert found["dropped"] == "<logits, dropped by the option 'drop_outputs'>"
    assert said["ahead"]["undone"]
    for what, text in {
        "inference": "its code is not for this call: grad mode has changed",
        "shape": "its code is not for this call: x has size 3 in dimension 0, and had 4",
        "dtype": "its code is not for this call: x is Double, and was Float",
        "option": "option 'drop_outputs' was ('logits',) where it was made, and is the default",
        "class": "the model was Block where it was made, and is Linear",
    }.items():
        assert said["ahead"]["errors"][what].startswith(f"CompileCacheError: {path}: {text}. "), said["ahead"]["errors"]


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


@pytest.mark.parametrize("what", ["device", "processor", "machine", "python", "torch", "triton", "megacpp_compile"])
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
