"""`megacpp::causal_conv1d`: registration, gradients, the formula, what it keeps, how its result lies in memory."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings.causal_conv1d import causal_conv1d

from . import addresses, saved_by
from .contract import agree, assert_is, differentiate, gradcheck, tolerances

BIAS = pytest.mark.parametrize("bias", [False, True])
ACTIVATION = pytest.mark.parametrize("activation", ["", "silu"])


def arguments(rand, *, batch=2, steps=5, channels=3, taps=4, bias=True, activation="silu", dtype=torch.float64):
    x = rand(batch, steps, channels, dtype=dtype, grad=True)
    weight = rand(channels, taps, dtype=dtype, grad=True)
    return x, weight, rand(channels, dtype=dtype, grad=True) if bias else None, activation, dtype


def formula(x, weight, bias, activation, out_dtype):
    """The op by its definition, one output step after the other."""
    taps, steps = weight.shape[1], []
    for t in range(x.shape[1]):
        total = x.new_zeros(x[:, 0].shape) if bias is None else bias.expand(x[:, 0].shape)
        for j in range(taps):
            if (at := t - (taps - 1) + j) >= 0:
                total = total + weight[:, j] * x[:, at]
        steps.append(total / (1 + torch.exp(-total)) if activation == "silu" else total)
    return torch.stack(steps, 1).to(out_dtype)


@BIAS
@ACTIVATION
def test_gradcheck(rand, bias, activation):
    gradcheck(causal_conv1d, arguments(rand, bias=bias, activation=activation))


@tolerances(1e-13, 1e-6, 6e-3)
@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@BIAS
@ACTIVATION
def test_against_the_formula(rand, dtype, tolerance, taps, bias, activation):
    args = arguments(rand, taps=taps, bias=bias, activation=activation, dtype=dtype)
    got = assert_is(causal_conv1d, formula, rand, args, tolerance, dtype=dtype)
    assert [t.dtype for t in got] == [dtype] * len(got)


def test_equals_torchs_convolution(rand):
    x, weight, bias, *_ = args = arguments(rand, steps=9, channels=6)
    conv = torch.nn.functional.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=3, groups=6)
    torch.testing.assert_close(causal_conv1d(*args), torch.nn.functional.silu(conv[..., :9]).transpose(1, 2))


def test_dtypes_of_their_own(rand):
    x, weight, bias, activation, _ = arguments(rand, dtype=torch.bfloat16)
    weight, bias = (t.detach().float().requires_grad_() for t in (weight, bias))
    args = x, weight, bias, activation, torch.float32
    opcheck(causal_conv1d, args)
    out, *grads = differentiate(causal_conv1d, args, [rand(*x.shape)])
    assert out.dtype == torch.float32
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["channels of a projection", "other channels first", "time adjacent", "every second"])
def test_layouts(rand, kind):
    """Any strides go in; the result is contiguous, with time adjacent where it is in the operand."""
    whole = {"channels of a projection": lambda: rand(2, 5, 9)[..., :3],
             "other channels first": lambda: rand(2, 5, 9)[..., 4:7],
             "time adjacent": lambda: rand(2, 3, 5).transpose(1, 2), "every second": lambda: rand(2, 5, 6)[..., ::2]}
    _, *others = arguments(rand)
    args = whole[kind]().requires_grad_(), *others
    opcheck(causal_conv1d, args)
    got = assert_is(causal_conv1d, formula, rand, args, 1e-13)
    assert (got[0].transpose(1, 2) if kind == "time adjacent" else got[0]).is_contiguous()


@BIAS
def test_keeps_its_operands_only(rand, bias):
    args = arguments(rand, bias=bias)
    assert saved_by(causal_conv1d, *args) == addresses(*(t for t in args[:3] if t is not None))


def test_sees_no_later_step(rand):
    x, weight, bias, *rest = arguments(rand)
    out = causal_conv1d(x, weight, bias, *rest)
    changed = x.detach().clone()
    changed[:, 3:] = float("nan")
    assert torch.equal(causal_conv1d(changed, weight, bias, *rest)[:, :3], out[:, :3])
    (grad,) = torch.autograd.grad(out[:, 2].sum(), x)
    assert not grad[:, 3:].any() and grad[:, :3].all()


def by_document(x, weight, bias, activation, out_dtype, seq_idx):
    """The formula on each run of one document by itself."""
    rows = []
    for row, numbers in zip(x, seq_idx.tolist(), strict=True):
        ends = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]]
        parts = row.tensor_split(ends)
        rows.append(torch.cat([formula(part[None], weight, bias, activation, out_dtype)[0] for part in parts]))
    return torch.stack(rows)


SEQ_IDX = [[0, 0, 0, 1, 1, 2, 3, 3, 3, 3], [4, 4, 4, 4, 4, 4, 7, 7, 7, 9]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
def test_documents(rand, taps, integer):
    *args, dtype = arguments(rand, steps=10, taps=taps)
    seq_idx = torch.tensor(SEQ_IDX, dtype=integer)
    opcheck(causal_conv1d, (*args, dtype, seq_idx))
    seeds = [rand(2, 10, 3)]
    got, want = (differentiate(f, (*args, dtype, seq_idx), seeds) for f in (causal_conv1d, by_document))
    agree(got, want, 1e-13)


def test_documents_are_saved_as_they_are(rand):
    x, weight, bias, activation, dtype = arguments(rand, steps=10)
    seq_idx = torch.tensor(SEQ_IDX)
    assert saved_by(causal_conv1d, x, weight, bias, activation, dtype, seq_idx) == addresses(x, weight, bias, seq_idx)
