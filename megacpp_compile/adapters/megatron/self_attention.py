"""Megatron's MLA attention under this project's conventions: adapters of its classes, made where Megatron is installed.

An adapter takes `pp_layer_offset`, which newer releases of Megatron have and 0.16.1 has not, and never lets a rotary
table that a caller hands in be applied beside the layer's own. Names of parameters, state dicts and results are the
base's; the base is not copied.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from megacpp_compile.adapters.megatron import installed
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.errors import AbsorbedInTrainingError, AdapterError
from megacpp_compile.report import log

_TRANSFORMER = "megatron.core.transformer."
_MLA = _TRANSFORMER + "multi_latent_attention."
# Name -> where Megatron has it; the absorbed one in its development branch alone.
BASES = {
    "MLASelfAttention": _MLA + "MLASelfAttention",
    "FusedMLASelfAttention": _MLA + "FusedMLASelfAttention",
    "AbsorbedMLASelfAttention": _TRANSFORMER + "experimental_attention_variant.absorbed_mla.AbsorbedMLASelfAttention",
}
_ABSORBED = "AbsorbedMLASelfAttention"
_OFFSET = "pp_layer_offset"
_ROTARY = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin")
_NEEDED = ("config", "submodules", "layer_number")


def adapter(name: str) -> type:
    """The adapter of Megatron's class `name`, one of `BASES`, as a subclass of it; the same in every call.

    Its constructor takes the base's arguments and `pp_layer_offset`, which it hands on where the base takes it, and
    drops else, with a line in the log: the layer's place is then the base's own affair. Rotary tables given to its
    forward are ignored where the layer makes its own, with a line in the log. The absorbed one raises
    AbsorbedInTrainingError where it would train.

    Raises PackageMissingError where this Megatron has no such class, and AdapterError for a class whose constructor
    takes something else than 0.16.1's.
    """
    if name not in BASES:
        raise AdapterError(f"an adapter of {name!r}", "there is none", f"Ask for one of {', '.join(BASES)}.")
    return adapter_of(installed.load(BASES[name], f"the adapter of {name}"), name == _ABSORBED)


def adapted_base(cls: Any) -> tuple[type, bool] | None:
    """(base, whether it is the absorbed one) if `cls` is exactly a class of Megatron's that there is an adapter of."""
    found = ((installed.loaded(path), name) for name, path in BASES.items())
    return next(((base, name == _ABSORBED) for base, name in found if base is not None and cls is base), None)


@functools.cache
def adapter_of(base: type, absorbed: bool = False) -> type:
    """The adapter of the class `base`; absorbed: whether it computes with absorbed weights. Raises AdapterError."""
    taken = inspect.signature(base.__init__).parameters  # type: ignore[misc]
    open_to_all = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    missing = [name for name in _NEEDED if name not in taken]
    if missing and not open_to_all:
        raise AdapterError(
            f"the adapter of {base.__name__}",
            f"its constructor takes no {', '.join(missing)} in Megatron-Core {installed.version() or '(no version)'}",
            "Use a release with 0.16.1's constructor, or the class itself.",
        )
    passes = open_to_all or _OFFSET in taken
    places = [i for i, name in enumerate(list(inspect.signature(base.forward).parameters)[1:]) if name in _ROTARY]  # type: ignore[attr-defined]
    dropping = f"{base.__name__} of Megatron-Core {installed.version()} takes no {_OFFSET}: it finds its place itself"

    class Adapter(base):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, pp_layer_offset: int | None = None, **kwargs: Any) -> None:
            if pp_layer_offset is not None and passes:
                kwargs[_OFFSET] = pp_layer_offset
                log.logger.info("%s: %s=%d handed on", base.__name__, _OFFSET, pp_layer_offset)
            elif pp_layer_offset is not None:
                warn_once(dropping)
            super().__init__(*args, **kwargs)
            self.makes_tables = getattr(self, "rotary_pos_emb", None) is not None

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if absorbed and self.training and torch.is_grad_enabled():
                rank, rope = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
                raise AbsorbedInTrainingError(base.__name__, rank + rope, rank)
            if self.makes_tables:
                given = [name for name in _ROTARY if kwargs.get(name) is not None]
                given += [_ROTARY[0] for i in places if i < len(args) and args[i] is not None]
                if given and not torch.compiler.is_compiling():
                    warn_once(f"{base.__name__} makes its own rotary tables: {given[0]} is ignored")
                args = tuple(None if i in places else value for i, value in enumerate(args))
                kwargs = {name: None if name in _ROTARY else value for name, value in kwargs.items()}
            return super().forward(*args, **kwargs)

    Adapter.__name__ = Adapter.__qualname__ = f"Adapted{base.__name__}"
    Adapter.__doc__ = f"Megatron's {base.__name__} with a pipeline offset, and rotary tables of its own alone."
    return Adapter
