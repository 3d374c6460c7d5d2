"""Has Dynamo trace a frame again as soon as it is known which floats of the model are numbers, as an op's epsilon.

Under `dynamic=True` floats are inputs. One that no tensor is computed with, be it that a pass has fixed it, that torch
has, or that the model only compares it, is a number from then on, and AOTAutograd has Dynamo trace the frame again with
that number written in it: when it has traced the frame, backward included. What it will say is known before.
"""

from __future__ import annotations

import operator

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megacpp_compile._torch._registry import present
from megacpp_compile._torch.dynamo import TensorifyScalarRestartAnalysis, TensorifyState
from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import value

# What AOTAutograd computes with a tensor in the place of a float. A float that anything else reads it may fix, too, and
# is left to say so at once with the others.
_WITH_TENSORS = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor,
    operator.add, operator.sub, operator.mul, operator.truediv,
}  # fmt: skip


def trace_again(gm: GraphModule, env: ShapeEnv | None) -> None:
    """Leave the backend where no tensor of the rewritten graph `gm` is computed with some float, and all others stay
    inputs. env: of the frame's sizes and floats."""
    if env is None or not present(TensorifyState, TensorifyScalarRestartAnalysis):
        return
    numbers = [n for n in gm.graph.nodes if isinstance(value(n), torch.SymFloat)]
    read = [n for n in numbers if n.users]
    symbols = [value(n).node.expr.free_symbols for n in read]
    if not all(symbols) or any(user.target not in _WITH_TENSORS for n in read for user in n.users):
        return
    kept = {str(s) for each in symbols for s in each}
    given = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # as torch 2.9 has it
    floats = {str(s) for s, number in given.items() if isinstance(number, sympy.Float) and str(s).startswith("zf")}
    fixed = {name for name in floats - kept if not TensorifyState.should_specialize(name)}
    for name in fixed:
        TensorifyState.specialize(name)
    if fixed:
        raise TensorifyScalarRestartAnalysis(restart_reason="megacpp: floats of the model are numbers in an op")
