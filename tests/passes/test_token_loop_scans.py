"""Mamba-2's scan as a loop over tokens is found, and other loops that read products made of all tokens in front of them;
nothing beside these, and results and gradients stay eager's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.corpus.delta.block import LINEAR, Spelling
from tests.corpus.delta.parts import no_norm, repeated, zeros_for
from tests.corpus.scans import to_heads
from tests.corpus.scans_by_token import NEAR_SCANS_BY_TOKEN, SCANS_BY_TOKEN, WEIGHED, by_state, einsums_within
from tests.frames import check_graph, run

from . import conditions
from .conditions import sampled
from .contract import assert_fires, assert_refused
from .deltas import by_token, delta, fires_dynamic, linear, scan

NAME = "token_loop"


def block(form=by_state, length=3, **kwargs):
    return scan(form, length, **kwargs)


def op_of(frames, name="ssd_scan"):
    return conditions.op_of(frames, name)


@sampled(9, "given", [False, True])
@pytest.mark.parametrize("form", SCANS_BY_TOKEN)
def test_scan(form, given):
    frames = assert_fires(NAME, *block(SCANS_BY_TOKEN[form], given=given, state=given))
    targets = {n.target for n in frames.graph.graph.nodes}
    assert op_of(frames) and not targets & {torch.ops.aten.einsum.default, torch.ops.aten.select.int}
    assert (op_of(frames).args[6] is not None) == given


def test_skip_within_is_the_ops():
    assert op_of(assert_fires(NAME, *block(einsums_within))).args[5] is not None


def test_groups_stay_groups():
    assert op_of(assert_fires(NAME, *block(SCANS_BY_TOKEN["groups_within"]))).args[3].meta["val"].shape[2] == 2


@pytest.mark.parametrize("length", [2, 17])
def test_lengths(length):
    with torch.no_grad():
        assert op_of(assert_fires(NAME, *block(length=length))).args[7] == (16 if length <= 16 else 32)


SIZES = [{"groups": 1}, {"groups": 4}, {"heads": 1, "groups": 1}, {"heads": 3, "p": 3, "groups": 3, "n": 3}]


@sampled(5, "sizes", SIZES, ids=str)
@pytest.mark.parametrize("form", [by_state, einsums_within])
def test_sizes(form, sizes):
    """With batch and length of one of them, too."""
    assert_fires(NAME, *block(form, batch=3, given=True, state=True, **sizes))


def with_rates(form, dtype):
    """The rates are made in float32."""
    return lambda x, dt, A, *others: form(x, dt, A.to(dtype), *others)


@pytest.mark.parametrize("form", [by_state, einsums_within])
def test_bfloat16(form):
    frames = check_graph(*block(with_rates(form, torch.bfloat16), dtype=torch.bfloat16))
    assert frames.counts[NAME] == 1, frames.misses


def test_recurrence_in_float32():
    """Operands are read as they are: the op computes in float32."""

    def cast(x, dt, A, B, C, D, state, size):
        y, state = by_state(x.float(), dt.float(), A, B.float(), C.float(), D.float(), state, size)
        return y.to(x.dtype), state

    frames = check_graph(*block(cast, dtype=torch.bfloat16, state=True))
    assert frames.counts[NAME] == 1, frames.misses
    assert op_of(frames).args[0].meta["val"].dtype == torch.bfloat16


def in_float64():
    module, args = block(with_rates(by_state, torch.float64), 5, given=True, state=True)
    return module.double(), tuple(a.detach().double().requires_grad_() for a in args)


def products_read_elsewhere(x, dt, A, B, *others):
    y, final = by_state(x, dt, A, B, *others)
    return y, final + torch.einsum("blh,blhp,blhn->blhpn", dt, x, to_heads(B, x.shape[2])).sum(1)


test_conditions = conditions.conditions(
    NAME, disabled=lambda: (*block(), "ssd_scan"), inference=lambda: block(given=True, state=True),
    autocast=lambda: block(SCANS_BY_TOKEN["weighted_inputs"]), float64=in_float64,
    one_sequence=lambda: block(SCANS_BY_TOKEN["weighted_inputs"], batch=1),
    read_elsewhere=lambda: block(products_read_elsewhere, state=True),
)


@pytest.mark.parametrize("form", [by_state, einsums_within])
def test_everything_dynamic(form):
    fires_dynamic(NAME, *block(form))


@sampled(3, "given", [False, True])
@pytest.mark.parametrize("name", ["products_in_front", "products_in_front_channel_gates"])
def test_linear_attention_whose_products_are_made_in_front(name, given):
    frames = assert_fires(NAME, *linear(LINEAR[name], given=given, state=given))
    assert op_of(frames, "gated_linear_attention")


@sampled(3, "weigh", WEIGHED)
def test_other_weights_than_the_step_are_linear_attention(weigh):
    frames = assert_fires(NAME, *block(partial(by_state, weigh=WEIGHED[weigh]), state=True))
    assert op_of(frames, "gated_linear_attention")


def weighted(q, k, v, g, beta, state, size, scale, norm):
    """Linear attention with a weight of what each token writes, in bf16 or not."""
    q, k = repeated(norm(q), v.shape[2]).float() * scale, repeated(norm(k), v.shape[2]).float()
    weights, v = v.mean(-1).sigmoid().float(), v.float()
    state, out = zeros_for(k.transpose(1, 2), v.transpose(1, 2)) if state is None else state, []
    for i in range(v.shape[1]):
        state = state if g is None else state * g[:, i].exp()[..., None, None]
        state = state + weights[:, i, :, None, None] * k[:, i, :, :, None] * v[:, i, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, i]))
    return torch.stack(out, 1), state


@pytest.mark.parametrize("gate", ["head", None])
def test_linear_attention_with_a_weight_of_each_token(gate):
    frames = assert_fires(NAME, *linear(weighted, gate=gate, given=True, state=True))
    assert op_of(frames, "gated_linear_attention" if gate else "ssd_scan")


def test_weights_in_bfloat16_are_multiplied_in_float32():
    frames = run(*linear(weighted, dtype=torch.bfloat16))
    assert op_of(frames, "gated_linear_attention").args[2].meta["val"].dtype == torch.float32


def groups_within(q, k, v, g, beta, state, size, scale, norm):
    """Queries and keys become those of heads within a step."""
    h = v.shape[2]
    state, out = v.new_zeros(v.shape[0], h, k.shape[-1], v.shape[-1]) if state is None else state, []
    for i in range(v.shape[1]):
        q_i, k_i = (z[:, i].repeat_interleave(h // z.shape[2], 1) for z in (q, k))
        state = state * g[:, i].exp()[..., None, None] + k_i[..., None] * v[:, i, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q_i))
    return torch.stack(out, 1), state


def test_groups_of_linear_attention_stay_groups():
    frames = assert_fires(NAME, *linear(groups_within))
    assert op_of(frames, "gated_linear_attention").args[1].meta["val"].shape[2] == 2


def stepwise(update, read=lambda o, q, v: o):
    """A loop around `update(state, k, v, decay)`; `read` makes more of what the query reads."""

    def step(state, q, k, v, decay, beta):
        state = update(state, k[..., None], v[:, :, None], decay[..., None, None])
        return read((q[:, :, None] @ state)[:, :, 0], q, v), state

    return by_token(step)


def gated_sum(state, k, v, decay):
    return decay * state + k * v


READ = {
    "skip": lambda o, q, v: o + v,
    "gate": lambda o, q, v: F.silu(v) * o,
    "norm": lambda o, q, v: F.layer_norm(o, o.shape[-1:]),
    "twice": lambda o, q, v: o.tanh() + o,
    "scale_of_each_token": lambda o, q, v: o * q.square().mean(-1, keepdim=True),
}


@sampled(5, "given", [False, True])
@pytest.mark.parametrize("read", READ)
def test_what_a_step_makes_of_its_output_stays_behind_the_op(read, given):
    frames = assert_fires(NAME, *linear(stepwise(gated_sum, READ[read]), given=given, state=given))
    assert op_of(frames, "gated_linear_attention")


def test_a_scan_with_a_skip_of_channels():
    skipped = partial(einsums_within, skip=lambda D, x: (D[:, None] * x).tanh())
    assert op_of(assert_fires(NAME, *block(skipped, given=True, state=True))).args[5] is None


def test_a_delta_rule_whose_output_is_normed_within_a_step():
    def step(state, q, k, v, decay, beta):
        new = beta[..., None] * (v - torch.einsum("bhkv,bhk->bhv", state, k))
        state = state + torch.einsum("bhk,bhv->bhkv", k, new)
        return F.layer_norm(torch.einsum("bhkv,bhk->bhv", state, q), (v.shape[-1],)), state

    block = delta(Spelling(by_token(step), None, no_norm), given=True, state=True)
    assert op_of(assert_fires(NAME, *block), "gated_delta_rule")


def test_keys_that_are_what_a_decay_leaves():
    """HGRN2 (arXiv:2404.07904): keys 1 - f beside decays f, made within a step."""

    def form(q, k, *others):
        def step(state, q, f, v, decay, beta):
            state = f[..., None] * state + (1 - f[..., None]) * v[:, :, None]
            return (q[:, :, None] @ state)[:, :, 0], state

        return by_token(step)(q, torch.sigmoid(k), *others)

    frames = assert_fires(NAME, *linear(form, gate=None, given=True, state=True))
    assert op_of(frames, "gated_linear_attention")


@pytest.mark.parametrize("rate", [0.9, 1.25])
def test_a_number_as_the_rate(rate):
    form = stepwise(lambda state, k, v, decay: rate * state + k * v)
    frames = assert_fires(NAME, *linear(form, 4, torch.float64, given=True, state=True))
    assert op_of(frames).args[2].meta["val"].dtype == torch.float64


@sampled(
    3, ("tag", "step", "read"),
    [
        ("differs", lambda state, k, v, decay: -0.9 * state + k * v, READ["gate"]),
        ("differs", lambda state, k, v, decay: decay * state + state * (k * v), READ["skip"]),
        ("op", lambda state, k, v, decay: (decay * state + k * v).tanh(), READ["norm"]),
    ],
    ids=["negative_rate", "multiplied", "squashed"],
)
def test_what_a_step_makes_of_its_output_excuses_nothing(tag, step, read):
    assert_refused(NAME, tag, *linear(stepwise(step, read), given=True, state=True))


def test_an_output_that_the_state_reaches_twice_is_refused():
    """What is read by the query is not all that is read of the state."""

    def step(state, q, k, v, decay, beta):
        state = gated_sum(state, k[..., None], v[:, :, None], decay[..., None, None])
        return (q[:, :, None] @ state)[:, :, 0] * state.square().sum(-2), state

    frames = check_graph(*linear(by_token(step), given=True, state=True))
    assert not frames.counts[NAME] and frames.tags(NAME)


@sampled(5, "near", NEAR_SCANS_BY_TOKEN)
def test_refuses(near):
    form, tag = NEAR_SCANS_BY_TOKEN[near]
    if tag is not None:
        return assert_refused(NAME, tag, *block(form, state=True))
    outcome = check_graph(*block(form, state=True))
    assert not outcome.counts[NAME] and NAME not in {miss.pass_name for miss in outcome.misses}


def test_tokens_read_late_are_operands_as_they_are():
    """x of the token before is a tensor like any other."""
    frames = assert_fires(NAME, *block(lambda x, *others: by_state(x.roll(1, 1), *others)))
    assert op_of(frames).args[0].target is torch.ops.aten.roll.default


@pytest.mark.parametrize("within", [False, True])
def test_refuses_what_runs_without_gradients(within):
    def form(x, dt, A, B, C, D, state, size):
        B, C = to_heads(B, x.shape[2]), to_heads(C, x.shape[2])
        with torch.no_grad():
            decays = (dt * A).exp()[..., None, None]
            taken = B.unbind(1)
        added = torch.einsum("blh,blhp,blhn->blhpn", dt, x, B)
        state, out = torch.zeros_like(added[:, 0]), []
        for i in range(x.shape[1]):
            here = torch.einsum("bh,bhp,bhn->bhpn", dt[:, i], x[:, i], taken[i]) if within else added[:, i]
            state = ((dt[:, i] * A).exp()[..., None, None] if within else decays[:, i]) * state + here
            out.append(torch.einsum("bhpn,bhn->bhp", state, C[:, i]))
        return torch.stack(out, 1), state

    assert_refused(NAME, "region", *block(form, state=True))


def test_a_detached_step_of_decays_has_no_gradient():
    """Two tensors: no scan, but a linear attention whose weights are the steps."""

    def form(x, dt, A, B, C, D, state, size):
        decays = (dt.detach() * A).exp()[..., None, None]
        added = torch.einsum("blh,blhp,blhn->blhpn", dt, x, to_heads(B, x.shape[2]))
        C, state, out = to_heads(C, x.shape[2]), torch.zeros_like(added[:, 0]), []
        for i in range(x.shape[1]):
            state = decays[:, i] * state + added[:, i]
            out.append(torch.einsum("bhpn,bhn->bhp", state, C[:, i]))
        return torch.stack(out, 1), state

    assert op_of(assert_fires(NAME, *block(form, state=True)), "gated_linear_attention")


def test_linear_attention_read_before_its_update_is_named():
    def before(q, k, v, g, beta, state, size, scale, norm):
        q, k = repeated(norm(q), v.shape[2]), repeated(norm(k), v.shape[2])
        added, decays, out = torch.einsum("blhk,blhv->blhkv", k, v), g.exp()[..., None, None], []
        for i in range(v.shape[1]):
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, i]))
            state = state * decays[:, i] + added[:, i]
        return torch.stack(out, 1), state

    assert_refused(NAME, "differs", *linear(before, given=True, state=True))
