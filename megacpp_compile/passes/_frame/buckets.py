"""Sites that DDP's optimizer cuts: it is made to cut between them, and what is cut all the same is a near miss that
names the buckets and what keeps the graph whole.

The optimizer hands over a piece for each bucket. What would have fired in the graph before the cut says which sites
have parts in more than one of them. Where there are any, Dynamo traces the frame again, and buckets go on up to where
the next call belongs to no site that has begun. What DDP itself reduces together stays as it is: gradients of a piece
are there at once, and a bucket of DDP's is reduced as soon as it is full.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node

from megacpp_compile._torch.ddp import Split, keep_together, split_of
from megacpp_compile.config.options import Config
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.frontend.canonicalize import canonicalize
from megacpp_compile.frontend.capture import capture
from megacpp_compile.frontend.unbacked_shapes import Retrace
from megacpp_compile.fx.provenance import input_name
from megacpp_compile.fx.subgraph import inside
from megacpp_compile.passes._driver import run_passes
from megacpp_compile.passes._rule import Match, Pass
from megacpp_compile.report import log
from megacpp_compile.report.records import MissedFusion, Site

TAG = "cut-by-ddp"
REMEDY = (
    "torch._dynamo.config.optimize_ddp = False keeps the graph whole. With the option repeated_blocks, or "
    "megacpp_compile.compile(model), each layer is a graph then, and its gradients are reduced while the next is "
    "differentiated"
)


@dataclasses.dataclass
class _Cuts:
    """What would have fired in one graph. sites: the bucket in which a site ends, the site and, where it begins in an
    earlier bucket, the near miss. told: whether a warning said so."""

    sites: list[tuple[int, Site, MissedFusion | None]]
    told: bool = False


# What would fire in a graph: each site, the node that matched, and the calls of Dynamo's graph that it is made of.
_Found = list[tuple[Site, str, set[str]]]
# By the optimizer, which cuts the graphs that one frame is traced to, and by Dynamo's graph before it was cut.
_found: weakref.WeakKeyDictionary[Any, _Found] = weakref.WeakKeyDictionary()
_known: weakref.WeakKeyDictionary[GraphModule, _Cuts] = weakref.WeakKeyDictionary()


def follow_sites(piece: GraphModule, config: Config) -> None:
    """Have DDP's optimizer cut the graph that `piece` is the first one of again, between sites, where it cuts any."""
    split = split_of(piece)
    if split is None or split.index or not any(miss for *_, miss in _cuts_of(split, config).sites):
        return
    order = [node.name for node in split.gm.graph.nodes]
    place = {name: i for i, name in enumerate(order)}
    behind = set[str]()
    for *_, names in _found[split.optimizer]:
        places = [place[name] for name in names]
        behind.update(order[min(places) + 1 : max(places) + 1])
    if keep_together(split, behind):
        raise Retrace(restart_reason="megacpp: DDP's buckets are to end between sites")


def cut_sites(piece: GraphModule, fired: Sequence[Site], config: Config) -> list[MissedFusion]:
    """The near misses of sites that end in `piece`, Dynamo's graph, and begin in an earlier one of DDP's pieces, as far
    as there are fewer among those that `fired` here: what is left of a site may be one."""
    split = split_of(piece)
    if split is None:
        return []
    cuts = _cuts_of(split, config)
    here = [(site, miss) for index, site, miss in cuts.sites if index == split.index]
    lacking = Counter(_place(site) for site, _ in here) - Counter(map(_place, fired))
    found = []
    for site, miss in here:
        if miss is not None and lacking[_place(site)] > 0:
            lacking[_place(site)] -= 1
            found.append(miss)
    if found and not cuts.told:
        cuts.told = True
        where = found[0].fqn or found[0].source
        warn_once(f"DDP's buckets cut the graph inside of places that would fuse, first at {where}: {REMEDY}.")
    return found


def _cuts_of(split: Split, config: Config) -> _Cuts:
    if split.gm not in _known:
        if split.optimizer not in _found:
            _found[split.optimizer] = _look(split, config)
        bucket = {node.name: i for i, nodes in enumerate(split.buckets) for node in nodes}
        inputs = {str(n.target): input_name(n) for n in split.gm.graph.find_nodes(op="placeholder")}
        params = [[inputs.get(name, name) for name in own] for own in split.params]
        sites = []
        for site, node, names in _found[split.optimizer]:
            if among := {bucket[name] for name in names if name in bucket}:
                miss = _miss(site, node, _reason(among, params)) if len(among) > 1 else None
                sites.append((max(among), site, miss))
        _known[split.gm] = _Cuts(sites)
    return _known[split.gm]


def _place(one: Site) -> tuple[str, str, str]:
    return one.pass_name, one.fqn, one.source


def _look(split: Split, config: Config) -> _Found:
    # Dynamo renames a node behind the variable that its value is assigned to, and leaves its source as it was.
    calls = {_source(node): node.name for nodes in split.buckets for node in nodes}
    sites: _Found = []

    def review(p: Pass, match: Match, new: list[Node], site: Site) -> None:
        sources = map(_source, inside(match.inputs, match.outputs))
        if names := {calls[source] for source in sources if source in calls}:
            sites.append((site, match.node.name, names))

    try:
        captured = capture(split.gm, split.inputs)
        canonicalize(captured.gm.graph, captured.fake_mode)
        run_passes(captured, dataclasses.replace(config, strict=False), review)
    except Exception as error:  # its pieces say so themselves, and a defect here must not become the user's
        log.logger.info("nobody knows which sites DDP cuts: %s: %s", type(error).__name__, str(error)[:200])
        return []
    return sites


def _miss(site: Site, node: str, reason: str) -> MissedFusion:
    return MissedFusion(site.pass_name, site.fqn, site.source, node, TAG, reason)


def _reason(among: set[int], params: list[list[str]]) -> str:
    order = sorted(among)
    ends = (
        f"bucket {i + 1} of {len(params)} (which ends with {(params[i] or ['no parameter'])[-1]}) and bucket {j + 1} "
        f"(from {(params[j] or ['no parameter'])[0]} on)"
        for i, j in zip(order, order[1:], strict=False)
    )
    return f"DDP cuts the graph inside of it, between {', between '.join(ends)}: {REMEDY}"


def _source(node: Node) -> str:
    """What Dynamo called the call that a node of its graph, or a captured one, comes from; its name where it says
    nothing of it, "" inside of a graph that is called."""
    stack: Any = node.meta.get("source_fn_stack") or ()
    return str(stack[0][0]) if len(stack) == 1 else "" if stack else node.name
