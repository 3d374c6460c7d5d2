"""`attention` on an XLA device: who serves it and why, and the numbers of CPU, by itself and in a compiled frame."""

from __future__ import annotations

import pytest
import torch

import megacpp_compile
from megacpp_compile.errors import AttentionError

from .test_plain_models import TOLERANCE, host_ops

pytestmark = pytest.mark.usefixtures("fresh")

DOCS = torch.tensor([[0, 0, 1, 1, 1, 2, -1], [5, 5, 5, 5, 5, 5, 5]])


def operands() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, h, 7, d) for h, d in ((4, 24), (2, 24), (2, 16))]


def run(call, tensors, **arguments):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = call(*leaves, **arguments)
    out.square().sum().backward()
    return [t.detach().cpu() for t in (out, *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize("compiled", [False, True])
def test_documents_and_a_cap(xla, compiled):
    import torch_xla.debug.metrics as metrics

    tensors = operands()
    want = run(megacpp_compile.attention, tensors, doc_ids=DOCS, softcap=0.7)
    metrics.clear_all()
    call = megacpp_compile.attention
    if compiled:
        call = torch.compile(call, backend="megacpp", fullgraph=True, options={"strict": True})
    got = run(call, [t.to(xla) for t in tensors], doc_ids=DOCS.to(xla), softcap=0.7)
    for g, w in zip(got, want, strict=True):
        assert (g - w).abs().max() < TOLERANCE * w.abs().max()
    assert not host_ops()


def test_without_a_tpu_the_plain_body_serves(xla):
    q, k, v = (t.to(xla) for t in operands())
    found = megacpp_compile.attention_capability(q, k, v, doc_ids=DOCS, softcap=0.7)
    assert found.backend == "plain" and found.tags == ("no-pallas",) and "jax" in str(found)
    with pytest.raises(AttentionError) as caught:
        megacpp_compile.attention(q, k, v, backend="pallas")
    assert caught.value.tag == "no-pallas"
