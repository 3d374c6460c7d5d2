"""Whether Inductor runs the stages that this package's own passes are part of.

Semantic ops are lowered by a post-grad pass, and a policy tags the joint graph. `torch.compile(mode="lite")` switches
both stages off where torch has that mode, and so do their settings set by hand; TORCHINDUCTOR_LITE_MODE=1 sets them for
the whole process from torch 2.15 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacpp_compile._torch.inductor import config as inductor_config
from megacpp_compile.config.options import Config
from megacpp_compile.errors import StagesOffError

LOWERING = "use_post_grad_passes"
REMAT = "use_joint_graph_passes"
_WORK = {LOWERING: "lowers this package's ops", REMAT: "applies the policy"}


def switched_off(patches: Mapping[str, Any], policy: bool) -> tuple[str, ...]:
    """The settings that keep a frame from being compiled with what the passes did to it. patches: Inductor's settings
    for the frame, before the global ones; policy: whether one is to be applied."""
    needed = (LOWERING, REMAT) if policy else (LOWERING,)
    return tuple(name for name in needed if not patches.get(name, getattr(inductor_config, name, True)))


def why_alone(patches: Mapping[str, Any], config: Config, grad: bool) -> str:
    """Why Inductor has to compile a frame alone, beginning with the settings; "" where it does not have to. Raises
    StagesOffError under `strict`."""
    settings = switched_off(patches, policy=config.own_policy is not None and grad)
    if not settings:
        return ""
    off = ", ".join(f"{name}=False" for name in settings)
    reason = f"{off}: Inductor does not run the stage that {' nor the one that '.join(_WORK[n] for n in settings)}"
    if config.strict:
        raise StagesOffError(settings, reason)
    return reason
