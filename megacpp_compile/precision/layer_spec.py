"""Classes to build a block from: the same seven keys on every platform.

    spec = te_layer_spec().or_native()
    self.qkv = spec["linear_qkv"](hidden, 3 * hidden, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megacpp_compile.precision import engine

# Key -> name of Transformer Engine's class. The norm in front of a block's first linears is part of their module.
CLASSES = {
    "norm": "RMSNorm",
    "linear_qkv": "LayerNormLinear",
    "linear_proj": "Linear",
    "linear_fc1": "LayerNormLinear",
    "linear_fc2": "Linear",
    "attention": "DotProductAttention",
    "layernorm_mlp": "LayerNormMLP",
}


class LayerSpec(dict[str, Any]):
    """Key -> class, or None where there is none; `reasons` has the same keys and says why, "" where there is one.

    Blocks use "linear_fc1" and "linear_fc2" by default rather than "layernorm_mlp": that is one module, and leaves
    nothing between its linears to fuse, replace or inspect.
    """

    def __init__(self, classes: Iterable[tuple[str, Any]], reasons: dict[str, str]) -> None:
        super().__init__(classes)
        self.reasons = reasons

    def or_native(self) -> LayerSpec:
        """This spec, with the plain PyTorch class for each key that has none."""
        native = NativeLayerSpec()
        return LayerSpec(((key, found or native[key]) for key, found in self.items()), dict(self.reasons))


class NativeLayerSpec(LayerSpec):
    """The seven keys with plain PyTorch modules, whose constructors and forwards take Transformer Engine's arguments.

    Parameters have the same names and initial distributions. `device` defaults to torch's default instead of "cuda".
    Arguments that plain PyTorch cannot serve (tensor parallelism, packed sequences) raise EngineError.
    """

    def __init__(self) -> None:
        from megacpp_compile.precision import native, native_attention

        super().__init__(
            (
                (key, getattr(native_attention if key == "attention" else native, name))
                for key, name in CLASSES.items()
            ),
            dict.fromkeys(CLASSES, ""),
        )


def te_layer_spec(use_te: bool = True, *, tp_comm_overlap: bool = False) -> LayerSpec:
    """Transformer Engine's classes by key; None for each that cannot be imported or constructed here, with the reason
    in `spec.reasons[key]`.

    use_te: False gives None for all. tp_comm_overlap: whether the blocks will overlap communication by user buffers.
    Raises EngineError if they will and the buffers are not initialised.
    """
    if use_te and tp_comm_overlap:
        from megacpp_compile.precision.replace import check_user_buffers

        check_user_buffers()
    te, reason = engine.load() if use_te else (None, "not asked for")
    classes: dict[str, Any] = {}
    reasons = {}
    for key, name in CLASSES.items():
        try:
            classes[key], reasons[key] = None if te is None else getattr(te, name), reason
        except Exception as error:  # attributes may be imported on access
            classes[key], reasons[key] = None, f"{type(error).__name__}: {error}"
    return LayerSpec(classes.items(), reasons)
