"""`plain_mla`: a Megatron model computed by plain PyTorch, on its own modules and parameters.

Megatron's parallel linears, its embedding and its loss run in autograd functions of its own, which break the graph or
hide what they compute, and so do Transformer Engine's modules. On one tensor-parallel rank all of them are a
`linear`, an `embedding`, a norm, on several the same with a collective (`tensor_parallel`); written so, a whole model
is one graph, and its latents, rotations and norms fuse.

A module stays the object it is. Its class becomes a subclass of its own class with another forward
(`plain_forwards`), as FSDP2 does it: names, parameters, hooks, state dicts, sharded state dicts and `isinstance` are
what they were. Kernels that Megatron's code chooses by a field of the configuration (fused RoPE, fused SwiGLU) are
turned off in a copy of the configuration that the module alone reads, and so are random states that nothing draws from.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from megacpp_compile.adapters.megatron import plain_forwards as forwards
from megacpp_compile.adapters.megatron import refusals, substitutes
from megacpp_compile.adapters.megatron import tensor_parallel as ranks
from megacpp_compile.adapters.megatron.installed import loaded, version
from megacpp_compile.errors import CompiledTooEarlyError, NotAModuleError
from megacpp_compile.fx.compiled_models import compiled_part
from megacpp_compile.report import log
from megacpp_compile.report.tables import grouped, table_text, times
from megacpp_compile.report.text import plural

_CORE, _ENGINE = "megatron.core.", "megatron.core.extensions.transformer_engine."
_MLA = _CORE + "transformer.multi_latent_attention.MultiLatentAttention"
_LAYERS = _CORE + "tensor_parallel.layers."
_ROTARY = _CORE + "models.common.embeddings."
_CORE_ATTENTION = _ENGINE + "TEDotProductAttention"
_DISPATCHER = _CORE + "transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher"


@dataclass(frozen=True, slots=True)
class _Form:
    """What is put in front of a class, why a module of it must stay, and the attributes that a module gets with it."""

    front: Any
    why_not: Callable[[Any], str]
    attributes: Callable[[Any], Mapping[str, Any]] = lambda module: {}
    of_ranks: Any = None  # the front on several tensor-parallel ranks


_ENGINE_LINEAR = _Form(forwards.EngineLinear, refusals.engine_linear, of_ranks=ranks.EngineLinear)
_ENGINE_NORM = _Form(forwards.EngineNorm, refusals.engine_norm)
_TABLE = _Form(forwards.RotaryTable, refusals.rotary, forwards.table_attributes)
# The first class that a module is an instance of counts.
_CLASSES = {
    _LAYERS + "ColumnParallelLinear": _Form(forwards.ParallelLinear, refusals.linear, of_ranks=ranks.ColumnLinear),
    _LAYERS + "RowParallelLinear": _Form(forwards.ParallelLinear, refusals.linear, of_ranks=ranks.RowLinear),
    _LAYERS + "VocabParallelEmbedding": _Form(
        forwards.VocabularyEmbedding, refusals.embedding, of_ranks=ranks.VocabularyEmbedding
    ),
    _CORE + "models.common.language_module.language_module.LanguageModule": _Form(
        forwards.LanguageModelLoss, refusals.loss, of_ranks=ranks.LanguageModelLoss
    ),
    _ENGINE + "TELinear": _ENGINE_LINEAR,
    _ENGINE + "TELayerNormColumnParallelLinear": _ENGINE_LINEAR,
    _ROTARY + "yarn_rotary_pos_embedding.YarnRotaryEmbedding": _TABLE,
    _ROTARY + "rotary_pos_embedding.RotaryEmbedding": _TABLE,
    "transformer_engine.pytorch.RMSNorm": _ENGINE_NORM,
    "transformer_engine.pytorch.LayerNorm": _ENGINE_NORM,
}
# Class -> (fields of its configuration that choose a kernel, why they must stay).
_FIELDS: dict[str, tuple[tuple[str, ...], Callable[[Any], str]]] = {
    _CORE + "transformer.attention.Attention": (("apply_rope_fusion",), refusals.attention),
    _CORE + "transformer.mlp.MLP": (("bias_activation_fusion",), refusals.mlp),
    _CORE + "transformer.transformer_layer.TransformerLayer": (("bias_dropout_fusion",), refusals.layer),
    _CORE + "transformer.transformer_block.TransformerBlock": (("sequence_parallel",), refusals.block),
    _CORE + "transformer.multi_token_prediction.MultiTokenPredictionLayer": (("sequence_parallel",), refusals.forked),
    _CORE + "models.common.embeddings.language_model_embedding.LanguageModelEmbedding": (
        ("sequence_parallel",), refusals.rows,
    ),
}  # fmt: skip
# What such a field stands for in these modules, where that is not all it does.
_PARTS = {"sequence_parallel": "the random states of sequence_parallel"}

_NONE = object()  # an attribute that was not there


@dataclass(frozen=True, slots=True)
class PlainRow:
    """One module of a kind that `plain_mla` knows.

    Attributes:
        fqn: its name, "" for the model itself.
        module: its class before.
        now: what computes it, "" where it stays Megatron's.
        reason: why it stays.
    """

    fqn: str
    module: str
    now: str
    reason: str

    @property
    def done(self) -> bool:
        return bool(self.now)


class PlainTable:
    """What `plain_mla` did; `str(table)` is a table.

    Attributes:
        rows: the modules it knows, in the order of the model.
    """

    def __init__(self, rows: tuple[PlainRow, ...], before: tuple[tuple[Any, str, Any], ...]) -> None:
        self.rows, self._before = rows, before

    def __iter__(self) -> Iterator[PlainRow]:
        return iter(self.rows)

    @property
    def done(self) -> tuple[str, ...]:
        """Names of the modules that plain PyTorch computes now."""
        return tuple(row.fqn for row in self.rows if row.done)

    @property
    def left(self) -> dict[str, str]:
        """Name -> reason of those that stay Megatron's, and may break the graph."""
        return {row.fqn: row.reason for row in self.rows if not row.done}

    def undo(self) -> None:
        """Make every module what it was; a second call does nothing."""
        for owner, name, value in reversed(self._before):
            if value is _NONE:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._before = ()

    def summary(self) -> str:
        return f"{len(self.done)} of {plural(len(self.rows), 'module')} of Megatron-Core {version()} plain"

    def __str__(self) -> str:
        rows = [
            (times(name or "(the model)", count), row.module, row.now or "left", row.reason or "-")
            for name, row, count in grouped(self.rows)
        ]
        return (table_text("plain modules", ("module", "class", "is now", "reason"), rows) if rows else "") + (
            f"megatron: {self.summary()}"
        )


def plain_mla(model: nn.Module) -> PlainTable:
    """Have plain PyTorch compute what Megatron's modules in `model` compute, in place, on the same parameters.

    model: a Megatron model, layer, or attention, of one or of several tensor-parallel ranks, where every rank calls
        this; before compilation, in any order with FSDP and loading. Modules of other classes, and those of Megatron's
        that a subclass gives a forward of its own, stay as they are.

    Returns the table, with the reason of every module that stays. Forward and gradients stay what they were up to
    rounding, the state dict exactly. Raises NotAModuleError; CompiledTooEarlyError for a model that is compiled.
    """
    if not isinstance(model, nn.Module):
        raise NotAModuleError(model)
    found = compiled_part(model)
    if found is not None:
        raise CompiledTooEarlyError(*found, "plain_mla")
    rows: list[PlainRow] = []
    before: list[tuple[Any, str, Any]] = []
    substitutes.substitute()
    if (exchanged := substitutes.backward_of_mtp_loss()) is not None:
        scaler, backward = exchanged
        before.append((scaler, "backward", vars(scaler)["backward"]))
        scaler.backward = staticmethod(backward)
    for fqn, module in list(model.named_modules()):
        rows += _cores(fqn, module, before)
        rows += _dispatchers(fqn, module, before)
        row = _classed(fqn, module, before) or _quieted(fqn, module, before)
        if row is not None:
            rows.append(row)
    table = PlainTable(tuple(rows), tuple(before))
    log.logger.info("%s", table)
    return table


def _classed(fqn: str, module: Any, before: list[tuple[Any, str, Any]]) -> PlainRow | None:
    for path, form in _CLASSES.items():
        if (base := loaded(path)) is None or not isinstance(module, base):
            continue
        if form.of_ranks is not None and refusals.ranks_of(ranks.group_of(module)) > 1:
            form = dataclasses.replace(form, front=form.of_ranks, attributes=ranks.attributes)
        if not isinstance(module, form.front):
            return _formed(fqn, module, base, form, before)
    return None


def _formed(fqn: str, module: Any, base: type, form: _Form, before: list[tuple[Any, str, Any]]) -> PlainRow:
    """Put the form's forward in front of `module`, an instance of `base`, unless it must stay."""
    own, front = type(module), form.front
    changed = [n for n, f in vars(front).items() if callable(f) and getattr(own, n) is not getattr(base, n)]
    reason = f"{own.__name__} has a {changed[0]} of its own" if changed else form.why_not(module)
    if not reason:
        _set(module, before, **form.attributes(module))
        before.append((module, "__class__", own))
        module.__class__ = _plain_class((front, own))
    return PlainRow(fqn, own.__name__, "" if reason else front.plain_as, reason)


def _set(module: Any, before: list[tuple[Any, str, Any]], **values: Any) -> None:
    for name, value in values.items():
        before.append((module, name, getattr(module, name, _NONE)))
        setattr(module, name, value)


@functools.cache
def _plain_class(classes: tuple[type, type]) -> type:
    front, own = classes
    words = {"__module__": front.__module__, "__doc__": f"{own.__name__}, computed by plain PyTorch."}
    return type(f"Plain{own.__name__}", classes, words)


def _quieted(fqn: str, module: Any, before: list[tuple[Any, str, Any]]) -> PlainRow | None:
    for path, (fields, why_not) in _FIELDS.items():
        if (base := loaded(path)) is None or not isinstance(module, base):
            continue
        on = tuple(name for name in fields if getattr(module.config, name, False))
        reason = why_not(module)
        if reason:
            return PlainRow(fqn, type(module).__name__, "", reason)
        if not on:
            return None
        _set(module, before, config=copy.copy(module.config))
        for name in on:
            setattr(module.config, name, False)
        return PlainRow(fqn, type(module).__name__, "without " + ", ".join(_PARTS.get(name, name) for name in on), "")
    return None


def _cores(fqn: str, module: Any, before: list[tuple[Any, str, Any]]) -> Iterator[PlainRow]:
    """The attention inside Megatron's MLA, where it is Transformer Engine's: the MLA knows its scale."""
    mla, base = loaded(_MLA), loaded(_CORE_ATTENTION)
    core = getattr(module, "core_attention", None) if mla is not None and isinstance(module, mla) else None
    if base is None or not isinstance(core, base) or isinstance(core, forwards.EngineAttention):
        return

    def attributes(core: Any) -> Mapping[str, Any]:
        return {"plain_scale": module.softmax_scale, "plain_dropout": core.config.attention_dropout}

    form = _Form(forwards.EngineAttention, refusals.engine_attention, attributes)
    yield _formed(f"{fqn}.core_attention".strip("."), core, base, form, before)


def _dispatchers(fqn: str, module: Any, before: list[tuple[Any, str, Any]]) -> Iterator[PlainRow]:
    """What sends tokens to a layer's experts, which is no module."""
    base, dispatcher = loaded(_DISPATCHER), getattr(module, "token_dispatcher", None)
    if base is None or not isinstance(dispatcher, base) or isinstance(dispatcher, forwards.HostCopies):
        return
    if hasattr(base, "_maybe_dtoh_and_synchronize"):
        form = _Form(forwards.HostCopies, lambda dispatcher: "")
        yield _formed(f"{fqn}.token_dispatcher".strip("."), dispatcher, base, form, before)
