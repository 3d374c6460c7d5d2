"""Options as users give them: checked at once, by whatever they are given to; what has no effect is said."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import traceback
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megacpp_compile
from megacpp_compile import Config, analysis, errors
from megacpp_compile.config.effects import warn_of_ineffective
from megacpp_compile.config.options import given_options
from megacpp_compile.passes._driver import pass_names
from megacpp_compile.targets import CPU, CUDA, TPU
from tests.frames import run


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in [n for n in os.environ if n.startswith("MEGACPP_")]:
        monkeypatch.delenv(name)


def down() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.RMSNorm(6), nn.Linear(6, 8, bias=False))


WAYS = {
    "torch.compile": lambda options: torch.compile(down(), backend="megacpp", options=options),
    "the module as backend": lambda options: torch.compile(
        down(), backend=megacpp_compile.backend, options=options  # type: ignore[arg-type]
    ),
    "in place": lambda options: down().compile(backend="megacpp", options=options),
    "a decorator": lambda options: torch.compile(backend="megacpp", options=options)(down()),
    "compile": lambda options: megacpp_compile.compile(down(), options=options),
    "explain": lambda options: megacpp_compile.explain(down(), torch.randn(3, 8), options=options),
    "estimate": lambda options: megacpp_compile.estimate(down(), torch.randn(3, 8), options=options),
    "fit": lambda options: megacpp_compile.fit(down(), torch.randn(3, 8), limit_gib=1, options=options),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("options", "kind", "words"), [
    ({"verfy": "each"}, errors.UnknownOptionError, "Did you mean 'verify'?"),
    ({"strict": "yes"}, errors.BadOptionError, "option strict: got 'yes' (str), wanted True or False."),
    ({"disable": "rope_kq"}, errors.UnknownPassError, "Did you mean 'rope_qk'?"),
    ({"inductor": {"max_autotun": True}}, errors.BadOptionError, "Did you mean 'max_autotune'?"),
    ("strict", errors.BadOptionError, "wanted a mapping from option name to value, or a Config"),
], ids=["unknown option", "type", "unknown pass", "Inductor's", "no mapping"])
def test_refused_when_given(way, options, kind, words):
    """Nothing has been compiled, nor called."""
    with pytest.raises(kind) as caught:
        WAYS[way](options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


# What somebody may write in the place of any option's value, and a value of it that is right.
WRONG = (3, -1, 2.5, "", "xx", None, True, [3], ["xx"], {"xx": 1}, {1: 2}, {"": ""}, object(), {"xx": None}, {"xx": [1]})
RIGHT = {
    "disable": ("", "rope_qk", ["moe"]), "passes": ({"moe": False},), "require": ({"moe": 2},), "strict": (True,),
    "verify": ("each",), "target": ("cpu",), "explain": (True,), "summary": (True,), "keep_latents": (True, "auto"),
    "fuse_shared_input_gemms": (True,), "autotune_gemms": (True,), "autotune": (True,), "overlap_collectives": (True,),
    "policy": (None, "full", 0.5, True and 1), "block_kinds": ({"a.*": "mblock"},), "precision": (None, "fp8_current"),
    "compress": (None, {"names": "*.down"}), "sharding": (None, {"mesh": {"a": 1}}), "repeated_blocks": (True,),
    "inductor": ({"triton.cudagraphs": True},),
}  # fmt: skip
NESTED = [
    ("policy", {"budget": 2}), ("policy", {"peak_gib": "3"}), ("policy", {"offload": []}), ("policy", {"ablock": "x"}),
    ("policy", {"ablock": None}), ("policy", {"last_layer": {}}), ("policy", {"recompute_kv_upproj": 1}),
    ("precision", {"rules": 3}), ("precision", {"roles": 3}), ("precision", {"rules": {"a": 3}}),
    ("precision", {"roles": {"head": "fp7"}}), ("precision", {"gate": 3}), ("precision", {"rules": None}),
    ("precision", "fp8_curent"), ("sharding", {"mesh": 3}), ("sharding", {"mesh": {"a": "x"}}),
    ("sharding", {"mesh": {"a": 1}, "rules": 3}), ("sharding", {"mesh": {"a": 1}, "rules": {"x": 3}}),
    ("sharding", {"mesh": {"a": 1}, "rules": {"x": [[["a"]]]}}), ("sharding", {"mesh": {"a": 1}, "batch": 3}),
    ("sharding", {"mesh": {"a": 1}, "batch": None}), ("sharding", {"mesh": {"a": 1}, "devices": 3}),
    ("sharding", {"mesh": {"a": 2}, "devices": [0, None]}), ("compress", {"ratio": 0.5}), ("compress", {"names": ()}),
    ("compress", {"names": "a", "ratio": 0}), ("compress", {"names": "a", "ratio": 1.5}), ("compress", {"names": [3]}),
    ("compress", {"names": "a", "ratio": True}), ("compress", {"names": "a", "seed": -1}), ("compress", {"names": "a..b"}),
    ("compress", {"names": "a", "redraw": "step"}), ("compress", {"names": ("a", "a")}), ("compress", {"names": "a", "r": 3}),
    ("block_kinds", {"a": "attn"}),
]  # fmt: skip


@pytest.mark.parametrize("option", RIGHT)
def test_wrong_values_are_a_sentence(option):
    for value in WRONG:
        if any(value == right and type(value) is type(right) for right in RIGHT[option]):
            continue
        with pytest.raises(errors.MegacppError) as caught:
            Config.from_options({option: value}, pass_names(), {})
        assert option in str(caught.value) and "\n" not in str(caught.value), value
    for value in RIGHT[option]:
        Config.from_options({option: value}, pass_names(), {})


@pytest.mark.parametrize(("option", "value"), NESTED, ids=str)
def test_wrong_values_inside_a_plan(option, value):
    with pytest.raises(errors.BadOptionError) as caught:
        Config.from_options({option: value}, pass_names(), {})
    assert option in str(caught.value) and "\n" not in str(caught.value)


def test_a_mode_is_checked_and_right_settings_of_inductor_pass():
    with pytest.raises(errors.BadOptionError, match="option mode: .*Did you mean 'max-autotune'"):
        torch.compile(down(), backend="megacpp", mode="max-autotun")
    good = {"max_autotune": True, "triton.cudagraphs": False, "cpp.simdlen": None, "cpp.threads": 2,
            "triton.multi_kernel": True, "post_grad_custom_post_pass": lambda graph: None, "max_autotune_gemm_backends": "ATEN"}  # fmt: skip
    assert dict(Config.from_options({"inductor": good}, pass_names(), {}).inductor) == good


@pytest.mark.parametrize(("settings", "words"), [
    ({"triton.cudagraph": True}, "option inductor: got 'triton.cudagraph' (str), .*Did you mean 'triton.cudagraphs'"),
    ({"max_autotune": "yes"}, "option inductor['max_autotune']: got 'yes' (str), wanted bool."),
    ({"max_autotune": None}, "option inductor['max_autotune']: got None (NoneType), wanted bool."),
    ({"cpp.simdlen": "wide"}, "option inductor['cpp.simdlen']: got 'wide' (str), wanted int, None."),
    ({"memory_pool": "combine"}, "got 'combine' (str), wanted 'none', 'intermediates', .*Did you mean 'combined'?"),
], ids=str)
def test_settings_of_inductor(settings, words):
    with pytest.raises(errors.BadOptionError) as caught:
        Config.from_options({"inductor": settings}, pass_names(), {})
    assert all(part in str(caught.value) for part in words.split(".*"))


def test_a_config_stands_for_what_it_changes(monkeypatch):
    config = Config(strict=True, disable=("rope_qk",))
    assert given_options(config) == {"disable": ("rope_qk",), "strict": True}
    assert Config.from_options(config, pass_names(), {}) == config
    assert Config.from_options(config, pass_names(), {"MEGACPP_VERIFY": "each"}).verify == "each"
    with pytest.raises(errors.UnknownPassError, match="'rope_kq'"):
        torch.compile(down(), backend="megacpp", options=Config(disable=("rope_kq",)))  # type: ignore[arg-type]


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("eager_backend")
@pytest.mark.parametrize("way", WAYS)
def test_a_config_is_accepted_and_counts(way):
    with megacpp_compile.record() as report:
        made = WAYS[way](Config(disable=("down_norm_up",)))
        if callable(made):
            made(torch.randn(3, 8))
    assert "down_norm_up" not in {name for frame in report.frames for name in frame.passes}
    assert all(not f.reason.startswith("internal") for f in report.frames)


@pytest.mark.usefixtures("eager_backend")
@pytest.mark.parametrize("compiled", [
    lambda options: torch.compile(down(), backend="megacpp", options=options)(torch.randn(3, 8)),
    lambda options: megacpp_compile.compile(down(), options=options)(torch.randn(3, 8)),
    lambda options: megacpp_compile.explain(down(), torch.randn(3, 8), options=options),
], ids=["torch.compile", "compile", "explain"])
def test_an_unmet_demand_reaches_the_user_by_its_class(compiled):
    with pytest.raises(errors.RequirementError) as caught:
        compiled({"require": {"down_norm_up": 2}})
    error = caught.value
    assert (error.pass_name, error.wanted, error.fired) == ("down_norm_up", 2, 1)
    assert type(error).__name__ == "RequirementError"
    text = "".join(traceback.format_exception(error))
    assert "output_graph.py" not in text and "symbolic_convert.py" not in text, "frames of Dynamo's"
    assert "BackendCompilerFailed" not in text and len(text.splitlines()) < 40
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is errors.RequirementError and str(again) == str(error) and again.wanted == 2


@pytest.mark.usefixtures("eager_backend")
def test_dynamo_can_be_told_to_suppress_it(caplog):
    """`suppress_errors` is the user's word too: the model runs in eager, as with any backend."""
    with torch._dynamo.config.patch(suppress_errors=True):
        compiled = torch.compile(down(), backend="megacpp", options={"require": {"down_norm_up": 2}})
        assert compiled(torch.randn(3, 8)).shape == (3, 8)
        with pytest.raises(errors.UnknownOptionError):  # this is none of compiling
            torch.compile(down(), backend="megacpp", options={"requir": {}})


def warned(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "megacpp_compile" and r.levelno >= logging.WARNING]


@pytest.mark.parametrize(("options", "target", "words"), [
    ({"autotune_gemms": True}, CPU, "autotune_gemms=True has no effect: it is about GEMMs of cuBLAS"),
    ({"fuse_shared_input_gemms": True}, TPU, "compiled for target 'tpu'"),
    ({"autotune": True}, CPU, "Triton's kernels"), ({"precision": "fp8_current"}, CPU, "float8 needs CUDA"),
    ({"sharding": {"mesh": {"a": 1}}}, CUDA, "devices of XLA"),
    ({"compress": {"names": "*.down"}, "disable": "compressed_linear"}, CUDA, "is not to run"),
    ({"keep_latents": True, "disable": "down_norm_up"}, CUDA, "the pass 'down_norm_up'"),
    ({"block_kinds": {"layers.*": "mblock"}}, CUDA, "no policy is given"),
], ids=lambda v: next(iter(v)) if isinstance(v, dict) else getattr(v, "name", ""))
def test_options_without_effect(options, target, words, caplog):
    config = Config.from_options(options, pass_names(), {})
    for _ in range(2):
        warn_of_ineffective(config, target)
    (text,) = warned(caplog)
    assert text.startswith(f"option {next(iter(options))}=") and words in text


@pytest.mark.parametrize("target", [CPU, CUDA, TPU], ids=lambda target: target.name)
@pytest.mark.parametrize("options", [{}, {"autotune_gemms": False, "autotune": False, "precision": None}], ids=str)
def test_defaults_and_what_is_switched_off_are_not_warned_of(options, target, caplog):
    warn_of_ineffective(Config.from_options(options, pass_names(), {}), target)
    warn_of_ineffective(Config(), target)
    assert warned(caplog) == []


MAMBA = {"roles": {"mamba": "fp8_current"}}


@pytest.mark.parametrize(("policy", "precision", "target", "said"), [
    ("full", MAMBA, CUDA, True), ({"mblock": "full_plus_norms"}, MAMBA, CUDA, True), ("selective", MAMBA, CUDA, False),
    ("full", "fp8_current", CUDA, False), ("full", None, CUDA, False), (None, MAMBA, CUDA, False),
])  # fmt: skip
def test_whole_mamba_blocks_in_float8_are_warned_of(policy, precision, target, said, caplog):
    config = Config.from_options({"policy": policy, "precision": precision}, pass_names(), {})
    for _ in range(2):
        warn_of_ineffective(config, target)
    assert len(warned(caplog)) == said and all("packed documents" in text for text in warned(caplog))


class Mixer(nn.Module):
    """A Mamba mixer by the names of its linears, or by nothing but its convolution."""

    def __init__(self, inward, outward, convolves=True):
        super().__init__()
        self.inward, self.outward, self.convolves = inward, outward, convolves
        self.add_module(inward, nn.Linear(16, 16))
        self.add_module(outward, nn.Linear(16, 16))
        self.conv = nn.Conv1d(16, 16, 4, groups=16, padding=3)

    def forward(self, x):
        x = getattr(self, self.inward)(x)
        if self.convolves:
            x = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return getattr(self, self.outward)(F.silu(x))


@pytest.mark.parametrize(("name", "linears", "precision", "said"), [
    ("mixer", ("in_proj", "out_proj"), {"*.mixer.*": "fp8_current"}, True),
    ("time", ("in_proj", "out_proj"), {"*": "fp8_delayed"}, True), ("time", ("into", "back"), {"*": "fp8_block"}, True),
    ("ssm", ("into", "back"), {"*.into": "bf16", "*": "fp8_current"}, True),
    ("time", ("into", "back", False), {"*": "fp8_current"}, False),
    ("time", ("in_proj", "out_proj"), {"*.time.*": "bf16", "*": "fp8_current"}, False),
    ("engram", ("in_proj", "out_proj"), {"*": "fp8_current"}, False),
])  # fmt: skip
def test_a_rule_that_puts_a_mixer_in_float8_is_warned_of(name, linears, precision, said, caplog, monkeypatch):
    """As a role that does."""
    monkeypatch.setitem(analysis.TARGETS, "cpu", dataclasses.replace(CPU, float8=True))
    model, x = nn.Sequential(OrderedDict({name: Mixer(*linears)})), torch.randn(2, 8, 16)
    for policy in ("selective", "full"):
        caplog.clear()
        run(model, (x,), Config.from_options({"policy": policy, "precision": precision}, pass_names(), {}))
        texts = [text for text in warned(caplog) if "packed documents" in text]
        assert len(texts) == (said and policy == "full")
        assert all(f"in {list(precision.values())[-1]!r} by " in text for text in texts)


def test_options_with_effect(caplog):
    options = {"autotune_gemms": True, "fuse_shared_input_gemms": True, "autotune": True, "precision": "fp8_current",
               "keep_latents": True, "policy": "full", "block_kinds": {"a": "mblock"}}  # fmt: skip
    warn_of_ineffective(Config.from_options(options, pass_names(), {}), CUDA)
    warn_of_ineffective(Config.from_options({"sharding": {"mesh": {"a": 1}}}, pass_names(), {}), TPU)
    warn_of_ineffective(Config.from_options({"precision": "bf16"}, pass_names(), {}), CPU)
    assert warned(caplog) == []


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("eager_backend")
@pytest.mark.skipif(torch.cuda.is_available(), reason="estimates for a CUDA device where there is one")
@pytest.mark.parametrize("way", ["compile", "explain", "estimate", "torch.compile"])
def test_every_way_warns(way, caplog):
    made = WAYS[way]({"autotune": True})
    if callable(made):
        made(torch.randn(3, 8))
    assert [text[: len("option autotune=True")] for text in warned(caplog)] == ["option autotune=True"]


@pytest.mark.parametrize(("options", "environ", "words"), [
    ({}, {"MEGACPP_STRIKT": "1"},
     "MEGACPP_STRIKT is none of this package's and has no effect. Did you mean MEGACPP_STRICT?"),
    ({}, {"MEGACPP_ZZZ": ""}, "has no effect. Those are MEGACPP_DISABLE, "),
    ({"strict": False}, {"MEGACPP_STRICT": "1"}, "MEGACPP_STRICT=1 has no effect: the option 'strict' is given"),
    ({"target": "cpu"}, {"MEGACPP_TARGET": "nonsense"}, "MEGACPP_TARGET=nonsense has no effect"),
    ({"disable": []}, {"MEGACPP_DISABLE": "moe"}, "MEGACPP_DISABLE=moe has no effect"),
    ({"passes": {"moe": True}}, {"MEGACPP_DISABLE": "moe"}, "MEGACPP_DISABLE has no effect on 'moe'"),
    # These have one, or say the same.
    ({}, {"MEGACPP_STRICT": "1", "MEGACPP_DISABLE": "moe", "MEGACPP_TARGET": ""}, None),
    ({"strict": True, "disable": ["moe", "rope_qk"]}, {"MEGACPP_STRICT": "true", "MEGACPP_DISABLE": "rope_qk,moe"},
     None),
    ({}, {"MEGA": "1", "PATH": "/"}, None),
], ids=str)
def test_variables_without_effect(options, environ, words, caplog):
    for _ in range(2):
        Config.from_options(options, pass_names(), environ)
    assert [words in text for text in warned(caplog)] == ([True] if words else [])
