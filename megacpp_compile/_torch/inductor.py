"""Inductor: its entry, settings, hooks and workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch._inductor import config, list_mode_options
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads, maybe_warm_pool
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.runtime.compile_tasks import _worker_compile_triton as worker_compile_triton
    from torch._inductor.utils import get_device_tflops, get_gpu_dram_gbps
    from torch.utils._triton import has_triton_package
else:
    __getattr__ = theme(__name__)
