"""Masks of transformers that are a frame of their own, as where FSDP2's hooks break the graph between layers.

In a model's whole graph the passes read off its code which keys a mask hides, and kernels skip them. A frame that makes
the mask and nothing else hands it on as data, all queries by all keys, which kernels of `scaled_dot_product_attention`
read for all of them. As traced code may not look at data, transformers makes such a mask for causal attention, too; in
eager it looks, and says `is_causal` in its place. So the frame is left to eager, as if the layers alone were compiled.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megacpp_compile._torch.dynamo import left_to_python
from megacpp_compile.report import collector, log
from megacpp_compile.report.records import Frame

REASON = "a mask alone, which other frames would be handed as data: transformers says `is_causal` in eager instead"
_FILE, _FUNCTION = ("transformers", "masking_utils.py"), "create_causal_mask"
# What makes the mask more than causal where it is given.
_MORE = ("past_key_values", "or_mask_function", "and_mask_function", "block_sequence_ids")
# Backends whose report has the frame.
_told: weakref.WeakSet[Any] = weakref.WeakSet()


def in_eager(given: Mapping[str, Any]) -> Any:
    """Dynamo's answer for a frame that is left to eager, in this call; None for any other. given: the arguments of
    Dynamo's compilation of it."""
    code, values = given.get("code"), given.get("locals") or {}
    if code is None or code.co_name != _FUNCTION or Path(code.co_filename).parts[-2:] != _FILE:
        return None
    by_torch = getattr(values.get("config"), "_attn_implementation", None) == "sdpa"
    plain = by_torch and values.get("allow_is_causal_skip", True) and all(values.get(name) is None for name in _MORE)
    whole = given.get("one_graph")
    answer = left_to_python() if plain and not whole and _hides_none(values.get("attention_mask")) else None
    if answer is not None and (backend := given["compiler_fn"]) not in _told:
        _told.add(backend)
        log.logger.info("frame %s is left to eager: %s", code.co_name, REASON)
        name = f"{code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        collector.emit_frame(Frame(captured=False, name=name, reason=REASON, left_to="eager"))
    return answer


def _hides_none(padding: torch.Tensor | None) -> bool:
    """Whether no token is one of padding; eager looks as well, and waits for the device."""
    return padding is None or padding.dim() == 2 and bool(padding.all())
