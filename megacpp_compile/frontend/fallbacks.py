"""Frames that fall back whole: said once, with the reason and what to do, where an idiom may have been in them."""

from __future__ import annotations

import re

from torch.fx import GraphModule

from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.fx.edit import all_nodes
from megacpp_compile.report import log
from megacpp_compile.report.records import Frame

# What to do, by who refused the frame.
CAPTURE = "Take what the reason names out of the compiled code, or compile the parts of the model around it."
SETTINGS = "Compile without the settings that the reason names."
DEFECT = "That is a defect of megacpp_compile: please report it."
REFUSED = "Name the passes that fired there under 'disable', and please report it."
RANKS = "All ranks that communicate in it do so: see what that rank reports."
POLICY = "Compile without 'policy', or with another."

# In the names of what an idiom multiplies with: products of matrices and of elements, and what torch calls whole.
_PRODUCTS = re.compile(r"mul|mm|mv|matmul|linear|conv|einsum|dot|attention|attn|outer|norm|pow|square|megacpp")


def may_hold_idiom(gm: GraphModule) -> bool:
    """Whether Dynamo's graph, or one that it calls, multiplies anything: every idiom does."""
    return any(_PRODUCTS.search(_name(node.target)) for node in all_nodes(gm) if node.op.startswith("call"))


def _name(target: object) -> str:
    return str(target) if isinstance(target, str) else f"{getattr(target, '__name__', '')} {target}".lower()


def tell(frame: Frame, advice: str) -> None:
    """Log that a frame is compiled by the backend alone: a warning, once for each frame and reason, unless nothing is
    lost."""
    text = f"{frame.name} is compiled by Inductor alone: {frame.reason.rstrip('.')}. {advice}"
    if frame.lost:
        warn_once(text)
    else:
        log.logger.info("%s", text)
