"""Logging through torch's own channels: `TORCH_LOGS="+megacpp_compile"` and `TORCH_TRACE` (tlparse)."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from megacpp_compile._torch.logging import trace_structured

logger = logging.getLogger("megacpp_compile")


@functools.cache
def warn_once(reason: str) -> None:
    """A warning that a process gives once, however many frames it holds for: their reports name them."""
    logger.warning("%s", reason)


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
        from megacpp_compile.report.collector import Report

        whole = Report()
        whole.add(frame, sites, misses)
        return json.dumps(whole.to_dict())

    trace_structured("artifact", metadata_fn=lambda: {"name": "megacpp_report", "encoding": "json"}, payload_fn=payload)
