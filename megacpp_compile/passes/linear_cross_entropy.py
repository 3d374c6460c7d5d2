"""The output projection and its loss without logits (arXiv:2411.09009; gradients in the forward: arXiv:2410.10989).

Before: `logits = linear(x, w, b)`, perhaps with a bias behind it or without words at either end, scaled by numbers or
        by tensors of one element, softcapped, cast, shifted and reshaped; then `cross_entropy(logits, labels)`, also
        of the rows that a mask chooses, or `nll_loss(log_softmax(logits), labels)` with any reduction, or for each
        token `log_softmax(logits).gather(-1, labels)` or `logits.gather(-1, labels) - logsumexp(logits)`, also with
        the log-sum-exp spelled out, and the mean of log-probabilities over words
After:  `loss, lse, dx, dw, db = megacpp.linear_cross_entropy(rows of x, w, b, labels, None, ignore_index, ..,
        "sum", "xw")`, `loss / (labels != ignore_index).sum()` for a mean; of losses of each row "none"

Safe because the op computes the same loss, in float32 or better. Views that choose rows move from the logits to x, and
so do scales that are tensors; rows that a mask leaves out have a label that is ignored. Of a sum, forward makes the
gradients that are trained, which backward multiplies by the gradient of the loss. Where rows count by themselves
(log-probabilities, a z-loss of log-sum-exps), backward makes the logits again.
Refused: logits that anything else reads, as they stay alive then (tag `logits-kept`); losses that weigh classes, or
whose targets are probabilities, or several words a row; what else stands between linear and loss (`between`); a loss
in another frame than its linear; log-probabilities taken in a way not known (`unread`); parts with gradients recorded
and parts without; a loss in float64 of other logits;
on CUDA, logits of less than MIN_BYTES, or, for each sum over them, of less than twice the bytes of a weight that is
trained (`few-tokens`), and rows whose number is known at run time only (`rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import Builder, same_size, value
from megacpp_compile.fx.sizes import nbytes
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.linear_cross_entropy.between import between
from megacpp_compile.matchers.linear_cross_entropy.chosen import by_labels
from megacpp_compile.matchers.linear_cross_entropy.heads import Head, HeadLoss, find_heads, sites
from megacpp_compile.matchers.linear_cross_entropy.inputs import logits_from_outside
from megacpp_compile.matchers.linear_cross_entropy.rows import RowView
from megacpp_compile.matchers.linear_cross_entropy.unread import unread
from megacpp_compile.passes._rewrites.head import emit, inputs_of, sizes_read_elsewhere
from megacpp_compile.passes._rule import Match

name = "linear_cross_entropy"
op = "megacpp::linear_cross_entropy"
after: tuple[str, ...] = ("linear",)

# On CUDA, smaller logits are left as they are: they take little memory, and Inductor fuses what follows them.
MIN_BYTES, SMALL_ON = 64 << 20, "cuda"
# Forward keeps the gradient of the weight, and backward has it twice while it is scaled. Of fewer tokens the logits
# take no more than that, and Inductor is as fast (one H200, 4096 tokens, 4096 and 7168 channels: 1.07 and 1.04 of it).
WEIGHTS = 2
# Elsewhere a head stays plain where forward would keep gradients of so many bytes more than its logits have.
EXCESS = 32 << 10


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    heads = list(find_heads(view.graph))
    pairs = [(head, [by_labels(site) for site in sites(head, view.has_backward)]) for head in heads]
    for head, found in pairs:
        refusal = _refusal(view, head, found) or _few_tokens(head, pairs, view)
        yield from [refusal] if refusal is not None else (_match(view, site) for site in found)
    linears = {head.linear.node for head in heads}
    misses = list(between(view.graph, linears))
    misses += unread(view.graph, {*linears, *(miss.node for miss in misses)})
    yield from (miss for miss in misses if not _small(miss.node))
    for node in logits_from_outside(view.graph):
        if not _small(node.args[0]):  # type: ignore[arg-type]
            yield MatchFailure(node, "another-frame", "the logits are an input of this frame, so they are in memory "
                               "already: compile the loss together with the model that makes them")  # fmt: skip


_ROWS = (
    "the rows are not known to be as many as the targets: choose rows by their labels, "
    "`labels.masked_fill(~mask, -100)` beside all logits"
)


@or_failure
def _refusal(view: GraphView, head: Head, found: list[HeadLoss]) -> MatchFailure | None:
    """Why `head` stays as it is."""
    node = head.linear.node
    if head.failures:
        return head.failures[0]
    loss = next((read.node for read in head.reads), node)
    unknown = value(node).device.type == SMALL_ON and free_unbacked_symbols(value(node))  # be they few or many
    refuse_if(unknown, loss, "rows", _ROWS)
    size = f"{nbytes(value(node)) / 2**20:.1f} MiB of logits, of use from {MIN_BYTES >> 20} MiB"
    refuse_if(_small(node), loss, "small", size)
    refuse_if(head.others, loss, "logits-kept", _kept(head.others))
    refuse_if(not all(map(_target_a_row, found)), loss, "rows", _ROWS)
    several = any(len({output.read.part for output in site.outputs}) > 1 for site in found)
    refuse_if(several, loss, "ranks", "beside a loss over all ranks' words one over a rank's own reads the logits")
    inside, dtype = [n for site in found for n in site.inside()], value(node).dtype
    wider = any(getattr(value(n), "dtype", dtype) == torch.float64 != dtype for n in inside)
    refuse_if(wider, loss, "dtype", f"logits in {dtype} and their loss in float64")
    apart = len({view.mode_states[n].grad for n in inside}) > 1
    refuse_if(apart, loss, "region", "part of it runs with gradients recorded, and part without")
    return None


@or_none
def _few_tokens(
    head: Head, pairs: Sequence[tuple[Head, list[HeadLoss]]], view: GraphView
) -> MatchFailure | None:
    """Logits of less than the gradients that are kept for them. Of checkpointed losses, a chunk of tokens each, plain
    code has the logits of one at a time, and all would keep gradients."""
    logits, weight, x = value(head.linear.node), head.linear.w, head.linear.x
    kept = sum(
        site.summed for other, found in pairs for site in found
        if other is head or other.linear.w is weight and _checkpointed(other) and _checkpointed(head)
    )  # fmt: skip
    NoMatch.when(not view.has_backward(weight) or not kept or free_unbacked_symbols(logits))
    size, least, what = nbytes(logits), kept * WEIGHTS * nbytes(value(weight)), "the weight's gradient is"
    if logits.device.type != SMALL_ON:
        rows = nbytes(value(x)) if view.has_backward(x) else 0
        least, what = kept * nbytes(value(weight)) + rows - EXCESS, "gradients are"
    NoMatch.when(size >= least)
    reason = (
        f"{size / 2**20:.1f} MiB of logits, of use from {least / 2**20:.1f} MiB: {what} kept from forward to backward "
        "in their place"
    )
    return MatchFailure(head.reads[0].node, "few-tokens", reason)


def _checkpointed(head: Head) -> bool:
    return "ac_graph_id" in head.linear.node.meta


def _kept(readers: Sequence[Node]) -> str:
    """Why logits that `readers` read stay in memory, and what to do where they are returned."""
    others = sorted({_name(reader) for reader in readers if reader.op != "output"})
    if others:
        return f"beside the loss {', '.join(others)} read the logits, so they stay in memory"
    return (
        "the frame returns the logits beside the loss, so they stay in memory: return the loss alone, or name that "
        'output in options={"drop_outputs": ("logits",)}'
    )


def _target_a_row(site: HeadLoss) -> bool:
    """Whether each row has a target. Rows of logits that a mask chooses would get a number of their own, which no check
    equates with that of the labels; of hidden states, the plain loss has checked that they are as many."""
    given = sum(value(target).numel() for target in site.targets)
    fake, moves = value(site.logits.node), site.logits.moves()
    if free_unbacked_symbols(fake) and any(free_unbacked_symbols(value(n)) for n in _chosen(moves)):
        return False
    if moves and moves[-1].node.target is torch.ops.aten.gather.default and not free_unbacked_symbols(fake):
        return True  # the rows that it has indices for
    return not site.targets or same_size(given * fake.shape[site.logits.dim], fake.numel())


def _chosen(moves: tuple[RowView, ...]) -> Iterator[Node]:
    """The views among `moves` that choose rows by what is known at run time only."""
    return (view.node for view in moves if not free_unbacked_symbols(value(view.source)))


def _small(logits: Node) -> bool:
    fake = value(logits)
    return fake.device.type == SMALL_ON and nbytes(fake) < MIN_BYTES


def _name(node: Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")


def _match(view: GraphView, site: HeadLoss) -> Match | MatchFailure:
    loss, linear, inputs = site.outputs[0].read.node, site.logits.linear.node, inputs_of(site)
    states = view.mode_states
    root = linear if states[linear] == states[loss] else loss  # the report names the head where it may
    sizes = sizes_read_elsewhere(site, inputs)
    outputs = [*(output.read.node for output in site.outputs), *site.blanks, *sizes]

    def rewrite(build: Builder) -> tuple[Node, list[Node]]:
        return emit(build, site, sizes, view.differentiated if states[root].grad else ())

    return Match(root, inputs, outputs, rewrite)
