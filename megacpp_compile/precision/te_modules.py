"""Transformer Engine's modules in the place of a model's own: its parameters, its state dict, a recipe of their own.

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

# fp8 products contract over tokens for the weight's gradient, and take multiples of 16 there.
_ROWS = 16


class _InRecipe(nn.Module):
    """Runs the module behind it in `recipe`, whatever autocast is around."""

    recipe: str

    # A state dict without Transformer Engine's own entry, as it was before. Under delayed scaling it holds the maxima
    # of past steps; they are gathered again within a few steps of a restart.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    # te.Linear would break the graph by itself, at a place of its own choice; the others always do.
    @torch.compiler.disable(reason="Transformer Engine's modules run between compiled graphs, not in them")
    def forward(self, inp: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if engine.suspended():
            with te.autocast(enabled=False):
                return super().forward(inp, *args, **kwargs)
        refuse_stock_checkpoint(self)
        rows = math.prod(inp.shape[:-1])
        # Entering once more what is entered would make every module the first of its step to the one that is left, and
        # under delayed scaling move all histories on with each of them.
        entered = engine.in_autocast(self.recipe)
        with nullcontext() if entered else te.autocast(enabled=True, recipe=engine.recipe_object(self.recipe)):
            if rows % _ROWS == 0 and rows:
                return super().forward(inp, *args, **kwargs)
            # Rows of zeros add nothing to a product, nor to a gradient, nor to a maximum.
            filled = pad(inp.reshape(rows, inp.shape[-1]), (0, 0, 0, _ROWS - rows % _ROWS))
            out = super().forward(filled, *args, **kwargs)
        return out[:rows].reshape(*inp.shape[:-1], out.shape[-1])

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, recipe={self.recipe}"


class Linear(_InRecipe, te.Linear):
    """`te.Linear` for an `nn.Linear`."""


class LayerNormLinear(_InRecipe, te.LayerNormLinear):
    """`te.LayerNormLinear` for an `nn.Linear` and the RMSNorm in front of it, which keeps its own parameter: there is
    one parameter under one name, as before, also for optimizers and FSDP."""

    _norm: tuple[nn.Module]

    @property
    def layer_norm_weight(self) -> Any:
        return self._norm[0].weight  # AttributeError during construction: then it is looked up as a parameter


def linear(plain: nn.Linear, recipe: str) -> Linear:
    """The module for `plain`, around the same Parameter objects."""
    return _adopt(Linear, plain, recipe)


def normed_linear(plain: nn.Linear, norm: nn.Module, eps: float, zero_centered: bool, recipe: str) -> LayerNormLinear:
    """The module for `plain` behind `norm`, the module that holds the norm's weight from now on."""
    settings = {"eps": eps, "zero_centered_gamma": zero_centered, "normalization": "RMSNorm"}
    new = _adopt(LayerNormLinear, plain, recipe, **settings)
    del new._parameters["layer_norm_weight"]
    new.__dict__["_norm"] = (norm,)  # in a tuple: no submodule, so not a second time in the state dict
    return new


def _adopt(kind: type[Any], plain: nn.Linear, recipe: str, **settings: Any) -> Any:
    # On meta nothing is allocated or drawn for parameters that are thrown away.
    with te.quantized_model_init(enabled=False):
        new = kind(plain.in_features, plain.out_features, bias=plain.bias is not None,
                   params_dtype=plain.weight.dtype, device="meta", **settings)  # fmt: skip
    for name in ("weight", "bias"):
        if (parameter := plain._parameters[name]) is not None:
            new._parameters[name] = parameter
    new.__dict__["recipe"] = recipe
    return new.train(plain.training)


class StepAutocast:
    """An autocast around the model's whole forward, by hooks. Under delayed scaling the histories of all modules move
    on when the outermost autocast ends, which has to be once a step and not once a module. Modules of Transformer
    Engine's that the model had before follow it too, as they follow any."""

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
