"""Experts over rows that come sorted: the loop they stand for, `moe` around them, gradients, padding, and float8."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.lowerings._gemm.float8_support import no_grouped_float8
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.lowerings._traits import traits_of
from megacpp_compile.lowerings.moe import moe
from megacpp_compile.lowerings.moe_sorted import moe_sorted, reference

from . import relative_error
from .agreement import CUDA, DEVICE, KERNELS, module_of, on, poisoned_memory, rarely
from .cases import CASES, EXPERTS, SORTED, _sorted_rows
from .contract import as_leaves, assert_keeps, gradcheck, identical, leaves

assert semantic_ops()
OP = torch.ops.megacpp.moe_sorted.default


def finite(args):
    """`args` with numbers in the padding, for tools that compare it."""
    return args[0].nan_to_num(3.0), *args[1:]


def chosen(offsets, rows):
    """The expert of each row; of padding none."""
    return torch.searchsorted(offsets, torch.arange(rows, dtype=torch.int32, device=offsets.device), right=True)


def as_moe(x, offsets, w_gate, w_up, w_down, activation, layout, keep_hidden, precision="", *biases):
    """Every row a token whose one choice is its expert, and padding that chose none."""
    lists = w_gate, w_up, w_down
    ones = torch.ones(x.shape[0], 1, dtype=x.dtype)
    return moe(x, chosen(offsets, x.shape[0])[:, None], ones, *lists, activation, layout, x.dtype, keep_hidden, precision, *biases)[0]


@pytest.mark.parametrize("label", SORTED)
def test_is_moe_of_one_choice(rand, label):
    """`test_moe` shows that to be the plain loop. What padding holds reaches nothing."""
    args = as_leaves(CASES["moe_sorted"][label](rand, torch.float64))
    wanted = leaves(args)
    got, want = OP(*args)[0], as_moe(*finite(args))
    assert relative_error(got, want) < 1e-12
    seed = rand(*want.shape)
    grads = [torch.autograd.grad(y, wanted, seed) for y in (got, want)]
    for a, b in zip(*grads, strict=True):
        assert relative_error(a, b) < 1e-11
    behind = int(args[1][-1]) if args[1].numel() else 0
    assert not got[behind:].any() and not grads[0][0][behind:].any()


@pytest.mark.parametrize("offsets", [(0, 0, 0), (4, 4, 4), (0, 0, 7), (1, 3, 5)], ids=str)
def test_is_the_plain_code(rand, offsets):
    """No rows at all, all to the first, all to the last, some to each; each of seven rows or padding."""
    x = rand(7, 4).requires_grad_()
    gate, up, down = (rand(3, *shape).requires_grad_() for shape in ((6, 4), (6, 4), (4, 6)))
    ends = torch.tensor(offsets, dtype=torch.int32)
    y, hidden = OP(x, ends, [gate], [up], [down], "silu", "pair")
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    parts = x[: offsets[-1]].split(sizes)
    plain = [F.silu(p @ g.T) * (p @ u.T) @ d.T for p, g, u, d in zip(parts, gate, up, down, strict=True)]
    want = torch.cat([*plain, x.new_zeros(7 - offsets[-1], 4)])
    assert relative_error(y, want) < 1e-12 and [h.shape for h in hidden] == [(7, 6)] * 2
    seed = rand(7, 4)
    grads = [torch.autograd.grad(out, (x, gate, up, down), seed) for out in (y, want)]
    for got, exact in zip(*grads, strict=True):
        assert relative_error(got, exact) < 1e-12


@pytest.mark.sampled(3)
@pytest.mark.parametrize("label", ["pair_separate", "biases_gate_up", "as_gpt_oss", "some_of_none", "hidden_not_kept"])
def test_gradients(rand, label):
    options = {**EXPERTS[label], "tokens": 3, "d": 4, "n": 3, "experts": 3}
    gradcheck(OP, as_leaves(finite(_sorted_rows(rand, torch.float64, **options))))


@pytest.mark.parametrize("keep", [True, False])
def test_saved_for_backward(rand, keep):
    args = as_leaves((*CASES["moe_sorted"]["pair_separate"](rand, torch.float32)[:7], keep))
    hidden = (1, 2) if keep else ()
    assert len(assert_keeps(moe_sorted, args, (*leaves(args), args[1]), *hidden)) == 1 + len(hidden)


def test_counts_as_a_gemm(rand):
    traits, args = traits_of(OP), CASES["moe_sorted"]["pair_separate"](rand, torch.float32)
    assert traits.gemm and traits.flops(*args) == 2 * args[0].shape[0] * 3 * 24 * 16


def of_float8(module, args, seed):
    y, kept = module.moe_sorted(*args[:8], "fp8_current", *args[9:])
    x, offsets, *lists, activation, layout = args[:7]
    backward = seed, x, *lists, kept, offsets, activation, layout, "fp8_current", *args[9:]
    *gradients, biases = module.moe_sorted_backward(*backward)
    return [y, *gradients, *biases]


@pytest.mark.parametrize("label", ["pair_separate", "gate_up_stacked", "some_of_none", "biases"])
def test_float8_is_that_of_moe(rand, label):
    args = as_leaves(finite(CASES["moe_sorted"][label](rand, torch.float64)))
    seed = rand(*args[0].shape)
    want = as_moe(*args[:8], "fp8_current", *args[9:])
    exact = as_moe(*args)
    d_x, *_ = torch.autograd.grad(want, leaves(args), seed)
    got = of_float8(reference, args, seed)
    assert relative_error(got[0], want) < 1e-12 and relative_error(got[1], d_x) < 1e-12
    assert 0.01 < relative_error(want, exact) < 0.4


@KERNELS
@pytest.mark.skipif(CUDA and bool(no_grouped_float8(torch.device(DEVICE))), reason="a GPU without such GEMMs")
@pytest.mark.parametrize("label", ["pair_separate", *map(rarely, ("gate_up_stacked", "some_of_none", "biases"))])
def test_float8_kernels(rand, label):
    options = {**EXPERTS[label], "d": 32, "n": 16}
    args = on(DEVICE, finite(_sorted_rows(rand, torch.bfloat16, **options)))
    seed = rand(*args[0].shape, dtype=torch.bfloat16, device=DEVICE)
    x, offsets, *lists, activation, layout = args[:7]
    behind, kernels = int(offsets[-1]), module_of("moe", "cuda_triton")
    with poisoned_memory(), torch.no_grad():
        got = of_float8(module_of("moe_sorted", "cuda_triton"), args, seed)
        indices, gates = chosen(offsets, x.shape[0])[:, None], torch.ones(x.shape[0], 1, device=DEVICE)
        given = activation, layout, x.dtype, True, "fp8_current", *args[9:]
        y, kept, order, ends = kernels.moe(x, indices, gates, *lists, *given)
        backward = seed, x, gates, *lists, kept, order, ends, activation, layout, *given[4:]
        d_x, _, *gradients, biases = kernels.moe_backward(*backward)
    identical(got, [y, d_x, *gradients, *biases])
    assert not got[0][behind:].any() and not got[1][behind:].any()
