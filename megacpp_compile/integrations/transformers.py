"""`MegacppCallback`: transformers' `Trainer` compiles its model with megacpp, and logs what that did.

    Trainer(model, arguments, train_dataset=rows, callbacks=[MegacppCallback()]).train()

transformers is imported here, and nowhere else in the package.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback

from megacpp_compile._torch import dynamo
from megacpp_compile.config.options import Config
from megacpp_compile.errors import AlreadyCompiledError
from megacpp_compile.integrations.training import logits_variables, prepare
from megacpp_compile.report import collector, log
from megacpp_compile.report.report import Report
from megacpp_compile.report.summary import saved_bytes, summary

__all__ = ["MegacppCallback", "logits_are_read"]


class MegacppCallback(TrainerCallback):
    """Compiles the model when training begins; behind the first step, logs the report's summary (at INFO, to the logger
    `megacpp_compile`) and has the trainer log how many sites were fused, the bytes that they save and the seconds of
    compilation, as `megacpp/...`.

    options: fields of `Config`, or one. blocks: one artifact a kind of block (`megacpp_compile.compile`) instead of
    the model as one. drop_logits: logits that a model returns beside its loss are not made in training unless the
    trainer reads them there, which is logged. Evaluation and prediction have them.

    Attributes:
        report: what was compiled from the beginning of the training to the end of its first step.
    """

    def __init__(
        self, options: Mapping[str, Any] | Config | None = None, blocks: bool = False, drop_logits: bool = True
    ) -> None:
        self.options, self.blocks, self.drop_logits = options, blocks, drop_logits
        self.report = Report()
        self._recording = contextlib.ExitStack()
        self._waiting = False
        self._compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Raises AlreadyCompiledError where the trainer compiles it (`torch_compile=True`, accelerate's settings)."""
        trainer = _calling_trainer()
        if args.torch_compile or isinstance(getattr(trainer, "model_wrapped", None), dynamo.OptimizedModule):
            raise AlreadyCompiledError("", type(model).__name__)
        if args.n_gpu > 1:
            log.logger.warning("not compiled: DataParallel copies the model in every step; start a process a GPU")
            return
        if model not in self._compiled:  # by an earlier `train()`
            drop = self.drop_logits and _says_what_becomes_of_logits(trainer, model)
            prepare(model, self.options, blocks=self.blocks, drop_logits=drop)
            self._compiled.add(model)
        self._recording.close()  # of a training that ended in an error
        self.report, self._waiting = self._recording.enter_context(collector.record()), True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Reports once."""
        if not self._waiting:
            return
        self._waiting = False
        self._recording.close()
        if state.is_world_process_zero:
            log.logger.info("after the first step: %s", summary(self.report))
        if (trainer := _calling_trainer()) is not None:
            asked = control.should_log
            trainer.log(figures(self.report))
            control.should_log = asked  # which logging takes back, though the step's own is still to come

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Closes what a training without a step leaves open."""
        self._recording.close()
        self._waiting = False


def figures(report: Report) -> dict[str, float]:
    """What the trainer logs: sites, bytes that these save where both counts are known, and seconds of all stages."""
    before, after, _ = saved_bytes(report)
    return {
        "megacpp/sites": len(report.sites),
        "megacpp/saved_bytes": before - after,
        "megacpp/compile_seconds": sum(sum(frame.seconds.values()) for frame in report.frames),
    }


def logits_are_read(trainer: Any) -> str:
    """Why the logits of a training step are read by `trainer`, or may be; "" where its loss alone is.

    `compute_metrics` and `preprocess_logits_for_metrics` read those of evaluation.
    """
    if not isinstance(trainer, Trainer):
        return "who trains is not known"
    if trainer.label_smoother is not None:
        return "label smoothing computes the loss from them"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func gets them"
    for name in ("compute_loss", "training_step"):
        if getattr(getattr(trainer, name), "__func__", None) is not getattr(Trainer, name):
            return f"{type(trainer).__name__} has a {name} of its own"
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and getattr(parallel, "sp_enabled", False):
        return "sequence parallelism computes the loss from them"
    return ""


def _says_what_becomes_of_logits(trainer: Any, model: nn.Module) -> bool:
    """Whether they may be dropped, in a line of the log."""
    why = logits_are_read(trainer)
    if not why and not logits_variables(model):
        why = f"no variable is seen that {type(model).__name__} returns as logits beside a loss"
    if why:
        log.logger.info("logits stay in training: %s", why)
    else:
        log.logger.info("logits are not made in training, where nothing reads them; evaluation has them")
    return not why


def _calling_trainer() -> Any:
    """The Trainer that runs the callback, which it does not hand over; None where something else does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
        frame = frame.f_back
    return None
