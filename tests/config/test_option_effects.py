"""Options of a compilation that show in what a model keeps for its backward."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from tests.corpus.spellings import PlainMLA

BATCH, SEQ, DIM, Q_LORA, KV_LORA, ROPE = 2, 7, 24, 14, 10, 4


def kept_shapes(options: dict[str, bool]) -> tuple[Counter[tuple[int, ...]], dict[str, Tensor]]:
    """Shapes of all that one compiled forward saves, by the buffer they keep alive; and the gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = PlainMLA(DIM, heads=2, q_lora=Q_LORA, kv_lora=KV_LORA, nope=6, rope=ROPE, v=5, table_source="buffer")
    x = torch.randn(BATCH, SEQ, DIM, requires_grad=True)
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers(), x)}
    kept: dict[int, tuple[int, ...]] = {}
    alive = []

    def pack(t: Tensor) -> Tensor:
        alive.append(t)
        at = t.untyped_storage()
        if at.data_ptr() not in own and at.nbytes():
            kept[at.data_ptr()] = (at.nbytes() // t.element_size() // (BATCH * SEQ), t.shape[-1])
        return t

    compiled = torch.compile(model, backend="megacpp", options=options, fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = compiled(x)
    out.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    return Counter(kept.values()), gradients


@pytest.mark.usefixtures("no_kernels")
def test_keep_latents():
    """Two latents more are saved, each in its down-projection's own buffer, and nothing else changes."""
    without, gradients = kept_shapes({})
    with_latents, same = kept_shapes({"keep_latents": True})
    widths = Counter({(Q_LORA, Q_LORA): 1, (KV_LORA + ROPE, KV_LORA): 1})
    assert with_latents - without == widths
    assert not without - with_latents
    assert gradients.keys() == same.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, same[name])
