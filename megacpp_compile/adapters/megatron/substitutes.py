"""What Dynamo traces in the place of functions of Megatron's that break a graph.

Substitutes serve while a frame is traced, in all of the process and for as long as it lives; eager code calls
Megatron's own. Each returns what Megatron's returns. Only the backward of the loss of multi-token prediction is
exchanged in Megatron's class itself, since Dynamo knows no other way in; `PlainTable.undo` takes it back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.adapters.megatron.installed import loaded
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.report import log

_SUBSTITUTED: set[Callable[..., Any]] = set()
_SCALER = "megatron.core.transformer.multi_token_prediction.MTPLossAutoScaler"


def substitute() -> None:
    """Have Dynamo trace plain functions for those of Megatron's that are imported. A second call does nothing."""
    utils = sys.modules.get("megatron.core.utils")
    state = sys.modules.get("megatron.core.parallel_state")
    if (own := getattr(utils, "make_viewless_tensor", None)) is not None:
        _traced_as(own, _same)
    if state is not None and (own := getattr(utils, "get_tensor_model_parallel_group_if_none", None)) is not None:
        _traced_as(own, _group(state))


def backward_of_mtp_loss() -> tuple[Any, Any] | None:
    """(Megatron's class that scales the loss of multi-token prediction, a backward for it that a frame holds), where
    it is imported."""
    scaler = loaded(_SCALER)
    return None if scaler is None or not hasattr(scaler, "main_loss_backward_scale") else (scaler, _scaled_backward)


def _traced_as(original: Callable[..., Any], plain: Callable[..., Any]) -> None:
    if original in _SUBSTITUTED:
        return
    _SUBSTITUTED.add(original)
    try:
        torch.compiler.substitute_in_graph(original)(plain)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:  # another signature, or somebody else's substitute
        log.logger.info("megatron: %s stays as it is: %s", original.__name__, error)


def _same(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """`make_viewless_tensor`: a view that claims to be none, which pipelines need between their stages. In a frame no
    tensor is a view that anyone could free."""
    return inp


def _group(state: Any) -> Callable[..., Any]:
    def group(tp_group: Any, is_expert: bool = False, check_initialized: bool = True) -> Any:
        """`get_tensor_model_parallel_group_if_none`, without its warning on the first rank."""
        if not torch.distributed.is_initialized():
            return None
        if tp_group is not None or not state.is_initialized():
            return tp_group
        if is_expert:
            return state.get_expert_tensor_parallel_group(check_initialized=check_initialized)
        return state.get_tensor_model_parallel_group(check_initialized=check_initialized)

    return group


@torch.library.custom_op("megacpp::mtp_loss_gradient", mutates_args=())
def mtp_loss_gradient(loss: Tensor) -> Tensor:
    """The gradient, shaped like the loss of multi-token prediction, that Megatron's schedule has set by the time of
    backward, which is after forward and so no operand of the frame."""
    scale = loaded(_SCALER).main_loss_backward_scale
    return torch.ones_like(loss) * scale  # type: ignore[no-any-return]


@mtp_loss_gradient.register_fake
def _(loss: Tensor) -> Tensor:
    return torch.empty_like(loss)


declare({"megacpp::mtp_loss_gradient": OpTraits(recomputable=False, uncapturable="it reads what the schedule has set")})


def _scaled_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    (loss,) = ctx.saved_tensors
    return grad_output, torch.ops.megacpp.mtp_loss_gradient(loss)
