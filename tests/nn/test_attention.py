"""`attention` against plain mathematics in float64, forward and gradients, by every body that CPU has."""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import SimpleNamespace

import pytest
import torch

import megacpp_compile
from megacpp_compile.errors import AttentionError, OperandError
from megacpp_compile.nn import attention
from megacpp_compile.nn.attention import bodies, pallas

DOCS = torch.tensor([[0, 0, 1, 1, 1, 2, -1], [5, 5, 5, 5, 5, 5, 5]])
CALLS = {
    "causal": {}, "no mask": {"causal": False}, "documents": {"doc_ids": DOCS},
    "documents, both ways": {"doc_ids": DOCS, "causal": False}, "a cap": {"softcap": 0.7},
    "a cap and documents, scaled": {"softcap": 0.7, "doc_ids": DOCS, "scale": 0.3},
    "padding alone": {"doc_ids": torch.full((2, 7), -1)},
}
# heads, heads of keys, channels of keys, channels of values
HEADS = {"equal": (4, 4, 6, 6), "grouped": (4, 2, 6, 6), "one key": (4, 1, 6, 6), "other values": (4, 4, 24, 16)}


def operands(heads="equal", dtype=torch.float64, tokens=7, grad=True):
    h, g, d, e = HEADS[heads]
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, h, tokens, d), (2, g, tokens, d), (2, g, tokens, e))
    return [torch.randn(*s, dtype=dtype, generator=generator).requires_grad_(grad) for s in sizes]


def mathematics(q, k, v, doc_ids=None, softcap=None, scale=None, causal=True):
    """One row of one head at a time."""
    out, rows = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype), []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h * k.shape[1] // q.shape[1]
            for i in range(q.shape[2]):
                seen = [
                    j for j in range(k.shape[2])
                    if (j <= i or not causal)
                    and (doc_ids is None or (doc_ids[b, i] == doc_ids[b, j] and doc_ids[b, j] >= 0))
                ]  # fmt: skip
                if not seen:
                    rows.append(0 * (q[b, h, i].sum() + k[b, g, 0].sum() + v[b, g, 0]))
                    continue
                scores = k[b, g, seen] @ q[b, h, i] * (q.shape[-1] ** -0.5 if scale is None else scale)
                scores = scores if softcap is None else softcap * (scores / softcap).tanh()
                rows.append(scores.softmax(0) @ v[b, g, seen])
    return torch.stack(rows).view(out.shape)


def with_gradients(call, tensors, **arguments):
    out = call(*tensors, **arguments)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return out, *torch.autograd.grad((out * weight).sum(), tensors)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", CALLS)
def test_against_mathematics(name, heads):
    tensors = operands(heads)
    want = with_gradients(mathematics, tensors, **CALLS[name])
    for backend in ("auto", "plain"):
        got = with_gradients(megacpp_compile.attention, tensors, **CALLS[name], backend=backend)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CALLS)
def test_flex_attention_on_cpu(name):
    tensors = operands("grouped", torch.float32, grad=False)
    got = megacpp_compile.attention(*tensors, **CALLS[name], backend="flex")
    want = mathematics(*(t.double() for t in tensors), **CALLS[name])
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_half_precision():
    """Softmax in float32: as near to float64 as a rounded result can be."""
    tensors = operands("grouped", torch.bfloat16, grad=False)
    want = mathematics(*(t.double() for t in tensors), doc_ids=DOCS, softcap=0.7)
    got = megacpp_compile.attention(*tensors, doc_ids=DOCS, softcap=0.7)
    assert got.dtype == torch.bfloat16 and (got.double() - want).abs().max() < 2e-2 * want.abs().max()


def test_uniform_rows_need_no_mask():
    uniform = torch.tensor([[3] * 7, [0] * 7])
    assert attention.normalised(uniform) is None
    assert attention.normalised(DOCS) is DOCS and attention.normalised(torch.full((2, 7), -1)) is not None
    tensors = operands()
    assert megacpp_compile.attention_capability(*tensors, doc_ids=uniform) == attention.Capability("sdpa")
    assert megacpp_compile.attention_capability(*tensors, doc_ids=[0] * 7).backend == "sdpa"
    somewhere = uniform.to("meta")
    assert attention.normalised(somewhere) is somewhere, "asking a device would wait for it"


def test_who_serves_and_what_speaks_against_the_others():
    tensors = operands()
    assert megacpp_compile.attention_capability(*tensors).tags == ()
    found = megacpp_compile.attention_capability(*tensors, doc_ids=DOCS)
    assert (found.backend, found.tags) == ("plain", ("doc-ids",)) and "[doc-ids]" in str(found)
    assert megacpp_compile.attention_capability(*tensors, softcap=1.0).tags == ("softcap",)
    for backend, tag, arguments in (
        ("sdpa", "softcap", {"softcap": 1.0}), ("sdpa", "doc-ids", {"doc_ids": DOCS}), ("flex", "backward", {}),
        ("pallas", "device", {}),
    ):
        with pytest.raises(AttentionError, match=rf"\[{tag}\]") as caught:
            megacpp_compile.attention(*tensors, **arguments, backend=backend)
        assert (caught.value.backend, caught.value.tag) == (backend, tag) and tag in bodies.TAGS
    with torch.no_grad(), pytest.raises(AttentionError, match=r"\[dtype\]"):
        megacpp_compile.attention(*tensors, backend="flex")


class Stub:
    """A tensor of a device that is not there."""

    def __init__(self, device, width=64, tokens=128, dtype=torch.bfloat16):
        self.device, self.dtype, self.shape = SimpleNamespace(type=device), dtype, (1, 2, tokens, width)
        self.requires_grad = True


@pytest.mark.parametrize(("tag", "asked", "tensors", "rest"), [
    ("softcap", bodies.sdpa_lacks, Stub("cuda"), (None, 1.0)),
    ("doc-ids", bodies.sdpa_lacks, Stub("cuda"), (DOCS, None)),
    ("device", bodies.flex_lacks, Stub("xla"), (None, None)),
    ("backward", bodies.flex_lacks, Stub("cpu"), (None, None)),
    ("dtype", bodies.flex_lacks, Stub("cuda", dtype=torch.float64), (None, None)),
    ("width", bodies.flex_lacks, Stub("cuda", width=8), (None, None)),
    ("device", pallas.lacks, Stub("cuda"), (None, None)),
    ("dtype", pallas.lacks, Stub("xla", dtype=torch.float16), (None, None)),
    ("shape", pallas.lacks, Stub("xla", tokens=100), (None, None)), (None, pallas.lacks, Stub("xla"), (DOCS, 1.0)),
    (None, bodies.flex_lacks, Stub("cuda"), (DOCS, 1.0)),
])
def test_what_each_lacks(monkeypatch, tag, asked, tensors, rest):
    monkeypatch.setattr(pallas, "unavailable", lambda: None)  # as on a TPU
    found = asked(tensors, tensors, tensors, *rest, True)
    assert (found and found[0]) == tag and (tag is None or tag in bodies.TAGS and found[1])


@pytest.mark.parametrize(("tag", "there", "device", "spmd"), [
    ("no-pallas", {"torch_xla"}, "TPU", False), ("no-pallas", {"jax"}, "TPU", False),
    ("no-pallas", {"jax", "torch_xla"}, "CPU", False), ("spmd", {"jax", "torch_xla"}, "TPU", True),
    (None, {"jax", "torch_xla"}, "TPU", False),
])
def test_why_no_pallas_kernel_can_run(monkeypatch, tag, there, device, spmd):
    runtime = SimpleNamespace(device_type=lambda: device, is_spmd=lambda: spmd)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there" if name in there else None)
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    found = pallas.unavailable()
    assert (found and found[0]) == tag and (tag is None or tag in bodies.TAGS)


def test_the_reason_is_logged_once(caplog):
    attention._announce.cache_clear()
    with caplog.at_level(logging.INFO, logger="megacpp_compile"):
        for _ in range(3):
            megacpp_compile.attention(*operands(), softcap=2.0)
    assert [r.getMessage() for r in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert "attention on cpu: plain" in caplog.text and "[softcap]" in caplog.text


@pytest.mark.parametrize("spoilt", [
    lambda q, k, v: ((q[0], k, v), {}), lambda q, k, v: ((q, k[..., :2], v), {}),
    lambda q, k, v: ((q, k, v[:, :, :3]), {}), lambda q, k, v: ((q[:, :3], k[:, :2], v[:, :2]), {}),
    lambda q, k, v: ((q, k.float(), v), {}), lambda q, k, v: ((q, k, v), {"softcap": -1.0}),
    lambda q, k, v: ((q, k, v), {"doc_ids": DOCS[:, :3]}), lambda q, k, v: ((q, k, v), {"doc_ids": DOCS.float()}),
    lambda q, k, v: ((q[:, :, :3], k, v), {"doc_ids": DOCS[:, :3]}), lambda q, k, v: ((q, k, v), {"backend": "flash"}),
])
def test_operands_that_do_not_belong_together(spoilt):
    tensors, arguments = spoilt(*operands())
    with pytest.raises(OperandError):
        megacpp_compile.attention(*tensors, **arguments)


def test_a_compiler_sees_one_graph():
    tensors, arguments = operands("grouped"), {"softcap": 0.7, "doc_ids": DOCS}
    call = torch.compile(megacpp_compile.attention, backend="aot_eager", fullgraph=True)
    got = with_gradients(call, tensors, **arguments)
    torch.testing.assert_close(got, with_gradients(mathematics, tensors, **arguments))
    torch._dynamo.reset()
    call = torch.compile(megacpp_compile.attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(call(*tensors), mathematics(*tensors))


def test_pallas_kernel_is_given_what_it_takes(monkeypatch):
    """With ops in the kernel's place: padded channels, repeated keys, scaled queries, ids and cap, and gradients back."""

    class Ops:
        def sa_custom_forward(q, k, v, settings, ids, causal, softcap):
            assert q.shape[-1] == k.shape[-1] == v.shape[-1] == 128 and k.shape[1] == q.shape[1]
            assert ids is None or ids.dtype == torch.int32
            return (bodies.plain(q, k, v, ids, softcap, 1.0, causal),)

        def sa_custom_backward(grad, q, k, v, settings, ids, causal, softcap):
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            with torch.enable_grad():
                out = bodies.plain(*leaves, ids, softcap, 1.0, causal)
            return torch.autograd.grad(out, leaves, grad)

    monkeypatch.setattr(pallas, "_bridge", lambda: Ops)
    monkeypatch.setattr(pallas, "_settings", lambda: "")
    for heads in ("grouped", "other values"):
        tensors = operands(heads)
        arguments = {"doc_ids": DOCS, "softcap": 0.7, "scale": 0.3, "causal": True}
        got = with_gradients(pallas.attend, tensors, **arguments)
        torch.testing.assert_close(got, with_gradients(mathematics, tensors, **arguments))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["documents", "a cap", "a cap, documents and padding"])
@pytest.mark.parametrize("widths", [(4, 2, 64, 64), (4, 4, 192, 128)], ids=["grouped", "MLA"])
def test_flex_attention_on_cuda(name, widths, compiled):
    """What "auto" takes on CUDA, forward and gradients, no further from float64 than twice the plain body in bfloat16."""
    heads, groups, width, values = widths
    tokens, generator = 200, torch.Generator().manual_seed(0)
    sizes = ((2, heads, tokens, width), (2, groups, tokens, width), (2, groups, tokens, values))
    exact = [torch.randn(*s, generator=generator).bfloat16().double().requires_grad_() for s in sizes]
    documents = torch.arange(tokens).expand(2, -1) // torch.tensor([[70], [33]])
    padded = documents.masked_fill(torch.arange(tokens) >= 180, -1)
    arguments = {
        "documents": {"doc_ids": documents}, "a cap": {"softcap": 5.0},
        "a cap, documents and padding": {"softcap": 5.0, "doc_ids": padded},
    }[name]
    want = with_gradients(megacpp_compile.attention, exact, **arguments, backend="plain")
    tensors = [t.detach().bfloat16().cuda().requires_grad_() for t in exact]
    arguments = {k: v.cuda() if k == "doc_ids" else v for k, v in arguments.items()}
    assert megacpp_compile.attention_capability(*tensors, **arguments).backend == "flex"
    plain = with_gradients(megacpp_compile.attention, tensors, **arguments, backend="plain")
    torch._dynamo.reset()
    call = megacpp_compile.attention
    if compiled:
        call = torch.compile(call, backend=megacpp_compile.backend, fullgraph=True)
    got = with_gradients(call, tensors, **arguments)
    for g, p, w in zip(got, plain, want, strict=True):
        assert g.isfinite().all() and (g.cpu().double() - w).norm() <= 2 * (p.cpu().double() - w).norm()
