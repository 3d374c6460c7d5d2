"""Chooses the checkpoint for blocks with fp8 modules of Transformer Engine, and refuses torch's around them.

Recomputation has to quantise with the scales of the first forward: under delayed scaling they come from a history of
maxima, which the recomputation would extend a second time. Transformer Engine's checkpoint keeps the scales of the
first forward; torch's does not know of them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn
from torch.utils import checkpoint as stock

from megacpp_compile._torch.autograd import current_graph_task_id, top_saved_tensors_default_hooks
from megacpp_compile.config.checkpointing import FP8_WRAPPERS
from megacpp_compile.errors import BadOptionError, EngineError, StockCheckpointError
from megacpp_compile.precision import engine

_DEEPEST = 200  # frames between a module and the checkpoint around its block; nested modules take three each


def checkpoint_for(block: nn.Module, fp8_wrapper: str = "te_checkpoint") -> Callable[..., Any]:
    """The function to call as `checkpoint(block, *args)`: Transformer Engine's checkpoint if `block` holds modules of
    Transformer Engine, torch's if it holds none; both without reentrant autograd.

    fp8_wrapper: "te_checkpoint", or "none" for torch's alone. Raises BadOptionError for another word,
    StockCheckpointError for a block in fp8 under "none", and EngineError where Transformer Engine cannot be
    imported any more.
    """
    if fp8_wrapper not in FP8_WRAPPERS:
        raise BadOptionError("fp8_wrapper", fp8_wrapper, "'none' or 'te_checkpoint'", FP8_WRAPPERS)
    inside = next((name for name, m in block.named_modules() if engine.is_of_transformer_engine(m)), None)
    if inside is None:
        return functools.partial(stock.checkpoint, use_reentrant=False)
    if fp8_wrapper == "none":
        raise StockCheckpointError(f"{inside or type(block).__name__} in {type(block).__name__}")
    te, reason = engine.load()
    if te is None:  # its modules were constructed before, but the package cannot be imported now
        raise EngineError("Transformer Engine's checkpoint", reason, "Mend the installation it was built with.")
    return functools.partial(te.checkpoint, use_reentrant=False)


def refuse_stock_checkpoint(module: nn.Module) -> None:
    """Raise StockCheckpointError if torch's checkpoint is calling `module`, which is about to compute in fp8.

    That shows in the first forward of a checkpoint without reentrant autograd, and in the recomputation of any.
    """
    hooks = top_saved_tensors_default_hooks(True)
    kept_by_stock = hooks is not None and getattr(hooks[0], "__module__", "") == stock.__name__
    if kept_by_stock or (current_graph_task_id() != -1 and _called_by_stock()):
        raise StockCheckpointError(type(module).__name__ + _sizes(module))


def _called_by_stock() -> bool:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame is None:
            return False
        if frame.f_code.co_filename == stock.__file__:
            return True
        frame = frame.f_back
    return False


def _sizes(module: nn.Module) -> str:
    return f"({getattr(module, 'in_features', '?')}, {getattr(module, 'out_features', '?')})"
