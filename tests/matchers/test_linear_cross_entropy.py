"""What losses read of a head's logits: through which rows, scaled how, with which targets; no pass runs here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.matchers.linear_cross_entropy.heads import find_heads, sites
from megacpp_compile.matchers.linear_cross_entropy.inputs import logits_from_outside
from megacpp_compile.matchers.linear_cross_entropy.rows import row_view
from tests.matchers.graphs import trace
from tests.seeds import Draws

draw = Draws(__name__)
X, W, B = draw(2, 3, 4), draw(5, 4), draw(5)
LABELS = torch.tensor([[0, 3, 1], [4, 2, 0]])


def heads(f, *args):
    return list(find_heads(trace(f, *args).graph))


def only(f, *args):
    (head,) = heads(f, *args)
    assert not head.others and not head.failures
    return sites(head, lambda node: False)


@pytest.mark.parametrize(("of_logits", "scale", "softcap"), [
    (lambda y: y, 1.0, None), (lambda y: y * 3 / 4, 0.75, None), (lambda y: -y, -1.0, None),
    (lambda y: 8 * torch.tanh(y / 8), 1.0, 8.0), (lambda y: 8 * torch.tanh(y * 0.25) / 2, 1.0, 4.0),
    (lambda y: -2 * torch.tanh(y), -2.0, 2.0), (lambda y: torch.tanh(y).float(), 1.0, 1.0),
    (lambda y: 8 * torch.sigmoid(y / 2), 1.0, 4.0), (lambda y: 3 - 2 * y + 1, -2.0, None),
    (lambda y: 6 - 8 * torch.sigmoid(y / 2) * 2, -2.0, 8.0),
])  # fmt: skip
def test_scale_and_softcap(of_logits, scale, softcap):
    """scale * y capped at softcap is what the model computes."""

    f = lambda x, w, labels: F.cross_entropy(of_logits(F.linear(x, w)).flatten(0, 1), labels.flatten())  # noqa: E731
    (site,) = only(f, X, W, LABELS)
    assert (site.logits.scale, site.logits.softcap) == (scale, softcap)
    y, z = F.linear(X, W), of_logits(F.linear(X, W))
    capped = y * scale if softcap is None else softcap * torch.tanh(y * scale / softcap)
    torch.testing.assert_close(capped + site.logits.offset, z)


@pytest.mark.parametrize("of_logits", [
    lambda y: torch.tanh(torch.tanh(y)), lambda y: y + y.mean(), lambda y: y.detach(), lambda y: y.flip(-1),
    lambda y: y[..., ::2], lambda y: y.reshape(2, 5, 3).transpose(1, 2), lambda y: y * y.mean(-1, keepdim=True),
    lambda y: y.repeat(1, 1, 2),
])  # fmt: skip
def test_other_values_are_no_logits(of_logits):
    loss = lambda y, labels: F.cross_entropy(y.flatten(0, 1), labels.flatten() % 3)  # noqa: E731
    assert not heads(lambda x, w, labels: loss(of_logits(F.linear(x, w)), labels), X, W, LABELS)


def test_one_site_of_all_that_is_read_of_the_same_rows():
    def f(x, w, labels):
        logits = F.linear(x, w)[:, 1:]
        picked = logits.gather(-1, labels[:, 1:, None])
        return picked, logits.reshape(-1, 5).logsumexp(-1), F.log_softmax(logits, 2).gather(2, labels[:, 1:, None])

    # three slices of labels are three nodes
    found = only(f, X, W, LABELS)
    assert sorted(len(site.outputs) for site in found) == [1, 2]

    def once(x, w, labels):
        logits, own = F.linear(x, w)[:, 1:], labels[:, 1:, None]
        return logits.gather(-1, own), logits.reshape(-1, 5).logsumexp(-1), logits.log_softmax(2).gather(2, own)

    (site,) = only(once, X, W, LABELS)
    assert [o.read.kind for o in site.outputs] == ["logit", "log-probability", "logsumexp"]


def test_sites_by_rows_and_targets():
    def f(x, w, labels):
        logits = F.linear(x, w)
        first = F.cross_entropy(logits[:, :2].transpose(1, 2), labels[:, :2])
        second = F.cross_entropy(logits[:, :2].transpose(1, 2), labels[:, 1:])
        return first, second, F.cross_entropy(logits[:, 1:].transpose(1, 2), labels[:, 1:])

    assert len(only(f, X, W, LABELS)) == 3


def test_rows_one_after_the_other():
    def f(x, w, labels):
        pairs = zip(F.linear(x, w), labels, strict=True)
        return torch.stack([F.log_softmax(one, -1).gather(-1, own[:, None]) for one, own in pairs])

    (site,) = only(f, X, W, LABELS)
    assert [output.part for output in site.outputs] == [0, 1] and len(site.targets) == 1

    (site,) = only(lambda x, w, labels: F.linear(x, w)[1].log_softmax(-1).gather(-1, labels[1, :, None]), X, W, LABELS)
    assert [output.part for output in site.outputs] == [None]


def test_what_else_reads_logits():
    (head,) = heads(lambda x, w, labels: (
        F.cross_entropy((logits := F.linear(x, w)).flatten(0, 1), labels.flatten()), logits.argmax(-1),
    ), X, W, LABELS)  # fmt: skip
    assert [node.target for node in head.others] == [torch.ops.aten.argmax.default]


def test_no_loss():
    """As of a router."""
    assert not heads(lambda x, w: ((scores := F.linear(x, w)).softmax(-1).topk(2)[0], scores.logsumexp(-1)), X, W)


def test_logits_from_outside():
    def f(logits, labels):
        return F.cross_entropy(torch.tanh(logits[:, 1:].float() / 3).flatten(0, 1) * 3, labels[:, 1:].flatten())

    assert len(list(logits_from_outside(trace(f, draw(2, 3, 5), LABELS).graph))) == 1
    layered = trace(lambda x, labels: F.cross_entropy(x.relu().flatten(0, 1), labels.flatten()), draw(2, 3, 5), LABELS)
    assert not list(logits_from_outside(layered.graph))


@pytest.mark.parametrize(("f", "dim", "behind"), [
    (lambda y: y.transpose(1, 2), 2, 1), (lambda y: y.permute(2, 0, 1), 2, 0), (lambda y: y.reshape(6, 5), 2, 1),
    (lambda y: y.unsqueeze(0), 2, 3), (lambda y: y.unsqueeze(-1), 2, 2), (lambda y: y[:, 0], 2, 1),
    (lambda y: y[:, 1:], 2, 2), (lambda y: y[..., 1:], 2, None), (lambda y: y[..., 0], 2, None),
    (lambda y: y.reshape(3, 10), 2, None), (lambda y: y.expand(4, 2, 3, 5), 2, None),
    (lambda y: y.index_select(1, torch.tensor([0, 0])), 2, 2),
    (lambda y: y.index_select(2, torch.tensor([0, 0])), 2, None), (lambda y: y[torch.tensor([1, 0])], 2, 2),
    (lambda y: y[:, :, torch.tensor([1, 0])], 2, None), (lambda y: y.mT.reshape(2, 5, 3, 1), 2, None),
])  # fmt: skip
def test_row_views(f, dim, behind):
    graph = trace(f, draw(2, 3, 5))
    view = row_view(graph.output, dim)
    assert (view and view.behind) == behind
