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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacpp_compile.attending import attention, attention_capability
    from megacpp_compile.backend import megacpp as backend
    from megacpp_compile.capacity import equal_split
    from megacpp_compile.config import Config
    from megacpp_compile.estimating import Estimate, estimate
    from megacpp_compile.explaining import explain
    from megacpp_compile.fitting import Fit, fit
    from megacpp_compile.fp8_boundary import sparse_mla
    from megacpp_compile.precision.layer_spec import NativeLayerSpec, te_layer_spec
    from megacpp_compile.precision.plan import PrecisionPlan
    from megacpp_compile.precision.replace import replace_linears
    from megacpp_compile.regional import compile
    from megacpp_compile.remat.policy import CheckpointingPolicy
    from megacpp_compile.report import Report, record
    from megacpp_compile.sharding.plan import ShardingPlan

__version__ = "0.1.0"
__all__ = [
    "CheckpointingPolicy", "Config", "Estimate", "Fit", "NativeLayerSpec", "PrecisionPlan", "Report",
    "ShardingPlan", "attention", "attention_capability", "backend", "compile", "equal_split", "estimate", "explain",
    "fit", "record", "replace_linears", "sparse_mla", "te_layer_spec",
]  # fmt: skip

_HOME = {
    "Config": "config", "Report": "report", "record": "report", "explain": "explaining", "backend": "backend",
    "compile": "regional", "estimate": "estimating", "Estimate": "estimating", "CheckpointingPolicy": "remat.policy",
    "Fit": "fitting", "fit": "fitting", "equal_split": "capacity",
    "PrecisionPlan": "precision.plan", "replace_linears": "precision.replace",
    "te_layer_spec": "precision.layer_spec", "NativeLayerSpec": "precision.layer_spec",
    "sparse_mla": "fp8_boundary", "ShardingPlan": "sharding.plan",
    "attention": "attending", "attention_capability": "attending",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    # The module `backend` is callable and stands for the function: importing it binds this very name.
    found = module if name == "backend" else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
