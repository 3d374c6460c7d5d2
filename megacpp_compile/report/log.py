"""Logging through torch's own channels: `TORCH_LOGS="+megacpp_compile"` and `TORCH_TRACE` (tlparse)."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from megacpp_compile._torch.logging import trace_structured

logger = logging.getLogger("megacpp_compile")


def graph(stage: str, gm: GraphModule) -> None:
    """The graph after `stage`, for tlparse and, at debug level, for the log. Rendered only if anybody asked."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"megacpp_{stage}", "encoding": "string"},
        payload_fn=lambda: gm.print_readable(print_output=False),
    )
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("graph after %s:\n%s", stage, gm.print_readable(print_output=False))


def artifact(frame: Any, sites: Sequence[Any], misses: Sequence[Any]) -> None:
    """The frame's part of the report, for tlparse and the log."""
    logger.info("frame %s: %s", frame.name, ", ".join(f"{k} {v}" for k, v in frame.passes.items()) or frame.reason)
    for miss in misses:
        logger.info("%s did not fire at %s (%s): %s", miss.pass_name, miss.fqn or "?", miss.node, miss.reason)

    def payload() -> str:
        from megacpp_compile.report.report import Report

        whole = Report()
        whole.add(frame, sites, misses)
        return json.dumps(whole.to_dict())

    trace_structured("artifact", metadata_fn=lambda: {"name": "megacpp_report", "encoding": "json"}, payload_fn=payload)
