"""Inductor's on-disk caches: a second process compiles nothing, and whatever can change the code misses.

What has to hit is the first step of a process of its own, as caches in memory would hide what lies on disk; a miss may
follow in the same one. The processes share one cache directory, which has moved to another place when the first is
done. All but the first are forks of one that has torch loaded, has set it up by a linear of which no code is made, and
has not loaded the package: their hash seed is not that of the first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megacpp_compile
from megacpp_compile.fx import inductor_pass

pytestmark = pytest.mark.xdist_group("cache")  # one worker, one cache

SCRIPT = '''
import functools, json, os, sys
import torch
import torch._inductor.compile_fx  # by itself what each fork would import anew, for seconds
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.utils import counters

class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(8, 6), nn.RMSNorm(6), nn.Linear(6, 8, bias=False)
    def forward(self, x):
        return self.up(self.norm(self.down(x))).tanh()

def step(**options):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    options = {"policy": "selective", **options}
    model = torch.compile(Projections(), backend="megacpp", options=options, fullgraph=True)
    import megacpp_compile
    with megacpp_compile.record() as report:
        loss = model(torch.ones(2, 3, 8)).square().sum()
        loss.backward()
    return {
        "package": megacpp_compile.__file__,
        "inductor": {k: v for k, v in counters["inductor"].items() if k.startswith("fxgraph_cache")},
        "autograd": {k: v for k, v in counters["aot_autograd"].items() if k.startswith("autograd_cache")},
        "loss": loss.item(),
        "report": report.to_dict(),
        "text": str(report),
    }

def forked(root, steps):
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        sys.path.insert(0, root)
        try:
            result = [step(**options) for options in steps]
        except BaseException:
            import traceback
            result = traceback.format_exc()[-3000:]
        with os.fdopen(write, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)

torch.set_num_threads(1)
torch._inductor.config.cpp.simdlen = 1  # scalar C++ compiles in a part of the time
code = lambda gm, inputs, **_: make_boxed_func(gm.forward)
with torch._functorch.config.patch(enable_autograd_cache=False):
    plain = functools.partial(torch._inductor.compile_fx.compile_fx, inner_compile=code)
    torch.compile(nn.Linear(2, 2), backend=plain)(torch.ones(1, 2)).sum().backward()
assert "megacpp_compile" not in sys.modules
print(json.dumps([forked(root, steps) for root, steps in json.loads(sys.argv[1])]))
'''


class Runner:
    def __init__(self, home: Path) -> None:
        self.home, self.cache = home, home / "cache"
        (home / "step.py").write_text(SCRIPT)

    def __call__(self, *jobs: tuple[Path, list[dict[str, Any]]]):
        """What training steps, each with its options, met in the caches one after the other: for each job in a process of
        its own, with the package of that folder."""
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("MEGACPP_", "TORCHINDUCTOR_"))},
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache),
            "PYTHONPATH": "",
            "OMP_NUM_THREADS": "1",
            # A pool of compilers costs a process that compiles two kernels more than it saves.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_VEC_ISA_OK": "0",
        }
        given = json.dumps([(str(root), steps) for root, steps in jobs])
        command = [sys.executable, str(self.home / "step.py"), given]
        done = subprocess.run(command, env=environ, cwd=self.home, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        results = json.loads(done.stdout.splitlines()[-1])
        for (root, _), steps in zip(jobs, results, strict=True):
            assert isinstance(steps, list), steps
            assert all(Path(result["package"]).is_relative_to(root) for result in steps)
        return results


def hit(result) -> bool:
    """True: all graphs came from disk. False: all were compiled. Anything in between is an error."""
    found = result["inductor"]
    hits, misses = found.get("fxgraph_cache_hit", 0), found.get("fxgraph_cache_miss", 0)
    assert not found.get("fxgraph_cache_bypass"), "something in the settings keeps Inductor from caching"
    assert (hits == 0) != (misses == 0), found
    return hits > 0


SOURCE = Path(megacpp_compile.__file__).parent


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A runner whose cache holds one training step, with what that step met, and what it met in other processes: the same
    step and one with an option, one of a copy of the package that explains, and one of a copy with another source."""
    runner = Runner(tmp_path_factory.mktemp("cache"))
    copied, changed = (copy_to(tmp_path_factory.mktemp(name)) for name in ("copy", "changed"))
    with (changed / SOURCE.name / "passes/down_norm_up.py").open("a") as file:
        file.write("# another version\n")  # which edits matter is nobody's to guess
    root = SOURCE.parent
    ((runner.first,),) = runner((root, [{}]))
    runner.cache = runner.cache.rename(runner.home / "elsewhere")  # what lies in it is to serve wherever it lies
    jobs = (root, [{}, {"disable": "mla_rope_q"}]), (copied, [{"explain": True}]), (changed, [{}])
    (runner.again, runner.with_an_option), (runner.moved,), (runner.changed,) = runner(*jobs)
    return runner


def copy_to(root):
    """With its bytecode, which would take a second to make anew."""
    shutil.copytree(SOURCE, root / SOURCE.name)
    return root


# What a process met -> whether all graphs came from disk.
HITS = {
    "first": False,
    "again": True,
    "with_an_option": False,  # even one that leaves this very graph as it is: the pass has nothing to do here
    "moved": True,  # what counts is what the sources say, not where they are; and `explain` only prints
    "changed": False,  # a comment will do
}


@pytest.mark.end_to_end
@pytest.mark.parametrize("which", HITS)
def test_what_hits(run, which):
    assert hit(getattr(run, which)) == HITS[which]


@pytest.mark.end_to_end
def test_second_process_hits(run):
    assert run.first["autograd"] == {"autograd_cache_miss": 1, "autograd_cache_saved": 1}
    # AOTAutograd's own cache, keyed by the rewritten graph, spares partitioning too.
    assert run.again["autograd"] == {"autograd_cache_hit": 1} and run.again["loss"] == run.first["loss"]


@pytest.mark.end_to_end
def test_the_report_of_cached_code_says_so(run):
    """All that is found out before code is generated is in it; in the place of the rest stands why it is not."""
    first, again = run.first, run.again
    (fresh,), (cached,) = first["report"]["frames"], again["report"]["frames"]
    assert not fresh["cached"] and fresh["remat"] and fresh["peak"]
    assert cached["cached"] and cached["remat"] is cached["peak"] is None
    assert fresh["backward"] and not cached["backward"]  # what serves it is decided on the way to code, too
    differ = {key for key in fresh if fresh[key] != cached[key]}
    assert differ - {"seconds", "pieces"} == {"cached", "remat", "peak", "backward"}
    for part in ("sites", "misses", "counts"):
        assert first["report"][part] == again["report"][part]
    assert "from cache" not in first["text"]
    assert again["text"].count("from cache") == 3  # the frame's outcome, the policy's table and the peak's
    assert "captured, from cache" in again["text"]


@pytest.mark.parametrize("path", ["lowerings/down_norm_up/reference.py", "new.py"])
def test_every_source_file_counts(tmp_path, path, monkeypatch):
    root = copy_to(tmp_path) / SOURCE.name
    monkeypatch.setattr(inductor_pass, "__file__", str(root / "fx" / "inductor_pass.py"))
    digest = inductor_pass.source_hash.__wrapped__
    before = digest()
    with (root / path).open("a") as file:
        file.write("# another version\n")
    assert digest() != before
