"""Masks in buffers, of which the attention op is told as distances; and what stays data."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megacpp_compile
from megacpp_compile.frontend.triangular_buffers import Band, band_of
from tests.seeds import Draws

pytestmark = pytest.mark.usefixtures("fresh", "no_kernels")
N, INF = 32, float("inf")


class Attention(nn.Module):
    """Attention of two heads whose scores `masked(scores, buffer)` masks."""

    def __init__(self, masked, buffer, draws, persistent=True):
        super().__init__()
        self.masked = masked
        self.qkv = nn.Linear(16, 48, bias=False)
        with torch.no_grad():
            self.qkv.weight.copy_(draws(48, 16) / 4)
        self.register_buffer("mask", buffer, persistent)

    def forward(self, x):
        q, k, v = (p.unflatten(-1, (2, 8)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        scores = self.masked(q @ k.transpose(-2, -1) / math.sqrt(8), self.mask)
        return (F.softmax(scores, -1) @ v).transpose(1, 2).flatten(-2)


def ones(*shape):
    return torch.ones(N, N, dtype=torch.bool).tril().view(*shape, N, N)


def cut(mask, scores):
    return mask[..., : scores.size(-2), : scores.size(-1)]


def equal_to_zero(s, mask):
    return s.masked_fill(cut(mask, s) == 0, -INF)


def where(s, mask):
    return torch.where(cut(mask, s), s, torch.finfo(s.dtype).min)


def added(s, mask):
    return s + cut(mask, s)


SPELLINGS = {
    "nanogpt": lambda: (equal_to_zero, ones(1, 1).float()),
    "gpt1": lambda: (lambda s, m: s * cut(m, s) + -1e9 * (1 - cut(m, s)), ones(1, 1).float()),
    "gpt2": lambda: (where, ones(1, 1)),
    "above": lambda: (lambda s, mask: s.masked_fill_(cut(mask, s).bool(), -INF), torch.ones(N, N).triu(1)),
    "not_below": lambda: (lambda s, mask: s.masked_fill(cut(mask, s), -1e9), ~ones()),
    "added": lambda: (added, torch.full((N, N), -INF).triu(1)),
    "window": lambda: (where, ones(1, 1) ^ ones(1, 1).tril(-5)),
    "integers": lambda: (equal_to_zero, ones().to(torch.uint8)),
    "of_bfloat16": lambda: (lambda s, mask: s + cut(mask, s).float(), torch.full((N, N), -1e30).triu(1).bfloat16()),
}


def step(module, x, g):
    out = module(x)
    return out, torch.autograd.grad(out, [x, *module.parameters()], g)


def compiled(module, x, g, **settings):
    """(the report of a step, which is held against eager's, the compiled module)"""
    made = torch.compile(copy.copy(module), backend="megacpp", **settings)
    with megacpp_compile.record() as report:
        torch.testing.assert_close(step(made, x, g), step(module, x, g))
    return report, made


def reads_a_mask(report):
    """Whether the op is given a mask or a bias."""
    (site,) = report.sites
    (op,) = (n for n in site.graph["after"]["nodes"] if n["op"] == "megacpp.attention.default")
    assert len(op["inputs"]) in (3, 4)
    return len(op["inputs"]) == 4


@pytest.fixture
def inputs(request):
    draws = Draws(request.node.name)
    return draws, draws(2, 24, 16, grad=True), draws(2, 24, 16)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_the_op_is_told_of_a_band(name, dynamic, inputs):
    draws, x, g = inputs
    report, _ = compiled(Attention(*SPELLINGS[name](), draws), x, g, dynamic=dynamic)
    assert not reads_a_mask(report)


def irregular():
    mask = ones().float()
    mask[20, 3] = 0
    return mask


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_explain_sees_the_numbers(device, inputs):
    draws, x, _ = inputs
    module = Attention(equal_to_zero, ones().float(), draws).to(device)
    assert reads_a_mask(megacpp_compile.explain(module, x.to(device))) == (device == "meta")


@pytest.mark.parametrize("mask", {
    "irregular": irregular(), "three_numbers": ones().float() + ones().float().tril(-5),
    "two_bands": ones() & ~ones().tril(-3) | ones().tril(-9), "nan": torch.full((N, N), math.nan).triu(1),
    "of_heads": torch.stack([ones(), ones().tril(-1) | torch.eye(N, dtype=torch.bool)]), "all_seen": torch.ones(N, N),
}.items(), ids=lambda item: item[0])  # fmt: skip
def test_other_numbers_are_data(mask, inputs):
    draws, x, g = inputs
    shown = equal_to_zero if mask[0] != "nan" else (lambda s, m: s + cut(m, s).nan_to_num())
    report, made = compiled(Attention(shown, mask[1], draws), x, g)
    assert band_of(made.mask) is None and reads_a_mask(report)


def test_what_a_band_is():
    assert band_of(torch.ones(3, 5).tril(1)) == Band(3, 5, -1, INF, 1.0, 0.0, torch.float32)
    assert band_of(torch.ones(1, 4, 4).triu(1).mul(-INF).nan_to_num(0.0, None, -INF)) == Band(
        4, 4, 0, INF, 0.0, -INF, torch.float32
    )
    assert band_of(ones() & ~ones().tril(-4)) == Band(N, N, 0, 3, True, False, torch.bool)
    refused = (torch.ones(4), torch.ones(2, 2, 2), torch.eye(1), torch.ones(4, 4).tril().requires_grad_(), 3,
               torch.ones(4, 4).tril().to_sparse(), torch.ones(4, 4, dtype=torch.complex64).tril())  # fmt: skip
    assert [band_of(one) for one in refused] == [None] * len(refused)
    with torch.inference_mode():
        assert band_of(torch.ones(4, 4).tril()) is None


def test_rows_are_compared_in_parts(monkeypatch):
    monkeypatch.setattr("megacpp_compile.frontend.triangular_buffers.AT_ONCE", 5 * N)
    late = ones()
    late[N - 2, 3] = False
    assert band_of(ones()) is not None and band_of(late) is None


def test_a_buffer_that_is_written_to(inputs):
    draws, x, g = inputs
    report, made = compiled(Attention(added, torch.full((N, N), -INF).triu(1), draws), x, g)
    assert not reads_a_mask(report)
    with megacpp_compile.record() as later:
        made.mask.fill_(-INF).triu_(1)  # the same numbers
        torch.testing.assert_close(step(made, x, g), step(made._orig_mod, x, g))
    assert not later.frames
    made.mask.zero_()
    with megacpp_compile.record() as later:
        torch.testing.assert_close(step(made, x, g), step(made._orig_mod, x, g))
    assert reads_a_mask(later) and "mask" in later.frames[0].recompiled


def test_numbers_loaded_between_epochs_compile_nothing(inputs):
    draws, x, g = inputs
    report, made = compiled(Attention(equal_to_zero, ones().float(), draws), x, g)
    with megacpp_compile.record() as later, torch.no_grad():
        for _ in range(4):
            made.load_state_dict(made.state_dict())
            for _ in range(100):
                made(x.detach())
    assert not reads_a_mask(report) and len(later.frames) == 1  # what records no gradients is a frame of its own


def test_what_is_written_in_each_step_is_data(inputs):
    draws, x, g = inputs
    _, made = compiled(Attention(equal_to_zero, ones().float(), draws), x, g)
    with megacpp_compile.record() as later:
        for _ in range(4):
            made.mask.copy_(ones())
            made(x)
    assert len(later.frames) == 1 and reads_a_mask(later)


@torch._dynamo.config.patch(optimize_ddp=False)
def test_under_ddp_buffers_are_data(inputs, monkeypatch):
    class Model:
        broadcast_buffers = True

    draws, x, g = inputs
    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", Model)
    assert reads_a_mask(compiled(Attention(equal_to_zero, ones().float(), draws), x, g)[0])
    torch._dynamo.reset()
    Model.broadcast_buffers = False
    assert not reads_a_mask(compiled(Attention(equal_to_zero, ones().float(), draws), x, g)[0])


def test_an_argument_is_data(inputs):
    _, x, _ = inputs
    made = torch.compile(
        lambda x, mask: equal_to_zero(x @ x.transpose(-2, -1), mask).softmax(-1) @ x, backend="megacpp"
    )
    with megacpp_compile.record() as report:
        made(x, ones().float())
    assert reads_a_mask(report)


def test_a_buffer_that_the_frame_writes_to(inputs):
    class Counting(Attention):
        def forward(self, x):
            out = super().forward(x)
            self.mask.mul_(2)
            return out

    draws, x, _ = inputs
    module = Counting(equal_to_zero, ones().float(), draws)
    made, twin = torch.compile(copy.deepcopy(module), backend="megacpp"), copy.deepcopy(module)
    for _ in range(2):
        torch.testing.assert_close(made(x), twin(x))
        torch.testing.assert_close(made.mask, twin.mask)


def test_a_buffer_that_is_returned_is_itself(inputs):
    class Showing(Attention):
        def forward(self, x):
            return super().forward(x), self.mask[:3]

    draws, x, _ = inputs
    made = torch.compile(Showing(equal_to_zero, ones().float(), draws), backend="megacpp")
    made(x)[1].zero_()
    assert not made.mask[:3].any()


@pytest.mark.parametrize("repeated", [False, True], ids=["whole", "repeated_blocks"])
def test_each_layer_has_a_buffer(repeated, inputs):
    draws, x, g = inputs
    layers = nn.Sequential(*(Attention(equal_to_zero, ones().float(), draws) for _ in range(3)))
    report, _ = compiled(layers, x, g, options={"repeated_blocks": repeated})
    masks = [op["inputs"] for s in report.sites for op in s.graph["after"]["nodes"] if "attention" in op["op"]]
    assert len(masks) == 3 and {len(m) for m in masks} == {3}


def test_one_buffer_of_all_layers(inputs):
    class Model(nn.Module):
        def __init__(self, draws):
            super().__init__()
            self.layers = nn.ModuleList(Attention(equal_to_zero, ones().float(), draws) for _ in range(2))
            for layer in self.layers:
                layer.mask = self.layers[0].mask

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    draws, x, g = inputs
    report, _ = compiled(Model(draws), x, g)
    assert [len(op["inputs"]) for s in report.sites for op in s.graph["after"]["nodes"] if "attention" in op["op"]] == [
        3,
        3,
    ]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda(inputs):
    draws, x, g = (one.detach().cuda() if isinstance(one, torch.Tensor) else one for one in inputs)
    module = Attention(equal_to_zero, ones().float(), draws).cuda()
    report, made = compiled(module, x.requires_grad_(), g)
    assert not reads_a_mask(report)
    made.mask.fill_(1)
    torch.testing.assert_close(step(made, x, g), step(module, x, g))
