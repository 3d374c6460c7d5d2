"""A stand-in for Transformer Engine 2.20: its names, signatures and checks, with plain PyTorch behind them.

It refuses what the real one refuses (dimensions in fp8, dtypes, reentry of a context) and remembers in which recipe
each module ran. Installed under the real one's names; `install(monkeypatch)` takes everything back afterwards."""

from __future__ import annotations

import contextlib
import math
import sys
import types

import torch
from torch import nn
from torch.nn.functional import layer_norm, linear, rms_norm

FRESH = {"recipe": None, "depth": 0, "recomputing": False, "user_buffers": False, "steps": 0, "deepest": 0,
         "frame": None, "rounds": False}  # fmt: skip
STATE = types.SimpleNamespace(**FRESH, ran=[], measured=[])
META = "meta"


class Recipe:
    def __repr__(self):
        return type(self).__name__


DelayedScaling, Float8CurrentScaling, Float8BlockScaling = (
    type(name, (Recipe,), {}) for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
)


class NVFP4BlockScaling(Recipe):
    def __init__(self, disable_rht=False):
        self.disable_rht = disable_rht


class autocast:
    def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False):
        assert not enabled or isinstance(recipe, Recipe)
        self.enabled, self.recipe, self.before = enabled, recipe, None

    def __enter__(self):
        assert self.before is None, "entered more than once concurrently"
        self.before = (STATE.recipe,)
        STATE.recipe, STATE.depth = self.recipe if self.enabled else None, STATE.depth + 1
        return self

    def __exit__(self, *_):
        (STATE.recipe,), self.before = self.before, None
        STATE.depth -= 1
        # Where delayed scaling moves its histories on.
        if self.enabled and STATE.depth == 0 and torch.is_grad_enabled():
            STATE.steps += 1
            for module, amax in STATE.measured:
                module.fp8_meta["history"].append(amax)
            STATE.measured.clear()


class quantized_model_init:
    def __init__(self, enabled=True, recipe=None, preserve_high_precision_init_val=False):
        assert not enabled, "parameters are to stay as they are"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def is_fp8_available(return_reason=False):
    return (True, "") if return_reason else True


class TransformerEngineBaseModule(nn.Module):
    def __init__(self, name=None):
        super().__init__()
        self.activation_dtype, self.fp8_meta = None, {}

    def register_parameter(self, name, param, **kwargs):
        super().register_parameter(name, param)

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        assert isinstance(state, torch.Tensor)

    def _prepare(self, inp, weight):
        for name, p in self.named_parameters():
            if p.dtype != inp.dtype and not torch.is_autocast_enabled(inp.device.type):
                raise TypeError(f"Data types for parameters must match. Found {inp.dtype} and {name!r} {p.dtype}")
        if STATE.recipe is not None:
            for t in (inp, weight):
                if math.prod(t.shape[:-1]) % 8 or t.shape[-1] % 16:
                    raise ValueError("FP8 execution requires the product of all dimensions except the last ...")
        STATE.ran.append((self, repr(STATE.recipe) if STATE.recipe else None, STATE.recomputing))
        STATE.deepest = max(STATE.deepest, STATE.depth)

    def _rounded(self, x):
        """With `STATE.rounds`, x in e4m3 as delayed scaling has it: by the largest magnitude of past steps. The scale
        of a recomputation is its forward's, and is measured no second time, under this package's checkpoint alone."""
        if not STATE.rounds or not isinstance(STATE.recipe, DelayedScaling):
            return x
        history = self.fp8_meta.setdefault("history", [])
        if STATE.recomputing:
            scale = STATE.frame.scales.pop(0)
        else:
            STATE.measured.append((self, x.detach().abs().max().item()))
            scale = 448 / max(history[-16:], default=1.0)
            if STATE.frame is not None:
                STATE.frame.scales.append(scale)
        held = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale
        return x + (held - x).detach()

    def _weights(self, in_features, out_features, bias, dtype, device):
        dtype = torch.get_default_dtype() if dtype is None else dtype
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        empty = lambda *shape: nn.Parameter(torch.empty(shape, dtype=dtype, device=device))  # noqa: E731
        self.register_parameter("weight", empty(out_features, in_features), init_fn=None)
        if bias:
            self.register_parameter("bias", empty(out_features))
        else:
            self.bias = torch.Tensor().to(dtype=dtype, device=device)
        if device != META:
            with torch.no_grad():
                self.weight.normal_(0, 0.023)
                self.bias.zero_()


class Linear(TransformerEngineBaseModule):
    def __init__(
        self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
        tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False,
        params_dtype=None, parallel_mode=None, parameters_split=None, device="cuda", ub_overlap_ag=False,
        ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None,
        delay_wgrad_compute=False, symmetric_ar_type=None, save_original_input=False, name=None,
    ):  # fmt: skip
        super().__init__(name)
        self._weights(in_features, out_features, bias, params_dtype, device)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        self._prepare(inp, self.weight)
        return linear(self._rounded(inp), self.weight, self.bias if self.use_bias else None)


class LayerNormLinear(TransformerEngineBaseModule):
    def __init__(
        self, in_features, out_features, eps=1e-5, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True, normalization="LayerNorm",
        return_bias=False, params_dtype=None, parallel_mode=None, return_layernorm_output=False,
        return_layernorm_output_gathered=False, parameters_split=None, zero_centered_gamma=False, device="cuda",
        ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False,
        ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, name=None,
    ):  # fmt: skip
        super().__init__(name)
        assert normalization in ("LayerNorm", "RMSNorm")
        self.normalization, self.eps, self.zero_centered_gamma = normalization, eps, zero_centered_gamma
        gain = nn.Parameter(torch.ones(in_features, device=device, dtype=params_dtype))
        self.register_parameter("layer_norm_weight", gain, init_fn=None)
        self.layer_norm_bias = None
        self._weights(in_features, out_features, bias, params_dtype, device)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        self._prepare(inp, self.weight)
        gain = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
        norm = rms_norm if self.normalization == "RMSNorm" else layer_norm
        x = norm(inp, gain.shape, gain, eps=self.eps)
        return linear(x, self.weight, self.bias if self.use_bias else None)


class RMSNorm(nn.Module):
    def __init__(
        self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False,
        hidden_size=None, **kwargs,
    ):  # fmt: skip
        super().__init__()


class LayerNormMLP(TransformerEngineBaseModule):
    def __init__(
        self, hidden_size, ffn_hidden_size, eps=1e-5, sequence_parallel=False, return_bias=False,
        get_rng_state_tracker=None, tp_group=None, tp_size=1, init_method=None, bias=True, normalization="LayerNorm",
        activation="gelu", activation_params=None, output_layer_init_method=None, fuse_wgrad_accumulation=False,
        params_dtype=None, return_layernorm_output=False, return_layernorm_output_gathered=False, seq_length=None,
        micro_batch_size=None, set_parallel_mode=False, zero_centered_gamma=False, device="cuda", ub_overlap_ag=False,
        name=None, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False,
        delay_wgrad_compute=False, symmetric_ar_type=None, checkpoint=False,
    ):  # fmt: skip
        super().__init__(name)

    def forward(self, inp, is_first_microbatch=None):
        raise NotImplementedError


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
        attn_mask_type="causal", window_size=None, bottom_right_diagonal=None, softcap=0.0, sequence_parallel=False,
        tp_size=1, get_rng_state_tracker=None, tp_group=None, layer_number=None, attention_type="self", cp_group=None,
        cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p", softmax_scale=None, softmax_type="vanilla",
        return_max_logit=False, name=None,
    ):  # fmt: skip
        super().__init__(name)

    def forward(
        self, query_layer=None, key_layer=None, value_layer=None, attention_mask=None, qkv_format=None,
        cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None,
        max_seqlen_kv=None, attn_mask_type=None, window_size=None, bottom_right_diagonal=None, softcap=None,
        checkpoint_core_attention=False, core_attention_bias_type="no_bias", core_attention_bias=None,
        alibi_slopes=None, fast_zero_fill=True, inference_params=None, pad_between_seqs=None, fp8_output=False,
        bf16_backward=False, num_splits=1, score_mod=None, score_mod_bprop=None, score_mod_tensors=None,
        score_mod_bprop_tensors=None, qkv_layer=None, kv_layer=None, qkv_interleave_dim=-3,
        thd_attention_policies=None, thd_attention_policy_dispatch="auto",
    ):  # fmt: skip
        raise NotImplementedError


MODULES = (Linear, LayerNormLinear, LayerNormMLP, DotProductAttention)


class _Frame:
    """One call under `checkpoint`: what autograd packs is dropped, and recomputed by the first that unpacks any."""

    def __init__(self, function, args, kwargs, again):
        self.function, self.args, self.kwargs, self.context = function, args, kwargs, again
        self.recipe, self.count, self.found, self.scales = STATE.recipe, 0, None, []

    def pack(self, t):
        self.count += 1
        return self.count - 1

    def unpack(self, i):
        if self.found is None:
            self.found = self.again()
        return self.found[i]

    def again(self):
        found, before = [], (STATE.recipe, STATE.frame)
        args = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in self.args]
        keep = torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.detach()), lambda t: t)
        STATE.recipe, STATE.frame, STATE.recomputing = self.recipe, self, True
        left = list(self.scales)
        try:
            with torch.enable_grad(), keep, self.context:
                self.function(*args, **self.kwargs)
        finally:
            (STATE.recipe, STATE.frame), STATE.recomputing, self.scales = before, False, left
        return found


def checkpoint(function, *args, use_reentrant=True, context_fn=None, determinism_check="default", **kwargs):
    """Recomputes in the recipe and with the scales of the forward. As the real one, it compares no shapes."""
    assert not use_reentrant
    ahead, again = context_fn() if context_fn is not None else (contextlib.nullcontext(), contextlib.nullcontext())
    frame, before = _Frame(function, args, kwargs, again), STATE.frame
    STATE.frame = frame
    try:
        with torch.autograd.graph.saved_tensors_hooks(frame.pack, frame.unpack), ahead:
            return function(*args, **kwargs)
    finally:
        STATE.frame = before


def forget():
    """What is derived from these classes, or from the real ones, is to be made anew."""
    from megacpp_compile import precision

    sys.modules.pop("megacpp_compile.precision.te_modules", None)
    vars(precision).pop("te_modules", None)


def install(monkeypatch):
    """Under the real one's names, on a machine that has no CUDA."""
    from megacpp_compile.precision import engine

    STATE.__dict__.update(FRESH, ran=[], measured=[])
    te = types.ModuleType("transformer_engine.pytorch")
    for thing in (autocast, quantized_model_init, RMSNorm, checkpoint, *MODULES):
        setattr(te, thing.__name__, thing)
    te.is_fp8_available = te.is_fp8_block_scaling_available = te.is_nvfp4_available = is_fp8_available
    recipes = types.ModuleType("transformer_engine.common.recipe")
    for kind in (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, NVFP4BlockScaling):
        setattr(recipes, kind.__name__, kind)
    base = types.ModuleType("transformer_engine.pytorch.module.base")
    base.is_ub_initialized = lambda: STATE.user_buffers
    quantization = types.ModuleType("transformer_engine.pytorch.quantization")
    quantization.FP8GlobalStateManager = types.SimpleNamespace(
        is_fp8_enabled=lambda: STATE.recipe is not None, get_fp8_recipe=lambda: STATE.recipe
    )
    top = types.ModuleType("transformer_engine")
    top.pytorch = te
    for module in (top, te, recipes, base, quantization, types.ModuleType("transformer_engine.common"),
                   types.ModuleType("transformer_engine.pytorch.module")):  # fmt: skip
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for kind in (TransformerEngineBaseModule, RMSNorm, *MODULES):
        monkeypatch.setattr(kind, "__module__", "transformer_engine.pytorch.module.base")
    forget()
    monkeypatch.setattr(engine, "why_no_device", lambda: "")
    monkeypatch.setattr(engine, "_recipes", {})
    return te
