"""Routed experts: found in every spelling, rewritten, and refused for every reason there is."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frames import check_graph, largest_error, render, run

from . import contract, experts, experts_at_once, experts_by_rows, experts_decoding
from .contract import assert_disabled, assert_dynamic, assert_fires, assert_refused
from .experts import DIM, EXPERTS, TOKENS, Expert, MoE, Ungated, loop, matrix, swiglu, weighted, where_index_add
from .experts_of_batches import BATCHES, BATCHES_NEAR_MISSES

NAME = "moe"


def tokens(dtype=torch.float32, count: int = TOKENS):
    return (torch.randn(count, DIM).to(dtype).requires_grad_(),)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_graph():
    frames = assert_fires(NAME, MoE(where_index_add, experts=2), tokens(), dynamo=True)
    expecttest.assert_expected_inline(
        render(frames.graph),
        """\
linear: f32[11, 2] = linear(x, router_weight)
softmax: f32[11, 2] = softmax.int(linear, -1)
topk: (f32[11, 2], i64[11, 2]) = topk(softmax, 2)
getitem: f32[11, 2] = topk[0]
getitem_1: i64[11, 2] = topk[1]
moe: (f32[11, 8], (f32[22, 16], f32[22, 16]), i64[22], int32[2]) = megacpp.moe(x, getitem_1, getitem, [experts_0_gate_weight, experts_1_gate_weight], [experts_0_up_weight, experts_1_up_weight], [experts_0_down_weight, experts_1_down_weight], silu, pair, float32)
getitem_2: f32[11, 8] = moe[0]
return [getitem_2]""",
    )


def test_graph_of_stacked_weights():
    frames = assert_fires(NAME, MoE(experts.stacked_weights, stacked=True), tokens(), dynamo=True)
    assert "megacpp.moe(x, getitem_1, getitem, [], [gate_up], [down], silu, gate_up, float32)" in render(frames.graph)


def sequences(*shape: int, dtype=torch.float64):
    return (torch.randn(*shape, DIM, dtype=dtype).requires_grad_(),)


# The kind of spelling -> (bodies, what else the layer is made of, shapes of tokens).
FIRES = {
    "lists": (experts.LISTS | experts_at_once.LISTS, {}, (TOKENS,)),
    "rows": (experts_by_rows.ROWS, {}, (TOKENS,)),
    "one choice": (experts_by_rows.ONE, {"choices": 1}, (TOKENS,)),
    "batches": (BATCHES | experts_by_rows.BATCHES, {}, (2, 5)),
    "stacked": (experts.STACKED | experts_at_once.STACKED, {"stacked": True}, (TOKENS,)),
    "one token": (experts_decoding.ANY | experts_decoding.ONE, {"stacked": True}, (1, 1)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (bodies, *_) in FIRES.items() for name in bodies])
def test_fires(kind, name):
    bodies, made, shape = FIRES[kind]
    assert_fires(NAME, MoE(bodies[name], **made).double(), sequences(*shape))


@pytest.mark.parametrize("name", ["returning_what_they_read", "first_returns_what_it_reads"])
def test_experts_that_return_what_they_read(name):
    """The last of them, too: a bound off by one has escaped the sets that `test_fires` samples."""
    assert_fires(NAME, MoE(experts.LISTS[name]).double(), sequences(TOKENS))


def test_outputs_gathered_for_other_tokens_are_no_layer():
    frames = check_graph(MoE(experts_by_rows.gathered_from_others), tokens())
    (analysis,) = frames.analyses
    assert not analysis.outcome.sites


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(1, 5), (4, 1)], ids=["one sequence", "one token each"])
@pytest.mark.parametrize("name", ["einsum_of_chosen", "one_hots_of_all"])
def test_fires_on_dimensions_of_one(name, shape):
    assert_fires(NAME, MoE(experts_decoding.ANY[name], stacked=True).double(), sequences(*shape))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shape", [(2, 5), (1, 1)], ids=["tokens", "one token"])
@pytest.mark.parametrize("name", experts_decoding.ANY)
def test_fires_on_one_choice(name, shape):
    assert_fires(NAME, MoE(experts_decoding.ANY[name], stacked=True, choices=1).double(), sequences(*shape))


@pytest.mark.parametrize("count", [TOKENS, 1])
def test_fires_on_one_choice_in_its_place(count):
    module = MoE(experts_at_once.slots_in_their_places, choices=1).double()
    assert_fires(NAME, module, tokens(torch.float64, count))


# The same of what is refused, {name: (the tag, body)}.
REFUSED = {
    "lists": (experts_at_once.NEAR_MISSES, {}, (TOKENS,)),
    "rows": (experts_by_rows.NEAR_MISSES, {}, (TOKENS,)),
    "batches": (BATCHES_NEAR_MISSES, {}, (3, 3)),
    "stacked": (experts.STACKED_NEAR_MISSES | experts_at_once.STACKED_NEAR_MISSES, {"stacked": True}, (TOKENS,)),
    "one token": (experts_decoding.NEAR_MISSES, {"stacked": True}, (1, 1)),
    "experts": (
        {name: (tag, body) for name, (tag, body, _) in experts.NEAR_MISSES.items()}, {"experts": 2}, (TOKENS,)),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (bodies, *_) in REFUSED.items() for name in bodies])
def test_refuses(kind, name):
    if name in ("capacity", "scatter_add_of_a_few") and torch.__version__ < "2.11":
        pytest.skip("a slice of as many rows as the data says is nothing this torch can trace")
    bodies, made, shape = REFUSED[kind]
    tag, body = bodies[name]
    if kind == "experts":
        made = {"expert": experts.NEAR_MISSES[name][2], "experts": 3 if tag == "gaps" else 2}
    assert_refused(NAME, tag, MoE(body, **made), sequences(*shape, dtype=torch.float32))


def softcap(h):
    return torch.tanh(h / 0.3) * 0.3


ACTIVATIONS = {
    "gelu": F.gelu, "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"), "relu": F.relu,
    "silu_by_hand": lambda h: h * torch.sigmoid(h), "in_float32": lambda h: F.silu(h.float()).to(h.dtype),
}  # fmt: skip


class Joined(Expert):
    """join: what the activated gate and up are together."""

    def __init__(self, join):
        super().__init__()
        self.join = join

    def forward(self, x):
        return self.down(self.join(self.activation(self.gate(x)), self.up(x).clamp(-0.3, 0.3)))


MADE = {
    "plus_its_product": lambda: Joined(lambda a, up: up * a + a),
    "addcmul": lambda: Joined(lambda a, up: torch.addcmul(a, a, up)),
    **{name: lambda f=f: Expert(f) for name, f in ACTIVATIONS.items()},
    "biased": lambda: Expert(bias=True),
    "clamped": lambda: Expert(lambda h: F.silu(h.clamp(max=0.3)), of_up=lambda h: h.clamp(-0.3, 0.3)),
    "clamped_result": lambda: Expert(lambda h: F.silu(h).clamp_(max=0.1), of_up=lambda h: F.hardtanh(h, -0.3, 0.3)),
    "softcapped": lambda: Expert(lambda h: 0.5 * torch.tanh(F.gelu(h) / 0.5)),
    "softcapped_factors": lambda: Expert(lambda h: softcap(h) * torch.sigmoid(h), of_up=softcap),
    "clamped_factor": lambda: Expert(lambda h: torch.sigmoid(1.7 * h) * h.clamp(max=0.3)),
    "ungated": Ungated,
    "fused": experts.Fused,
    "fused_up_first": lambda: experts.Fused(up_first=True),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("expert", MADE)
def test_experts(expert):
    dtype = torch.float32 if expert == "in_float32" else torch.float64
    assert_fires(NAME, MoE(where_index_add, MADE[expert], experts=2).to(dtype), tokens(dtype))


JOINS = {
    "half_of_the_product": lambda a, up: torch.addcmul(a, a, up, value=0.5),
    "of_another": lambda a, up: torch.addcmul(up, a, up),
    "squared": lambda a, up: torch.addcmul(a, up, up),
}


@pytest.mark.parametrize("join", JOINS)
def test_refuses_other_sums_of_gate_and_up(join):
    assert_refused(NAME, "activation", MoE(where_index_add, lambda: Joined(JOINS[join]), experts=2), tokens())


def places_with_a_capacity(m, x, indices, gates):
    """GShard (arXiv:2006.16668): experts read the rows that found a place, put there by a product with one-hots."""
    chosen = F.one_hot(indices, EXPERTS).transpose(0, 1).flatten(0, 1)
    place = (chosen.cumsum(0) - 1) * chosen
    place = place.unflatten(0, (indices.shape[-1], -1)).transpose(0, 1)
    size = x.shape[0] // 2
    kept = F.one_hot(place.clamp(max=size - 1), size) * (place < size)[..., None] * F.one_hot(indices, EXPERTS)[..., None]
    combine = (kept * gates[..., None, None]).sum(1)
    rows = torch.einsum("tec,td->ecd", (combine > 0).to(x.dtype), x)
    hidden = swiglu(torch.bmm(rows, m.gate_up.mT))
    return torch.einsum("tec,ecd->td", combine, torch.bmm(hidden, m.down.mT))


def test_rows_in_places_are_told_as_what_they_are():
    """What puts the results back is no expert's projection, of which one could say that its activation is not known."""
    frames = run(MoE(places_with_a_capacity, stacked=True), tokens())
    assert not frames.counts[NAME] and frames.tags(NAME) == {"unread"}, frames.misses


def test_bfloat16():
    frames = check_graph(MoE(where_index_add).bfloat16(), tokens(torch.bfloat16))
    assert frames.counts[NAME] == 1, frames.misses


SORTED = {"sorted_grouped_gemms": experts.sorted_grouped_gemms, **experts_at_once.SORTED}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SORTED)
def test_sorted_rows(name):
    """On CPU torch's own grouped GEMM reads its groups' ends while it is traced for backward: forward alone here."""
    frames, error = sorted_rows(SORTED[name])
    assert frames.counts[NAME] == 1, frames.misses
    assert error < 2e-2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", experts_at_once.SORTED_NEAR_MISSES)
def test_refuses_sorted_rows(name):
    """As a whole; experts whose groups are one and the same fuse without the sort and the sum, which stay plain."""
    tag, body = experts_at_once.SORTED_NEAR_MISSES[name]
    frames, error = sorted_rows(body)
    sites = [site.op for analysis in frames.analyses for site in analysis.outcome.sites]
    assert tag in frames.tags(NAME) and sites == ["megacpp::moe_sorted"] * (tag != "bias")
    assert error < 2e-2 and bool(error) <= bool(sites)


@pytest.mark.parametrize("choices", [1, 2])
def test_sorted_rows_of_one_token(choices):
    frames, error = sorted_rows(experts_at_once.sorted_as_transformers, 1, choices)
    assert frames.counts[NAME] == 1, frames.misses
    assert error < 2e-2


@torch.no_grad()
def sorted_rows(body, count=16, choices=2):
    module, x = MoE(body, stacked=True, choices=choices).bfloat16(), torch.randn(count, DIM).bfloat16()
    frames = run(module, (x,))
    return frames, largest_error({"y": frames.compiled(x)}, {"y": module(x)})[0]


class ToOneExpert(MoE):
    """Every token chooses the same two."""

    def forward(self, x):
        gates, _ = self.router(x).softmax(-1).topk(2, dim=-1)
        return self.body(self, x, torch.tensor([[2, 1]]).expand(x.shape[0], 2), gates)


@pytest.mark.end_to_end
def test_all_to_one_and_empty_experts():
    frames = assert_fires(NAME, ToOneExpert(where_index_add), tokens())
    assert not frames.results["gradient of experts.0.up.weight"].any()
    assert frames.results["gradient of experts.2.up.weight"].any()


def test_counts_every_layer():
    layers = nn.Sequential(MoE(where_index_add), MoE(experts.stacked_weights, stacked=True))
    assert_fires(NAME, layers, tokens(), 2)


# --- stays out


def test_disabled():
    assert_disabled(NAME, MoE(where_index_add), tokens())


@pytest.mark.end_to_end
@pytest.mark.parametrize("everything", [False, True], ids=["length", "everything"])
def test_dynamic_token_counts(everything):
    assert_dynamic(NAME, MoE(where_index_add), lambda n: tokens(count=n), everything=everything)


@pytest.mark.end_to_end
@pytest.mark.parametrize("everything", [False, True], ids=["length", "everything"])
def test_dynamic_lengths_of_sequences_written_through_masks(everything):
    """The result has more dimensions than the op's, of sizes that are symbols."""
    layer = MoE(experts_at_once.mask_any_choice)
    assert_dynamic(NAME, layer, lambda n: (torch.randn(2, n, DIM),), everything=everything)


@pytest.mark.end_to_end
def test_dynamic_token_counts_of_two_layers():
    layers = nn.Sequential(*(MoE(experts.batched_gemms, stacked=True) for _ in range(2)))
    assert_dynamic(NAME, layers, lambda n: tokens(count=n), 2, everything=True)


@pytest.mark.end_to_end
@torch.no_grad()
@pytest.mark.parametrize("everything", [False, True], ids=["second length", "everything"])
def test_sorted_rows_of_two_layers_at_a_second_length(everything):
    """Both read how many choices there are, which is one number of the graph."""
    layers = nn.Sequential(*(MoE(experts_at_once.sorted_as_transformers, stacked=True) for _ in range(2))).bfloat16()
    inputs = [torch.randn(count, DIM).bfloat16() for count in (16, 24)]
    frames = run(layers, (inputs[0],), dynamic=True if everything else None)
    for x in inputs:
        error, _ = largest_error({"y": frames.compiled(x)}, {"y": layers(x)})
        assert error < 4e-2
    sites = [len(analysis.outcome.sites) for analysis in frames.analyses]
    assert sites == [2] * (1 if everything else 2), frames.misses


def one_cast(m, x, gates, e, token, choice):
    """Autocast's GEMMs are narrower than the sum they are added to."""
    return weighted(m, x, gates, e, token, choice).to(x.dtype)


@pytest.mark.parametrize("asserted", [contract.assert_autocast, contract.assert_autocast_inside])
def test_autocast(asserted):
    asserted(NAME, MoE(loop(one_cast)), tokens())


def in_the_way(m, x, indices, gates):
    hidden = torch.einsum("td,ehd->teh", x, m.gate_up) + m.gate_up.sum((0, 2))
    hidden = F.softplus(hidden[..., :experts.HIDDEN].clamp(min=1.0)) * hidden[..., experts.HIDDEN:]
    return torch.einsum("teh,edh,te->td", hidden, m.down, matrix(indices, gates))


def test_names_all_that_is_in_the_way():
    (miss,) = run(MoE(in_the_way, stacked=True), tokens()).misses
    for word in ("bias", "clamped", "activation is none that is known"):
        assert word in miss.reason


def test_names_what_an_output_goes_through():
    frames = run(MoE(experts.NEAR_MISSES["normed_outputs"][1]), tokens())
    (reason,) = {miss.reason for miss in frames.misses if miss.pass_name == NAME}
    assert "goes through" in reason and "rsqrt" in reason
    assert "internal-error" not in {miss.tag for miss in frames.misses}, frames.misses


def heads_summed(m, x, indices, gates):
    """An output projection of two heads, and no experts beside the router of three."""
    heads = torch.stack((x.tanh(), x.cos()), 1)
    return torch.einsum("thd,hde->te", heads, m.experts[0].up.weight.view(2, -1, DIM)) * gates[:, :1]


def test_a_projection_of_heads_is_no_near_miss():
    assert not run(MoE(heads_summed), tokens()).misses


def groups_projected(m, x, indices, gates, folded=lambda wide: wide):
    """As DeepSeek-V4's output projection: a weight for each group of channels, as many as there are experts."""
    wide = folded(torch.cat([x.tanh()] * m.num_experts, -1)).reshape(-1, m.num_experts, DIM)
    grouped = torch.bmm(wide.transpose(0, 1), m.gate_up.transpose(1, 2)).transpose(0, 1)
    return grouped.reshape(len(x), -1)[:, :DIM] * gates[:, :1]


def groups_of_folded_tokens_projected(m, x, indices, gates):
    """The same, in groups before the tokens are folded into one dimension."""
    return groups_projected(m, x, indices, gates, lambda wide: wide.view(1, -1, m.num_experts, DIM))


def heads_up(m, x, indices, gates):
    """As absorbed attention: each head's channels times its own weight, heads as many as experts."""
    heads = x.repeat(1, m.num_experts).view(-1, m.num_experts, DIM)
    return torch.einsum("thd,hed->the", heads, m.gate_up).flatten(1)[:, :DIM] + gates[:, :1]


@pytest.mark.parametrize("body", [groups_projected, groups_of_folded_tokens_projected, heads_up])
def test_groups_of_channels_are_no_near_miss(body):
    assert not run(MoE(body, stacked=True), tokens()).misses


def test_refuses_experts_that_differ():
    module = MoE(where_index_add)
    module.experts[2] = Ungated()
    assert_refused(NAME, "experts-differ", module, tokens())


def rounded_in_place(m, x, indices, gates):
    """Gates in float32 make the sum one, which is rounded as it is written."""
    return loop(gated, add="+=")(m, x, indices, gates.float())


def gated(m, x, gates, e, token, choice):
    return gates[token, choice, None] * m.experts[e](x[token])


def written_in_halves(y, rows, out):
    y[rows] = (y[rows] + out).half().to(y.dtype)
    return y


def test_a_sum_that_is_rounded_as_it_is_written():
    assert check_graph(MoE(rounded_in_place).bfloat16(), tokens(torch.bfloat16)).counts["moe"] == 1
    assert_refused("moe", "no-rows", MoE(loop(gated, add=written_in_halves)), tokens())


class BiasedProducts(nn.Module):
    """All experts on all tokens by products that biases are added to in one op. Those of up lie as they meet rows."""

    def __init__(self, **kwargs):
        super().__init__()
        self.kwargs, self.router = kwargs, nn.Linear(DIM, 4)
        self.up, self.up_bias = nn.Parameter(torch.randn(4, DIM, 12)), nn.Parameter(torch.randn(4, 1, 12))
        self.down, self.down_bias = nn.Parameter(torch.randn(4, 12, DIM)), nn.Parameter(torch.randn(4, DIM))

    def forward(self, x):
        gates, indices = self.router(x).softmax(-1).topk(2)
        weights = torch.zeros(len(x), 4, dtype=gates.dtype).scatter(1, indices, gates)
        h = torch.baddbmm(self.up_bias, x.expand(4, -1, -1), self.up, **self.kwargs)
        out = torch.baddbmm(self.down_bias[:, None], F.gelu(h), self.down)
        return torch.einsum("etd,te->td", out, weights)


def test_biases_that_are_added_by_the_product():
    assert_fires("moe", BiasedProducts().double(), tokens(torch.float64))
    assert_dynamic("moe", BiasedProducts(), lambda n: tokens(count=n), everything=True)


@pytest.mark.parametrize("shape", [(4, 1, DIM), (1, 4, 1, DIM)])
def test_biases_with_a_dimension_for_rows(shape):
    def with_biases(m, x, indices, gates):
        weights = torch.zeros(len(x), 4, dtype=gates.dtype).scatter(1, indices, gates)
        hidden = swiglu(torch.einsum("td,ehd->eth", x, m.gate_up))
        out = torch.einsum("eth,edh->etd", hidden, m.down) + m.bias
        return torch.einsum("etd,te->td", out.reshape(4, len(x), DIM), weights)

    module = MoE(with_biases, experts=4, stacked=True)
    module.bias = nn.Parameter(torch.randn(shape))
    frames = check_graph(module.double(), tokens(torch.float64))
    assert frames.counts["moe"] == (len(shape) == 3), frames.misses


@pytest.mark.parametrize("kwargs", [{"alpha": 2.0}, {"beta": 0.5}])
def test_refuses_products_that_are_scaled_in_the_same_op(kwargs):
    frames = check_graph(BiasedProducts(**kwargs), tokens())
    assert not frames.counts["moe"] and frames.tags("moe")
