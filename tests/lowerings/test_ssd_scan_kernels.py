"""The Triton kernels of `ssd_scan` beyond agreeing with the reference: how exact, what they refuse, what they cost."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.lowerings.ssd_scan import reference

from .agreement import CUDA, DEVICE, INNER_UNIT, OF_KERNELS, TIMES_ROUNDING, faults, module_of, on, seldom
from .cases import _scan
from .contract import identical
from .rounding import moved_by_rounding

pytestmark = OF_KERNELS


def kernels():
    return module_of("ssd_scan", "cuda_triton")


def call(rand, dtype=torch.bfloat16, out=torch.float32, **options):
    return *on(DEVICE, _scan(rand, dtype, **options))[:-1], out


def backward_of(rand, args, states):
    *operands, chunk, out = args
    dy = rand(*operands[0].shape, dtype=out, device=DEVICE)
    return dy, None, *operands, states, chunk


def test_products_keep_16_bits(rand):
    """With operands in bfloat16, what is not rounded to it at the end is exact to three units of 16 bits: scores, decays
    and states are not rounded to 8 on the way."""
    args = call(rand, b=1, t=40)
    y, final, states = kernels().ssd_scan(*args)
    back = backward_of(rand, args, states)
    _, d_dt, d_A, *_, d_D, d_initial = kernels().ssd_scan_backward(*back)
    want = reference.ssd_scan(*on(DEVICE, args, torch.float64))
    d_want = reference.ssd_scan_backward(*on(DEVICE, back, torch.float64))
    assert not faults((y, final, states, d_dt, d_D, d_initial), (*want, d_want[1], *d_want[5:]), 3 * INNER_UNIT)

    def rounding():
        wide = on("cpu", back, torch.float64)
        return [TIMES_ROUNDING * moved_by_rounding(reference.ssd_scan_backward, wide, INNER_UNIT)[2]]

    assert not faults([d_A], [d_want[2]], 3 * INNER_UNIT, rounding)  # four sums of numbers of either sign


@seldom
def test_a_state_carried_over_is_the_whole_sequence(rand):
    x, dt, A, B, C, D, state, chunk, out = call(rand, b=1, t=40)
    whole, final, _ = kernels().ssd_scan(x, dt, A, B, C, D, state, chunk, out)
    parts, at = [], 23
    for part in (slice(0, at), slice(at, None)):
        y, state, _ = kernels().ssd_scan(x[:, part], dt[:, part], A, B[:, part], C[:, part], D, state, chunk, out)
        parts.append(y)
    assert not faults([torch.cat(parts, 1), state], [whole, final], 3 * INNER_UNIT)


@seldom
def test_one_tensor_for_both(rand):
    """B and C may be one and the same tensor: nothing may be told by who is who."""
    x, dt, A, B, _, D, state, chunk, out = call(rand, b=1, t=20)
    ones = kernels().ssd_scan(x, dt, A, B, B, D, state, chunk, out)
    twos = kernels().ssd_scan(x, dt, A, B, B.clone(), D, state, chunk, out)
    back = backward_of(rand, (x, dt, A, B, B, D, state, chunk, out), ones[2])
    ones += kernels().ssd_scan_backward(*back)
    twos += kernels().ssd_scan_backward(*back[:6], back[6].clone(), *back[7:])
    identical(ones, twos)


@seldom
@pytest.mark.parametrize("chunk", [16, 256])
def test_equal_inputs_give_equal_bits(rand, chunk):
    args = call(rand, b=1, t=20, g=1, h=6, chunk=chunk)
    forward = [kernels().ssd_scan(*args) for _ in range(2)]
    back = backward_of(rand, args, forward[0][2])
    backward = [kernels().ssd_scan_backward(*back) for _ in range(2)]
    identical((*forward[0], *backward[0]), (*forward[1], *backward[1]))


@seldom
def test_nothing_of_a_document_reaches_the_next(rand):
    """In no bit, however large: what does not decay over a start is a zero of its own, not a small factor."""
    args, cut = call(rand, b=1, t=40), 20
    seq_idx = (torch.arange(40, device=DEVICE) >= cut)[None].int()
    loud = args[0].clone()
    loud[:, :cut] *= 1e30
    (y, final, _), (y_loud, final_loud, _) = (kernels().ssd_scan(x, *args[1:], seq_idx) for x in (args[0], loud))
    assert torch.equal(y[:, cut:], y_loud[:, cut:]) and torch.equal(final, final_loud)


@pytest.mark.parametrize(("options", "reason"),
                         [({"dtype": torch.float64}, "float64"), ({"p": 24}, "heads of 24 with states of 16"),
                          ({"n": 512}, "heads of 16 with states of 512")], ids=["float64", "heads", "states"])
def test_refusals(rand, options, reason):
    args = call(rand, t=3, **options)
    for name, given in (("ssd_scan", args), ("ssd_scan_backward", (args[0], None, *args[:-2], args[0], args[-2]))):
        assert reason in kernels().supports(name, given)
    assert kernels().supports("ssd_scan", call(rand, t=3)) is None


@pytest.mark.skipif(not CUDA, reason="the interpreter knows no alignment, and takes minutes for chunks of this size")
def test_rows_that_begin_anywhere(rand):
    """x, B and C in rows of an odd number of eights, whose numbers are those of rows by themselves."""
    x, dt, A, B, C, *others = call(rand, b=1, t=600, h=4, g=2, p=64, n=128, chunk=128)
    rows = torch.cat([t.flatten(2) for t in (x, B, C)], -1)
    parts = torch.nn.functional.pad(rows, (8, 0))[..., 8:].split([256, 256, 256], -1)
    slices = [part.unflatten(2, t.shape[2:]) for part, t in zip(parts, (x, B, C), strict=True)]
    assert slices[0].stride(1) % 16 == 8
    got, want = [], []
    for operands, out in ((slices, got), ([t.contiguous() for t in slices], want)):
        args = operands[0], dt, A, *operands[1:], *others
        out += kernels().ssd_scan(*args)
        out += kernels().ssd_scan_backward(torch.ones_like(out[0]), None, *args[:-2], out[2], *args[-2:-1])
    identical(got, want)


@pytest.mark.skipif(not CUDA, reason="memory and waiting are a GPU's")
def test_small_in_memory_and_never_waiting(rand):
    """Nothing is kept or made that grows with the square of a chunk for every head, and nobody waits for the device."""
    args = call(rand, b=2, t=2048, h=32, g=4, p=64, n=128, chunk=128, initial=False)
    _, _, states = kernels().ssd_scan(*args)
    back = backward_of(rand, args, states)
    kernels().ssd_scan_backward(*back)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels().ssd_scan(*args)
        kernels().ssd_scan_backward(*back)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    operands = sum(t.numel() * t.element_size() for t in back if isinstance(t, torch.Tensor))
    assert torch.cuda.max_memory_allocated() - before < 1.5 * operands
