"""Sites that DDP's optimizer cuts: near misses that name the buckets and what keeps the graph whole.

The optimizer hands over a piece for each bucket. What would have fired in the graph before the cut says which sites
have parts in more than one of them.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from torch.fx import GraphModule, Node

from megacpp_compile._torch.ddp import Split, split_of
from megacpp_compile.config.options import Config
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.errors import CaptureError, TorchInternalsError
from megacpp_compile.frontend.canonicalize import canonicalize
from megacpp_compile.frontend.capture import capture
from megacpp_compile.fx.provenance import input_name
from megacpp_compile.fx.subgraph import inside
from megacpp_compile.passes._driver import run_passes
from megacpp_compile.passes._rule import Match, Pass
from megacpp_compile.report.records import MissedFusion, Site

TAG = "cut-by-ddp"
REMEDY = (
    "torch._dynamo.config.optimize_ddp = False keeps the graph whole. With megacpp_compile.compile(model) each layer "
    "is a graph then, and its gradients are reduced while the next is differentiated"
)

# Dynamo's graph -> (the bucket in which the site ends, near miss) of each site that is cut.
_known: weakref.WeakKeyDictionary[GraphModule, list[tuple[int, MissedFusion]]] = weakref.WeakKeyDictionary()


def cut_sites(piece: GraphModule, config: Config) -> list[MissedFusion]:
    """The near misses of the sites that end in `piece`, Dynamo's graph, and begin in an earlier one of DDP's pieces."""
    split = split_of(piece)
    if split is None:
        return []
    if split.gm not in _known:
        _known[split.gm] = found = _look(split, config)
        if found:
            warn_once(
                f"DDP's buckets cut the graph inside of {len(found)} of the places that would fuse, first at "
                f"{found[0][1].fqn or found[0][1].source}: {REMEDY}."
            )
    return [miss for index, miss in _known[split.gm] if index == split.index]


def _look(split: Split, config: Config) -> list[tuple[int, MissedFusion]]:
    bucket = {node.name: i for i, nodes in enumerate(split.buckets) for node in nodes}
    names = {str(n.target): input_name(n) for n in split.gm.graph.find_nodes(op="placeholder")}
    params = [[names.get(name, name) for name in own] for own in split.params]
    sites: list[tuple[Site, str, set[int]]] = []

    def review(p: Pass, match: Match, new: list[Node], site: Site) -> None:
        found = {bucket.get(_dynamo_name(node)) for node in inside(match.inputs, match.outputs)}
        sites.append((site, match.node.name, {i for i in found if i is not None}))

    try:
        captured = capture(split.gm, split.inputs)
        canonicalize(captured.gm.graph, captured.fake_mode)
        run_passes(captured, dataclasses.replace(config, strict=False), review)
    except (CaptureError, TorchInternalsError):
        return []  # its pieces say so themselves
    return [
        (max(among), MissedFusion(site.pass_name, site.fqn, site.source, node, TAG, _reason(among, params)))
        for site, node, among in sites
        if len(among) > 1
    ]


def _reason(among: set[int], params: list[list[str]]) -> str:
    order = sorted(among)
    ends = (
        f"bucket {i + 1} of {len(params)} (which ends with {(params[i] or ['no parameter'])[-1]}) and bucket {j + 1} "
        f"(from {(params[j] or ['no parameter'])[0]} on)"
        for i, j in zip(order, order[1:], strict=False)
    )
    return f"DDP cuts the graph inside of it, between {', between '.join(ends)}: {REMEDY}"


def _dynamo_name(node: Node) -> str:
    """The name of the node of Dynamo's graph that a captured one comes from; "" inside of a graph that is called."""
    stack: Any = node.meta.get("source_fn_stack") or ()
    return str(stack[0][0]) if len(stack) == 1 else ""
