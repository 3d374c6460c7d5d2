"""Splits kinds of repeated blocks by what rules over names say of each block.

One artifact serves all blocks of a kind, compiled under the name of the first. If a rule of the precision plan or of
`block_kinds` treats blocks of one structure differently, they become kinds of their own; otherwise the first block's
rules would silently hold for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from torch import nn

from megacpp_compile.config import rules
from megacpp_compile.config.options import Config
from megacpp_compile.fx.groups import by_key
from megacpp_compile.fx.module_names import named_modules
from megacpp_compile.regional.repeated_blocks import Kind


def split_by_rules(model: nn.Module, found: Sequence[Kind], config: Config) -> list[Kind]:
    """`found`, with blocks that rules treat differently as kinds of their own, and so those of the model's last layer
    where the policy has another entry for that."""
    order = {name: number for number, (name, _) in enumerate(named_modules(model))}
    blocks = [fqn for kind in found for fqn in kind.fqns]
    last_differs = config.own_policy is not None and config.own_policy.of_last_layer() != config.own_policy
    last = rules.layer_of(max(blocks, key=order.__getitem__)) if blocks and last_differs else None
    kinds = []
    for kind in found:
        modules_of_kind = zip(kind.fqns, kind.modules, strict=True)
        groups = by_key(
            ((rules.layer_of(fqn) == last, _treatment(fqn, module, config)), i)
            for i, (fqn, module) in enumerate(modules_of_kind)
        )
        for number, ((is_last, _), members) in enumerate(groups.items()):
            fqns, modules = tuple(kind.fqns[i] for i in members), tuple(kind.modules[i] for i in members)
            kinds.append(Kind(fqns, modules, number, is_last))
    return kinds


def config_for(kind: Kind, config: Config) -> Config:
    """The settings that the blocks of `kind` are compiled with: those of the last layer for its own."""
    if not kind.last or config.own_policy is None:
        return config
    return dataclasses.replace(config, policy=config.own_policy.of_last_layer())


def _treatment(fqn: str, module: nn.Module, config: Config) -> Hashable:
    names = (name for name, _ in named_modules(module))
    return rules.treatment_of(fqn, (f"{fqn}.{name}" if name else fqn for name in names), config)
