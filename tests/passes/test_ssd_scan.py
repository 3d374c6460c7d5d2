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
from tests.corpus.scans import (
    FORMS,
    NEAR_SCANS,
    PlainMamba2,
    broadcast_products,
    chunks,
    einsums,
    segment_sums,
    to_heads,
)
from tests.frames import Function, check, largest_error, passed, render, run, train

from .contract import (
    assert_autocast,
    assert_autocast_inside,
    assert_disabled,
    assert_dynamic,
    assert_fires,
    assert_refused,
    assert_refused_in_a_graph,
)

NAME = "ssd_scan"


def block(form=broadcast_products, length=12, **kwargs):
    module = PlainMamba2(form, **kwargs)
    return module, module.example_inputs(length)


# --- fires


def test_graph():
    frames = assert_fires(NAME, *block(length=10, state=True))
    expecttest.assert_expected_inline(
        render(frames.graph),
        """\
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
return [linear_1, getitem_5]""",
    )


@pytest.mark.parametrize(
    ("given", "state"), [(False, False), (True, True)], ids=["y_alone", "states_in_and_out"]
)
@pytest.mark.parametrize("form", FORMS)
def test_spellings(form, given, state):
    frames = assert_fires(NAME, *block(FORMS[form], given=given, state=state))
    kinds = {n.target for n in frames.graph.graph.nodes}
    assert not kinds & {torch.ops.aten.cumsum.default, torch.ops.aten.einsum.default}, "a part stayed behind"


@pytest.mark.parametrize("length", [1, 4, 11])
def test_lengths(length):
    """Padded or not, in one chunk or in several."""
    assert_fires(NAME, *block(length=length))


@pytest.mark.parametrize("sizes", [{"groups": 1}, {"groups": 4}, {"heads": 1, "groups": 1, "p": 1}, {"n": 1}], ids=str)
def test_sizes(sizes):
    assert_fires(NAME, *block(**sizes))


def test_one_sequence():
    module = PlainMamba2(einsums)
    assert_fires(NAME, module, module.example_inputs(batch=1))


def test_equal_sizes_are_told_apart():
    """Batch, chunks, positions, heads, channels and states all of one size."""
    module = PlainMamba2(einsums, heads=4, p=4, groups=4, n=4, chunk=4, given=True, state=True)
    assert_fires(NAME, module, module.example_inputs(length=16, batch=4))


def groups_in_turn(x, dt, A, B, C, D, state, size):
    """Head i reads group i % g: no order the op knows, so it is given B and C of every head."""
    b, t, h, _ = x.shape
    B, C = (z.repeat(1, 1, h // z.shape[2], 1) for z in (B, C))
    return einsums(x, dt, A, B, C, D, state, size)


def one_group_without_its_dimension(x, dt, A, B, C, D, state, size):
    B, C = (z[:, :, 0, None].expand(-1, -1, x.shape[2], -1) for z in (B, C))
    return einsums(x, dt, A, B, C, D, state, size)


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


@pytest.mark.parametrize("form", [chunks_in_turn, chunks_split_off], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("length", "carried"), [(12, False), (10, True)])
def test_a_loop_over_chunks_is_one_scan(form, length, carried):
    assert_fires(NAME, *block(form, length, given=carried, state=carried))


def test_chunks_that_make_no_whole_stay_apart():
    """The results are put together in another order."""
    assert_fires(NAME, *block(partial(chunks_in_turn, order=-1)), count=3)


def every_state(x, dt, A, B, C, D, state, size):
    """The states between chunks are read, too."""
    first, state = chunks_in_turn(*(z[:, :size] for z in (x, dt)), A, *(z[:, :size] for z in (B, C)), D, state, size)
    rest = chunks_in_turn(*(z[:, size:] for z in (x, dt)), A, *(z[:, size:] for z in (B, C)), D, state, size)[0]
    return torch.cat([first, rest], 1), state


def test_states_between_chunks_that_are_read():
    assert check(*block(every_state, 12, state=True)).counts[NAME] >= 2


def last_tokens_masked(x, dt, A, B, C, D, state, size):
    """Operands that a constant was applied to, and that are read elsewhere too."""
    kept = (torch.arange(x.shape[1]) < x.shape[1] - 2)[None, :, None]
    x, dt = x * kept[..., None], dt * kept
    y, final = einsums(x, dt, A, B, C, D, state, size)
    return y + x.tanh() * dt[..., None], final


@pytest.mark.parametrize(
    "form",
    [last_tokens_masked, groups_in_turn, one_group_without_its_dimension, step_into_B, step_in_chunks], ids=lambda f: f.__name__
)
def test_other_forms(form):
    assert_fires(NAME, *block(form))


def test_two_layers():
    assert_fires(NAME, nn.Sequential(PlainMamba2(einsums), PlainMamba2()), block()[1], count=2)


def test_takes_bfloat16_operands_as_they_are():
    """The casts in front of the scan are the op's affair."""
    module = PlainMamba2().bfloat16()
    args = module.example_inputs(dtype=torch.bfloat16)
    frames = assert_fires(NAME, module, args)
    (op,) = (n for n in frames.graph.graph.nodes if n.target is torch.ops.megacpp.ssd_scan.default)
    assert [op.args[i].meta["val"].dtype for i in (0, 3, 4)] == [torch.bfloat16] * 3
    exact = PlainMamba2()
    exact.load_state_dict(module.state_dict())
    want = train(exact, exact, tuple(a.detach().float().requires_grad_() for a in args))
    eager = train(module, module, args)
    ours, theirs = (largest_error({k: t.float() for k, t in r.items()}, want)[0] for r in (frames.results, eager))
    assert ours <= 1.25 * theirs + 2e-3


def test_float64():
    module = PlainMamba2(einsums).double()
    module.A_log.data = module.A_log.data.float()  # stays in float32, as in the model
    args = module.example_inputs(dtype=torch.float64)
    assert run(module, args).fired == {NAME: 1}


def test_inference():
    module, args = block(state=True)
    with torch.no_grad():
        assert_fires(NAME, module.requires_grad_(False), tuple(a.detach() for a in args))


@pytest.mark.parametrize("model", [0, 1, 8, 16, 100, 256, 4096])
def test_chunk_size_is_one_the_op_takes(model):
    assert chunk_size(model) in (16, 32, 64, 128, 256)
    assert chunk_size(model) >= (min(model, 256) or 256)  # 0 is not known


# --- modes


def test_disabled():
    assert_disabled(NAME, *block())


def test_dynamic_shapes():
    """What fills up the last chunk is known not to be none. One group here and below: torch takes a third less time."""
    module = PlainMamba2(chunk=16, groups=1)
    assert_dynamic(NAME, module, module.example_inputs, everything=True)


def test_dynamic_lengths_in_chunks():
    """The number of chunks is an expression, and what fills up the last one is known to be none."""
    module = PlainMamba2(groups=1)
    args = module.example_inputs(length=12)
    torch._dynamo.mark_dynamic(args[0], 1)
    frames = check(module, args)
    assert frames.counts[NAME] == 1, frames.misses


def test_chunks_of_a_dynamic_length_are_the_models():
    """Tokens over how many chunks there are is no number to torch."""
    module = PlainMamba2(einsums, chunk=32, heads=2, groups=1)
    args = module.example_inputs(length=96)
    torch._dynamo.mark_dynamic(args[0], 1)
    frames = check(module, args)
    (op,) = (n for n in frames.graph.graph.nodes if n.target is torch.ops.megacpp.ssd_scan.default)
    assert isinstance(op.args[0].meta["val"].shape[1], torch.SymInt) and op.args[7] == 32


def test_a_loop_over_chunks_of_a_dynamic_length():
    """The loop's count is an expression that a guard makes a number."""
    module = PlainMamba2(FORMS["matrix_products_heads_first"], heads=2, groups=1)
    args = module.example_inputs(8)
    torch._dynamo.mark_dynamic(args[0], 1)
    frames = check(module, args)
    assert frames.counts[NAME] == 1, frames.misses


@pytest.mark.parametrize("form", ["chunks_sliced_off", "chunks_split_off"])
def test_chunks_of_a_second_length(form):
    """How many there are is a guard, which leaves the length but for the last chunk."""
    module = PlainMamba2(FORMS[form], heads=2, groups=1)
    frames = check(module, module.example_inputs(6))
    args = module.example_inputs(11)
    assert largest_error(train(frames.compiled, module, args), train(module, module, args))[0] < 1e-5
    assert [a.frame.passes[NAME] for a in frames.analyses] == [1, 1], frames.misses


def test_compiling_draws_no_random_numbers():
    """What a model draws must not depend on what is compiled in between."""
    captured = run(*block(einsums), Config(strict=True, disable=(NAME,))).analyses[0].captured
    before = torch.get_rng_state()
    (scan,) = find_scans(captured.gm.graph)
    assert isinstance(scan, Scan)
    assert torch.equal(torch.get_rng_state(), before)


def test_autocast_around_the_call():
    assert_autocast(NAME, *block(einsums))


def test_autocast_inside_the_frame():
    assert_autocast_inside(NAME, *block())


# --- stays out


@pytest.mark.parametrize("near", NEAR_SCANS)
def test_refuses(near):
    form, tag = NEAR_SCANS[near]
    assert_refused_in_a_graph(NAME, tag, *block(form))


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
    outcome = passed(Function(form), (*(torch.randn(2, 2, 6, 4, requires_grad=True) for _ in range(3)), *gates))
    assert {miss.tag for miss in outcome.misses} == {"roles"} and not outcome.sites


def test_refuses_what_is_read_elsewhere():
    def form(x, dt, A, B, C, D, state, size):
        seen = []
        y, _ = einsums(x, dt, A, B, C, D, state, size, cumsum=lambda a: seen.append(a.cumsum(-1)) or seen[0])
        return y, seen[0]

    assert_refused_in_a_graph(NAME, "escapes", *block(form, state=True))


def test_refuses_states_under_no_grad():
    def form(x, dt, A, B, C, D, state, size):
        def sums(a):
            with torch.no_grad():
                return a.cumsum(-1)

        return einsums(x, dt, A, B, C, D, state, size, cumsum=sums)

    assert_refused(NAME, "region", *block(form))


def test_refuses_what_depends_on_a_size():
    def form(x, dt, A, B, C, D, state, size):
        return einsums(x, dt, A, B, C, D, state, size, sums_of=lambda a: _band(a, 70))

    def _band(a, width):
        sums = a.cumsum(-1)
        mask = torch.ones(a.shape[-1], a.shape[-1], dtype=torch.bool)
        return (sums[..., None] - sums[..., None, :]).masked_fill(~mask.tril() | mask.tril(-width), -torch.inf)

    module = PlainMamba2(form, heads=2, groups=1, p=2, n=2, chunk=80)
    assert_refused(NAME, "axes", module, module.example_inputs(length=80, batch=1))


def test_plain_exponentials_are_no_business_of_this_pass():
    class Softmax(nn.Module):
        def forward(self, x):
            e = torch.exp(x - x.amax(-1, keepdim=True))
            return e / e.sum(-1, keepdim=True)

    frames = check(Softmax(), (torch.randn(2, 3, 4, requires_grad=True),))
    assert not frames.misses and not frames.counts[NAME]
