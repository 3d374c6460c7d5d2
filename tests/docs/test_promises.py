"""What CONTRIBUTING and the architecture page promise, where no other test holds the code to it, and that the API
reference has every public name, each where it is defined."""

from __future__ import annotations

import argparse
import ast
import builtins
import dataclasses
import importlib.util
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import torch

import megacpp_compile
from megacpp_compile import cli, errors
from tests.docs.commands import ROOT
from tests.sources import ON_ONE_WORKER, PACKAGE, SOURCES, nodes, tree

# Pages of docs/ that the site builds and its navigation leaves out -> why.
LEFT_OUT: dict[str, str] = {}
# Arguments that a signature does not take, and what no user meets, with where it ends.
PYTHONS_OWN = {
    "__init__.py": {"AttributeError"},  # of the module
    "_torch/_theme.py": {"AttributeError"}, "_torch/_registry.py": {"AttributeError"},
    "_torch/iterators.py": {"ValueError"},  # the loop is traced with all its steps
    "backends/serialized.py": {"RuntimeError"},  # torch compiles anew
    "cli.py": {"ValueError"},  # printed
    "fx/size_nodes.py": {"LookupError"},  # the site stays plain
    "fx/inductor_pass.py": {"NotImplementedError"},  # of an abstract method
    "fx/short_loops.py": {"RuntimeError"},  # a mark that a pass of this package left in a graph
    "lowerings/_gemm/cublaslt.py": {"OSError", "RuntimeError"},  # the candidate is left out
    "precision/native.py": {"TypeError", "ValueError"},
}


@ON_ONE_WORKER
def test_errors_are_this_package_s_own():
    own = {name for name, value in vars(errors).items() if isinstance(value, type)}
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = ast.unparse(node.exc.func).rpartition(".")[2]
                if name not in own and hasattr(builtins, name) and name != "AssertionError":  # a defect of this package
                    found.setdefault(str(path.relative_to(PACKAGE)), set()).add(name)
    assert {place: found[place] - PYTHONS_OWN.get(place, set()) for place in found} == dict.fromkeys(found, set())
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.MegacppError):
            assert inspect.getdoc(value), name


def test_pages_have_the_layers_that_are_checked_and_every_pass():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if "layers" in contract)
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert re.search(r"```text\n(.*?)```", page, re.S)[1].split("\n")[:-1] == layers
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == {name for name in folders if f"`{name}/`" in page}, "every package has its word"
    page = (ROOT / "docs" / "passes.md").read_text()
    listed = re.findall(r"^\| `(\w+)`", page, re.M)
    assert sorted(listed) == sorted(p.stem for p in (PACKAGE / "passes").glob("[!_]*.py"))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_files_that_a_page_names_are_there(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`((?:megacpp_compile|tests|benchmarks|examples|docs|matchers|passes|lowerings|remat|config)/[\w./]*)`", text))
    missing = [name for name in named if not (ROOT / name).exists() and not (PACKAGE / name).exists()]
    assert not missing


def test_public_names_and_variables_that_pages_name_are_there():
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        for name in re.findall(r"`megacpp_compile\.(\w+)", page.read_text()):
            assert name in megacpp_compile.__all__ or (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists(), (page, name)
    page = (ROOT / "docs" / "tools.md").read_text()
    source = (PACKAGE / "config" / "options.py").read_text()
    assert set(re.findall(r"MEGACPP_\w+", page)) == {v for v in re.findall(r"MEGACPP_[A-Z]+", source) if v != "MEGACPP_"}


@pytest.fixture
def reference():
    spec = importlib.util.spec_from_file_location("_reference", ROOT / "docs" / "_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.end_to_end
def test_a_page_for_every_public_name_and_a_usage_for_every_command(reference):
    homes = reference.public_names()
    assert set(homes) == set(megacpp_compile.__all__)
    for name, path in homes.items():
        module, _, attribute = path.rpartition(".")
        source = Path(importlib.util.find_spec(module).origin).read_text()
        defined = {n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        assert attribute in defined, f"{name}: {path}"
    text = "\n".join(reference.pages().values())
    assert all(f"::: {path}\n" in text and f"heading: megacpp_compile.{name}\n" in text for name, path in homes.items())
    text = reference.command_line()
    listed = text[text.index("{") + 1 : text.index("}")].split(",")
    assert tuple(listed) == reference.COMMANDS and all(f"usage: megacpp {command}" in text for command in listed)


def test_every_page_of_the_site_is_in_its_navigation(reference, monkeypatch):
    """Written, generated and made of docstrings; `LEFT_OUT` has those that are not, with the reason."""
    monkeypatch.setattr(reference, "command_line", lambda: "")
    settings = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", settings[settings.index("\nnav:") :], re.M)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    pages |= {f"reference/{name}" for name in reference.pages()}
    assert sorted(listed) == sorted(pages - set(LEFT_OUT)) and set(LEFT_OUT) <= pages and all(LEFT_OUT.values())


def test_a_name_without_a_topic_is_an_error(reference, monkeypatch):
    monkeypatch.setitem(reference.TOPICS, "Sharding", ())
    with pytest.raises(ValueError, match="ShardingPlan"):
        reference.public_names()


# Arguments that messages name and that are other libraries', or of a module that Transformer Engine's stand-in replaces.
OTHERS_ARGUMENTS = {"retain_graph", "create_graph", "past_key_values", "offs", "max_autotune", "out_features",
                    "in_features", "normalization", "recipe"}  # fmt: skip
OTHERS_FLAGS = {"--short", "--porcelain", "--untracked-files", "--query-gpu", "--format", "--junitxml"}


def messages(tree):
    """What a module's code says: its strings but for docstrings, those with fields whole."""
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            parts.add(node.body[0].value)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {*ast.walk(node)} - {node}
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            yield node.value


def named_in(text):
    """(kind, name) of each option, argument and flag that a message names."""
    for kind, pattern in (
        ("option", r"""\boptions=\{+['"](\w+)"""), ("option", r"""\boptions? ['"`](\w+)"""),
        ("option", r"""['"`](\w+)['"`] option"""), ("argument", r"""(?<![-\w])([a-z]\w{2,})=(?=['"(\[{\w])"""),
        ("flag", r"(?<![-\w])(--[a-z][\w-]+)"),
    ):  # fmt: skip
        yield from ((kind, name) for name in re.findall(pattern, text))


@pytest.fixture(scope="module")
def there_is():
    options = {f.name for f in dataclasses.fields(megacpp_compile.Config)}
    plans = (megacpp_compile.CheckpointingPolicy, megacpp_compile.PrecisionPlan, megacpp_compile.ShardingPlan)
    callables = [torch.compile, *(v for n in megacpp_compile.__all__ if callable(v := getattr(megacpp_compile, n)))]
    arguments = {name for one in (*callables, *plans) for name in inspect.signature(one).parameters}
    subparsers = [cli._parser()]
    flags = set(OTHERS_FLAGS)
    while subparsers:
        for action in subparsers.pop()._actions:
            flags |= set(action.option_strings)
            subparsers += action.choices.values() if isinstance(action, argparse._SubParsersAction) else ()
    return {"option": options, "argument": options | arguments | OTHERS_ARGUMENTS, "flag": flags}


@ON_ONE_WORKER
def test_options_arguments_and_flags_that_messages_name_are_there(there_is):
    """Advice that names an option is no advice where there is none so called."""
    seen = set()
    for path in SOURCES:
        for text in messages(tree(path)):
            for kind, name in named_in(text):
                assert name in there_is[kind], f"{path.relative_to(ROOT)}: {kind} {name!r} in {text!r}"
                seen.add((kind, name))
    assert {"fa4", "drop_outputs", "compress", "policy"} <= {name for kind, name in seen if kind == "option"}
    planted = "Set options={'fa5': True}, leave out the option 'bakend', pass bakend='auto', or say --evironment."
    assert sorted(name for kind, name in named_in(planted) if name not in there_is[kind]) == [
        "--evironment", "bakend", "bakend", "fa5",
    ]  # fmt: skip


def test_options_said_to_be_without_effect_are_options_and_the_page_lists_them(there_is):
    tree = ast.parse((PACKAGE / "config" / "effects.py").read_text())
    function = next(n for n in tree.body if getattr(n, "name", "") == "_ineffective")
    names = {c.value for n in ast.walk(function) if isinstance(n, ast.Yield | ast.For) for c in ast.walk(
        n.iter if isinstance(n, ast.For) else n.value.elts[0]) if isinstance(c, ast.Constant)}  # fmt: skip
    page = (ROOT / "docs" / "options.md").read_text()
    page = page[page.index("## Options without effect") : page.index("## Environment")]
    rows = {n for row in re.findall(r"^\| (`.*?) \|", page, re.M) for n in re.findall(r"`(\w+)`", row)}
    assert names <= there_is["option"] and rows == names
