"""Recomputes a block in eager so that no gradient goes wrong in silence, and refuses torch's checkpoint around fp8.

Recomputation has to quantise with the scales of the first forward: under delayed scaling they come from a history of
maxima, which the recomputation would extend a second time; and outside of the autocast that the forward ran in it would
not quantise at all. Transformer Engine's checkpoint keeps scales and autocast; torch's knows of neither.

It has to choose the same experts, too (`kept_choices`). With the choice kept, torch's comparison of shapes, dtypes and
devices has nothing to find in a block that routes, and is switched off there and only there.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as stock

from megacpp_compile._torch.autograd import current_graph_task_id, top_saved_tensors_default_hooks
from megacpp_compile._torch.modules import compiled_call
from megacpp_compile._torch.ops import OpOverload
from megacpp_compile.config.checkpointing import FP8_WRAPPERS
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.errors import BadOptionError, EngineError, StockCheckpointError
from megacpp_compile.lowerings._traits import traits_of
from megacpp_compile.precision import engine
from megacpp_compile.precision.kept_choices import Choices, choices
from megacpp_compile.report import log

_GUARDED = "megacpp_guarded"  # the attribute of a module that has the hook
_DEEPEST = 200  # frames between a module and the checkpoint around its block; nested modules take three each


def checkpoint_for(
    block: nn.Module, fp8_wrapper: str = "auto", routes: bool | None = None, count_flips: bool = False,
    selective: bool = False,
) -> BlockCheckpoint:  # fmt: skip
    """What to call as `checkpoint(block, *args, **kwargs)`, so that backward recomputes the block; without reentrant
    autograd.

    fp8_wrapper: "auto": Transformer Engine's checkpoint where the block's modules of Transformer Engine are about to
        compute in fp8, torch's elsewhere; "te_checkpoint": Transformer Engine's if the block holds such modules at all;
        "none": torch's alone.
    routes: whether the block routes tokens, i.e. chooses by size among values it computes. None: every call is watched,
        and what it chooses kept. True: torch's comparison of shapes is off from the first call on. False: calls are not
        watched, which saves tens of microseconds of the host's time an op, and a choice in the block is made again.
    count_flips: debugging: choices are made again from recomputed scores, and `flips` counts what came out otherwise.
    selective: keep the results of GEMMs, attention cores, choices, and ops that are not known to be repeatable, and
        recompute the rest. A block in fp8 by Transformer Engine is recomputed whole, as its GEMMs are not torch's ops.

    Raises BadOptionError for another word or value. A call raises StockCheckpointError for a block in fp8 under "none",
    and EngineError where Transformer Engine cannot be imported any more.

    Source: `torch.utils.checkpoint`'s `context_fn` and `determinism_check`, `transformer_engine.pytorch.checkpoint`.
    """
    if fp8_wrapper not in FP8_WRAPPERS:
        wanted = "one of " + ", ".join(map(repr, FP8_WRAPPERS))
        raise BadOptionError("fp8_wrapper", fp8_wrapper, wanted, FP8_WRAPPERS)
    if routes not in (True, False, None):
        raise BadOptionError("routes", routes, "True, False, or None to find out")
    return BlockCheckpoint(block, fp8_wrapper, routes, count_flips, selective)


class BlockCheckpoint:
    """Recomputes one block; `checkpoint_for` makes it.

    Attributes:
        routes: whether the block routes tokens; None while no call has shown it.
        relaxed: whether torch's comparison of recomputed shapes is off, which it is for blocks that route alone.
        choices: what its calls chose; `.flips` under `count_flips`.
    """

    def __init__(
        self, block: nn.Module, fp8_wrapper: str, routes: bool | None, count_flips: bool, selective: bool
    ) -> None:
        self.selective = selective
        self.fp8_wrapper, self.asked, self.count_flips = fp8_wrapper, routes, count_flips
        self.choices = Choices(routed=routes is True)
        self.name = type(block).__name__
        self._said, self._holds_engine = False, _of_transformer_engine(block) is not None

    @property
    def routes(self) -> bool | None:
        return True if self.choices.routed else self.asked

    @property
    def relaxed(self) -> bool:
        return self.routes is True

    @property
    def flips(self) -> int:
        """Entries of choices that came out otherwise when they were made again, over all calls."""
        return self.choices.flips

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The block's result. Traced by torch.compile it is a region of `torch.utils.checkpoint`, in which this
        package's compiler keeps choices by itself; Transformer Engine's modules end the graph before it."""
        if torch.compiler.is_compiling() and not self._holds_engine:
            regional: dict[str, Any] = {"context_fn": selected} if self.selective else {}
            return stock.checkpoint(block, *args, use_reentrant=False, **regional, **kwargs)
        return self._run(block, *args, **kwargs)

    @torch.compiler.disable(reason="recomputes modules that run between compiled graphs")
    def _run(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return block(*args, **kwargs)
        extra: dict[str, Any] = {}
        if (self.selective or self.asked is not False) and self._watchable(block):
            saves = kept_when_selective if self.selective else None
            extra["context_fn"] = choices(self.choices, self.count_flips, saves)
        if self._by_transformer_engine(block):
            te, reason = engine.load()
            if te is None:  # its modules were constructed before, but the package cannot be imported now
                raise EngineError("Transformer Engine's checkpoint", reason, "Mend the installation it was built with.")
            return te.checkpoint(block, *args, use_reentrant=False, **extra, **kwargs)  # it compares no shapes
        if self.relaxed:
            extra["determinism_check"] = "none"
            self._say()
        return stock.checkpoint(block, *args, use_reentrant=False, **extra, **kwargs)

    def _by_transformer_engine(self, block: nn.Module) -> bool:
        if self.fp8_wrapper == "te_checkpoint":
            return _of_transformer_engine(block) is not None
        inside = in_fp8(block)
        if inside is not None and self.fp8_wrapper == "none":
            raise StockCheckpointError(f"{inside or self.name} in {self.name}")
        return inside is not None

    def _watchable(self, block: nn.Module) -> bool:
        """Compiled code runs its kernels unseen; under a mode that sees all ops torch would run it in eager."""
        compiled = next((m for m in block.modules() if compiled_call(m) is not None), None)
        if compiled is not None:
            warn_once(
                f"{type(compiled).__name__} in a checkpointed {self.name} is compiled: what it chooses is chosen again "
                "in backward. Apply checkpoints first and compile the model with them, or give the compiler a policy."
            )
        return compiled is None

    def _say(self) -> None:
        if not self._said:
            self._said = True
            log.logger.info("%s routes tokens: backward reuses its choices, and its recomputed shapes are not compared",
                            self.name)  # fmt: skip


@functools.cache
def kept_when_selective(op: OpOverload) -> bool:
    """Whether `selective` keeps the results of `op`: GEMMs, attention cores, choices, and what is not known to give
    the same twice."""
    traits = traits_of(op)
    return traits.gemm or traits.core or traits.selection or not traits.recomputable


def selected() -> Any:
    """The `context_fn` of `selective` where torch.compile traces it: torch's own, which becomes tags of the graph."""
    return stock.create_selective_checkpoint_contexts(_saved)


def _saved(context: Any, op: Any, *args: Any, **kwargs: Any) -> stock.CheckpointPolicy:
    kept = kept_when_selective(op)
    return stock.CheckpointPolicy.MUST_SAVE if kept else stock.CheckpointPolicy.PREFER_RECOMPUTE


def in_fp8(block: nn.Module) -> str | None:
    """The name in `block` of the first module of Transformer Engine that is about to compute in fp8 ("" for the block
    itself): any, inside of an fp8 autocast; else one with a recipe of its own. None where none is."""
    if engine.fp8_in_force():
        return _of_transformer_engine(block)
    return None if engine.suspended() else _of_transformer_engine(block, own_recipe=True)


def _of_transformer_engine(block: nn.Module, own_recipe: bool = False) -> str | None:
    """The name in `block` of its first module of Transformer Engine, None where there is none."""
    modules = ((name, m) for name, m in block.named_modules() if engine.is_of_transformer_engine(m))
    return next((name for name, m in modules if hasattr(m, "recipe") or not own_recipe), None)


def guard(model: nn.Module) -> int:
    """Have the modules of Transformer Engine that `model` brought itself raise StockCheckpointError where torch's
    checkpoint is about to run them in fp8; those of `replace_linears` do so anyway. In bf16 they may be recomputed by
    torch's. Returns how many are guarded; doing it twice changes nothing.

    `apply_checkpoints`, `replace_linears` and `compile` with a policy or a precision plan do this.
    """
    found = 0
    for module in model.modules():
        if hasattr(module, "fp8_meta") and engine.is_of_transformer_engine(module) and not hasattr(module, "recipe"):
            if not hasattr(module, _GUARDED):
                module.register_forward_pre_hook(_refuse_in_fp8, prepend=True)
                setattr(module, _GUARDED, True)
            found += 1
    return found


def _refuse_in_fp8(module: nn.Module, _: Any) -> None:
    if not torch.compiler.is_compiling() and engine.fp8_in_force():
        refuse_stock_checkpoint(module)


def refuse_stock_checkpoint(module: nn.Module) -> None:
    """Raise StockCheckpointError if torch's checkpoint is calling `module`, which is about to compute in fp8."""
    if in_stock_checkpoint():
        raise StockCheckpointError(type(module).__name__ + _sizes(module))


def in_stock_checkpoint() -> bool:
    """Whether torch's checkpoint, in eager, is calling what runs now. That shows in the first forward of a checkpoint
    without reentrant autograd, and in the recomputation of any."""
    hooks = top_saved_tensors_default_hooks(True)
    kept_by_stock = hooks is not None and getattr(hooks[0], "__module__", "") == stock.__name__
    return kept_by_stock or (current_graph_task_id() != -1 and _called_by_stock())


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


