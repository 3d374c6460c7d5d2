"""What Dynamo holds for Python's values while it translates a frame, and what it emits."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch._registry import find

PATHS = {
    "TensorVariable": "torch._dynamo.variables.TensorVariable",
    "SymNodeVariable": "torch._dynamo.variables.SymNodeVariable",
    "ConstantVariable": "torch._dynamo.variables.ConstantVariable",
    "NumpyNdarrayVariable": "torch._dynamo.variables.NumpyNdarrayVariable",
    "TupleVariable": "torch._dynamo.variables.TupleVariable",
    "wrap_fx_proxy": "torch._dynamo.variables.builder.wrap_fx_proxy",
}


def realized(variable: Any) -> Any:
    """`variable` itself, where it stands for a value that is looked at only when it is needed. Dynamo guards what is
    looked at: this is for what it is about to look at itself."""
    return variable.realize()


def seen(variable: Any) -> Any:
    """`variable` itself, where Dynamo has looked at its value, as it has at all that the graph computes; else None."""
    return variable.unwrap() if variable.is_realized() else None


def tensor(variable: Any) -> tuple[Node, torch.Tensor] | None:
    """(node, fake value) of a tensor in the graph."""
    if not isinstance(variable, find(PATHS["TensorVariable"])):
        return None
    node = variable.as_proxy().node
    fake = node.meta.get("example_value")
    return (node, fake) if isinstance(fake, torch.Tensor) else None


def number(variable: Any) -> tuple[Node, Any] | None:
    """(node, value) of a number or truth value that the graph computes."""
    if not isinstance(variable, find(PATHS["SymNodeVariable"])):
        return None
    return variable.as_proxy().node, variable.sym_num


def place(variable: Any) -> bool | None:
    """Whether `variable` is a tensor, of one whole number; None where it is neither that nor a whole number."""
    if (found := tensor(variable)) is not None:
        return True if found[1].dim() == 0 and found[1].dtype == torch.int64 else None
    if (found := number(variable)) is not None:
        return False if isinstance(found[1], torch.SymInt) else None
    constant_of = isinstance(variable, find(PATHS["ConstantVariable"])) and variable.as_python_constant()
    return False if type(constant_of) is int else None


def plain(variable: Any) -> Any:
    """The number that `variable` is, where it is a constant."""
    return variable.as_python_constant() if isinstance(variable, find(PATHS["ConstantVariable"])) else variable


def python_type(variable: Any) -> type | None:
    """The class of the value; None where Dynamo does not know."""
    try:
        cls = variable.python_type()
    except Exception:
        return None
    return cls if isinstance(cls, type) else None


def constant(value: Any) -> Any:
    """What Dynamo holds for a constant of Python's."""
    return find(PATHS["ConstantVariable"]).create(value)


def parts(variable: Any) -> list[Any] | None:
    """What Dynamo holds for the entries of a tuple; None for anything else."""
    return list(variable.items) if isinstance(variable, find(PATHS["TupleVariable"])) else None


def entries(translator: Any, variable: Any) -> Any:
    """What Dynamo holds for a tuple of the numbers of a NumPy array in one dimension; None for anything else."""
    found = tensor(variable) if isinstance(variable, find(PATHS["NumpyNdarrayVariable"])) else None
    if found is None or found[1].dim() != 1 or not isinstance(found[1].shape[0], int):
        return None
    numbers = range(found[1].shape[0])
    return row([variable.call_method(translator, "__getitem__", [constant(i)], {}) for i in numbers])


def row(variables: list[Any]) -> Any:
    """What Dynamo holds for a tuple."""
    return find(PATHS["TupleVariable"])(variables)


def emit(translator: Any, op: Any, *args: Any) -> Node:
    """A call of `op` in the graph that is made. args: numbers, and what Dynamo holds for tensors and numbers."""
    proxies = tuple(a.as_proxy() if hasattr(a, "as_proxy") else a for a in args)
    node: Node = translator.output.create_proxy("call_function", op, proxies, {}).node
    return node


def computed(translator: Any, op: Any, *args: Any) -> Any:
    """What Dynamo holds for the result of `op`, a tensor. args: as in `emit`."""
    proxies = tuple(a.as_proxy() if hasattr(a, "as_proxy") else a for a in args)
    proxy = translator.output.create_proxy("call_function", op, proxies, {})
    return find(PATHS["wrap_fx_proxy"])(translator, proxy)


def contains(translator: Any, holder: Any, element: Any) -> Any:
    """What Dynamo holds for `element in holder`, a tensor; None where it breaks the graph at that."""
    try:
        return holder.call_method(translator, "__contains__", [element], {})
    except find("torch._dynamo.exc.Unsupported"):
        return None


def known(variable: Any) -> torch.Tensor | None:
    """The value of a tensor of one entry that tracing may read."""
    found = tensor(variable)
    value = getattr(found[1], "constant", None) if found is not None else None
    return value if isinstance(value, torch.Tensor) and value.numel() == 1 else None


def make_known(variable: Any, value: torch.Tensor) -> None:
    """Let tracing read the tensor `variable` as `value`, and what is computed from such tensors alone."""
    fake = variable.as_proxy().node.meta["example_value"]
    fake.constant = value
    fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)  # until it is written to
