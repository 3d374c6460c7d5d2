"""Plain PyTorch modules with the constructors and forwards of Transformer Engine 2.20's.

Arguments that only tune speed (cached casts, saved inputs, overlaps that mean nothing without tensor parallelism) are
accepted and change nothing. Those that would change the result or the interface raise EngineError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, layer_norm, linear, relu, rms_norm, silu
from torch.utils.checkpoint import checkpoint as run_checkpointed

from megacpp_compile.errors import EngineError
from megacpp_compile.sharding.pinning import constructed

_STD = 0.023  # of weights, as Transformer Engine initialises them

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": relu,
    "srelu": lambda x: relu(x).square(),
    "silu": silu,
}
# The activation of the first half multiplies the second.
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "glu": "sigmoid"}


def refuse(module: nn.Module, **given: Any) -> None:
    """Raise EngineError for the first argument that is neither None, False, nor a tensor-parallel size of 1."""
    for name, value in given.items():
        if not (value is None or value is False or (name == "tp_size" and value == 1)):
            raise EngineError(
                f"native {type(module).__name__}({name}={value!r})",
                "plain PyTorch has nothing of the kind",
                "Leave the argument at its default, or use Transformer Engine's class.",
            )


class _Module(nn.Module):
    """A module that knows how to initialise each of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.initialisers: dict[str, Callable[[torch.Tensor], Any]] = {}

    def new(
        self, name: str, size: Iterable[int], initialise: Callable[[torch.Tensor], Any], dtype: Any, device: Any
    ) -> None:
        """Register the parameter `name`, empty until `reset_parameters`."""
        dtype = torch.get_default_dtype() if dtype is None else dtype
        self.register_parameter(name, nn.Parameter(torch.empty(*size, dtype=dtype, device=device)))
        self.initialisers[name] = initialise

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Initialise all parameters that are not on meta, and pin them inside `sharding.constructing`."""
        for name, parameter in self._parameters.items():
            if not defer_init and parameter is not None and parameter.device.type != "meta":
                self.initialisers[name](parameter)
                constructed(name, parameter)


def _normal(weight: torch.Tensor) -> torch.Tensor:
    return nn.init.normal_(weight, mean=0.0, std=_STD)


class RMSNorm(_Module):
    """`te.RMSNorm` over the last axes, of `normalized_shape`: [..., *normalized_shape] in and out, any float dtype."""

    weight: torch.Tensor

    def __init__(
        self, normalized_shape: Iterable[int] | int | None = None, eps: float = 1e-5,
        sequence_parallel: bool | None = None, params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False, hidden_size: int | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        size = hidden_size if normalized_shape is None else normalized_shape
        if size is None:
            raise TypeError("RMSNorm needs normalized_shape")
        unknown = set(kwargs) - {"device", "dtype", "sm_margin"}
        if unknown:
            raise TypeError(f"RMSNorm got unexpected arguments: {sorted(unknown)}")
        self.size = (size,) if isinstance(size, int) else tuple(size)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        initialise = nn.init.zeros_ if zero_centered_gamma else nn.init.ones_
        self.new("weight", self.size, initialise, params_dtype or kwargs.get("dtype"), kwargs.get("device"))
        self.reset_parameters()

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return rms_norm(inp, self.size, self.weight + 1 if self.zero_centered_gamma else self.weight, self.eps)


class Linear(_Module):
    """`te.Linear`: [..., in_features] to [..., out_features]. `parameters_split` cuts weight and bias, by rows, into
    parameters of their own.

    Raises EngineError for arguments that plain PyTorch cannot serve, ValueError for a split that does not add up.
    """

    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Any = None, rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None, bias: bool = True, return_bias: bool = False,
        params_dtype: torch.dtype | None = None, parallel_mode: str | None = None,
        parameters_split: tuple[str, ...] | dict[str, int] | None = None, device: Any = None,
        ub_overlap_ag: bool = False, ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False, ub_name: str | None = None,
        delay_wgrad_compute: bool = False, symmetric_ar_type: str | None = None, save_original_input: bool = False,
        name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse(self, tp_group=tp_group, tp_size=tp_size, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
               delay_wgrad_compute=delay_wgrad_compute, symmetric_ar_type=symmetric_ar_type)  # fmt: skip
        self._build(in_features, out_features, bias, return_bias, init_method, params_dtype, parameters_split, device)
        self.reset_parameters()

    def _build(
        self, in_features: int, out_features: int, bias: bool, return_bias: bool, init: Any, dtype: Any, split: Any,
        device: Any,
    ) -> None:  # fmt: skip
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.return_bias = return_bias
        if split is None:
            sizes = {"": out_features}
        elif isinstance(split, dict):
            sizes = {name.rstrip("_") + "_": rows for name, rows in split.items()}
        else:
            sizes = {name.rstrip("_") + "_": out_features // len(split) for name in split}
        if sum(sizes.values()) != out_features:
            raise ValueError(f"parameters_split adds up to {sum(sizes.values())}, not to out_features={out_features}")
        self.weight_names, self.bias_names = [f"{n}weight" for n in sizes], [f"{n}bias" for n in sizes]
        for name, rows in zip(self.weight_names, sizes.values(), strict=True):
            self.new(name, (rows, in_features), init or _normal, dtype, device)
        for name, rows in zip(self.bias_names, sizes.values(), strict=True):
            if bias:
                self.new(name, (rows,), nn.init.zeros_, dtype, device)

    def _joined(self, names: list[str]) -> torch.Tensor:
        parts = [getattr(self, name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _apply_linear(self, inp: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bias = self._joined(self.bias_names) if self.use_bias else None
        out = linear(inp, self._joined(self.weight_names), None if self.return_bias else bias)
        return (out, bias) if self.return_bias else (out,)  # type: ignore[return-value]

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:  # fmt: skip
        out = self._apply_linear(inp)
        return out if len(out) > 1 else out[0]


class _Normed:
    """The norm at the front of LayerNormLinear and LayerNormMLP."""

    normalization: str
    eps: float
    zero_centered_gamma: bool
    layer_norm_weight: torch.Tensor
    layer_norm_bias: torch.Tensor | None

    def _build_norm(self: Any, width: int, normalization: str, eps: float, zero: bool, dtype: Any, device: Any) -> None:
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization={normalization!r}: LayerNorm or RMSNorm")
        self.normalization, self.eps, self.zero_centered_gamma = normalization, eps, zero
        self.new("layer_norm_weight", (width,), nn.init.zeros_ if zero else nn.init.ones_, dtype, device)
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            del self.layer_norm_bias
            self.new("layer_norm_bias", (width,), nn.init.zeros_, dtype, device)

    def _apply_norm(self, inp: torch.Tensor) -> torch.Tensor:
        gain = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
        if self.normalization == "RMSNorm":
            return rms_norm(inp, gain.shape, gain, self.eps)
        return layer_norm(inp, gain.shape, gain, self.layer_norm_bias, self.eps)


class LayerNormLinear(_Normed, Linear):
    """`te.LayerNormLinear`: a norm over the last axis, then a linear; [..., in_features] to [..., out_features].

    Raises EngineError as `Linear`, and ValueError for a normalization that is neither LayerNorm nor RMSNorm.
    """

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Any = None, init_method: Callable[[torch.Tensor], Any] | None = None, bias: bool = True,
        normalization: str = "LayerNorm", return_bias: bool = False, params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None, return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: tuple[str, ...] | dict[str, int] | None = None, zero_centered_gamma: bool = False,
        device: Any = None, ub_overlap_ag: bool = False, ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False, ub_bulk_wgrad: bool = False, ub_bulk_dgrad: bool = False,
        ub_name: str | None = None, delay_wgrad_compute: bool = False, symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:  # fmt: skip
        _Module.__init__(self)
        refuse(self, tp_group=tp_group, tp_size=tp_size, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
               delay_wgrad_compute=delay_wgrad_compute, symmetric_ar_type=symmetric_ar_type)  # fmt: skip
        self._build_norm(in_features, normalization, eps, zero_centered_gamma, params_dtype, device)
        self._build(in_features, out_features, bias, return_bias, init_method, params_dtype, parameters_split, device)
        self.return_layernorm_output = return_layernorm_output
        self.reset_parameters()

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:  # fmt: skip
        normed = self._apply_norm(inp)
        out = self._apply_linear(normed) + ((normed,) if self.return_layernorm_output else ())
        return out if len(out) > 1 else out[0]


class LayerNormMLP(_Normed, _Module):
    """`te.LayerNormMLP`: norm, linear, activation, linear; [..., hidden_size] in and out.

    Raises EngineError for arguments and activations that plain PyTorch cannot serve, ValueError as `LayerNormLinear`.
    """

    fc1_weight: torch.Tensor
    fc1_bias: torch.Tensor
    fc2_weight: torch.Tensor
    fc2_bias: torch.Tensor

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, sequence_parallel: bool = False,
        return_bias: bool = False, get_rng_state_tracker: Any = None, tp_group: Any = None, tp_size: int = 1,
        init_method: Callable[[torch.Tensor], Any] | None = None, bias: bool = True, normalization: str = "LayerNorm",
        activation: str = "gelu", activation_params: dict[str, Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None, fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None, return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False, seq_length: int | None = None,
        micro_batch_size: int | None = None, set_parallel_mode: bool = False, zero_centered_gamma: bool = False,
        device: Any = None, ub_overlap_ag: bool = False, name: str | None = None, ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False, symmetric_ar_type: str | None = None, checkpoint: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse(self, tp_group=tp_group, tp_size=tp_size, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
               delay_wgrad_compute=delay_wgrad_compute, symmetric_ar_type=symmetric_ar_type,
               activation_params=activation_params,
               activation=None if activation in {*ACTIVATIONS, *GATED} else activation)  # fmt: skip
        self.activation, self.use_bias, self.return_bias = activation, bias, return_bias
        self.return_layernorm_output, self.checkpoint = return_layernorm_output, checkpoint
        self._build_norm(hidden_size, normalization, eps, zero_centered_gamma, params_dtype, device)
        rows = ffn_hidden_size * (2 if activation in GATED else 1)
        self.new("fc1_weight", (rows, hidden_size), init_method or _normal, params_dtype, device)
        if bias:
            self.new("fc1_bias", (rows,), nn.init.zeros_, params_dtype, device)
        second = output_layer_init_method or init_method or _normal
        self.new("fc2_weight", (hidden_size, ffn_hidden_size), second, params_dtype, device)
        if bias:
            self.new("fc2_bias", (hidden_size,), nn.init.zeros_, params_dtype, device)
        self.reset_parameters()

    def _mlp(self, normed: torch.Tensor) -> torch.Tensor:
        hidden = linear(normed, self.fc1_weight, self.fc1_bias if self.use_bias else None)
        if self.activation in GATED:
            first, second = hidden.chunk(2, -1)
            inner = GATED[self.activation]
            hidden = (torch.sigmoid(first) if inner == "sigmoid" else ACTIVATIONS[inner](first)) * second
        else:
            hidden = ACTIVATIONS[self.activation](hidden)
        return linear(hidden, self.fc2_weight, self.fc2_bias if self.use_bias and not self.return_bias else None)

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        normed = self._apply_norm(inp)
        recompute = self.checkpoint and torch.is_grad_enabled()
        out = run_checkpointed(self._mlp, normed, use_reentrant=False) if recompute else self._mlp(normed)
        found: list[Any] = [out]
        if self.return_bias:
            found.append(self.fc2_bias if self.use_bias else None)
        if self.return_layernorm_output:
            found.append(normed)
        return tuple(found) if len(found) > 1 else out

