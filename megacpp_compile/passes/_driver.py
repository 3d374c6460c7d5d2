"""Runs the passes over a captured graph; no pass is known here by name.

A pass is a module in this folder that defines `name`, `op`, `after` and `find` (`_rule.Pass`), or a rule of another
package (`_registered.Rule`); order follows `after`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch.fx import Node
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from megacpp_compile.config.options import Config
from megacpp_compile.errors import MegacppError, RegistrationError, UnfoundedSiteError
from megacpp_compile.frontend.capture import Captured
from megacpp_compile.fx.edit import drop_dead
from megacpp_compile.fx.provenance import module_fqn, source_line
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.lowerings._traits import name_of
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.passes._objections import check_found, objection
from megacpp_compile.passes._registered import in_order, rules
from megacpp_compile.passes._rewriting import OVERLAP, Rewriter, is_semantic
from megacpp_compile.passes._rule import Match, Pass, Recognised
from megacpp_compile.report.records import MissedFusion, Site


def all_passes() -> tuple[Pass, ...]:
    """Every pass in this folder and every registered rule, in the order their `after` asks for (ties by name, passes
    first).

    Raises UnknownPassError for a rule that is to run after or before one that is not there, and RegistrationError for
    rules that wait for each other.
    """
    return in_order(rules())


def pass_names() -> tuple[str, ...]:
    return tuple(p.name for p in all_passes())


def enabled_passes(config: Config) -> list[Pass]:
    """The passes that `config` leaves on, in order; one that is not `by_default` runs only where `config` names it."""
    return [p for p in all_passes() if config.enabled(p.name, getattr(p, "by_default", True))]


@dataclasses.dataclass
class Outcome:
    """What the passes did to one frame.

    `op_nodes` are the nodes of the ops, in the order of `sites`; `replaced` has the site of each `Match.node` and of
    each plain node whose value a site now gives.
    `recognised`: what passes know and leave, as the report has it.
    """

    sites: list[Site]
    misses: list[MissedFusion]
    counts: dict[str, int]
    seconds: dict[str, float]
    op_nodes: list[Node]
    replaced: dict[Node, Site] = dataclasses.field(default_factory=dict)
    recognised: list[dict[str, str]] = dataclasses.field(default_factory=list)


# (pass, match, the nodes that now carry match.outputs, site) -> why the rewrite must be undone, or None.
Review = Callable[[Pass, Match, list[Node], Site], MatchFailure | None]


def run_passes(
    captured: Captured,
    config: Config,
    review: Review | None = None,
    trace: Callable[[str, torch.fx.GraphModule], None] | None = None,
) -> Outcome:
    """Run every enabled pass on `captured`, which may have no code yet, in place.

    review: called for each rewrite while the plain nodes still stand beside the new ones; it may fill in the site, and
    refuse the rewrite, which is then undone. trace: called with the graph after each pass that changed it.
    Raises UnfoundedSiteError, under `strict`, for a site whose op is not in the graph at the end; otherwise the site is
    no site but a missed fusion.
    """
    gm = captured.gm
    given = frozenset(gm.graph.nodes)
    semantic_ops()  # registers the ops the passes name
    out = Outcome([], [], {}, {}, [])
    views = _Views(captured, config)
    for p in enabled_passes(config):
        began = time.perf_counter()
        with GraphTransformObserver(gm, f"megacpp_{p.name}"):
            fired = _run(p, views, config, review, out)
        if views.has_changed:
            gm.graph.lint()
        out.counts[p.name] = fired
        out.seconds[p.name] = time.perf_counter() - began
        if fired and trace is not None:
            trace(p.name, gm)
    gm.recompile()  # only now: nobody runs it between passes, and code of thousands of nodes takes its time
    _drop_unrealized_sites(out, given, gm.graph, config.strict)
    return out


class _Views:
    """The view of the graph as it is: passes share it, and its analyses, until one of them changes the graph."""

    def __init__(self, captured: Captured, config: Config) -> None:
        self.captured, self.config = captured, config
        self._view: GraphView | None = None

    @property
    def graph(self) -> torch.fx.Graph:
        return self.captured.gm.graph

    def current(self) -> GraphView:
        if self._view is None:
            c = self.captured
            self._view = GraphView(self.graph, c.fake_mode, c.weights, self.config, c.trained)
        return self._view

    def changed(self) -> None:
        self._view = None

    @property
    def has_changed(self) -> bool:
        """Since it was last looked at."""
        return self._view is None


def _run(p: Pass, views: _Views, config: Config, review: Review | None, out: Outcome) -> int:
    """How often `p` fires.

    All matches are found in one graph and then applied in turn. One that needs what another has taken, as the second of
    two neighbours does, is looked for again in the graph that these leave.
    """
    graph = views.graph
    made: list[tuple[Site, Node, Match]] = []  # (site, its op's node, its match)
    overlaps: dict[Node, MatchFailure] = {}
    place = {node: i for i, node in enumerate(graph.nodes)}  # sites are reported in the order of the plain graph
    most = 0  # sites there can be: a pass that finds ever more of them has an end, too
    while True:
        view = views.current()
        found = _find(p, view, config, out)
        candidates = [one for one in found if not isinstance(one, Recognised)]
        matches = sum(isinstance(one, Match) for one in candidates)
        most = most or matches
        ops = {n for n in (*out.op_nodes, *(op_node for _, op_node, _ in made)) if is_semantic(n)}
        rewriter = Rewriter(view, ops, objection if registered(p) else None)
        new, failures = _apply(p, candidates, rewriter, review)
        made += new
        if drop_dead(graph) or matches:
            views.changed()
        waiting = {failure.node: failure for failure in failures if failure.tag == OVERLAP}
        overlaps |= waiting
        if not waiting or not new or len(made) >= most:
            break
    out.recognised += [recognised(one.kind, one.node) for one in found if isinstance(one, Recognised)]
    failures = [failure for failure in failures if failure.tag != OVERLAP]
    failures += [overlap for node, overlap in overlaps.items() if not node._erased]  # else it is part of a site now
    out.misses += [missed(p.name, failure) for failure in failures]
    for site, op_node, match in sorted(made, key=lambda one: place.get(one[2].node, len(place))):
        out.sites.append(site)
        out.op_nodes.append(op_node)
        out.replaced |= dict.fromkeys((match.node, *match.outputs), site)
    return len(made)


def _apply(
    p: Pass, candidates: Sequence[Match | MatchFailure], rewriter: Rewriter, review: Review | None
) -> tuple[list[tuple[Site, Node, Match]], list[MatchFailure]]:
    """([(site, its op's node, its match)] of the matches that were applied, why the others were not)."""
    made, failures = [], []
    for found in candidates:
        done = found if isinstance(found, MatchFailure) else rewriter.apply(found)
        if isinstance(done, MatchFailure):
            failures.append(done)
            continue
        site = _site(p, done.match, done.op_node)
        refusal = review(p, done.match, done.new, site) if review is not None else None
        if refusal is not None:
            rewriter.undo(done)
            failures.append(refusal)
            continue
        rewriter.keep(done)
        made.append((site, done.op_node, done.match))
    return made, failures


def _find(p: Pass, view: GraphView, config: Config, out: Outcome) -> list[Match | MatchFailure | Recognised]:
    """What `p` finds; nothing where it fails, as one pass's defect must not stop the others. Raises RegistrationError
    for a rule that has changed the graph."""
    before = _written(view.graph) if registered(p) else None
    try:
        found = list(p.find(view))
        if before is not None:
            check_found(p.name, found)
    except Exception as error:
        if config.strict or isinstance(error, MegacppError) and before is None:
            raise
        out.misses.append(MissedFusion(p.name, "", "", "", "internal-error", f"{type(error).__name__}: {error}"[:300]))
        found = []
    if before is not None and before != _written(view.graph):
        raise RegistrationError(f"rule {p.name!r}", "changes the graph in 'find': do that in the match's 'rewrite'")
    return found


def registered(p: Pass) -> bool:
    """Whether `p` is a rule of another package."""
    return getattr(p, "registered", False)


def _written(graph: torch.fx.Graph) -> list[tuple[Node, Any, Any, Any]]:
    return [(n, n.target, n.args, n.kwargs) for n in graph.nodes]


def _site(p: Pass, match: Match, op_node: Node) -> Site:
    node = match.node
    op = name_of(op_node) if op_node.target in semantic_ops() or registered(p) else p.op
    return Site(p.name, op, module_fqn(node), source_line(node), "", "", node=op_node.name, note=match.note)


def _drop_unrealized_sites(out: Outcome, given: Set[Node], graph: torch.fx.Graph, strict: bool) -> None:
    """Leave in `out` the sites whose op a pass has put into the final `graph`, one for each op. given: the nodes from
    before the passes. Whatever nobody reads has been dropped from the graph."""
    left = set(graph.nodes) - given
    sites, op_nodes = out.sites, out.op_nodes
    out.sites, out.op_nodes = [], []
    for site, node in zip(sites, op_nodes, strict=True):
        tag = problem = ""
        if node in out.op_nodes:
            tag, problem = "op-reported-twice", "another site has it"
        elif name_of(node) != site.op or node not in left and not _taken_later(node):
            tag, problem = "op-removed", "no such op of the pass is in the graph"
        if not tag:
            out.sites.append(site)
            out.op_nodes.append(node)
            continue
        error = UnfoundedSiteError(site.pass_name, site.op, site.node, site.fqn, site.source, problem)
        if strict:
            raise error
        out.misses.append(MissedFusion(site.pass_name, site.fqn, site.source, site.node, tag, str(error)))
        out.counts[site.pass_name] -= 1
        out.replaced = {match: at for match, at in out.replaced.items() if at is not site}


def _taken_later(node: Node) -> bool:
    """Whether a later site may have taken what a rule emitted: torch's own ops are for others to match."""
    return node._erased and not is_semantic(node)


def recognised(kind: str, node: Node) -> dict[str, str]:
    """How the report has what has no op, or needs none."""
    return {"kind": kind, "fqn": module_fqn(node), "source": source_line(node)}


def missed(pass_name: str, refusal: MatchFailure) -> MissedFusion:
    """How the report has it."""
    n = refusal.node
    return MissedFusion(pass_name, module_fqn(n), source_line(n), n.name, refusal.tag, refusal.reason)
