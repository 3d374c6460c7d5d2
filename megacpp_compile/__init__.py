"""megacpp_compile: a `torch.compile` backend that recognises plain MLA and hybrid models and fuses them.

    model = torch.compile(model, backend="megacpp")                      # no import needed
    model = torch.compile(model, backend="megacpp", options={...})       # fields of Config

    with megacpp_compile.record() as report:                             # what was fused, what was not, and why
        model(x)
    print(report)

Importing this package loads nothing beyond torch; everything else is loaded on first use.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacpp_compile.backend import megacpp as backend
    from megacpp_compile.compile_cache import CompileCache, load_cache, load_compiled, save_cache, save_compiled
    from megacpp_compile.config.checkpointing import CheckpointingPolicy
    from megacpp_compile.config.options import Config
    from megacpp_compile.config.precision import PrecisionPlan
    from megacpp_compile.config.sharding import ShardingPlan
    from megacpp_compile.decode.absorbed import latent_attention
    from megacpp_compile.decode.cache import MLAKVCache
    from megacpp_compile.decode.serving import ServingConfig
    from megacpp_compile.decode.transformers_cache import use_latent_cache
    from megacpp_compile.enable import enable
    from megacpp_compile.explainer import explain
    from megacpp_compile.launch import LaunchRecord, launch_record
    from megacpp_compile.lowerings._registered import register_lowering
    from megacpp_compile.matchers._match import MatchFailure
    from megacpp_compile.memory.checkpoints import apply_checkpoints
    from megacpp_compile.memory.estimate import Estimate, estimate
    from megacpp_compile.memory.fit import Fit, fit
    from megacpp_compile.nn.attention import attention, attention_capability, last_attention, observed_attention
    from megacpp_compile.nn.attention.switch import disable_fa4, enable_fa4, uses_dense_fa4
    from megacpp_compile.nn.attention.validity import Validity
    from megacpp_compile.nn.expert_capacity import equal_split
    from megacpp_compile.nn.sparse_mla import sparse_mla
    from megacpp_compile.passes._registered import register, unregister
    from megacpp_compile.passes._rule import Match
    from megacpp_compile.precision.layer_spec import NativeLayerSpec, te_layer_spec
    from megacpp_compile.precision.replace import replace_linears
    from megacpp_compile.precision.scaling_state import load_scaling_state, scaling_state
    from megacpp_compile.precision.weight_casts import cached_weight_casts
    from megacpp_compile.regional.compile import compile
    from megacpp_compile.report.collector import record
    from megacpp_compile.report.report import Report
    from megacpp_compile.resume import check_resume
    from megacpp_compile.sharding.sequences import sharded_sequences

__version__ = "0.7.0.dev0"
__all__ = [
    "CheckpointingPolicy", "CompileCache", "Config", "Estimate", "Fit", "LaunchRecord", "MLAKVCache", "Match",
    "MatchFailure", "NativeLayerSpec", "PrecisionPlan", "Report", "ServingConfig", "ShardingPlan", "Validity",
    "apply_checkpoints", "attention", "attention_capability", "backend", "cached_weight_casts", "check_resume",
    "compile", "disable_fa4", "enable", "enable_fa4", "equal_split", "estimate", "explain", "fit", "last_attention",
    "latent_attention", "launch_record", "load_cache", "load_compiled", "load_scaling_state", "observed_attention",
    "record", "register", "register_lowering", "replace_linears", "save_cache", "save_compiled", "scaling_state",
    "sharded_sequences", "sparse_mla", "te_layer_spec", "unregister", "use_latent_cache", "uses_dense_fa4",
]  # fmt: skip

_HOME = {
    "CheckpointingPolicy": "config.checkpointing", "CompileCache": "compile_cache", "load_cache": "compile_cache",
    "load_compiled": "compile_cache", "save_compiled": "compile_cache", "save_cache": "compile_cache",
    "Config": "config.options", "Estimate": "memory.estimate",
    "Fit": "memory.fit", "LaunchRecord": "launch", "MLAKVCache": "decode.cache",
    "Match": "passes._rule", "MatchFailure": "matchers._match",
    "NativeLayerSpec": "precision.layer_spec", "launch_record": "launch",
    "PrecisionPlan": "config.precision", "Report": "report.report", "ServingConfig": "decode.serving",
    "ShardingPlan": "config.sharding", "Validity": "nn.attention.validity",
    "apply_checkpoints": "memory.checkpoints", "attention": "nn.attention",
    "attention_capability": "nn.attention", "backend": "backend", "check_resume": "resume",
    "cached_weight_casts": "precision.weight_casts", "compile": "regional.compile",
    "disable_fa4": "nn.attention.switch", "enable": "enable", "enable_fa4": "nn.attention.switch",
    "equal_split": "nn.expert_capacity", "estimate": "memory.estimate", "explain": "explainer", "fit": "memory.fit",
    "last_attention": "nn.attention", "latent_attention": "decode.absorbed", "observed_attention": "nn.attention",
    "load_scaling_state": "precision.scaling_state", "scaling_state": "precision.scaling_state",
    "record": "report.collector", "register": "passes._registered", "unregister": "passes._registered",
    "register_lowering": "lowerings._registered", "replace_linears": "precision.replace", "sparse_mla": "nn.sparse_mla",
    "sharded_sequences": "sharding.sequences",
    "te_layer_spec": "precision.layer_spec", "use_latent_cache": "decode.transformers_cache",
    "uses_dense_fa4": "nn.attention.switch",
}  # fmt: skip


# Modules of the last release that its documentation named.
_MOVED = {"fp8_boundary": "frontend.tensor_subclasses"}


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        warnings.warn(f"megacpp_compile.{name} is now megacpp_compile.{_MOVED[name]}", FutureWarning, stacklevel=2)
        return importlib.import_module(f"{__name__}.{_MOVED[name]}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    # The module `backend` is callable and stands for the function: importing it binds this very name.
    found = module if name == "backend" else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
