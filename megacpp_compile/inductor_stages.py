"""Which of Inductor's stages run that this package's own passes are part of.

Semantic ops are lowered by a post-grad pass, and a policy tags the joint graph. `torch.compile(mode="lite")` switches
both stages off where torch has that mode, and so do their settings set by hand; TORCHINDUCTOR_LITE_MODE=1 sets them for
the whole process from torch 2.15 on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch._inductor import config as inductor_config

LOWERING = "use_post_grad_passes"
REMAT = "use_joint_graph_passes"
_WORK = {LOWERING: "lowers this package's ops", REMAT: "applies the policy"}


def switched_off(patches: Mapping[str, Any], policy: bool) -> tuple[str, ...]:
    """The settings that keep a frame from being compiled with what the passes did to it. patches: Inductor's settings
    for the frame, before the global ones; policy: whether one is to be applied."""
    needed = (LOWERING, REMAT) if policy else (LOWERING,)
    return tuple(name for name in needed if not patches.get(name, getattr(inductor_config, name, True)))


def why(settings: Sequence[str]) -> str:
    """What the settings of `switched_off` keep from running, beginning with the settings."""
    off = ", ".join(f"{name}=False" for name in settings)
    return f"{off}: Inductor does not run the stage that {' nor the one that '.join(_WORK[name] for name in settings)}"
