"""Scans that start anew with packed documents, however they are written, become the op with the documents' numbers;
what is masked otherwise stays, with a reason."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.scans import PlainMamba2, chunks, einsums, one_triangle, padded, segment_sums, to_heads
from tests.frames import check_graph

from .conditions import cases, op_of, sampled
from .contract import assert_fires, assert_refused
from .test_packed_conv import multiplied

NAME = "ssd_scan"
NOTHING = -1e4  # the logarithm of a decay that leaves nothing


def begins_of(numbers, first=False):
    return F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=first)


def quadratic(x, dt, A, B, C, D, decay):
    """decay [b, l, s, h]"""
    scores = torch.einsum("blgn,bsgn->blsg", C, B).repeat_interleave(x.shape[2] // B.shape[2], -1) * decay * dt[:, None]
    return torch.einsum("blsh,bshp->blhp", scores, x) + D[:, None] * x, x


def masked(seen):
    """The quadratic form, with decays multiplied by what `seen(numbers)` makes of the documents' [b, l, s]."""

    def form(x, dt, A, B, C, D, state, size, numbers):
        t, sums = x.shape[1], (A * dt).cumsum(1)
        decay = torch.exp(sums[:, :, None] - sums[:, None]) * torch.ones(t, t).tril()[None, :, :, None]
        return quadratic(x, dt, A, B, C, D, decay * seen(numbers, x)[..., None])

    return form


def masked_exponents(x, dt, A, B, C, D, state, size, cu_seqlens):
    """Positions and documents in one mask, the latter's numbers made of offsets: one row for the batch."""
    t = x.shape[1]
    sums = (A * dt).cumsum(1)
    numbers = torch.searchsorted(cu_seqlens, torch.arange(t), right=True)
    hidden = ~(torch.ones(t, t, dtype=torch.bool).tril() & (numbers[:, None] == numbers))
    decay = (sums[:, :, None] - sums[:, None]).masked_fill(hidden[..., None], -torch.inf).exp()
    return quadratic(x, dt, A, B, C, D, decay)


def cut_sums(x, dt, A, B, C, D, state, size, numbers):
    """Sums over segments of logarithms that are minus infinity where a document begins."""
    a = (A * dt).masked_fill(begins_of(numbers)[..., None], -torch.inf)
    return quadratic(x, dt, A, B, C, D, segment_sums(a.permute(0, 2, 1)).exp().permute(0, 2, 3, 1))


def changed(change, *operands):
    """The chunked form of which `change` makes other logarithms of decays, in both places where they are added up."""
    return einsums(*operands, lambda a: segment_sums(change(a)), lambda a: change(a).cumsum(-1))


def decays_added(x, dt, A, B, C, D, state, size, numbers, fill=NOTHING):
    """What comes before a document's first token is decayed away."""
    reset = chunks(torch.where(begins_of(numbers), fill, 0.0), size)[:, None]
    return changed(lambda a: a + reset, x, dt, A, B, C, D, state, size)


def products_added(x, dt, A, B, C, D, state, size, numbers):
    """A flag times a large number, made twice, the first token's flag set."""

    def reset(a):
        return a + chunks(begins_of(numbers, True).to(dt.dtype) * NOTHING, size)[:, None]

    return changed(reset, x, dt, A, B, C, D, state, size)


def kept(x, dt, A, B, C, D, state, size, numbers):
    """A flag of tokens that are of the document before them."""
    same = chunks(numbers == F.pad(numbers[:, :-1], (1, 0), value=-1), size)[:, None]
    return changed(lambda a: torch.where(same, a, NOTHING), x, dt, A, B, C, D, state, size)


def chunks_masked(x, dt, A, B, C, D, state, size, numbers, entering=True):
    """The chunked form with decays masked by equal numbers: within chunks, into, out of, and over them."""
    b, t, h, p = x.shape
    of = chunks(numbers, size)
    ends = torch.cat([of[:, 0, :1], of[..., -1]], 1)  # of what enters each chunk, and of what leaves the last
    X, a, B, C = (chunks(z, size) for z in (x * dt.unsqueeze(-1), dt * A, to_heads(B, h), to_heads(C, h)))
    a = a.permute(0, 3, 1, 2)
    sums = torch.cumsum(a, -1)
    within = segment_sums(a).masked_fill((of[..., :, None] != of[..., None, :])[:, None], -torch.inf).exp()
    y = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, within, X)
    out = torch.exp(sums[..., -1:] - sums) * (of == of[..., -1:])[:, None]
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, out, X)
    first = torch.zeros_like(states[:, :1]) if state is None else state.unsqueeze(1)
    over = torch.exp(segment_sums(F.pad(sums[..., -1], (1, 0)))) * (ends[..., :, None] == ends[..., None, :])[:, None]
    states = torch.einsum("bhzc,bchpn->bzhpn", over, torch.cat([first, states], 1))
    states, final = states[:, :-1], states[:, -1]
    into = torch.exp(sums)
    if entering:
        into = into * (of == ends[:, :-1, None])[:, None]
    y = y + torch.einsum("bclhn,bchpn,bhcl->bclhp", C, states, into)
    return y.reshape(b, t, h, p) + x * D.unsqueeze(-1), final


def positions_filled(x, dt, A, B, C, D, state, size, positions, fill=NOTHING):
    """The logarithms of decays are overwritten where a document begins."""
    cut = lambda a: a.masked_fill(chunks(positions == 0, size)[:, None], fill)  # noqa: E731
    return changed(cut, x, dt, A, B, C, D, state, size)


class Packed(PlainMamba2):
    """Its form takes integers that tell documents apart, behind all else."""

    def forward(self, u, integers, *state):
        plain, self.form = self.form, lambda *args: plain(*args, integers)
        try:
            return super().forward(u, *state)
        finally:
            self.form = plain


NUMBERS = [[0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3], [0] * 5 + [1] * 7]
POSITIONS = [[0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 1, 2], [*range(5), *range(7)]]
OFFSETS = [0, 3, 4, 9, 12]


def packed(form, integers=NUMBERS, **options):
    """In float64, where sums of -1e4 leave the digits that the other logarithms are compared in."""
    module = Packed(form, **options).double()
    u, *state = module.example_inputs(len(integers[0]) if isinstance(integers[0], list) else 12, dtype=torch.float64)
    return module, (u, torch.tensor(integers), *(s.detach().double().requires_grad_() for s in state))


def looped_over_chunks(x, dt, A, B, C, D, state, size, numbers):
    """Batched products and a loop over chunks, the last one padded."""
    b, t, h, p = x.shape
    behind = (size - t % size) % size
    begins = torch.cat([torch.ones_like(numbers[:, :1], dtype=torch.bool), numbers[:, 1:] > numbers[:, :-1]], 1)
    a = dt * A - 1e4 * begins[..., None].to(dt.dtype)
    X, B, C = (padded(z, behind) for z in (x * dt[..., None], to_heads(B, h), to_heads(C, h)))
    X, B, C = (chunks(z, size).permute(0, 3, 1, 2, 4) for z in (X, B, C))
    a = chunks(padded(a, behind), size).permute(0, 3, 1, 2)
    sums = a.cumsum(-1)
    total = sums[..., -1]
    y = segment_sums(a).exp() * (C @ B.transpose(-1, -2)) @ X
    added = ((total[..., None] - sums).exp()[..., None] * X).transpose(-1, -2) @ B
    state, entered = torch.zeros(b, h, p, B.shape[-1], dtype=x.dtype), []
    for c in range(sums.shape[2]):
        entered.append((C[:, :, c] @ state.transpose(-1, -2)) * sums[:, :, c].exp()[..., None])
        state = total[:, :, c].exp()[..., None, None] * state + added[:, :, c]
    y = (y + torch.stack(entered, 2)).permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :t]
    return y + D[:, None] * x, state


def loop_masked(x, dt, A, B, C, D, state, size, numbers):
    """A loop over chunks that is masked by equal numbers."""
    b, t, h, p = x.shape
    X, B, C = (x * dt[..., None], to_heads(B, h), to_heads(C, h))
    X, B, C = (chunks(z, size).permute(0, 3, 1, 2, 4) for z in (X, B, C))
    of, position = chunks(numbers, size), torch.arange(size)
    sums = chunks(dt * A, size).permute(0, 3, 1, 2).cumsum(-1)
    seen = (position[:, None] >= position) & (of[..., :, None] == of[..., None, :])[:, None]
    y = torch.where(seen, sums[..., :, None] - sums[..., None, :], -torch.inf).exp() * (C @ B.transpose(-1, -2)) @ X
    total = sums[..., -1]
    out = (total[..., None] - sums).exp() * (of == of[..., -1:])[:, None]
    added = (out[..., None] * X).transpose(-1, -2) @ B
    before, entered, state = of[:, 0, 0], [], torch.zeros(b, h, p, B.shape[-1], dtype=x.dtype)
    for c in range(t // size):
        into = sums[:, :, c].exp() * (of[:, c] == before[:, None])[:, None]
        entered.append((C[:, :, c] @ state.transpose(-1, -2)) * into[..., None])
        stays = (of[:, c, -1] == before)[:, None, None, None]
        state = total[:, :, c].exp()[..., None, None] * state * stays + added[:, :, c]
        before = of[:, c, -1]
    y = (y + torch.stack(entered, 2)).permute(0, 2, 3, 1, 4).reshape(b, t, h, p)
    return y + D[:, None] * x, state


def differences(numbers, x):
    """Differences of numbers that are 0; the numbers are counted in the graph."""
    numbers = (numbers == 0).cumsum(1)
    return ((numbers[:, :, None] - numbers[:, None]) == 0).to(x.dtype)


FORMS = {
    "masked_decays": (masked(lambda n, _: n[:, :, None] == n[:, None]), NUMBERS),
    "masked_exponents": (masked_exponents, OFFSETS), "cut_sums": (cut_sums, NUMBERS),
    "decays_added": (decays_added, NUMBERS),
    "products_added": (products_added, NUMBERS), "kept": (kept, NUMBERS), "chunks_masked": (chunks_masked, NUMBERS),
    "positions_filled": (positions_filled, POSITIONS), "differences": (masked(differences), POSITIONS),
    "loop_masked": (loop_masked, NUMBERS), "looped_over_chunks": (looped_over_chunks, [row[:10] for row in NUMBERS]),
}


@sampled(9, "form", FORMS)
def test_spellings(form):
    """Outputs and gradients are eager's to 1e-12."""
    outcome = check_graph(*packed(*FORMS[form]))
    assert outcome.counts[NAME] == 1, outcome.misses


@sampled(3, "form", ["products_added", "kept", "chunks_masked"])
def test_states_in_and_out(form):
    """A flag of the first token clears the initial state, as in the model; the final state is the last document's."""
    outcome = check_graph(*packed(*FORMS[form], given=True, state=True))
    assert outcome.counts[NAME] == 1, outcome.misses


def test_compiled():
    """The documents' numbers are the op's operand, nothing of their masks stays behind, and the report says what is taken
    for given."""
    module = Packed(chunks_masked)
    frames = assert_fires(NAME, module, (*module.example_inputs(), torch.tensor(NUMBERS)), dynamo=True)
    assert op_of(frames, NAME).args[-1].op == "placeholder"
    assert "one number are one document" in frames.analyses[0].outcome.sites[0].note
    assert torch.ops.aten.eq.Tensor not in {n.target for n in frames.graph.graph.nodes}


def convolved_before(x, dt, A, B, C, D, state, size, numbers):
    """x behind a convolution that the same numbers cut."""
    weight = torch.linspace(-1, 1, 4 * x[0, 0].numel(), dtype=x.dtype).view(-1, 4)
    mixed = multiplied(x.flatten(2), weight, weight[:, 0], numbers)
    return chunks_masked(mixed.view(x.shape), dt, A, B, C, D, state, size, numbers)


def test_beside_a_convolution():
    outcome = check_graph(*packed(convolved_before))
    assert outcome.counts["causal_conv1d"] == outcome.counts[NAME] == 1, outcome.misses


# of the same or the next document: no document's end
window = masked(lambda n, _: (n[:, :, None] == n[:, None]) | (n[:, :, None] == n[:, None] + 1))
NEAR = {
    "documents": {
        "small, not nothing": (partial(decays_added, fill=-30.0), NUMBERS),
        "filled with a small number": (partial(positions_filled, fill=-30.0), POSITIONS),
        "states enter all rows": (partial(chunks_masked, entering=False), NUMBERS),
        "window": (window, NUMBERS),
    },
    "no-step": {"nothing decayed away": (partial(positions_filled, fill=0.0), POSITIONS)},
}


@cases(NEAR, 3)
def test_refuses(tag, body):
    assert_refused(NAME, tag, *packed(*body))


def test_a_small_decay_is_told_of_as_such():
    frames = assert_refused(NAME, "documents", *packed(*NEAR["documents"]["small, not nothing"]))
    assert "made small in it, not nothing" in frames.misses[0].reason


def test_masks_of_several_tensors():
    """Which of them begins a document is not tried; the reason says that there are several."""

    class Twice(PlainMamba2):
        def forward(self, u, numbers, others):
            equal = lambda n: n[:, :, None] == n[:, None]  # noqa: E731
            self.form = lambda *args: masked(lambda n, _: equal(n) & equal(others))(*args, numbers)
            return super().forward(u)

    module = Twice().double()
    u, numbers = packed(masked(None))[1]
    frames = assert_refused(NAME, "documents", module, (u, numbers, numbers.flip(0)))
    assert "several tensors" in frames.misses[0].reason


def test_a_mask_of_positions_is_no_document():
    """Positions compared with each other come from no input."""

    def equal_positions(x, dt, A, B, C, D, state, size):
        position = torch.arange(x.shape[1])
        y, final = one_triangle(x, dt, A, B, C, D, state, size)
        return y * (position[:, None] == position).any(-1)[None, :, None, None], final

    module = PlainMamba2(equal_positions)
    assert_fires(NAME, module, module.example_inputs())


class MaskedDelta(nn.Module):
    """A delta rule whose tokens are one chunk, its decays times what `seen(numbers)` makes of documents."""

    def __init__(self, seen):
        super().__init__()
        torch.manual_seed(0)
        self.seen, self.into, self.out = seen, nn.Linear(5, 24), nn.Linear(8, 5)

    def forward(self, x, numbers):
        q, k, v, g, beta = self.into(x).split([6, 6, 8, 2, 2], -1)
        q, k, v = (a.view(*x.shape[:2], 2, -1).transpose(1, 2) for a in (q, k, v))
        sums, beta = (-F.softplus(g)).transpose(1, 2).cumsum(-1), beta.sigmoid().transpose(1, 2)[..., None]
        decays = (sums[..., :, None] - sums[..., None, :]).tril().exp().tril()
        decays = self.seen(decays, numbers[:, None, :, None] == numbers[:, None, None, :])
        inverse = torch.eye(x.shape[1]) + ((beta * k) @ k.transpose(-1, -2) * decays).tril(-1)
        new = torch.linalg.solve_triangular(inverse, beta * v, upper=False)
        return self.out(((q @ k.transpose(-1, -2) * decays) @ new).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("seen", [lambda d, same: d * same, lambda d, same: d.masked_fill(~same, 0.0)])
def test_masked_delta_rules(seen):
    """It takes documents by its gates alone; a pass says so, and none that what is masked is another recurrence."""
    x = torch.randn(1, 8, 5, requires_grad=True)
    frames = check_graph(MaskedDelta(seen), (x, torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])))
    assert {m.tag for m in frames.misses} == {"documents"}, frames.misses
    assert check_graph(MaskedDelta(lambda d, same: d), (x, torch.tensor([[0] * 8]))).counts["gated_delta_rule"] == 1
