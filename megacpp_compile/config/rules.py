"""Rules that go by the names of modules (a precision plan's, `block_kinds`): whether each hits something, and which
blocks of one structure they tell apart.

Where the model is known, that is looked at before anything is compiled. One artifact serves all blocks that are alike,
under the name of the first: blocks that a rule means differently are kinds of their own, or the first one's rule would
silently be that of all.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Hashable, Iterable, Mapping, Sequence

from torch import nn
from torch.fx import GraphModule

from megacpp_compile.config.options import Config
from megacpp_compile.errors import BlockKindError, RuleWithoutHitError
from megacpp_compile.fx.provenance import input_path, module_fqn
from megacpp_compile.regional.repeated_blocks import Kind
from megacpp_compile.remat import kinds
from megacpp_compile.report import log


def check_model(model: nn.Module, config: Config) -> None:
    """Raise RuleWithoutHitError, or BlockKindError, for a rule that hits no module of `model`."""
    if config.precision is not None:
        config.precision.check_hits(model)
    _check_kinds(config.block_kinds, [name for name, _ in model.named_modules(remove_duplicate=False) if name])


def check_frame(gm: GraphModule, config: Config) -> None:
    """The same of Dynamo's graph, as far as it has names. Where a graph break has cut the model in pieces, a rule may
    be about another piece: that is logged, and no error."""
    rules = dict(config.precision.rules) if config.precision is not None else {}
    if not rules and not config.block_kinds:
        return
    names = _names(gm)
    try:
        _check_kinds(config.block_kinds, names)
        if config.precision is not None and (unhit := config.precision.without_hit(names)):
            raise RuleWithoutHitError(unhit[0], names)
    except (BlockKindError, RuleWithoutHitError) as error:
        if kinds.whole(gm):
            raise
        log.logger.warning("in a frame between graph breaks: %s", error)


def split_by_rules(model: nn.Module, found: Sequence[Kind], config: Config) -> list[Kind]:
    """`found`, with blocks that rules by name mean differently as kinds of their own, and so the last block where the
    policy has an entry for the last layer."""
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    blocks = [fqn for kind in found for fqn in kind.fqns]
    apart = config.policy is not None and config.policy.of_last_layer() != config.policy
    last = max(blocks, key=order.__getitem__) if blocks and apart else ""
    made = []
    for kind in found:
        groups: dict[tuple[bool, Hashable], list[int]] = {}
        for i, (fqn, module) in enumerate(zip(kind.fqns, kind.modules, strict=True)):
            groups.setdefault((fqn == last, _meant(fqn, module, config)), []).append(i)
        for number, ((is_last, _), members) in enumerate(groups.items()):
            fqns, modules = tuple(kind.fqns[i] for i in members), tuple(kind.modules[i] for i in members)
            made.append(Kind(fqns, modules, number, is_last))
    return made


def config_for(kind: Kind, config: Config) -> Config:
    """What the blocks of `kind` are compiled with."""
    if not kind.last or config.policy is None:
        return config
    return dataclasses.replace(config, policy=config.policy.of_last_layer())


def _meant(fqn: str, module: nn.Module, config: Config) -> Hashable:
    """What the rules say of the modules of a block, for comparison with another of the same structure."""
    said: list[Hashable] = []
    for name, _ in module.named_modules():
        whole = f"{fqn}.{name}" if name else fqn
        if config.precision is not None:
            said.append(config.precision.decide(whole).requested)
        if config.block_kinds and (chosen := kinds.chosen(whole, config.block_kinds)) is not None:
            said.append((chosen[0].removeprefix(fqn), chosen[1]))
    return tuple(said)


def _check_kinds(patterns: Mapping[str, str], names: Iterable[str]) -> None:
    known = list(names)
    for pattern in patterns:
        if not any(kinds.hits(pattern, name) for name in known):
            close = difflib.get_close_matches(pattern, known, n=4, cutoff=0.4)
            raise BlockKindError(pattern, close or known[:4])


def _names(gm: GraphModule) -> list[str]:
    """The modules that the graph's operations and parameters belong to, and those around them."""
    found: dict[str, None] = {}
    for graph in (m.graph for m in gm.modules() if isinstance(m, GraphModule)):
        for node in graph.nodes:
            name = input_path(node)[1].rpartition(".")[0] if node.op == "placeholder" else module_fqn(node)
            parts = name.split(".")
            found.update(dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts)) if parts[i]))
    return list(found)
