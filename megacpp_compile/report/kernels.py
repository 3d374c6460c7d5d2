"""Which attention kernel really ran, by the profiler: a flag is no proof of one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

# Kernels of cuDNN, FlashAttention, xFormers and flex attention; a softmax is attention written out.
KERNELS = re.compile(r"flash|fmha|attention|attn|sdpa|softmax", re.IGNORECASE)
OPERATORS = re.compile(r"megacpp::fa4_attention|aten::_(scaled_dot_product|(safe_)?softmax$)")

# Family -> what the names of its kernels, or of its operators, hold; the first that hits wins.
_FAMILIES = {
    "fa4": r"megacpp::fa4_attention|flash_?attncute|FlashAttention(For|Back)wardSm|kernel_cutlass_.*flash",
    "cudnn": r"cudnn",
    "efficient": r"fmha_cutlass|efficient_attention|mem_eff",
    "flash": r"flash_fwd|flash_bwd|pytorch_flash|flash_attention",
    "flex": r"flex_attention|triton_tem_fused.*attention|sdpa_dense",
    "unfused": r"softmax|attention_math",
}
_FAMILIES_RE = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _FAMILIES.items()}
FAMILIES = tuple(_FAMILIES)


def attention_kernels(fn: Callable[[], Any], device: torch.device) -> list[str]:
    """Names of the attention kernels of one call, by the profiler: on CUDA the kernels, elsewhere the operators."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, acc_events=True) as profiler:  # else torch warns that it would clear them
        fn()
        if cuda:
            torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    names = {str(event.name) for event in profiler.events() or () if event.device_type == kind}
    return sorted(name for name in names if (KERNELS if cuda else OPERATORS).search(name))


def families(names: Iterable[str]) -> tuple[str, ...]:
    """The families of kernels among `names`, sorted; "unfused" only where there is no other."""
    found = {next((f for f, p in _FAMILIES_RE.items() if p.search(name)), "other") for name in names}
    fused = found - {"unfused", "other"}
    return tuple(sorted(fused or found))
