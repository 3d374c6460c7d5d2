"""Inductor compiles a whole frame for a Hopper GPU that is not there: everything but loading and running the kernels.

Fake tensors on CUDA need no GPU; what Inductor asks of the device is answered here, and a kernel that Triton and ptxas
have compiled is told, not loaded.
"""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config, scheduler
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._subclasses import FakeTensorMode
from torch.utils import _triton
from torch.utils._pytree import tree_map_only

H100 = types.SimpleNamespace(name="NVIDIA H100", major=9, minor=0, multi_processor_count=132,
                             regs_per_multiprocessor=65536, warp_size=32, max_threads_per_multi_processor=2048,
                             max_threads_per_block=1024, shared_memory_per_block_optin=232448, total_memory=80 << 30)
ANSWERS = {"is_available": lambda: True, "is_bf16_supported": lambda including_emulation=True: True,
           "device_count": lambda: 1, "current_device": lambda: 0, "get_device_properties": lambda device=None: H100,
           "get_compute_capability": lambda device=None: 90, "get_raw_stream": lambda index: 0,
           "maybe_exchange_device": lambda index: 0, "exchange_device": lambda index: 0,
           "set_device": lambda index: None, "synchronize": lambda device=None: None}  # fmt: skip


@contextlib.contextmanager
def inductor_for_hopper() -> Iterator[list[str]]:
    """The names of the kernels that were compiled, those of Inductor's own among them. Asks for the fixture `hopper`."""
    compiled: list[str] = []
    assert scheduler.has_triton  # loaded, with all that asks it, before anything is answered

    def loaded(self):
        name = self.inductor_meta.get("kernel_name") or self.compile_meta["kernel_name"]
        compiled.append(re.sub(r"_\d+$", "", name))  # Inductor numbers them
        return types.SimpleNamespace(config=self.config, n_regs=0, n_spills=0, shared=0, cache_hash="", store_cubin=False)

    with pytest.MonkeyPatch.context() as patch, config.patch(compile_threads=1, force_disable_caches=True):
        for name, answer in ANSWERS.items():
            patch.setattr(CudaInterface, name, staticmethod(answer), raising=False)
        for name in ("get_device_properties", "current_device"):
            patch.setattr(CudaInterface.Worker, name, staticmethod(ANSWERS[name]))
            patch.setattr(torch.cuda, name, ANSWERS[name])
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", ANSWERS["get_raw_stream"], raising=False)
        for module in [_triton, *(m for name, m in list(sys.modules.items()) if name.startswith("torch._inductor"))]:
            if hasattr(module, "has_triton"):
                patch.setattr(module, "has_triton", lambda: True)
        patch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
        patch.setattr(triton_heuristics.CachingAutotuner, "get_device_interface", lambda self: CudaInterface)
        for kind in (triton_heuristics.StaticTritonCompileResult, triton_heuristics.TritonCompileResult):
            patch.setattr(kind, "make_launcher", loaded)
        yield compiled


def on_hopper(args: Sequence[Any]) -> list[Any]:
    """Fake tensors on CUDA for those among `args`, of the same shapes, strides and dtypes. They have no gradients: a torch
    without CUDA cannot differentiate them."""
    with FakeTensorMode():
        return tree_map_only(Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda:0"),
                             list(args))
