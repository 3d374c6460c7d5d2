"""Lowerings of other packages, of the ops here and of ops of their own."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch

import megacpp_compile.lowerings as package
from megacpp_compile._torch.ops import OpOverload, OpOverloadPacket
from megacpp_compile.config import registered
from megacpp_compile.errors import RegistrationError
from megacpp_compile.lowerings._registry import ADDED, Added, load_added, semantic_ops
from megacpp_compile.targets import TARGETS

F = TypeVar("F", bound=Callable[..., Any])
Supports = Callable[..., str | None]


@overload
def register_lowering(op: Any, body: F, *, target: str | Sequence[str] = ..., name: str = ...,
                      supports: Supports | None = ...) -> F: ...  # fmt: skip
@overload
def register_lowering(op: Any, *, target: str | Sequence[str] = ..., name: str = ...,
                      supports: Supports | None = ...) -> Callable[[F], F]: ...  # fmt: skip
def register_lowering(
    op: Any, body: Any = None, *, target: str | Sequence[str] = tuple(TARGETS), name: str = "",
    supports: Supports | None = None,
) -> Any:  # fmt: skip
    """Add a lowering of an op, one of this package's or one of another's; also a decorator.

    It is asked before the op's other lowerings, after those that were registered earlier. Where it cannot serve, the
    next one does, with the reason in the report; an op of another package without one that serves runs as it is. Its
    digest is part of the cache key.

    Args:
        op: a qualified name, `"megacpp::rope_qk"`, or an op, such as `torch.library.custom_op` makes.
        body: a function with the op's arguments that computes the op's results, of the same shapes and dtypes, and
            traces to torch's ops or to opaque ones (`torch.library.triton_op`). It writes to none of its arguments.
            Gradients are the op's own, as registered with torch; its backward, if an op, has lowerings of its own.
        target: "cpu", "cuda" or "tpu", or several of these; by default all.
        name: its name in reports; by default the function's.
        supports: called like `body`, with fake tensors; returns why it cannot serve such a call, else None.

    Returns:
        `body` itself.

    Raises:
        RegistrationError: an op or target that there is not, a `body` that does not take the op's arguments, or a name
            that another lowering of the op has.
    """
    if body is None:
        return functools.partial(register_lowering, op, target=target, name=name, supports=supports)
    name = name or getattr(body, "__name__", "")
    what = f"lowering {name!r} of {op}"
    found, targets = _overload(what, op), [target] if isinstance(target, str) else [*target]
    for one in targets:
        if one not in TARGETS:
            raise RegistrationError(what, f"is for {one!r}, not for one of {', '.join(TARGETS)}", str(one), [*TARGETS])
    _check_arguments(what, found, body)
    _check_name(what, found, targets, name, body)
    added = Added(found, name, body, supports)
    for one in targets:
        if not any(known.body is body for known in ADDED.get((found, one), ())):
            ADDED[found, one] = (*ADDED.get((found, one), ()), added)
            registered.CODE[f"lowering {found.name()} {one} {name}"] = registered.digest([body, supports])
    semantic_ops.cache_clear()
    return body


def is_added(target: Any) -> bool:
    """Whether a node calls an op of another package that has a lowering here, by whichever of its overloads."""
    load_added()
    return any(target in (op, op.overloadpacket) and op.namespace != "megacpp" for op, _ in ADDED)


def _overload(what: str, op: Any) -> Any:
    """The overload that graphs have of an op."""
    semantic_ops()  # defines those of this package
    overload_name = "default"
    if isinstance(op, str):
        namespace, _, name = op.partition("::")
        name, _, overload_name = name.partition(".")
        found = getattr(getattr(torch.ops, namespace), name, None) if name else None
        if found is None:
            known = [f"megacpp::{one}" if folder else one for folder, one in semantic_ops().values()]
            raise RegistrationError(what, "is of an op that there is not: import what defines it first", op, known)
        op = found
    op = getattr(op, "_opoverload", op)  # of `torch.library.custom_op`
    op = getattr(op, overload_name or "default", None) if isinstance(op, OpOverloadPacket) else op
    if not isinstance(op, OpOverload):
        raise RegistrationError(what, "is of no op: name one as in 'mylib::scale', or hand over the op itself")
    if op.namespace in ("aten", "prims"):
        raise RegistrationError(what, "is of an op of torch's own: write a rule that puts another in its place")
    return op


def _check_arguments(what: str, op: Any, body: Callable[..., Any]) -> None:
    arguments = op._schema.arguments
    if op._schema.is_mutable or any(a.kwarg_only for a in arguments):
        raise RegistrationError(what, f"is of {op._schema}, which writes to arguments or takes them by keyword alone")
    try:
        inspect.signature(body).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise RegistrationError(what, f"does not take the arguments of {op._schema}: {error}") from error


def _check_name(what: str, op: Any, targets: Sequence[str], name: str, body: Any) -> None:
    folder, _ = semantic_ops().get(op, ("", ""))
    if not name.isidentifier():
        raise RegistrationError(what, "needs a name: give it one by 'name'")
    if folder and importlib.util.find_spec(f"{package.__name__}.{folder}.{name}") is not None:
        raise RegistrationError(what, "has the name of one of this package's: give it another, by 'name'")
    if any(known.name == name and known.body is not body for one in targets for known in ADDED.get((op, one), ())):
        raise RegistrationError(what, "is registered already: give one of them another name")
