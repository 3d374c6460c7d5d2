"""The command line as a new user meets it: options, what a builder does wrong, what is printed beside the tables."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import megacpp_compile
from megacpp_compile import cli
from megacpp_compile.errors import BadOptionError, ForwardError, NotAModuleError, RequirementError
from megacpp_compile.memory import pareto
from megacpp_compile.passes._driver import pass_names
from megacpp_compile.report.report import Report
from megacpp_compile.report.text import bytes_text

ROOT = Path(__file__).parents[1]


class Block(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def stack():
    return nn.Sequential(*(Block(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)))


def returns(value):
    return lambda: value


def raises(error):
    def build():
        raise error

    return build


@pytest.fixture
def built(monkeypatch):
    module = types.ModuleType("built")
    monkeypatch.setitem(sys.modules, "built", module)

    add = vars(module).update
    add(stack=returns((stack(), (torch.randn(3, 8),))))
    return add


def sentence(capsys, *command):
    """What a command that fails says: one line, with nothing printed as if it had not failed."""
    assert cli.main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith(f"megacpp {command[0]}: ")
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize("pair, value", [
    ("policy=selective", "selective"), ("policy=0.4", 0.4), ("policy=none", "none"), ("policy=", ""),
    ("explain=true", True), ("explain=True", True), ('require={"moe": 2}', {"moe": 2}),
    ("require={'moe': 2}", {"moe": 2}), ("inductor.max_autotune=true", {"max_autotune": True}),
    ("inductor.triton.cudagraphs=false", {"triton.cudagraphs": False}),
    ("precision.*.mlp.*=fp8_current", {"*.mlp.*": "fp8_current"}),
    ("disable=moe,rope_qk", "moe,rope_qk"), ("disable=('moe', 'rope_qk')", ("moe", "rope_qk")),
])  # fmt: skip
def test_values_of_options(pair, value):
    assert cli._options([pair]) == {re.match(r"\w+", pair)[0]: value}


def test_entries_of_a_mapping_add_up():
    assert cli._options(["require.moe=2", "require.linear=0"]) == {"require": {"moe": 2, "linear": 0}}
    with pytest.raises(BadOptionError, match="as a whole or by its entries"):
        cli._options(["require=5", "require.moe=2"])


@pytest.mark.parametrize("pair, says", [
    ("strict=maybe", "'maybe'"), ("strict", "KEY=VALUE"), ("polcy=selective", "'policy'"), ("require.mo=1", "'moe'"),
    ("policy=selectve", "'selective'"),
])  # fmt: skip
def test_a_bad_option_costs_a_sentence(built, capsys, pair, says):
    for command in ("explain", "estimate"):
        assert says in sentence(capsys, command, "built:stack", "--option", pair)


def test_explain_writes_a_page_too(built, capsys, tmp_path):
    page = tmp_path / "report.html"
    assert cli.main(["explain", "built:stack", "--html", str(page), "--json"]) == 0
    told = Report.from_json(capsys.readouterr().out)
    assert page.read_text(encoding="utf-8") == told.to_html() and told.frames


# Values that no command can mean, of every option that takes one but --option.
MEANINGLESS = [
    *((command, "built:stack", "--device", device) for command in ("estimate", "plan")
      for device in ("gpu", "gb200", "RTX", "cuda:x", "cuda:-1", "", "5", "mps", "tpu", "xla", "cuda:99999", "no such device")),
    *(("estimate", "built:stack", "--optimizer", name) for name in ("adam", "", "inf", "nan", "-3", "1e400")),
    ("plan", "built:stack", "--plot", "plan.png", "--device", "gpu"),
    *(("compile", "built:stack", "--output", file) for file in ("no_such_folder/code", ".", "")),
    *(("explain", "built:stack", "--html", file) for file in ("no_such_folder/page.html", ".")),
    *(("evidence", action, "--records", records) for action in ("status", "gate")
      for records in ("no_such_folder", "file", "latin", "deep", "list", "folder")),
    *(("evidence", action, "--environments", ids) for action in ("status", "gate") for ids in ("", "a", "a,a", "a,b,c", "a,")),
    *(("evidence", "run", "dense_fa4_contract", "--environment", "here", "--launch", f) for f in ("none", "file", ".", "latin/a.json")),
    ("evidence", "run", "no_such_profile", "--environment", "here"),
    ("evidence", "run", "dense_fa4_contract", "--environment", "a/b"),
    ("evidence", "status", "--page", "no_such_folder/page.md"),
]  # fmt: skip


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    (tmp_path / "docs" / "evidence").mkdir(parents=True)
    for name, content in (("latin", b"\xff\xfe"), ("deep", b"[" * 10**5), ("list", b"[1]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.json").write_bytes(content)
    (tmp_path / "folder" / "a.json").mkdir(parents=True)


@pytest.mark.skipif(torch.cuda.is_available() or torch.accelerator.is_available(), reason="some of the devices are here")
@pytest.mark.usefixtures("records")
@pytest.mark.parametrize("command", MEANINGLESS, ids=" ".join)
def test_a_value_without_a_meaning_costs_a_sentence(built, capsys, monkeypatch, command):
    monkeypatch.setattr(pareto, "_candidates", lambda: iter([("none", pareto.CheckpointingPolicy())]))
    said = sentence(capsys, *command)
    assert "internal error" not in said and "please report" not in said
    if command[-1] in ("gpu", "gb200", "RTX"):
        assert "Did you mean 'cuda'?" in said


def test_every_option_of_a_command_is_tried_with_such_values():
    """Those that take a value which argparse does not check, so that a new one is not left out."""
    tried = {word for command in MEANINGLESS for word in command if word.startswith("--")} | {"--option"}

    def takers(parser):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    yield from takers(inner)
            elif action.option_strings and action.nargs != 0 and action.choices is None:
                yield action.option_strings[-1]

    assert set(takers(cli._parser())) == tried


def test_options_take_effect_but_for_a_policy_in_a_plan(built, capsys):
    assert cli.main(["explain", "built:stack", "--option", "require.moe=2"]) == 2
    assert "fired 0 times" in capsys.readouterr().err
    assert "policies of its own" in sentence(capsys, "plan", "built:stack", "--option", "policy=full")


@pytest.mark.parametrize("build, says", [
    (raises(RuntimeError("no data here")), "it raised RuntimeError: no data here (at test_cli.py:"),
    (raises(SystemExit("needs a GPU")), "SystemExit: needs a GPU"),
    (lambda required: None, "missing 1 required positional argument"),
    (stack, "it returned Sequential. Return (model, args)"),
    (returns(("model", ())), "it returned (str, tuple)"),
    (lambda: (stack(), torch.ones(3, 8)), "it returned inputs of Tensor and dict"),
    ("text", "no callable but str"),
])  # fmt: skip
def test_a_builder_that_does_not_build(built, capsys, build, says):
    built(wrong=build)
    assert says in sentence(capsys, "explain", "built:wrong")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("args, says", [
    ((), "missing 1 required positional argument"), (("text",), "Sequential cannot run on these inputs: TypeError"),
    ((torch.ones(3, 7),), "(at test_cli.py:"), (([torch.ones(3, 8)],), "cannot run on these inputs"),
])  # fmt: skip
def test_inputs_of_the_wrong_kind(built, capsys, args, says):
    built(wrong=returns((stack(), args)))
    for command in ("explain", "estimate"):
        assert says in sentence(capsys, command, "built:wrong")
        with pytest.raises(ForwardError):
            getattr(megacpp_compile, command)(stack(), *args)


def test_errors_from_python_are_of_their_own_classes():
    for call in (megacpp_compile.explain, megacpp_compile.estimate):
        with pytest.raises(NotAModuleError, match="got str"):
            call("model", torch.ones(1))
    with pytest.raises(RequirementError):
        megacpp_compile.explain(stack(), torch.randn(3, 8), options={"require": {"moe": 2}})


def test_a_module_that_is_not_there(built, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in (("halfway", "import no_such_package_at_all\n"), ("unclosed", "def build(:\n"),
                       ("leaves", "raise SystemExit('this needs a licence')\n")):  # fmt: skip
        (tmp_path / f"{name}.py").write_text(text)
    for command, builder, said in (
        ("explain", "no_such_module.inner:build", "there is no module 'no_such_module'"),
        ("explain", "halfway:build", "No module named 'no_such_package_at_all' (at halfway.py:1"),
        ("plan", "unclosed:build", "SyntaxError"), ("estimate", "leaves:build", "needs a licence"),
        ("estimate", "built:stck", "Did you mean 'stack'?"),
        *(("estimate", form, "module:callable") for form in ("built", ":stack", "built:")),
    ):  # fmt: skip
        assert said in sentence(capsys, command, builder)


def test_a_defect_of_ours_is_a_sentence_and_no_less(built, capsys, monkeypatch):
    monkeypatch.setattr(pareto, "points", lambda *_, **__: raises(KeyError("defect"))())
    assert "internal error: KeyError" in sentence(capsys, "plan", "built:stack")
    assert cli.main(["plan", "built:stack", "--verbose"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_torch_is_silent_but_for_verbose(built, capsys, caplog):
    logger = logging.getLogger("torch._dynamo")

    def noisy():
        logger.warning("torch says this")
        warnings.warn_explicit("and warns of that", UserWarning, "variables.py", 1, module="torch._dynamo.variables")
        logging.getLogger("mine").warning("the model's own")
        return stack(), (torch.randn(3, 8),)

    built(noisy=noisy)
    level = logger.level
    with pytest.warns() as warned:
        warnings.warn("one at least", UserWarning, stacklevel=1)
        assert cli.main(["explain", "built:noisy"]) == 0
    assert [str(w.message) for w in warned] == ["one at least"] and logger.level == level
    assert caplog.messages == ["the model's own"]
    with pytest.warns(UserWarning, match="warns of that"):
        assert cli.main(["explain", "built:noisy", "--verbose"]) == 0


def test_a_plan_says_each_thing_once():
    """Policies that come to the same are one row, and the star is for those that no other beats."""
    rows = (("none", 900, 2000, 0.0), ("selective", 900, 2000, 0.0), ("full", 100, 1500, 0.004), ("x", 90, 1500, 0.004),
            ("dear", 80, 1800, 0.005))  # fmt: skip
    found = pareto.marked([pareto.Point(n, megacpp_compile.CheckpointingPolicy(), a, p, s) for n, a, p, s in rows])
    marked = [("none", ("selective",), True), ("dear", (), False), ("full", (), False), ("x", (), True)]
    assert [(p.name, p.alike, p.best) for p in found] == marked
    table = pareto.text(found)
    assert "none = selective" in table and "+4 ms" in table and "1.46 KiB" in table
    assert table.count("*") == 3 and table.splitlines()[-1].startswith("* no other policy")


@pytest.mark.parametrize("scale", [1, 2**24])
def test_the_picture_of_a_plan(tmp_path, scale):
    """No name lies on another, and units are those of the numbers."""
    Figure = pytest.importorskip("matplotlib.figure").Figure
    from matplotlib.text import Text

    from megacpp_compile.memory.plot import draw

    numbers = ((0, scale * (2000 - i // 3), 1e-6 * scale * i, i % 2 == 0) for i in range(14))
    points = [pareto.Point(f"policy {i}", megacpp_compile.CheckpointingPolicy(), *n) for i, n in enumerate(numbers)]
    figure = Figure()
    draw(figure, points)
    figure.savefig(tmp_path / "plan.png")
    boxes = [Text.get_window_extent(text) for text in figure.axes[0].texts]
    assert len(boxes) == 14 and not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)
    labels = {label.get_text().split()[-1] for label in figure.axes[0].get_xticklabels()}
    assert labels <= ({"KiB", "B"} if scale == 1 else {"GiB"})
    assert "policy 3: 1.95 KiB, +3 µs" in figure.axes[0].texts[3].get_text() or scale > 1


@pytest.mark.parametrize("name, size", [("h100", 80 * 2**30), ("H200", 141 * 10**9)])
def test_a_gpu_that_is_not_here_is_estimated_for(built, capsys, name, size):
    """Its memory is said, and policies cost what its rates make of them: more on the slower of two."""
    assert cli.main(["estimate", "built:stack", "--device", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["gpu"], found["memory"]) == (name.lower(), size)
    assert cli.main(["estimate", "built:stack", "--device", name]) == 0
    assert f"{name.upper()} ({bytes_text(size)}): a step of" in capsys.readouterr().out


def test_a_plan_goes_by_the_rates_of_the_gpu(built, capsys):
    seconds = {}
    for name in ("a100", "h200"):
        assert cli.main(["plan", "built:stack", "--device", name, "--json"]) == 0
        seconds[name] = max(p["seconds"] for p in json.loads(capsys.readouterr().out))
    assert seconds["a100"] == pytest.approx(seconds["h200"] * 4800 / 2039, rel=0.01)
    assert "fit into its" in pareto.text([pareto.Point("none", megacpp_compile.CheckpointingPolicy(), 1, 1, 0.0)], "b200")


@pytest.mark.parametrize("missing, path, says", [
    (True, "plan.png", "matplotlib"), (False, "plan.docx", "a file such as plan.png"), (False, "no/plan.png", "No such file"),
])  # fmt: skip
def test_a_picture_that_cannot_be_is_said_before_the_plan(built, capsys, monkeypatch, tmp_path, missing, path, says):
    """A plan takes minutes, in which nobody waits for that sentence."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pareto, "points", lambda *_, **__: pytest.fail("planned before"))
    if missing:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    else:
        pytest.importorskip("matplotlib.figure")
    assert says in sentence(capsys, "plan", "built:stack", "--plot", path)
    assert not [*tmp_path.iterdir()]


def test_the_profiler_is_quiet():
    """Its library writes to stderr by itself; a process of its own, as it reads that setting once."""
    code = "from megacpp_compile import cli; import sys; sys.exit(cli.main(['doctor', '--device', 'cpu', '--json']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not done.stderr and json.loads(done.stdout)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.end_to_end
def test_the_example_of_the_help(capsys):
    """Its experts are grouped GEMMs in float32, which torch's fake kernel refuses."""
    assert cli.main(["estimate", "examples.explain_hf:build", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["compiled"] < found["eager"]


def test_without_a_command_it_says_what_there_is(capsys):
    assert cli.main([]) == 0
    assert "explain" in capsys.readouterr().out


def test_versions(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert f"megacpp_compile {megacpp_compile.__version__}, torch {torch.__version__}" in capsys.readouterr().out


def test_passes_are_told_whole(capsys):
    """In sentences, below each other, and which are off."""
    assert cli.main(["passes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    about: dict[str, str] = {}
    for line in lines:
        name, text = line[:24].strip(), line[24:]
        assert line[22:24] == "  " and len(line) <= 120
        about[name or list(about)[-1]] = f"{about.get(name or list(about)[-1], '')} {text}".strip()
    assert tuple(about) == pass_names() and all(text.endswith(".") for text in about.values())
    off = {name for name, text in about.items() if text.endswith("Off by default.")}
    assert off == {"hyper_connection", "stream_update", "norm_linear"}
