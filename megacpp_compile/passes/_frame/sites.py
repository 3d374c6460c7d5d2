"""Sites after the passes: ops that the model itself calls, and the lowering each site gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from megacpp_compile.config.options import Config
from megacpp_compile.frontend.checkpoint import has_regions
from megacpp_compile.fx.edit import arguments
from megacpp_compile.fx.mode_states import autocast_pairs
from megacpp_compile.fx.provenance import module_fqn, source_line
from megacpp_compile.lowerings._registry import AHEAD, choose, semantic_ops
from megacpp_compile.passes._driver import Outcome
from megacpp_compile.report.records import Site

# Of a lowering that autograd differentiates.
OF_AUTOGRAD = "autograd makes its backward, and keeps what that needs"


def add_called_ops(outcome: Outcome, called: Sequence[Node]) -> None:
    """Add sites for semantic ops that the model itself calls: they are lowered like those of a pass. What a pass makes
    beside its op, such as the payloads of a linear in float8, belongs to its site."""
    for node in called:
        op = f"{node.target.namespace}::{node.target._opname}"  # type: ignore[union-attr]
        outcome.sites.append(Site("(called)", op, module_fqn(node), source_line(node), "", "", node=node.name))
        outcome.op_nodes.append(node)


def choose_lowerings(outcome: Outcome, target: str, gm: GraphModule, config: Config) -> None:
    """Note at each site which lowering was requested on `target`, which serves, and why another one. An op of a rule's
    without one, torch's own or not, is left to the backend, under its namespace. What autograd is to differentiate is
    marked in the graph."""
    ahead = []
    for site, node in zip(outcome.sites, outcome.op_nodes, strict=True):
        if node.target not in semantic_ops():
            site.requested = site.effective = site.op.partition("::")[0]
            continue
        given = arguments(node.target, node.args, node.kwargs).values() if node.kwargs else node.args
        args = torch.fx.map_arg(tuple(given), lambda n: n.meta["val"])
        choice = choose(node.target, target, args)
        site.requested, site.effective, site.reason = choice.requested, choice.effective, choice.reason
        ahead += [(site, node)] if choice.ahead else []
    for site, node in ahead if ahead and _may_expand_ahead(gm, config) else []:
        node.meta[AHEAD] = True
        if site.saved_after is not None:
            site.set_saved(None, None, OF_AUTOGRAD)


def _may_expand_ahead(gm: GraphModule, config: Config) -> bool:
    """Whether nothing speaks of the ops of the graph: a policy and checkpoints say what of them is kept, and autocast
    would reach into what is put in their place."""
    autocast = torch.is_autocast_enabled("cpu") or autocast_pairs(gm.graph)
    return config.own_policy is None and not has_regions(gm) and not autocast
