"""Compiled code of one process for others, in a file that says what it holds for.

    megacpp_compile.save_cache("model.cache")     # after the first steps, on one rank: torch's cache artifacts
    megacpp_compile.load_cache("model.cache")     # before the first step, everywhere

torch looks code up by the graph, the options, the device and this package's source; nothing is served that would not
have been compiled so. A file only saves the time: of code generation and of compilers, not of capturing frames.

    megacpp_compile.save_compiled("model.code", model, x)    # compiled ahead of time, by one process
    megacpp_compile.load_compiled("model.code", model)(x)    # in others: nothing is captured, no compiler runs

This is a whole graph with its guards, by torch's `aot_compile`: weights are the model's own, wherever it is loaded.
"""

from __future__ import annotations

import copy
import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from megacpp_compile._torch.dynamo import aot_compiler
from megacpp_compile._torch.pytree import tree_map
from megacpp_compile.backends.serialized import difference, made_by
from megacpp_compile.config.options import Config, given_options
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.errors import CompileCacheError, NotAModuleError
from megacpp_compile.passes._driver import pass_names
from megacpp_compile.report.guards import in_words

Model = TypeVar("Model", bound=nn.Module)
_CACHE, _CODE = b"megacpp_compile cache 1\n", b"megacpp_compile code 1\n"


@dataclass(frozen=True)
class CompileCache:
    """What a file of compiled code holds.

    Attributes:
        artifacts: kind of torch's caches ("inductor", "aot_autograd", "autotune", ...) -> how many entries; of
            `save_compiled`, "graph" -> 1.
        bytes: of the file.
        made_by: what the code was compiled by and for, and so holds for: versions, this package's source, the label of
            the device ("sm_90") and its name.
        holds_for: of `save_compiled`, the rest: "model", its class, "inputs" with dtypes and shapes, "options",
            "gradients", whether a backward is in it.
    """

    artifacts: dict[str, int]
    bytes: int
    made_by: dict[str, str]
    holds_for: dict[str, Any] = field(default_factory=dict)


def save_cache(path: str | Path) -> CompileCache:
    """Write the code that torch has compiled in this process, or taken from its caches, to `path`.

    Call it on one rank, after a step has run forward and backward in each shape that is wanted. The file is put in
    place whole, so that readers never see a part of it. It needs torch's caches on (they are, unless switched off).

    Returns what was written. Raises CompileCacheError where there is nothing to write.
    """
    path = Path(path)
    saved = torch.compiler.save_cache_artifacts()
    if saved is None or saved[1].empty():
        raise CompileCacheError(
            str(path), "nothing has been compiled in this process, or torch's caches are off",
            "Call `save_cache` after a step of the compiled model, with torch._inductor.config.fx_graph_cache and "
            "torch._functorch.config.enable_autograd_cache on",
        )  # fmt: skip
    payload, info = saved
    counts = {kind: len(keys) for kind, keys in sorted(info.artifacts.items())}
    return _written(path, _CACHE, {"artifacts": counts}, payload)


def load_cache(path: str | Path, strict: bool = False) -> CompileCache | None:
    """Fill torch's caches from a file of `save_cache`. Call it before the first step of a compiled model.

    The artifacts are pickled Python objects and machine code: load only files of your own.

    strict: raise where the file is of no use here, instead of a warning and None: a training run can always go on by
        compiling. A file that is not there raises FileNotFoundError either way.

    Returns what was loaded. Raises, if strict, CompileCacheError for a file that is none or broken, and for one made by
    other versions or for another kind of device.
    """
    blob = Path(path).read_bytes()
    try:
        return _loaded(str(path), blob)
    except CompileCacheError as error:
        if strict:
            raise
        warn_once(f"{error}\nThe model is compiled anew.")
        return None


def save_compiled(
    path: str | Path, model: nn.Module, *args: Any, options: Mapping[str, Any] | Config | None = None,
    dynamic: bool | None = None, **kwargs: Any,
) -> CompileCache:  # fmt: skip
    """Compile `model` for the inputs `args` and `kwargs` without running it, and write the code to `path`.

    model: is left as it is; its weights, which do not go into the file, may be anywhere that code is compiled for.
    args, kwargs: of its forward; what matters of tensors is shape, dtype and device. options: fields of `Config`, or
    one. dynamic: as in `torch.compile`; without it the code is for these shapes alone. Under `torch.no_grad()` it has
    no backward. Forward must be one graph.

    Returns what was written. Raises CompileCacheError where there is no place for a file, and where code or guards
    cannot be put into one, the errors of bad options, and Dynamo's own for a forward that is not one graph.
    """
    if not isinstance(model, nn.Module):
        raise NotAModuleError(model)
    _check_place(Path(path))
    config = Config.from_options(options, pass_names())
    given = given_options(options)
    code = aot_compiler(model.forward, backend="megacpp", options=given, dynamic=dynamic)((args, kwargs))
    try:
        payload = type(code).serialize(code).serialized_data
    except CompileCacheError as error:
        raise CompileCacheError(str(path), error.reason, error.remedy) from error
    except Exception as error:
        raise CompileCacheError(
            str(path), " ".join(f"torch cannot serialise it: {type(error).__name__}: {error}".split())[:400],
            "Compile it in each process, with `save_cache` and `load_cache`",
        ) from error  # fmt: skip
    holds_for = {
        "model": type(model).__name__,
        "inputs": tree_map(_kind, [*args, kwargs] if kwargs else list(args)),
        "options": _canonical(config),
        "gradients": torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()),
    }
    return _written(Path(path), _CODE, {"artifacts": {"graph": 1}, "holds_for": holds_for}, payload)


def _check_place(path: Path) -> None:
    """Before anything is compiled for it."""
    if path.is_dir():
        raise CompileCacheError(str(path), "it is a folder", "Name a file in it")
    if not path.parent.is_dir():
        raise CompileCacheError(str(path), f"there is no folder {path.parent}", "Make it, or write elsewhere")


def load_compiled(path: str | Path, model: Model, options: Mapping[str, Any] | Config | None = None) -> Model:
    """Have `model` run the code of a file of `save_compiled`, in place of its forward, and return it.

    The code is pickled Python objects and machine code: load only files of your own.

    model: of the class that the file was made with; its weights are its own, and may change in place. options: what the
    file has to be made with, if it is not to matter less.

    Hooks around forward run in eager; `del model.forward` undoes it. Raises CompileCacheError for a file that is none
    or broken, that was made by other versions, for another kind of device, another class or with other options, each
    with what differs. So does a call with inputs, or in a mode, that the code is not for.
    """
    header, payload, _ = _opened(str(path), Path(path).read_bytes(), _CODE)
    holds_for = header["holds_for"]
    again = "Make it anew with `save_compiled`"
    if (theirs := holds_for["model"]) != (mine := type(model).__name__):
        raise CompileCacheError(str(path), f"the model was {theirs} where it was made, and is {mine}", again)
    if options is not None:
        _check_options(str(path), holds_for["options"], _canonical(Config.from_options(options, pass_names())))
    try:
        code = torch.compiler.load_compiled_function(io.BytesIO(payload))
    except CompileCacheError as error:
        raise CompileCacheError(str(path), error.reason, again) from error
    except Exception as error:
        why = f"torch cannot read its code: {type(error).__name__}: {error}"[:400]
        raise CompileCacheError(str(path), why, again) from error
    model.forward = _Loaded(str(path), code, model)
    return model


class _Loaded:
    """A model's forward, by code from a file."""

    def __init__(self, path: str, code: Any, model: nn.Module) -> None:
        self.path, self.code, self.model = path, code, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.code(self.model, *args, **kwargs)
        except RuntimeError as error:
            if not (said := _GUARD.search(str(error))):
                raise
            why = in_words(said[1].strip().strip("[]\"'"))
            raise CompileCacheError(
                self.path, f"its code is not for this call: {why}",
                "Make another file for such calls, or this one with `dynamic=True`",
            ) from error  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> _Loaded:
        return _Loaded(self.path, self.code, copy.deepcopy(self.model, memo))

    def __reduce__(self) -> Any:
        raise CompileCacheError(self.path, "its code is not pickled with a model", "Do `del model.forward` first")


_GUARD = re.compile(r"GuardManager check failed, reason:.*?verbose_code_parts.(.*?),?\s*num_guards_executed", re.DOTALL)


def _check_options(path: str, theirs: Mapping[str, str], mine: Mapping[str, str]) -> None:
    for name in sorted({*theirs, *mine}):
        if theirs.get(name) != mine.get(name):
            was, is_now = theirs.get(name, "the default"), mine.get(name, "the default")
            why = f"option {name!r} was {was} where it was made, and is {is_now}"
            raise CompileCacheError(path, why, "Make it anew with `save_compiled`, or load it with its options")


def _canonical(config: Config) -> dict[str, str]:
    """The settings of `config` that are not the defaults, as text."""
    usual = Config().to_dict()
    return {name: repr(v) for name, v in config.to_dict().items() if v != usual.get(name)}


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device.type}"
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _written(path: Path, magic: bytes, header: dict[str, Any], payload: bytes) -> CompileCache:
    header = {"made_by": made_by(), **header}
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(magic + json.dumps(header).encode() + b"\n" + payload)
    os.replace(partial, path)
    return CompileCache(header["artifacts"], path.stat().st_size, header["made_by"], header.get("holds_for", {}))


def _opened(path: str, blob: bytes, magic: bytes) -> tuple[dict[str, Any], bytes, int]:
    """(header, payload, bytes) of a file that can serve here."""
    by = "save_cache" if magic == _CACHE else "save_compiled"
    again = f"Make it anew with `{by}`"
    head, found, payload = blob.removeprefix(magic).partition(b"\n")
    if not blob.startswith(magic) or not found:
        raise CompileCacheError(path, f"it is no file of `{by}` of this version", again)
    try:
        header = dict(json.loads(head))
        theirs = dict(header["made_by"])
        header["artifacts"] = dict(header["artifacts"])
    except (ValueError, KeyError, TypeError) as error:
        raise CompileCacheError(path, f"its header cannot be read: {error}", again) from error
    if differs := difference(theirs):
        raise CompileCacheError(path, differs, again)
    return header, payload, len(blob)


def _loaded(path: str, blob: bytes) -> CompileCache:
    header, payload, size = _opened(path, blob, _CACHE)
    again = "Make it anew with `save_cache`"
    try:
        info = torch.compiler.load_cache_artifacts(payload)
    except Exception as error:  # whatever unpickling a broken file raises
        why = f"torch cannot read its artifacts: {type(error).__name__}: {error}"
        raise CompileCacheError(path, why, again) from error
    if info is None:
        raise CompileCacheError(path, "torch cannot read its artifacts", again)
    return CompileCache(header["artifacts"], size, header["made_by"])
