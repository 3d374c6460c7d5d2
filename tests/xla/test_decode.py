"""The cache of latents and attention over it, on XLA as on a CPU: rows of every format, lengths that are data."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile import MLAKVCache, latent_attention
from tests.lowerings import relative_error


def decoded(device, codec, form):
    """What the last of some steps attends to."""
    torch.manual_seed(0)
    cache, weight = MLAKVCache(1, 2, 12, 32, 16, dtype=torch.float32, codec=codec, device=device), torch.randn(2 * 14, 32)
    for n in (4, 1, 2):
        latent, rope = torch.randn(2, n, 32), torch.randn(2, n, 1, 16)
        q_nope, q_rope = torch.randn(2, n, 2, 8), torch.randn(2, n, 2, 16)
        rows = cache.update(0, latent.to(device), rope.to(device))
        cache.advance(n)
        out = latent_attention(q_nope.to(device), q_rope.to(device), rows, weight.to(device), form=form)
    assert cache.length == 7
    return out.cpu()


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("codec", [None, "fp8", "turboquant", "polarquant"])
def test_decoding_is_that_of_a_cpu(xla, codec, form):
    assert relative_error(decoded(xla, codec, form), decoded("cpu", codec, form)) < 1e-5
