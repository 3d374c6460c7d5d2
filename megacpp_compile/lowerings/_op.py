"""What semantic ops share: the dtype they compute in, and a body that autocast can't reach into."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
import types
import typing
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile._torch.ops import OpOverload
from megacpp_compile._torch.pytree import tree_leaves
from megacpp_compile.errors import OperandError
from megacpp_compile.targets import CPU, by_xla, family


def compute_dtype(*of: Tensor | torch.dtype | None) -> torch.dtype:
    """The dtype an op computes in with these operands: float32, or float64 where one of them is float64."""
    dtypes = (t.dtype if isinstance(t, Tensor) else t for t in of if t is not None)
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def wide(*tensors: Tensor) -> Any:
    """The operands in their compute dtype, as an op takes them outside of a compiled graph."""
    return [t.to(compute_dtype(t)) for t in tensors]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of x [..., k], weight [n, k] and bias [n], which in C++ asks symbolic sizes for numbers where it has a
    bias and is functionalised."""
    if bias is None or x.dim() == 1 or all(isinstance(size, int) for size in x.shape):
        return F.linear(x, weight, bias)
    return torch.addmm(bias, x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])


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
    target = family({first_tensor(args).device.type})
    if target is CPU:
        return getattr(reference, name)(*args)
    from megacpp_compile.lowerings._registry import choose

    return choose(getattr(torch.ops.megacpp, name).default, target.name, args).body(*args)


# An op's name -> what computes it where no graph is lowered.
OUTSIDE_OF_GRAPHS: dict[str, Callable[..., Any]] = {}
# An op's name -> its parameters' names.
_PARAMETERS: dict[str, list[str]] = {}


def define_op(
    reference: Callable[..., Any], *, check: Callable[..., str | None] | None = None, served: bool = False,
    outside: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Any]:  # fmt: skip
    """Makes an op `megacpp::NAME` of its reference, called NAME, and of the decorated function, its fake.

    The schema is the reference's signature, without parameters that default to a function or a class, which are its
    own. Outside of a lowered graph the reference runs, with autocast off, or with `served` what serves it in one, or
    `outside`, whose results share no memory with operands.
    check: what is wrong with operands that the op does not take, fake ones as well, which is an OperandError; its
    parameters are named as the op's.
    """
    name, taken = reference.__name__, _taken(reference)
    names = _PARAMETERS[name] = [p.name for p in taken]
    asked = [names.index(n) for n in inspect.signature(check).parameters] if check else []
    module = sys.modules[reference.__module__]
    OUTSIDE_OF_GRAPHS[name] = outside or (functools.partial(serve, name, module) if served else reference)

    def checked(args: Sequence[Any]) -> None:
        if check is not None:  # torch leaves out arguments at the end that are as they would be
            given = (*args, *(p.default for p in taken[len(args) :]))
            if (problem := check(*(given[i] for i in asked))) is not None:
                raise OperandError(f"megacpp::{name}", problem)

    def body(*args: Any) -> Any:
        checked(args)
        with no_autocast(first_tensor(args)):
            return OUTSIDE_OF_GRAPHS[name](*args)

    def defined(fake: Callable[..., Any]) -> Any:
        def promised(*args: Any, **named: Any) -> Any:
            args += tuple(named[n] for n in names[len(args) :] if n in named)
            checked(args)
            return fake(*args)

        made = torch.library.custom_op(f"megacpp::{name}", body, mutates_args=(), schema=_schema(reference, taken))
        made.register_fake(promised)
        made.__doc__ = fake.__doc__
        return made

    return defined


def differentiate(
    op: Any, backward: Any, *, of: str, results: str, zeros: str = "",
    keep: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    split: Callable[..., Sequence[Any]] = lambda _, *found: found,
) -> None:  # fmt: skip
    """Registers `backward`, an op whose results are the gradients of the operands `of`, as that of `op`.

    What backward takes is told by the names of its parameters: in front are the gradients of the first of `op`'s
    `results`, the others of which have none; then operands and results of the op, which are saved; and `NAME_grad` says
    whether operand NAME needs a gradient. zeros: the operand, or result, with the shape of the first result, whose
    gradient is zeros where only a later one has any; without it all results have theirs. keep: of operands and results,
    what backward takes under their names. split: of what it takes and its results, the gradients of the operands `of`.
    """
    operands, made = _PARAMETERS[op._name], results.split()
    taken = _PARAMETERS[backward._name]
    first = next(i for i, name in enumerate(taken) if name in (*operands, *made))
    flags = [name.removesuffix("_grad") for name in taken[first:] if name not in (*operands, *made)]
    kept = [name for name in (*operands, *made) if name in taken]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        output = output if isinstance(output, tuple) else (output,)
        ctx.set_materialize_grads(not zeros)
        ctx.mark_non_differentiable(*tree_leaves(output[first:]))
        values = keep(dict(zip([*operands, *made], [*inputs, *output], strict=True)))
        lists = [name for name in kept if isinstance(values[name], list)]  # of tensors, or of numbers
        ctx.lengths = {name: len(values[name]) for name in lists if all(isinstance(v, Tensor) for v in values[name])}
        ctx.tensors = [name for name in kept if isinstance(values[name], Tensor) or name in ctx.lengths]
        ctx.settings = {name: values[name] for name in kept if name not in ctx.tensors}
        ctx.save_for_backward(*tree_leaves([values[name] for name in ctx.tensors]))

    def gradients(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        needed = dict(zip(operands, ctx.needs_input_grad, strict=False))  # of those that the caller gave
        if all(grad is None for grad in grads):
            return (None,) * len(needed)
        saved, lengths = iter(ctx.saved_tensors), ctx.lengths
        lists = {
            name: [*itertools.islice(saved, lengths[name])] if name in lengths else next(saved) for name in ctx.tensors
        }
        values = ctx.settings | lists | {f"{name}_grad": needed[name] for name in flags}
        head, *others = grads[:first]
        head = values[zeros].new_zeros(values[zeros].shape) if head is None else head
        found = backward(head, *others, *(values[name] for name in taken[first:]))
        of_operand = dict(zip(of.split(), split(values, *found), strict=True))
        return tuple(of_operand.get(name) if need or need == [] else None for name, need in needed.items())

    op.register_autograd(gradients, setup_context=setup_context)


def _taken(reference: Callable[..., Any]) -> list[inspect.Parameter]:
    """Parameters of `reference` that are the op's."""
    hints, found = typing.get_type_hints(reference), inspect.signature(reference).parameters.values()
    taken = (p for p in found if p.default is p.empty or not callable(p.default))
    return [p.replace(annotation=_optional(hints[p.name])) for p in taken]


def _schema(reference: Callable[..., Any], taken: Sequence[inspect.Parameter]) -> str:
    def shaped() -> None: ...

    returned = typing.get_type_hints(reference)["return"]
    shaped.__signature__ = inspect.Signature(taken, return_annotation=returned)  # type: ignore[attr-defined]
    return torch.library.infer_schema(shaped, mutates_args=())


def _optional(hint: Any) -> Any:
    """`X | None` as torch 2.9 reads it."""
    return typing.Optional[typing.get_args(hint)[0]] if isinstance(hint, types.UnionType) else hint  # noqa: UP045


def first_tensor(args: Sequence[Any]) -> Tensor:
    """The first tensor of an op's operands, in a list or not."""
    return next(t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, Tensor))


# Ops for lowerings to call -> what computes them.
KERNEL_OPS: dict[OpOverload, Callable[..., Any]] = {}


def kernel_op(name: str, ours: bool = True) -> Callable[[Callable[..., Any]], OpOverload]:
    """Makes the decorated function, which writes into none of its operands, an op for lowerings to call: opaque to what
    compiles around it, and past autograd. `torch.library.register_fake` says what its results are like.
    ours: what it launches are kernels of ours, which `KERNEL_OPS` has compiled ahead.

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
        if ours:
            KERNEL_OPS[overload] = fn
        return overload

    return made


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
