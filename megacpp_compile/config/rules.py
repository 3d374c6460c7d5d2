"""Checks that every rule over names (of a plan for linears, of `block_kinds`, of a sharding plan) hits something.

A model is checked before anything is compiled; a frame, where the model is not known, as far as it has names. Names are
canonical (`fx.module_names`): a rule names a module whatever wraps it.
"""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping

from torch import nn
from torch.fx import GraphModule, Node

from megacpp_compile._torch import calls
from megacpp_compile.config import globs
from megacpp_compile.config.options import Config
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.config.roles import role_of
from megacpp_compile.errors import BlockKindError, RuleWithoutHitError
from megacpp_compile.fx.module_names import canonical, named_modules, named_parameters
from megacpp_compile.fx.provenance import input_path, is_whole, module_classes, module_fqn, modules_of
from megacpp_compile.report import log
from megacpp_compile.targets import chips


def check_model(model: nn.Module, config: Config) -> None:
    """Raise RuleWithoutHitError, or BlockKindError, for a rule that hits nothing of `model`."""
    if config.sharding is not None:
        parameters = [name for name, _ in named_parameters(model)]
        _check_patterns(dict(config.sharding.rules), parameters, "sharding", "parameter")
    _check_hits(config, [name for name, _ in named_modules(model) if name], modules_with_weights(model))


def check_frame(gm: GraphModule, config: Config) -> None:
    """Raise RuleWithoutHitError, or BlockKindError, for a rule that hits no module named in `gm`, Dynamo's graph.

    Where `gm` is a piece of what was compiled, a rule without a hit may be about another piece: it is an error if the
    whole model has no such module, and logged if the model is not known, or the piece does not know the module's name.
    """
    if not config.block_kinds and not _of_linears(config):
        return
    names = _module_names(gm)
    try:
        _check_hits(config, names, names)
    except (BlockKindError, RuleWithoutHitError) as error:
        if is_whole(gm):
            raise
        call = calls.current()
        if call is None or call.module is None:
            log.logger.warning("in a frame between graph breaks: %s", error)
            return
        known, weights = _in_pieces(name for name, _ in named_modules(call.module)), modules_with_weights(call.module)
        _check_hits(config, known, _in_pieces(weights))
        say_unnamed(gm, config, call.module)


def _in_pieces(names: Iterable[str]) -> list[str]:
    """The names by which a piece of a model may know its modules: whole, or from some module on."""
    parts = [name.split(".") for name in names if name]
    return list(dict.fromkeys(".".join(name[i:]) for name in parts for i in range(len(name))))


def layer_of(fqn: str) -> str:
    """The layer of the block `fqn`: its name up to the last number in it, which several blocks of a layer share."""
    parts = fqn.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else fqn


def treatment_of(fqn: str, names: Iterable[str], config: Config) -> Hashable:
    """What the rules say of the modules `names` of the block `fqn`; equal for blocks of one structure that they treat
    alike. names: in the order of the block's structure."""
    outcome: list[Hashable] = []
    for name in names:
        if config.precision is not None:
            outcome.append(config.precision.decide(name).recipe)
        if config.compress is not None:
            outcome.append(config.compress.hits(name))
        if (hit := globs.longest_hit(config.block_kinds, name)) is not None:
            block, pattern = hit
            outcome.append((block.removeprefix(fqn), config.block_kinds[pattern]))
    return tuple(outcome)


def say_unnamed(gm: GraphModule, config: Config, model: nn.Module) -> None:
    """Warn of rules that hit a module of `model` that runs in `gm`, but not the name it has there."""
    names = _module_names(gm)
    ids = {m for node in _nodes(gm) if node.op != "placeholder" for m in modules_of(node)}
    inside = [name for name, module in named_modules(model) if name and id(module) in ids]
    options = {**_of_linears(config), "block_kinds": tuple(config.block_kinds)}
    for option, patterns in options.items():
        hit = globs.block_hit if option == "block_kinds" else globs.hits
        for pattern in patterns:
            meant = [name for name in inside if hit(pattern, name)]
            if meant and not any(hit(pattern, name) for name in names):
                log.logger.warning(
                    "%s: the pattern %r has no effect on %s, which a frame that is a piece of the model knows as one "
                    "of %s. megacpp_compile.compile keeps the model's names; or write a pattern for both, as in '*.%s'",
                    option, pattern, meant[0], ", ".join(names[:4]), meant[0].rpartition(".")[2],
                )  # fmt: skip


def modules_with_weights(model: nn.Module) -> list[str]:
    """The names of the modules of `model` that have a parameter of their own; one with two names is there twice."""
    return [name for name, module in named_modules(model) if any(True for _ in module.parameters(recurse=False))]


def _check_hits(config: Config, names: list[str], weights: list[str]) -> None:
    _check_block_kinds(config.block_kinds, names)
    for option, patterns in _of_linears(config).items():
        _check_patterns(patterns, weights, option, "module with a weight")


def _of_linears(config: Config) -> dict[str, tuple[str, ...]]:
    """Option -> its patterns over names of linears, of the options that have some."""
    found = {
        "precision": tuple(dict(config.precision.rules)) if config.precision is not None else (),
        "compress": config.compress.names if config.compress is not None else (),
    }
    return {option: patterns for option, patterns in found.items() if patterns}


def _check_patterns(patterns: Iterable[str], names: list[str], option: str, what: str) -> None:
    for pattern in globs.without_hit(patterns, names):
        meant = canonical(pattern)
        known = meant != pattern and any(globs.hits(meant, name) for name in names)
        raise RuleWithoutHitError(pattern, names, option, what, meant if known else None)


def _check_block_kinds(patterns: Mapping[str, str], names: Iterable[str]) -> None:
    known = list(names)
    for pattern in patterns:
        if not any(globs.block_hit(pattern, name) for name in known):
            close = difflib.get_close_matches(canonical(pattern), known, n=4, cutoff=0.4)
            raise BlockKindError(pattern, close or known[:4])


def _module_names(gm: GraphModule) -> list[str]:
    """The modules that the graph's operations and parameters belong to, and those around them."""
    found: dict[str, None] = {}
    for node in _nodes(gm):
        name = input_path(node)[1].rpartition(".")[0] if node.op == "placeholder" else module_fqn(node)
        parts = name.split(".")
        found.update(dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts)) if parts[i]))
    return list(found)


def _nodes(gm: GraphModule) -> Iterator[Node]:
    for module in gm.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes


def role_at(node: Node) -> str:
    """`role_of` the module that the node of a linear belongs to."""
    classes = module_classes(node)
    classes = classes[1:] if classes and classes[0].endswith("Linear") else classes
    return role_of(module_fqn(node), classes, siblings_of(node))


def siblings_of(node: Node) -> set[str]:
    """Names of the modules called around `node`, in the parent of its own module."""
    parent = module_fqn(node).rpartition(".")[0]
    found: set[str] = set()
    for step in (operator.attrgetter("next"), operator.attrgetter("prev")):
        at = node
        while at.op != "root" and (at.op != "call_function" or _within(parent, module_fqn(at), found)):
            at = step(at)
    return found


def _within(parent: str, name: str, found: set[str]) -> bool:
    """Whether the module `name` is `parent` or in it; that right in `parent`, which it is or is in, joins `found`."""
    inside = not parent or name == parent or name.startswith(f"{parent}.")
    if inside and name != parent:
        found.add(name.removeprefix(parent).removeprefix(".").partition(".")[0])
    return inside


def announce_target(target: str) -> str:
    """The label of a target where it runs. On "cuda" what is known of the device and pinned on it is logged, once a
    process."""
    chip = chips.current() if target == "cuda" else None
    if chip is not None:
        announce_chip(chip)
    return chip.label if chip is not None else target


@functools.cache
def announce_chip(chip: chips.Chip) -> None:
    """Log a kind of device, once a process."""
    log.logger.info("%s", chip.describe())


@functools.lru_cache(maxsize=64)
def announce(plan: PrecisionPlan, target: str, reason: str = "") -> None:
    """Log the plan in full, once a process for each target. reason: as in `PrecisionPlan.describe`."""
    log.logger.info("%s", plan.describe(target, reason))
