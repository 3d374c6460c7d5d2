"""Which of two backends attends faster at a shape: measured once a process, when a graph with it is compiled."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megacpp_compile._torch.modes import in_own_thread
from megacpp_compile.lowerings.attention._sdpa_choice import Layout

# Calls that are timed, after one that compiles; and how much faster a package has to be to be worth a dependency on it.
TIMES, WORTH = 10, 0.99


@functools.lru_cache(maxsize=256)
def milliseconds(
    device: str, operands: tuple[Layout, Layout, Layout], scale: float | None, causal: bool
) -> tuple[float, float]:
    """(torch's `scaled_dot_product_attention`, FlashAttention-4) at operands q, k, v laid out so, with the gradients
    that they ask for: the median of `TIMES` calls, whose operands are random and whose memory is given back.

    Raises what a backend raises.
    """
    return in_own_thread(lambda: _measured(device, operands, scale, causal))


def _measured(
    device: str, operands: tuple[Layout, Layout, Layout], scale: float | None, causal: bool
) -> tuple[float, float]:
    q, k, v = (_random(device, *one) for one in operands)
    width = q.shape[-1] ** -0.5 if scale is None else scale
    of_torch = functools.partial(scaled_dot_product_attention, q, k, v, is_causal=causal, scale=scale,
                                 enable_gqa=q.shape[1] != k.shape[1])  # fmt: skip
    calls: list[Callable[[], Tensor]] = [
        of_torch, lambda: torch.ops.megacpp.fa4_attention(q, k, v, width, 0.0, causal)[0],
    ]  # fmt: skip
    wanted = [t for t in (q, k, v) if t.requires_grad]
    out = calls[0]().detach()
    grad = _random(device, tuple(out.shape), out.stride(), out.dtype, False)

    def step(call: Callable[[], Tensor]) -> None:
        with torch.set_grad_enabled(bool(wanted)):
            out = call()
            if wanted:
                torch.autograd.grad(out, wanted, grad)

    for call in calls:
        step(call)
    # In turns, as a GPU's clock is not the same for long.
    turns = [[_timed(functools.partial(step, call), device) for call in calls] for _ in range(TIMES)]
    first, second = (statistics.median(times) for times in zip(*turns, strict=True))
    return first, second


def _random(device: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, grad: bool) -> Tensor:
    own = torch.Generator(device).manual_seed(0)  # nobody else's numbers change
    made = torch.empty_strided(shape, strides, dtype=dtype, device=device).normal_(generator=own)
    return made.requires_grad_(grad)


def _timed(step: Callable[[], None], device: str) -> float:
    if torch.device(device).type != "cuda":
        began = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    # In a compiled step the GPU is busy while the host gets to attention: a call before hides what the host takes,
    # which of a package in Python is a tenth of a millisecond and more.
    step()
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
