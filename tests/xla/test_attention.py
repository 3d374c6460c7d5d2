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


def written_out(q, k, v):
    later = torch.ones(7, 7, dtype=torch.bool, device=q.device).triu(1)
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    return (q @ k.transpose(-1, -2) * 0.2).masked_fill(later, float("-inf")).softmax(-1) @ v


def test_attention_that_is_written_out_is_the_plain_body(xla):
    tensors = operands()
    with megacpp_compile.record() as report:
        call = torch.compile(written_out, backend="megacpp", fullgraph=True, options={"strict": True})
        got = run(call, [t.to(xla) for t in tensors])
    for g, w in zip(got, run(written_out, tensors), strict=True):
        assert (g - w).abs().max() < TOLERANCE * w.abs().max()
    assert [(site.op, site.effective) for site in report.sites] == [("megacpp::attention", "reference")]
    assert not host_ops()


def test_xla_has_no_attention_of_its_own(xla):
    """What would serve in the plain body's place: torch_xla's calls are for a TPU, and torch's op is products."""
    import torch_xla
    from torch_xla.experimental.custom_kernel import flash_attention

    q, k, v = torch.randn(3, 1, 2, 128, 128, device=xla)
    if torch_xla.runtime.device_type() != "TPU":
        with pytest.raises(Exception, match="jax|Pallas|TPU|custom"):
            flash_attention(q, k, v, causal=True)
            torch_xla.sync()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    program = torch_xla._XLAC._get_xla_tensors_hlo([out])
    assert program.count(" dot(") == 2 and "custom-call" not in program
