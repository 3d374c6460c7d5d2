"""The overloads of ops on numbers and on conditions: sets in which each op stands in all its spellings."""

from __future__ import annotations

from megacpp_compile._torch.ops import aten

ADDITIONS = frozenset({aten.add.Tensor, aten.add.Scalar})
SUBTRACTIONS = frozenset({aten.sub.Tensor, aten.sub.Scalar})
MULTIPLICATIONS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
DIVISIONS = frozenset({aten.div.Tensor, aten.div.Scalar})
SCALINGS = MULTIPLICATIONS | DIVISIONS
SUMS_OF_TENSORS = frozenset({aten.add.Tensor, aten.sub.Tensor})
SOFTMAXES = frozenset({aten.softmax.int, aten._softmax.default})
FILLS = frozenset({aten.masked_fill.Scalar, aten.masked_fill.Tensor})
NEGATIONS = frozenset({aten.bitwise_not.default, aten.logical_not.default})
