"""What a user meets: options and their errors, verification, the report, logs and traces.

Few of these need code to run, so most compile for nothing: Inductor is replaced by a function that runs the graph.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import megacpp_compile
from megacpp_compile import record
from megacpp_compile.backend import check_torch
from megacpp_compile.config.options import Config
from megacpp_compile.errors import (
    BadOptionError,
    MegacppError,
    RequirementError,
    TargetUnavailableError,
    TorchTooOldError,
    UnknownOptionError,
    UnknownPassError,
    VerificationError,
)
from megacpp_compile.passes._driver import enabled_passes, pass_names
from megacpp_compile.report.report import Report
from tests.corpus.spellings import PlainMLA

FIRED = {p.name: 0 for p in enabled_passes(Config())} | {"down_norm_up": 2, "mla_rope_q": 1, "mla_rope_kv": 1}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        sizes = {"heads": 2, "q_lora": 14, "kv_lora": 10, "nope": 6, "rope": 4, "v": 5}
        self.blocks = nn.ModuleList([PlainMLA(24, **sizes, table_source="buffer")])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class NearMiss(nn.Module):
    """Something stands between the norm and the up-projection."""

    def __init__(self):
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(8, 6), nn.RMSNorm(6), nn.Linear(6, 8, bias=False)

    def forward(self, x):
        return self.up(self.norm(self.down(x)).tanh())


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in [n for n in os.environ if n.startswith("MEGACPP_")]:
        monkeypatch.delenv(name)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_inductor(monkeypatch):
    """Every graph runs as it is handed over; returns what Inductor would have been given."""
    handed = []

    def compile_fx(gm, inputs, **kwargs):
        handed.append(kwargs["config_patches"])
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return handed


def sample(grad: bool = True) -> torch.Tensor:
    return torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0)).requires_grad_(grad)


def error_of(options, model=None, x=None) -> MegacppError:
    """What a model compiled with these options raises, by its own class."""
    with pytest.raises(MegacppError) as caught:
        torch.compile(model or Model(), backend="megacpp", options=options)(sample() if x is None else x)
    return caught.value


# --- names


def test_public_names():
    assert megacpp_compile.__all__ == [
        "CheckpointingPolicy", "CompileCache", "Config", "Estimate", "Fit", "LaunchRecord", "MLAKVCache",
        "NativeLayerSpec", "PrecisionPlan", "Report", "ServingConfig", "ShardingPlan", "Validity", "apply_checkpoints",
        "attention", "attention_capability", "backend", "cached_weight_casts", "check_resume", "compile", "disable_fa4",
        "enable", "enable_fa4", "equal_split", "estimate", "explain", "fit", "last_attention", "latent_attention", "launch_record", "load_cache",
        "load_scaling_state", "observed_attention", "record", "replace_linears", "save_cache", "scaling_state",
        "sparse_mla", "te_layer_spec", "use_latent_cache", "uses_dense_fa4",
    ]  # fmt: skip
    assert all(callable(getattr(megacpp_compile, name)) for name in megacpp_compile.__all__)
    assert set(megacpp_compile.__all__) <= set(dir(megacpp_compile))


# --- options


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"disabel": "rope_qk"}, UnknownOptionError, ["disabel", "Did you mean 'disable'?"]),
        ({"max_autotune": True}, UnknownOptionError, ["'inductor'"]),
        ({"disable": "mla_rope"}, UnknownPassError, ["'mla_rope'", "Did you mean 'mla_rope_", *pass_names()]),
        ({"passes": {"down_norm": True}}, UnknownPassError, ["option 'passes'", "Did you mean 'down_norm_up'?"]),
        ({"require": {"rope_kq": 1}}, UnknownPassError, ["option 'require'", "Did you mean 'rope_qk'?"]),
        ({"strict": "yes"}, BadOptionError, ["strict", "'yes'", "True or False"]),
        ({"verify": "eech"}, BadOptionError, ["Did you mean 'each'?"]),
        ({"require": {"rope_qk": "1"}}, BadOptionError, ["require['rope_qk']"]),
        ({"target": "gpu"}, BadOptionError, ["Did you mean 'cuda'?"]),
    ],
    ids=str,
)
def test_bad_options(no_inductor, options, kind, words):
    error = error_of(options)
    assert isinstance(error, kind)
    assert [w for w in words if w not in str(error)] == []
    assert no_inductor == []


def test_bad_environment(no_inductor, monkeypatch):
    monkeypatch.setenv("MEGACPP_DISABLE", "mla_rope_k")
    error = error_of(None)
    assert isinstance(error, UnknownPassError) and "MEGACPP_DISABLE" in str(error)


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="the target is there")
def test_target_without_its_package(no_inductor, monkeypatch):
    from megacpp_compile import targets

    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    error = error_of({"target": "tpu"})
    assert isinstance(error, TargetUnavailableError)
    assert "torch_xla" in str(error) and "pip install" in str(error)
    assert "is not installed is missing" not in str(error), "the message says it twice"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the target is there")
def test_target_without_its_device(no_inductor):
    error = error_of({"target": "cuda"})
    assert isinstance(error, TargetUnavailableError)
    assert "CUDA" in str(error)
    assert "visible to torch is missing" not in str(error), "no CUDA device is missing says the opposite"


def test_old_torch():
    for found in ("2.8.0", "1.13.1", "2.8.0+cu128", "2.0"):
        with pytest.raises(TorchTooOldError, match="2.9"):
            check_torch(found)
    for found in ("2.9.0", "2.13.0+cpu", "2.10.0a0+git1234", "3.0"):
        check_torch(found)


def test_disabled_pass_does_not_run(no_inductor):
    with record() as report:
        options = {"disable": ["mla_rope_q"], "passes": {"rope_qk": False}}
        torch.compile(Model(), backend="megacpp", options=options)(sample())
    assert report.counts == {p: n for p, n in FIRED.items() if p not in ("mla_rope_q", "rope_qk")}


@pytest.mark.parametrize("fires", [True, False])
@pytest.mark.parametrize("patches", [{}, {"max_autotune": False, "epilogue_fusion": False}], ids=["none", "some"])
def test_inductor_options_reach_inductor(no_inductor, patches, fires):
    model = Model() if fires else nn.Linear(24, 24)
    torch.compile(model, backend="megacpp", options={"inductor": patches, "policy": "none"})(sample())
    given = dict(no_inductor[0] or {})
    assert (given.pop("post_grad_custom_pre_pass", None) is not None) == fires
    assert given == patches


def test_inductor_options_compile():
    """With the real one: no complaint about an option, and no setting left behind."""
    from torch._inductor import config

    before = config.max_autotune, config.post_grad_custom_pre_pass
    model, x = nn.Sequential(nn.Linear(8, 6), nn.RMSNorm(6), nn.Linear(6, 8, bias=False), nn.Tanh()), torch.randn(3, 8)
    options = {"inductor": {"max_autotune": False}, "require": {"down_norm_up": 1}}
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="megacpp", options=options)(x), model(x))
    assert (config.max_autotune, config.post_grad_custom_pre_pass) == before


def test_mode_reaches_inductor(no_inductor):
    """`torch.compile` hands `mode` to any backend that takes it."""
    torch.compile(Model(), backend="megacpp", mode="max-autotune-no-cudagraphs")(sample())
    assert no_inductor[0]["max_autotune"] is True


# --- require


def test_met_requirement(no_inductor):
    torch.compile(Model(), backend="megacpp", options={"require": FIRED})(sample())
    assert len(no_inductor) == 1


@pytest.mark.parametrize("wanted", [1, 3])
def test_unmet_requirement_says_how_often_the_pass_fired(no_inductor, wanted):
    error = error_of({"require": {"down_norm_up": wanted}})
    assert isinstance(error, RequirementError)
    assert f"require={{'down_norm_up': {wanted}}} was not met: the pass fired twice, wanted" in str(error)
    assert no_inductor == []


def test_unmet_requirement_names_the_nearest_misses(no_inductor):
    error = error_of({"require": {"down_norm_up": 1}}, NearMiss(), torch.randn(3, 8))
    assert isinstance(error, RequirementError) and error.fired == 0
    (miss,) = error.misses
    assert miss.pass_name == "down_norm_up" and miss.reason in str(error) and f"[{miss.tag}]" in str(error)
    assert Path(__file__).name in str(error), "where the code is"


# --- verification


@pytest.fixture
def broken_rope(monkeypatch):
    from megacpp_compile.lowerings.mla_rope_q import reference

    right = reference.mla_rope_q
    monkeypatch.setattr(reference, "mla_rope_q", lambda *args: right(*args) * 1.01)


def run_both(options):
    """(report, results and gradients compiled, the same in eager)."""
    results = []
    with record() as report:
        model = Model()
        for call in (torch.compile(model, backend="megacpp", options=options), model):
            x = sample()
            out = call(x)
            results.append([out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])])
    return report, *results


def test_verification_passes_a_good_model(no_inductor):
    report, got, want = run_both({"verify": "each", "strict": True, "require": FIRED})
    assert report.counts == FIRED and report.misses == []
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_verification_refuses_the_broken_site_alone(no_inductor, broken_rope):
    report, got, want = run_both({"verify": "each"})
    assert report.counts == {**FIRED, "mla_rope_q": 0}
    (miss,) = report.misses
    assert (miss.pass_name, miss.tag, miss.fqn) == ("mla_rope_q", "verification", "blocks.0")
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_without_verification_the_broken_op_is_used(no_inductor, broken_rope):
    """Else the test above would show nothing."""
    report, got, want = run_both(None)
    assert report.counts == FIRED
    assert not torch.allclose(got[0], want[0], rtol=1e-4, atol=1e-4)


def test_verification_is_an_error_under_strict(no_inductor, broken_rope):
    error = error_of({"verify": "each", "strict": True})
    assert isinstance(error, VerificationError)
    assert (error.pass_name, error.fqn) == ("mla_rope_q", "blocks.0")
    assert 0.005 < error.error < 0.02 and "disable" in str(error)


def test_verification_disturbs_nothing(no_inductor):
    """It runs the model once more: random state, buffers and inputs must not show it."""

    class Stateful(Model):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps += 1
            x.mul_(2)
            return torch.nn.functional.dropout(super().forward(x), 0.5)

    states = []
    for options in ({"verify": "each"}, {}):
        torch._dynamo.reset()
        torch.manual_seed(5)
        model, x = Stateful(), sample(False)
        out = torch.compile(model, backend="megacpp", options=options)(x)
        states.append((out.detach(), model.steps, x, torch.random.get_rng_state()))
    for a, b in zip(*states, strict=True):
        assert torch.equal(a, b)


# --- the report


@pytest.fixture(scope="module")
def reported():
    """The report of a step, which several tests read."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, record() as report:
        patch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, inputs, **kwargs: gm.forward)
        torch.compile(Model(), backend="megacpp")(sample()).sum().backward()
    return report


@pytest.mark.xdist_group("surface report")
def test_report_of_a_compiled_model(reported):
    report = reported
    assert report.counts == FIRED
    (frame,) = report.frames
    assert (frame.captured, frame.reason, frame.target, frame.grad, frame.passes) == (True, "", "cpu", True, FIRED)
    assert frame.nodes > 20 and frame.seconds.keys() >= {"capture", *FIRED}
    assert all(s >= 0 for s in frame.seconds.values())
    again = Report.from_json(report.to_json())
    assert again.to_dict() == report.to_dict() == json.loads(report.to_json(indent=1))
    assert "4 sites fused" in str(report) and "mla_rope_kv" in str(report)


@pytest.mark.xdist_group("surface report")
def test_sites(reported):
    report = reported
    assert [s.op for s in report.sites] == [
        "megacpp::down_norm_up", "megacpp::down_norm_up", "megacpp::mla_rope_q", "megacpp::mla_rope_kv",
    ]  # fmt: skip
    assert [s.fqn for s in report.sites] == ["blocks.0.q_b", "blocks.0.kv_b", "blocks.0", "blocks.0"]
    for site in report.sites:
        assert (site.requested, site.effective, site.reason) == ("reference", "reference", "")
        assert site.source.startswith("spellings.py:") and ", in " in site.source
    assert len({s.node for s in report.sites}) == 4
    first, second, q, kv = report.sites
    tokens, width = 10, 4  # float32 rrms, one per token
    assert first.saved_after == second.saved_after == tokens * width
    assert q.saved_after == kv.saved_after == 0, "the tables are alive anyway"
    assert all(s.saved_before > s.saved_after for s in report.sites)


@pytest.mark.xdist_group("surface report")
def test_frames_are_named_after_the_code(reported):
    assert "L[" not in reported.frames[0].name


@pytest.mark.parametrize("name", ["self", "this"])
def test_module_names_do_not_depend_on_the_name_of_self(no_inductor, name):
    scope = {"Model": Model}
    exec(f"class Renamed(Model):\n    def forward({name}, x):\n        return {name}.blocks[0](x)", scope)
    with record() as report:
        torch.compile(scope["Renamed"](), backend="megacpp")(sample())
    assert [s.fqn for s in report.sites] == ["blocks.0.q_b", "blocks.0.kv_b", "blocks.0", "blocks.0"]


def test_misses(no_inductor):
    with record() as report:
        torch.compile(NearMiss(), backend="megacpp")(torch.randn(3, 8))
    assert report.sites == []
    (miss,) = report.misses
    assert miss.source.startswith(Path(__file__).name) and miss.node and miss.tag
    assert report.frames[0].captured


def test_smallest_frame_that_holds_an_idiom(no_inductor):
    """Three calls: down, norm, up."""
    with record() as report:
        model = nn.Sequential(nn.Linear(8, 6), nn.RMSNorm(6), nn.Linear(6, 8, bias=False))
        torch.compile(model, backend="megacpp")(torch.randn(3, 8))
    assert report.counts["down_norm_up"] == 1, report.frames[0].reason


def test_explain_prints_to_stderr(no_inductor, capsys):
    torch.compile(Model(), backend="megacpp", options={"explain": True})(sample())
    out, err = capsys.readouterr()
    assert out == ""
    assert "4 sites fused" in err and "blocks.0" in err
    torch._dynamo.reset()
    torch.compile(Model(), backend="megacpp")(sample())
    assert capsys.readouterr() == ("", "")


# --- logs and traces


def test_debug_log_shows_the_graphs(no_inductor, caplog):
    with caplog.at_level(logging.DEBUG, logger="megacpp_compile"):
        torch.compile(Model(), backend="megacpp")(sample())
    messages = [r.getMessage() for r in caplog.records if r.name == "megacpp_compile"]
    stages = [m.split(":")[0] for m in messages if m.startswith("graph after ")]
    wanted = ("dynamo", "captured", "down_norm_up", "mla_rope_q", "mla_rope_kv", "rewritten")
    assert stages == [f"graph after {stage}" for stage in wanted]
    assert "torch.ops.megacpp.mla_rope_kv" in messages[stages.index("graph after rewritten")]
    assert any(m.startswith("frame ") and "down_norm_up 2" in m for m in messages)


def test_silent_by_default(no_inductor, caplog, capsys):
    with caplog.at_level(logging.WARNING, logger="megacpp_compile"):
        torch.compile(Model(), backend="megacpp")(sample())
    assert [r for r in caplog.records if r.name == "megacpp_compile"] == []
    assert capsys.readouterr() == ("", "")


def test_trace_receives_graphs_and_report(tmp_path):
    """`TORCH_TRACE` is read on import, hence the process of its own."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch, torch._inductor.compile_fx as c\n"
        "c.compile_fx = lambda gm, inputs, **kwargs: gm.forward\n"
        "from test_surface import Model, sample\n"
        "torch.compile(Model(), backend='megacpp')(sample())\n"
    )
    environ = {**os.environ, "TORCH_TRACE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (log,) = tmp_path.iterdir()
    lines = log.read_text().splitlines()
    names = {line.split('"name": "')[1].split('"')[0] for line in lines if '"name": "megacpp_' in line}
    assert names == {
        *(f"megacpp_{stage}" for stage in ("dynamo", "captured", "rewritten", "report")),
        *(f"megacpp_{name}" for name, fired in FIRED.items() if fired),
    }
    payload = next(line for line in lines if line.startswith("\t{") and "known_passes" in line)
    assert json.loads(payload)["counts"] == FIRED
