"""What CONTRIBUTING and the architecture page promise, where no other test holds the code to it."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import tomllib

import pytest

import megacpp_compile
from megacpp_compile import errors
from tests.docs.commands import ROOT

PACKAGE = ROOT / "megacpp_compile"
# Arguments that a signature does not take, and what no user meets, with where it ends.
PYTHONS_OWN = {
    "__init__.py": {"AttributeError"},  # of the module
    "_torch/_theme.py": {"AttributeError"},
    "_torch/_registry.py": {"AttributeError"},
    "cli.py": {"ValueError"},  # printed
    "fx/size_nodes.py": {"LookupError"},  # the site stays plain
    "fx/inductor_pass.py": {"NotImplementedError"},  # of an abstract method
    "lowerings/_gemm/cublaslt.py": {"OSError", "RuntimeError"},  # the candidate is left out
    "precision/native.py": {"TypeError", "ValueError"},
}


def test_errors_are_this_package_s_own():
    own = {name for name, value in vars(errors).items() if isinstance(value, type)}
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = ast.unparse(node.exc.func).rpartition(".")[2]
                if name not in own and hasattr(builtins, name) and name != "AssertionError":  # a defect of this package
                    found.setdefault(str(path.relative_to(PACKAGE)), set()).add(name)
    assert {place: found[place] - PYTHONS_OWN.get(place, set()) for place in found} == dict.fromkeys(found, set())


def test_every_error_says_what_it_is_given():
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.MegacppError):
            assert inspect.getdoc(value), name


def test_the_page_has_the_layers_that_are_checked():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if "layers" in contract)
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert re.search(r"```text\n(.*?)```", page, re.S)[1].split("\n")[:-1] == layers
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == {name for name in folders if f"`{name}/`" in page}, "every package has its word"


def test_the_page_of_passes_has_every_pass_and_no_other():
    page = (ROOT / "docs" / "passes.md").read_text()
    listed = re.findall(r"^\| `(\w+)`", page, re.M)
    assert sorted(listed) == sorted(p.stem for p in (PACKAGE / "passes").glob("[!_]*.py"))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_files_that_a_page_names_are_there(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`((?:megacpp_compile|tests|benchmarks|examples|docs|matchers|passes|lowerings|remat|config)/[\w./]*)`", text))
    missing = [name for name in named if not (ROOT / name).exists() and not (PACKAGE / name).exists()]
    assert not missing


def test_public_names_that_a_page_names_are_there():
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        for name in re.findall(r"`megacpp_compile\.(\w+)", page.read_text()):
            assert name in megacpp_compile.__all__ or (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists(), (page, name)


def test_environment_variables_of_the_page_are_options():
    page = (ROOT / "docs" / "tools.md").read_text()
    source = (PACKAGE / "config" / "options.py").read_text()
    assert set(re.findall(r"MEGACPP_\w+", page)) == {v for v in re.findall(r"MEGACPP_[A-Z]+", source) if v != "MEGACPP_"}
