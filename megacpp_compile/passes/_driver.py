"""Runs the passes over a captured graph; no pass is known here by name.

A pass is a module in this folder that defines `name`, `op`, `after` and `find` (`_rule.Pass`); order follows `after`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

import megacpp_compile.passes as package
from megacpp_compile.config.options import Config
from megacpp_compile.errors import MegacppError
from megacpp_compile.frontend.capture import Captured
from megacpp_compile.fx.edit import drop_dead
from megacpp_compile.fx.provenance import module_fqn, source_line
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.passes._rule import Match, Pass
from megacpp_compile.report.records import MissedFusion, Site


@functools.cache
def all_passes() -> tuple[Pass, ...]:
    """Every pass in this folder, in the order their `after` asks for (ties by name)."""
    names = [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]
    modules: dict[str, Any] = {n: importlib.import_module(f"{package.__name__}.{n}") for n in sorted(names)}
    ordered: list[Any] = []

    def place(name: str, chain: tuple[str, ...]) -> None:
        if name in chain:
            raise MegacppError(f"passes wait for each other: {' -> '.join((*chain, name))}")
        if modules[name] not in ordered:
            for earlier in modules[name].after:
                place(earlier, (*chain, name))
            ordered.append(modules[name])

    for name in modules:
        place(name, ())
    return tuple(ordered)


def pass_names() -> tuple[str, ...]:
    return tuple(p.name for p in all_passes())


def enabled_passes(config: Config) -> list[Pass]:
    """The passes that `config` leaves on, in order; one that is not `by_default` runs only where `config` names it."""
    return [p for p in all_passes() if config.enabled(p.name, getattr(p, "by_default", True))]


@dataclasses.dataclass
class Outcome:
    """What the passes did to one frame.

    `op_nodes` are the nodes of the ops, in the order of `sites`; `replaced` has the site of each `Match.node`.
    """

    sites: list[Site]
    misses: list[MissedFusion]
    counts: dict[str, int]
    seconds: dict[str, float]
    op_nodes: list[Node]
    replaced: dict[Node, Site] = dataclasses.field(default_factory=dict)


# (pass, match, the nodes that now carry match.outputs, site) -> why the rewrite must be undone, or None.
Review = Callable[[Pass, Match, list[Node], Site], MatchFailure | None]


def run_passes(
    captured: Captured,
    config: Config,
    review: Review | None = None,
    trace: Callable[[str, torch.fx.GraphModule], None] | None = None,
) -> Outcome:
    """Run every enabled pass on `captured` in place.

    review: called for each rewrite while the plain nodes still stand beside the new ones; it may fill in the site, and
    refuse the rewrite, which is then undone. trace: called with the graph after each pass that changed it.
    """
    gm = captured.gm
    semantic_ops()  # registers the ops the passes name
    out = Outcome([], [], {}, {}, [])
    for p in enabled_passes(config):
        began = time.perf_counter()
        fired = 0
        with GraphTransformObserver(gm, f"megacpp_{p.name}"):
            view = GraphView(gm.graph, captured.fake_mode, captured.weights, config, captured.trained)
            try:
                candidates = list(p.find(view))
            except Exception as error:  # one pass's defect must not stop the others; the graph is unchanged so far
                if config.strict or isinstance(error, MegacppError):
                    raise
                out.misses.append(
                    MissedFusion(p.name, "", "", "", "internal-error", f"{type(error).__name__}: {error}"[:300])
                )
                candidates = []
            for found in candidates:
                if isinstance(found, MatchFailure):
                    out.misses.append(_miss(p, found))
                    continue
                site = Site(p.name, p.op, module_fqn(found.node), source_line(found.node), "", "")
                op_node, new = found.rewrite()
                site.node = op_node.name
                if (target := op_node.target) in semantic_ops():
                    site.op = f"{target.namespace}::{target._opname}"  # type: ignore[union-attr]
                refusal = review(p, found, new, site) if review is not None else None
                if refusal is not None:
                    for node, plain in zip(new, found.outputs, strict=True):
                        node.replace_all_uses_with(plain)
                    out.misses.append(_miss(p, refusal))
                    continue
                out.sites.append(site)
                out.op_nodes.append(op_node)
                out.replaced[found.node] = site
                fired += 1
            drop_dead(gm.graph)
        gm.graph.lint()
        out.counts[p.name] = fired
        out.seconds[p.name] = time.perf_counter() - began
        if fired:
            gm.recompile()
            if trace is not None:
                trace(p.name, gm)
    return out


def _miss(p: Pass, refusal: MatchFailure) -> MissedFusion:
    n = refusal.node
    return MissedFusion(p.name, module_fqn(n), source_line(n), n.name, refusal.tag, refusal.reason)
