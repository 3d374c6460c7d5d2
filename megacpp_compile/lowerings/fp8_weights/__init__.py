"""Casts of weights to float8 that several calls may share: both orientations that Hopper's GEMMs read, made at once.

    fp8_quantize_weights(weights, transposed)
                weights     [n_i, k] of linears that share a GEMM
                returns     payload [n, k] of all, one below the other, in e4m3; with `transposed` that as [k, n], else
                            empty; scale_inv [], float32: w = payload * scale_inv, by the values they have now
    fp8_quantize_experts(weights, parts, transposed)
                weights     as `megacpp::moe` has them, [r, d] of `parts` times E experts or stacked, those of a part
                            (gate, up) one after the other
                returns     payload [E, parts * r, d]; with `transposed` that as [E, d, parts * r], else empty; the
                            scale of each row [E, parts * r], float32, or float64 for float64

A compiled frame takes their results as inputs (`backends/weight_casts.py`): weights that are the same for several
microbatches are cast once for all of them. Not differentiable; `fp8_linear` and `moe` take the gradients.
Source of the idea: `is_first_microbatch` of Transformer Engine's modules.
"""

from __future__ import annotations

import torch

from megacpp_compile.lowerings._op import compute_dtype, define_op
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.fp8_linear.reference import DTYPES
from megacpp_compile.lowerings.fp8_weights import reference

PREFERENCE = {"cuda": ("cuda_triton", "reference")}
REFERENCE_SERVES = {"tpu": "no plan asks for float8 there, so no pass makes it"}


@define_op(reference.fp8_quantize_weights)
def fp8_quantize_weights(weights, transposed):  # type: ignore[no-untyped-def]
    first, n = weights[0], sum(w.shape[0] for w in weights)
    dtype, k = DTYPES["e4m3"], first.shape[1]
    columns = first.new_empty((k, n) if transposed else (0,), dtype=dtype)
    return first.new_empty((n, k), dtype=dtype), columns, first.new_empty((), dtype=torch.float32)


@define_op(reference.fp8_quantize_experts)
def fp8_quantize_experts(weights, parts, transposed):  # type: ignore[no-untyped-def]
    first, (r, k) = weights[0], weights[0].shape[-2:]
    e = (first.shape[0] if first.dim() == 3 else 1) * len(weights) // parts
    dtype = DTYPES["e4m3"]
    columns = first.new_empty((e, k, parts * r) if transposed else (0,), dtype=dtype)
    scale = first.new_empty((e, parts * r), dtype=compute_dtype(first))
    return first.new_empty((e, parts * r, k), dtype=dtype), columns, scale


declare({"megacpp::fp8_quantize_weights": OpTraits(), "megacpp::fp8_quantize_experts": OpTraits()})
