"""Rules and lowerings of other packages: registered, reported, verified, required and refused as this package's own."""

from __future__ import annotations

import importlib
import re
import sys
import types

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import megacpp_compile
from megacpp_compile import Match, MatchFailure, errors, register, register_lowering, unregister
from megacpp_compile.backends._lower import LowerSemanticOps
from megacpp_compile.config import registered
from megacpp_compile.config.options import Config
from megacpp_compile.lowerings import _registry
from megacpp_compile.lowerings._registry import choose, semantic_ops
from megacpp_compile.passes import _driver
from megacpp_compile.passes._driver import pass_names
from megacpp_compile.targets import CPU
from tests.frames import Function, check, render, run

aten = torch.ops.aten
X = (3, 4)


def x(**how):
    return torch.randn(*X, requires_grad=True, **how)


def doubled(view):
    """A sum of a value with itself."""
    for node in view.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if node.args[0] is node.args[1]:
            yield node


def rule_of(rewrite, name="double", **how):
    """Registers a rule that puts what `rewrite(build, x)` emits in the place of `x + x`."""

    def find(view):
        for node in doubled(view):
            yield Match(node, [node.args[0]], [node], lambda build, x=node.args[0]: rewrite(build, x))

    return register(find, name=name, **how)


def twice(build, x):
    return build(aten.mul.Tensor, x, 2)


def sin_twice(x):
    y = x.sin()
    return y + y


def frames_of(config=None, f=sin_twice, **how):
    return check(Function(f), (x(),), config or Config(strict=True), **how)


# --- torch's own ops


def test_a_rule_that_emits_torchs_own_op():
    rule_of(twice)
    frames = frames_of(Config(strict=True, verify="each", require={"double": 1}))
    assert frames.fired == {"double": 1} and not frames.misses and not frames.again()
    (site,) = frames.analyses[0].outcome.sites
    assert (site.pass_name, site.op, site.lowering) == ("double", "aten::mul", "aten") and "sin_twice" in site.source
    assert frames.analyses[0].frame.verified["pass_name"] == "double"
    assert render(frames.graph) == "sin: f32[3, 4] = sin(args_0)\nmul: f32[3, 4] = mul.Tensor(sin, 2)\nreturn [mul]"


def test_decorators_and_objects():
    @register
    def by_function(view):
        """Nothing."""
        yield from ()

    @register(name="by-keywords", after=("by_function",), by_default=False)
    def other(view):
        yield from ()

    thing = types.SimpleNamespace(name="by_object", find=by_function, before=("linear",), op="mine::op")
    assert register(thing) is thing and register(thing) is thing, "what is registered stays as it is"
    names = pass_names()
    assert names.index("by_object") < names.index("linear") and names.index("by_function") < names.index("by-keywords")
    found = {p.name: p for p in _driver.all_passes()}
    assert (found["by_object"].op, found["by-keywords"].by_default, found["by_function"].doc) == ("mine::op", False, "Nothing.")
    unregister("by-keywords")
    assert "by-keywords" not in pass_names()
    with pytest.raises(errors.RegistrationError, match="'by_objec' is not registered. Did you mean 'by_object'"):
        unregister("by_objec")


def test_options_know_a_rule():
    rule_of(twice, by_default=False)
    assert not frames_of().fired
    assert frames_of(Config(strict=True, passes={"double": True})).fired == {"double": 1}
    assert not frames_of(Config(strict=True, passes={"double": True}, require={}), f=lambda x: x.sin() + x).fired
    with pytest.raises(errors.UnknownPassError, match="Did you mean 'double'"):
        Config.from_options({"disable": "duble"}, pass_names(), {})
    assert Config.from_options({"disable": "double"}, pass_names(), {}).disable == ("double",)


def test_require_and_near_misses(eager_backend):
    @register
    def never(view):
        for node in doubled(view):
            yield MatchFailure(node, "not-now", "it is a test")

    def step(options):
        torch.compiler.reset()
        torch.compile(sin_twice, backend="megacpp", options=options)(x())

    with pytest.raises(errors.RequirementError, match=r"it is a test \[not-now\]"):
        step({"require": {"never": 1}})
    with megacpp_compile.record() as report:
        step({})
    assert [(m.pass_name, m.tag) for m in report.misses] == [("never", "not-now")]
    assert "it is a test" in str(report) and "not-now" in report.render()


def test_what_a_rule_writes_is_matched_by_passes_and_rules():
    """A norm that no pass knows becomes torch's own, ahead of the pass that takes a norm between two linears."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(12, 6, bias=False), nn.Linear(6, 12, bias=False)
            self.gain = nn.Parameter(torch.rand(6) + 0.5)

        def forward(self, x):
            y = self.down(x)
            return self.up(torch.renorm(y, 2, 0, 1e9) * self.gain)

    def find(view):
        for node in view.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            if getattr(node.args[0], "target", None) is aten.renorm.default:
                y, gain = node.args[0].args[0], node.args[1]
                yield Match(node, [y, gain], [node], lambda build, y=y, gain=gain: build(
                    aten.rms_norm.default, y, [6], gain, 1e-6))  # fmt: skip

    register(find, name="odd_norm", before=("down_norm_up",))
    frames = run(Odd(), (torch.randn(5, 12, requires_grad=True),), Config(strict=True))
    assert frames.fired == {"odd_norm": 1, "down_norm_up": 1}
    assert [s.op for s in frames.analyses[0].outcome.sites] == ["aten::rms_norm", "megacpp::down_norm_up"]
    assert [name for name, _ in frames.analyses[0].op_nodes()] == ["down_norm_up"], "the norm's node is gone"


# --- rewrites that are refused


def wrong(build, x):
    return build(aten.mul.Tensor, x, 3)


REFUSED = {
    "shape": (lambda build, x: build(aten.unsqueeze.default, twice(build, x), 0), r"shape \(1, 3, 4\)"),
    "dtype": (lambda build, x: build.cast(twice(build, x), torch.float64), "torch.float64"),
    "strides": (lambda build, x: build(aten.t.default, build(aten.clone.default, build(
        aten.t.default, twice(build, x)), memory_format=torch.contiguous_format)), "strides"),
    "memory": (lambda build, x: build(aten.view.default, x, [3, 4]), "shares memory"),
    "nothing": (lambda build, x: x, "has not emitted"),
    "detached": (lambda build, x: build(aten.detach.default, twice(build, x)), "differentiable"),
    "results": (lambda build, x: (y := twice(build, x), [y, y]), "2 results for 1 outputs"),
    "writes": (lambda build, x: build(aten.mul_.Tensor, x, 2), "writes to a tensor"),
    "draws": (lambda build, x: build(aten.mul.Tensor, x, build(aten.rand_like.default, x)), "draws random numbers"),
    "raises": (lambda build, x: build(aten.mm.default, x, x), "RuntimeError"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_rewrite_that_cannot_stand_in_is_refused(case):
    rewrite, words = REFUSED[case]
    rule_of(rewrite)
    frames = frames_of(Config())
    (miss,) = frames.misses
    assert re.search(words, miss.reason), miss.reason
    assert miss.tag == ("internal-error" if case == "raises" else "rule-result") and not frames.fired
    assert frames.analyses[0].frame.captured, "the other passes go on"
    if case == "raises":
        with pytest.raises(BackendCompilerFailed, match="RuntimeError"):
            frames_of()


def test_a_value_that_is_no_input_is_refused():
    def find(view):
        for node in doubled(view):
            other = next(iter(view.graph.find_nodes(op="call_function", target=aten.cos.default)))
            yield Match(node, [node.args[0]], [node], lambda build, y=(node.args[0], other): build(aten.mul.Tensor, *y))

    register(find)
    frames = frames_of(Config(), lambda x: x.cos() + sin_twice(x))
    assert [m.reason for m in frames.misses] == ["the rule reads cos, which is none of the match's inputs"]


def test_other_modes_are_refused():
    def across(x):
        with torch.no_grad():
            y = x.sin()
        return y + y + x

    def find(view):
        for node in doubled(view):
            inner = node.args[0]
            yield Match(node, [inner.args[0]], [node], lambda build, x=inner.args[0]: twice(build, build(aten.sin.default, x)))

    register(find, name="double")
    assert frames_of(Config(), across).tags("double") == {"region"}


def test_verify_refuses_wrong_numbers():
    rule_of(wrong)
    frames = frames_of(Config(verify="each"))
    assert frames.tags("double") == {"verification"} and not frames.fired
    with pytest.raises(BackendCompilerFailed, match="VerificationError"):
        frames_of(Config(verify="each", strict=True))


def match_of(**how):
    return lambda view: (Match(**{"node": n, "inputs": [n.args[0]], "outputs": [n], "rewrite": None} | how) for n in doubled(view))


@pytest.mark.parametrize(("find", "words"), [
    (lambda view: 1 / 0, "ZeroDivisionError"), (doubled, "yields a Node, not a Match"), (match_of(node="add"), "not at a node"),
    (match_of(inputs=[]), "whose inputs are not nodes"), (match_of(outputs=["add"]), "whose outputs are not calls"),
    (match_of(), "TypeError: 'NoneType' object is not callable"),
])  # fmt: skip
def test_a_rule_that_fails_is_a_near_miss(find, words):
    register(find, name="bad")
    (miss,) = frames_of(Config()).misses
    assert (miss.pass_name, miss.tag) == ("bad", "internal-error") and words in miss.reason
    with pytest.raises(BackendCompilerFailed, match=words.partition(": ")[2] or words):
        frames_of()


def test_a_rule_that_changes_the_graph_is_an_error(eager_backend):
    @register
    def bad(view):
        for node in doubled(view):
            node.replace_all_uses_with(node.args[0])
            yield MatchFailure(node, "no", "no")

    torch.compiler.reset()
    with pytest.raises(errors.RegistrationError, match="rule 'bad' changes the graph in 'find'"):
        torch.compile(sin_twice, backend="megacpp")(x())
    for watched in _driver.all_passes():
        watched.watch.changed.clear()  # which the fixture of all tests of passes would tell


# --- registration that fails


@pytest.mark.parametrize(("how", "words"), [
    ({"name": "linear"}, "name of a pass of this package"), ({"name": "a b"}, "letters, digits"),
    ({"name": "double"}, "registered already, by tests.passes.test_registered"),
])  # fmt: skip
def test_names_that_cannot_be(how, words):
    rule_of(twice)
    with pytest.raises(errors.RegistrationError, match=words):
        register(lambda view: (), **how)


def test_what_is_no_rule():
    for rule in (object(), type("Rule", (), {"find": lambda self, view: (), "name": "r"})):
        with pytest.raises(errors.RegistrationError, match="has no 'find'"):
            register(rule, name="r")


def test_order_that_cannot_be():
    rule_of(twice, after=("linaer",))
    with pytest.raises(errors.UnknownPassError, match="'after' or 'before' of the rule 'double'. Did you mean 'linear'"):
        pass_names()
    unregister("double")
    rule_of(twice, after=("linear",), before=("moe",))
    with pytest.raises(errors.RegistrationError, match="rule 'double' waits for itself: linear -> moe -> double -> linear"):
        pass_names()
    unregister("double")
    rule_of(twice, name="a", after=("b",))
    rule_of(twice, name="b", after=("a",))
    with pytest.raises(errors.RegistrationError, match="waits for itself: a -> b -> a"):
        pass_names()


def test_nothing_is_left_of_a_test():
    assert not [p.name for p in _driver.all_passes() if getattr(p, "registered", False)] and not registered.CODE


# --- cache keys


def test_what_is_registered_is_in_the_cache_key():
    def key():
        return Config().cache_key(), LowerSemanticOps(CPU, Config()).uuid()

    def lowering(factor):
        return lambda x, cos, sin, *others: torch.ops.megacpp.rope_qk.default(x * factor, cos, sin, *others)

    config, keys = Config(), [key()]
    before = hash(config)
    rule_of(twice)
    keys.append(key())
    unregister("double")
    assert key() == keys[0]
    rule_of(wrong)
    keys.append(key())
    assert len(set(keys)) == 3 and hash(config) == before and config == Config()
    assert registered.digest(lowering(2)) == registered.digest(lowering(2)) != registered.digest(lowering(3))


# --- lowerings


@pytest.fixture
def scaled():
    """An op of another package, with a gradient and no lowering."""
    with torch.library._scoped_library("mine", "FRAGMENT"):

        @torch.library.custom_op("mine::scaled", mutates_args=())
        def scaled(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
            return x * by

        scaled.register_fake(lambda x, by=2.0: torch.empty_like(x))
        scaled.register_autograd(
            lambda ctx, grad: (grad * ctx.by, None),
            setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
        )
        yield scaled


def double_by(op):
    rule_of(lambda build, x: build(op._opoverload, x, by=2.0), op="mine::scaled")


def compiled(no_report=False, options=None):
    torch.compiler.reset()
    given = x()
    with megacpp_compile.record() as report:
        torch.compile(sin_twice, backend="megacpp", options=options or {})(given).sum().backward()
    torch.testing.assert_close(given.grad, 2 * given.cos())
    return report


def test_an_op_of_ones_own_runs_as_it_is(scaled, no_kernels):
    double_by(scaled)
    (site,) = compiled(options={"require": {"double": 1}, "verify": "each"}).sites
    assert (site.op, site.lowering) == ("mine::scaled", "mine")


def test_an_op_without_a_gradient_is_refused_in_training():
    with torch.library._scoped_library("mine", "FRAGMENT") as library:
        library.define("bare(Tensor x) -> Tensor")
        library.impl("bare", lambda x: x * 2, "CPU")
        library.impl("bare", torch.empty_like, "Meta")
        rule_of(lambda build, x: build(torch.ops.mine.bare.default, x), op="mine::bare")
        frames = frames_of(Config())
        assert frames.tags("double") == {"rule-result"} and not frames.fired
        assert run(Function(sin_twice), (torch.randn(*X),)).fired == {"double": 1}, "in inference it needs none"


def test_an_op_of_ones_own_with_a_lowering(scaled, no_kernels):
    double_by(scaled)
    traced = []

    @register_lowering(scaled, target="cpu", supports=lambda x, by: "not today" if by == 2.0 and traced else None)
    def by_torch(x, by):
        traced.append(by)
        return x * by

    (site,) = compiled().sites
    assert (site.op, site.lowering, traced) == ("mine::scaled", "by_torch", [2.0])
    (site,) = compiled().sites
    assert site.lowering == "by_torch → mine::scaled (by_torch: not today)" and traced == [2.0]
    # One that a model calls is lowered as well.
    traced.clear()
    with megacpp_compile.record() as report:
        assert torch.compile(lambda x: scaled(x, 3.0), backend="megacpp")(torch.ones(2)).tolist() == [3, 3]
    assert traced == [3.0] and [s.pass_name for s in report.sites] == ["(called)"]


def test_a_lowering_for_any_length(scaled, no_kernels):
    register_lowering(scaled, lambda x, by: torch.cat([x, x])[x.shape[0] :] * by, name="sliced", target="cpu")
    double_by(scaled)
    torch.compiler.reset()
    f = torch.compile(sin_twice, backend="megacpp", dynamic=True, options={"strict": True, "require": {"double": 1}})
    for length in (4, 7):
        given = torch.randn(length, 3)
        torch.testing.assert_close(f(given), sin_twice(given))


def test_a_lowering_of_this_packages_op():
    args = (torch.rand(2, 3, 5, 8), torch.rand(5, 4), torch.rand(5, 4), 4, False, False, False, False, torch.float32)
    semantic_ops()
    op = torch.ops.megacpp.mla_rope_q.default
    usual = choose(op, "cpu", args)

    @register_lowering("megacpp::mla_rope_q", target=("cpu", "cuda"), supports=lambda q, *_: None if q.dim() == 4 else "rank")
    def ours(*args):
        return usual.body(*args) + 0

    found = choose(op, "cpu", args)
    assert (found.requested, found.effective, found.reason) == ("ours", "ours", "")
    assert found.body(*args).equal(usual.body(*args)) and found.body.body is ours
    found = choose(op, "cpu", (args[0][0], *args[1:]))
    assert (found.requested, found.effective, found.reason) == ("ours", "reference", "ours: rank")
    assert choose(op, "tpu", args).requested != "ours"


def test_a_lowering_that_breaks_the_ops_promise_leaves_the_frame(scaled, no_kernels):
    double_by(scaled)
    register_lowering(scaled, lambda x, by: (x * by).double(), name="wide")
    report = compiled()
    assert not report.frames[0].captured and not report.sites
    assert "lowering 'wide' of mine::scaled returns torch.float64 [3, 4], and the op promises" in report.frames[0].reason
    with pytest.raises(errors.RegistrationError, match="the op promises"):
        compiled(options={"strict": True})


def body(x, by):
    return x * by


@pytest.mark.parametrize(("op", "how", "words"), [
    ("mine::scald", {}, "there is not: import what defines it first"), ("megacpp::rope_qq", {}, "Did you mean 'megacpp::rope_qk'"),
    (None, {"target": "gpu"}, "not for one of cpu, cuda, tpu"), (None, {"body": lambda x: x}, "does not take the arguments of mine::scaled"),
    (None, {"name": "body", "body": lambda x, by: x}, "registered already"), (None, {"body": lambda x, by: x}, "needs a name"),
    ("aten::add.Tensor", {}, "an op of torch's own"), ("mine::scaled.Tensor", {}, "is of no op"), (body, {}, "is of no op"), ("megacpp::rope_qk", {"body": lambda *args: args, "name": "reference"}, "name of one of this"),
])  # fmt: skip
def test_lowerings_that_cannot_be(scaled, op, how, words):
    register_lowering(scaled, body)
    before = dict(semantic_ops())
    with pytest.raises(errors.RegistrationError, match=words):
        register_lowering(op or scaled, **{"body": body, **how})
    assert register_lowering(scaled, body) is body and semantic_ops() == before


# --- entry points


def installed(tmp_path, monkeypatch, points, **modules):
    """A package with these entry points and modules on the path, as pip leaves one."""
    info = tmp_path / "other_rules-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-rules\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    registered._loaded.clear()
    semantic_ops.cache_clear()


MODULE = """
from megacpp_compile import register, register_lowering

@register
def from_elsewhere(view):
    yield from ()

@register_lowering("megacpp::mla_rope_q", target="tpu")
def from_elsewhere_too(*args):
    return args
"""


def test_entry_points(tmp_path, monkeypatch):
    points = "[megacpp.rules]\nfrom_elsewhere = other_rules:from_elsewhere\n[megacpp.ops]\nops = other_rules\n"
    installed(tmp_path, monkeypatch, points, other_rules=MODULE)
    assert "other_rules" not in sys.modules, "loaded when they are asked for"
    assert pass_names().count("from_elsewhere") == 1
    assert Config.from_options({"disable": ["from_elsewhere"]}, pass_names(), {}).disable
    semantic_ops()
    assert "lowering megacpp::mla_rope_q tpu from_elsewhere_too" in registered.CODE
    sys.modules.pop("other_rules")
    assert "from_elsewhere" in pass_names() and "other_rules" not in sys.modules, "once"


@pytest.mark.parametrize(("value", "words"), [
    ("other_rules:rule", "ImportError: no such thing"), ("nowhere:rule", "ModuleNotFoundError: No module named 'nowhere'"),
    ("fine:linear", "has the name of a pass of this package"), ("fine:late", "unknown pass 'linaer'"),
])  # fmt: skip
def test_a_broken_entry_point_is_warned_of(value, words, tmp_path, monkeypatch, caplog):
    fine = MODULE + "\ndef linear(view):\n    yield from ()\n\nclass late:\n    name, after = 'late', ('linaer',)\n    find = linear\n"
    points = f"[megacpp.rules]\nbroken = {value}\nfrom_elsewhere = fine:from_elsewhere\n"
    installed(tmp_path, monkeypatch, points, other_rules="raise ImportError('no such thing')", fine=fine + "late = late()\n")
    assert "from_elsewhere" in pass_names() and "late" not in pass_names(), "the others are loaded"
    (warning,) = {r.message for r in caplog.records}
    assert words in warning and f"broken = {value} (megacpp.rules) of other-rules is left out" in warning
    assert "Update or uninstall other-rules" in warning


def test_a_broken_entry_point_of_ops_is_warned_of(tmp_path, monkeypatch, caplog):
    installed(tmp_path, monkeypatch, "[megacpp.ops]\nops = other_rules\n", other_rules="1 / 0")
    assert semantic_ops() and "other-rules is left out: ZeroDivisionError" in caplog.text


# --- Inductor


@pytest.mark.end_to_end
def test_code_of_another_lowering_is_not_taken_from_the_cache(scaled, tmp_path, monkeypatch):
    """The graph is the same, and so is the directory of Inductor's cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    rule_of(lambda build, x: build(scaled._opoverload, x), op="mine::scaled")
    given, found = torch.randn(*X), []
    for factor in (2.0, 3.0, 2.0):
        _registry.ADDED.clear()
        register_lowering(scaled, lambda x, by, factor=factor: x * factor, name="by_factor", target="cpu")
        torch.compiler.reset()
        found.append(torch.compile(sin_twice, backend="megacpp")(given) / given.sin())
    for got, factor in zip(found, (2.0, 3.0, 2.0), strict=True):
        torch.testing.assert_close(got, torch.full(X, factor))
    counters = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
    assert counters, "the first code comes from the cache, where it fits"


def test_dynamic_shapes_and_autocast():
    rule_of(twice)
    frames = frames_of(Config(strict=True), dynamic=True)
    assert frames.fired == {"double": 1} and not frames.misses



def test_in_a_region_of_autocast():
    """What a rule emits has the dtype that it has in the region."""
    def multiplied(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ x.mT) * 2, sin_twice(x) @ x.mT

    def find(view):
        for node in view.graph.find_nodes(op="call_function", target=aten.matmul.default):
            yield Match(node, [*node.args], [node], lambda build, a=node.args: build(aten.mm.default, *a))

    rule_of(twice)
    register(find, name="as_mm")
    frames = frames_of(Config(strict=True), multiplied, tolerance=0.0)
    assert frames.fired == {"double": 1, "as_mm": 2} and not frames.misses
