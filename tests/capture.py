"""Modules as captured graphs, without Dynamo: functional, pre-dispatch ATen with fake values, kept from run to run.

A matcher reads a graph, whoever made it. Dynamo takes longer over a small module than all passes and the comparison with
eager together, and tracing again what was traced in the last run takes the next longest. A kept graph loads in
milliseconds. Its key is all that the graph is made from: torch's release, the code that captures, the source of every
test module that the traced one can reach, and the values (attributes, closures, globals, defaults) that its code reads,
by `tests/fingerprint.py`. Where any of these cannot be told, nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pickle
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megacpp_compile._torch.dispatch import proxy_mode
from megacpp_compile._torch.functorch import aot_export_module
from megacpp_compile.frontend.capture import Captured
from tests.fingerprint import Unkeyed, digest_of_sources, fingerprint

try:
    from torch.fx import _graph_pickler
    from torch.fx._graph_pickler import GraphPickler
except ImportError:  # an older torch: nothing is kept
    GraphPickler = None  # type: ignore[assignment,misc]

ROOT = Path(__file__).parents[1]
# Folders whose code makes a captured graph what it is.
MAKERS = ("megacpp_compile/_torch", "tests/capture.py", "tests/fingerprint.py")
# Graphs that no run has read for as long are removed.
DAYS = 14


class NotAFunction(Exception):
    """The module writes to its arguments, parameters or buffers, which a graph by itself does not show."""


def folder() -> Path | None:
    """Where graphs are kept: `.graphs/` beside the tests, or TEST_GRAPHS; nowhere where that is empty."""
    given = os.environ.get("TEST_GRAPHS")
    return None if given == "" or GraphPickler is None else Path(given or ROOT / ".graphs")


class Called(nn.Module):
    """`module` as a function of its parameters, its buffers and its arguments."""

    # How many results there are: so many empty ones are what a run gives that records nothing, in which AOTAutograd looks
    # for what is written to.
    results = 0

    def __init__(self, module: nn.Module | Callable[..., Any]) -> None:
        super().__init__()
        self.called = [module]  # in a list, so that its parameters are not this module's

    @functools.cached_property
    def state(self) -> dict[str, Tensor]:
        (module,) = self.called
        return dict([*module.named_parameters(), *module.named_buffers()]) if isinstance(module, nn.Module) else {}

    def forward(self, *flat: Any) -> tuple[Any, ...]:
        if self.results and proxy_mode() is None:
            return tuple(torch.empty(()) for _ in range(self.results))
        (module,), n = self.called, len(self.state)
        given = dict(zip(self.state, flat[:n], strict=True))
        out = functional_call(module, given, flat[n:]) if isinstance(module, nn.Module) else module(*flat)
        return out if isinstance(out, tuple) else (out,)


def captured(module: nn.Module | Callable[..., Any], args: tuple[Any, ...]) -> tuple[Captured, tuple[Any, ...]]:
    """(graph, its inputs): the parameters and buffers of `module`, as Dynamo has them, and then `args`. Not yet
    canonicalized. Raises NotAFunction."""
    called = Called(module)
    inputs = (*called.state.values(), *args)
    graph = _kept(called, inputs) or traced(called, inputs)
    given = list(zip(graph.gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    trained = frozenset(n for n, x in given if isinstance(x, Tensor) and x.requires_grad)
    weights = frozenset(n for n, x in given if isinstance(x, nn.Parameter))
    return Captured(graph.gm, graph.fake_mode, weights | trained, trained), inputs


def traced(called: Called, inputs: tuple[Any, ...]) -> Captured:
    """A graph made anew. Raises NotAFunction."""
    before = [x._version for x in inputs if isinstance(x, Tensor)]
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        results = len(called(*inputs))
    if before != [x._version for x in inputs if isinstance(x, Tensor)]:
        raise NotAFunction
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(x, static_shapes=True) if isinstance(x, Tensor) else x for x in inputs]
    called.results = results
    gm, signature = aot_export_module(called, fakes, trace_joint=False, pre_dispatch=True)
    called.results = 0
    assert isinstance(gm, GraphModule) and not signature.buffers_to_mutate and not signature.user_inputs_to_mutate
    names = [name.replace(".", "_") for name in called.state]
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), names, strict=False):
        node.meta["dynamo_name"] = name
    return Captured(gm, mode, frozenset())


# --- kept from run to run


def key_of(called: Called, inputs: tuple[Any, ...]) -> str:
    """All that the graph is made from, as one number. Raises Unkeyed."""
    if torch.is_autocast_enabled("cpu"):
        raise Unkeyed("autocast around the call")
    modes = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    told = (torch.__version__, digest_of_sources(ROOT, MAKERS), fingerprint((called.called, modes), inputs))
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _kept(called: Called, inputs: tuple[Any, ...]) -> Captured | None:
    """The graph from the folder, made and put there where it is not in it; None where it is not to be kept."""
    if (place := folder()) is None:
        return None
    try:
        key = key_of(called, inputs)
    except Unkeyed:
        return None
    file = place / key[:2] / key
    if (found := _load(file, key)) is not None:
        return found
    graph = traced(called, inputs)
    with contextlib.suppress(OSError):
        _store(file, key, graph.gm)
    return graph


def _load(file: Path, key: str) -> Captured | None:
    """The graph in `file`; None where there is none, or none of this key."""
    try:
        whole = file.read_bytes()
        said, _, packed = whole.partition(b"\n")
        if said.decode() != f"{key} {zlib.crc32(packed)}":
            return None
        data, metas = pickle.loads(zlib.decompress(packed))
        mode = FakeTensorMode(shape_env=ShapeEnv())
        gm = GraphPickler.loads(data, mode)
    except Exception:  # cut off, or of another make
        return None
    for node, meta in zip(gm.graph.nodes, metas, strict=True):
        node.meta.update(meta)
    with contextlib.suppress(OSError):
        os.utime(file)
    return Captured(gm, mode, frozenset())


# What GraphPickler leaves out.
_PLAIN = ("nn_module_stack", "dynamo_name")


def _store(file: Path, key: str, gm: GraphModule) -> None:
    if any(_is_symbolic(n) or "megacpp" in str(n.target) for n in gm.graph.nodes):
        return  # symbols belong to this trace; ops of ours are made by more than MAKERS
    metas = [{k: n.meta[k] for k in _PLAIN if k in n.meta} for n in gm.graph.nodes]
    try:
        packed = zlib.compress(pickle.dumps((_dumps(gm), metas)), 1)
    except Exception:  # some meta that cannot be written
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as out:
        out.write(f"{key} {zlib.crc32(packed)}\n".encode() + packed)
    os.replace(out.name, file)  # whole or not at all, whoever else writes it


class _Pickler(pickle.Pickler):
    """GraphPickler on Python's own pickler. Where dill is installed torch's is on dill's, which takes as long to write a
    graph down as it takes to trace it."""

    _PASSTHROUGH_TYPES = getattr(GraphPickler, "_PASSTHROUGH_TYPES", frozenset())
    reducer_override = getattr(GraphPickler, "reducer_override", None)
    persistent_id = getattr(GraphPickler, "persistent_id", None)

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.options = _graph_pickler.Options()
        self._unpickle_state = _graph_pickler._UnpickleStateToken(object())
        self._meta_tensor_describer = _graph_pickler.MetaTensorDescriber(copy_data=False)


def _dumps(gm: GraphModule) -> bytes:
    """As GraphPickler writes it, and by it where Python's pickler cannot, or this torch has other parts."""
    slices = getattr(_graph_pickler, "patch_pytree_map_over_slice", contextlib.nullcontext)
    try:
        with slices(), io.BytesIO() as file:
            _Pickler(file).dump(gm)
            return file.getvalue()
    except Exception:
        return GraphPickler.dumps(gm)


def _is_symbolic(node: Node) -> bool:
    found: list[Any] = []
    torch.utils._pytree.tree_map(found.append, node.meta.get("val"))
    return any(isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in found) or any(
        isinstance(size, torch.SymInt) for x in found if isinstance(x, Tensor) for size in x.shape
    )


def remove_old(now: float | None = None) -> None:
    """Remove graphs that were not read for DAYS."""
    if (place := folder()) is None:
        return
    for file in place.glob("*/*"):
        with contextlib.suppress(OSError):
            if file.stat().st_mtime < (now or time.time()) - DAYS * 86400:
                file.unlink()
