"""`gated_rms_norm` on a CPU: the reference, which autograd differentiates.

What Inductor keeps then is what the op keeps, and of the gradients it makes fewer passes over memory.
"""

from __future__ import annotations

# Where the op comes late, as under a policy, its backward is the reference's.
from megacpp_compile.lowerings.gated_rms_norm.reference import gated_rms_norm, gated_rms_norm_backward

__all__ = ["AHEAD", "gated_rms_norm", "gated_rms_norm_backward"]

AHEAD = True
