"""Finds every place where an fp8 payload silently becomes a wider tensor, which gives up the memory that fp8 saves.

    check(graph)                            in a graph: Dynamo's, or ATen's
    with Sentinel(model, strict=True): ...  in code that runs

A payload is a float8 tensor, the memory of a wrapper (`nn.fp8_wrappers`), or a tensor made from one without growing: a
view of its bytes, a slice, a bit operation. Widening is an op that reads a payload and returns a tensor of two or more
bytes an element with at least as many elements: a conversion, a copy into a wider tensor, a dequantisation by method
or by op. Ops of the allowlist multiply payloads, and may widen them inside.

Kernels that run outside of PyTorch's dispatcher are not seen, except the `dequantize` of a wrapper.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import logging
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from megacpp_compile._torch import present
from megacpp_compile._torch.dispatch import TorchDispatchMode, disable_current_modes, set_runs_compiled
from megacpp_compile._torch.ops import OpOverload, OpOverloadPacket
from megacpp_compile._torch.pytree import tree_leaves
from megacpp_compile.config import globs
from megacpp_compile.config._deprecated import star_across_segments
from megacpp_compile.errors import DequantisationError
from megacpp_compile.fx.provenance import module_fqn, source_line
from megacpp_compile.nn.fp8_wrappers import FP8, found_in, is_wrapper, split
from megacpp_compile.precision.module_tracker import ModuleTracker

logger = logging.getLogger(__name__)

# Ops that read payloads and return wide results, as they should; globs over qualified names of ops.
ALLOWED = ("aten::_scaled_mm*", "aten::_scaled_grouped_mm*", "torch._scaled_mm*", "torch._scaled_grouped_mm*",
           "megacpp::*", "transformer_engine::*", "tex_ts::*", "fbgemm::f8*", "mslk::f8*")  # fmt: skip
# Before it had this, torch compiled anew under any mode; there a compiled model runs in eager under a `Sentinel`.
RUNS_COMPILED = present(set_runs_compiled)
# They take shape and device from an operand, and none of its values.
_TEMPLATES = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")
# Ops and methods with these names return a wrapper's values in full.
_WIDENS_WRAPPERS = ("dequant", "to_original_precision", "_to_copy", "clone")
_CONVERSIONS = ("to", "float", "half", "bfloat16", "double", "type", "type_as")


@dataclasses.dataclass(frozen=True)
class Widening:
    """One payload that was widened.

    Attributes:
        op: qualified name of the op, or the method's.
        bytes: of the wide tensor; None where its size is symbolic.
        held: dtype of the payload.
        made: dtype of the wide tensor.
        fqn: innermost module, "" when unknown.
        source: "file.py:123, in forward: `code line`", or "".
        node: name of the FX node, "" when it ran.
    """

    op: str
    bytes: int | None
    held: torch.dtype
    made: torch.dtype
    fqn: str = ""
    source: str = ""
    node: str = ""

    def __str__(self) -> str:
        size = "a symbolic number of" if self.bytes is None else f"{self.bytes}"
        held, made = (str(d).removeprefix("torch.") for d in (self.held, self.made))
        where = ", ".join(part for part in (self.fqn, self.source) if part) or "at an unknown place"
        return f"{self.op} made {size} bytes of {made} out of {held}: {where}"


# --- one op


def _name(target: Any) -> str:
    """An op's qualified name, whether or not the overload is chosen, as it is not where Dynamo saw a call."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        return str(getattr(target, "overloadpacket", target)).replace(".", "::", 1)
    module = getattr(target, "__module__", None) or ""
    return str(target) if isinstance(target, str) else f"{module}.{getattr(target, '__name__', target)}".lstrip(".")


def _allowed(name: str, fqn: str, ops: Sequence[str], modules: Sequence[str]) -> bool:
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in (*ALLOWED, *ops)):
        return True
    return any(globs.hits(p, fqn) or star_across_segments("allow_modules", p, fqn) for p in modules)


def _short(name: str) -> str:
    return name.rsplit("::", 1)[-1].rsplit(".", 1)[-1]


def _bytes(t: Tensor) -> int | None:
    return t.numel() * t.element_size() if isinstance(t.numel(), int) else None


def _grown(name: str, payloads: Sequence[Tensor], result: Any) -> Tensor | None:
    """The wide tensor that an op makes of payloads, or None."""
    if not payloads or any(part in _short(name) for part in _TEMPLATES):
        return None
    for t in tree_leaves(result):
        if isinstance(t, Tensor) and not is_wrapper(t) and t.element_size() > 1 and t.dtype not in FP8:
            sizes = [p.numel() for p in payloads]
            if not isinstance(t.numel(), int) or any(not isinstance(n, int) or t.numel() >= n > 0 for n in sizes):
                return t
    return None


def _unwraps(name: str, result: Any) -> Tensor | None:
    """The plain tensor that an op makes of a wrapper, told by the op's name, or None."""
    short = _short(name)
    asks = any(part in short for part in _WIDENS_WRAPPERS) or short in _CONVERSIONS
    if not asks or not isinstance(result, Tensor) or is_wrapper(result):
        return None
    return result if result.element_size() > 1 else None


# --- graphs


def check(
    graph: fx.Graph, payloads: Iterable[fx.Node] = (), allow: Sequence[str] = (), allow_modules: Sequence[str] = (),
    strict: bool = False,
) -> list[Widening]:  # fmt: skip
    """Every widening in `graph`, whose nodes carry fake values ("val", or Dynamo's "example_value").

    payloads: nodes that hold a payload as plain bytes; float8 values and wrappers are known without. allow: globs over
    qualified names of ops that may widen. allow_modules: globs (`config.globs`) over the names of modules that may.
    Raises DequantisationError for any widening under `strict`, WrapperError as `wrappers.split`.
    """
    held: dict[fx.Node, torch.dtype] = {}
    wrapped: dict[fx.Node, Tensor] = {}
    for node in payloads:
        held[node] = _value(node).dtype
    found = []
    for node in graph.nodes:
        value = _value(node)
        if is_wrapper(value):
            wrapped[node] = value
        elif isinstance(value, Tensor) and value.dtype in FP8:
            held[node] = value.dtype
        if node.op not in ("call_function", "call_method"):
            continue
        name, fqn = _name(node.target), module_fqn(node)
        inputs = [n for n in node.all_input_nodes if n in held]
        wide = _grown(name, [_value(n) for n in inputs], value)
        source = held[inputs[0]] if inputs else None
        if wide is None and (unwrapped := [n for n in node.all_input_nodes if n in wrapped]):
            wide, source = _unwraps(name, value), split(wrapped[unwrapped[0]], unwrapped[0].name).payload.dtype
        if wide is not None and source is not None:
            if not _allowed(name, fqn, allow, allow_modules):
                found.append(Widening(name, _bytes(wide), source, wide.dtype, fqn, source_line(node), node.name))
        elif inputs and _one_byte(value):
            held.setdefault(node, held[inputs[0]])
    return raise_if_strict(found, strict)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _one_byte(value: Any) -> bool:
    """Whether all tensors of `value` are bytes, and none is bool: still a payload, in another view or order."""
    tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return bool(tensors) and all(t.element_size() == 1 and t.dtype != torch.bool for t in tensors)


def raise_if_strict(found: list[Widening], strict: bool) -> list[Widening]:
    """`found`. Raises DequantisationError under `strict` if there is any."""
    if found and strict:
        raise DequantisationError([str(w) for w in found])
    return found


# --- code that runs


class Sentinel(TorchDispatchMode):
    """A dispatch mode that records every widening while it is active, in `findings`.

    Args:
        model: the memory of its wrappers counts as payloads, through any view that an op reads.
        payloads: other tensors of bytes that are payloads.
        allow, allow_modules: as in `check`.
        strict: raise DequantisationError at the first widening, before its result is used.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, payloads: Iterable[Tensor] = (), allow: Sequence[str] = (),
        allow_modules: Sequence[str] = (), strict: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.allow, self.allow_modules, self.strict = tuple(allow), tuple(allow_modules), strict
        self.findings: list[Widening] = []
        named = [*model.named_parameters(), *model.named_buffers()] if model is not None else []
        wrapped = [held for _, held in found_in(named)]
        # Keeps the tensors alive: the address of freed memory may be another tensor's.
        self._payloads = [*(held.payload for held in wrapped), *payloads]
        self._bytes = {t.untyped_storage().data_ptr(): t.dtype for t in self._payloads if t.dtype not in FP8}
        self._bytes |= {held.payload.untyped_storage().data_ptr(): held.payload.dtype for held in wrapped}
        self._classes = {type(value) for _, value in named if is_wrapper(value) and hasattr(type(value), "dequantize")}
        self._modules, self._stack = ModuleTracker(model), contextlib.ExitStack()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as it is, with its fallbacks seen: by default torch runs a model in eager under a mode."""
        return RUNS_COMPILED

    def __enter__(self) -> Any:
        for cls in self._classes:
            self._stack.enter_context(self._watched(cls))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_wrapper(a) for a in tree_leaves((args, kwargs))):
            return NotImplemented  # the wrapper's class goes first; the ops it calls come back here
        self._modules.note()
        result = func(*args, **(kwargs or {}))
        operands = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        payloads = [(a, dtype) for a in operands if (dtype := self._held(a)) is not None]
        if payloads:
            name = _name(func)
            # An operand that the op writes to is a result too.
            wide = _grown(name, [a for a, _ in payloads], result)
            if wide is not None:
                self._record(name, wide, payloads[0][1])
            elif _one_byte(result):
                self._keep(result, payloads[0][1])
        return result

    def _held(self, t: Tensor) -> torch.dtype | None:
        if t.dtype in FP8:
            return t.dtype
        return self._bytes.get(t.untyped_storage().data_ptr()) if t.element_size() == 1 and t.numel() else None

    def _keep(self, result: Any, dtype: torch.dtype) -> None:
        """Bytes made of a payload are a payload."""
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.dtype not in FP8 and t.untyped_storage().data_ptr() not in self._bytes:
                self._payloads.append(t)
                self._bytes[t.untyped_storage().data_ptr()] = dtype

    def _record(self, name: str, wide: Tensor, held: torch.dtype) -> None:
        fqn = self._modules.here()
        if not _allowed(name, fqn, self.allow, self.allow_modules):
            self.findings.append(Widening(name, _bytes(wide), held, wide.dtype, fqn, _line()))
            raise_if_strict(self.findings[-1:], self.strict)

    @contextlib.contextmanager
    def _watched(self, cls: type) -> Iterator[None]:
        """Watches `cls.dequantize`, which may call a kernel that no dispatcher sees."""
        own, plain = "dequantize" in vars(cls), cls.dequantize  # type: ignore[attr-defined]
        sentinel = self

        def dequantize(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            with disable_current_modes():
                result = plain(wrapper, *args, **kwargs)
            sentinel._record(f"{cls.__name__}.dequantize", result, split(wrapper).payload.dtype)
            return result

        cls.dequantize = dequantize  # type: ignore[attr-defined]
        try:
            yield
        finally:
            if own:
                cls.dequantize = plain  # type: ignore[attr-defined]
            else:
                del cls.dequantize  # type: ignore[attr-defined]


def _line() -> str:
    """ "file.py:123, in forward" of the innermost frame outside of torch and of this file."""
    inside = torch.__path__[0]
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not file.startswith(inside) and file != __file__:
            return f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}, in {frame.f_code.co_name}"
    return ""
