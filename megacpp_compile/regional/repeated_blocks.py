"""Finds the repeated blocks of a model by structure: which modules share one artifact, and what lies outside of them.

A block is a child of a `ModuleList`, `ModuleDict` or `Sequential` that holds modules and parameters of its own and has
a sibling of the same structure: same classes, same names, same shapes, all the way down. The outermost such container
counts, so that the experts inside a block are part of it. Where some children repeat, their odd siblings (a dense layer
before the expert layers) are blocks too, of a kind of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from megacpp_compile.config import globs
from megacpp_compile.errors import BlockNotFoundError
from megacpp_compile.fx.module_names import named_modules

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Kind:
    """Blocks that share one artifact.

    Attributes:
        fqns: their names in the model, in its order.
        modules: the blocks themselves.
        apart: numbers the kinds of one structure that rules over names tell apart, from 0; see `split.split_by_rules`.
        last: whether they are of the model's last layer, where the policy has an entry of its own for that.
    """

    fqns: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    apart: int = 0
    last: bool = False


def find_kinds(model: nn.Module, patterns: Sequence[str] | None = None) -> list[Kind]:
    """The kinds of repeated blocks in `model`, empty where nothing repeats.

    patterns: globs over the names of the blocks (`"model.layers.*"`), for a model where structure finds the wrong
    blocks or none; the outermost modules that they hit are the blocks. Raises BlockNotFoundError for a pattern that
    hits no module.
    """
    blocks = _found(model) if patterns is None else _named(model, patterns)
    called = _first_names(model)
    kinds: dict[Hashable, tuple[list[str], list[nn.Module]]] = {}
    seen: set[int] = set()
    for module in blocks:
        if id(module) not in seen:  # the same layer may stand in a list several times
            seen.add(id(module))
            fqns, modules = kinds.setdefault(structure(module), ([], []))
            fqns.append(called[id(module)])
            modules.append(module)
    return [Kind(tuple(fqns), tuple(modules)) for fqns, modules in kinds.values()]


def structure(module: nn.Module) -> Hashable:
    """Equal for modules that differ in nothing but the values of their parameters and plain attributes."""
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    own = tuple((name, tuple(t.shape), t.dtype, t.device, t.requires_grad) for name, t in tensors)
    return type(module), own, tuple((name, structure(child)) for name, child in module.named_children())


def outside(model: nn.Module, kinds: Sequence[Kind]) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the largest modules that hold no block and are no part of one."""
    blocks = {id(module) for kind in kinds for module in kind.modules}
    above = {id(m) for m in model.modules() if any(id(part) in blocks for part in m.modules())}
    seen: set[int] = set()
    called = _first_names(model)

    def walk(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in blocks or id(module) in seen:
            return
        seen.add(id(module))
        if id(module) not in above:
            yield called[id(module)], module
            return
        for child in module.children():
            yield from walk(child)

    yield from walk(model)


def _first_names(model: nn.Module) -> dict[int, str]:
    """id of each module of `model` -> its first name."""
    found: dict[int, str] = {}
    for name, module in named_modules(model):
        found.setdefault(id(module), name)
    return found


def _found(model: nn.Module) -> Iterator[nn.Module]:
    children = list(model.children())
    if isinstance(model, _CONTAINERS):
        candidates = [child for child in children if _is_block(child)]
        kinds = Counter(structure(child) for child in candidates)
        if max(kinds.values(), default=0) > 1:
            # The odd children of a ModuleList are layers too; in a ModuleDict or Sequential they may be anything.
            classes = {type(child) for child in candidates if kinds[structure(child)] > 1}
            alike = isinstance(model, nn.ModuleList)
            chosen = [c for c in candidates if alike or type(c) in classes]
            yield from chosen
            taken = {id(child) for child in chosen}
            children = [c for c in children if id(c) not in taken]
    for child in children:
        yield from _found(child)


def _is_block(module: nn.Module) -> bool:
    """Single linears or norms are no blocks: there is nothing in them to fuse."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _named(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    modules: dict[str, nn.Module] = {}
    for name, module in named_modules(model):
        modules.setdefault(name, module)  # of a wrapper and what it wraps the wrapper
    del modules[""]
    chosen: list[nn.Module] = []
    for pattern in patterns:
        hits = globs.outermost_hits(pattern, modules)
        if not hits:
            raise BlockNotFoundError(pattern, list(modules))
        chosen += [modules[name] for name in hits]
    inner = {id(part) for m in chosen for part in m.modules() if part is not m}
    return [module for module in chosen if id(module) not in inner]
