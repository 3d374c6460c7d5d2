"""What the tree promises: where things are, what they are called, who imports whom, and what an import costs."""

from __future__ import annotations

import ast
import importlib
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from megacpp_compile.fx import views
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.passes._driver import all_passes, pass_names
from tests.sources import ON_ONE_WORKER, PACKAGE, SOURCES, nodes

TESTS = Path(__file__).parent
pytestmark = ON_ONE_WORKER
PASSES = sorted(p.stem for p in (PACKAGE / "passes").glob("*.py") if not p.stem.startswith("_"))
OPS = sorted(p.parent.name for p in (PACKAGE / "lowerings").glob("[!_]*/__init__.py"))

LONGEST_FILE = 350  # lines
MEDIAN_FUNCTION = 8  # lines, with its signature and docstring
# Loops outside of reader/ that follow casts or views by hand, as they do more on the way than `reader.links` can.
MOST_STRIP_LOOPS = 10
# What says how experts are seen, what they mean and who computes them.
OF_EXPERTS = ("passes/moe.py", "passes/_rewrites/expert*.py", "matchers/moe/*.py", "lowerings/moe/*.py")
MOST_FILES_OF_EXPERTS = 25
# On an idle machine; the shortest of several runs, as whatever else runs can only add to it.
LONGEST_IMPORT = 0.050


def test_pass_order():
    """Reports, counts and rewrites follow it; a pass that moves may see another graph."""
    assert pass_names() == (
        "moe", "linear", "sparse_mla", "mla_decode", "linear_cross_entropy", "down_norm_up", "mla_rope_q", "mla_rope_kv",
        "rope_qk", "attention", "causal_conv1d", "token_loop", "gated_delta_rule", "gated_linear_attention",
        "gated_rms_norm", "hyper_connection", "ssd_scan", "norm_linear", "compressed_linear", "index_scores",
        "selective_scan", "stream_update",
    )  # fmt: skip
    assert sorted(pass_names()) == PASSES
    for i, p in enumerate(all_passes()):
        assert set(p.after) <= set(pass_names()[:i])


@pytest.mark.parametrize("name", PASSES)
def test_pass(name):
    module = importlib.import_module(f"megacpp_compile.passes.{name}")
    assert module.name == name
    assert module.__doc__, "a pass file begins with its idiom"
    assert callable(module.find)
    assert set(module.after) <= set(PASSES)
    assert module.op in {f"{op.namespace}::{op._opname}" for op in semantic_ops()}
    assert (TESTS / "passes" / f"test_{name}.py").exists()


@pytest.mark.parametrize("op", OPS)
def test_op(op):
    assert (PACKAGE / "lowerings" / op / "reference.py").exists()
    assert (TESTS / "lowerings" / f"test_{op}.py").exists()
    assert importlib.import_module(f"megacpp_compile.lowerings.{op}").__doc__, "an op's folder begins with its contract"


def test_files_are_short_and_named_by_what_they_hold():
    lengths = {str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for p in SOURCES}
    assert not {name: n for name, n in lengths.items() if n > LONGEST_FILE}
    assert not [p for p in SOURCES if p.stem in ("utils", "util", "helpers", "misc")]
    assert len(list(PACKAGE.glob("*.py"))) <= 10, "a newcomer reads the root first"


def test_experts_are_in_few_files():
    assert len([path for files in OF_EXPERTS for path in PACKAGE.glob(files)]) <= MOST_FILES_OF_EXPERTS


def test_functions_are_short():
    functions = [n for path in SOURCES for n in nodes(path) if isinstance(n, ast.FunctionDef)]
    assert statistics.median(n.end_lineno - n.lineno + 1 for n in functions) <= MEDIAN_FUNCTION


def test_casts_and_views_are_followed_by_the_reader():
    """A `while` that asks of a node's cast or view and steps to its operand or user; no walk of a graph, which pops."""
    asked = {name for name, held in vars(views).items() if isinstance(held, frozenset | set) or name.startswith("is_")}
    asked -= {"LIKE", "SHAPE_ONLY", "AUTOCAST_BLIND", "is_elementwise"}
    loops = []
    for path in SOURCES:
        for loop in nodes(path) if "reader" not in path.parts else []:
            names = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(loop)} if isinstance(loop, ast.While) else set()
            loops += [f"{path.relative_to(PACKAGE)}:{loop.lineno}"] if names & asked and "pop" not in names else []
    assert len(loops) <= MOST_STRIP_LOOPS, loops


def imported(path: Path) -> set[str]:
    """The modules a file imports anywhere in it, in functions too, from outside of the package."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            # `from package import module` names a module as well as `from module import name` does.
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


DEVICES = ("triton", "torch_xla", "torch.cuda")


@pytest.mark.parametrize(("folder", "refused"), [
    # What is recognised names ops; which kernel serves one is the lowerings' to say.
    ("passes", DEVICES), ("matchers", DEVICES), ("frontend", DEVICES),
    # Config alone asks Inductor's settings for their names, to say where an unknown option belongs.
    *((folder, ("torch._inductor",)) for folder in ("passes", "matchers", "lowerings", "frontend", "config")),
])  # fmt: skip
def test_what_a_folder_does_not_import(folder, refused):
    allowed = {PACKAGE / "config/options.py", PACKAGE / "lowerings/_gemm/autotune.py"} if refused != DEVICES else set()
    for path in {*(PACKAGE / folder).rglob("*.py")} - allowed:
        assert not [m for m in imported(path) if m.startswith(refused)], path


@pytest.mark.end_to_end
def test_config_alone_reads_the_environment():
    reads = {p for p in SOURCES for n in nodes(p) if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")}
    assert reads == {PACKAGE / "config/environment.py"}


# Attributes that begin with an underscore and belong to objects of torch or of another package, not to this one.
ALLOWED = {
    **dict.fromkeys(["_parameters", "_buffers", "_modules"], "what an nn.Module is made of; documented with state dicts"),
    "_call_impl": "Dynamo traces the call of it, and would guard whatever stood between",
    "_attn_implementation": "of a configuration of transformers: the name its attention is called by",
    "_version": "a tensor's counter of writes, documented with autograd",
    "_cdata": "what tells storages apart, also those without memory",
    "_schema": "of a node's target: the operator's signature",
    "_opname": "of a node's target: the operator's name",
    "_opoverload": "of what torch.library.custom_op makes: the op that graphs have",
    "_erased": "of an fx.Node: whether its graph has dropped it",
    "_codegen": "of an fx.Graph: how Dynamo has its inputs named",
    "_dynamo_source": "Dynamo's note on a placeholder, copied from node to node and read where it is there",
    "_param_name_to_source": "Dynamo's note on its graph, by which AOTAutograd knows it for one; set where it is there",
    "_backend_id": "Dynamo's name of a graph in its own cache, which has no frame without it",
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


def private_torch(nodes: list[ast.AST]) -> list[tuple[int, str]]:
    """(line, path) of whatever a file names of torch's private parts: in imports, in chains of attributes that begin at
    torch or at anything imported from it, and as strings that `getattr` and its like are given."""
    names, found = {}, []

    def see(line: int, path: str) -> None:
        # ATen's operators are public, whatever they are called.
        private = any(part.startswith("_") and not part.startswith("__") for part in path.split("."))
        if path.split(".")[0] == "torch" and private and not path.startswith("torch.ops."):
            found.append((line, path))

    for node in nodes:
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
    for node in nodes:
        if isinstance(node, ast.Assign) and path_of(node.value).startswith("torch."):
            names |= {target.id: path_of(node.value) for target in node.targets if isinstance(target, ast.Name)}
    for node in nodes:
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


OUTSIDE = [path for path in SOURCES if not path.is_relative_to(PACKAGE / "_torch")]


def test_private_torch_is_behind_one_door():
    found = {f"{p.relative_to(PACKAGE)}:{line}": name for p in OUTSIDE for line, name in private_torch(nodes(p))}
    assert not found, f"private symbols of torch go through megacpp_compile/_torch: {found}"


@pytest.mark.parametrize("source", [
    "import torch._dynamo", "import torch._dynamo as d", "from torch._subclasses import FakeTensor",
    "from torch import _guards", "from torch.utils import _pytree as pytree", "import torch\ntorch._scaled_mm",
    "import torch as t\nt.utils._pytree.tree_map(f, x)", "from torch import amp\namp._enter_autocast()",
    "import torch\ncc = torch.autograd\ncc._get_sequence_nr()", "import torch\nhasattr(torch, '_grouped_mm')",
    "import importlib\nimportlib.import_module('torch._inductor.config')",
])  # fmt: skip
def test_the_door_is_watched(source):
    assert private_torch(list(ast.walk(ast.parse(source))))


def test_private_attributes_are_this_package_s_own():
    """Any other is of an object of torch or of another package, and is in the list with its reason."""
    own, used = set(), {}
    for path in OUTSIDE:
        for node in nodes(path):
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


IMPORT = """
import sys, time, torch
began = time.perf_counter()
import megacpp_compile
print(time.perf_counter() - began)
print([name for name in ("triton", "transformer_engine", "torch_xla", "jax") if name in sys.modules])
"""


@pytest.mark.end_to_end
def test_import_is_light():
    """torch may bring triton itself; ours must not. Imported first, torch shows what was there before."""
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        took, heavy = done.stdout.splitlines()
        assert heavy == "[]"
        seconds.append(float(took))
        if min(seconds) < LONGEST_IMPORT:
            break
    assert min(seconds) < LONGEST_IMPORT, seconds
