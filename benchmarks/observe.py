"""What a call did beside taking time: memory, what was fused, and which attention kernel really ran."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.report.kernels import attention_kernels

__all__ = ["attention_kernels", "fused", "peak_bytes", "peak_bytes_on_cpu", "saved_bytes", "sites", "waits_for_device"]


@contextlib.contextmanager
def sites(row: dict[str, Any]) -> Iterator[None]:
    """Notes in `row` what megacpp fused in the frames compiled inside, and what fell back."""
    import megacpp_compile

    with megacpp_compile.record() as report:
        yield
    if report.sites:
        row["sites"] = [
            {"pass": s.pass_name, "module": s.fqn, "requested": s.requested, "effective": s.effective,
             "reason": s.reason}
            for s in report.sites
        ]  # fmt: skip
    if report.misses:
        row["near_misses"] = sorted({f"{m.pass_name}: {m.reason}" for m in report.misses})
    if found := [f.peak for f in report.frames if f.peak]:
        row["peaks"] = found
    if fallen := [f.reason for f in report.frames if not f.captured]:
        row["fell_back"] = fallen


def fused(row: dict[str, Any]) -> str:
    """The sites of a row in one line: pass, lowering, how often."""
    counts: dict[str, int] = {}
    for site in row.get("sites", ()):
        ran = site["effective"]
        if ran != site["requested"]:
            ran = f"{site['requested']} → {ran}"
        counts[f"{site['pass']} ({ran})"] = counts.get(f"{site['pass']} ({ran})", 0) + 1
    return ", ".join(f"{n} {what}" for what, n in counts.items())


def saved_bytes(forward: Callable[[], Any], own: Sequence[Tensor]) -> int:
    """Bytes that `forward` keeps for its backward: distinct storages, without those of `own`."""
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward()
    mine = {t.untyped_storage().data_ptr() for t in own}
    size = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in mine)
    del out
    return size


def peak_bytes(fn: Callable[[], Any]) -> int:
    """Device memory that `fn` needs at its peak beyond what was allocated before."""
    fn()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def waits_for_device(fn: Callable[[], Any]) -> bool:
    """Whether the host waits for the device in `fn`, as torch's own sync debug mode sees it."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fn()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def peak_bytes_on_cpu(fn: Callable[[], Any]) -> int:
    """Main memory that torch allocates for `fn` at its peak."""
    from megacpp_compile.report.measure import at_peak

    fn()
    found = at_peak(fn, "cpu")["step"]
    assert found is not None
    return found
