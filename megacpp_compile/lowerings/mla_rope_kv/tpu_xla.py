"""`mla_rope_kv` on XLA: the reference, with the rotation of the shared row as multiply-adds over whole rows."""

from __future__ import annotations

import functools

from megacpp_compile.lowerings._kernels.xla_rotation import rotated
from megacpp_compile.lowerings.mla_rope_kv import reference

mla_rope_kv = functools.partial(reference.mla_rope_kv, turn=rotated)
mla_rope_kv_backward = functools.partial(reference.mla_rope_kv_backward, turn=rotated)
