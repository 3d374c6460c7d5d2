"""Calls on DTensors of which every rank can compute its own part, written on local tensors for the passes to see.

A linear on a replicated input and a column of its weight is the linear of the two local tensors; so are views of heads,
RoPE and norms behind it. `localize` writes such calls on local tensors. What communicates (`redistribute` to another
placement, or a call that would first move its operands) and what is not known here stays a call on DTensors.

The gradient of a local tensor has the placement that DTensor promises (`DTensor.from_local`, "gradient placement
guarantees"): replicated for a replicated tensor, sharded for a sharded one, replicated for a partial sum. Where a
replicated tensor takes part in what differs between ranks, each rank has a share of its gradient: `sum_gradient` adds
them up (Megatron's f, https://arxiv.org/abs/1909.08053, section 3), or, on the way into the frame, `to_local` is told
that the gradient is a partial sum, and DTensor reduces it as it would have.
"""

from megacpp_compile.frontend.local_dtensors.local_graph import dtensor_like
from megacpp_compile.frontend.local_dtensors.localizer import localize

__all__ = ["dtensor_like", "localize"]
