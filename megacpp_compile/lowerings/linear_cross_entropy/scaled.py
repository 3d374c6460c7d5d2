"""`megacpp::scaled_gradient`: a gradient that a forward has made, times the gradient of its loss.

    t       [...]  what the forward saved for its backward
    factor  []     in the compute dtype: rounded to half precision it would move a whole gradient by as much
    returns [...]  t's dtype, rounded once; 0 where t is, whatever the factor: what counts for nothing does not become
                   NaN by a loss that is divided by how much counts

In t's own memory, where the backward that runs is the last of its graph (no `retain_graph=True`): the gradient of a
head's weight is as large as the weight, and would be there twice. Compiled graphs alone have the op, as nobody else has
hold of what they save. torch has donated buffers for this, which a backward that is lowered with its forward cannot
have (`_torch.functorch.keep_saved_tensors`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile._torch.autograd import current_graph_is_kept
from megacpp_compile._torch.fakes import is_fake
from megacpp_compile.fx.sizes import hint, nbytes
from megacpp_compile.lowerings._traits import OpTraits, declare

# Bytes from which a gradient is worth a kernel of its own: what Inductor writes may be fused with what reads it.
LEAST = 256 << 20
DEVICES = ("cuda",)

torch.library.define("megacpp::scaled_gradient", "(Tensor t, Tensor factor) -> Tensor")
declare({"megacpp::scaled_gradient": OpTraits(kernel="in place")})


@torch.library.impl("megacpp::scaled_gradient", "CompositeExplicitAutograd")
def _scaled(t: Tensor, factor: Tensor) -> Tensor:
    capturing = t.is_cuda and torch.cuda.is_current_stream_capturing()
    if current_graph_is_kept() or capturing or not t.is_contiguous():
        return _product(t, factor)
    if t.is_cuda:
        from megacpp_compile.lowerings.linear_cross_entropy._triton_scaled import scale_in_place

        scale_in_place(t, factor)
    else:
        t.copy_(_product(t, factor))
    return t.detach()  # autograd keeps a gradient that is nobody else's tensor, and copies any other


@torch.library.register_fake("megacpp::scaled_gradient")
def _(t: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_like(t)


def _product(t: Tensor, factor: Tensor) -> Tensor:
    return torch.where(t == 0, 0, t.to(factor.dtype) * factor).to(t.dtype)


def scaled_gradient(t: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """t * factor in `dtype`, by the op where a large `t` is a tensor of a graph that is being made."""
    if t.dtype != dtype:
        return _product(t, factor).to(dtype)
    if is_fake(t) and t.device.type in DEVICES and hint(nbytes(t)) >= LEAST:
        product: Tensor = torch.ops.megacpp.scaled_gradient(t, factor)
        return product
    return _product(t, factor)
