"""Compiled frames that torch can put into a file (`aot_compile`) or into Dynamo's own cache (`caching_precompile`).

torch serialises what AOTAutograd returns. What this package calls around that (inputs that are split, outputs that were
dropped, pieces called in turn) goes along as pickled objects, with what the code was made by and with the C++ kernels
that Inductor compiled for a CPU. The ops of this package are registered before the code is loaded.
"""

from __future__ import annotations

import importlib
import io
import json
import pickle
import platform
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch.fx import GraphModule

from megacpp_compile._torch import inductor
from megacpp_compile._torch._registry import present
from megacpp_compile._torch.dynamo import (
    BackendCacheArtifact,
    BundledCallable,
    GraphCallable,
    PrecompileContext,
    SerializableCallable,
)
from megacpp_compile._torch.dynamo import config as dynamo_config
from megacpp_compile._torch.functorch import config as functorch_config
from megacpp_compile.config.options import Config
from megacpp_compile.errors import CompileCacheError
from megacpp_compile.fx.inductor_pass import source_hash
from megacpp_compile.report import log
from megacpp_compile.targets import chips

_LOWERINGS = "megacpp_compile.lowerings."


def made_by() -> dict[str, str]:
    """What compiled code depends on beyond a graph and its options."""
    cuda = torch.cuda.is_available()
    return {
        "device": chips.label("cuda" if cuda else "cpu"),
        "processor": torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__,
        "triton": inductor.triton_version() if cuda else "",
        "megacpp_compile": source_hash()[:12],
    }


def difference(theirs: Mapping[str, Any]) -> str:
    """How what made some code differs from what is here, in words; "" where it does not."""
    others = ((what, theirs.get(what), mine) for what, mine in made_by().items() if theirs.get(what) != mine)
    return next((f"{what} was {their!r} where it was made, and is {mine!r}" for what, their, mine in others), "")


def wanted() -> bool:
    """Whether torch wants the code of the frame that is being compiled to be serialisable."""
    asked = getattr(functorch_config, "bypass_autograd_cache_key", False) or getattr(
        dynamo_config, "caching_precompile", False
    )
    return asked and present(SerializableCallable, BundledCallable)


def serializable(
    compiled: Callable[..., Any], gm: GraphModule, config: Config, patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """`compiled`, the code of Dynamo's graph `gm`, as torch wants it now; `patches` are Inductor's settings for it."""
    if not wanted():
        return compiled
    plain = {name: v for name, v in patches.items() if v is None or isinstance(v, (bool, int, float, str))}
    code = SerializedCode(compiled, plain, config)
    if getattr(dynamo_config, "caching_precompile", False) and (key := getattr(gm, "_backend_id", None)):
        try:
            content = SerializedCode.serialize_compile_artifacts(code)
        except CompileCacheError as error:  # as of a plain frame whose backward comes later: torch keeps that
            log.logger.info("not in Dynamo's cache: %s", error)
            return compiled
        PrecompileContext.record_artifact(PrecompiledFrame(key, content))
    return code


class SerializedCode(SerializableCallable):  # type: ignore[misc]
    """A frame's code as torch serialises it. patches: Inductor's settings, as far as they are plain values."""

    def __init__(self, compiled: Callable[..., Any], patches: Mapping[str, Any], config: Config) -> None:
        self.compiled, self.patches, self.config = compiled, dict(patches), config

    def __call__(self, *args: Any) -> Any:
        return self.compiled(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: SerializedCode) -> bytes:
        """Raises CompileCacheError where something around the code cannot be pickled."""
        buffer = io.BytesIO()
        ops = sorted(name for name in sys.modules if name.startswith(_LOWERINGS))
        try:
            pickle.dump(inductor.cpp_libraries(), buffer)
            _Pickler(buffer, fn.patches).dump((fn.compiled, fn.patches, fn.config))
        except Exception as error:
            what = f"what runs around its graph cannot be serialised: {type(error).__name__}: {error}"[:300]
            raise CompileCacheError("compiled code", what, "Compile it in each process") from error
        return json.dumps({"made_by": made_by(), "ops": ops}).encode() + b"\n" + buffer.getvalue()

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> SerializedCode:
        """Raises CompileCacheError for code that was made by something else."""
        head, _, payload = data.partition(b"\n")
        header = json.loads(head)
        if differs := difference(header["made_by"]):
            raise CompileCacheError("compiled code", differs, "Make it anew")
        for name in header["ops"]:
            importlib.import_module(name)
        buffer = io.BytesIO(payload)
        inductor.put_cpp_libraries(pickle.load(buffer))
        return cls(*pickle.load(buffer))


class _Pickler(pickle.Pickler):
    """patches: Inductor's settings, of which CUDA graphs are decided when code is loaded."""

    def __init__(self, buffer: io.BytesIO, patches: Mapping[str, Any]) -> None:
        super().__init__(buffer)
        self.patches = patches

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType) and getattr(obj, "serialize", None) is not None:  # AOTAutograd's
            return _torchs, (BundledCallable.serialize_compile_artifacts(BundledCallable(obj)), self.patches)
        if isinstance(obj, GraphModule):  # its own way traces it again, which not all that runs in eager stands
            return _graph, (GraphCallable.serialize_compile_artifacts(GraphCallable(obj)),)
        return NotImplemented


def _graph(data: bytes) -> GraphModule:
    return GraphCallable.deserialize_compile_artifacts(data).graph_module  # type: ignore[no-any-return]


def _torchs(data: bytes, patches: Mapping[str, Any]) -> Callable[..., Any]:
    with inductor.without_compilers(patches):
        return BundledCallable.deserialize_compile_artifacts(data)


class PrecompiledFrame(BackendCacheArtifact):  # type: ignore[misc]
    """A frame's code in Dynamo's own cache, as bytes."""

    def after_deserialization(self) -> SerializedCode:
        try:
            return SerializedCode.deserialize_compile_artifacts(self.content)
        except CompileCacheError as error:
            raise RuntimeError(str(error)) from error  # torch compiles anew
