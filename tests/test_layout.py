"""What the tree promises: where things are, what they are called, who imports whom, and what an import costs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import megacpp_compile
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.passes._driver import all_passes, pass_names

PACKAGE = Path(megacpp_compile.__file__).parent
TESTS = Path(__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
PASSES = sorted(p.stem for p in (PACKAGE / "passes").glob("*.py") if not p.stem.startswith("_"))
OPS = sorted(p.parent.name for p in (PACKAGE / "lowerings").glob("[!_]*/__init__.py"))

LONGEST_FILE = 400
# On an idle machine; the shortest of several runs, as whatever else runs can only add to it.
LONGEST_IMPORT = 0.050
HEAVY = ("triton", "transformer_engine", "torch_xla", "jax")


# --- passes


def test_pass_order():
    """Reports, counts and rewrites follow it; a pass that moves may see another graph."""
    assert pass_names() == (
        "causal_conv1d", "moe", "linear", "down_norm_up", "gated_rms_norm", "mla_rope_q", "mla_rope_kv", "rope_qk",
        "ssd_scan",
        "norm_linear",
    )  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_pass(name):
    module = importlib.import_module(f"megacpp_compile.passes.{name}")
    assert module.name == name
    assert module.__doc__, "a pass file begins with its idiom"
    assert callable(module.find)
    assert set(module.after) <= set(PASSES)
    assert module.op in {f"{op.namespace}::{op._opname}" for op in semantic_ops()}
    assert (TESTS / "passes" / f"test_{name}.py").exists()


def test_the_driver_runs_every_pass():
    assert sorted(pass_names()) == PASSES
    for i, p in enumerate(all_passes()):
        assert set(p.after) <= set(pass_names()[:i])


# --- ops


@pytest.mark.parametrize("op", OPS)
def test_op(op):
    assert (PACKAGE / "lowerings" / op / "reference.py").exists()
    assert (TESTS / "lowerings" / f"test_{op}.py").exists()
    assert importlib.import_module(f"megacpp_compile.lowerings.{op}").__doc__, "an op's folder begins with its contract"


# --- files


def test_no_file_is_too_long():
    lengths = {str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for p in SOURCES}
    lengths.pop("errors.py")  # all errors are in one file, a class each: a list, of which nobody reads more than an entry
    assert not {name: n for name, n in lengths.items() if n > LONGEST_FILE}


def test_no_utils():
    assert not [p for p in SOURCES if p.stem in ("utils", "util", "helpers", "misc")]


@pytest.mark.parametrize("folder", ["passes", "matchers", "frontend"])
def test_nothing_asks_for_a_device(folder):
    """What is recognised names ops; which kernel serves one is the lowerings' to say."""
    for path in (PACKAGE / folder).rglob("*.py"):
        assert not [m for m in imported(path) if m.startswith(("triton", "torch_xla", "torch.cuda"))], path


# --- who imports whom


def imported(path: Path) -> set[str]:
    """The modules a file imports anywhere in it, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert path.is_relative_to(PACKAGE)
            above = path.relative_to(PACKAGE.parent).with_suffix("").parts[: -node.level or None]
            module = ".".join((*above, *(node.module or "").split("."))) if node.level else node.module or ""
            # `from package import module` names a module as well as `from module import name` does.
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def test_imports_go_down():
    """The contracts of import-linter in pyproject.toml, which `make lint` checks, too."""
    found = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"],
        capture_output=True, text=True, cwd=PACKAGE.parent,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout


def test_the_root_is_short():
    """Ten modules at most beside the packages: a newcomer reads the root first."""
    assert len(list(PACKAGE.glob("*.py"))) <= 10


@pytest.mark.parametrize("folder", ["passes", "matchers", "lowerings", "frontend", "config"])
def test_inductor_is_behind_the_backends(folder):
    """Config alone asks Inductor's settings for their names, to say where an unknown option belongs."""
    allowed = {"config/options.py", "lowerings/_gemm/autotune.py"}
    for path in (PACKAGE / folder).rglob("*.py"):
        found = [m for m in imported(path) if m.startswith("torch._inductor")]
        assert not found or str(path.relative_to(PACKAGE)) in allowed, path


def test_config_alone_reads_the_environment():
    reading = set()
    for path in SOURCES:
        names = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        if names & {"environ", "getenv"}:
            reading.add(str(path.relative_to(PACKAGE)))
    assert reading == {"config/options.py"}


# --- what an import costs

IMPORT = f"""
import sys, time, torch
began = time.perf_counter()
import megacpp_compile
print(time.perf_counter() - began)
print([name for name in {HEAVY!r} if name in sys.modules])
"""


def test_import_is_light():
    """torch may bring triton itself; ours must not. Imported first, torch shows what was there before."""
    seconds = []
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )
        assert out[1] == "[]"
        seconds.append(float(out[0]))
        if min(seconds) < LONGEST_IMPORT:
            break
    assert min(seconds) < LONGEST_IMPORT, seconds
