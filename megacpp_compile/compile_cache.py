"""Compiled code of one process for others: torch's cache artifacts in one file, with what they hold for.

    megacpp_compile.save_cache("model.cache")     # after the first steps, on one rank
    megacpp_compile.load_cache("model.cache")     # before the first step, everywhere

torch looks code up by the graph, the options, the device and this package's source; nothing is served that would not
have been compiled so. A file only saves the time: of code generation and of compilers, not of capturing frames.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.errors import CompileCacheError
from megacpp_compile.fx.inductor_pass import source_hash
from megacpp_compile.targets import chips

_MAGIC = b"megacpp_compile cache 1\n"


@dataclass(frozen=True)
class CompileCache:
    """What a file of compiled code holds.

    Attributes:
        artifacts: kind of torch's caches ("inductor", "aot_autograd", "autotune", ...) -> how many entries.
        bytes: of the file.
        made_by: what the code was compiled by and for, and so holds for: versions, this package's source, the label of
            the device ("sm_90").
    """

    artifacts: dict[str, int]
    bytes: int
    made_by: dict[str, str]


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
    counts, here = {kind: len(keys) for kind, keys in sorted(info.artifacts.items())}, _made_by()
    header = json.dumps({"made_by": here, "artifacts": counts}).encode() + b"\n"
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(_MAGIC + header + payload)
    os.replace(partial, path)
    return CompileCache(counts, path.stat().st_size, here)


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


def _loaded(path: str, blob: bytes) -> CompileCache:
    again = "Make it anew with `save_cache`"
    head, found, payload = blob.removeprefix(_MAGIC).partition(b"\n")
    if not blob.startswith(_MAGIC) or not found:
        raise CompileCacheError(path, "it is no file of `save_cache` of this version", again)
    try:
        header = json.loads(head)
        theirs, counts = dict(header["made_by"]), dict(header["artifacts"])
    except (ValueError, KeyError, TypeError) as error:
        raise CompileCacheError(path, f"its header cannot be read: {error}", again) from error
    here = _made_by()
    for what, mine in here.items():
        if theirs.get(what) != mine:
            raise CompileCacheError(path, f"{what} was {theirs.get(what)!r} where it was made, and is {mine!r}", again)
    try:
        info = torch.compiler.load_cache_artifacts(payload)
    except Exception as error:  # whatever unpickling a broken file raises
        why = f"torch cannot read its artifacts: {type(error).__name__}: {error}"
        raise CompileCacheError(path, why, again) from error
    if info is None:
        raise CompileCacheError(path, "torch cannot read its artifacts", again)
    return CompileCache(counts, len(blob), here)


def _made_by() -> dict[str, str]:
    """What compiled code depends on beyond a graph and its options. torch keys its caches by all of it; here it is for
    being told of a file that could serve nothing."""
    cuda = torch.cuda.is_available()
    return {
        "device": chips.label("cuda" if cuda else "cpu"),
        "machine": platform.machine(),
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__,
        "megacpp_compile": source_hash()[:12],
    }
