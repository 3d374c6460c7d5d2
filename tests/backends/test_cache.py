"""Inductor's on-disk caches: a second process compiles nothing, and whatever can change the code misses.

What has to hit is the first step of a process of its own, as caches in memory would hide what lies on disk; a miss may
follow in the same one. The processes share one cache directory, in the order of the file.
"""

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
import json, sys
import torch
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

print(json.dumps([step(**options) for options in json.loads(sys.argv[1])]))
'''


class Runner:
    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "step.py").write_text(SCRIPT)

    def __call__(self, *steps: dict[str, Any], package: Path | None = None):
        """What training steps, each with its options, met in the caches one after the other in a new process; by default
        one without any. package: the folder of a copy of this package."""
        root = package or Path(megacpp_compile.__file__).parents[1]
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("MEGACPP_", "TORCHINDUCTOR_"))},
            "TORCHINDUCTOR_CACHE_DIR": str(self.home / "cache"),
            "PYTHONPATH": str(root),
            "OMP_NUM_THREADS": "1",
            # A pool of compilers, and headers compiled ahead, cost a process that compiles two kernels more than they save.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        }
        command = [sys.executable, str(self.home / "step.py"), json.dumps(steps or [{}])]
        done = subprocess.run(command, env=environ, cwd=self.home, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        results = json.loads(done.stdout.splitlines()[-1])
        assert all(Path(result["package"]).is_relative_to(root) for result in results)
        return results


def hit(result) -> bool:
    """True: all graphs came from disk. False: all were compiled. Anything in between is an error."""
    found = result["inductor"]
    hits, misses = found.get("fxgraph_cache_hit", 0), found.get("fxgraph_cache_miss", 0)
    assert not found.get("fxgraph_cache_bypass"), "something in the settings keeps Inductor from caching"
    assert (hits == 0) != (misses == 0), found
    return hits > 0


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A runner whose cache holds one training step, with what that step met, and what it met in a second process, the
    second time with an option."""
    runner = Runner(tmp_path_factory.mktemp("cache"))
    (runner.first,) = runner()
    runner.again, runner.with_an_option = runner({}, {"disable": "mla_rope_q"})
    return runner


@pytest.fixture(scope="session")
def copied(tmp_path_factory):
    """A copy of the package, to be edited."""
    root = tmp_path_factory.mktemp("copy")
    source = Path(megacpp_compile.__file__).parent
    shutil.copytree(source, root / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def test_second_process_hits(run):
    assert not hit(run.first)
    assert run.first["autograd"] == {"autograd_cache_miss": 1, "autograd_cache_saved": 1}
    again = run.again
    assert hit(again)
    # AOTAutograd's own cache, keyed by the rewritten graph, spares partitioning too.
    assert again["autograd"] == {"autograd_cache_hit": 1}
    assert again["loss"] == run.first["loss"]


def test_the_report_of_cached_code_says_so(run):
    """All that is found out before code is generated is in it; in the place of the rest stands why it is not."""
    first, again = run.first, run.again
    (fresh,), (cached,) = first["report"]["frames"], again["report"]["frames"]
    assert not fresh["cached"] and fresh["remat"] and fresh["peak"]
    assert cached["cached"] and cached["remat"] is cached["peak"] is None
    differ = {key for key in fresh if fresh[key] != cached[key]}
    assert differ - {"seconds"} == {"cached", "remat", "peak"}
    for part in ("sites", "misses", "counts"):
        assert first["report"][part] == again["report"][part]
    assert "from cache" not in first["text"]
    assert again["text"].count("from cache") == 3  # the frame's outcome, the policy's table and the peak's
    assert "captured, from cache" in again["text"]


def test_an_option_misses(run):
    """Even one that leaves this very graph as it is: the pass has nothing to do here."""
    assert not hit(run.with_an_option)


def test_a_moved_package_that_explains_hits(run, copied):
    """What counts is what the sources say, not where they are; and `explain` only prints."""
    (moved,) = run({"explain": True}, package=copied)
    assert hit(moved)


def test_changed_source_misses(run, copied):
    """A comment will do: which edits matter is nobody's to guess."""
    with (copied / megacpp_compile.__name__ / "passes/down_norm_up.py").open("a") as file:
        file.write("# another version\n")
    (changed,) = run(package=copied)
    assert not hit(changed)


@pytest.mark.parametrize("path", ["lowerings/down_norm_up/reference.py", "new.py"])
def test_every_source_file_counts(copied, path, monkeypatch):
    root = copied / megacpp_compile.__name__
    monkeypatch.setattr(inductor_pass, "__file__", str(root / "fx" / "inductor_pass.py"))
    digest = inductor_pass.source_hash.__wrapped__
    before = digest()
    with (root / path).open("a") as file:
        file.write("# another version\n")
    assert digest() != before
