"""Autocast switched inside a frame: the same dtypes, outputs and gradients as eager's, and idioms fuse in every region.

`frames.check` also compares the dtype of every node with the one it says it has, which is where a switch that tracing
did not obey would show.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megacpp_compile import record
from megacpp_compile._torch import modes
from megacpp_compile.config.options import Config
from megacpp_compile.errors import CaptureError
from megacpp_compile.frontend.capture import capture
from tests.corpus import jitter_gains
from tests.corpus.spellings import PlainGQA, PlainMLA
from tests.frames import TOLERANCE, check, largest_error, run, train

DIM = 24
PER_BLOCK = {"down_norm_up": 2, "mla_rope_q": 1, "mla_rope_kv": 1}
BF16 = TOLERANCE[torch.bfloat16]


def autocast(dtype=torch.bfloat16, **kwargs):
    return torch.autocast("cpu", dtype, **kwargs)


def off():
    return torch.autocast("cpu", enabled=False)


def hidden():
    return torch.randn(2, 6, DIM, generator=torch.Generator().manual_seed(6))


class Bottleneck(nn.Module):
    """Linear and norm in the region `first`, linear in the region `last`."""

    def __init__(self, first=contextlib.nullcontext, last=contextlib.nullcontext, out=12):
        super().__init__()
        torch.manual_seed(0)
        self.down, self.norm, self.up = nn.Linear(DIM, 10), nn.RMSNorm(10, eps=1e-6), nn.Linear(10, out)
        self.first, self.last = first, last

    def forward(self, x):
        with self.first():
            h = self.norm(self.down(x))
        with self.last():
            return self.up(h)


class Blocks(nn.Module):
    """A bottleneck, an attention block and a weight; `run(self, x)` says what runs in which region."""

    def __init__(self, run):
        super().__init__()
        torch.manual_seed(3)
        size: dict[str, Any] = {"heads": 2, "q_lora": 14, "kv_lora": 10, "nope": 6, "rope": 4, "v": 5}
        self.first, self.second = Bottleneck(out=DIM), PlainMLA(DIM, **size, table_source="buffer")
        self.weight = nn.Parameter(torch.randn(DIM, DIM) * DIM**-0.5)
        self.run = run
        jitter_gains(self)

    def forward(self, x):
        return self.run(self, x)


def second_off(m, x):
    y = m.first(x)
    with off():
        z = m.second(y.float())
    return y, z


def second_on(m, x):
    y = m.first(x)
    with autocast():
        z = m.second(y)
    return y, z


def float16(m, x):
    with autocast(torch.float16):
        return m.second(m.first(x))


def nested(m, x):
    with off():
        y = m.first(x)
        a = y @ m.weight
        with autocast():
            b = m.second(y) @ m.weight
        c = y @ m.weight
    return a, b, c, x @ m.weight


def grad_modes(m, x):
    """Regions of either kind within the other."""
    with torch.no_grad():
        y = x @ m.weight
        with off():
            a = m.first(x)
    with off():
        with torch.no_grad():
            b = x @ m.weight
        c = m.second(x + b)
    return a, b, c, y


def in_checkpoint(m, x):
    def body(x):
        y = m.first(x)
        with off():
            return y + m.second(y.float())

    return checkpoint(body, x, use_reentrant=False)


def around_checkpoint(m, x):
    y = m.first(x)
    with off():
        z = checkpoint(m.second, y.float(), use_reentrant=False)
    return y + z


def cache_switches(m, x):
    with autocast(cache_enabled=True):
        y = m.first(m.first(x))
    with autocast(cache_enabled=False):
        return m.second(y)


class Product(torch.autograd.Function):
    """Its dtypes are those of the region it is called in; its backward is not forward's derivative."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad.float() @ w.float(), w * grad.float().mean()


def functions_in_regions(m, x):
    """Their results are first used behind the region's end: each must stay in its own."""
    y = m.first(x)
    with off():
        a = Product.apply(y.float(), m.weight)
    b = Product.apply(x, m.weight)
    return m.second(a + b), a, b


KINDS = (second_off, second_on, float16, nested, grad_modes, in_checkpoint, around_checkpoint, cache_switches,
         functions_in_regions)  # fmt: skip


def around(kind):
    """What the caller has switched on."""
    return contextlib.nullcontext if kind in (second_on, float16) else autocast


def expected(kind):
    """What fires: `second` runs once in each."""
    return PER_BLOCK | {"down_norm_up": PER_BLOCK["down_norm_up"] + (2 if kind is cache_switches else 1)}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_region(kind):
    frames = check(Blocks(kind), (hidden().requires_grad_(),), around=around(kind), tolerance=BF16)
    assert frames.fired == expected(kind), frames.misses
    assert not frames.again()


def weighed(q, k, v):
    """In the place of attention, half of whose kernels would be its own and its backward's."""
    return v * (q * k).sum(-1, keepdim=True)


def inside(m, x):
    """A region that is off within one that is on, one of another dtype, and a product before and behind them."""
    with autocast():
        y = (x @ m.weight) @ m.weight
        with off():
            z = m.first(y.float())
    with autocast(torch.float16):
        u = m.second(z)
    return y, z, u, u.float() @ m.weight


@pytest.mark.exhaustive
def test_as_exact_as_inductor():
    """Through Inductor's kernels: no further from eager than the plain graph is there."""
    model, x = Blocks(inside), hidden().requires_grad_()
    model.second.attend = weighed
    torch._dynamo.reset()
    eager, plain, fused = (copy.deepcopy(model) for _ in range(3))
    want = train(eager, eager, (x,))
    theirs = train(torch.compile(plain, backend="inductor", fullgraph=True), plain, (x,))
    torch._dynamo.reset()
    with record() as report:
        ours = train(torch.compile(fused, backend="megacpp", fullgraph=True), fused, (x,))
    assert {name: count for name, count in report.counts.items() if count} == expected(inside)
    assert [frame.captured for frame in report.frames] == [True]
    # float16 is eight times as fine as bfloat16: what only its region computes is held to its own bound.
    in_float16 = {name for name in want if name in ("output 2", "output 3") or name.startswith("gradient of second.")}
    for names in (in_float16, want.keys() - in_float16):
        of = [{name: results[name] for name in names} for results in (theirs, ours, want)]
        allowed = largest_error(of[0], of[2])[0]
        error, which = largest_error(of[1], of[2])  # which asserts the dtypes too
        assert error <= 1.25 * allowed, (which, error, allowed)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


@pytest.mark.end_to_end
def test_transformers_deepseek_v3():
    """Its rotary embedding switches autocast off around the tables."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=64, hidden_size=48, intermediate_size=56, num_hidden_layers=1, first_k_dense_replace=1,
        num_attention_heads=2, num_key_value_heads=2, q_lora_rank=20, kv_lora_rank=14, qk_nope_head_dim=10,
        qk_rope_head_dim=8, v_head_dim=12, max_position_embeddings=32, use_cache=False, pad_token_id=None,
    )  # fmt: skip
    model = Logits(transformers.DeepseekV3ForCausalLM(config))
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    frames = check(model, (ids,), around=autocast, tolerance=BF16)
    assert frames.fired == PER_BLOCK | {"attention": 1}, frames.misses


# --- what may not be merged or moved


def test_an_idiom_in_two_regions_switched_alike_fuses():
    assert check(Bottleneck(off, off), (hidden(),), around=autocast).fired == {"down_norm_up": 1}


def test_an_idiom_across_regions_does_not():
    """Equal dtypes on both sides, so that nothing but the switch tells them apart."""
    frames = check(Bottleneck(off, contextlib.nullcontext), (hidden(),), around=off)
    assert frames.tags("down_norm_up") == {"region"} and not frames.fired


class TablesTwice(nn.Module):
    """The same ops make both pairs of tables, from products in float32 and in bfloat16."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(PlainGQA(DIM, heads=2, kv_heads=1, head_dim=4) for _ in range(2))
        self.register_buffer("inv_freq", torch.tensor([[1.0, 0.37, 1.0, 0.37]]))

    def tables(self, x):
        angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * 77.7 @ self.inv_freq
        return angles.cos().half(), angles.sin().half()

    def forward(self, x):
        with off():
            exact = self.tables(x)
        rounded = self.tables(x)
        return self.blocks[0](x, *rounded), self.blocks[1](x, *exact)


def test_tables_of_two_regions_are_two_tables():
    frames = check(TablesTwice(), (hidden(),), around=autocast, tolerance=BF16)
    assert frames.fired == {"rope_qk": 2}


# --- vmap


class MaskUnderVmap(nn.Module):
    """A mask of distances, computed by a matrix product under vmap so that autocast shows in it."""

    def __init__(self, inside):
        super().__init__()
        self.block, self.inside = PlainMLA(DIM, table_source="buffer"), inside

    def forward(self, x):
        places = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * 1.01

        def row(place):
            with self.inside():
                return places @ place

        with off():
            mask = torch.vmap(row)(places)
        return self.block(x), mask


@pytest.mark.end_to_end
@pytest.mark.parametrize(("inside", "dtype"), [(contextlib.nullcontext, torch.float32), (autocast, torch.bfloat16)])
def test_a_vmap_is_cast_as_its_region_says_or_it_itself(inside, dtype):
    """One that switches is carried as it is."""
    frames = check(MaskUnderVmap(inside), (hidden(),), around=autocast, tolerance=BF16)
    assert frames.fired == PER_BLOCK and frames.results["output 1"].dtype == dtype


# --- what watches the rewrites


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [second_on, nested], ids=lambda kind: kind.__name__)
def test_verification_replays_a_site_in_its_region(kind):
    """`nested` has one that is off, too."""
    frames = run(Blocks(kind), (hidden(),), Config(verify="each", strict=True), around=around(kind))
    assert frames.fired == expected(kind)


def test_saved_bytes_are_those_of_the_region():
    """With autocast off inside, a float32 model's, whatever the caller switched on; with it on inside, autocast's."""

    def saved(region, around):
        with record():
            (site,) = run(Bottleneck(region, region), (hidden(),), around=around).analyses[0].outcome.sites
        return site.saved_before

    full, half = saved(contextlib.nullcontext, contextlib.nullcontext), saved(contextlib.nullcontext, autocast)
    assert full != half
    assert saved(off, autocast) == full
    assert saved(autocast, contextlib.nullcontext) == saved(autocast, autocast) == half


# --- switches that are no regions, and failures in between


def switches(*order):
    """A graph that enters ("e0") and leaves ("l0") autocast in this order."""
    graph, entered = torch.fx.Graph(), {}
    x = graph.placeholder("x")
    for kind, number in order:
        if kind == "e":
            entered[number] = graph.call_function(torch.amp._enter_autocast, ("cpu", torch.bfloat16, True, None))
        else:
            graph.call_function(torch.amp._exit_autocast, (entered[number],))
    graph.output((graph.call_function(torch.relu, (x,)),))
    return torch.fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("order, reason", [(["e0", "e1", "l0", "l1"], "overlap"), (["e0"], "not closed")])
def test_switches_that_are_no_regions_are_refused(order, reason):
    with pytest.raises(CaptureError, match=reason):
        capture(switches(*order), [hidden()])
    assert not torch.is_autocast_enabled("cpu")


def test_a_failed_trace_leaves_no_region_open():
    """An open region would keep eager's cache of cast weights past the optimizer step that changes them."""
    with pytest.raises(ZeroDivisionError), modes.restored():
        autocast().__enter__()
        autocast(torch.float16, cache_enabled=False).__enter__()
        raise ZeroDivisionError
    weight = nn.Parameter(torch.ones(2, 2))
    for value in (1.0, 3.0):
        with torch.no_grad():
            weight.fill_(value)
        with autocast():
            assert (torch.eye(2) @ weight).equal(torch.full((2, 2), value, dtype=torch.bfloat16))
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
