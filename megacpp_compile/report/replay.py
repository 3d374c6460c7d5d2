"""`verify="each"`: replay every rewritten site against the plain subgraph it replaced, on the real inputs of the first
call, forward and gradients.

The captured graph is run once on those inputs (clones: nothing is written to the caller's tensors), only the values at
site borders are kept, and both versions of each site are then differentiated against the same random cotangents.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from megacpp_compile._torch import modes
from megacpp_compile._torch.autocast import DisableAutocast
from megacpp_compile.fx.subgraph import between

# Relative error (norm of the difference over norm) two spellings of the same maths may have, by the coarsest dtype
# involved: rounding of a few operations, with room for another order of summation.
# With float8 inside, asked for by a precision plan: three bits of mantissa in operands and gradients, 0.027 of the norm
# of each. Where a product cancels its error is larger; gradients of weights were seen to have 1.2 times as much.
TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 7e-2,
}  # fmt: skip
EXPERTS_IN_FLOAT8 = 1e-1  # three such products, one behind the other
# So many standard deviations of an estimate from random signs are no chance.
DEVIATIONS = 6
# Where the plain code gives something else for operands that are rounded otherwise, so much of that is no error.
ROUNDINGS = 4


class Recorder(Interpreter):
    """Runs a graph and keeps the values of some of its nodes."""

    def __init__(self, gm: GraphModule, wanted: set[Node]) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self.wanted, self.kept = wanted, dict[Node, Any]()

    def run_node(self, n: Node) -> Any:
        if n.target is torch.ops.aten.copy_.default:  # the epilogue that writes to the caller's inputs
            return n.args
        result = super().run_node(n)
        if n in self.wanted:
            self.kept[n] = result.detach().clone() if isinstance(result, torch.Tensor) else result
        return result


def concrete(example_inputs: Sequence[Any]) -> list[Any]:
    """The inputs of the first call: sizes and floats that the graph takes as inputs come as symbols beside them."""
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return [x.node.hint if isinstance(x, symbols) else x for x in example_inputs]


def border_values(gm: GraphModule, example_inputs: Sequence[Any], wanted: set[Node]) -> dict[Node, Any]:
    """Values of `wanted` on `example_inputs`, computed in eager with its random state put back afterwards."""
    devices = {x.device.index for x in example_inputs if isinstance(x, torch.Tensor) and x.is_cuda} - {None}
    recorder = Recorder(gm, wanted)
    inputs = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in example_inputs]
    with modes.restored(), torch.random.fork_rng(devices=sorted(devices)), torch.no_grad():
        recorder.run(*inputs)
    return recorder.kept


def compare(
    gm: GraphModule,
    inputs: Sequence[Node],
    plain: Sequence[Node],
    new: Sequence[Node],
    values: dict[Node, Any],
    differentiable: Collection[Node],
    rows: int | None = None,
    estimated: Mapping[Node, int] = MappingProxyType({}),
) -> tuple[str, float, float]:
    """(worst tensor, its relative error, tolerance) of outputs and input gradients, new against plain.

    Gradients are asked of the `differentiable` inputs: an op has none for tables and positions, nor needs one.
    rows: of tensors that have as many as the outputs, so many are compared; None for all.
    estimated: inputs whose gradient is the plain one projected on so many random signs. It is not compared, but the
    part of it that lies along the plain gradient, which is all of that on average; see `_bias`.
    """
    results, tolerance = [], 0.0
    for outputs in (plain, new):
        part = between(gm, inputs, outputs)
        module, order = part.module(), part.inputs
        leaves = [_leaf(values[n], n in differentiable) for n in order]
        named = _results(module, order, plain, leaves)
        results.append(_rows(named, rows))
        inside = [n.meta.get("val") for n in module.graph.nodes]
        for t in [*leaves, *named.values(), *inside]:
            if isinstance(t, torch.Tensor):
                tolerance = max(tolerance, TOLERANCE.get(t.dtype, 0.0))
        if any("fp8_current" in n.args for n in module.graph.nodes):  # inside of an op
            tolerance = max(tolerance, EXPERTS_IN_FLOAT8)
    reference, got = results
    errors = {name: _error(got.get(name), t) for name, t in reference.items()}
    for node, directions in estimated.items():
        if (name := f"gradient of {node.name}") in reference:
            errors[name] = tolerance * _bias(got.get(name), reference[name], directions, tolerance)
    off = [name for name, error in errors.items() if tolerance < error < float("inf")]
    if off:  # perhaps of what is rounding alone in the plain code, such as a gradient whose terms cancel
        part = between(gm, inputs, plain)
        leaves = [_leaf(_another_rounding(values[n]), n in differentiable) for n in part.inputs]
        again = _rows(_results(part.module(), part.inputs, plain, leaves), rows)
        for name in off:
            if _distance(got[name], reference[name]) <= ROUNDINGS * _distance(again[name], reference[name]):
                errors[name] = 0.0
    worst = max(errors, key=errors.__getitem__)
    return worst, errors[worst], tolerance


def _results(
    module: GraphModule, order: Sequence[Node], names: Sequence[Node], leaves: Sequence[Any]
) -> dict[str, torch.Tensor]:
    """Outputs of `module`, by the nodes in `names`, and gradients of `leaves`, by those in `order`."""
    with modes.restored(), torch.enable_grad():
        out = module(*leaves)
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(o.shape, generator=generator).to(o) for o in out]
    asked = [(n.name, x) for n, x in zip(order, leaves, strict=True) if isinstance(x, torch.Tensor) and x.requires_grad]
    with_grad = [(o, c) for o, c in zip(out, cotangents, strict=True) if o.requires_grad]
    named = {f"output {n.name}": o for n, o in zip(names, out, strict=True)}
    if with_grad:
        outs, weights = zip(*with_grad, strict=True)
        with DisableAutocast():  # as eager's backward, which runs outside of every region
            grads = torch.autograd.grad(outs, [x for _, x in asked], weights, allow_unused=True)
        found = zip(asked, grads, strict=True)
        named.update({f"gradient of {name}": g for (name, _), g in found if g is not None})
    return named


def _rows(named: dict[str, torch.Tensor], rows: int | None) -> dict[str, torch.Tensor]:
    """`named`, so many `rows` of what has as many as its first, an output; None for all."""
    if rows is None:
        return named
    whole = next(iter(named.values())).shape[:1]
    return {name: t[:rows] if t.shape[:1] == whole else t for name, t in named.items()}


def _another_rounding(x: Any) -> Any:
    """`x`, each number next to what it was, up or down."""
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return x
    signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(1)).to(x.device) * 2 - 1
    return x * (1 + signs * torch.finfo(x.dtype).eps)


def _leaf(x: Any, differentiable: bool) -> Any:
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return x.detach().clone().requires_grad_(differentiable)
    return x


def _bias(got: torch.Tensor | None, want: torch.Tensor, directions: int, rounding: float) -> float:
    """How far the part of `got`, an estimate of the matrix `want`, that lies along it is from 1, where 1 is what chance
    and `rounding` allow.

    That part is a sum of squares of random sums, tr(S^T A S) / r with A = want^T want over its trace, and S of signs in
    r `directions`. It is 1 on average, and its variance is 2 / r of the squares of A off the diagonal.
    """
    if got is None or got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    got, want = got.detach().double(), want.detach().double()
    scale = want.square().sum().clamp_min(1e-24)
    gram = want.t() @ want / scale
    variance = 2 / directions * (gram.square().sum() - gram.diagonal().square().sum()).clamp_min(0)
    found = abs(float((got * want).sum() / scale) - 1) / (DEVIATIONS * float(variance) ** 0.5 + rounding)
    return found if found == found else float("inf")


def _error(got: torch.Tensor | None, want: torch.Tensor) -> float:
    """Relative, over what is a number in `want`: a NaN there is no value to be off from."""
    if got is None or got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    size = float(torch.where(want.isfinite(), want, 0).detach().double().norm().clamp_min(1e-12))
    error = _distance(got, want) / size
    return error if error == error else float("inf")


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference, over what is a number in `want`."""
    got, want = got.detach().double(), want.detach().double()
    same = want.isnan() | (got == want)  # infinite on both sides, too
    return float(torch.where(same, 0, got - want).norm())
