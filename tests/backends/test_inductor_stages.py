"""Frames whose settings keep Inductor from running this package's passes: compiled by Inductor alone, and said so.

What the settings are is a matter of the torch version; reading them is not, so all but `mode="lite"` runs everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import logging

import pytest
import torch
from torch._inductor import compile_fx as compile_fx_module
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options

import megacpp_compile
from megacpp_compile import record
from megacpp_compile.analysis import analyse
from megacpp_compile.backends.inductor_stages import LOWERING, REMAT, switched_off
from megacpp_compile.config.options import Config
from megacpp_compile.errors import RequirementError, StagesOffError
from megacpp_compile.targets import TPU
from tests.backends.models import Layer

HAS_LITE = "lite" in list_mode_options()
needs_lite = pytest.mark.skipif(not HAS_LITE, reason=f"torch {torch.__version__} has no mode 'lite'")
needs_settings = pytest.mark.skipif(
    not hasattr(inductor_config, LOWERING), reason=f"torch {torch.__version__} always runs its post-grad passes"
)
SAYS = {
    LOWERING: "use_post_grad_passes=False: Inductor does not run the stage that lowers this package's ops",
    REMAT: "use_joint_graph_passes=False: Inductor does not run the stage that applies the policy",
}
BOTH = (
    "use_post_grad_passes=False, use_joint_graph_passes=False: Inductor does not run the stage that lowers this "
    "package's ops nor the one that applies the policy"
)


@pytest.fixture
def handed_over(monkeypatch):
    """What Inductor was given, as (targets, settings); the graphs run in eager, as they came."""
    found = []

    def compile_fx(gm, inputs, config_patches=None, **_):
        found.append(({str(n.target) for n in gm.graph.nodes}, dict(config_patches or {})))
        return gm.forward

    monkeypatch.setattr(compile_fx_module, "compile_fx", compile_fx)
    return found


def step(options, grad=True, around=None, **settings):
    """The report of one compiled training step, whose results are eager's."""
    torch._dynamo.reset()
    model, x = Layer(), torch.randn(4, 16)
    compiled = torch.compile(model, backend=functools.partial(megacpp_compile.backend, options=options, **settings))
    with around or contextlib.nullcontext(), record() as report, torch.set_grad_enabled(grad):
        got = compiled(x)
    torch.testing.assert_close(got, model(x))
    if grad:
        want = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        torch.testing.assert_close(torch.autograd.grad(got.sum(), list(model.parameters())), want)
    return report


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "megacpp_compile" and r.levelno >= logging.WARNING]


def alone(report, says, caplog):
    """Whether the frame was left to Inductor, and the report and the log say why."""
    (frame,) = report.frames
    assert not frame.captured and frame.reason == says and not frame.passes and not report.sites
    (warned,) = warnings(caplog)
    assert "compiled by Inductor alone" in warned and says in warned


@pytest.mark.parametrize("options", [{}, {"policy": "full"}], ids=["", "policy"])
@pytest.mark.parametrize("where", ["options", "mode", "global"])
def test_without_post_grad_passes(where, options, handed_over, caplog, monkeypatch):
    """However it was switched off; a policy is applied all the same, as its stage runs."""
    settings, around = {}, None
    if where == "options":
        options = {**options, "inductor": {LOWERING: False}}
    elif where == "mode":  # as "lite" is where torch has it
        monkeypatch.setattr("torch._inductor.list_mode_options", lambda mode: {"max-autotune": {LOWERING: False}}[mode])
        settings["mode"] = "max-autotune"
    elif hasattr(inductor_config, LOWERING):
        around = inductor_config.patch({LOWERING: False})
    else:
        pytest.skip(f"torch {torch.__version__} has no such global setting")
    alone(step(options, around=around, **settings), SAYS[LOWERING], caplog)
    ((targets, patches),) = handed_over
    assert not any("megacpp" in target for target in targets)
    assert "post_grad_custom_pre_pass" not in patches
    assert ("joint_custom_post_pass" in patches) == ("policy" in options)


def test_what_the_options_say_goes_before_the_mode(handed_over, monkeypatch):
    monkeypatch.setattr("torch._inductor.list_mode_options", lambda mode: {"max-autotune": {LOWERING: False}}[mode])
    report = step({"inductor": {LOWERING: True}}, mode="max-autotune")
    assert [s.pass_name for s in report.sites] == ["down_norm_up"] and report.frames[0].captured
    ((targets, patches),) = handed_over
    assert "megacpp.down_norm_up.default" in targets and patches["post_grad_custom_pre_pass"]


def test_without_joint_graph_passes(handed_over, caplog):
    """They matter to a policy, and that to training only."""
    off = {"inductor": {REMAT: False}}
    assert step(off).frames[0].captured
    assert step({**off, "policy": "full"}, grad=False).frames[0].captured
    assert not warnings(caplog)
    alone(step({**off, "policy": "full"}), SAYS[REMAT], caplog)


def test_without_either(handed_over, caplog):
    alone(step({"policy": "full", "inductor": {LOWERING: False, REMAT: False}}), BOTH, caplog)


def test_strict_and_require_are_errors(handed_over):
    off = {"inductor": {LOWERING: False}}
    with pytest.raises(StagesOffError) as caught:
        step({**off, "strict": True})
    assert caught.value.settings == (LOWERING,) and SAYS[LOWERING] in str(caught.value)
    with pytest.raises(RequirementError):
        step({**off, "require": {"down_norm_up": 1}})
    assert not handed_over


def test_explain_knows(caplog):
    options = {"inductor": {LOWERING: False}}
    alone(megacpp_compile.explain(Layer(), torch.randn(4, 16), options=options), SAYS[LOWERING], caplog)


def test_other_targets_have_no_such_stages():
    """Inductor's settings mean nothing to openxla."""
    found = []

    def backend(gm, inputs):
        found.append(analyse(gm, inputs, Config(), TPU, {LOWERING: False}))
        return gm.forward

    torch.compile(Layer(), backend=backend)(torch.randn(4, 16))
    assert found[0].frame.captured and len(found[0].outcome.sites) == 1


def test_torch_without_the_settings_runs_the_stages(monkeypatch):
    monkeypatch.setattr("megacpp_compile.backends.inductor_stages.inductor_config", object())
    assert switched_off({}, policy=True) == ()
    assert switched_off({REMAT: False}, policy=True) == (REMAT,)


@pytest.mark.end_to_end
@needs_lite
@pytest.mark.parametrize("options", [{}, {"policy": "full"}], ids=["", "policy"])
def test_lite_mode_compiles(options, caplog):
    """All of Inductor, not a stand-in: the frame runs, and nothing of this package is in it."""
    report = step(options, mode="lite")
    alone(report, BOTH if options else SAYS[LOWERING], caplog)


@needs_settings
@pytest.mark.end_to_end
def test_inductor_heeds_the_settings():
    """What `switched_off` reads is what Inductor reads: with it off the passes of this package do not run."""
    ran = []
    for off in (False, True):
        torch._dynamo.reset()
        patches = dict.fromkeys(("post_grad_custom_pre_pass", "joint_custom_post_pass"), ran.append)
        settings = {LOWERING: False, REMAT: False} if off else {}
        with inductor_config.patch(force_disable_caches=True):
            torch.compile(torch.sin, options={**patches, **settings})(torch.ones(3))
        assert len(ran) == 2
