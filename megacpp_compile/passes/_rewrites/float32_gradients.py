"""Which weights' gradients are to be in float32: those of parameters whose `grad_dtype` says so
(https://docs.pytorch.org/docs/stable/generated/torch.Tensor.grad_dtype.html), that reach their linear moved and cast
alone. Their gradient then goes back through moves and casts, which leave every number as it is
(`backends/float32_gradients.py`)."""

from __future__ import annotations

import operator

from torch.fx import Node

from megacpp_compile.frontend.capture import FLOAT32_GRADIENT
from megacpp_compile.fx.views import (
    COMPOSITE_PERMUTATIONS,
    FOLDS,
    IDENTITIES,
    PERMUTATIONS,
    RESHAPES,
    SPLITS,
    UNIT_DIMS,
    is_cast,
)
from megacpp_compile.reader.links import through

_MOVES = RESHAPES | FOLDS | UNIT_DIMS | PERMUTATIONS | COMPOSITE_PERMUTATIONS | IDENTITIES | SPLITS | {operator.getitem}


def has_float32_gradient(weight: Node) -> bool:
    """Whether `weight`, of a captured graph, is all or a part of a parameter with a gradient in float32."""
    node = through(weight, _MOVES, is_cast)
    return bool(node.meta.get(FLOAT32_GRADIENT))
