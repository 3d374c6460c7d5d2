"""Wrappers at the border of a compiled frame, of a call and of a model: split, multiplied as they lie, and reported."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megacpp_compile
from megacpp_compile import record
from megacpp_compile.errors import DequantisationError, ForwardOnlyError, TorchInternalsError, WrapperError
from megacpp_compile.frontend import tensor_subclasses
from megacpp_compile.nn import fp8_wrappers
from megacpp_compile.precision.sentinel import Sentinel
from tests.precision.wrapped import Wrapper, te_blocks, te_tensor


class Traced(Wrapper):
    """One that Dynamo can trace: its parts are named."""

    def __tensor_flatten__(self):
        return ["bits", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, _, size, stride):
        return Traced(size, **inner)


@pytest.fixture(autouse=True)
def _registered():
    fp8_wrappers.register(Traced, lambda t: (t.bits, t.scale))
    torch._dynamo.reset()
    yield
    fp8_wrappers.unregister(Traced)
    torch._dynamo.reset()


def traced(*shape, dtype=torch.float8_e4m3fn, rows=False):
    scale = torch.rand(shape[0], 1) / 10 + 0.01 if rows else torch.tensor(0.05)
    return Traced(shape, bits=(torch.randn(*shape) * 20).to(dtype), scale=scale)


class MLP(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.up.weight, self.down.weight = (nn.Parameter(w, requires_grad=False) for w in (up, down))

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def expected(model, x):
    hidden = torch.relu(tensor_subclasses.linear(x, model.up.weight, model.up.bias))
    return tensor_subclasses.linear(hidden, model.down.weight)


def test_weights_of_a_frame_are_split(no_kernels):
    """Forward and backward equal to the op on the parts, whatever the weights are next time."""
    model = MLP(traced(32, 16), traced(16, 32, rows=True))
    compiled = torch.compile(model, backend=megacpp_compile.backend, fullgraph=True)
    with record() as report:
        for _ in range(2):
            x = torch.randn(4, 16, requires_grad=True)
            got, want = compiled(x), expected(model, x)
            assert got.dtype == torch.float32 and torch.allclose(got, want, rtol=1e-5, atol=1e-5)
            leaves = (x, model.up.bias)
            for a, b in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (got, want)), strict=True):
                assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)
            model.up.weight.bits.copy_((torch.randn(32, 16) * 20).to(torch.float8_e4m3fn))
    notes = [m for m in report.misses if m.pass_name == "fp8_wrappers"]
    assert [(m.tag, m.fqn) for m in notes] == [("split", "up.weight"), ("split", "down.weight")]
    assert "float8_e4m3fn, 512 bytes, scale of tensor, says bfloat16" in notes[0].reason
    assert [(s.pass_name, s.op, s.fqn) for s in report.sites] == [
        ("(called)", "megacpp::linear_fp8_weight", name) for name in ("up", "down")
    ]
    assert not [m for m in report.misses if m.pass_name == "sentinel"]
    assert len(report.frames) == 1 and report.frames[0].captured


@pytest.mark.parametrize("other", ["reader", "e5m2"])
def test_a_wrapper_read_by_others_is_left_to_its_class(no_kernels, other):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(
                traced(16, 16, dtype=torch.float8_e5m2 if other == "e5m2" else torch.float8_e4m3fn), requires_grad=False
            )

        def forward(self, x):
            y = torch.nn.functional.linear(x.bfloat16(), self.w)
            return (y + self.w.sum() if other == "reader" else y).relu().sigmoid()

    model, x = Model(), torch.randn(4, 16)
    with record() as report:
        got = torch.compile(model, backend=megacpp_compile.backend)(x)
    assert torch.allclose(got, model(x), atol=1e-2)
    (note,) = (m for m in report.misses if m.pass_name == "fp8_wrappers")
    assert note.tag == "left-wrapped" and ("e4m3" if other == "e5m2" else "sum") in note.reason


@pytest.mark.parametrize("symbol", ["detect_fake_mode", "AttrSource"])
def test_a_torch_that_cannot_split_them_leaves_them_wrapped(no_kernels, monkeypatch, symbol):
    def lacks(*_):
        raise TorchInternalsError(f"torch.{symbol}", torch.__version__, "a test", "nothing is split")

    monkeypatch.setattr(tensor_subclasses, symbol, lacks)
    model, x = MLP(traced(32, 16), traced(16, 32)), torch.randn(4, 16, dtype=torch.bfloat16)
    model.up.bias = nn.Parameter(model.up.bias.bfloat16())  # what the class says it is in eager
    with record() as report:
        got = torch.compile(model, backend=megacpp_compile.backend)(x)
    torch.testing.assert_close(got, model(x), rtol=2e-2, atol=2e-2)
    (note,) = (m for m in report.misses if m.pass_name == "fp8_wrappers")
    assert note.tag == "left-wrapped" and f"torch.{symbol}" in note.reason
    assert not report.frames[0].captured
    torch._dynamo.reset()
    with pytest.raises(TorchInternalsError, match=f"torch.{symbol}"):
        torch.compile(model, backend=megacpp_compile.backend, options={"strict": True})(x)


def test_a_weight_of_bfloat16_stays_one(no_kernels):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()).bfloat16()
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    with record() as report:
        got = torch.compile(model, backend=megacpp_compile.backend)(x)
    assert torch.allclose(got, model(x), atol=1e-2) and not report.sites and not report.misses
    assert torch.equal(tensor_subclasses.linear(x, model[0].weight, model[0].bias), model[0](x))


def widening(x, w):
    return (x @ (w.to(x.dtype) * 0.5).t()).relu().sin()


def test_a_frame_that_widens_is_reported(no_kernels):
    x, w = torch.randn(4, 16), torch.randn(16, 16).to(torch.float8_e4m3fn)
    with record() as report:
        torch.compile(widening, backend=megacpp_compile.backend)(x, w)
    (miss,) = (m for m in report.misses if m.pass_name == "sentinel")
    assert miss.tag == "widened" and "1024 bytes of float32 out of float8_e4m3fn" in miss.reason
    assert "test_tensor_subclasses.py" in miss.source and "in widening" in miss.source
    with pytest.raises(Exception, match="widened in silence") as caught:
        torch.compile(widening, backend=megacpp_compile.backend, options={"strict": True})(x, w)
    assert isinstance(caught.value, DequantisationError) or "DequantisationError" in str(caught.value)


def test_linears_of_a_model_are_split():
    """As for Transformer Engine's weights, which no frame takes."""
    up, down = te_tensor(torch.randn(32, 16)), te_blocks(torch.randn(16, 32), True)[0]
    model = MLP(up, down)
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    want = expected(model, x)
    table = tensor_subclasses.split_linears(model)
    assert table.keys() == {"up", "down"} and all(text.startswith("split: transformer_engine") for text in table.values())
    assert model.up.weight.data_ptr() == up._data.data_ptr(), "memory is shared"
    with Sentinel(model, strict=True), torch.no_grad():
        got = model(x)
    assert torch.equal(got, want) and got.dtype == torch.bfloat16
    assert tensor_subclasses.split_linears(model) == {}


def test_a_weight_without_memory_is_named():
    weight = te_tensor(torch.randn(32, 16))
    weight._data = None
    with pytest.raises(WrapperError, match=r"up\.weight \(transformer_engine Float8Tensor\) has no payload"):
        tensor_subclasses.split_linears(MLP(weight, te_tensor(torch.randn(16, 32))))


def test_sparse_mla_takes_rows_in_a_wrapper():
    q, rows = torch.randn(1, 3, 2, 24), te_tensor(torch.randn(1, 9, 1, 24))
    indices = torch.tensor([0, 3, -1]).expand(1, 3, 1, 3)
    held = fp8_wrappers.split(rows)
    wide = held.payload.float() * held.scale
    got, lse = megacpp_compile.sparse_mla(q, rows, indices, d_v=16, offset=5)
    want, want_lse = megacpp_compile.sparse_mla(q, wide, indices, d_v=16, offset=5)
    assert torch.allclose(got, want, atol=1e-5) and torch.allclose(lse, want_lse, atol=1e-5)
    assert got.shape == (1, 3, 2, 16) and lse.shape == (1, 3, 2)
    with pytest.raises(ForwardOnlyError):
        megacpp_compile.sparse_mla(q.requires_grad_(), rows, indices, d_v=16)[0].sum().backward()


def test_the_old_name_of_the_module_works_for_one_release():
    with pytest.warns(FutureWarning, match="frontend.tensor_subclasses"):
        assert megacpp_compile.fp8_boundary is tensor_subclasses
