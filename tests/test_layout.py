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
        "causal_conv1d", "moe", "linear", "linear_cross_entropy", "sparse_mla", "mla_decode", "down_norm_up", "token_loop",
        "gated_delta_rule", "gated_linear_attention", "gated_rms_norm", "mla_rope_q", "mla_rope_kv", "rope_qk",
        "ssd_scan", "norm_linear", "compressed_linear",
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
    assert reading == {"config/environment.py"}


# --- torch's private parts

# Attributes that begin with an underscore and belong to objects of torch or of another package, not to this one.
ALLOWED = {
    **dict.fromkeys(["_parameters", "_buffers", "_modules"], "what an nn.Module is made of; documented with state dicts"),
    "_call_impl": "Dynamo traces the call of it, and would guard whatever stood between",
    "_attn_implementation": "of a configuration of transformers: the name its attention is called by",
    "_version": "a tensor's counter of writes, documented with autograd",
    "_cdata": "what tells storages apart, also those without memory",
    "_schema": "of a node's target: the operator's signature",
    "_opname": "of a node's target: the operator's name",
    "_erased": "of an fx.Node: whether its graph has dropped it",
    "_codegen": "of an fx.Graph: how Dynamo has its inputs named",
    "_dynamo_source": "Dynamo's note on a placeholder, copied from node to node and read where it is there",
    "_param_name_to_source": "Dynamo's note on its graph, by which AOTAutograd knows it for one; set where it is there",
    "_sequence_nr": "of autograd's node",
    "_torchdynamo_orig_backend": "of a backend: the one it wraps, where it wraps one",
    "_getframe": "of Python's sys",
    "_reinterpret": "of Triton's shared memory",
    **dict.fromkeys(["_flash_attn_fwd", "_flash_attn_bwd"], "of flash-attn-4, whose public function brings a graph break"),
    **dict.fromkeys(
        ["_data", "_scale", "_fp8_dtype", "_is_2D_scaled", "_rowwise_data", "_rowwise_scale_inv", "_scale_inv",
         "_transpose", "_transpose_invalid", "_ub_communicators"],
        "of Transformer Engine, and of its and torchao's tensors",
    ),
}  # fmt: skip


def private_torch(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, path) of whatever a file names of torch's private parts: in imports, in chains of attributes that begin at
    torch or at anything imported from it, and as strings that `getattr` and its like are given."""
    names, found = {}, []

    def see(line: int, path: str) -> None:
        # ATen's operators are public, whatever they are called.
        private = any(part.startswith("_") and not part.startswith("__") for part in path.split("."))
        if path.split(".")[0] == "torch" and private and not path.startswith("torch.ops."):
            found.append((line, path))

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                see(node.lineno, alias.name)
                names[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = path = f"{node.module}.{alias.name}"
                see(node.lineno, path)

    def path_of(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{path_of(node.value)}.{node.attr}"
        return names.get(node.id, "") if isinstance(node, ast.Name) else ""

    # Names for parts of torch: `aten = torch.ops.aten`.
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and path_of(node.value).startswith("torch."):
            names |= {target.id: path_of(node.value) for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            see(node.lineno, path_of(node))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr", "delattr"):
            on, name = node.args[:2]
            if isinstance(name, ast.Constant) and path_of(on):
                see(node.lineno, f"{path_of(on)}.{name.value}")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            if node.args and isinstance(node.args[0], ast.Constant):
                see(node.lineno, str(node.args[0].value))
    return found


def test_private_torch_is_behind_one_door():
    found = {
        f"{path.relative_to(PACKAGE)}:{line}": name
        for path in SOURCES if not path.is_relative_to(PACKAGE / "_torch")
        for line, name in private_torch(ast.parse(path.read_text()))
    }  # fmt: skip
    assert not found, f"private symbols of torch go through megacpp_compile/_torch: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch._dynamo as d",
        "from torch._subclasses import FakeTensor",
        "from torch import _guards",
        "from torch.utils import _pytree as pytree",
        "import torch\ntorch._scaled_mm",
        "import torch as t\nt.utils._pytree.tree_map(f, x)",
        "from torch import amp\namp._enter_autocast()",
        "import torch\ncc = torch.autograd\ncc._get_sequence_nr()",
        "import torch\nhasattr(torch, '_grouped_mm')",
        "import importlib\nimportlib.import_module('torch._inductor.config')",
    ],
)
def test_the_door_is_watched(source):
    assert private_torch(ast.parse(source))


def test_private_attributes_are_this_package_s_own():
    """Any other is of an object of torch or of another package, and is in the list with its reason."""
    own, used = set(), {}
    for path in (p for p in SOURCES if not p.is_relative_to(PACKAGE / "_torch")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    own.add(node.attr)
                elif not ast.unparse(node.value).endswith("aten"):  # operators are public, whatever they are called
                    used.setdefault(node.attr, f"{path.relative_to(PACKAGE)}:{node.lineno}")
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
                name = getattr(node.args[1], "value", None)
                if isinstance(name, str) and name.startswith("_") and not name.startswith("__"):
                    used.setdefault(name, f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not {attr: at for attr, at in used.items() if attr not in own and attr not in ALLOWED}


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
