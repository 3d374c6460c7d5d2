"""The review of a rewrite while both versions stand: verified where the user asks for it, its saved bytes counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.fakes import FakeTensor
from megacpp_compile.config.options import Config
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.errors import VerificationError
from megacpp_compile.frontend.capture import Captured
from megacpp_compile.fx.differentiated import Differentiated
from megacpp_compile.fx.edit import attribute_of, value
from megacpp_compile.fx.mode_states import mode_states
from megacpp_compile.fx.sizes import nbytes
from megacpp_compile.fx.subgraph import Part, between, described
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.rope.activations import activations
from megacpp_compile.passes._rule import Match, Pass
from megacpp_compile.report import replay, saved_bytes
from megacpp_compile.report.records import MissedFusion, Site

_READERS = 8  # of a site that are listed


class Reviewer:
    """Refuses a rewrite that `verify="each"` finds wrong; notes what a site keeps for backward with `count_saved`, and
    its graph before and after with `keep_graphs`."""

    def __init__(
        self, captured: Captured, example_inputs: Sequence[Any], config: Config, count_saved: bool,
        keep_graphs: bool = False,
    ) -> None:  # fmt: skip
        self.captured, self.config, self.count, self.keep_graphs = captured, config, count_saved, keep_graphs
        self.inputs = replay.concrete(example_inputs)
        self.cache: dict[Any, int | None] = {}
        graph = captured.gm.graph
        self.trained = Differentiated(graph, captured.trained, mode_states(graph)) if count_saved else ()
        self.verified: dict[str, Any] | None = None  # as in `Frame.verified`
        self.drawn: list[tuple[Match, Site]] = []  # sites that draw random numbers
        self.fake = any(isinstance(x, FakeTensor) for x in example_inputs)

    def __call__(self, p: Pass, match: Match, new: list[Node], site: Site) -> MatchFailure | None:
        if any(not isinstance(value(n), torch.Tensor) for n in new):  # sizes, which are neither computed nor saved
            kept = [(o, n) for o, n in zip(match.outputs, new, strict=True) if isinstance(value(n), torch.Tensor)]
            match, new = dataclasses.replace(match, outputs=[o for o, _ in kept]), [n for _, n in kept]
        if match.draws:
            self.drawn.append((match, site))
        elif self.config.verify == "each" and not self.fake:
            refusal = self._verify(p, match, new, site)
            if refusal is not None:
                return refusal
        if self.count or self.keep_graphs:
            self._describe(match, new, site)
        return None

    def unverified(self) -> list[MissedFusion]:
        """What to report of rewrites that `verify="each"` could not look at, or of all of the frame."""
        if self.config.verify != "each":
            return []
        if not self.fake:
            reason = "the site draws random numbers, and others than the code that it replaces"
            return [
                MissedFusion("verify", site.fqn, site.source, match.node.name, "not-verified", reason)
                for match, site in self.drawn
            ]
        reason = "the frame is compiled on fake inputs, as under DDP's optimizer, and no rewrite was replayed on values"
        warn_once(f'verify="each" does nothing here: {reason}')
        return [MissedFusion("verify", "", "", "", "not-verified", reason)]

    def _verify(self, p: Pass, match: Match, new: list[Node], site: Site) -> MatchFailure | None:
        gm = self.captured.gm
        gm.recompile()
        wanted = set(match.inputs)
        values = replay.border_values(gm, self.inputs, wanted)
        others = [n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr") and n not in values]
        holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        values.update({n: v for n, v in zip(holders, self.inputs, strict=True) if n in others})
        values.update({n: attribute_of(gm, n.target) for n in others if n.op == "get_attr"})
        differentiable = set() if match.forward_only else activations(gm.graph, self.captured.weights)
        rows = None if match.row_offsets is None else int(values[match.row_offsets][-1])
        tensor, error, tolerance = replay.compare(
            gm, match.inputs, match.outputs, new, values, differentiable, rows, match.estimated
        )
        if error <= tolerance:
            self._note(p, site, tensor, error, tolerance)
            return None
        if self.config.strict:
            raise VerificationError(p.name, site.fqn, site.source, tensor, error, tolerance)
        return MatchFailure(match.node, "verification", f"{tensor} differs by {error:.2e} (tolerance {tolerance:.0e})")

    def _note(self, p: Pass, site: Site, tensor: str, error: float, tolerance: float) -> None:
        """Count a site that agrees, and keep the one that is the least below its tolerance."""
        known = self.verified or {"sites": 0, "difference": -1.0, "tolerance": 1.0}
        if error / (tolerance or 1) > known["difference"] / (known["tolerance"] or 1):
            worst = {"difference": error, "tolerance": tolerance, "tensor": tensor}
            known = {**known, **worst, "pass_name": p.name, "fqn": site.fqn}
        self.verified = {**known, "sites": known["sites"] + 1}

    def _describe(self, match: Match, new: list[Node], site: Site) -> None:
        """Fill in the graph and the bytes of `site`, or why nobody knows them: what a report says is worth no frame."""
        try:
            parts = [between(self.captured.gm, match.inputs, outputs) for outputs in (match.outputs, new)]
            if self.keep_graphs:
                site.graph = _drawn(*parts)
            if not self.count:
                return
            before, after = map(self._saved, parts)
        except Exception as error:
            site.set_saved(None, None, f"{type(error).__name__}: {error}".splitlines()[0][:100])
        else:
            if before is not None and match.freed_activation is not None:
                before += nbytes(value(match.freed_activation))
            site.set_saved(before, after, "sizes known at run time only" if None in (before, after) else "")

    def _saved(self, part: Part) -> int | None:
        nodes = [*part.inputs, *part.calls]
        asked = tuple((n in self.trained, n.meta.get("recompute")) for n in nodes)
        key = part.code(), _values(part.inputs), asked
        if key not in self.cache:
            self.cache[key] = saved_bytes.saved_bytes(part, self.captured.fake_mode, self.trained)
        return self.cache[key]


def _drawn(before: Part, after: Part) -> dict[str, Any]:
    """`Site.graph`: both versions, and who reads the new one; the old one has the same readers."""
    made = {*after.outputs, *after.calls, *before.calls}
    readers = sorted({user for n in after.outputs for user in n.users} - made)[:_READERS]
    pairs = list(zip(before.outputs, after.outputs, strict=True))
    of_old = {r: [old for old, new in pairs if new in r.all_input_nodes] for r in readers}
    of_new = {r: [new for _, new in pairs if new in r.all_input_nodes] for r in readers}
    return {"before": described(before, of_old), "after": described(after, of_new)}


def _values(nodes: Sequence[Node]) -> tuple[Any, ...]:
    """Equal for nodes whose values are alike, and share memory in the same way."""
    memory: dict[Any, int] = {}
    found: list[tuple[Any, ...]] = []
    for x in map(value, nodes):
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            place = memory.setdefault(x.untyped_storage()._cdata, len(memory)), str(x.storage_offset())
            found.append((str(x), str(x.stride()), str(x.device), *place))
        else:
            found.append((str(x),))
    return tuple(found)
