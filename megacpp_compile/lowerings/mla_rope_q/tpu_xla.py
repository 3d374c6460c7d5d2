"""`mla_rope_q` on XLA: the reference, with the rotation as multiply-adds over whole rows."""

from __future__ import annotations

import functools

from megacpp_compile.lowerings._kernels.xla_rotation import rotated
from megacpp_compile.lowerings.mla_rope_q import reference

mla_rope_q = functools.partial(reference.mla_rope_q, turn=rotated)
