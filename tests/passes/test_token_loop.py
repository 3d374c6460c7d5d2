"""Loops over tokens are found however their step is written, and nothing beside them; results and gradients stay
eager's."""

from __future__ import annotations

import dataclasses
import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacpp_compile.matchers.token_loops.proof import TokenLoop, find_token_loops
from tests.corpus.delta.block import LINEAR, TOKENS, PlainDelta, Spelling
from tests.corpus.delta.near_misses import NEAR_DELTA_RULES, NEAR_LINEAR
from tests.corpus.delta.parts import no_norm, repeated, zeros_for
from tests.frames import check, check_graph, run
from tests.matchers.graphs import trace

from .conditions import assert_serves, conditions, op_of, sampled, shown
from .contract import assert_fires, assert_refused
from .deltas import OfItsInputs, by_token, delta, fires_dynamic

NAME = "token_loop"
NEAR_RULES = {**NEAR_DELTA_RULES, **NEAR_LINEAR}


NEAR = {
    "read_before_the_update": "differs", "decayed_after_the_correction": "differs", "all_forgotten": "differs",
    "corrected_by_the_query": "differs", "weight_on_the_value_alone": "differs", "squashed": "op", "state_normed": "op",
    "bonus": "differs", "gate_of_each_value": "roles", "values_a_token_late": "steps",
}  # fmt: skip


def block(form=TOKENS["sums_of_products"], length=3, **kwargs):
    return delta(form, length, **kwargs)


@sampled(5, "name", TOKENS)
def test_spelling(name):
    assert_fires(NAME, *block(TOKENS[name]))


@pytest.mark.parametrize("given", [False, True])
def test_a_rate_that_no_token_changes_is_a_scan_with_a_step_of_one(given):
    assert op_of(assert_fires(NAME, *block(LINEAR["rate_by_token"], given=given, state=given)), "ssd_scan")


@sampled(5, "given", [False, True])
@pytest.mark.parametrize("name", ["by_token", "by_token_channel_gates"])
def test_linear_attention(name, given):
    assert op_of(assert_fires(NAME, *block(LINEAR[name], given=given, state=given)), "gated_linear_attention")


@pytest.mark.parametrize("length", [2, 17])
def test_lengths(length):
    with torch.no_grad():
        frames = assert_fires(NAME, *block(TOKENS["no_gate"], length))
    assert op_of(frames, "gated_delta_rule").args[9] == (16 if length <= 16 else 32)


@pytest.mark.parametrize("name", ["bonus", "read_before_the_update"])
def test_refuses_what_reads_the_state_before_its_token(name):
    """RWKV-6, for one. What the last token adds is read by nobody, so that the last step lacks it."""
    assert_refused(NAME, "before-update", *block(Spelling(NEAR_RULES[name]), 4))


@sampled(3, "name", ["sums_of_products", "einsums_channel_gates", "no_gate"])
def test_states_in_and_out_in_float64(name):
    """Where a state comes from and the dtype are no matter of the spelling: one of each kind of gate."""
    assert_fires(NAME, *block(TOKENS[name], dtype=torch.float64, given=True, state=True))


@pytest.mark.parametrize("name", ["sums_of_products", "no_gate"])
def test_bfloat16(name):
    frames = run(*block(TOKENS[name], dtype=torch.bfloat16))
    assert frames.counts[NAME] == 1, frames.misses


test_conditions = conditions(
    NAME, inference=lambda: block(given=True, state=True), autocast=lambda: block(TOKENS["einsums"]),
    autocast_inside=lambda: block(TOKENS["einsums"]),
    disabled=lambda: (*block(TOKENS["no_gate"], 2), "gated_delta_rule"),  # a loop of few tokens is also one of chunks
    one_head=lambda: block(groups=1, heads=1), one_sequence=lambda: block(TOKENS["einsums"], batch=1),
    two_layers=lambda: (nn.Sequential(PlainDelta(TOKENS["einsums"]), PlainDelta(TOKENS["no_gate"])), block()[1], 2),
    no_norm=lambda: block(dataclasses.replace(TOKENS["sums_of_products"], norm=no_norm)),
)


def test_dynamic_batches():
    """The number of tokens is a number, as the loop is unrolled; that of sequences is not."""
    module, args = block(TOKENS["no_gate"], 2, batch=3)
    torch._dynamo.mark_dynamic(args[0], 0)
    frames = check(module, args)
    assert frames.counts[NAME] == 1, frames.misses


@pytest.mark.end_to_end
@sampled(2, "name", ["by_token", "products_in_front", "no_gate", "turned_by_rank_one"])
def test_inputs_of_a_second_length(name):
    """A loop over the tokens of one input fixes how many it has, and leaves that of the others a symbol."""
    module = OfItsInputs({**LINEAR, **TOKENS}[name])
    frames = run(module, module.example_inputs(3), fullgraph=False)
    assert_serves(frames, module, module.example_inputs(4), module.example_inputs(5), graphs=3)
    assert [analysis.frame.passes[NAME] for analysis in frames.analyses] == [1, 1, 1], frames.misses


@pytest.mark.parametrize("name", ["rate_by_token", "einsums_channel_gates"])
def test_everything_dynamic(name):
    fires_dynamic(NAME, *block({**LINEAR, **TOKENS}[name], 2, groups=1))


def update(state, q, k, v, decay, beta):
    state = (decay[..., None, None] if decay.dim() == 2 else decay[..., None]) * state  # of heads, or of channels
    new = beta[..., None] * (v - torch.einsum("bhkv,bhk->bhv", state, k))
    state = state + torch.einsum("bhk,bhv->bhkv", k, new)
    return torch.einsum("bhkv,bhk->bhv", state, q), state


def normed_within(state, q, k, v, decay, beta):
    return update(state, F.normalize(q, dim=-1), k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6), v, decay, beta)


def clamped_within(state, q, k, v, decay, beta):
    return update(state, q, k, v.clamp(-1, 1), decay, beta.sigmoid())


@pytest.mark.parametrize("step", [normed_within, clamped_within], ids=shown)
def test_what_a_step_does_to_its_operands_stays_in_front_of_the_op(step):
    assert_fires(NAME, *block(by_token(step)))


def heads_merged(out, _):
    return torch.cat(out, 1).unflatten(1, (len(out), -1))


def outputs_flat(out, like):
    return torch.cat([o.flatten(1) for o in out], 1).view(like.shape)


def kept_positions(out, _):
    return torch.cat([o[:, None] for o in out], 1)


def chunks_joined(out, _):
    return torch.cat([torch.stack(out[i : i + 2], 1) for i in range(0, len(out), 2)], 1)


def chunks_written(out, like):
    parts = []
    for i in range(0, len(out), 2):
        part = torch.zeros_like(like[:, :2])
        part[:, 0], part[:, 1] = out[i : i + 2]
        parts.append(part)
    return torch.cat(parts, 1)


def all_tokens(x):
    return [x[:, i] for i in range(x.shape[1])]


def tokens_of_slices(x):
    return [x[:, c : c + 2][:, i] for c in range(0, x.shape[1], 2) for i in range(2)]


def tokens_of_pieces(x):
    return [token for chunk in x.split(2, 1) for token in chunk.unbind(1)]


def tokens_of_rows(x):
    chunks = x.reshape(x.shape[0], -1, 2, *x.shape[2:])
    return [chunks[:, c, i] for c in range(x.shape[1] // 2) for i in range(2)]


JOINED = [heads_merged, outputs_flat, kept_positions, chunks_joined, chunks_written]
TAKEN = [tokens_of_slices, tokens_of_pieces, tokens_of_rows]
BY_CHUNKS = [(take, torch.stack) for take in TAKEN] + [(all_tokens, join) for join in JOINED]


@sampled(2, ("take", "join"), BY_CHUNKS + list(zip(TAKEN, JOINED[2:], strict=True)), ids=shown)
def test_tokens_of_chunks_and_outputs_that_are_concatenated(take, join):
    """Whatever a loop over chunks takes its tokens out of, and along whichever dimension outputs are put together."""

    def form(q, k, v, g, beta, state, size, scale, norm):
        q, k = repeated(norm(q), v.shape[2]) * scale, repeated(norm(k), v.shape[2])
        state, out = zeros_for(k.transpose(1, 2), v.transpose(1, 2)), []
        for each in zip(*map(take, (q, k, v, g.exp(), beta)), strict=True):
            o, state = update(state, *each)
            out.append(o)
        return (torch.stack(out, 1) if join is torch.stack else join(out, v)), state

    assert_fires(NAME, *block(form, 4))


def written_with_room(out, like):
    """Tokens in front of a row that stays what it was."""
    room = torch.ones_like(torch.cat([like, like[:, :1]], 1))
    for i, o in enumerate(out):
        room[:, i] = o
    return room


def test_refuses_outputs_beside_rows_that_no_token_writes():
    def form(q, k, v, g, beta, state, size, scale, norm):
        q, k = repeated(norm(q), v.shape[2]) * scale, repeated(norm(k), v.shape[2])
        state, out = zeros_for(k.transpose(1, 2), v.transpose(1, 2)), []
        for each in zip(*map(all_tokens, (q, k, v, g.exp(), beta)), strict=True):
            o, state = update(state, *each)
            out.append(o)
        return written_with_room(out, v).sum(1, keepdim=True) + v, state

    module, args = block(form, 4)
    assert not check_graph(module, args).fired.get(NAME)


@pytest.mark.parametrize("given", [False, True])
def test_a_decay_by_sigmoid_has_a_logarithm(given):
    assert_fires(NAME, *block(by_token(update, torch.sigmoid), given=given, state=given))


def from_ones(q, k, v, g, beta, state, *others):
    """The first state is broadcast."""
    return by_token(update)(q, k, v, g, beta, torch.ones(k.shape[-1], v.shape[-1]), *others)


@pytest.mark.parametrize(("tag", "form"), [("decay", by_token(update, torch.tanh)), ("state", from_ones)], ids=shown)
def test_refuses_decays_that_may_be_negative_and_states(tag, form):
    assert_refused(NAME, tag, *block(Spelling(form, norm=no_norm)))


@sampled(3, "shared", ["gate and beta of all heads", "gate a channel of all heads", "rate a channel"])
def test_operands_that_heads_or_tokens_share(shared):
    """The op has them for each."""

    def step(state, q, k, v, decay, beta):
        decay = decay[..., None].expand(*decay.shape, k.shape[-1])
        if shared == "gate a channel of all heads":
            decay = k[:, :1].sigmoid()
        if shared == "rate a channel":
            decay = torch.linspace(-2, -0.1, 4 * k.shape[-1], dtype=k.dtype).view(4, -1).exp()[None]
        return update(state, q, k, v, decay, beta)

    def form(q, k, v, g, beta, *others):
        if shared == "gate and beta of all heads":
            g, beta = g.mean(2, keepdim=True), beta.mean(2, keepdim=True)
        return by_token(step)(q, k, v, g, beta, *others)

    assert_fires(NAME, *block(form))


@sampled(5, "near", NEAR)
def test_refuses(near):
    assert_refused(NAME, NEAR[near], *block(Spelling(NEAR_RULES[near]), given=True, state=True))


@sampled(3, "near", ["no_weight", "state_decays_twice", "upper_instead"])
def test_chunks_that_are_no_delta_rule_are_none_of_its_business(near):
    outcome = check_graph(*block(Spelling(NEAR_RULES[near]), 8))
    assert not outcome.counts[NAME] and not outcome.tags(NAME)


READ = {"escapes": lambda states: states[1].tanh(), "carried": lambda states: sum(s.tanh() for s in states)}


@pytest.mark.parametrize("tag", READ)
def test_refuses_states_that_are_read(tag):
    def form(*operands):
        states = []

        def step(*token):
            o, state = update(*token)
            states.append(state)
            return o, state

        o, final = by_token(step)(*operands)
        return o, final + READ[tag](states[:-1])

    assert_refused(NAME, tag, *block(Spelling(form), state=True))


def test_refuses_a_step_under_no_grad():
    def step(state, q, k, v, decay, beta):
        with torch.no_grad():
            new = beta[..., None] * v
        state = decay[..., None, None] * state
        state = state + torch.einsum("bhk,bhv->bhkv", k, new - beta[..., None] * torch.einsum("bhkv,bhk->bhv", state, k))
        return torch.einsum("bhkv,bhk->bhv", state, q), state

    assert_refused(NAME, "region", *block(by_token(step)))


def test_a_recurrent_network_is_none_of_its_business():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.inward, self.across = nn.Linear(4, 6), nn.Linear(6, 6)

        def forward(self, x):
            state, out = torch.zeros(len(x), 6), []
            for i in range(x.shape[1]):
                state = torch.tanh(self.inward(x[:, i]) + self.across(state))
                out.append(state)
            return torch.stack(out, 1)

    frames = check_graph(Recurrent(), (torch.randn(2, 5, 4, requires_grad=True),))
    assert not frames.counts[NAME] and not frames.misses


class Streams(nn.Module):
    """Residual streams that each layer mixes by scales of one parameter, as hyper-connections do (arXiv:2409.19606)."""

    def __init__(self, layers=3, width=6):
        super().__init__()
        self.mixes = nn.ModuleList(nn.Linear(3 * width, 6) for _ in range(layers))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scales = nn.ParameterList(torch.linspace(0.5, 1.5, 2) for _ in range(layers))

    def forward(self, x):
        streams = x.unsqueeze(2).expand(-1, -1, 3, -1)
        for mix, block, scale in zip(self.mixes, self.blocks, self.scales, strict=True):
            inward, outward = mix(streams.flatten(2)).split(3, dim=-1)
            first, second = scale.unbind(0)
            gathered = (torch.sigmoid(inward * first).unsqueeze(-1) * streams).sum(2)
            streams = torch.sigmoid(outward * second).unsqueeze(-1) * block(gathered).unsqueeze(-2) + streams
        return streams


class Roles(nn.Module):
    """Inputs of queries, keys and values of their own, taken apart behind an attention over earlier layers."""

    def __init__(self, width=6):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.asked = nn.Parameter(torch.linspace(-1, 1, 3 * width).view(3, width))

    def forward(self, x):
        earlier = torch.stack((x, x.tanh(), x.sigmoid()), 2)
        read = torch.softmax(self.asked @ earlier.transpose(-1, -2), -1) @ earlier
        q, k, v = (p(one) for p, one in zip(self.projections, read.unbind(2), strict=True))
        return torch.softmax(torch.cat((q @ k.transpose(-1, -2), q[..., :1]), -1), -1)[..., :-1] @ v


class Gated(nn.Module):
    """Heads in front of the gate that the other half of a projection makes, as in Mamba's blocks, and a cache that is
    empty yet, as transformers' is."""

    def __init__(self, width=6):
        super().__init__()
        self.into, self.out = nn.Linear(width, 16), nn.Linear(8, width)

    def forward(self, x):
        inner, gate = self.into(x).unflatten(-1, (2, -1)).unbind(-2)
        heads = inner.tanh().unflatten(-1, (2, -1))[..., None] * torch.linspace(0.5, 1.5, 3)
        return self.out(heads.sum(-1).flatten(-2) * torch.cat((x.new_empty(0), gate), -2).sigmoid())


class Chunks(nn.Module):
    """A matrix memory that goes from chunk to chunk by gates with a running maximum, as mLSTM's (arXiv:2405.04517)."""

    def __init__(self, width=6, chunk=4):
        super().__init__()
        self.projections, self.chunk = nn.Linear(width, 2 * width + 2), chunk

    def forward(self, x):
        keys, values, inward, kept = self.projections(x).split((x.shape[-1], x.shape[-1], 1, 1), -1)
        rates = torch.nn.functional.logsigmoid(kept).squeeze(-1).view(len(x), -1, self.chunk)
        total = rates.sum(-1)
        gates = total[..., None] - rates.cumsum(-1) + inward.squeeze(-1).view_as(rates)
        state, largest, out = x.new_zeros(len(x), x.shape[-1], x.shape[-1]), x.new_zeros(len(x)), []
        for i in range(total.shape[1]):
            part = slice(i * self.chunk, (i + 1) * self.chunk)
            following = torch.maximum(total[:, i] + largest, gates[:, i].amax(-1))
            weighted = keys[:, part] * torch.exp(gates[:, i] - following[:, None])[..., None]
            state = torch.exp(total[:, i] + largest - following)[:, None, None] * state + weighted.mT @ values[:, part]
            largest = following
            out.append(state)
        return torch.stack(out, 1)


@pytest.mark.parametrize(("kind", "length"), [(Streams, 5), (Roles, 5), (Gated, 5), (Chunks, 8), (Chunks, 12)], ids=shown)
def test_neither_are_positions_that_are_no_tokens(kind, length):
    """Nor chunks."""
    frames = check_graph(kind(), (torch.randn(2, length, 6, requires_grad=True),))
    assert not frames.counts[NAME] and not frames.tags(NAME), frames.misses


def test_finding_is_linear_in_the_tokens():
    """By the calls it makes, which are as many every time."""

    def calls(length):
        traced = trace(block(TOKENS["no_gate"])[0], torch.randn(2, length, 10))
        count = itertools.count()
        sys.setprofile(lambda frame, event, argument: next(count) if event in ("call", "c_call") else None)
        try:
            (loop,) = find_token_loops(traced.graph)
        finally:
            sys.setprofile(None)
        assert isinstance(loop, TokenLoop)
        return next(count)

    three, six, twelve = calls(3), calls(6), calls(12)
    assert twelve - six <= 2.1 * (six - three)
