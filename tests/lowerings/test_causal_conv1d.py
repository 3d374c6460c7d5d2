"""`megacpp::causal_conv1d`: registration, gradients, the formula, what it keeps, how its result lies in memory."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings.causal_conv1d import causal_conv1d, causal_conv1d_backward

from . import addresses, relative_error, saved_by

ACTIVATIONS = ("", "silu")


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


def differentiate(function, args, seed):
    out = function(*args)
    leaves = [t for t in args[:3] if t is not None]
    return [out, *torch.autograd.grad((out * seed.to(out)).sum(), leaves)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_opcheck(rand, bias, activation):
    opcheck(causal_conv1d, arguments(rand, bias=bias, activation=activation))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 3), (0, 4, 2), (1, 2, 5)], ids=str)
def test_opcheck_shapes(rand, shape):
    batch, steps, channels = shape
    opcheck(causal_conv1d, arguments(rand, batch=batch, steps=steps, channels=channels, taps=3))


def test_opcheck_backward(rand):
    x, weight, bias, *_ = (t.detach() if isinstance(t, torch.Tensor) else t for t in arguments(rand))
    for b, activation in ((bias, "silu"), (None, "")):
        opcheck(causal_conv1d_backward, (rand(*x.shape), x, weight, b, activation))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(rand, bias, activation):
    x, weight, b, *rest = arguments(rand, bias=bias, activation=activation)
    leaves = (x, weight, b) if bias else (x, weight)
    assert torch.autograd.gradcheck(lambda x, w, b=None: causal_conv1d(x, w, b, *rest), leaves)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 6e-3)], ids=str
)
@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_against_the_formula(rand, dtype, tolerance, taps, bias, activation):
    """Rounding alone: the formula sees the same rounded inputs, in float64."""
    args = arguments(rand, taps=taps, bias=bias, activation=activation, dtype=dtype)
    wide = [t.detach().double().requires_grad_() if isinstance(t, torch.Tensor) else t for t in args[:-1]]
    seed = rand(*args[0].shape, dtype=dtype)
    got = differentiate(causal_conv1d, args, seed)
    want = differentiate(formula, (*wide, torch.float64), seed)
    assert [t.dtype for t in got] == [dtype] * len(got)
    assert all(relative_error(g, w) < tolerance for g, w in zip(got, want, strict=True))


def test_equals_torchs_convolution(rand):
    """The idiom as models write it."""
    x, weight, bias, *_ = args = arguments(rand, steps=9, channels=6)
    conv = torch.nn.functional.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=3, groups=6)
    torch.testing.assert_close(causal_conv1d(*args), torch.nn.functional.silu(conv[..., :9]).transpose(1, 2))


def test_dtypes_of_their_own(rand):
    x, weight, bias, activation, _ = arguments(rand, dtype=torch.bfloat16)
    weight, bias = (t.detach().float().requires_grad_() for t in (weight, bias))
    args = x, weight, bias, activation, torch.float32
    opcheck(causal_conv1d, args)
    out, *grads = differentiate(causal_conv1d, args, rand(*x.shape))
    assert out.dtype == torch.float32
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("kind", ["channels of a projection", "other channels first", "time adjacent", "every second"])
def test_layouts(rand, kind):
    """Any strides go in; the result is contiguous, with time adjacent where it is in the operand."""
    whole = {"channels of a projection": lambda: rand(2, 5, 9)[..., :3], "other channels first": lambda: rand(2, 5, 9)[..., 4:7],
             "time adjacent": lambda: rand(2, 3, 5).transpose(1, 2), "every second": lambda: rand(2, 5, 6)[..., ::2]}  # fmt: skip
    _, *others = arguments(rand)
    args = whole[kind]().requires_grad_(), *others
    opcheck(causal_conv1d, args)
    seed = rand(2, 5, 3)
    got, want = (differentiate(f, args, seed) for f in (causal_conv1d, formula))
    assert all(relative_error(g, w) < 1e-13 for g, w in zip(got, want, strict=True))
    assert (got[0].transpose(1, 2) if kind == "time adjacent" else got[0]).is_contiguous()


@pytest.mark.parametrize("bias", [False, True])
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


def test_autocast_does_not_reach_inside(rand):
    args = arguments(rand, dtype=torch.float32)
    want = causal_conv1d(*args)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(causal_conv1d(*args), want)


# --- documents


def by_document(x, weight, bias, activation, out_dtype, seq_idx):
    """The formula on each run of one document by itself."""
    rows = []
    for row, numbers in zip(x, seq_idx.tolist(), strict=True):
        ends = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]]
        parts = row.tensor_split(ends)
        rows.append(torch.cat([formula(part[None], weight, bias, activation, out_dtype)[0] for part in parts]))
    return torch.stack(rows)


SEQ_IDX = [[0, 0, 0, 1, 1, 2, 3, 3, 3, 3], [4, 4, 4, 4, 4, 4, 7, 7, 7, 9]]


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
def test_documents(rand, taps, integer):
    """Each document as if it were alone; forward, gradients, registration."""
    *args, dtype = arguments(rand, steps=10, taps=taps)
    seq_idx = torch.tensor(SEQ_IDX, dtype=integer)
    opcheck(causal_conv1d, (*args, dtype, seq_idx))
    seed = rand(2, 10, 3)
    got = differentiate(causal_conv1d, (*args, dtype, seq_idx), seed)
    want = differentiate(by_document, (*args, dtype, seq_idx), seed)
    assert all(relative_error(g, w) < 1e-13 for g, w in zip(got, want, strict=True))


def test_documents_are_saved_as_they_are(rand):
    x, weight, bias, activation, dtype = arguments(rand, steps=10)
    seq_idx = torch.tensor(SEQ_IDX)
    assert saved_by(causal_conv1d, x, weight, bias, activation, dtype, seq_idx) == addresses(x, weight, bias, seq_idx)
