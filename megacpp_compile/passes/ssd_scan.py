"""Mamba-2's state-space scan, chunk by chunk (arXiv:2405.21060; HF's torch path, the paper's `ssd_minimal_discrete`).

Before: `a = dt * A; L = exp(segsum(a)); Y = (C B^T * L) (x * dt)` within chunks, states of chunks carried by decays of
        their own, `Y + C states`, `+ D * x`, with padding, in any spelling
After:  `y, final_state, states = megacpp.ssd_scan(x, dt, A, B, C, D, initial_state, chunk_size, dtype)`

Safe because the matcher (`matchers/ssd/`) runs the subgraph at small sizes on random operands and compares it with the
recurrence that the op computes; the op computes in float32 or better, and reads x, B and C before they are cast,
repeated for the heads of a group, or padded. The step's softplus, bias and clamp stay in the graph in front of the op.
A scan that starts anew with packed documents gets their numbers as an operand: masks made of a number or a flag a
token are tried with documents that begin anywhere, and what precedes one has to be nothing in it
(`matchers/ssd/packed.py`).
Linear attention whose decay no token changes, in chunks or as one triangle (RetNet, arXiv:2307.08621; lightning
attention, arXiv:2401.04658), is a scan with a step of one: its decays are tables of positions, and what the graph makes
them of has to be in it (`matchers/ssd/constant_rates.py`).
Refused: other recurrences with decays (another mask, no decay within chunks, a state fed without its step, as in gated
linear attention), masks of integers that are no documents' (tag `documents`), intermediates used elsewhere, parts under
different grad or autocast modes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.walks import made_from
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.delta_rule.core import in_corrected_cores
from megacpp_compile.matchers.documents import compared_documents, masked_by_documents
from megacpp_compile.matchers.given_decays import given_decays
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.ssd.atoms import flat
from megacpp_compile.matchers.ssd.chain import joined
from megacpp_compile.matchers.ssd.constant_rates import Retention, find_retentions
from megacpp_compile.matchers.ssd.packed import Reading
from megacpp_compile.matchers.ssd.scan import NoScan, Scan, find_packed_scans, find_scans
from megacpp_compile.passes._rewrites.arrange import Groups, arrange, leading, recurrence
from megacpp_compile.passes._rewrites.token_operands import has_logarithm
from megacpp_compile.passes._rule import Match

name = "ssd_scan"
op = "megacpp::ssd_scan"
after: tuple[str, ...] = ("gated_linear_attention",)  # what it takes is no near miss of this pass

LEAST_CHUNK, MOST_CHUNK = 16, 256
DOCUMENTS_OF = (compared_documents, masked_by_documents)
DOCUMENTS = "decays go by what integers are equal, as packed documents' do, but what is made is no scan of documents"

GIVEN = (
    "the decays of this lightning attention are tables in buffers, which may hold anything; made in forward, of a rate "
    "and positions and a mask of positions alone (`torch.exp(-rate * distance).tril()`), they are known"
)
NO_LOGARITHM = ("decay", "powers of what is no exponential, sigmoid or known number, and may have no logarithm")


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    for attention in find_retentions(view.graph):
        yield _check_retention(view, attention)
    found = list(find_scans(view.graph))
    scans, others = [f for f in found if isinstance(f, Scan)], [f for f in found if isinstance(f, NoScan)]
    for scan in joined(scans):
        yield _check(view, scan)
    known, why = set[Node]().union(*(scan.inside for scan in scans)), list[NoScan]()
    for again in find_packed_scans(view.graph, known):
        if isinstance(again, Scan):
            known |= again.inside
            yield _check(view, again)
        else:
            why.append(again)
    others = [other for other in others if not other.decays & known]
    corrected = in_corrected_cores(view.graph) if others else ()  # a delta rule's decays: what it is, its pass says
    for other in others:
        if any(decay in corrected for decay in other.decays):
            continue
        tried = [other, *(again for again in why if again.decays & other.decays)]
        documents = next(filter(None, (of(one.node) for one in tried for of in DOCUMENTS_OF)), None)
        if documents is None:
            yield MatchFailure(other.node, other.tag, other.reason)
        else:
            reason = max(tried, key=lambda one: (one.tag == "documents", one.stage)).reason
            yield MatchFailure(documents, "documents", f"{DOCUMENTS}: {reason}")
    for product in given_decays(view):
        yield MatchFailure(product, "given-decays", GIVEN)


def _check(view: GraphView, scan: Scan) -> Match | MatchFailure:
    def emit(build: Builder) -> tuple[Node, Groups, Groups]:
        b, t, h, p, n = (tuple(flat(d)) for d in (scan.b, scan.t, scan.h, scan.p, scan.n))
        groups = leading([scan.B, scan.C], h)
        state = scan.initial_state and arrange(build, scan.initial_state, (b, h, p, n))
        documents, state = _documents(build, scan, state)
        node = build(
            torch.ops.megacpp.ssd_scan.default,
            arrange(build, scan.x, (b, t, h, p)),
            arrange(build, scan.dt, (b, t, h)),
            arrange(build, scan.A, (h,)),
            arrange(build, scan.B, (b, t, groups, n)),
            arrange(build, scan.C, (b, t, groups, n)),
            scan.D and arrange(build, scan.D, (h,)),
            state, chunk_size(scan.chunk), value(scan.y.node).dtype, *documents,
        )  # fmt: skip
        return node, (b, t, h, p), (b, h, p, n)

    operands = (scan.x, scan.dt, scan.A, scan.B, scan.C, scan.D, scan.initial_state, scan.documents)
    note = f"documents: {scan.reading.value}" if scan.reading else ""
    return recurrence(view, operands, scan.inside, scan.y, scan.final_states, emit, note)


def _check_retention(view: GraphView, found: Retention) -> Match | MatchFailure:
    root, operands = found.o.node, (found.q, found.k, found.v, found.rate, found.initial_state)
    made = {leaf.node for leaf in operands if leaf is not None}  # what is of numbers has no gradient, whatever the mode
    made |= made_from(made, sorted(found.inside))

    def emit(build: Builder) -> tuple[Node, Groups, Groups]:
        b, t, h, k, v = (found.dims[name] for name in "bthkv")
        groups = leading([found.q, found.k], h)
        values, queries = arrange(build, found.v, (b, t, h, v)), arrange(build, found.q, (b, t, groups, k))
        one = build(aten.new_ones.default, values, [1, 1, 1], dtype=torch.float32)
        steps = build(aten.expand_as.default, one, build(aten.select.int, values, 3, 0))
        state = found.initial_state and arrange(build, found.initial_state, (b, h, v, k))
        node = build(
            torch.ops.megacpp.ssd_scan.default, values, steps, _rate(build, found, steps),
            arrange(build, found.k, (b, t, groups, k)),
            queries if found.scale == 1 else build(aten.mul.Tensor, queries, found.scale),
            None, state, chunk_size(found.chunk), value(root).dtype,
        )  # fmt: skip
        return node, (b, t, h, v), (b, h, v, k)

    match = recurrence(view, operands, made & found.inside, found.o, found.final_states, emit)
    unknown = found.power and found.rate is not None and not has_logarithm(found.rate.node)
    return MatchFailure(root, *NO_LOGARITHM) if isinstance(match, Match) and unknown else match


def _rate(build: Builder, found: Retention, steps: Node) -> Node:
    """The logarithm of the decay, [h]."""
    if found.rate is None:
        none = build(aten.sum.dim_IntList, build(aten.zeros_like.default, steps), [0, 1])
        return build(aten.add.Tensor, none, found.factor)
    rate = arrange(build, found.rate, (found.dims["h"],))
    rate = build.cast(rate, torch.promote_types(value(rate).dtype, torch.float32))
    rate = build(aten.log.default, rate) if found.power else rate
    return rate if found.factor == 1 else build(aten.mul.Tensor, rate, found.factor)


def _documents(build: Builder, scan: Scan, state: Node | None) -> tuple[list[Node], Node | None]:
    """(each token's document, where the scan starts anew with them; the initial state, gone where a document begins
    with the first token, which the op, to which one begins where its number is another than the one before, cannot
    see)."""
    if scan.documents is None or scan.reading is None:
        return [], state
    documents = arrange(build, scan.documents, (tuple(flat(scan.b)), tuple(flat(scan.t))))
    if not scan.reading.flags:
        return [documents], state
    if scan.reading is Reading.CONTINUES:
        documents = build(aten.logical_not.default, documents)
    if state is not None:
        first = build(aten.view.default, build(aten.select.int, documents, 1, 0), [-1, 1, 1, 1])
        state = build(aten.masked_fill.Scalar, state, first, 0)
    return [build(aten.cumsum.default, documents, 1, dtype=torch.int32)], state


def chunk_size(model: int) -> int:
    """The model's, as a power of two the op takes, and the largest for 0, which is not known; it is free, as it decides
    only how the scan is computed."""
    return min(MOST_CHUNK, max(LEAST_CHUNK, 1 << (model - 1).bit_length())) if model else MOST_CHUNK
