"""The Triton backward of `gated_delta_rule`: gradients against the reference in float64, and what atomics would break."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.lowerings.gated_delta_rule import reference
from megacpp_compile.lowerings.gated_delta_rule._chunk_tables import ChunkTables

from . import relative_error
from .agreement import DEVICE, OF_KERNELS, disagreements, faults, on, poisoned_memory, rarely, reference_of, seldom
from .contract import identical
from .delta_cases import RULES, final_gradient, rule

pytestmark = OF_KERNELS
OP = "gated_delta_rule_backward"
# Sizes that kernels have; float32 among bfloat16 is as float32.
SERVED = {label: options for label, options in RULES.items() if options.get("k", 16) in (16, 32)}


def backward(args):
    from megacpp_compile.lowerings.gated_delta_rule.cuda_triton_backward import gated_delta_rule_backward

    with poisoned_memory():
        return gated_delta_rule_backward(*args)


def arguments(rand, dtype, **options):
    *given, scale, eps, chunk, out = rule(rand, dtype, **options)
    o, final, states, inverse = reference_of("gated_delta_rule")(*given, scale, eps, chunk, out)
    do = rand(*o.shape, dtype=out)
    return on(DEVICE, (do, final_gradient(rand, final, options), *given, states, inverse, scale, eps, chunk))


@pytest.mark.parametrize("label", [label if label.startswith("one_token") else rarely(label) for label in SERVED])
def test_float32(rand, label):
    args = arguments(rand, torch.float32, **SERVED[label])
    assert not disagreements(backward(args), OP, args)


@seldom
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_half_precision(rand, gate, dtype):
    """GEMM operands are rounded to bfloat16, and their sums are not."""
    args = arguments(rand, dtype, b=1, t=40, gate=gate, chunk=32)
    want = reference_of(OP)(*on(DEVICE, args, torch.float64))
    assert not faults(backward(args), want, 3 * torch.finfo(torch.bfloat16).eps)


@seldom
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_tokens_that_write_nothing(rand, gate):
    """beta may be 0: its own gradient is not 0 then, nor may anything be divided by it."""
    do, dfinal, q, k, v, g, beta, *others = arguments(rand, torch.float32, b=1, t=40, gate=gate)
    beta = beta.clone()
    beta[:, ::3] = 0
    *given, states, inverse, scale, eps, chunk = q, k, v, g, beta, *others
    _, _, states, inverse = reference_of("gated_delta_rule")(*given, scale, eps, chunk, torch.float32)
    args = do, dfinal, *given, states, inverse, scale, eps, chunk
    assert not disagreements(backward(args), OP, args)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter knows no alignment, and takes minutes")
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_rows_that_begin_anywhere(rand, gate):
    """q, k and v are slices of a row of 1032 numbers: Triton 3.6 compiled the walk to one that left its memory."""
    args = arguments(rand, torch.bfloat16, b=1, t=256, k=128, v=128, chunk=64, gate=gate)
    assert args[2].stride(1) % 16 == 8
    want = reference_of(OP)(*on(DEVICE, args, torch.float64))
    assert not faults(backward(args), want, 3 * torch.finfo(torch.bfloat16).eps)


@seldom
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_equal_inputs_give_equal_bits(rand, gate):
    args = arguments(rand, torch.bfloat16, b=1, t=20, hk=1, hv=3, gate=gate)
    identical(*(backward(args) for _ in range(2)))


@seldom
@pytest.mark.parametrize("decay", ["usual", "strong", "mixed", "late"])
def test_chunks_that_decay_little_take_one_gemm(rand, decay, monkeypatch):
    """Results are those of cuts for every chunk, within what rounding bfloat16 operands does; "mixed" has chunks of both
    kinds in a sequence, and in "late" it is the second half of one that decays. The launches are told apart: one that served the other's chunks would write its poison."""
    from megacpp_compile.lowerings.gated_delta_rule import _small_decay_chunks, cuda_triton, cuda_triton_backward

    drawn = {"b": 1, "t": 130, "hk": 1, "hv": 2, "chunk": 64, "gate": "channel"}
    *given, scale, eps, chunk, out = rule(rand, torch.bfloat16, decay="strong" if decay == "strong" else "usual", **drawn)
    if decay in ("mixed", "late"):
        given[3][:, 64 if decay == "mixed" else 96 : 128] *= 40
    given = on(DEVICE, given)
    q, k, _, g, *_ = given
    told = _small_decay_chunks.SmallDecayChunks(q, k, g, g, 3, 64, 1e-6, False, False).small_decay
    small_decay = {"usual": [1, 1, 1], "strong": [0, 0, 1], "mixed": [1, 0, 1], "late": [1, 0, 1]}[decay]  # two tokens cannot decay by 2^64
    assert told[0].tolist() == [[m, m] for m in small_decay]

    def made():
        with poisoned_memory():
            o, last, states, inverse = cuda_triton.gated_delta_rule(*given, scale, eps, chunk, out)
            do, dfinal = o.flip(1), last.flip(-1)
            args = do, dfinal, *given, states, inverse, scale, eps, chunk
            return [o, last, *cuda_triton_backward.gated_delta_rule_backward(*args)]

    got = made()
    monkeypatch.setattr(_small_decay_chunks, "told_apart", lambda wide: False)
    assert not faults(got, made(), 4 * torch.finfo(torch.bfloat16).eps)


@seldom
@pytest.mark.parametrize("large_decay", ["none", "some", "all"])
def test_any_number_of_programs_by_cuts(rand, large_decay, monkeypatch):
    """Three and more than there are chunks give equal bits, which are those of a program for each chunk but for rounding.
    Of two heads' 10 chunks 4 have no token."""
    from megacpp_compile.lowerings.gated_delta_rule import _small_decay_chunks, cuda_triton

    *given, scale, eps, chunk, out = rule(rand, torch.bfloat16, documents=(5, 20, 0), hk=1, hv=2, chunk=16,
                                          gate="channel")
    given[3][:, {"none": slice(0), "some": slice(5, 21), "all": slice(None)}[large_decay]] *= 100
    given = on(DEVICE, given)
    q, k, _, g, _, _, cu_seqlens = given
    places = ChunkTables(cu_seqlens, chunk, 5).chunks
    listed = _small_decay_chunks.SmallDecayChunks(q, k, g, places, 5, chunk, eps, True, False).large_decay[0]
    assert listed == {"none": 0, "some": 2, "all": 6}[large_decay]

    def made(programs):
        monkeypatch.setattr(_small_decay_chunks, "programs", lambda device: programs)
        with poisoned_memory():
            o, last, states, inverse = cuda_triton.gated_delta_rule(*given, scale, eps, chunk, out)
            args = o.flip(1), last.flip(-1), *given, states, inverse, scale, eps, chunk
            return [o, last, *cuda_triton.gated_delta_rule_backward(*args)]

    got = made(3)
    assert all(torch.equal(*both) for both in zip(got, made(50), strict=True))
    monkeypatch.setattr(_small_decay_chunks, "told_apart", lambda wide: False)
    assert not faults(got, made(0), 4 * torch.finfo(torch.bfloat16).eps)


def test_large_decay_chunks_are_listed_heads_first():
    from megacpp_compile.lowerings.gated_delta_rule import _triton_large_decay

    batch, chunks, heads = 2, 5, 3
    small_decay = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1, 0, 0] * 3, dtype=torch.int32, device=DEVICE).view(batch, chunks, heads)
    large_decay = small_decay.new_full((1 + small_decay.numel(),), -1)
    static = {"num_warps": 1, "num_stages": 1, "ROWS": 4}
    _triton_large_decay.large_decay_chunks(lambda meta: (1,), static, small_decay=small_decay, large_decay=large_decay, chunks=chunks, heads=heads,
                               count=small_decay.numel())
    want = (small_decay.transpose(1, 2).flatten() == 0).nonzero().flatten().tolist()
    assert large_decay.tolist() == [len(want), *want, *[-1] * (small_decay.numel() - len(want))]


@seldom
@pytest.mark.parametrize("large_decay", [1, 4, 30])
def test_a_rate_that_all_tokens_share(rand, large_decay):
    """Its gradient is what is left of sums that cancel: several times further off where a row and a column round the
    same product differently."""
    from megacpp_compile.lowerings.gated_delta_rule import cuda_triton

    drawn = {"b": 1, "t": 130, "hk": 1, "hv": 1, "k": 32, "v": 32, "chunk": 64, "gate": "channel", "initial": False}
    *given, scale, eps, chunk, _ = rule(rand, torch.bfloat16, **drawn)
    given[3] = large_decay * torch.nn.functional.logsigmoid(given[3] + 3)

    def gradient(given, kernels):
        o, _, states, inverse = kernels.gated_delta_rule(*given, scale, eps, chunk, given[3].dtype)
        leaf = o.detach().requires_grad_()
        (seed.to(o) * torch.nn.functional.rms_norm(leaf, leaf.shape[-1:], eps=1e-6)).sum().backward()
        dg = kernels.gated_delta_rule_backward(leaf.grad, None, *given, states, inverse, scale, eps, chunk)[3]
        return (dg.double() * given[3].double()).sum((0, 1))

    (seed,) = on(DEVICE, (rand(*given[2].shape),))
    want = gradient(on(DEVICE, given, torch.float64), reference)
    assert relative_error(gradient(on(DEVICE, given), cuda_triton), want) < 2 * torch.finfo(torch.bfloat16).eps
