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
from megacpp_compile import errors, record
from megacpp_compile.backend import check_torch
from megacpp_compile.config.options import Config
from megacpp_compile.errors import BadOptionError, UnknownOptionError, UnknownPassError
from megacpp_compile.passes._driver import enabled_passes, pass_names
from megacpp_compile.report.report import Report
from tests.corpus.spellings import PlainMLA

FIRED = {p.name: 0 for p in enabled_passes(Config())} | {"down_norm_up": 2, "mla_rope_q": 1, "mla_rope_kv": 1}
FQNS = ["blocks.0.q_b", "blocks.0.kv_b", "blocks.0", "blocks.0"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        sizes = {"heads": 2, "q_lora": 14, "kv_lora": 10, "nope": 6, "rope": 4, "v": 5}
        self.blocks = nn.ModuleList([PlainMLA(24, **sizes, table_source="buffer")])

    def forward(self, x):
        return x + self.blocks[0](x)


class NearMiss(nn.ModuleList):
    def __init__(self):
        super().__init__([nn.Linear(8, 6), nn.RMSNorm(6), nn.Linear(6, 8, bias=False)])

    def forward(self, x):
        return self[2](self[1](self[0](x)).tanh())


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


def compiled(model=None, x=None, **how):
    """(report, what the model gives, compiled so)."""
    with record() as report:
        out = torch.compile(model or Model(), backend="megacpp", **how)(sample() if x is None else x)
    return report, out


def error_of(options, kind, *model):
    """What a model compiled with these options raises, by its own class."""
    with pytest.raises(errors.MegacppError) as caught:
        compiled(*model, options=options)
    assert isinstance(caught.value, kind)
    return caught.value


def test_public_names():
    assert megacpp_compile.__all__ == [
        "CheckpointingPolicy", "CompileCache", "Config", "Estimate", "Fit", "LaunchRecord", "MLAKVCache", "Match",
        "MatchFailure", "NativeLayerSpec", "PrecisionPlan", "Report", "ServingConfig", "ShardingPlan", "Validity",
        "apply_checkpoints", "attention", "attention_capability", "backend", "cached_weight_casts", "check_resume",
        "compile", "disable_fa4", "enable", "enable_fa4", "equal_split", "estimate", "explain", "fit",
        "last_attention", "latent_attention", "launch_record", "load_cache", "load_compiled", "load_scaling_state",
        "observed_attention", "record", "register", "register_lowering", "replace_linears", "save_cache",
        "save_compiled", "scaling_state", "sharded_sequences", "sparse_mla", "te_layer_spec", "unregister",
        "use_latent_cache", "uses_dense_fa4",
    ]  # fmt: skip
    assert all(callable(getattr(megacpp_compile, name)) for name in megacpp_compile.__all__)
    assert set(megacpp_compile.__all__) <= set(dir(megacpp_compile))


@pytest.mark.parametrize(("options", "kind", "words"), [
    ({"disabel": "rope_qk"}, UnknownOptionError, ["disabel", "Did you mean 'disable'?"]),
    ({"disable": "mla_rope"}, UnknownPassError, ["'mla_rope'", "Did you mean 'mla_rope_", *pass_names()]),
    ({"strict": "yes"}, BadOptionError, ["strict", "'yes'", "True or False"]),
], ids=str)  # fmt: skip
def test_bad_options(no_inductor, options, kind, words):
    error = error_of(options, kind)
    assert [w for w in words if w not in str(error)] == []
    assert no_inductor == []


def test_bad_environment(no_inductor, monkeypatch):
    monkeypatch.setenv("MEGACPP_DISABLE", "mla_rope_k")
    assert "MEGACPP_DISABLE" in str(error_of(None, UnknownPassError))


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="the target is there")
def test_target_without_its_package(no_inductor, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = str(error_of({"target": "tpu"}, errors.TargetUnavailableError))
    assert "torch_xla" in said and "pip install" in said
    assert "is not installed is missing" not in said, "the message says it twice"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the target is there")
def test_target_without_its_device(no_inductor):
    said = str(error_of({"target": "cuda"}, errors.TargetUnavailableError))
    assert "CUDA" in said
    assert "visible to torch is missing" not in said, "no CUDA device is missing says the opposite"


def test_old_torch():
    for found in ("2.8.0", "1.13.1", "2.8.0+cu128", "2.0"):
        with pytest.raises(errors.TorchTooOldError, match="2.9"):
            check_torch(found)
    for found in ("2.9.0", "2.13.0+cpu", "2.10.0a0+git1234", "3.0"):
        check_torch(found)


def test_disabled_pass_does_not_run(no_inductor):
    report, _ = compiled(options={"disable": ["mla_rope_q"], "passes": {"rope_qk": False}})
    assert report.counts == {p: n for p, n in FIRED.items() if p not in ("mla_rope_q", "rope_qk")}


@pytest.mark.parametrize("fires", [True, False])
@pytest.mark.parametrize("patches", [{}, {"max_autotune": False, "epilogue_fusion": False}], ids=["none", "some"])
def test_inductor_options_and_the_mode_reach_inductor(no_inductor, patches, fires):
    compiled(Model() if fires else nn.Linear(24, 24), options={"inductor": patches, "policy": "none"})
    given = dict(no_inductor[0] or {})
    assert (given.pop("post_grad_custom_pre_pass", None) is not None) == fires
    assert given == patches
    compiled(mode="max-autotune-no-cudagraphs")  # which `torch.compile` hands to any backend that takes it
    assert no_inductor[1]["max_autotune"] is True


def test_inductor_options_compile(no_kernels):
    """With the real one: no complaint about an option, and no setting left behind."""
    from torch._inductor import config

    before = config.max_autotune, config.post_grad_custom_pre_pass
    model, x = nn.Sequential(nn.Linear(8, 6), nn.RMSNorm(6), nn.Linear(6, 8, bias=False), nn.Tanh()), torch.randn(3, 8)
    options = {"inductor": {"max_autotune": False}, "require": {"down_norm_up": 1}}
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, x, options=options)[1], model(x))
    assert (config.max_autotune, config.post_grad_custom_pre_pass) == before


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wanted", [1, 3])
def test_unmet_requirement_says_how_often_the_pass_fired(no_inductor, wanted):
    said = str(error_of({"require": {"down_norm_up": wanted}}, errors.RequirementError))
    assert f"require={{'down_norm_up': {wanted}}} was not met: the pass fired twice, wanted" in said
    assert "came near" not in said if wanted < 2 else "Nothing else in the graph came near" in said
    assert no_inductor == []


def test_unmet_requirement_names_the_nearest_misses(no_inductor):
    error = error_of({"require": {"down_norm_up": 1}}, errors.RequirementError, NearMiss(), torch.randn(3, 8))
    assert error.fired == 0
    (miss,) = error.misses
    assert miss.pass_name == "down_norm_up" and miss.reason in str(error) and f"[{miss.tag}]" in str(error)
    assert Path(__file__).name in str(error), "where the code is"


@pytest.fixture
def broken_rope(monkeypatch):
    from megacpp_compile.lowerings.mla_rope_q import reference

    right = reference.mla_rope_q
    monkeypatch.setattr(reference, "mla_rope_q", lambda *args: right(*args) * 1.01)


def run_both(options):
    """The report, and whether results and gradients are eager's."""
    model, results = Model(), []
    with record() as report:
        for call in (torch.compile(model, backend="megacpp", options=options), model):
            x = sample()
            out = call(x)
            results.append([out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])])
    return report, [torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*results, strict=True)]


def test_verification_passes_a_good_model(no_inductor):
    report, same = run_both({"verify": "each", "strict": True, "require": FIRED})
    assert report.counts == FIRED and report.misses == [] and all(same) and len(no_inductor) == 1


def test_verification_refuses_the_broken_site_alone(no_inductor, broken_rope):
    report, same = run_both({"verify": "each"})
    assert report.counts == {**FIRED, "mla_rope_q": 0} and all(same)
    (miss,) = report.misses
    assert (miss.pass_name, miss.tag, miss.fqn) == ("mla_rope_q", "verification", "blocks.0")
    report, same = run_both(None)  # without verification the broken op is used
    assert report.counts == FIRED and not same[0]


def test_verification_is_an_error_under_strict(no_inductor, broken_rope):
    error = error_of({"verify": "each", "strict": True}, errors.VerificationError)
    assert (error.pass_name, error.fqn) == ("mla_rope_q", "blocks.0")
    assert 0.005 < error.error < 0.02 and "disable" in str(error)


@pytest.mark.end_to_end
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
        _, out = compiled(model, x, options=options)
        states.append((out.detach(), model.steps, x, torch.random.get_rng_state()))
    for a, b in zip(*states, strict=True):
        assert torch.equal(a, b)


def test_report_of_a_compiled_model(no_inductor):
    with record() as report:
        compiled()[1].sum().backward()
    assert report.counts == FIRED and "L[" not in report.frames[0].name, "named after the code"
    (frame,) = report.frames
    assert (frame.captured, frame.reason, frame.target, frame.grad, frame.passes) == (True, "", "cpu", True, FIRED)
    assert frame.nodes > 20 and frame.seconds.keys() >= {"capture", *FIRED}
    assert all(s >= 0 for s in frame.seconds.values())
    again = Report.from_json(report.to_json())
    assert again.to_dict() == report.to_dict() == json.loads(report.to_json(indent=1))
    assert "4 sites fused" in str(report) and "mla_rope_kv" in str(report)
    ops = ("down_norm_up", "down_norm_up", "mla_rope_q", "mla_rope_kv")
    assert [(s.op, s.fqn) for s in report.sites] == [(f"megacpp::{op}", fqn) for op, fqn in zip(ops, FQNS, strict=True)]
    for site in report.sites:
        assert (site.requested, site.effective, site.reason) == ("reference", "reference", "")
        assert site.source.startswith("spellings.py:") and ", in " in site.source
    assert len({s.node for s in report.sites}) == 4
    first, second, q, kv = report.sites
    tokens, width = 10, 4  # float32 rrms, one per token
    assert first.saved_after == second.saved_after == tokens * width
    assert first.saved_before > first.saved_after and second.saved_before > second.saved_after
    assert {(s.saved_before, s.saved_after) for s in (q, kv)} == {(0, 0)}, "of tables without a gradient nothing is kept"


def test_module_names_do_not_depend_on_the_name_of_self(no_inductor):
    class Renamed(Model):
        def forward(this, x):
            return this.blocks[0](x)

    assert [s.fqn for s in compiled(Renamed())[0].sites] == FQNS


def test_misses(no_inductor):
    report, _ = compiled(NearMiss(), torch.randn(3, 8))
    assert report.sites == []
    (miss,) = report.misses
    assert miss.source.startswith(Path(__file__).name) and miss.node and miss.tag
    assert report.frames[0].captured


def test_explain_prints_to_stderr(no_inductor, capsys):
    compiled(options={"explain": True})
    out, err = capsys.readouterr()
    assert out == ""
    assert "4 sites fused" in err and "blocks.0" in err


def test_debug_log_shows_the_graphs(no_inductor, caplog):
    with caplog.at_level(logging.DEBUG, logger="megacpp_compile"):
        compiled()
    messages = [r.getMessage() for r in caplog.records if r.name == "megacpp_compile"]
    stages = [m.split(":")[0] for m in messages if m.startswith("graph after ")]
    wanted = ("dynamo", "captured", "down_norm_up", "mla_rope_q", "mla_rope_kv", "rewritten")
    assert stages == [f"graph after {stage}" for stage in wanted]
    assert "torch.ops.megacpp.mla_rope_kv" in messages[stages.index("graph after rewritten")]
    assert any(m.startswith("frame ") and "down_norm_up 2" in m for m in messages)


def test_silent_by_default(no_inductor, caplog, capsys):
    with caplog.at_level(logging.WARNING, logger="megacpp_compile"):
        compiled()
    assert [r for r in caplog.records if r.name == "megacpp_compile"] == [] and capsys.readouterr() == ("", "")


@pytest.mark.end_to_end
def test_trace_receives_graphs_and_report(tmp_path):
    """`TORCH_TRACE` is read on import, hence the process of its own."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch, torch._inductor.compile_fx as c\n"
        "c.compile_fx = lambda gm, inputs, **kwargs: gm.forward\n"
        "from test_surface import compiled\n"
        "compiled()\n"
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
