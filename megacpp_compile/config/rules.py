"""Checks that every rule over names (of a precision plan, of `block_kinds`) hits something.

A model is checked before anything is compiled; a frame, where the model is not known, as far as it has names.
"""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Iterable, Mapping

from torch import nn
from torch.fx import GraphModule, Node

from megacpp_compile.config import globs
from megacpp_compile.config.options import Config
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.config.roles import role_of
from megacpp_compile.errors import BlockKindError, RuleWithoutHitError
from megacpp_compile.fx.provenance import input_path, module_classes, module_fqn, no_graph_break
from megacpp_compile.report import log


def check_model(model: nn.Module, config: Config) -> None:
    """Raise RuleWithoutHitError, or BlockKindError, for a rule that hits no module of `model`."""
    if config.precision is not None:
        config.precision.check_hits(modules_with_weights(model))
    _check_block_kinds(config.block_kinds, [name for name, _ in model.named_modules(remove_duplicate=False) if name])


def check_frame(gm: GraphModule, config: Config) -> None:
    """Raise RuleWithoutHitError, or BlockKindError, for a rule that hits no module named in `gm`, Dynamo's graph.

    A graph break cuts the model in pieces, and a rule without a hit may be about another piece: then it is logged.
    """
    rules = dict(config.precision.rules) if config.precision is not None else {}
    if not rules and not config.block_kinds:
        return
    names = _module_names(gm)
    try:
        _check_block_kinds(config.block_kinds, names)
        if config.precision is not None and (unhit := config.precision.without_hit(names)):
            raise RuleWithoutHitError(unhit[0], names)
    except (BlockKindError, RuleWithoutHitError) as error:
        if no_graph_break(gm):
            raise
        log.logger.warning("in a frame between graph breaks: %s", error)


def modules_with_weights(model: nn.Module) -> list[str]:
    """The names of the modules of `model` that have a parameter of their own; one with two names is there twice."""
    modules = model.named_modules(remove_duplicate=False)
    return [name for name, module in modules if any(True for _ in module.parameters(recurse=False))]


def _check_block_kinds(patterns: Mapping[str, str], names: Iterable[str]) -> None:
    known = list(names)
    for pattern in patterns:
        if not any(globs.block_hit(pattern, name) for name in known):
            close = difflib.get_close_matches(pattern, known, n=4, cutoff=0.4)
            raise BlockKindError(pattern, close or known[:4])


def _module_names(gm: GraphModule) -> list[str]:
    """The modules that the graph's operations and parameters belong to, and those around them."""
    found: dict[str, None] = {}
    for graph in (m.graph for m in gm.modules() if isinstance(m, GraphModule)):
        for node in graph.nodes:
            name = input_path(node)[1].rpartition(".")[0] if node.op == "placeholder" else module_fqn(node)
            parts = name.split(".")
            found.update(dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts)) if parts[i]))
    return list(found)


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


@functools.lru_cache(maxsize=64)
def announce(plan: PrecisionPlan, target: str, reason: str = "") -> None:
    """Log the plan in full, once a process for each target. reason: as in `PrecisionPlan.describe`."""
    log.logger.info("%s", plan.describe(target, reason))
