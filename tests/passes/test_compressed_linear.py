"""Linears that keep a projection of their input: which do, what becomes of gradients and bytes, and who is left alone."""

from __future__ import annotations

import copy

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import megacpp_compile
from megacpp_compile.config.options import Config
from megacpp_compile.errors import MegacppError, RuleWithoutHitError, TwoPoliciesError
from megacpp_compile.lowerings.compressed_linear import reference
from megacpp_compile.lowerings.compressed_linear.signs import magnitude, signs
from megacpp_compile.passes import linear
from tests.frames import check, largest_error, render, run, run_graph, train

from .conditions import cases, sampled

NAME = "compressed_linear"
DIM, HIDDEN, TOKENS = 32, 64, 24


class MLP(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.up_proj, self.gate_proj = (nn.Linear(DIM, HIDDEN, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(DIM), MLP(bias)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Dense(nn.Module):
    """Layers of a plain transformer."""

    def __init__(self, layers=1):
        super().__init__()
        torch.manual_seed(0)
        norm = lambda: nn.RMSNorm(DIM)  # noqa: E731
        blocks = {"attn_norm": norm, "attn": Attention, "mlp_norm": norm, "mlp": MLP}
        self.layers = nn.ModuleList(nn.ModuleDict({n: make() for n, make in blocks.items()}) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["attn"](layer["attn_norm"](x))
            x = x + layer["mlp"](layer["mlp_norm"](x))
        return x


def hidden(dtype=torch.float32, dim=DIM, tokens=TOKENS):
    return (torch.randn(2, tokens, dim, generator=torch.Generator().manual_seed(tokens)).to(dtype).requires_grad_(),)


def config(*names, **plan):
    return Config(strict=True, compress={"names": names or ("*",), "ratio": 0.25, **plan})


def projected(frames, exact):
    """The results of eager, with the gradients of compressed weights times c S S^T, as the graph's ops have S."""
    want = dict(exact)
    for node in compressed(frames.graph):
        x, weights, _, draw, rank, seed = node.args
        assert draw is None
        s = signs(x.meta["val"].shape[-1], rank, None, seed, torch.ones((), dtype=torch.float64))
        for w in weights:
            name = f"gradient of {parameter(w)}"
            want[name] = (exact[name].double() @ s @ s.t() / (rank * magnitude(rank) ** 2)).to(exact[name].dtype)
    return want


def compressed(gm):
    return [n for n in gm.graph.nodes if n.target is torch.ops.megacpp.compressed_linear.default]


def parameter(node):
    """The name of the parameter that a placeholder is."""
    while node.op != "placeholder":  # a cast, or a transposition
        node = node.args[0]
    modules, _, own = str(node.meta["dynamo_name"]).lower().rpartition("_parameters_")
    return f"{modules.partition('_modules_')[2].replace('_modules_', '.')}.{own.strip('_')}"


def check_projected(module, args, config, count=1, tolerance=1e-5):
    """The pass fires `count` times, and everything is eager's but weights' gradients, which are eager's projected."""
    frames = run(module, args, config)
    assert frames.counts[NAME] == count, frames.misses
    eager = copy.deepcopy(module)
    error, which = largest_error(frames.results, projected(frames, train(eager, eager, args)))
    assert error <= tolerance, (which, error)
    assert not frames.again(config)
    return frames


def compiled(module, **options):
    torch._dynamo.reset()
    return torch.compile(module, backend="megacpp", options={"strict": True, **options})


def trained(module, args, **options):
    return train(compiled(module, **options), module, args)


class Body(nn.Module):
    """`body(m, x)` with three linears of the input's width, of which `a` and `b` are to be compressed."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = body, nn.LayerNorm(DIM)
        self.a, self.b, self.c = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x):
        return self.body(self, x)


def one(m, x):
    return m.a(m.norm(x))


def gelu(m, x):
    return m.b(F.gelu(m.a(m.norm(x))))


def test_graph():
    """Two linears of one input keep one projection of it, the third its own."""
    module = Block(bias=True)
    frames = check_projected(module, hidden(), config(), 2)
    expecttest.assert_expected_inline(render(frames.graph), """\
layer_norm: f32[2, 24, 32] = layer_norm(x, [32], norm_weight, norm_bias)
compressed_linear: ((f32[2, 24, 64], f32[2, 24, 64]), f32[2, 24, 8]) = megacpp.compressed_linear(layer_norm, [mlp_gate_proj_weight, mlp_up_proj_weight], [mlp_gate_proj_bias, mlp_up_proj_bias], None, 8, 121482841833677192)
getitem: (f32[2, 24, 64], f32[2, 24, 64]) = compressed_linear[0]
getitem_1: f32[2, 24, 64] = getitem[0]
getitem_2: f32[2, 24, 64] = getitem[1]
silu: f32[2, 24, 64] = silu(getitem_1)
mul: f32[2, 24, 64] = mul.Tensor(silu, getitem_2)
compressed_linear_1: ((f32[2, 24, 32]), f32[2, 24, 16]) = megacpp.compressed_linear(mul, [mlp_down_proj_weight], [mlp_down_proj_bias], None, 16, 2794261908869906911)
getitem_3: (f32[2, 24, 32]) = compressed_linear_1[0]
getitem_4: f32[2, 24, 32] = getitem_3[0]
add: f32[2, 24, 32] = add.Tensor(x, getitem_4)
return [add]""")


def test_redrawn_with_each_update():
    """By the bits of the weight, so that the same weight makes the same gradient, and an updated one another."""
    module, args = Body(one), hidden()
    frames = run(module, args, config("a", redraw="update", seed=3))
    expecttest.assert_expected_inline(render(frames.graph), """\
layer_norm: f32[2, 24, 32] = layer_norm(x, [32], norm_weight, norm_bias)
detach: f32[32, 32] = detach(a_weight)
clone: f32[32, 32] = clone(detach)
view: int32[32, 32] = view.dtype(clone, int32)
sum: i64[] = sum(view)
compressed_linear: ((f32[2, 24, 32]), f32[2, 24, 8]) = megacpp.compressed_linear(layer_norm, [a_weight], [a_bias], sum, 8, 6483717322770482155)
getitem: (f32[2, 24, 32]) = compressed_linear[0]
getitem_1: f32[2, 24, 32] = getitem[0]
return [getitem_1]""")
    again = train(frames.compiled, module, args)
    assert all(torch.equal(again[name], t) for name, t in frames.results.items())
    directions = [again["gradient of a.weight"]]
    for _ in range(2):
        with torch.no_grad():
            module.a.weight.mul_(1 + 1e-3)
        directions.append(train(frames.compiled, module, args)["gradient of a.weight"])
    cosines = [float(F.cosine_similarity(a.flatten(), directions[0].flatten(), 0)) for a in directions[1:]]
    assert max(cosines) < 0.6, "of which a fixed projection would have more than 0.99"


def test_a_fixed_projection():
    module, args = Body(one), hidden()
    frames = run(module, args, config("a"))
    with torch.no_grad():
        module.a.weight.mul_(1 + 1e-3)
    after = train(frames.compiled, module, args)["gradient of a.weight"]
    assert F.cosine_similarity(after.flatten(), frames.results["gradient of a.weight"].flatten(), 0) > 0.99


def test_seeds_and_names_make_other_projections():
    module, args = Body(lambda m, x: m.a(m.norm(x)) * m.b(m.norm(x))), hidden()
    seeds = [[n.args[-1] for n in compressed(run(module, args, config(seed=seed)).graph)] for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1] and len({*seeds[0], *seeds[2]}) == 4


def post_norm(m, x):
    """The normed value is the residual too: sums keep nothing of it."""
    h = m.norm(x)
    return h + m.b(F.gelu(m.a(h)))


def by_hand(m, x):
    """Products in no module of their own: of rows, by weights as they are or transposed."""
    h = F.silu(m.norm(x)).flatten(0, 1)
    return h @ m.a.weight.t() + torch.mm(h, m.b.weight.mT)


def beside_a_frozen_one(m, x):
    """Which keeps no input, as its weight has no gradient."""
    h = m.norm(x)
    return m.a(h) + F.linear(h, m.c.weight.detach())


FORMS = {
    "gelu": (gelu, 2, "ab"), "low_rank": (lambda m, x: m.b(m.a(m.norm(x))), 2, "ab"), "post_norm": (post_norm, 2, "ab"),
    "beside_a_frozen_one": (beside_a_frozen_one, 1, "ab"), "by_hand": (by_hand, 1, "*"),
}


@pytest.mark.parametrize("form", FORMS)
def test_fires(form):
    body, count, names = FORMS[form]
    check_projected(Body(body), hidden(), config(*names), count)


def test_layers():
    """What SwiGLU and the three projections of attention read dies; what an attention returns it keeps itself."""
    frames = check_projected(Dense(2), hidden(), config(), 6)
    assert frames.tags(NAME) == {"alive"}


def test_bfloat16():
    check_projected(Block().bfloat16(), hidden(torch.bfloat16), config(), 2, tolerance=4e-2)


def test_autocast():
    """Parameters in float32, projected in bfloat16."""
    module, args = Block(), hidden()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        frames = run(module, args, config())
        exact = train(module, module, args)
    assert frames.counts[NAME] == 2
    error, which = largest_error(frames.results, projected(frames, exact))
    assert error <= 4e-2, which


def test_dynamic_lengths():
    module = Block()
    args = hidden(tokens=5)
    torch._dynamo.mark_dynamic(args[0], 1)
    frames = run(module, args, config())
    assert frames.counts[NAME] == 2
    got = train(frames.compiled, module, hidden(tokens=9))
    assert len(frames.graphs) == 1
    assert largest_error(got, projected(frames, train(module, module, hidden(tokens=9))))[0] <= 1e-5


def kept(module, args, **options):
    """(bytes that a compiled step keeps for backward, without parameters and inputs; the report)."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *args)}
    found = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage()  # held: an address says nothing of what is gone
        return t

    with megacpp_compile.record() as report, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        compiled(module, **options)(*args)
    return sum(storage.nbytes() for storage in found.values()), report


def test_bytes_of_a_dense_stack(no_kernels):
    """What is saved less in the whole is what the report says of the sites, and what the widths say."""
    module, args = Dense(), hidden(tokens=64)
    rows = args[0].numel() // DIM
    plain, _ = kept(module, args)
    fewer, report = kept(module, args, compress={"names": ("*.mlp.*",), "ratio": 0.25})
    sites = [site for site in report.sites if site.pass_name == NAME]
    assert plain - fewer == sum(site.saved_before - site.saved_after for site in sites)
    assert plain - fewer == rows * sum(width - width // 4 for width in (HIDDEN, DIM)) * 4
    assert fewer <= 0.85 * plain, fewer / plain


def test_the_report(no_kernels):
    with megacpp_compile.record() as report:
        trained(Body(gelu), hidden(), compress={"names": ("b",), "ratio": 0.5, "seed": 7})
    (site,) = (site for site in report.sites if site.pass_name == NAME)
    assert (site.fqn, site.op, site.effective) == ("b", "megacpp::compressed_linear", "reference")
    assert (site.saved_before, site.saved_after) == (2 * TOKENS * DIM * 4, 2 * TOKENS * DIM * 2)
    assert site.note == (
        "16 of 32 channels kept; weight gradients approximate; projection from seed 7 and the module's name, once"
    )


def test_lowered(no_kernels):
    """Verified site by site; what Inductor's partitioner makes of it has the gradients of the captured graph."""
    module, args = Block(bias=True), hidden()
    frames = run(module, args, config())
    got = trained(module, args, compress={"names": "*", "ratio": 0.25}, verify="each", require={NAME: 2})
    error, which = largest_error(got, frames.results)
    assert error <= 1e-5, which


@pytest.mark.end_to_end
@sampled(3, "redraw", ["never", "update"])
def test_compiled(redraw):
    """By Inductor, which must not write the rounds of the generator into each entry that reads a sign."""
    module, args = Body(lambda m, x: m.a(x * 2)), hidden()
    frames = run(module, args, config("a", redraw=redraw))
    got = trained(module, args, compress={"names": ("a",), "ratio": 0.25, "redraw": redraw})
    error, which = largest_error(got, frames.results)
    assert error <= 1e-5, which


def test_run_again_by_a_checkpoint(no_kernels):
    """Around the compiled module: the same projection, and the same gradient."""
    module, (x,) = Block(), hidden()
    step = compiled(module, compress={"names": "*", "ratio": 0.25, "redraw": "update"})
    want = train(step, module, (x,))
    got = train(lambda x: checkpoint(step, x, use_reentrant=False), module, (x,))
    assert all(torch.equal(got[name], t) for name, t in want.items())


def test_random_state_is_left_alone(no_kernels):
    step = compiled(Block(), compress={"names": "*", "redraw": "update"})
    torch.manual_seed(1)
    before = torch.get_rng_state()
    step(*hidden()).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "change",
    [lambda dx, dw, db: (dx, [4 * w for w in dw], db), lambda dx, dw, db: (dx, [-w for w in dw], db),
     lambda dx, dw, db: (dx * 1.001, dw, db)],
    ids=["longer weights", "turned weights", "input"],
)
def test_verification_notices(no_kernels, monkeypatch, change):
    """Weights' gradients are held against what they are on average, all else against eager."""
    plain = reference.compressed_linear_backward
    monkeypatch.setattr(reference, "compressed_linear_backward", lambda *args: change(*plain(*args)))
    with pytest.raises(MegacppError, match="gradient of"):
        trained(Body(gelu), hidden(), compress={"names": ("b",), "ratio": 0.5}, verify="each")


def refused(tag, body, *names, words=""):
    frames = check(Body(body), hidden(), config(*(names or ("a", "b"))))
    assert not frames.counts[NAME]
    reasons = [miss.reason for miss in frames.misses if miss.pass_name == NAME and miss.tag == tag]
    assert reasons and any(words in reason for reason in reasons), frames.misses


def of_normed(read):
    """What `read(m, normed)` makes of it."""
    return lambda m, x: read(m, m.norm(x))


def multiplied_by_what_it_reads(m, x):
    h = F.gelu(m.norm(x))
    return m.a(h) * h


ALIVE = {
    "the linear c reads": {"another_linear": of_normed(lambda m, h: m.a(h) + m.c(h))},
    "silu reads": {"an_activation": of_normed(lambda m, h: m.a(h) * F.silu(h))},
    "mul reads": {"multiplied_by_what_it_reads": multiplied_by_what_it_reads},
    "returns": {"returned": of_normed(lambda m, h: (m.a(h), h))},
    # what reads it without a gradient may be what backward is given
    "abs reads": {"detached": of_normed(lambda m, h: m.a(h) * h.detach().abs())},
    "relu, which made": {"behind_relu": of_normed(lambda m, h: m.a(h.relu()))},
    "tanh, which made": {"behind_tanh_through_a_view": of_normed(lambda m, h: m.a(h.tanh().flatten(0, 1)))},
    "whose caller holds it": {
        "of_the_frames_input": lambda m, x: m.a(x), "of_a_view_of_the_input": lambda m, x: m.a(x.transpose(0, 1)),
    },
}


@cases(ALIVE, 3)
def test_refuses_what_stays_alive(tag, body):
    refused("input" if "caller" in tag else "alive", body, words=tag)


def in_two_dtypes(m, x):
    h = m.norm(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = m.b(h)
    return m.a(h) + low


OTHERS = {
    "views": of_normed(lambda m, h: m.a(h) + m.b(h.flatten(0, 1)).view(h.shape)),
    "dtype": in_two_dtypes,
    "expanded": of_normed(lambda m, h: m.a(h[:, :1].clone().expand(-1, 64, -1))),
    "checkpointed": of_normed(lambda m, h: checkpoint(lambda h: m.b(F.gelu(m.a(h))), h, use_reentrant=False)),
}


@sampled(3, "tag", OTHERS)
def test_refuses(tag):
    refused(tag, OTHERS[tag])


def test_refuses_a_bias_on_some():
    both = of_normed(lambda m, h: F.linear(h, m.a.weight, m.a.bias) + F.linear(h, m.b.weight))
    refused("bias", both, "*")


def assert_only(tag, module, config):
    frames = check(module, hidden(), config)
    assert frames.tags(NAME) == {tag} and not frames.counts[NAME]


def test_refuses_a_single_vector():
    assert_only("shape", Body(lambda m, x: m.a(F.gelu(x.sum((0, 1))))), config("a"))


def test_refuses_frozen_weights():
    module = Body(gelu)
    module.b.weight.requires_grad_(False)
    assert_only("frozen", module, config("b"))


@pytest.mark.parametrize("name", ["router", "lm_head", "lora_a", "embed_out", "final_norm"])
def test_leaves_some_roles_alone(name):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            setattr(self, name, nn.Linear(DIM, DIM))

        def forward(self, x):
            return getattr(self, name)(F.gelu(x))

    assert_only("role", Named(), config())


def test_leaves_what_another_pass_took():
    class Latent(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.norm, self.up = nn.Linear(DIM, 8), nn.RMSNorm(8), nn.Linear(8, DIM)

        def forward(self, x):
            return self.up(self.norm(self.down(F.gelu(x))))

    frames = check(Latent(), hidden(), config())
    assert frames.fired == {"down_norm_up": 1} and frames.tags(NAME) == {"taken"}


def test_leaves_float8(monkeypatch):
    monkeypatch.setattr(linear, "no_float8", lambda device: "")
    plan = megacpp_compile.PrecisionPlan({"*.down_proj": "fp8_current", "*": "bf16"}, gate=False)
    both = Config(strict=True, precision=plan, compress={"names": "*.down_proj"})
    frames = run(Block().bfloat16(), hidden(torch.bfloat16), both)
    assert frames.fired == {"linear": 1} and frames.tags(NAME) == {"taken"}


def test_without_the_option():
    assert run_graph(Body(gelu), hidden()).counts[NAME] == 0


def test_disabled():
    assert NAME not in run(Body(gelu), hidden(), Config(strict=True, disable=(NAME,), compress={"names": "a"})).counts


def test_inference(no_kernels):
    module, (x,) = Body(gelu), hidden()
    with megacpp_compile.record() as report, torch.no_grad():
        got = compiled(module, compress={"names": ("a", "b")})(x)
    assert not report.sites and not report.misses
    torch.testing.assert_close(got, module(x))


@sampled(3, "policy", ["selective", 0.3])
def test_a_policy_that_recomputes_the_input_is_an_error(no_kernels, policy):
    with pytest.raises(TwoPoliciesError, match="compressed_linear of layers.0.mlp.down_proj"):
        trained(Dense(), hidden(), compress={"names": ("*.down_proj",)}, policy=policy)


@pytest.mark.end_to_end
def test_a_policy_of_other_blocks(no_kernels):
    """What it recomputes is attention's; the gradients are those without it."""
    compress = {"names": ("*.mlp.down_proj",)}
    want = trained(Dense(), hidden(), compress=compress)
    got = trained(Dense(), hidden(), compress=compress, policy={"eblock": "none"}, require={NAME: 1})
    assert largest_error(got, want)[0] <= 1e-6


def test_a_glob_without_a_hit(no_kernels):
    with pytest.raises(RuleWithoutHitError, match=r"compress: the pattern '\*.down' hits no module"):
        trained(Dense(), hidden(), compress={"names": ("*.down",)})


def test_regional(eager_backend):
    """One artifact for layers that the option treats alike, and one for those that it does not."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(5))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model()
    torch._dynamo.reset()
    with megacpp_compile.record() as report:
        megacpp_compile.compile(model, compress={"names": ("layers.[1-4].mlp.*",)})(*hidden())
    assert [(f.block, f.blocks, f.passes[NAME]) for f in report.frames] == [("layers.0", 1, 0), ("layers.1", 4, 2)]
