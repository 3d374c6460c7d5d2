"""Megatron's layer specs: the adapters put into one, and a builder of layers with attention alone."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from megacpp_compile.adapters.megatron import installed
from megacpp_compile.adapters.megatron.self_attention import adapted_base, adapter_of
from megacpp_compile.errors import AdapterError
from megacpp_compile.report import log

_GPT = "megatron.core.models.gpt."
_BUILDERS = {
    "transformer_engine": _GPT + "gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec",
    "inference_optimized": _GPT + "gpt_layer_specs.get_gpt_layer_with_inference_spec",
    "local": _GPT + "gpt_layer_specs.get_gpt_layer_local_spec",
}
_PROVIDERS = {
    "transformer_engine": "megatron.core.extensions.transformer_engine_spec_provider.TESpecProvider",
    "inference_optimized": "megatron.core.models.backends.InferenceSpecProvider",
    "local": "megatron.core.models.backends.LocalSpecProvider",
}
_SPARSE = _GPT + "experimental_attention_variant_module_specs.get_dsa_module_spec_for_backend"
_IDENTITY = "megatron.core.transformer.identity_op."


@dataclasses.dataclass(frozen=True)
class AdaptedSpec:
    """What `adapt_spec` did.

    Attributes:
        spec: the spec it was given.
        replaced: "self_attention: MLASelfAttention" for each class that an adapter took the place of, by its place.
    """

    spec: Any
    replaced: tuple[str, ...]


def adapt_spec(spec: Any) -> AdaptedSpec:
    """Put the adapters (`adapter`) in the place of Megatron's MLA classes inside `spec`, in place.

    spec: a `ModuleSpec` of a layer or an attention, or a block's submodules with their list of specs. Objects stay the
    ones they are, `params` and `submodules` too; specs of other classes, subclasses of the user's among them, are left
    alone, and a second call changes nothing.
    """
    replaced = []
    for place, found in _specs(spec, "", set()):
        base = adapted_base(_class_of(found.module))
        if base is not None:
            found.module = adapter_of(*base)
            replaced.append(f"{place or 'the spec'}: {base[0].__name__}")
    log.logger.info("Megatron-Core %s, adapters: %s", installed.version(), ", ".join(replaced) or "none")
    return AdaptedSpec(spec, tuple(replaced))


def _specs(spec: Any, place: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """(place, spec) of every `ModuleSpec` in `spec`, itself first."""
    if id(spec) in seen or isinstance(spec, type):
        return
    seen.add(id(spec))
    if isinstance(spec, list | tuple):
        for i, inner in enumerate(spec):
            yield from _specs(inner, f"{place}.{i}".strip("."), seen)
    elif hasattr(spec, "module") and hasattr(spec, "submodules"):
        yield place, spec
        yield from _specs(spec.submodules, place, seen)
    elif dataclasses.is_dataclass(spec):
        for field in dataclasses.fields(spec):
            yield from _specs(getattr(spec, field.name), f"{place}.{field.name}".strip("."), seen)


def _class_of(module: Any) -> Any:
    """A spec's class; a spec may name it by (module, name)."""
    if not isinstance(module, tuple):
        return module
    try:
        return getattr(importlib.import_module(module[0]), module[1], None)
    except ImportError:
        return None


def attention_layer_spec(
    implementation: str = "transformer_engine", *, sparse: bool = False, config: Any = None, adapt: bool = True,
    **options: Any,
) -> Any:  # fmt: skip
    """Megatron's spec of a layer with attention and no MLP (identity operations in its place).

    implementation: "transformer_engine", "inference_optimized" or "local", as `transformer_impl` of its configuration.
    sparse: its sparse attention (DSA) instead, which is made for `config`. adapt: put the adapters in (`adapt_spec`).
    options: of Megatron's own builder, unchanged: qk_layernorm, multi_latent_attention, qk_l2_norm, use_te_op_fuser,
        use_kitchen, use_kitchen_attention, kitchen_attention_backend, use_te_activation_func, mla_down_proj_fusion and
        whatever else it takes.

    Raises AdapterError for an implementation there is none of, and for options that the installed Megatron does not
    know, with their names, and for what Megatron itself cannot build; PackageMissingError without Megatron.
    """
    if implementation not in _BUILDERS:
        remedy = f"Choose of {', '.join(_BUILDERS)}."
        raise AdapterError(f"a layer spec of {implementation!r}", "there is no such implementation", remedy)
    build = installed.load(_BUILDERS[implementation], "a layer spec")
    taken = inspect.signature(build).parameters
    unknown = [name for name in options if name not in taken]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        what = f"a layer spec of {implementation!r} with {', '.join(unknown)}"
        reason = f"{build.__name__} of Megatron-Core {installed.version()} knows nothing of the kind"
        raise AdapterError(what, reason, f"It takes {', '.join(taken)}.")
    spec = _built(build, f"a layer spec of {implementation!r}", **options)
    identity, function = (installed.load(_IDENTITY + name, "a layer spec") for name in ("IdentityOp", "IdentityFuncOp"))
    attention = _sparse(implementation, config) if sparse else spec.submodules.self_attention
    spec.submodules = dataclasses.replace(
        spec.submodules, self_attention=attention, pre_mlp_layernorm=identity, mlp=identity, mlp_bda=function
    )
    given = ", ".join(f"{name}={value!r}" for name, value in options.items()) or "no options"
    log.logger.info("Megatron-Core %s, layer spec of %s: %s", installed.version(), implementation, given)
    return adapt_spec(spec).spec if adapt else spec


def _sparse(implementation: str, config: Any) -> Any:
    if config is None:
        raise AdapterError("a layer spec of sparse attention", "it is made for a configuration", "Give config=.")
    build = installed.load(_SPARSE, "sparse attention")
    backend = installed.load(_PROVIDERS[implementation], "sparse attention")()
    return _built(build, f"sparse attention of {implementation!r}", config=config, backend=backend)


def _built(build: Any, what: str, **given: Any) -> Any:
    """`build(**given)`. Raises AdapterError: Megatron's own, where Transformer Engine is missing, are NameErrors."""
    try:
        return build(**given)
    except Exception as error:
        remedy = "Choose another implementation, or install what it needs."
        raise AdapterError(what, f"{type(error).__name__}: {error}", remedy) from error
