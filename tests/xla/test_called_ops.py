"""Ops that models call themselves on an XLA device, by themselves and in compiled frames: the numbers of CPU, one program
for all steps, nothing on the host, and no more in memory at once than was meant."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import megacpp_compile
from megacpp_compile.config.options import Config
from megacpp_compile.errors import ForwardOnlyError
from megacpp_compile.lowerings._registry import choose, semantic_ops
from megacpp_compile.lowerings.causal_conv1d import reference as convolution
from megacpp_compile.lowerings.rope_qk import reference as rotation
from megacpp_compile.lowerings.rope_qk import tpu_xla as rotation_tpu
from megacpp_compile.lowerings.sparse_mla import tpu_xla
from tests.frames import run, train
from tests.lowerings import relative_error
from tests.lowerings.agreement import reference_of
from tests.lowerings.attention_cases import operands
from tests.lowerings.cases import CASES

from .test_lowered_ops import program
from .test_plain_models import compilations, host_ops

pytestmark = pytest.mark.usefixtures("fresh")

TOLERANCE = 1e-5


def moved(args, device):
    return tree_map_only(torch.Tensor, lambda t: t.to(device), args)


def attention(q, kv, indices, d_v):
    return megacpp_compile.sparse_mla(q, kv, indices, d_v=d_v, offset=3)


def step(call, q, kv, indices, d_v):
    q, kv = (t.detach().requires_grad_() for t in (q, kv))
    out, lse = call(q, kv, indices, d_v)
    (out.square().sum() + lse.masked_fill(lse.isinf(), 0).sin().sum()).backward()
    return out.detach(), lse.detach(), q.grad, kv.grad


@pytest.mark.parametrize(("parts", "index"), [(1, torch.int64), (4, torch.int32)], ids=["one part", "four parts"])
@pytest.mark.parametrize("how", ["called", "megacpp", "openxla"])
def test_attention_over_chosen_rows(xla, rand, monkeypatch, how, parts, index):
    """A number of tokens that is no multiple of the parts, int32 indices, rows named twice, beyond the query or not there."""
    import torch_xla

    b, t, k, d, d_v = 2, 11, 6, 24, 16
    monkeypatch.setattr(tpu_xla, "GATHERED_BYTES", b * k * d * 4 * -(-t // parts))
    q, kv, indices, *_ = operands(rand, torch.float32, b=b, t=t, s=9, k=k, d_qk=d, d_v=d_v, index=index)
    want, call = step(attention, q.double(), kv.double(), indices, d_v), attention
    if how != "called":
        settings = {"options": {"strict": True}} if how == "megacpp" else {}
        call = torch.compile(attention, backend=how, fullgraph=True, **settings)
    args, compiled = moved((q, kv, indices), xla), []
    with megacpp_compile.record() as report:
        for _ in range(3):
            before, got = compilations(), step(call, *args, d_v)
            torch_xla.sync(wait=True)
            compiled.append(compilations() - before)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g.cpu().isinf(), w.isinf())
        assert relative_error(*(x.masked_fill(w.isinf(), 0) for x in (g.cpu(), w))) < TOLERANCE
    assert compiled[0] > 0 and not any(compiled[2:]) and not host_ops(), compiled
    assert [(s.requested, s.effective, s.reason) for s in report.sites] == [("tpu_xla", "tpu_xla", "")] * (how == "megacpp")


def test_rows_of_a_few_queries_are_gathered_at_once(xla, rand, monkeypatch):
    """One `while` a program, no shape that is not known, and no buffer with the rows of more queries than a part has."""
    b, t, k, d, d_v, each = 1, 30, 7, 40, 32, 5
    monkeypatch.setattr(tpu_xla, "GATHERED_BYTES", each * b * k * d * 4)
    q, kv, indices, _, scale, *_ = operands(rand, torch.float32, b=b, t=t, h=2, s=13, k=k, d_qk=d, d_v=d_v)
    args = moved((q, kv, indices, None, scale, d_v), xla)
    out, lse = tpu_xla.sparse_mla(*args)
    backward = tpu_xla.sparse_mla_backward(out, None, *args[:3], out, lse, scale, d_v, True, 0)
    for results, loops in (((out, lse), 1), (backward, 2)):  # backward's program has forward's in it
        text = program(results)
        assert len(re.findall(r" while\(", text)) == loops and "<=" not in text and "f64" not in text
        rows = {int(n) for n in re.findall(rf"f32\[{b},(\d+),{k},{d}\]", text)}
        assert rows == {each}, rows


@pytest.mark.parametrize("label", ["fp8_tensor", "fp8_row", "fp8_block"])
def test_rows_in_fp8(xla, rand, monkeypatch, label):
    """They stay float8 until they are gathered, and have no gradient."""
    monkeypatch.setattr(tpu_xla, "GATHERED_BYTES", 1)
    args = CASES["sparse_mla"][label](rand, torch.float32)
    want, there = reference_of("sparse_mla")(*args), moved(args, xla)
    got = torch.ops.megacpp.sparse_mla(*there)
    assert re.search(r"f8e4m3fn\[[\d,]*\]\S* parameter", program(got))
    for g, w in zip(got, want, strict=True):
        finite = ~w.isinf()
        assert relative_error(g.cpu()[finite], w[finite]) < TOLERANCE
    assert not host_ops()
    out, _ = torch.ops.megacpp.sparse_mla(there[0].requires_grad_(), *there[1:])
    with pytest.raises(ForwardOnlyError, match="fp8"):
        out.sum().backward()


def test_who_has_no_loop(rand):
    q, *others = operands(rand, torch.float32)
    assert tpu_xla.supports("sparse_mla", (q, *others)) is None
    on_torch_tpu = SimpleNamespace(device=SimpleNamespace(type="tpu"))
    assert "no-loop" in tpu_xla.supports("sparse_mla", (on_torch_tpu, *others))
    assert "not fixed" in tpu_xla.supports("sparse_mla", (SimpleNamespace(device=q.device, shape=("s0",)), *others))


FP8 = sorted(name for folder, name in semantic_ops().values() if "fp8" in folder)


@pytest.mark.parametrize("name", FP8)
def test_ops_in_fp8_by_themselves(xla, rand, name):
    """No plan wants them on a TPU. Who calls one gets the reference's numbers, of tensors that are float8 in the
    program; but for maxima, which never are."""
    op = getattr(torch.ops.megacpp, name).default
    for label, make in list(CASES[name].items())[:6]:
        args = make(rand, torch.float32)
        choice = choose(op, "tpu", args)
        assert (choice.requested, choice.effective, choice.reason) == ("reference", "reference", "")
        got = tree_leaves(op(*moved(args, xla)))
        text = program(got)
        assert ("f8e" in text) == (name != "push_maxima") and "<=" not in text and "f64" not in text, label
        for g, w in zip(got, tree_leaves(reference_of(name)(*args)), strict=True):
            assert g.dtype == w.dtype and g.shape == w.shape, label
            # Payloads are the same but where another order of a sum crosses a tie.
            assert relative_error(g.cpu().float(), w.float()) < 1e-4, label
    assert not host_ops()


def test_a_weight_in_fp8_in_a_compiled_frame(xla, rand):
    weight = rand(24, 32) / 5
    payload = (weight * 50).to(torch.float8_e4m3fn)
    scale, x = torch.full((1, 1), 0.02), rand(6, 32)

    def module(x, payload, scale):
        return torch.ops.megacpp.linear_fp8_weight(x.sin(), payload, scale, None, torch.float32).tanh()

    results = []
    for call, device in ((module, "cpu"), (torch.compile(module, backend="megacpp", options={"strict": True}), xla)):
        leaf = x.detach().to(device).requires_grad_()
        with megacpp_compile.record() as report:
            out = call(leaf, payload.to(device), scale.to(device))
            out.square().sum().backward()
        results.append((out, leaf.grad))
    (s,) = report.sites
    assert (s.op, s.requested, s.effective) == ("megacpp::linear_fp8_weight", "reference", "reference")
    for want, got in zip(*results, strict=True):
        assert relative_error(got.detach().cpu(), want.detach()) < TOLERANCE
    assert not host_ops()


@pytest.mark.parametrize("label", ["three_tokens", "no_row", "more_than_there_are", "fp8", "codes"])
def test_decoding_is_the_reference_in_static_shapes(xla, rand, label):
    """Lengths are data: nothing is asked of the host, and no shape depends on them."""
    args = CASES["mla_decode"][label](rand, torch.float32)
    want, there = reference_of("mla_decode")(*args), moved(args, xla)
    got = torch.ops.megacpp.mla_decode(*there)
    text = program(got)
    assert "<=" not in text and "f64" not in text
    for g, w in zip(got, want, strict=True):
        finite = ~w.isinf()
        assert torch.equal(g.cpu().isinf(), w.isinf()) and relative_error(g.cpu()[finite], w[finite]) < TOLERANCE
    assert not host_ops()


@pytest.mark.parametrize("label", ["three_biases", "drawn"])
def test_compressed_linears_have_the_signs_of_cpu(xla, rand, label):
    """Bit for bit, as they come from integers; a fresh draw is data and compiles nothing."""
    x, w, b, draw, rank, seed = CASES["compressed_linear"][label](rand, torch.float32)
    w = [one.requires_grad_() for one in w]

    def step(x, w, b, draw):
        leaves = [one.detach().requires_grad_() for one in w]
        y, z = torch.ops.megacpp.compressed_linear(x, leaves, b, draw, rank, seed)
        return z, *torch.autograd.grad(sum(one.square().sum() for one in y), leaves)

    for want, got in zip(step(x, w, b, draw), step(*moved((x, w, b, draw), xla)), strict=True):
        assert relative_error(got.cpu(), want) < TOLERANCE
    if draw is not None:
        there, count = moved((x, w, b), xla), compilations()
        for n in (draw, draw + 1):
            want, got = step(x, w, b, n)[1], step(*there, n.to(xla))[1].cpu()
            assert relative_error(got, want) < TOLERANCE
        assert compilations() <= count + 1
    assert not host_ops()


@pytest.mark.parametrize("redraw", ["never", "update"])
def test_compressed_by_the_pass(xla, redraw):
    """One program for both sites, with the signs of CPU."""
    module = torch.nn.Sequential(torch.nn.LayerNorm(24), torch.nn.Linear(24, 40), torch.nn.GELU(), torch.nn.Linear(40, 8))
    x = torch.randn(2, 11, 24, generator=torch.Generator().manual_seed(0))
    compress = {"names": "*", "ratio": 0.25, "redraw": redraw}
    want = run(module, (x,), Config(strict=True, compress=compress)).results
    torch._dynamo.reset()
    options = {"strict": True, "compress": compress, "require": {"compressed_linear": 2}}
    there = module.to(xla)
    got = train(torch.compile(there, backend="megacpp", options=options), there, (x.to(xla),))
    assert all(relative_error(got[name].cpu(), t) < TOLERANCE for name, t in want.items()) and not host_ops()


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)


def test_rope_by_position_of_packed_documents(xla):
    torch.manual_seed(0)
    tensors = (torch.randn(11, 4, 10), torch.randn(11, 2, 10), torch.randn(7, 1, 3), torch.randn(7, 1, 3))
    flags = (4, True, False, False, False, torch.float32)
    args = (*tensors, *flags, torch.tensor([0, 3, 3, 8], dtype=torch.int32))
    assert_equal(rotation_tpu.rope_qk(*moved(args, xla)), rotation.rope_qk(*args))
    assert not host_ops()


def test_convolution_of_packed_documents(xla):
    torch.manual_seed(0)
    x, grad, weight, bias = torch.randn(2, 10, 3), torch.randn(2, 10, 3), torch.randn(3, 4), torch.randn(3)
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 3, 3, 3], [4, 4, 4, 4, 4, 4, 7, 7, 7, 9]], dtype=torch.int32)
    forward = (x, weight, bias, "silu", torch.float32, seq_idx)
    assert_equal([convolution.causal_conv1d(*moved(forward, xla))], [convolution.causal_conv1d(*forward)])
    backward = (grad, x, weight, bias, "silu", seq_idx)
    assert_equal(convolution.causal_conv1d_backward(*moved(backward, xla)), convolution.causal_conv1d_backward(*backward))
    assert not host_ops()


def decoded(device, codec, form):
    """What the last of some steps attends to."""
    torch.manual_seed(0)
    cache = megacpp_compile.MLAKVCache(1, 2, 12, 32, 16, dtype=torch.float32, codec=codec, device=device)
    weight = torch.randn(2 * 14, 32)
    for n in (4, 1, 2):
        latent, rope = torch.randn(2, n, 32), torch.randn(2, n, 1, 16)
        q_nope, q_rope = torch.randn(2, n, 2, 8), torch.randn(2, n, 2, 16)
        rows = cache.update(0, latent.to(device), rope.to(device))
        cache.advance(n)
        out = megacpp_compile.latent_attention(q_nope.to(device), q_rope.to(device), rows, weight.to(device), form=form)
    assert cache.length == 7
    return out.cpu()


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("codec", [None, "fp8", "turboquant", "polarquant"])
def test_decoding_is_that_of_a_cpu(xla, codec, form):
    assert relative_error(decoded(xla, codec, form), decoded("cpu", codec, form)) < 1e-5
