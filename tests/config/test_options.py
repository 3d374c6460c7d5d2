"""`Config`: what is accepted, what is refused and with which words, equality, the environment."""

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys

import pytest
import torch

from megacpp_compile import errors
from megacpp_compile.config.checkpointing import CheckpointingPolicy
from megacpp_compile.config.options import Config
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.config.sharding import ShardingPlan
from megacpp_compile.report.records import MissedFusion
from megacpp_compile.targets import CPU, CUDA, TPU

PASSES = ("down_norm_up", "mla_rope_q", "mla_rope_kv")


def read(options=None, **environ):
    return Config.from_options(options, PASSES, environ)


def test_defaults_and_what_auto_comes_to():
    config = read()
    assert config == Config()
    assert (config.disable, config.strict, config.verify, config.target) == ((), False, "off", "auto")
    assert (config.keep_latents, config.fuse_shared_input_gemms, config.autotune_gemms, config.autotune) == ("auto", False, True, False)
    assert config.overlap_collectives is True
    assert dict(config.passes) == dict(config.require) == dict(config.inductor) == {}
    assert all(config.enabled(name) for name in PASSES)
    assert [Config().on(target).keep_latents for target in (CPU, CUDA, TPU)] == [False, False, True]
    assert [Config(keep_latents=kept).on(TPU).keep_latents for kept in (False, True)] == [False, True]
    assert not read().enabled("mla_rope_q", default=False)
    assert read({"passes": {"mla_rope_q": True}}).enabled("mla_rope_q", default=False)


def test_every_field_is_read():
    options = {
        "disable": ["mla_rope_q"], "passes": {"down_norm_up": True, "mla_rope_kv": False},
        "require": {"down_norm_up": 27}, "strict": True, "verify": "each", "target": "cuda", "explain": True,
        "summary": False, "keep_latents": True, "fuse_shared_input_gemms": True, "autotune_gemms": False,
        "overlap_collectives": False, "autotune": True, "expert_loops": False, "rolled_loops": False,
        "drop_outputs": ("logits",), "fa4": True,
        "attention": "default", "policy": CheckpointingPolicy("full").to_dict(),
        "block_kinds": {"layers.*.mixer": "mblock"}, "precision": PrecisionPlan({"*.mlp.*": "fp8_block"}).to_dict(),
        "cache_weight_casts": True, "compress": {"names": ["*.down_proj"], "ratio": 0.5, "seed": 3, "redraw": "update"},
        "sharding": ShardingPlan({"model": 4}, {"*.up.weight": ("model", None)}).to_dict(),
        "repeated_blocks": True, "inductor": {"max_autotune": True},
    }
    config = read(options)
    assert config.to_dict() == {**options, "disable": ("mla_rope_q",)}
    assert set(options) == {f.name for f in dataclasses.fields(Config)}
    assert [config.enabled(name) for name in PASSES] == [True, False, False]


def test_attention_is_measured_or_fa4s():
    assert read({"attention": "fastest"}).attention == "fastest"
    with pytest.raises(errors.BadOptionError, match="decides without a measurement"):
        read({"attention": "fastest", "fa4": True})
    with pytest.raises(errors.BadOptionError, match="Did you mean 'fastest'"):
        read({"attention": "fast"})


@pytest.mark.parametrize(("given", "stored"), [
    ("mla_rope_q", ("mla_rope_q",)), ("mla_rope_q, down_norm_up,", ("down_norm_up", "mla_rope_q")),
    (["mla_rope_q", "down_norm_up", "mla_rope_q"], ("down_norm_up", "mla_rope_q")), ("", ()),
])
def test_disable_takes_text_and_lists(given, stored):
    assert read({"disable": given}).disable == stored


def test_unknown_option_names_the_closest_and_all():
    with pytest.raises(errors.UnknownOptionError) as caught:
        read({"disabel": "mla_rope_q"})
    named = (f.name for f in dataclasses.fields(Config))
    assert all(w in str(caught.value) for w in ("unknown option 'disabel'", "Did you mean 'disable'?", *named))
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("key", ["max_autotune", "triton", "no_such_thing_anywhere"])
def test_unknown_option_of_inductor_or_without_a_close_name_points_to_inductor(key):
    """Also where one of ours is spelled alike, as `autotune` is."""
    with pytest.raises(errors.UnknownOptionError) as caught:
        read({key: True})
    assert "Did you mean" not in str(caught.value)
    assert "Inductor's own settings go under 'inductor'" in str(caught.value)


@pytest.mark.parametrize(("key", "value", "says"), [
    ("max_autotune", True, "of Inductor's: options={'inductor': {'max_autotune': True}}."),
    ("epilogue_fusion", False, "of Inductor's: options={'inductor': {'epilogue_fusion': False}}."),
    ("triton.cudagraphs", True, "of Inductor's: options={'inductor': {'triton.cudagraphs': True}}."),
    ("triton", {"cudagraphs": True}, "options={'inductor': {'triton."), ("cuda", 1, "options={'inductor': {'cuda."),
    ("max_autotun", True, "Did you mean a setting of Inductor's, options={'inductor': {'max_autotune': True}}?"),
    ("triton.cudagraph", True, "{'triton.cudagraphs': True}"),
    ("mode", "max-autotune", "torch.compile(model, backend='megacpp', mode='max-autotune')"),
    ("dynamic", True, "torch.compile(model, backend='megacpp', dynamic=True)"),
    ("fullgraph", True, "torch.compile(model, backend='megacpp', fullgraph=True)"),
    ("autotun", True, "Did you mean 'autotune'?"), ("keep_latent", True, "Did you mean 'keep_latents'?"),
    ("inducter", {}, "Did you mean 'inductor'?"),
])  # fmt: skip
def test_an_option_of_another_s_says_where_it_goes(key, value, says):
    """Inductor's settings, single and grouped, nearly spelled too, and torch.compile's arguments."""
    with pytest.raises(errors.UnknownOptionError) as caught:
        read({key: value})
    assert says in str(caught.value)


@pytest.mark.parametrize("group", [False, True])
def test_each_setting_of_inductor_and_each_argument_says_where_it_goes(group):
    from torch._inductor import config

    names = {name.partition(".")[0] if group else name for name in config.get_config_copy()}
    names |= set() if group else set(inspect.signature(torch.compile).parameters) - {"model", "backend", "options"}
    for name in sorted(names - {f.name for f in dataclasses.fields(Config)}):
        with pytest.raises(errors.UnknownOptionError, match=r"'inductor': \{|It is an argument of torch.compile"):
            read({name: True})


@pytest.mark.parametrize("options", [
    {"disable": "mla_rope_Q2"}, {"disable": ["mla_rope_qq"]}, {"passes": {"mla_ropeq": True}},
    {"require": {"mlarope_q": 1}},
])
def test_unknown_pass_names_the_closest_the_option_and_all(options):
    with pytest.raises(errors.UnknownPassError) as caught:
        read(options)
    words = f"in option {next(iter(options))!r}", "Did you mean 'mla_rope_q'?", ", ".join(PASSES)
    assert all(w in str(caught.value) for w in words)


@pytest.mark.parametrize(("options", "words"), [
    ({"strict": 1}, "option strict: got 1 (int), wanted True or False"),
    ({"explain": "yes"}, "option explain: got 'yes' (str), wanted True or False"),
    ({"keep_latents": 1}, "option keep_latents: got 1 (int), wanted True, False or 'auto'"),
    ({"fuse_shared_input_gemms": None}, "option fuse_shared_input_gemms: got None (NoneType), wanted True or False"),
    ({"autotune": "max"}, "option autotune: got 'max' (str), wanted True or False"),
    ({"autotune": [True]}, "option autotune: got [True] (list), wanted True or False"),
    ({"passes": {"mla_rope_q": 1}}, "option passes['mla_rope_q']: got 1 (int), wanted True or False"),
    ({"passes": ["mla_rope_q"]}, "wanted a mapping with str keys"),
    ({"require": {"mla_rope_q": True}}, "option require['mla_rope_q']: got True (bool), wanted an int, 0 or more"),
    ({"require": {"mla_rope_q": -1}}, "got -1 (int), wanted an int, 0 or more"),
    ({"require": {"mla_rope_q": 2.0}}, "got 2.0 (float), wanted an int, 0 or more"),
    ({"require": 27}, "option require: got 27 (int), wanted a mapping"),
    ({"disable": 3}, "option disable: got 3 (int), wanted pass names"),
    ({"disable": ["mla_rope_q", 3]}, "wanted pass names"),
    ({"verify": "eahc"}, "wanted one of 'off', 'each'. Did you mean 'each'?"),
    ({"verify": True}, "option verify: got True (bool), wanted one of 'off', 'each'."),
    ({"target": "CUDA"}, "Did you mean 'cuda'?"), ({"target": "gpu"}, "Did you mean 'cuda'?"),
    ({"target": "xla"}, "Did you mean 'tpu'?"),
    ({"inductor": {1: True}}, "option inductor: got {1: True} (dict), wanted a mapping with str keys"),
    ({"passes": {"mla_rope_q": True}, "disable": "mla_rope_q"}, "'disable' names 'mla_rope_q' too"),
])
def test_bad_values_say_what_was_wanted(options, words):
    with pytest.raises(errors.BadOptionError) as caught:
        read(options)
    assert words in str(caught.value) and isinstance(caught.value, ValueError) and isinstance(caught.value, TypeError)


def test_types_are_checked_by_both_constructors():
    with pytest.raises(errors.BadOptionError, match="option options: got 'disable'"):
        read("disable")
    with pytest.raises(errors.BadOptionError, match="option strict"):
        Config(strict=1)  # type: ignore[arg-type]
    assert Config(disable="b,a").disable == ("a", "b")  # type: ignore[arg-type]


def test_environment_fills_what_code_leaves(monkeypatch):
    environ = {
        "MEGACPP_DISABLE": "mla_rope_q,down_norm_up", "MEGACPP_VERIFY": "each", "MEGACPP_STRICT": "1",
        "MEGACPP_TARGET": "cpu", "MEGACPP_EXPLAIN": "True", "MEGACPP_SUMMARY": "0",
    }
    assert read({}, **environ) == Config(("mla_rope_q", "down_norm_up"), {}, {}, True, "each", "cpu", True, False)
    assert read({}, MEGACPP_STRICT="", MEGACPP_DISABLE=" ", MEGACPP_TARGET="") == Config()
    monkeypatch.setenv("MEGACPP_TARGET", "tpu")
    assert Config.from_options(None, PASSES).target == "tpu"


def test_code_wins_over_the_environment_even_with_a_default_value():
    environ = {"MEGACPP_VERIFY": "each", "MEGACPP_STRICT": "1", "MEGACPP_DISABLE": "mla_rope_q"}
    assert read({"verify": "off", "strict": False, "disable": []}, **environ) == Config()
    assert read({"target": "cpu"}, MEGACPP_TARGET="nonsense").target == "cpu"
    config = read({"passes": {"mla_rope_q": True}}, MEGACPP_DISABLE="mla_rope_q,mla_rope_kv")
    assert [config.enabled(name) for name in PASSES] == [True, True, False]
    assert not read({"passes": {"mla_rope_q": False}, "disable": "mla_rope_q"}).enabled("mla_rope_q")


@pytest.mark.parametrize(("text", "value"), [("0", False), ("false", False), ("1", True), ("TRUE", True)])
def test_bools_in_the_environment(text, value):
    assert read({}, MEGACPP_STRICT=text).strict is value


@pytest.mark.parametrize(("variable", "text", "words"), [
    ("MEGACPP_STRICT", "yes", "environment variable MEGACPP_STRICT: got 'yes' (str), wanted 0, 1, false or true"),
    ("MEGACPP_EXPLAIN", "ture", "Did you mean 'true'?"),
    ("MEGACPP_TARGET", "gpu", "environment variable MEGACPP_TARGET: got 'gpu' (str), wanted one of"),
    ("MEGACPP_VERIFY", "all", "environment variable MEGACPP_VERIFY"),
])
def test_bad_variables_are_named(variable, text, words):
    with pytest.raises(errors.BadOptionError) as caught:
        read({}, **{variable: text})
    assert words in str(caught.value)


def test_unknown_pass_in_the_environment_names_the_variable():
    with pytest.raises(errors.UnknownPassError, match="in environment variable MEGACPP_DISABLE. Did you mean 'mla_ro"):
        read({}, MEGACPP_DISABLE="mla_rop_q")


def test_frozen_also_inside():
    source = {"mla_rope_q": True}
    config = Config(passes=source)
    source["mla_rope_q"] = False
    assert config.enabled("mla_rope_q")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.strict = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.passes["mla_rope_q"] = False  # type: ignore[index]


def test_equal_settings_are_equal_whatever_their_order_and_so_are_copies():
    one = Config(disable=("b", "a"), passes={"c": True, "d": False}, inductor={"x": [1, {"y": 2}], "z": 1})
    two = Config(disable=("a", "b"), passes={"d": False, "c": True}, inductor={"z": 1, "x": [1, {"y": 2}]})
    assert one == two and hash(one) == hash(two) and one.cache_key() == two.cache_key()
    assert len({one, two, Config()}) == 2 and one != "a config"
    config = Config(passes={"a": False}, inductor={"x": [1]})
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == Config(**config.to_dict()) == config
    assert dataclasses.replace(config, strict=True).passes == {"a": False}


def test_what_auto_may_spend():
    """Nothing, or a fraction of time; a number by itself is a budget of bytes."""
    spending = Config(policy={"auto": 0.02})
    assert spending.auto_time == 0.02 and spending.own_policy is None and spending.without_auto().policy is None
    assert pickle.loads(pickle.dumps(spending)) == Config(**spending.to_dict()) == spending != Config()
    assert (Config().auto_time, Config(policy=0.02).auto_time, Config(policy=None).auto_time) == (0.005, None, None)
    for policy, words in (({"auto": 2}, "a fraction of a step's time"), ({"auto": 0.1, "ablock": "full"}, "by itself")):
        with pytest.raises(errors.BadOptionError, match=words):
            Config(policy=policy)


def test_every_field_but_what_is_printed_is_in_the_cache_key():
    base = Config()
    changed = [
        Config(disable=("a",)), Config(passes={"a": False}), Config(require={"a": 1}), Config(strict=True),
        Config(verify="each"), Config(target="cpu"), Config(keep_latents=True), Config(fuse_shared_input_gemms=True),
        Config(autotune_gemms=False), Config(overlap_collectives=False), Config(autotune=True),
        Config(inductor={"a": True}), Config(inductor={"a": 1}), Config(policy={"auto": 0.02}), Config(policy=0.02),
    ]
    assert len({config.cache_key() for config in [base, *changed]}) == len(changed) + 1
    assert Config(explain=True).cache_key() == base.cache_key() and Config(explain=True) != base
    assert Config(summary=False).cache_key() == base.cache_key() and Config(summary=False) != base


class KeyedPass:
    def __init__(self, key):
        self.key = key

    def uuid(self):
        return self.key


def test_inductor_objects_count_by_their_uuid():
    def key(value):
        return Config(inductor={"post_grad_custom_post_pass": value}).cache_key()

    assert key(KeyedPass("v1")) == key(KeyedPass("v1")) != key(KeyedPass("v2"))
    first, second = KeyedPass(None), KeyedPass(None)
    assert key(first) == key(first) != key(second)  # None means: not to be cached


@pytest.mark.end_to_end
def test_the_cache_key_is_the_same_in_another_process():
    config = Config(disable=("b", "a"), inductor={"s": {"x", "y", "z"}, "t": (1, 2.5, None)})
    code = (
        "from megacpp_compile.config.options import Config;"
        "print(Config(disable=('a', 'b'), inductor={'t': [1, 2.5, None], 's': {'z', 'y', 'x'}}).cache_key())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == config.cache_key()


def test_requirement_error_lists_where_it_nearly_fired():
    misses = [
        MissedFusion("mla_rope_q", f"layers.{i}.attn", "m.py:4, in forward: `q`", f"cat_{i}", "escapes", "q is also returned")
        for i in range(10)
    ]
    error = errors.RequirementError("mla_rope_q", 27, 17, misses)
    message = str(error)
    assert "require={'mla_rope_q': 27} was not met: the pass fired 17 times, wanted 27 times." in message
    assert "layers.0.attn (m.py:4, in forward: `q`), node cat_0: q is also returned [escapes]" in message
    assert "layers.8.attn" not in message and "and 2 more" in message and error.misses == tuple(misses)
    assert "Nothing in the graph came near" in str(errors.RequirementError("mla_rope_q", 1, 0))


@pytest.mark.parametrize(("error", "words"), [
    (errors.TargetUnavailableError("cuda", "the package triton", "pip install triton"), ["triton", "'auto'"]),
    (errors.TorchTooOldError("2.8.0"), ["torch 2.8.0", "2.9 or newer"]),
    (errors.VerificationError("down_norm_up", "layers.0", "m.py:4", "output 0", 0.01234, 1e-3),
     ["'down_norm_up'", "output 0", "layers.0 (m.py:4)", "error 0.0123", "tolerance 0.001", "disable"]),
    (errors.UnfoundedSiteError("moe", "megacpp::moe", "moe_default", "layers.0", "m.py:4", "it is gone"),
     ["'moe'", "megacpp::moe (moe_default)", "layers.0 (m.py:4)", "it is gone", "disable"]),
    (errors.NotLoweredError("megacpp::moe", "tpu", "", "m.py:4"), ["megacpp::moe at m.py:4", "'tpu'"]),
    (errors.CaptureError("autograd.Function in the graph", "node f"), ["autograd.Function in the graph (at node f)"]),
    (errors.BadOptionError("verify", "eahc", "off or each", ("off", "each")), ["'each'"]),
])
def test_errors_speak_and_can_be_pickled(error, words):
    assert isinstance(error, errors.MegacppError) and all(word in str(error) for word in words)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
