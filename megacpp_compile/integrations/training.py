"""`prepare`: a model compiled in place for training, which returns its loss without logits there."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from megacpp_compile._torch.modules import compiled_call, eager_call, set_compiled_call
from megacpp_compile.config.options import Config, given_options
from megacpp_compile.regional.compile import WHOLE_BELOW, compile

__all__ = ["logits_variables", "prepare"]

Model = TypeVar("Model", bound=nn.Module)


def prepare(
    model: Model, options: Mapping[str, Any] | Config | None = None, *, blocks: bool = False, drop_logits: bool = True
) -> Model:
    """Compile `model` in place for a training loop and return it, before `accelerator.prepare` or behind it.

    options: fields of `Config`, or one. blocks: one artifact a kind of block (`megacpp_compile.compile`) instead of
    the model as one. drop_logits: in training mode with gradients, where the model returns a loss, its logits are not
    made; a use of them is a DroppedOutputError. In evaluation, with gradients or without, they are there. Calls with
    a cache, as `generate` makes for every token, run in eager, but for compiled blocks.

    Raises the errors of `megacpp_compile.compile`.
    """
    given = dict(given_options(options))
    kept = dict(given)
    names = logits_variables(model) if drop_logits else ()
    if names:
        also = given.get("drop_outputs", ())
        given["drop_outputs"] = (*((also,) if isinstance(also, str) else also), *names)
    inner = _unadapted(model)
    # By blocks, head and loss are found in the forward that computes them, which is not an adapter's.
    compiled = inner if blocks else model
    compile(compiled, options=given, whole_below=WHOLE_BELOW if blocks else sys.maxsize)
    trained, eager = compiled_call(compiled), eager_call(compiled)
    if trained is None:  # only its blocks are
        return model
    keeps = trained if not names else eager if blocks else torch.compile(eager, backend="megacpp", options=kept)

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is not None:
            return eager(*args, **kwargs)
        dropping = compiled.training or not torch.is_grad_enabled()  # without gradients, outputs stay anyway
        return (trained if dropping else keeps)(*args, **kwargs)

    set_compiled_call(compiled, call)
    return model


def logits_variables(model: nn.Module) -> tuple[str, ...]:
    """The variables that the forward of `model` returns as `logits=` of its output, beside `loss=`; () where it has
    no such output, or no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(_unadapted(model)).forward)))
    except (OSError, TypeError, SyntaxError):
        return ()
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            if "loss" in given and isinstance(logits := given.get("logits"), ast.Name):
                found.add(logits.id)
    return tuple(sorted(found))


def _unadapted(model: nn.Module) -> nn.Module:
    """The model inside of peft's and of wrappers for several devices."""
    if (base := getattr(model, "get_base_model", None)) is not None:
        return _unadapted(base())
    wrapped = getattr(model, "module", None)
    return _unadapted(wrapped) if isinstance(wrapped, nn.Module) else model
