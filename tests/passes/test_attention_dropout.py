"""Attention that is written out with dropout of its probabilities: other ones than eager drops, as many, and in backward the
same ones. What it gives is held to eager code that drops what the op drops."""

from __future__ import annotations

import copy

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import megacpp_compile
from megacpp_compile._torch.inductor import config as inductor_config
from megacpp_compile.config.options import Config
from megacpp_compile.lowerings.attention._dropout import WORDS, kept
from megacpp_compile.passes import attention
from tests.frames import TOLERANCE, largest_error, render, run, run_graph, train
from tests.remat.steps import without_code
from tests.seeds import Draws

from .conditions import op_of
from .test_attention import INF, NAME, B, Block, D, H, T, causal, repeated, scored

draw = Draws(__name__)
P = 0.3


def of_torch(w, p, training):
    return F.dropout(w, p, training)


def of_the_op(w, p, training):
    """What the op drops of w [b, ..., t, s]."""
    t, s = w.shape[-2:]
    rows = w.shape[:-2].numel()
    there = kept(torch.randint(WORDS, [s + rows * t]), p, 1, rows, t, s).view(w.shape)
    return w * there / (1 - p) if p < 1 else w * 0


class Dropping(Block):
    """`body(module, q, k, v)`, in which `module.drop(probabilities)` is `how`."""

    p, how = P, staticmethod(of_torch)

    def drop(self, w):
        return self.how(w, self.p, self.training)


def block(body, *more, groups=H, p=P):
    torch.manual_seed(0)
    module = Dropping(body, groups)
    module.p = p
    return module, (draw(B, T, 12).requires_grad_(), *more)


def by_the_op(module):
    """A copy that runs in eager, and drops what the op does."""
    module = copy.deepcopy(module)
    module.how = of_the_op
    return module


def assert_drops(module, args, frames, want=None, tolerance=TOLERANCE[torch.float32]):
    assert frames.counts[NAME] == 1, frames.misses
    eager = by_the_op(module)
    error, which = largest_error(frames.results, want or train(eager, eager, args))
    assert error <= tolerance, (which, error)
    return op_of(frames, NAME)


def plain(m, q, k, v):
    return m.drop(scored(q, k).masked_fill(~causal(q, k), INF).softmax(-1)) @ v


def hugging_face(m, q, k, v):
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = F.softmax(scored(q, repeated(k)).masked_fill(~causal(q, k), INF), dim=-1, dtype=wide).to(q.dtype)
    return (m.drop(weights) @ repeated(v)).transpose(1, 2).contiguous().flatten(2)


def before_the_cast(m, q, k, v):
    return m.drop(scored(q, k).softmax(-1, dtype=torch.float64)).to(v.dtype) @ v


def with_sinks(q, m):
    return m.sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)


def behind_sinks(m, q, k, v):
    return m.drop(torch.cat([scored(q, k), with_sinks(q, m)], -1).softmax(-1)[..., :-1]) @ v


def window_and_softcap(m, q, k, v):
    scores = torch.tanh(scored(q, k) / 5) * 5
    return m.drop(scores.masked_fill(~(causal(q, k) & causal(q, k).triu(-2)), INF).softmax(-1)) @ v


def batched(m, q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(m.drop(torch.bmm(q, k.mT).softmax(-1)), v)


def normalised_behind(m, q, k, v):
    e = scored(q, k).exp()
    return (m.drop(e) @ v) / e.sum(-1, keepdim=True)


def groups_of_heads(m, q, k, v):
    weights = m.drop(torch.einsum("bgrtc,bgsc->bgrts", q.unflatten(1, (2, 2)), k).softmax(-1))
    return torch.einsum("bgrts,bgsc->bgrtc", weights, v).flatten(1, 2)


def with_bias(m, q, k, v):
    return m.drop((scored(q, k) + m.bias).softmax(-1)) @ v


def padded_keys(m, q, k, v, there):
    return m.drop(scored(q, k).masked_fill(~there[:, None, None], INF).softmax(-1)) @ v


def documents(m, q, k, v, ids):
    same = ids[:, None, :, None] == ids[:, None, None, :]
    return m.drop(scored(q, k).masked_fill(~(same & causal(q, k)), INF).softmax(-1)) @ v


def learned_queries(m, q, k, v):
    return (m.drop((m.latents @ k.mT).softmax(-1)) @ v).sum(-2, keepdim=True) + q


IDS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]])
THERE = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
BODIES = {
    "plain": lambda: block(plain), "hugging_face": lambda: block(hugging_face, groups=2),
    "before_the_cast": lambda: block(before_the_cast), "behind_sinks": lambda: block(behind_sinks),
    "window_and_softcap": lambda: block(window_and_softcap), "batched": lambda: block(batched),
    "normalised_behind": lambda: block(normalised_behind), "groups_of_heads": lambda: block(groups_of_heads, groups=2),
    "with_bias": lambda: block(with_bias), "padded_keys": lambda: block(padded_keys, THERE),
    "documents": lambda: block(documents, IDS), "learned_queries": lambda: block(learned_queries),
    "all": lambda: block(plain, p=1.0), "nearly_none": lambda: block(plain, p=1e-3),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_drops_what_the_op_drops(name):
    module, args = BODIES[name]()
    op = assert_drops(module, args, run_graph(module, args))
    assert op.args[13] == module.p
    wide = copy.deepcopy(module).double()
    x = args[0].detach().double().requires_grad_(), *args[1:]
    assert_drops(wide, x, run_graph(wide, x), tolerance=1e-12)


def in_place(w, p, training):
    return F.dropout(w, p, training, inplace=True)


def of_a_module(w, p, training):
    return nn.Dropout(p)(w)


def with_the_mask(w, p, training):
    return torch.native_dropout(w, p, training)[0]


def by_hand(w, p, training):
    return w * (torch.empty_like(w).bernoulli_(1 - p) / (1 - p))


def in_place_behind_a_cast(w, p, training):
    return F.dropout(w.double(), p, training, inplace=True).float()


@pytest.mark.parametrize("how", [in_place, in_place_behind_a_cast, of_a_module, with_the_mask, by_hand, torch.dropout])
def test_spellings(how):
    module, args = block(plain)
    spelled = copy.deepcopy(module)
    spelled.how = how
    assert_drops(module, args, run_graph(spelled, args))


def torchs(m, q, k, v):
    if m.how is not of_torch:
        return plain(m, q, k, v)
    return F.scaled_dot_product_attention(q, k, v, causal(q, k), dropout_p=m.p if m.training else 0.0)


def test_torchs_op_with_a_mask(monkeypatch):
    """On GPUs; where eager's own numbers are asked for it stays, as on a CPU."""
    module, args = block(torchs)
    assert not run_graph(module, args).counts[NAME]
    monkeypatch.setattr(attention, "_is_quicker", lambda *_: True)
    assert_drops(module, args, run_graph(module, args))
    frames = run_graph(module, args, Config(inductor={"fallback_random": True}))
    assert not frames.counts[NAME] and not frames.tags(NAME)


def sinks_before_they_are_left_out(m, q, k, v):
    return m.drop(torch.cat([scored(q, k), with_sinks(q, m)], -1).softmax(-1))[..., :-1] @ v


def test_sinks_may_be_dropped_before_they_are_left_out():
    module, args = block(behind_sinks)
    before = copy.deepcopy(module)
    before.body = sinks_before_they_are_left_out
    assert_drops(module, args, run_graph(before, args))


@pytest.mark.parametrize("how", ["eval", "none"])
def test_what_drops_nothing_draws_nothing(how):
    module, args = block(plain, p=0.0 if how == "none" else P)
    module.train(how == "none")
    frames = run_graph(module, args)
    assert frames.counts[NAME] == 1 and len(op_of(frames, NAME).args) == 12
    assert "randint" not in render(frames.graph)


def test_graph():
    frames = run_graph(*block(plain))
    expecttest.assert_expected_inline(render(frames.graph), """\
linear: f32[2, 6, 32] = linear(arg9_1, q_weight, q_bias)
view: f32[2, 6, 4, 8] = view(linear, [2, 6, 4, 8])
transpose: f32[2, 4, 6, 8] = transpose.int(view, 1, 2)
linear_1: f32[2, 6, 32] = linear(arg9_1, k_weight)
view_1: f32[2, 6, 4, 8] = view(linear_1, [2, 6, 4, 8])
transpose_1: f32[2, 4, 6, 8] = transpose.int(view_1, 1, 2)
linear_2: f32[2, 6, 32] = linear(arg9_1, v_weight, v_bias)
view_2: f32[2, 6, 4, 8] = view(linear_2, [2, 6, 4, 8])
transpose_2: f32[2, 4, 6, 8] = transpose.int(view_2, 1, 2)
transpose_3: f32[2, 4, 8, 6] = transpose.int(transpose_1, -1, -2)
permute: f32[2, 4, 6, 8] = permute(transpose_3, [0, 1, 3, 2])
randint: i64[54] = randint.low(0, 9223372036854775807, [54], dtype=int64, device=cpu)
attention: (f32[2, 4, 6, 8], f32[2, 4, 6], f32[0]) = megacpp.attention(transpose, permute, transpose_2, None, None, None, None, 0.3535533905932738, 0.0, None, 0, -inf, randint, 0.3)
getitem: f32[2, 4, 6, 8] = attention[0]
clone: f32[2, 4, 6, 8] = clone(getitem, memory_format=contiguous_format)
return [clone]""")


def test_sites_draw_for_themselves():
    module, args = block(lambda m, q, k, v: plain(m, q, k, v) - plain(m, q, k, v))
    frames = run_graph(module, args)
    assert frames.counts[NAME] == 2 and frames.results["output 0"].abs().max() > 0.1


def test_other_dropout_stays():
    module, args = block(lambda m, q, k, v: F.dropout(plain(m, q, k, v), 0.5))
    frames = run_graph(module, args)
    assert frames.counts[NAME] == 1 and render(frames.graph).count("dropout(") == 1
    assert 0.3 < (frames.results["output 0"] == 0).double().mean() < 0.7


def test_under_autocast():
    module, args = block(hugging_face, groups=2)
    eager = by_the_op(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = train(eager, eager, args)
        frames = run(module, args)
    assert_drops(module, args, frames, want, TOLERANCE[torch.bfloat16])


def test_in_bfloat16_and_without_gradients():
    module, (x,) = block(hugging_face, groups=2)
    module, args = module.bfloat16().requires_grad_(False), (x.detach().bfloat16(),)
    with torch.no_grad():
        assert_drops(module, args, run(module, args), tolerance=TOLERANCE[torch.bfloat16])


@pytest.mark.end_to_end
@pytest.mark.parametrize("everything", [False, True])
def test_lengths(everything):
    """With `dynamic=True` the probability is an input."""
    module, _ = block(hugging_face, groups=2)
    frames = None
    for length in (5, 9, 4):
        args = (Draws(f"{length} tokens")(B, length, 12).requires_grad_(),)
        if not everything:
            torch._dynamo.mark_dynamic(args[0], 1)
        frames = frames or run(module, args, dynamic=True if everything else None)
        frames.results = train(frames.compiled, module, args)
        assert_drops(module, args, frames)
    assert len(frames.graphs) == 1


def test_a_probability_that_is_none_is_an_error_as_in_eager():
    module, args = block(plain, p=1.5)
    with pytest.raises(Exception, match="dropout probability has to be between 0 and 1"):
        run(module, args)


def twice(m, q, k, v):
    return m.drop(m.drop(scored(q, k).softmax(-1))) @ v


def scores_dropped(m, q, k, v):
    return m.drop(scored(q, k)).softmax(-1) @ v


def also_returned(m, q, k, v):
    weights = m.drop(scored(q, k).softmax(-1))
    return weights @ v, weights


def before_they_are_dropped(m, q, k, v):
    weights = scored(q, k).softmax(-1)
    return m.drop(weights) @ v, weights


def whole_heads(m, q, k, v):
    return F.dropout2d(scored(q, k).softmax(-1), P) @ v


def alpha(m, q, k, v):
    return F.alpha_dropout(scored(q, k).softmax(-1), P, True) @ v


def without_a_gradient(m, q, k, v):
    with torch.no_grad():
        weights = m.drop(scored(q, k).softmax(-1))
    return weights @ v


def dropped_without_a_gradient(m, q, k, v):
    weights = scored(q, k).softmax(-1)
    with torch.no_grad():
        weights = m.drop(weights)
    return weights @ v


def cast_without_a_gradient(m, q, k, v):
    weights = m.drop(scored(q, k).softmax(-1)).double()
    with torch.no_grad():
        weights = weights.float()
    return weights @ v


@pytest.mark.parametrize("body", [without_a_gradient, dropped_without_a_gradient, cast_without_a_gradient])
def test_a_region_without_gradients(body):
    module, args = block(body)
    frames = run(module, args)
    assert "region" in frames.tags(NAME) and not frames.counts[NAME]
    assert largest_error(frames.results, train(module, module, args))[0] <= TOLERANCE[torch.float32]


def noise_of_another_probability(m, q, k, v):
    weights = scored(q, k).softmax(-1)
    return (weights * (torch.empty_like(weights).bernoulli_(0.5) / 0.7)) @ v


@pytest.mark.parametrize(("tag", "body"), [
    ("dropout", twice), ("scores", scores_dropped), ("weights-kept", also_returned), ("weights-kept", before_they_are_dropped),
    ("weights-kept", whole_heads), ("weights-kept", alpha), ("weights-kept", noise_of_another_probability),
])  # fmt: skip
def test_refuses(tag, body):
    module, args = block(body)
    frames = run_graph(module, args)
    assert tag in frames.tags(NAME) and not frames.counts[NAME]
    error, which = largest_error(frames.results, train(module, module, args))
    assert error <= TOLERANCE[torch.float32], (which, error)


@pytest.mark.parametrize("by", ["option", "setting"])
def test_eager_s_own_numbers(by):
    module, args = block(plain)
    options = {"inductor": {"fallback_random": True}} if by == "option" else {}
    with inductor_config.patch(fallback_random=by == "setting"):
        frames = run_graph(module, args, Config(strict=True, **options))
    assert "dropout" in frames.tags(NAME) and not frames.counts[NAME]
    assert largest_error(frames.results, train(module, module, args))[0] <= TOLERANCE[torch.float32]


class Checkpointed(nn.Module):
    def __init__(self, module, preserve):
        super().__init__()
        self.module, self.preserve = module, preserve

    def forward(self, *args):
        return checkpoint(self.module, *args, use_reentrant=False, preserve_rng_state=self.preserve)


class Linear(nn.Module):
    """Whose result is linear in its values `v`."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(12, 2 * H * D)

    def forward(self, x, v):
        q, k = self.proj(x).view(*x.shape[:2], 2 * H, D).transpose(1, 2).chunk(2, 1)
        return F.dropout(scored(q, k).softmax(-1), P, self.training) @ v


@pytest.mark.end_to_end
@pytest.mark.parametrize("how", ["alone", "checkpoint", "checkpoint_another_state", "verify"])
def test_backward_drops_what_forward_dropped(how):
    """The gradient of values is the same function of the probabilities: <dv, v> is <grad, out>. Words are drawn anew in each
    call, and the same ones again by `manual_seed`."""
    module, x, v = linear()
    options = {"verify": "each"} if how == "verify" else {}
    given = Checkpointed(module, how == "checkpoint") if "checkpoint" in how else module
    found = []
    with without_code([]), megacpp_compile.record() as report:
        compiled = torch.compile(given, backend="megacpp", options=options)
        for seed in (1, 1, 2, None):
            if seed is not None:
                torch.manual_seed(seed)
            found.append(stepped(compiled, x, v))
    assert report.counts[NAME] == 1
    assert {m.tag for m in report.misses} == ({"not-verified"} if how == "verify" else set())
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    for one, other in ((0, 2), (2, 3)):
        assert not torch.equal(found[one][0], found[other][0])


def linear():
    torch.manual_seed(0)
    torch._dynamo.reset()
    return Linear(), draw(B, T, 12).requires_grad_(), draw(B, H, T, D).requires_grad_()


def stepped(compiled, x, v):
    """The output and the gradients, in which backward has dropped what forward has."""
    out = compiled(x, v)
    grad = torch.randn_like(out)  # what is drawn between forward and backward is none of theirs
    dx, dv = torch.autograd.grad(out, (x, v), grad)
    torch.testing.assert_close((dv * v).sum(), (grad * out).sum(), rtol=1e-4, atol=1e-4)
    return out.detach(), dx, dv


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["selective", "alone", "full"])
def test_inductor_s_own_code(how):
    """Draws words by Inductor's generator, perhaps in backward again, and drops by them in the code that it compiles: the
    mean of many results is that without dropout."""
    module, x, v = linear()
    options = {"policy": how} if how in ("full", "selective") else {}
    compiled = torch.compile(module, backend="megacpp", options=options)
    outs = torch.stack([stepped(compiled, x, v)[0] for _ in range(100)])
    off = (outs.mean(0) - module.eval()(x, v).detach()) / (outs.std(0) / 10)
    assert off.abs().max() < 6 and 0.6 < off.square().mean() < 1.6


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", ["alone", "cuda_graphs", "full", "checkpoint"])
def test_on_a_gpu(how):
    """By the kernels in Triton, whose words each replay of a CUDA graph draws anew."""
    tokens = 200
    module, *_ = linear()
    x, v = draw(B, tokens, 12).cuda().requires_grad_(), draw(B, H, tokens, D).cuda().requires_grad_()
    options = {"cuda_graphs": {"inductor": {"triton.cudagraphs": True}}, "full": {"policy": "full"}}.get(how, {})
    with megacpp_compile.record() as report:
        given = Checkpointed(module.cuda(), True) if how == "checkpoint" else module.cuda()
        compiled = torch.compile(given, backend="megacpp", options=options)
        outs = []
        for step in range(100):
            torch.manual_seed(step if step else 1)  # the second call repeats the first
            torch.compiler.cudagraph_mark_step_begin()
            outs.append(stepped(compiled, x, v)[0].clone())
    assert report.counts[NAME] == 1 and [row["effective"] for row in report.frames[0].attention] == ["cuda_triton"]
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
    outs, plain_out = torch.stack(outs[1:]), module.eval()(x, v).detach()
    off = (outs.mean(0) - plain_out) / (outs.std(0) / 99**0.5)
    assert off.abs().max() < 7 and 0.6 < off.square().mean() < 1.6
