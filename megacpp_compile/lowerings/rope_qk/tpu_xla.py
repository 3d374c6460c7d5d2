"""`rope_qk` on XLA: the reference, with the rotation as multiply-adds over whole rows."""

from __future__ import annotations

import functools

from megacpp_compile.lowerings._kernels.xla_rotation import rotated
from megacpp_compile.lowerings.rope_qk import reference

rope_qk = functools.partial(reference.rope_qk, turn=rotated)
