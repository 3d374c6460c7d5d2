"""The scan is found however it is written, and nothing beside it; outputs and gradients stay eager's."""

from __future__ import annotations

from functools import partial

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacpp_compile.config.options import Config
from megacpp_compile.matchers.ssd.scan import Scan, find_scans
from megacpp_compile.passes.ssd_scan import chunk_size
from tests.corpus import scans
from tests.corpus.scans import FORMS, NEAR_SCANS, PlainMamba2, chunks, einsums, segment_sums, to_heads
from tests.frames import Function, check, check_graph, largest_error, render, run, train

from .conditions import assert_serves, conditions, op_of, sampled
from .contract import assert_fires, assert_refused
from .deltas import scan

NAME = "ssd_scan"


def block(form=scans.broadcast_products, length=12, **kwargs):
    return scan(form, length, **kwargs)


def test_graph():
    frames = assert_fires(NAME, *block(length=10, state=True), dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
linear: f32[2, 10, 36] = linear(u, in_proj_weight)
split_with_sizes: (f32[2, 10, 12], f32[2, 10, 10], f32[2, 10, 10], f32[2, 10, 4]) = split_with_sizes(linear, [12, 10, 10, 4], -1)
getitem: f32[2, 10, 12] = split_with_sizes[0]
getitem_1: f32[2, 10, 10] = split_with_sizes[1]
getitem_2: f32[2, 10, 10] = split_with_sizes[2]
getitem_3: f32[2, 10, 4] = split_with_sizes[3]
sigmoid: f32[2, 10, 12] = sigmoid(getitem)
view: f32[2, 10, 4, 3] = view(sigmoid, [2, 10, 4, 3])
sigmoid_1: f32[2, 10, 10] = sigmoid(getitem_1)
view_1: f32[2, 10, 2, 5] = view(sigmoid_1, [2, 10, 2, 5])
view_2: f32[2, 10, 2, 5] = view(getitem_2, [2, 10, 2, 5])
add: f32[2, 10, 4] = add.Tensor(getitem_3, dt_bias)
softplus: f32[2, 10, 4] = softplus(add)
exp: f32[4] = exp(a_log)
neg: f32[4] = neg(exp)
ssd_scan: (f32[2, 10, 4, 3], f32[2, 4, 3, 5], f32[2, 1, 4, 3, 5]) = megacpp.ssd_scan(view, softplus, neg, view_1, view_2, d, None, 16, float32)
getitem_4: f32[2, 10, 4, 3] = ssd_scan[0]
flatten: f32[2, 10, 12] = flatten.using_ints(getitem_4, 2, 3)
getitem_5: f32[2, 4, 3, 5] = ssd_scan[1]
tanh: f32[2, 10, 12] = tanh(flatten)
linear_1: f32[2, 10, 10] = linear(tanh, out_proj_weight)
return [linear_1, getitem_5]""")


@sampled(5, "carried", [False, True], ids=["y_alone", "states_in_and_out"])
@pytest.mark.parametrize("form", FORMS)
def test_spellings(form, carried):
    frames = assert_fires(NAME, *block(FORMS[form], given=carried, state=carried))
    kinds = {n.target for n in frames.graph.graph.nodes}
    assert not kinds & {torch.ops.aten.cumsum.default, torch.ops.aten.einsum.default}, "a part stayed behind"


@sampled(3, "length", [1, 4, 11])
def test_lengths(length):
    """Padded or not, in one chunk or in several."""
    assert_fires(NAME, *block(length=length))


@sampled(5, "sizes", [{"groups": 1}, {"groups": 4}, {"heads": 1, "groups": 1, "p": 1}, {"n": 1}], ids=str)
def test_sizes(sizes):
    assert_fires(NAME, *block(**sizes))


def groups_in_turn(x, dt, A, B, C, *others):
    """Head i reads group i % g: no order the op knows, so it is given B and C of every head."""
    B, C = (z.repeat(1, 1, x.shape[2] // z.shape[2], 1) for z in (B, C))
    return einsums(x, dt, A, B, C, *others)


def one_group_without_its_dimension(x, dt, A, B, C, *others):
    B, C = (z[:, :, 0, None].expand(-1, -1, x.shape[2], -1) for z in (B, C))
    return einsums(x, dt, A, B, C, *others)


def step_into_B(x, dt, A, B, C, D, state, size):
    """Discretised as Mamba-1 does it: the step multiplies B, for every head."""
    b, t, h, _ = x.shape
    sums = torch.cumsum(A * dt, 1)
    decay = torch.exp(sums[:, :, None] - sums[:, None]).masked_fill(~torch.ones(t, t).tril().bool()[..., None], 0)
    dB = B.repeat_interleave(h // B.shape[2], 2) * dt[..., None]
    scores = torch.einsum("blhn,bshn->blsh", C.repeat_interleave(h // C.shape[2], 2), dB)
    return torch.einsum("blsh,bshp->blhp", scores * decay, x) + D[:, None] * x, None


def step_in_chunks(x, dt, A, B, C, D, state, size):
    """The step is cut into chunks before anything is made of it; states are passed on as flat rows."""
    b, t, h, p = x.shape
    dt = dt.reshape(b, -1, size, h).permute(0, 3, 1, 2)
    sums = (dt * A[:, None, None]).cumsum(-1)
    X, B, C = (chunks(z, size) for z in (x, to_heads(B, h), to_heads(C, h)))
    states = torch.einsum("bclhn,bhcl,bhcl,bclhp->bchpn", B, (sums[..., -1:] - sums).exp(), dt, X)
    rows = torch.cat([torch.zeros_like(states[:, :1]), states], 1).flatten(-2)
    carried = segment_sums(F.pad(sums[..., -1], (1, 0))).exp()
    entered = torch.einsum("bhzc,bcha->bzha", carried, rows)[:, :-1].unflatten(-1, (p, -1))
    scores = torch.einsum("bclhn,bcshn->bchls", C, B) * (sums[..., None] - sums[..., None, :]).exp().transpose(1, 2)
    scores = scores.masked_fill(~torch.ones(size, size, dtype=torch.bool).tril(), 0)
    y = torch.einsum("bchls,bhcs,bcshp->bclhp", scores, dt, X)
    y = y + torch.einsum("bclhn,bchpn->bclhp", C, entered) * sums.permute(0, 2, 3, 1)[..., None].exp()
    return y.reshape(b, t, h, p) + x * D[:, None], None


def one_chunk(x, dt, A, B, C, state):
    t, h = x.shape[1:3]
    B, C, sums = to_heads(B, h), to_heads(C, h), (dt * A).cumsum(1)
    causal = torch.ones(t, t, dtype=torch.bool).tril()[None, :, :, None]
    decay = (sums[:, :, None] - sums[:, None]).masked_fill(~causal, -torch.inf).exp()
    y = torch.einsum("blsh,bshp->blhp", torch.einsum("blhn,bshn->blsh", C, B) * decay * dt[:, None], x)
    y = y + torch.einsum("blhn,bhpn,blh->blhp", C, state, sums.exp())
    added = torch.einsum("blh,blhn,blhp->bhpn", (sums[:, -1:] - sums).exp() * dt, B, x)
    return y, state * sums[:, -1].exp()[..., None, None] + added


def chunks_in_turn(x, dt, A, B, C, D, state, size, order=1):
    """Cut out of the sequence one by one."""
    b, t, h, p = x.shape
    state, ys = torch.zeros(b, h, p, B.shape[-1]) if state is None else state, []
    for i in range(0, t, size):
        y, state = one_chunk(*(z[:, i : i + size] for z in (x, dt)), A, *(z[:, i : i + size] for z in (B, C)), state)
        ys.append(y)
    return torch.cat(ys[::order], 1) + x * D[:, None], state


def chunks_split_off(x, dt, A, B, C, D, state, size):
    """With the skip in each of them."""
    b, _, h, p = x.shape
    state, ys = torch.zeros(b, h, p, B.shape[-1]) if state is None else state, []
    for X, step, in_, out in zip(*(z.split(size, 1) for z in (x, dt, B, C)), strict=True):
        y, state = one_chunk(X, step, A, in_, out, state)
        ys.append(y + D[:, None] * X)
    return torch.cat(ys, dim=1), state


@sampled(5, "form", [chunks_in_turn, chunks_split_off], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("length", "carried"), [(12, False), (10, True)])
def test_a_loop_over_chunks_is_one_scan(form, length, carried):
    assert_fires(NAME, *block(form, length, given=carried, state=carried))


def every_state(x, dt, A, B, C, D, state, size):
    """The states between chunks are read, too."""
    first, state = chunks_in_turn(*(z[:, :size] for z in (x, dt)), A, *(z[:, :size] for z in (B, C)), D, state, size)
    rest = chunks_in_turn(*(z[:, size:] for z in (x, dt)), A, *(z[:, size:] for z in (B, C)), D, state, size)[0]
    return torch.cat([first, rest], 1), state


def test_states_between_chunks_that_are_read():
    assert check_graph(*block(every_state, 12, state=True)).counts[NAME] >= 2


def last_tokens_masked(x, dt, A, B, C, D, state, size):
    """Operands that a constant was applied to, and that are read elsewhere too."""
    kept = (torch.arange(x.shape[1]) < x.shape[1] - 2)[None, :, None]
    x, dt = x * kept[..., None], dt * kept
    y, final = einsums(x, dt, A, B, C, D, state, size)
    return y + x.tanh() * dt[..., None], final


@sampled(
    5, "form", [last_tokens_masked, groups_in_turn, one_group_without_its_dimension, step_into_B, step_in_chunks],
    ids=lambda f: f.__name__,
)
def test_other_forms(form):
    assert_fires(NAME, *block(form))


def test_takes_bfloat16_operands_as_they_are():
    """The casts in front of the scan are the op's affair."""
    module, args = block(dtype=torch.bfloat16)
    frames = assert_fires(NAME, module, args)
    assert [op_of(frames, NAME).args[i].meta["val"].dtype for i in (0, 3, 4)] == [torch.bfloat16] * 3
    exact = PlainMamba2()
    exact.load_state_dict(module.state_dict())
    want = train(exact, exact, tuple(a.detach().float().requires_grad_() for a in args))
    eager = train(module, module, args)
    ours, theirs = (largest_error({k: t.float() for k, t in r.items()}, want)[0] for r in (frames.results, eager))
    assert ours <= 1.25 * theirs + 2e-3


def test_float64():
    module, args = block(einsums, dtype=torch.float64)
    module.A_log.data = module.A_log.data.float()  # stays in float32, as in the model
    assert run(module, args).fired == {NAME: 1}


@pytest.mark.parametrize("model", [0, 1, 8, 16, 100, 256, 4096])
def test_chunk_size_is_one_the_op_takes(model):
    assert chunk_size(model) in (16, 32, 64, 128, 256)
    assert chunk_size(model) >= (min(model, 256) or 256)  # 0 is not known


def lengths():
    """What fills up the last chunk is known not to be none. One group here and below: torch takes a third less time."""
    module = PlainMamba2(chunk=16, groups=1)
    return module, module.example_inputs


test_conditions = conditions(
    NAME, disabled=block, everything=lengths, autocast=lambda: block(einsums), autocast_inside=block,
    inference=lambda: block(state=True), one_sequence=lambda: block(einsums, batch=1),
    # batch, chunks, positions, heads, channels and states all of one size
    equal_sizes=lambda: block(einsums, 16, batch=4, heads=4, p=4, groups=4, n=4, chunk=4, given=True, state=True),
    two_layers=lambda: (nn.Sequential(PlainMamba2(einsums), PlainMamba2()), block()[1], 2),
    # of results that are put together in another order each chunk is one
    chunks_in_another_order=lambda: (*block(partial(chunks_in_turn, order=-1)), 3),
)


def of_any_length(form, length, **kwargs):
    module, args = block(form, length, groups=1, **kwargs)
    torch._dynamo.mark_dynamic(args[0], 1)
    frames = check(module, args)
    assert frames.counts[NAME] == 1, frames.misses
    return frames


@pytest.mark.end_to_end
@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["broadcast_products", "matrix_products_heads_first"])
def test_dynamic_lengths_in_chunks(form):
    """The number of chunks is an expression, of a loop's one that a guard makes a number; what fills up the last one is
    known to be none."""
    of_any_length(FORMS[form], 8 if "first" in form else 12, **{"heads": 2} if "first" in form else {})


@pytest.mark.end_to_end
def test_chunks_of_a_dynamic_length_are_the_models():
    """Tokens over how many chunks there are is no number to torch."""
    op = op_of(of_any_length(einsums, 96, chunk=32, heads=2), NAME)
    assert isinstance(op.args[0].meta["val"].shape[1], torch.SymInt) and op.args[7] == 32


@pytest.mark.end_to_end
@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["chunks_sliced_off", "chunks_split_off"])
def test_chunks_of_a_second_length(form):
    """How many there are is a guard, which leaves the length but for the last chunk."""
    module, args = block(FORMS[form], 6, heads=2, groups=1)
    frames = check(module, args)
    assert_serves(frames, module, module.example_inputs(11), graphs=2)
    assert [a.frame.passes[NAME] for a in frames.analyses] == [1, 1], frames.misses


def test_compiling_draws_no_random_numbers():
    """What a model draws must not depend on what is compiled in between."""
    captured = run(*block(einsums), Config(strict=True, disable=(NAME,))).analyses[0].captured
    before = torch.get_rng_state()
    (scan,) = find_scans(captured.gm.graph)
    assert isinstance(scan, Scan)
    assert torch.equal(torch.get_rng_state(), before)


@sampled(5, "near", NEAR_SCANS)
def test_refuses(near):
    form, tag = NEAR_SCANS[near]
    assert_refused(NAME, tag, *block(form), Config(passes={"gated_linear_attention": False}))  # some are such attention


def test_refuses_a_decay_of_rows_and_columns():
    """Regression: an internal error. A momentum beside the state has such decays (fla's momentum delta rule)."""

    def form(q, k, v, gates, others):
        sums, own = gates.cumsum(-1), others.cumsum(-1)
        first = torch.logcumsumexp(own - sums, -1)
        before = torch.cat([torch.full_like(first[..., :1], -torch.inf), first[..., :-1]], -1)
        share = 1 - (before[..., None, :] - first[..., None]).tril().exp()
        decays = (sums[..., None] - own[..., None, :] + first[..., None]).exp().tril()
        return (q @ k.mT * (decays * share)) @ v

    gates = (F.logsigmoid(torch.randn(2, 2, 6)).requires_grad_() for _ in range(2))
    outcome = check_graph(Function(form), (*(torch.randn(2, 2, 6, 4, requires_grad=True) for _ in range(3)), *gates))
    assert {miss.tag for miss in outcome.misses} == {"roles"} and not outcome.fired


def test_refuses_what_is_read_elsewhere():
    def form(*operands):
        seen = []
        y, _ = einsums(*operands, cumsum=lambda a: seen.append(a.cumsum(-1)) or seen[0])
        return y, seen[0]

    assert_refused(NAME, "escapes", *block(form, state=True))


def test_refuses_states_under_no_grad():
    def sums(a):
        with torch.no_grad():
            return a.cumsum(-1)

    assert_refused(NAME, "region", *block(partial(einsums, cumsum=sums)))


def test_refuses_what_depends_on_a_size():
    def band(a, width=70):
        sums = a.cumsum(-1)
        mask = torch.ones(a.shape[-1], a.shape[-1], dtype=torch.bool)
        return (sums[..., None] - sums[..., None, :]).masked_fill(~mask.tril() | mask.tril(-width), -torch.inf)

    form = partial(einsums, sums_of=band)
    assert_refused(NAME, "axes", *block(form, 80, batch=1, heads=2, groups=1, p=2, n=2, chunk=80))


def test_plain_exponentials_are_no_business_of_this_pass():
    def softmax(x):
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=True)

    frames = check_graph(Function(softmax), (torch.randn(2, 3, 4, requires_grad=True),))
    assert not frames.misses and not frames.counts[NAME]
