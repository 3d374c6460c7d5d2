"""What semantic ops share: the dtype they compute in, and a body that autocast can't reach into."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megacpp_compile._torch.ops import OpOverload
from megacpp_compile.targets import CPU, by_xla, family


def compute_dtype(*of: Tensor | torch.dtype | None) -> torch.dtype:
    """The dtype an op computes in with these operands: float32, or float64 where one of them is float64."""
    dtypes = (t.dtype if isinstance(t, Tensor) else t for t in of if t is not None)
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def wide(*tensors: Tensor) -> Any:
    """The operands in their compute dtype, as an op takes them outside of a compiled graph."""
    return [t.to(compute_dtype(t)) for t in tensors]


def no_autocast(like: Tensor) -> contextlib.AbstractContextManager[None]:
    """A context with autocast off for `like`'s device: the graph fixes an op's dtypes, whatever region calls it."""
    kind = like.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def serve(name: str, reference: ModuleType, *args: Any) -> Any:
    """The result of an op that models call themselves, outside of a lowered graph: by the lowering that serves it in
    one.

    Ops that only passes write need none of this: they are lowered before they run.
    """
    operands = (t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)))
    target = family({next(t for t in operands if isinstance(t, Tensor)).device.type})
    if target is CPU:
        return getattr(reference, name)(*args)
    from megacpp_compile.lowerings._registry import choose

    return choose(getattr(torch.ops.megacpp, name).default, target.name, args).body(*args)


def kernel_op(name: str) -> Callable[[Callable[..., Any]], OpOverload]:
    """Makes the decorated function, which writes into none of its operands, an op for lowerings to call: opaque to what
    compiles around it, and past autograd. `torch.library.register_fake` says what its results are like.

    `torch.library.custom_op` gives an op a layer for autograd, in Python, and asks at each call whether a result is an
    operand: 21 us of the host for a call, and 73 with 128 tensors in a list, instead of 12 and 40.
    """

    def made(fn: Callable[..., Any]) -> OpOverload:
        @functools.cache
        def unseen() -> Callable[..., Any]:  # by Dynamo, which this imports: not before the op is called
            return torch.compiler.disable(torch.no_grad()(fn))

        tags = (torch.Tag.pt2_compliant_tag,)
        torch.library.define(name, torch.library.infer_schema(fn, mutates_args=()), tags=tags)
        torch.library.impl(name, "default", lambda *args, **named: unseen()(*args, **named))
        namespace, own = name.split("::")
        overload: OpOverload = getattr(getattr(torch.ops, namespace), own).default
        return overload

    return made


def save_operands(ctx: Any, operands: Sequence[Tensor | None], *kept: Tensor) -> None:
    """Saves operands, of which some may be None, and what the op `kept`; `ctx.given` says which are there."""
    ctx.given = [t is not None for t in operands]
    ctx.save_for_backward(*(t for t in operands if t is not None), *kept)


def saved_operands(ctx: Any) -> tuple[list[Any], list[Tensor]]:
    """(operands, what was kept) as `save_operands` got them."""
    saved = iter(ctx.saved_tensors)
    return [next(saved) if given else None for given in ctx.given], list(saved)


def shaped_like(given: Tensor, operands: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Fake gradients of `operands`; an empty one, as `given` is, of each that is None."""
    return tuple(given.new_empty(0) if t is None else t.new_empty(t.shape) for t in operands)


def bias_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient [n] of a bias in `dtype`, from that of y [..., n]: summed in float32, as torch sums it, whatever
    precision the GEMMs have."""
    return grad.flatten(0, -2).float().sum(0).to(dtype)


def ends_until(ends: Tensor, values: Tensor) -> Tensor:
    """int64 [n]: for each of `values` [n], how many of the ascending `ends` [E] are at most that."""
    if by_xla(ends.device):  # torch_xla has no `searchsorted` of its own, and would ask the host
        return (ends <= values[:, None]).sum(-1)
    return torch.searchsorted(ends, values, right=True)
