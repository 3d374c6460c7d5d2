"""`compile`: a model compiled block by block, one artifact for all blocks of a kind.

Each block is compiled in place (`nn.Module.compile`), so that its class, its names, its state dict and the hooks
around its forward (FSDP2's among them) stay as they are. Dynamo keeps what it compiled at the code of `forward`, and
all blocks share one backend object: blocks that its guards cannot tell apart share one graph and one artifact.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megacpp_compile._torch import dynamo
from megacpp_compile._torch.modules import compiled_call, set_compiled_call
from megacpp_compile.backend import check_torch, mode_patches
from megacpp_compile.backends.static_launch import start_workers
from megacpp_compile.config import rules
from megacpp_compile.config.options import Config, given_options
from megacpp_compile.errors import AlreadyCompiledError, BadOptionError, NotAModuleError
from megacpp_compile.passes._driver import pass_names
from megacpp_compile.passes._frame.required import Requirement
from megacpp_compile.precision.checkpoint import guard
from megacpp_compile.regional import loss_region
from megacpp_compile.regional.backend import Regional
from megacpp_compile.regional.repeated_blocks import Kind, find_kinds, outside
from megacpp_compile.regional.split import config_for, split_by_rules
from megacpp_compile.report import collector, log
from megacpp_compile.report.records import CompiledRegion
from megacpp_compile.report.text import plural
from megacpp_compile.targets import TARGETS, device_types, family

# docs/measurements.md: with this many blocks fewer artifacts outweigh the calls between them.
WHOLE_BELOW = 4
# Blocks that hold less of a model than this are not what its compilation spends its time on.
_MOST = 0.5

Model = TypeVar("Model", bound=nn.Module)


def compile(
    model: Model,
    *,
    options: Mapping[str, Any] | Config | None = None,
    blocks: str | Sequence[str] | None = None,
    whole_below: int = WHOLE_BELOW,
    rest: Literal["eager", "compile"] = "eager",
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **fields: Any,
) -> Model:
    """Compile `model` in place and return it: its repeated blocks with one artifact a kind, a small model whole.

    model: a module; its parameters may be on any device, and sharded by FSDP2 before or after.
    options, fields: fields of `Config`, or one, as in `torch.compile(..., backend="megacpp", options=...)`.
    blocks: names of the blocks ("model.layers.*", see `config.globs`), where structure finds them wrongly.
    whole_below: compile the model as one where it has fewer repeated blocks than this.
    rest: how modules outside all blocks run (embeddings, last norm). "eager" leaves them to eager;
        "compile" compiles, each by itself, those that consist of more than one embedding or linear. A head with its
        loss, where the model's forward computes one, is a region of its own either way.
    mode, dynamic, fullgraph: as in `torch.compile`, for every part; on torch_tpu's devices dynamic is False by default.

    Raises NotAModuleError, AlreadyCompiledError, BlockNotFoundError and the errors of bad options, before anything is
    changed. What was decided is in the report's `regions`, also of a `record()` that opens later.
    """
    check_torch()
    if not isinstance(model, nn.Module):
        raise NotAModuleError(model)
    given = given_options(options)
    for name in fields:
        if name in given:
            raise BadOptionError(name, fields[name], "one value: it is in 'options' and a keyword argument too")
    if rest not in ("eager", "compile"):
        raise BadOptionError("rest", rest, "'eager' or 'compile'", ("eager", "compile"))
    config = Config.from_options({**given, **fields}, pass_names())
    mode_patches(mode)
    for fqn, module in model.named_modules():
        if isinstance(module, dynamo.OptimizedModule) or compiled_call(module) is not None:
            raise AlreadyCompiledError(fqn, type(module).__name__)
    rules.check_model(model, config)
    kinds = find_kinds(model, [blocks] if isinstance(blocks, str) else blocks)
    whole = None if blocks is not None else _why_whole(model, kinds, whole_below)
    kinds = [Kind(("",), (model,))] if whole is not None else split_by_rules(model, kinds, config)
    leftovers = [] if whole is not None else [(fqn, m) for fqn, m in outside(model, kinds)]
    regions = [
        CompiledRegion(k.fqns, type(k.modules[0]).__name__, _size(k.modules), "compiled", whole or "") for k in kinds
    ]
    if config.own_policy is not None and config.own_policy.peak_gib is not None and len(kinds) > 1:
        wanted = f"one kind of block, and not {len(kinds)}: compile the model whole (torch.compile), or see fit()"
        raise BadOptionError("policy.peak_gib", config.own_policy.peak_gib, wanted)
    for fqn, module in leftovers:
        compiled = rest == "compile" and _worth_compiling(module)
        kinds += [Kind((fqn,), (module,))] * compiled
        treatment = "compiled" if compiled else "eager"
        regions.append(CompiledRegion((fqn,), type(module).__name__, _size([module]), treatment, "outside the blocks"))
    apart = loss_region.runners(model, kinds) if whole is None and config.enabled(loss_region.PASS) else None
    if apart:
        regions.append(CompiledRegion(("",), type(model).__name__, 0, "compiled", loss_region.REASON))
    parameters = list(model.parameters())
    target = family(device_types(parameters)) if config.target == "auto" else TARGETS[config.target]
    if dynamic is None and not target.device(parameters).dynamic:
        dynamic = False
    start_workers(target)
    required = _count_calls(model, config) if whole is None and config.require else None
    if config.own_policy is not None or config.precision is not None:
        guard(model)
    compile_kinds(model, kinds, regions, config, mode, required=required, dynamic=dynamic, fullgraph=fullgraph)
    if apart:
        hooks = compile_loss(
            model, kinds, apart, regions, config, mode, everything=rest == "compile", required=required, dynamic=dynamic
        )
        _hooks.setdefault(model, []).extend(hooks)
        loss_region.watch_compiled(model)
    elif apart is not None:
        _hooks.setdefault(model, []).append(loss_region.watch(model))
    collector.emit_regions(regions)
    for region in regions:
        log.logger.info("region: %s", region)
    return model


def compile_kinds(
    model: nn.Module, kinds: Sequence[Kind], regions: Sequence[CompiledRegion], config: Config, mode: str | None,
    inner_compile: Any = None, required: Requirement | None = None, **settings: Any,
) -> None:  # fmt: skip
    """Compile all blocks in place. Blocks that rules by name tell apart get backends of their own, which Dynamo's
    guards distinguish: nothing else about such blocks need differ. required: counts in calls of the model, None where
    nothing does but a whole model's own frame. settings: of `module.compile`."""
    count = sum(len(kind.modules) for kind in kinds)
    backends: dict[tuple[int, bool], Regional] = {}
    for kind in kinds:
        own = config_for(kind, config)
        if required is None and kind.fqns != ("",):
            own = dataclasses.replace(own, require={})  # an estimate: a block is not the model that counts
        new = Regional(model, regions, own, mode, inner_compile, required)
        backend = backends.setdefault((kind.apart, kind.last), new)
        for module in kind.modules:
            compile_in_place(module, count, backend=backend, **settings)


def compile_loss(
    model: nn.Module, kinds: Sequence[Kind], apart: Sequence[nn.Module], regions: Sequence[CompiledRegion],
    config: Config, mode: str | None, inner_compile: Any = None, required: Requirement | None = None,
    everything: bool = False, **settings: Any,
) -> list[RemovableHandle]:  # fmt: skip
    """Compile the head and its loss of a model whose blocks are compiled; returns the hooks that keep both apart.
    apart: what `loss_region.runners` says. everything: whether all that forward itself does is compiled."""
    own = loss_region.config_of(config)
    if required is None:
        own = dataclasses.replace(own, require={})
    backend = Regional(model, regions, own, mode, inner_compile, required)
    region = loss_region.LossRegion(model, kinds, backend, everything)
    compile_in_place(model, len(region.blocks), backend=region, **settings)
    return list(loss_region.keep_apart(apart))


def compile_in_place(module: nn.Module, blocks: int, **settings: Any) -> None:
    """Compile one of `blocks` modules in place. Dynamo skips frames of torch's own code, so that `module.compile` on an
    `nn.TransformerEncoderLayer` would silently do nothing; such a module is called through a function of ours."""
    settings |= _recompile_limit(blocks)
    if not dynamo.skips(type(module).forward):
        module.compile(**settings)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    set_compiled_call(module, torch.compile(call, **settings))


def uncompile(model: nn.Module) -> None:
    """Undo `compile`: the modules of `model` run in eager again."""
    for module in model.modules():
        set_compiled_call(module, None)
        for hook in _hooks.pop(module, ()):
            hook.remove()


def _count_calls(model: nn.Module, config: Config) -> Requirement:
    """Count in calls of `model`, in code that Dynamo leaves alone where it compiles the model's forward."""
    required = Requirement(config.require)
    began, ended = map(torch.compiler.disable, (required.began, required.ended))
    hooks = model.register_forward_pre_hook(began), model.register_forward_hook(ended)
    _hooks.setdefault(model, []).extend(hooks)
    return required


# Model -> the hooks by which calls of it are counted, and what runs its blocks is kept out of compiled code.
_hooks: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()


def _why_whole(model: nn.Module, kinds: Sequence[Kind], whole_below: int) -> str | None:
    """Why the model is compiled as one; None where it is compiled block by block."""
    blocks = sum(len(kind.modules) for kind in kinds)
    if not blocks:
        return "no block repeats"
    if blocks < whole_below:
        return f"{plural(blocks, 'block')}, fewer than {whole_below}"
    layers = sum(map(_layers, (m for kind in kinds for m in kind.modules)))
    if layers < _MOST * _layers(model):
        return f"repeated blocks hold {layers} of {_layers(model)} layers with parameters"
    return None


def _layers(module: nn.Module) -> int:
    return sum(any(True for _ in m.parameters(recurse=False)) for m in module.modules())


def _size(modules: Sequence[nn.Module]) -> int:
    """Parameters (elements), each once."""
    return sum({id(p): p.numel() for m in modules for p in m.parameters()}.values())


def _worth_compiling(module: nn.Module) -> bool:
    return not isinstance(module, (nn.Linear, nn.Embedding, nn.Identity, nn.ModuleList, nn.ModuleDict))


def _recompile_limit(blocks: int) -> dict[str, int]:
    """Guards may tell blocks apart (a number that differs from layer to layer, a cache object of each): each of them
    may then be compiled as often as a function alone. Otherwise Dynamo would leave the ninth layer to eager."""
    if "recompile_limit" not in inspect.signature(torch.compile).parameters:
        return {}  # torch 2.9: torch._dynamo.config's holds for all of them
    return {"recompile_limit": dynamo.config.recompile_limit * blocks}
