"""Hyper-connections before a block: found in their spellings, and refused for every reason there is."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F

from tests.frames import check, check_graph, render

from . import streams as of
from .conditions import assert_serves, conditions, op_of, sampled
from .contract import assert_fires, assert_refused
from .streams import BEFORE, EPS, ON, D, N, build, collapse, deepseek_v4, logits, sinkhorn, unit

NAME = "hyper_connection"


def test_is_off_by_default():
    assert not check_graph(*build(deepseek_v4)).fired


def test_graph():
    frames = assert_fires(NAME, *build(deepseek_v4), config=ON, dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
split_with_sizes: (f32[4], f32[4], f32[16]) = split_with_sizes(base, [4, 4, 16])
getitem: f32[4] = split_with_sizes[0]
getitem_1: f32[4] = split_with_sizes[1]
getitem_2: f32[16] = split_with_sizes[2]
unbind: (f32[], f32[], f32[]) = unbind.int(scale)
getitem_3: f32[] = unbind[0]
getitem_4: f32[] = unbind[1]
getitem_5: f32[] = unbind[2]
view: f32[4, 4] = view(getitem_2, [4, 4])
expand: f32[4] = expand(getitem_3, [4])
expand_1: f32[4] = expand(getitem_4, [4])
expand_2: f32[4, 4] = expand(getitem_5, [4, 4])
view_1: f32[16] = view(expand_2, [16])
cat: f32[24] = cat([expand, expand_1, view_1])
view_2: f32[16] = view(view, [16])
cat_1: f32[24] = cat([getitem, getitem_1, view_2])
hyper_connection: (f32[2, 5, 6], f32[2, 5, 4], f32[2, 5, 4, 4], f32[2, 5, 24], f32[2, 5]) = megacpp.hyper_connection(x, fn, cat, cat_1, 0.01, [1.0, 0.01], [2.0, 0.0], softmax, [0.01, 0.01], [-2, -1, -2, -1, -2], float32)
getitem_6: f32[2, 5, 6] = hyper_connection[0]
getitem_7: f32[2, 5, 4] = hyper_connection[1]
getitem_8: f32[2, 5, 4, 4] = hyper_connection[2]
linear: f32[2, 5, 6] = linear(getitem_6, block_weight, block_bias)
permute: f32[2, 5, 4, 4] = permute(getitem_8, [0, 1, 3, 2])
stream_update: f32[2, 5, 4, 6] = megacpp.stream_update(x, linear, getitem_7, permute, float32)
return [stream_update]""")


@sampled(2, "dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", BEFORE)
def test_fires(form, dtype):
    body, rows = BEFORE[form]
    node = op_of(assert_fires(NAME, *build(body, dtype=dtype, rows=rows), config=ON), NAME)
    assert node.args[0].meta["val"].dtype == dtype, "the streams as they are"


MAPS = {
    "deepseek_v4": ([1.0, EPS], [2.0, 0.0], "softmax", [EPS, EPS], [-2, -1, -2, -1, -2]),
    "hy_v4": ([1.0, EPS], [3.0, EPS], "", [0.0, 0.0], []), "head": ([1.0, EPS], [], "", [0.0, 0.0], []),
    "paper": ([1.0, 0.0], [2.0, 0.0], "exp", [0.0, 0.0], [-2, -1] * 3),
    "in_logarithms": ([1.0, 0.0], [2.0, 0.0], "log", [0.0, 0.0], [-1, -2] * 3),
    "by_log_softmax": ([1.0, 0.0], [1.0, 0.0], "log", [0.0, 0.0], [-2, -1, -2]),
    "one_softmax": ([1.0, 0.0], [1.0, 0.0], "softmax_columns", [0.0, 0.0], []),
    "hyperbolic": ([1.0, 0.0], [1.0, 0.0], "tanh", [0.0, 0.0], []),
    "by_reciprocals": ([1.0, 0.0], [-1.0, 1.0], "sigmoid", [0.0, 0.0], [-1, -2] * 2),
    "other_order": ([1.0, 0.0], [2.0, 0.0], "softmax", [0.0, 0.0], [-2, -1, -2, -1, -2]),
}  # fmt: skip


@pytest.mark.parametrize("form", MAPS)
def test_maps(form):
    body, rows = BEFORE[form]
    node = op_of(assert_fires(NAME, *build(body, rows=rows), config=ON), NAME)
    pre, post, init, eps, axes = MAPS[form]
    assert node.args[5:10] == (pytest.approx(pre), pytest.approx(post), init, pytest.approx(eps), axes)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_other_numbers_of_streams(n):
    assert_fires(NAME, *build(deepseek_v4, n=n), config=ON)


def test_two_blocks():
    """The second reads the streams that the first leaves."""
    (one, args), (two, _) = build(deepseek_v4), build(deepseek_v4)
    frames = assert_fires(NAME, torch.nn.Sequential(one, two), args, 2, ON, dynamo=True)
    assert frames.counts["stream_update"] == 2 and not frames.misses


def test_the_matrix_is_read_elsewhere_too():
    """As a regulariser does: it is a result of the op."""

    def behind(x, block, post, mix):
        return of.product(x, block, post, mix) + (mix - 0.25).square().mean()

    assert_fires(NAME, *build(deepseek_v4, behind), config=ON)


test_conditions = conditions(
    NAME, 1, ON,
    bfloat16=lambda: build(deepseek_v4, dtype=torch.bfloat16),
    inference=lambda: build(deepseek_v4),
    autocast=lambda: build(deepseek_v4),
    hy_v4_autocast=lambda: build(of.hy_v4, rows=2 * N),
)  # fmt: skip


@pytest.mark.parametrize("everything", [False, True], ids=["length", "everything"])
@pytest.mark.parametrize("form", ["deepseek_v4", "hy_v4", "joined_tokens"])
def test_one_graph_for_all_lengths(form, everything):
    """With `everything` the magnitude of the weights is an input of the frame, too."""
    body, rows = BEFORE[form]
    module, (x,) = build(body, rows=rows)
    if not everything:
        torch._dynamo.mark_dynamic(x, 1)
    frames = check(module, (x,), ON, dynamic=True if everything else None)
    assert frames.fired == ({NAME: 1} if form == "hy_v4" else {NAME: 1, "stream_update": 1}), frames.misses
    assert_serves(frames, module, of.streams(9), of.streams(4))


# --- what is no such connection, or is one with something else


def maps(pre=None, post=None, mix=None, norm=None, total=None):
    """DeepSeek-V4's form with one of its parts replaced."""

    def before(m, x):
        flat = (norm or (lambda x: unit(x.flatten(2).float())))(x)
        parts = F.linear(flat, m.fn.float()).split([N, N, N * N], -1)
        b0, b1, b2 = m.base.split([N, N, N * N])
        first = (pre or (lambda p, b: torch.sigmoid(p + b) + EPS))(parts[0], b0)
        second = (post or (lambda p, b: 2 * torch.sigmoid(p + b)))(parts[1], b1)
        third = (parts[2] + b2).unflatten(-1, (N, N))
        third = (mix or (lambda z: sinkhorn(torch.softmax(z, -1) + EPS)))(third)
        return (total or collapse)(first, x), second, third

    return before


def test_the_form_that_is_varied_fires():
    assert_fires(NAME, *build(maps()), config=ON)


def layer_norm(x):
    return F.layer_norm(x.flatten(2).float(), (N * D,))


def norm_of_each_stream(x):
    return unit(x.float()).flatten(2)


def norm_of_each_channel(x):
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-2, keepdim=True) + EPS)).flatten(2)


def norm_over_tokens(x):
    flat = x.flatten(2).float()
    return flat * torch.rsqrt(flat.square().mean(1, keepdim=True) + EPS)


def unequal_eps(z):
    z = torch.softmax(z, -1)
    z = z / (z.sum(-1, keepdim=True) + EPS)
    return z / (z.sum(-2, keepdim=True) + 2 * EPS)


def sums_of_another(z):
    z = torch.softmax(z, -1)
    return z / ((z * z).sum(-1, keepdim=True) + EPS)


def over_both(z):
    z = z.exp()
    return z / z.sum((-1, -2), keepdim=True)


def over_tokens(z):
    z = z.exp()
    return z / z.sum(1, keepdim=True)


def half_transposed(z):
    z = torch.softmax(z, -1)
    return z / z.mT.sum(-1, keepdim=True)


def clamped_sums(z):
    z = z.exp()
    return z / z.sum(-1, keepdim=True).clamp_min(0.5)


REFUSED = {
    "layer norm": ("layer-norm", maps(norm=layer_norm)),
    "norm of each stream": ("norm-axes", maps(norm=norm_of_each_stream)),
    "no norm": ("no-norm", maps(norm=lambda x: x.flatten(2).float())),
    "norm over tokens": ("axes", maps(norm=norm_over_tokens)),
    "post is tanh": ("map", maps(post=lambda p, b: torch.tanh(p + b))),
    "post is a softmax": ("map", maps(post=lambda p, b: torch.softmax(p + b, -1))),
}
# What is made of a matrix that the op gives: (form, axes that the op normalises over, what it begins with)
FURTHER = {
    "unequal eps": (unequal_eps, [-1], "softmax"), "sums of another": (sums_of_another, [], "softmax"),
    "over both": (over_both, [], "exp"), "over tokens": (over_tokens, [], "exp"),
    "half transposed": (half_transposed, [], "softmax"), "clamped sums": (clamped_sums, [], "exp"),
    "softmax over tokens": (lambda z: torch.softmax(z, 1), [], "linear"),
    "relu": (lambda z: torch.relu(z), [], "linear"), "triangle": (lambda z: torch.softmax(z, -1).tril(), [], "softmax"),
}  # fmt: skip
SILENT = {
    "weights are a softmax": maps(pre=lambda p, b: torch.softmax(p + b, -1)),
    "weights are a tanh": maps(pre=lambda p, b: torch.tanh(p + b)),
    "weights of the token before": maps(pre=lambda p, b: torch.sigmoid(p + b).roll(1, 1)),
    "weights turned round": maps(pre=lambda p, b: torch.sigmoid(p + b).flip(-1)),
    "sum of other streams": maps(total=lambda pre, x: collapse(pre, x.roll(1, 1))),
    "sum of doubled streams": maps(total=lambda pre, x: collapse(pre, x * 2)),
    "mean of the streams": maps(total=lambda pre, x: (pre.unsqueeze(-1) * x).mean(2)),
    "norm of other streams": maps(norm=lambda x: unit(x.roll(1, 1).flatten(2).float())),
}


@pytest.mark.parametrize("form", REFUSED)
def test_refused(form):
    tag, body = REFUSED[form]
    assert_refused(NAME, tag, *build(body), config=ON)


def weights_of_channels(m, x):
    """As Qwen4-Exp's residual has them."""
    normed = unit(x.flatten(2))
    gates = torch.sigmoid(F.linear(F.silu(F.linear(normed, m.fn)), m.fn.t())).unflatten(-1, (N, D))
    return (gates * normed.unflatten(-1, (N, D))).mean(dim=-2), torch.sigmoid(x.mean(-1)), None


def test_a_weight_a_channel():
    assert_refused(NAME, "channel-weights", *build(weights_of_channels), config=ON)


@pytest.mark.parametrize("form", FURTHER)
def test_what_is_made_of_the_matrix_stays(form):
    mix, axes, init = FURTHER[form]
    node = op_of(assert_fires(NAME, *build(maps(mix=mix)), config=ON), NAME)
    assert (node.args[7], node.args[9]) == (init, axes)


def test_what_is_made_of_the_weights_stays():
    for post in (lambda p, b: torch.sigmoid(p + b).square(), lambda p, b: torch.sigmoid(p) * b):
        assert_fires(NAME, *build(maps(post=post)), config=ON)


@pytest.mark.parametrize("form", SILENT)
def test_left_alone(form):
    assert not check_graph(*build(SILENT[form]), ON).counts[NAME]


def sum_over_channels(m, x):
    """The streams lie behind the channels: a sum over what is no stream."""
    block, post, mix = deepseek_v4(m, x)
    return (x * torch.sigmoid(m.base[:D])).sum(-1).sum(-1, keepdim=True) + block, post, mix


def logits_too(m, x):
    block, post, mix = deepseek_v4(m, x)
    (pre, _, _), *_ = logits(m, x)
    made = F.linear(unit(x.flatten(2).float()), m.fn.float())
    return block, post, mix + made.mean()


def of_logits(made):
    """A form whose logits are taken from the linear in another way."""

    def before(m, x):
        pre, post, mix = made(F.linear(unit(x.flatten(2).float()), m.fn.float()), m)
        return collapse(torch.sigmoid(pre), x), torch.sigmoid(post), mix.unflatten(-1, (N, N)).softmax(-1)

    return before


def swapped(m, x):
    """Joined channel by channel, not stream by stream."""
    made = F.linear(unit(x.transpose(2, 3).flatten(2)), m.fn)
    pre, post, mix = made.split([N, N, N * N], -1)
    return collapse(torch.sigmoid(pre), x), torch.sigmoid(post), mix.unflatten(-1, (N, N)).softmax(-1)


OTHER_LOGITS = {
    "turned round": of_logits(lambda z, m: z.flip(-1).split([N, N, N * N], -1)),
    "in turn": of_logits(lambda z, m: (z[..., 0 : 2 * N : 2], z[..., 1 : 2 * N : 2], z[..., 2 * N :])),
    "a base of each token": of_logits(lambda z, m: (z + z.mean(-1, keepdim=True)).split([N, N, N * N], -1)),
    "of the token before": of_logits(lambda z, m: z.roll(1, 1).split([N, N, N * N], -1)),
    "joined by channels": swapped,
}


@pytest.mark.parametrize("form", OTHER_LOGITS)
def test_other_logits(form):
    assert not check_graph(*build(OTHER_LOGITS[form]), ON).counts[NAME]


def weights_too(m, x):
    (pre, post, mix), *_ = logits(m, x)
    pre = torch.sigmoid(pre)
    return collapse(pre, x), torch.sigmoid(post) + pre.roll(1, 1), mix.unflatten(-1, (N, N)).softmax(-1)


def a_step_too(m, x):
    (pre, post, mix), *_ = logits(m, x)
    mix = mix.unflatten(-1, (N, N)).softmax(-1)
    later = mix / mix.sum(-2, keepdim=True)
    return collapse(torch.sigmoid(pre), x), torch.sigmoid(post), mix.roll(1, 1) + later


def two_weights_behind(m, x):
    (pre, post, mix), *_ = logits(m, x)
    one, two = torch.sigmoid(post), torch.sigmoid(mix[..., :N])
    return collapse(torch.sigmoid(pre), x), one * x.mean((-1, -2)).unsqueeze(-1) + two.roll(1, 1), None


ESCAPES = [weights_too, a_step_too]


@pytest.mark.parametrize("body", ESCAPES, ids=lambda f: f.__name__)
def test_escapes(body):
    frames = check_graph(*build(body), ON)
    assert not frames.counts[NAME] and frames.tags(NAME) & {"escapes", "map"}, frames.misses


@pytest.mark.parametrize("body", [sum_over_channels, two_weights_behind], ids=lambda f: f.__name__)
def test_right_whatever_fires(body):
    check_graph(*build(body), ON)


def test_parts_without_gradients():
    def before(m, x):
        block, post, mix = deepseek_v4(m, x)
        return block, post, mix

    def detached(m, x):
        with torch.no_grad():
            pre = torch.sigmoid(logits(m, x)[0][0])
        return collapse(pre, x), *deepseek_v4(m, x)[1:]

    assert_refused(NAME, "region", *build(detached), config=ON, dynamo=True)
