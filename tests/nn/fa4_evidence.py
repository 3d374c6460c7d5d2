"""What the runs of FlashAttention-4 leave as evidence: on a GPU by `test_fa4_cuda.py`, on CPU with a stand-in to see that
a record can be made of it."""

from __future__ import annotations

import functools
import statistics
import time

import torch
from torch import nn

import megacpp_compile
from megacpp_compile.report.kernels import families
from megacpp_compile.report.measure import at_peak


def forward(device, batch=2, heads=32, tokens=4096, keys=192, values=128, dtype=torch.bfloat16, backend="fa4", times=10):
    """Forward and gradients against float32 in chunks of heads, the kernel that ran, tokens a second and memory."""
    sizes = ((batch, heads, tokens, width) for width in (keys, keys, values))
    q, k, v = (torch.randn(size, device=device).mul(0.5).to(dtype).requires_grad_() for size in sizes)
    # A step of bfloat16 is to be below the bound of the stop rule: gradients of values gather those of all queries.
    weight = torch.randn(batch, heads, tokens, values, device=device).mul(0.1)

    def step():
        for t in (q, k, v):
            t.grad = None
        out = megacpp_compile.attention(q, k, v, backend=backend)
        out.backward(weight.to(dtype))
        return out

    out, call = step(), megacpp_compile.observed_attention(step, device)
    worst = max(_difference((q, k, v), out, weight, h) for h in range(heads))
    seconds = statistics.median(_timed(step, device) for _ in range(times))
    finite = all(bool(t.isfinite().all()) for t in (out, q.grad, k.grad, v.grad))
    metrics = {"max_abs_diff": worst, "median_tok_per_sec": batch * tokens / seconds, **_peak(step, device)}
    shape = [batch, heads, tokens, tokens, keys, values]
    return _evidence(shape, dtype, backend, call, metrics, out.shape == weight.shape, finite)


def _peak(step, device):
    peak = at_peak(step, device)
    return {"peak_memory_mib": (peak["peak"] or peak["step"]) / 2**20}


def _evidence(shape, dtype, backend, call, metrics, as_asked, finite):
    return {
        "shape": shape, "dtype": str(dtype).removeprefix("torch."), "requested_backend": backend,
        "actual_backend": call.effective, "fallback_reason": call.reason, "phase": call.kind,
        "kernel_family": ", ".join(families(call.kernels)), "difference_against": "float32",
        "checks": {"imported": True, "synchronised": True, "shape": as_asked, "finite": finite}, "metrics": metrics,
    }  # fmt: skip


def _difference(operands, out, weight, head):
    """The largest difference of one head's output and gradients from float32."""
    single = [t.detach()[:, head : head + 1].float().requires_grad_() for t in operands]
    exact = megacpp_compile.attention(*single, backend="plain")
    exact.backward(weight[:, head : head + 1])
    pairs = [(out[:, head : head + 1], exact)]
    pairs += [(t.grad[:, head : head + 1], s.grad) for t, s in zip(operands, single, strict=True)]
    return max((mine.float() - theirs).abs().max().item() for mine, theirs in pairs)


def _timed(step, device, in_a_row=3):
    """Seconds of a step, of some that the host is ahead of, as in training."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(in_a_row):
        step()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / in_a_row


class Block(nn.Module):
    def __init__(self, dim, heads, width, backend):
        super().__init__()
        self.heads, self.backend = heads, backend
        self.norm, self.qkv = nn.RMSNorm(dim), nn.Linear(dim, 3 * heads * width, bias=False)
        self.out = nn.Linear(heads * width, dim, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(megacpp_compile.attention(q, k, v, backend=self.backend).transpose(1, 2).flatten(2))


def train(device, steps, dim=512, heads=8, width=64, tokens=512, layers=2, dtype=torch.bfloat16):
    """`steps` of AdamW to predict a fixed sequence, with FlashAttention-4 and with torch's attention: their losses."""
    losses, found = {}, {}
    for backend in ("fa4", "sdpa"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(dim, heads, width, backend) for _ in range(layers))).to(device, dtype)
        x, y = (torch.randn(2, tokens, dim, device=device).to(dtype) for _ in range(2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(model=model, optimizer=optimizer, x=x, y=y):
            optimizer.zero_grad()
            loss = (model(x).float() - y.float()).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            losses[backend] = step().item()
            seconds.append(time.perf_counter() - began)
        if backend == "fa4":
            found = {"median_tok_per_sec": 2 * tokens / statistics.median(seconds), **_peak(step, device)}
            call = megacpp_compile.observed_attention(functools.partial(model, x), device)
    metrics = {"loss_ratio": losses["fa4"] / losses["sdpa"], "loss": losses["fa4"], **found}
    finite = bool(all(map(torch.isfinite, map(torch.tensor, losses.values()))))
    return _evidence([2, heads, tokens, tokens, width, width], dtype, "fa4", call, metrics, True, finite)
