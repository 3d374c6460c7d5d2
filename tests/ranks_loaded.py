"""What the server of `tests/ranks.py` has done when it forks ranks; they import this module from it."""

from __future__ import annotations

import os

import torch
import torch.distributed.tensor.parallel
from torch import nn

from tests.fixtures import kernels_left_out, quick_compilers
from tests.sharding import delayed, heads, ranks  # noqa: F401


def _compile_a_frame() -> None:
    """Which makes what Dynamo, AOTAutograd, Inductor's matchers and the passes make once a process."""
    # There are no threads to lose in a fork, neither of operators nor of autograd, which has one for each GPU.
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Before fake tensors make a build of torch with CUDA count one GPU where there is none.
    torch.ones((), requires_grad=True).backward()
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.RMSNorm(6), nn.Linear(6, 8, bias=False))
    with quick_compilers(), kernels_left_out():
        torch.compile(model, backend="megacpp")(torch.ones(2, 8)).sum().backward()
    torch._dynamo.reset()


_compile_a_frame()
