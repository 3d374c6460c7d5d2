"""Transformer Engine's modules that replace a model's linears: the same parameters and state dict, a recipe each.

Importing this file imports Transformer Engine.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import nn
from torch.nn.functional import pad

from megacpp_compile.precision import engine
from megacpp_compile.precision.checkpoint import refuse_stock_checkpoint

# The weight's gradient contracts over tokens, and fp8 GEMMs take multiples of 16 there.
_ROWS = 16


class _InRecipe(nn.Module):
    """Runs the module class behind it in `recipe`, even inside another autocast."""

    recipe: str
    disable_rht: bool | None = None

    # Keeps Transformer Engine's own entry out of the state dict, whose keys stay the plain model's. Under delayed
    # scaling the entry holds the maxima of past steps, which a few steps after a restart collect anew.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    # te.Linear breaks the graph anyway, somewhere inside its forward; the other modules are never traced.
    @torch.compiler.disable(reason="Transformer Engine's modules run between compiled graphs, not in them")
    def forward(self, inp: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if engine.suspended():
            with te.autocast(enabled=False):
                return super().forward(inp, *args, **kwargs)
        refuse_stock_checkpoint(self)
        rows = math.prod(inp.shape[:-1])
        # If each module entered the autocast anew, each would count as the first of its step, and under delayed scaling
        # advance the histories of all.
        entered, recipe = engine.in_autocast(self.recipe, self.disable_rht), (self.recipe, self.disable_rht)
        with nullcontext() if entered else te.autocast(enabled=True, recipe=engine.recipe_object(*recipe)):
            if rows % _ROWS == 0 and rows:
                return super().forward(inp, *args, **kwargs)
            # Rows of zeros change no other row of the GEMM, no gradient and no maximum.
            filled = pad(inp.reshape(rows, inp.shape[-1]), (0, 0, 0, _ROWS - rows % _ROWS))
            out = super().forward(filled, *args, **kwargs)
        return out[:rows].reshape(*inp.shape[:-1], out.shape[-1])

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, recipe={self.recipe}"


class Linear(_InRecipe, te.Linear):
    """`te.Linear` for an `nn.Linear`."""


class LayerNormLinear(_InRecipe, te.LayerNormLinear):
    """`te.LayerNormLinear` for an `nn.Linear` and the RMSNorm in front of it. The norm's module keeps the parameter, so
    that optimizers and FSDP see one parameter under the same name as before."""

    _norm: tuple[nn.Module]

    @property
    def layer_norm_weight(self) -> Any:
        return self._norm[0].weight  # AttributeError during construction makes nn.Module look for a parameter


def linear(plain: nn.Linear, recipe: str, disable_rht: bool | None = None) -> Linear:
    """The module that replaces `plain`, with the same Parameter objects. disable_rht: as in `engine.recipe_object`."""
    return _adopt(Linear, plain, recipe, disable_rht)


def normed_linear(
    plain: nn.Linear, norm: nn.Module, eps: float, zero_centered: bool, recipe: str, disable_rht: bool | None = None
) -> LayerNormLinear:
    """The module that replaces `plain` and the norm before it. norm: the module that holds the norm's weight; eps and
    zero_centered: as in `norms.RMSNorm`; disable_rht: as in `linear`."""
    settings = {"eps": eps, "zero_centered_gamma": zero_centered, "normalization": "RMSNorm"}
    new = _adopt(LayerNormLinear, plain, recipe, disable_rht, **settings)
    del new._parameters["layer_norm_weight"]
    new.__dict__["_norm"] = (norm,)  # in a tuple, so that it is no submodule and not in the state dict twice
    return new


def _adopt(kind: type[Any], plain: nn.Linear, recipe: str, disable_rht: bool | None, **settings: Any) -> Any:
    # On meta, the parameters that are replaced below cost no memory and no random draws.
    with te.quantized_model_init(enabled=False):
        new = kind(plain.in_features, plain.out_features, bias=plain.bias is not None,
                   params_dtype=plain.weight.dtype, device="meta", **settings)  # fmt: skip
    for name in ("weight", "bias"):
        if (parameter := plain._parameters[name]) is not None:
            new._parameters[name] = parameter
    new.__dict__["recipe"] = recipe
    new.__dict__["disable_rht"] = disable_rht if recipe == "nvfp4" else None
    return new.train(plain.training)


class StepAutocast:
    """Puts an autocast around the model's whole forward, by hooks. Under delayed scaling all histories advance when the
    outermost autocast ends, which has to happen once a step and not once a module. Transformer Engine's modules that
    the model had before follow this autocast too."""

    def __init__(self, model: nn.Module, recipe: str) -> None:
        self.recipe, self.entered = recipe, []  # type: ignore[var-annotated]
        model.register_forward_pre_hook(self.enter)
        model.register_forward_hook(self.leave, always_call=True)

    @torch.compiler.disable
    def enter(self, *_: Any) -> None:
        context = te.autocast(enabled=not engine.suspended(), recipe=engine.recipe_object(self.recipe))
        context.__enter__()
        self.entered.append(context)

    @torch.compiler.disable
    def leave(self, *_: Any) -> None:
        self.entered.pop().__exit__(None, None, None)
