"""What stands around a latent: low-rank paths beside its projections, other readers, and blocks that have none."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacpp_compile.config.options import Config
from tests.corpus import jitter_gains
from tests.corpus.near_misses import RANK, ROPE, SEQ, inverse_rms
from tests.corpus.spellings import PlainMLA
from tests.frames import check_graph, run, run_graph, train

from .conditions import op_of, sampled
from .contract import assert_dynamic, assert_fires
from .test_down_norm_up import NAME, build, hidden

_KEEP = 8  # the op's argument that has it keep the latent


class Adapted(nn.Module):
    """A frozen linear with low-rank paths beside it, in a dtype of their own."""

    def __init__(self, base, rank=3, scale=0.7, paths=1, dropout=0.0, dtype=torch.float32):
        super().__init__()
        self.base, self.scale, self.dtype = base.requires_grad_(False), scale, dtype
        self.a = nn.ModuleList(nn.Linear(base.in_features, rank, bias=False, dtype=dtype) for _ in range(paths))
        self.b = nn.ModuleList(nn.Linear(rank, base.out_features, bias=False, dtype=dtype) for _ in range(paths))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x):
        y = self.base(x)
        for a, b in zip(self.a, self.b, strict=True):
            y = self.path(y, a, b, self.dropout(x.to(self.dtype)))
        return y.to(x.dtype)

    def path(self, y, a, b, x):
        return y + b(a(x)) * self.scale


def latent(m, x):
    h, rest = m.latent_and_rest(x)
    return m.norm(h), rest


def projected(m, x):
    h, rest = latent(m, x)
    return m.up(h), rest


def adapted(*which, of=Adapted, **options):
    module, args = build(projected)
    for name in which:
        setattr(module, name, of(getattr(module, name), **options))
    return module, args


@sampled(
    3, ("which", "options"),
    [(["wide_down"], {}), (["wide_down", "up"], {"paths": 2, "dropout": 0.2}),
     (["wide_down", "up"], {"dtype": torch.float64, "scale": 2})],
    ids=["down", "both, several, with dropout", "in a wider dtype"],
)
def test_low_rank_paths(which, options):
    assert_fires(NAME, *adapted(*which, **options))


def test_low_rank_paths_all_over_a_block():
    """The passes behind it fire as without."""
    block = PlainMLA().requires_grad_(False)
    for name, child in list(block.named_children()):
        if isinstance(child, nn.Linear):
            setattr(block, name, Adapted(child))
    fired = check_graph(block, block.example_inputs()).fired
    assert fired == {"down_norm_up": 2, "mla_rope_q": 1, "mla_rope_kv": 1}


class CastToWhatItIsAddedTo(Adapted):
    def path(self, y, a, b, x):
        return y + (b(a(x)) * self.scale).to(x.dtype)


def test_low_rank_path_that_autocast_adds_in_float32():
    """The linear's result is in bfloat16 under autocast, the path's is cast to the model's float32, and so is the sum:
    the op adds them in it, and its error is no larger than eager's is."""
    module, args = adapted("wide_down", "up", of=CastToWhatItIsAddedTo)
    exact = copy.deepcopy(module).double()
    exact.wide_down.dtype = exact.up.dtype = torch.float64
    want = train(exact, exact, tuple(a.detach().double().requires_grad_() for a in args))
    around = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    eager = train(module, module, args, around)
    frames = run(module, args, around=around)
    assert frames.counts[NAME] == 1 and frames.results["output 1"].dtype == torch.float32
    node = op_of(frames, NAME)
    assert node.args[-1] == torch.float32
    assert frames.results.keys() == eager.keys() == want.keys()
    for name, got in frames.results.items():
        assert got.dtype == eager[name].dtype
        errors = [float((t.double() - want[name]).abs().max()) for t in (got, eager[name])]
        assert errors[0] <= 1.5 * errors[1] + 1e-6, name


def test_low_rank_path_keeps_what_it_kept_alone():
    """The rows of rank width and rrms; with the rows that dropout leaves, also the latent, as normed it is read twice."""
    (site,) = _sites(*adapted("wide_down"))
    tokens = 2 * SEQ
    assert site.saved_after == 4 * tokens * (1 + 3) < site.saved_before
    node = op_of(run(*adapted("up", dropout=0.2)), NAME)
    assert node.args[_KEEP] is True


def test_low_rank_path_of_dynamic_numbers():
    assert_dynamic(NAME, adapted("wide_down")[0], hidden, everything=True)


def path(make):
    """An adapter whose path is `make(self, y, a, b, x)`."""
    return type("Path", (Adapted,), {"path": make})


def rows_read_twice(self, y, a, b, x):
    rows = a(x)
    return y + b(rows) + rows.square().sum(-1, keepdim=True)


SPELLED = {
    "added_by_alpha": path(lambda self, y, a, b, x: torch.add(y, b(a(x)), alpha=self.scale)),
    "scaled_inside": path(lambda self, y, a, b, x: self.scale * ((x @ a.weight.t()) * 3 @ b.weight.t()) + y),
    "divided_and_subtracted": path(lambda self, y, a, b, x: y - b(-a(x) / 3) * (self.scale / 2)),
}
NO_PATHS = {
    "not_linear": path(lambda self, y, a, b, x: y + b(a(x).relu()) * self.scale),
    "gated": path(lambda self, y, a, b, x: y + b(a(x)) * x.mean(-1, keepdim=True)),
    "rows_read_twice": path(rows_read_twice),
    "base_read_twice": path(lambda self, y, a, b, x: y + b(a(x)) + y.mean()),
}


@sampled(3, "how", SPELLED)
def test_low_rank_path_spelled_otherwise(how):
    assert_fires(NAME, *adapted("wide_down", of=SPELLED[how]))


@sampled(3, "how", NO_PATHS)
def test_other_paths_are_none(how):
    frames = check_graph(*adapted("wide_down", of=NO_PATHS[how]))
    assert not frames.counts[NAME] and frames.tags(NAME) == {"no-path"}


def test_paths_of_full_rank_are_none():
    assert not check_graph(*adapted("wide_down", rank=RANK + ROPE)).counts[NAME]


def everything_returned(m, x):
    h, rest = m.latent_and_rest(x)
    normed = m.norm(h)
    return m.up(normed), rest, h, normed


def latent_returned(m, x):
    h = m.down(x)
    return m.up(m.norm(h)), h


def latent_written_to_cache(m, x):
    h = m.down(x)
    m.cache[:, :SEQ] = h.detach()
    return m.up(m.norm(h))


def write(m, h, x):
    m.cache[:, :SEQ].copy_(h.detach())
    return ()


def read(more):
    """The projection and the rest beside what `more(m, normed, x)` makes: several results, or none."""

    def body(m, x):
        h, rest = latent(m, x)
        return m.up(h), rest, *more(m, h, x)

    return body


def indexer_without_gradients(m, x):
    h, rest = latent(m, x)
    with torch.no_grad():
        best = (m.biased_up(h) * x.mean(-1, keepdim=True)).topk(2, -1).indices
    return m.up(h) + best.sum(-1, keepdim=True), rest


def router_without_gradients_before(m, x):
    h, rest = latent(m, x)
    with torch.no_grad():
        gate = h.mean(-1, keepdim=True)
    return m.up(h) * gate, rest


normed_returned = read(lambda m, h, x: (h,))
# body -> whether the op keeps the latent: where it is alive anyway, or something else keeps what it can be made from
READ = {
    "normed_returned": (normed_returned, False), "everything_returned": (everything_returned, True),
    "latent_returned": (latent_returned, True), "latent_written_to_cache": (latent_written_to_cache, True),
    "normed_written_to_cache": (read(write), False),
    "normed_appended_to_cache": (read(lambda m, h, x: (torch.cat((m.cache[:, :3].clone(), h), 1),)), False),
    "indexer_without_gradients": (indexer_without_gradients, False),
    "indexer_trained_apart": (read(lambda m, h, x: (m.biased_up(h.detach()),)), True),
    "router_without_gradients_before": (router_without_gradients_before, False),
}


@sampled(3, "reader", READ)
def test_read_by_something_else(reader):
    body, kept = READ[reader]
    node = op_of(assert_fires(NAME, *build(body), dynamo="written" in reader), NAME)
    assert (node.args[_KEEP : _KEEP + 1] == (True,)) == kept


@pytest.mark.parametrize("body", [everything_returned, indexer_without_gradients], ids=lambda f: f.__name__)
def test_read_by_something_else_in_bfloat16(body):
    assert_fires(NAME, *build(body, torch.bfloat16), config=Config(strict=True, verify="each"))


def test_read_by_something_else_saved():
    """The plain subgraph is counted without the op beside it."""
    (site,) = _sites(*build(normed_returned))
    assert site.saved_after == 4 * 2 * SEQ < 3 * 4 * 2 * SEQ * RANK <= site.saved_before + 4 * 2 * SEQ * RANK
    (site,) = _sites(*build(latent_returned))
    assert site.saved_after == 4 * 2 * SEQ * (1 + RANK)


def inside(make):
    """The latent's norm with a number inside: `make(m, unit latent, number, length)` is what the projection reads."""

    def body(m, x, number):
        h, rest = m.latent_and_rest(x)
        return m.up(make(m, h * inverse_rms(h), number, x.shape[1])), rest

    return body


NUMBERS = {
    "scaled_behind": inside(lambda m, h, number, _: h * m.gain * number),
    "scaled_inside": inside(lambda m, h, number, _: h * number * m.gain),
    "divided_inside": inside(lambda m, h, number, _: h * m.gain / number),
}


class Scaled(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.block, _ = build(lambda m, x: body(m, x, self.number))
        self.number = 1.7

    def forward(self, x):
        return self.block(x)


@sampled(3, "where", NUMBERS)
def test_scaled_by_a_number_of_the_model(where):
    assert_dynamic(NAME, Scaled(NUMBERS[where]), hidden, everything=True)


def test_a_number_that_changes_from_call_to_call_stays_one():
    by_the_length = inside(lambda m, h, _, length: h * length**0.5 * m.gain)
    assert_dynamic(NAME, Scaled(by_the_length), hidden, count=0, everything=True)


class Blocks(nn.Module):
    """Linears and norms as transformers have them: every output narrower than what it is made of and read by wide
    projections, as a latent is."""

    def __init__(self, bodies):
        super().__init__()
        self.bodies = bodies
        dim, inner = 40, 160
        self.q, self.k, self.v = (nn.Linear(dim, n, bias=False) for n in (64, 32, 64))
        self.o, self.patch, self.down = (nn.Linear(n, dim, bias=False) for n in (64, 64, inner))
        self.gate, self.up = (nn.Linear(dim, inner, bias=False) for _ in range(2))
        self.rms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(4))
        self.ln = nn.ModuleList(nn.LayerNorm(dim) for _ in range(4))
        self.q_norm, self.k_norm, self.inner_norm = nn.RMSNorm(64), nn.RMSNorm(32), nn.LayerNorm(inner)

    def attention(self, h, normed=False):
        q, k, v = self.q(h), self.k(h), self.v(h)
        if normed:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in (q, k, v))
        return self.o(F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v).transpose(1, 2).flatten(2))

    def mlp(self, h):
        return self.down(F.silu(self.gate(h)) * self.up(h))

    def forward(self, x):
        return tuple(body(self, x) for body in self.bodies)


def pre_norm(m, x, norm="rms"):
    first, second, third, _ = getattr(m, norm)
    x = x + m.attention(first(x))
    return m.gate(third(x + m.mlp(second(x))))


def patches(m, x):
    return pre_norm(m, m.patch(torch.cat((x, x[..., :24]), -1)), "ln")


def normed_patches(m, x):
    return pre_norm(m, m.ln[3](m.patch(torch.cat((x, x[..., :24]), -1))))


def sandwich(m, x):
    x = x + m.rms[1](m.attention(m.rms[0](x)))
    return m.gate(x + 0.5 * m.rms[3](m.mlp(m.rms[2](x))))


def post_norm(m, x):
    x = x + m.rms[0](m.attention(x, normed=True))
    return m.gate(x + F.dropout(m.rms[1](m.mlp(x)), 0.1))


def norm_of_the_sum(m, x):
    x = m.ln[0](x + m.attention(x))
    return m.gate(m.ln[1](x + m.mlp(x)))


def norm_inside_the_mlp(m, x):
    x = x + m.down(m.inner_norm(F.silu(m.gate(x)) * m.up(x)))
    return m.gate(m.rms[0](x + m.attention(m.rms[1](x)) + m.mlp(m.rms[1](x))))


ORDINARY = (pre_norm, patches, normed_patches, sandwich, post_norm, norm_of_the_sum, norm_inside_the_mlp)


def test_ordinary_blocks_have_no_near_miss():
    frames = run_graph(jitter_gains(Blocks(ORDINARY)), hidden(SEQ))
    assert not frames.counts[NAME] and not frames.tags(NAME), frames.misses


def _sites(module, args):
    return run(module, args, Config(strict=True, explain=True)).analyses[0].outcome.sites
