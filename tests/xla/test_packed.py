"""Ops of packed documents on an XLA device: the numbers of CPU, and nothing on the host."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map_only

from megacpp_compile.lowerings.causal_conv1d import reference as convolution
from megacpp_compile.lowerings.rope_qk import reference, tpu_xla

from .test_plain_models import host_ops


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)


def moved(args, device):
    return tree_map_only(torch.Tensor, lambda t: t.to(device), args)


def test_rope_by_position(xla):
    torch.manual_seed(0)
    tensors = (torch.randn(11, 4, 10), torch.randn(11, 2, 10), torch.randn(7, 1, 3), torch.randn(7, 1, 3))
    flags = (4, True, False, False, False, torch.float32)
    args = (*tensors, *flags, torch.tensor([0, 3, 3, 8], dtype=torch.int32))
    assert_equal(tpu_xla.rope_qk(*moved(args, xla)), reference.rope_qk(*args))
    assert not host_ops()


def test_convolution(xla):
    torch.manual_seed(0)
    x, grad, weight, bias = torch.randn(2, 10, 3), torch.randn(2, 10, 3), torch.randn(3, 4), torch.randn(3)
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 3, 3, 3], [4, 4, 4, 4, 4, 4, 7, 7, 7, 9]], dtype=torch.int32)
    forward = (x, weight, bias, "silu", torch.float32, seq_idx)
    assert_equal([convolution.causal_conv1d(*moved(forward, xla))], [convolution.causal_conv1d(*forward)])
    backward = (grad, x, weight, bias, "silu", seq_idx)
    assert_equal(convolution.causal_conv1d_backward(*moved(backward, xla)), convolution.causal_conv1d_backward(*backward))
    assert not host_ops()
