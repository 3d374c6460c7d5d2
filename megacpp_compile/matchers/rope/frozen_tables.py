"""Parameters that are cos and sin tables, or the frequencies that these are made of: kept as `nn.Parameter` with
`requires_grad=False`, as RoFormer's positions are, or not trained in this frame.

What no optimizer changes need not be a table: under LoRA every weight is frozen. A table shows by its use: through
indexing, views and casts (or through cos and sin, where frequencies are kept) it reaches nothing but products with
activations, element by element.
"""

from __future__ import annotations

import itertools

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.view_chains import beyond_views
from megacpp_compile.fx.walks import descendants
from megacpp_compile.lowerings._traits import traits_of
from megacpp_compile.matchers.rope.activations import activations
from megacpp_compile.matchers.rope.lanes import is_one

_MEETS = {aten.mul.Tensor, aten.addcmul.default}
_FUNCTIONS = {aten.cos.default, aten.sin.default}
_ANGLES = _FUNCTIONS | {aten.polar.default}
_MOST = 64  # nodes between frequencies and their cosines
# A weight of two dimensions is a layer's, not a table, where one of these reads it, or an op of ours that multiplies.
_CONTRACTIONS = {
    aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default,
    aten.baddbmm.default, aten.einsum.default, aten.convolution.default, aten.conv1d.default,
    aten.scaled_dot_product_attention.default,
}  # fmt: skip


def frozen_tables(graph: fx.Graph, weights: frozenset[Node], trained: frozenset[Node]) -> frozenset[Node]:
    """Those of `weights` that no gradient is asked of and that are used as tables."""
    found = {n for n in weights - trained if isinstance(v := value(n), torch.Tensor) and v.dim() and n.users}
    found = {n for n in found if not _is_layers(n) or _makes_angles(n)}
    while found:
        acts = activations(graph, weights - found)
        uses = {n: _used_as_table(n, acts) for n in found}
        # Layers' weights go first: with them more values become activations, for the rest to meet.
        uses |= {n: True for n, met in uses.items() if met is None and _makes_angles(n)}
        others = {n for n, met in uses.items() if met is None} or {n for n, met in uses.items() if not met}
        if not others:
            break
        found -= others
    return frozenset(found)


def _is_layers(parameter: Node) -> bool:
    wide = sum(not is_one(n) for n in value(parameter).shape) > 1
    return wide and any(_contracts(user) for user in beyond_views(parameter))


def _contracts(node: Node) -> bool:
    return node.op == "call_function" and (node.target in _CONTRACTIONS or traits_of(node).gemm)


def _makes_angles(parameter: Node) -> bool:
    """Whether all that is computed from `parameter` is angles, whose cosines and sines alone are read."""
    made = list(itertools.islice(descendants([parameter], lambda user: user.target not in _ANGLES), _MOST + 1))
    return 1 < len(made) <= _MOST and all(n.users for n in made)


def _used_as_table(parameter: Node, acts: set[Node]) -> bool | None:
    """None where something computed from `parameter` alone is read in another way than a table is; else whether all of
    it meets activations."""
    wide = sum(not is_one(n) for n in value(parameter).shape) > 1
    made = set(descendants([parameter], lambda user: user not in acts))
    met = {user for n in made for user in n.users if user in acts}
    if any(user.target not in _MEETS for user in met) or wide and any(map(_contracts, made)):
        return None
    returned, rotated = any(n.op == "output" for n in made), any(n.target in _FUNCTIONS for n in made)
    return bool(met) and not returned if wide or rotated else None
