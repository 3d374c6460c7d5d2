"""Graphs kept from run to run are those that tracing again would give, and none is served for another key."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megacpp_compile.frontend.canonicalize import canonicalize
from tests import capture, fingerprint
from tests.corpus.near_misses import NEAR_MISSES
from tests.corpus.spellings import PlainGQA
from tests.frames import check_graph, render, run_graph
from tests.passes.experts import MoE, batched_gemms
from tests.passes.test_gated_delta_rule import block
from tests.seeds import Draws

SCALE = 2.0


class Scaled(nn.Module):
    def __init__(self, body=lambda t: t.relu(), power=1):
        super().__init__()
        self.linear, self.body, self.power = nn.Linear(4, 4), body, power
        self.register_buffer("gain", torch.ones(4))

    def forward(self, x):
        return self.body(self.linear(x)) ** self.power * SCALE * self.gain


def scaled_by(number):
    return lambda t: t * number


def held_by(draws):
    return lambda t: t if draws else -t


def shifted(t, by=1.0):
    return t + by


def key(module, *args):
    called = capture.Called(module)
    return capture.key_of(called, (*called.state.values(), *(args or (torch.ones(2, 4),))))


@pytest.fixture(autouse=True)
def kept_here(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_GRAPHS", str(tmp_path))
    return tmp_path


def test_the_same_module_has_the_same_key():
    """Whatever its weights and inputs hold, in any process."""
    assert key(Scaled()) == key(Scaled()) == key(Scaled(), torch.zeros(2, 4))
    program = "import torch; from tests.test_capture import Scaled, key; print(key(Scaled()))"
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", program], cwd=capture.ROOT, env=env, capture_output=True, text=True)
    assert other.stdout.split() == [key(Scaled())], other.stderr


# Of one name, on one line, with the same code: what tells them apart is a constant that is a tuple.
PADDED = [lambda x: nn.functional.pad(x, (1, 0)), lambda x: nn.functional.pad(x, (0, 1))]
OTHERS = {
    "tuple": lambda: (Scaled(PADDED[0]),),
    "other tuple": lambda: (Scaled(PADDED[1]),),
    "attribute": lambda: (Scaled(power=2),),
    "function": lambda: (Scaled(torch.tanh),),
    "closure": lambda: (Scaled(scaled_by(3.0)),),
    "other closure": lambda: (Scaled(scaled_by(3.5)),),
    "default": lambda: (Scaled(shifted),),
    "partial": lambda: (Scaled(partial(shifted, by=2.0)),),
    "shape": lambda: (Scaled(), torch.ones(3, 4)),
    "stride": lambda: (Scaled(), torch.ones(4, 2).t()),
    "dtype": lambda: (Scaled(), torch.ones(2, 4, dtype=torch.float64)),
    "gradient": lambda: (Scaled(), torch.ones(2, 4, requires_grad=True)),
    "training": lambda: (Scaled().eval(),),
    "frozen": lambda: (Scaled().requires_grad_(False),),
    "weights": lambda: (Scaled().bfloat16(),),
    "module": lambda: (nn.Sequential(nn.Linear(4, 4)),),
    "constant": lambda: (Scaled(scaled_by(torch.ones(4))),),
    "other constant": lambda: (Scaled(scaled_by(torch.zeros(4))),),
}


def test_whatever_makes_another_graph_makes_another_key(monkeypatch):
    keys = {"plain": key(Scaled())} | {name: key(*make()) for name, make in OTHERS.items()}
    with torch.no_grad():
        keys["no gradients"] = key(Scaled())
    for name, change in {
        "global": partial(monkeypatch.setattr, sys.modules[__name__], "SCALE", 3.0),
        "torch": partial(monkeypatch.setattr, torch, "__version__", "2.0.0"),
        "capture code": partial(monkeypatch.setattr, capture, "MAKERS", capture.MAKERS[:-1]),
        "source": partial(monkeypatch.setattr, fingerprint, "_sources_of", lambda name: "edited"),
    }.items():
        with monkeypatch.context():
            change()
            keys[name] = key(Scaled())
    assert len(set(keys.values())) == len(keys), keys


def test_a_generator_is_told_by_its_seed():
    """What it has drawn by now is in no graph, and differs with the tests that ran before."""
    first, second = Draws("inputs"), Draws("others")
    before = key(Scaled(held_by(first)))
    first(3)
    assert key(Scaled(held_by(first))) == before != key(Scaled(held_by(second)))


def test_sources_are_read_with_all_they_import(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1")
    before = fingerprint.digest_of_sources(tmp_path, ["a.py"])
    fingerprint._digest_of_sources.cache_clear()
    (tmp_path / "a.py").write_text("x = 2")
    assert fingerprint.digest_of_sources(tmp_path, ["a.py"]) != before
    fingerprint._digest_of_sources.cache_clear()
    imported = fingerprint._imported("tests.passes.test_moe", fingerprint.ROOT / "tests/passes/test_moe.py")
    assert {"tests.frames", "tests.passes.experts", "tests.passes.contract"} <= set(imported)


def with_hooks():
    module = Scaled()
    module.register_forward_hook(lambda *_: None)
    return module


def test_what_cannot_be_told_has_no_key_and_is_not_kept(kept_here):
    for module in (with_hooks(), Scaled(iter([torch.relu]).__next__())):
        if module.body is not torch.relu:
            with pytest.raises(fingerprint.Unkeyed):
                key(module)
            capture.captured(module, (torch.ones(2, 4),))
    assert not list(kept_here.glob("*/*"))
    with torch.autocast("cpu"), pytest.raises(fingerprint.Unkeyed):
        key(Scaled())


CASES = {
    "attention": lambda: ((gqa := PlainGQA()), gqa.example_inputs()),
    "near miss": lambda: NEAR_MISSES[0].build(),
    "delta rule": block,
    "experts": lambda: (MoE(batched_gemms, stacked=True), (torch.randn(11, 8).requires_grad_(),)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_kept_graph_is_the_traced_one(monkeypatch, case):
    """As text, by what its nodes carry, and by what passes do to it."""
    module, args = CASES[case]()
    first, again = capture.captured(module, args)[0], capture.captured(module, args)[0]
    assert render(first.gm) == render(again.gm) and first.gm is not again.gm
    for a, b in zip(first.gm.graph.nodes, again.gm.graph.nodes, strict=True):
        assert (a.name, a.op, str(a.target), a.meta.keys()) == (b.name, b.op, str(b.target), b.meta.keys())
        assert a.meta.get("stack_trace") == b.meta.get("stack_trace")
    assert [n.name for n in first.gm.graph.nodes if n in first.weights] == [n.name for n in again.gm.graph.nodes if n in again.weights]
    canonicalize(first.gm.graph, first.fake_mode)
    canonicalize(again.gm.graph, again.fake_mode)
    assert render(first.gm) == render(again.gm)
    loaded = check_graph(module, args)
    monkeypatch.setenv("TEST_GRAPHS", "")
    fresh = run_graph(module, args)
    assert render(loaded.graph) == render(fresh.graph) and loaded.counts == fresh.counts
    assert bool(loaded.fired) == (case != "near miss")


@pytest.mark.parametrize("case", CASES)
def test_a_graph_is_written_without_dill(monkeypatch, case):
    module, args = CASES[case]()
    called = capture.Called(module)
    graph = capture.traced(called, (*called.state.values(), *args))
    monkeypatch.setattr(capture.GraphPickler, "dumps", lambda gm: pytest.fail("by torch's pickler"))
    again = capture.GraphPickler.loads(capture._dumps(graph.gm), FakeTensorMode(shape_env=ShapeEnv()))
    assert render(again) == render(graph.gm)


def test_no_file_is_served_for_another_key(kept_here, monkeypatch):
    module, args = Scaled(), (torch.ones(2, 4),)
    capture.captured(module, args)
    (file,) = kept_here.glob("*/*")
    assert capture._load(file, file.name) is not None
    other = file.with_name("0" * 64)
    other.write_bytes(file.read_bytes())
    assert capture._load(other, other.name) is None, "another's graph"
    file.write_bytes(file.read_bytes()[:-1])
    assert capture._load(file, file.name) is None, "cut off"
    traced = []
    made = capture.traced
    monkeypatch.setattr(capture, "traced", lambda *a: traced.append(1) or made(*a))
    for _ in range(2):
        capture.captured(module, args)
    assert traced == [1] and capture._load(file, file.name) is not None


def test_graphs_that_nobody_reads_are_removed(kept_here):
    capture.captured(Scaled(), (torch.ones(2, 4),))
    capture.remove_old()
    (file,) = kept_here.glob("*/*")
    capture.remove_old(file.stat().st_mtime + (capture.DAYS + 1) * 86400)
    assert not list(kept_here.glob("*/*"))


class Counting(Scaled):
    def forward(self, x):
        self.gain.add_(1)
        return super().forward(x)


def test_what_writes_is_not_a_function():
    with pytest.raises(capture.NotAFunction):
        capture.captured(Counting(), (torch.ones(2, 4),))
