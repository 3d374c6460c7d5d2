"""Layers that run across packed documents which another layer keeps apart: which are named, and when nothing is said."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import megacpp_compile
from megacpp_compile.config.options import Config
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.errors import MixedDocumentsError
from megacpp_compile.passes._frame.mixed_documents import TAG, if_several, mixed, several_documents
from tests.corpus.delta.block import CHUNKED, PlainDelta
from tests.corpus.scans import PlainMamba2, einsums
from tests.frames import run_graph

from .test_packed_conv import TAPS, multiplied

DIM, TOKENS = 10, 12
CONV, DELTA, SCAN = "megacpp::causal_conv1d", "megacpp::gated_delta_rule", "megacpp::ssd_scan"
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
ONE = torch.arange(TOKENS)[None]


def from_positions(positions):
    """As transformers numbers documents."""
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)


class Attention(nn.Module):
    """Heads of 5 channels; `mask(told, tokens)` is None or what torch's op is handed."""

    def __init__(self, mask, written=False, causal=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mask, self.written, self.causal = mask, written, causal

    def forward(self, x, told, other=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        if other is not None:
            _, k, v = self.qkv(other).chunk(3, -1)
        q, k, v = (a.unflatten(-1, (2, 5)).transpose(1, 2) for a in (q, k, v))
        mask = None if self.mask is None else self.mask(told, x.shape[1])
        if self.written:
            scores = (q @ k.transpose(-1, -2) * 5**-0.5).masked_fill(~mask, float("-inf"))
            o = scores.softmax(-1) @ v
        else:
            o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal and mask is None)
        return self.out(o.transpose(1, 2).flatten(2))


class Conv(nn.Module):
    """Causal, by channel. numbers: makes documents' numbers of what tells them, for masks of the taps."""

    def __init__(self, numbers=None):
        super().__init__()
        self.into, self.out, self.numbers = nn.Linear(DIM, 6), nn.Linear(6, DIM), numbers
        self.conv = nn.Conv1d(6, 6, TAPS, padding=TAPS - 1, groups=6)

    def forward(self, x, told):
        x = self.into(x)
        if self.numbers is None:
            y = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        else:
            y = multiplied(x, self.conv.weight[:, 0], self.conv.bias, self.numbers(told))
        return self.out(y)


class Plain(nn.Module):
    """A layer that takes activations alone."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, told):
        return self.inner(x)


def delta():
    return Plain(PlainDelta(CHUNKED["whole_sequence"]))


def scan():
    return Plain(PlainMamba2(einsums))


class Cleared(PlainDelta):
    """Decays are nothing where a document begins."""

    def forward(self, x, told):
        self.begins = told == 0
        return super().forward(x)

    def gates(self, u):
        return super().gates(u).masked_fill(self.begins[..., None], -1e4)


class Hybrid(nn.Module):
    def __init__(self, **layers):
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x, *told):
        for layer in self.layers.values():
            x = x + layer(x, *told)
        return x


def causal(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def by_positions(told, tokens):
    n = from_positions(told)
    return (causal(tokens) & (n[:, :, None] == n[:, None]))[:, None]


def by_numbers(told, tokens):
    return (causal(tokens) & (told[:, :, None] == told[:, None]))[:, None]


def by_offsets(told, tokens):
    n = torch.searchsorted(told[1:], torch.arange(tokens), right=True)[None]
    return by_numbers(n, tokens)


def given(told, tokens):
    return told


def added(told, tokens):
    return torch.zeros(tokens, tokens).masked_fill(~by_positions(told, tokens), float("-inf"))


def chunked(told, tokens):
    n = (torch.arange(tokens) + told[:, :1]) // 4
    return by_numbers(n, tokens)


def joined(told, tokens):
    """Tokens of one number see each other beside what is causal, as those of an image do."""
    return ((told[:, :, None] == told[:, None]) | causal(tokens))[:, None]


def padding(told, tokens):
    return causal(tokens) & told[:, None, None].bool()


def x():
    return torch.randn(1, TOKENS, DIM, requires_grad=True)


def looked_at(module, *told):
    """({what runs across documents}, whether the row is seen to hold several)."""
    frames = run_graph(module, (x(), *told))
    (analysis,) = frames.analyses
    found = mixed(analysis.captured, frames.misses, True, Config(strict=True))
    if found is None:
        return set(), False
    inputs = (*module.state_dict().values(), x(), *told)
    return {miss.pass_name for miss in found.across}, several_documents(found.told(*inputs), found.forms)


def assert_found(module, *told, what=(CONV,)):
    assert looked_at(module, *told) == (set(what), True)


SEEN = by_positions(POSITIONS, TOKENS)
NUMBERS, OFFSETS = from_positions(POSITIONS), torch.tensor([0, 5, 12])
TOLD = {
    "positions": (by_positions, POSITIONS), "numbers": (by_numbers, NUMBERS), "offsets": (by_offsets, OFFSETS),
    "added": (added, POSITIONS), "mask": (given, SEEN), "additive mask": (given, (~SEEN).float() * -1e30),
}  # fmt: skip


@pytest.mark.parametrize("how", TOLD)
def test_however_documents_are_told(how):
    mask, told = TOLD[how]
    assert_found(Hybrid(conv=Conv(), attention=Attention(mask)), told)


def test_attention_that_is_written_out():
    assert_found(Hybrid(attention=Attention(by_positions, written=True), conv=Conv()), POSITIONS)


ACROSS = {
    DELTA: delta, SCAN: scan, CONV: Conv,
    "causal attention": lambda: Attention(None, causal=True),
    # of other layouts than the matcher reads
    "conv1d": lambda: Plain(Dilated()),
}  # fmt: skip


class Dilated(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.conv = nn.Linear(DIM, DIM), nn.Conv1d(DIM, DIM, 2, padding=2, dilation=2)

    def forward(self, x):
        return self.conv(self.into(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


@pytest.mark.parametrize("what", ACROSS)
def test_whatever_runs_across(what):
    assert_found(Hybrid(attention=Attention(by_positions), other=ACROSS[what]()), POSITIONS, what=[what])


def test_a_convolution_that_is_told_shows_who_is_not():
    """As Nemotron's kernels take documents, and a scan in plain PyTorch does not."""
    assert_found(Hybrid(conv=Conv(from_positions), scan=scan()), POSITIONS, what=[SCAN])


@pytest.mark.parametrize("mask, told", [
    (by_positions, ONE), (by_numbers, torch.zeros(1, TOKENS, dtype=torch.int64)), (given, causal(TOKENS)[None, None]),
    (by_offsets, OFFSETS[::2]), (by_numbers, torch.tensor([[1] * 9 + [0] * 3])), (by_numbers, torch.tensor([[-1] * 4 + [2] * 8])),
    (by_positions, torch.tensor([[*range(8), 0, 0, 0, 0]])), (given, (causal(TOKENS).triu(-2))[None, None]),
    (given, (causal(TOKENS) & (torch.arange(TOKENS) > 2) | (torch.arange(TOKENS) < 3)[:, None])[None, None]),
], ids=["positions", "numbers", "mask", "offsets", "zeros behind", "negative in front", "positions of padding", "window", "padding in front"])  # fmt: skip
def test_one_document_in_a_row(mask, told):
    assert looked_at(Hybrid(conv=Conv(), attention=Attention(mask)), told) == ({CONV}, False)


SILENT = {
    "documents reach all": (lambda: Hybrid(conv=Conv(from_positions), attention=Attention(by_positions)), POSITIONS),
    "decays are nothing": (lambda: Hybrid(delta=Cleared(), attention=Attention(by_positions)), POSITIONS),
    "documents reach none": (lambda: Hybrid(conv=Conv(), attention=Attention(None, causal=True)), POSITIONS),
    "padding": (lambda: Hybrid(conv=Conv(), attention=Attention(padding)), torch.tensor([[0] * 4 + [1] * 8])),
    "chunks": (lambda: Hybrid(conv=Conv(), attention=Attention(chunked)), ONE),
    "seen beside": (lambda: Hybrid(conv=Conv(), attention=Attention(joined)), NUMBERS),
    "attention alone": (lambda: Hybrid(a=Attention(by_positions), b=Attention(by_positions)), POSITIONS),
}  # fmt: skip


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_said(case):
    make, told = SILENT[case]
    assert looked_at(make(), told) == (set(), False)


def test_attention_across_two_sequences():
    class Cross(Attention):
        def forward(self, x, told):
            return super().forward(x, told, x.flip(1)[:, :7])

    module = Hybrid(a=Attention(by_positions), cross=Cross(None))
    assert looked_at(module, POSITIONS) == (set(), False)


def test_tokens_of_another_sequence():
    """A convolution over what has another length, as of sound beside text."""

    class Beside(Conv):
        def forward(self, x, told):
            return super().forward(x[:, :7], told).mean(1, keepdim=True)

    assert looked_at(Hybrid(conv=Beside(), attention=Attention(by_positions)), POSITIONS) == (set(), False)


def test_one_new_token():
    """A step of decoding reads a state, and no other token."""

    class Step(Conv):
        def forward(self, x, told):
            return super().forward(x[:, :1], told)

    assert looked_at(Hybrid(conv=Step(), attention=Attention(by_positions)), POSITIONS) == (set(), False)


# -- compiled


def hybrid():
    torch.manual_seed(0)
    return Hybrid(conv=Conv(), attention=Attention(by_positions))


@pytest.fixture
def anew():
    torch._dynamo.reset()
    warn_once.cache_clear()


@pytest.mark.end_to_end
def test_whole_model(no_kernels, anew, caplog):
    """Said when several documents come, once, with the layers' names."""
    compiled = torch.compile(hybrid(), backend="megacpp")
    with megacpp_compile.record() as report:
        compiled(x(), ONE)
        assert not report.misses and not caplog.text
        for _ in range(3):
            compiled(x(), POSITIONS)
    assert [(m.tag, m.fqn, m.pass_name, m.frame) for m in report.misses] == [(TAG, "layers.conv", CONV, 0)]
    assert "layers.attention keeps apart" in report.misses[0].reason
    (line,) = [r.message for r in caplog.records if "several documents" in r.message]
    assert "layers.conv (megacpp::causal_conv1d)" in line and "layers.attention" in line


@pytest.mark.end_to_end
@pytest.mark.parametrize("dynamic", [None, True])
def test_strict(no_kernels, anew, dynamic):
    compiled = torch.compile(hybrid(), backend="megacpp", options={"strict": True}, dynamic=dynamic)
    compiled(x(), ONE)
    with pytest.raises(MixedDocumentsError, match="layers.conv") as caught:
        compiled(x(), POSITIONS)
    assert caught.value.blocks == (("layers.conv", CONV),) and caught.value.keeper == "layers.attention"


@pytest.mark.end_to_end
def test_block_by_block(no_kernels, anew, caplog):
    """Blocks are frames of their own: one keeps documents apart by a mask that it is handed, another convolves. For one
    document there is no mask, as in transformers, and no more to say of the attention that is compiled without."""

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Conv(), Attention(given, causal=True), Conv(), Attention(given, causal=True)])

        def forward(self, x, told):
            mask = by_positions(told, x.shape[1]) if (told.diff() != 1).any() else None
            for layer in self.layers:
                x = x + layer(x, mask)
            return x

    model = megacpp_compile.compile(Blocks(), blocks="layers.*", whole_below=1)
    with megacpp_compile.record() as report:
        model(x(), ONE)
        assert not report.misses
        model(x(), POSITIONS)
        model(x(), ONE)
    assert {(m.tag, m.pass_name) for m in report.misses} == {(TAG, CONV)}
    assert {m.fqn for m in report.misses} == {"layers.0"} and "layers.0 (megacpp" in caplog.text


@pytest.mark.end_to_end
def test_frames_between_graph_breaks(no_kernels, anew, caplog):
    class Broken(Hybrid):
        def forward(self, x, *told):
            for layer in self.layers.values():
                x = x + layer(x, *told)
                torch._dynamo.graph_break()
            return x

    module = Broken(attention=Attention(by_positions), conv=Conv())
    torch.compile(module, backend="megacpp")(x(), POSITIONS)
    (line,) = [r.message for r in caplog.records if "several documents" in r.message]
    assert f"({CONV})" in line and "F.scaled_dot_product_attention" in line


class Flex(Attention):
    """FlexAttention, whose mask is a function of places."""

    def forward(self, x, told):
        q, k, v = (a.unflatten(-1, (2, 5)).transpose(1, 2) for a in self.qkv(x).chunk(3, -1))
        mask = lambda b, h, i, j: (i >= j) & (told[b, i] == told[b, j])  # noqa: E731
        blocks = create_block_mask(mask, 1, None, x.shape[1], x.shape[1], device="cpu")
        return self.out(flex_attention(q, k, v, block_mask=blocks).transpose(1, 2).flatten(2))


@torch.no_grad()
def test_flex_attention():
    report = megacpp_compile.explain(Hybrid(conv=Conv(), attention=Flex(None)), x().detach(), NUMBERS)
    assert [(miss.tag, miss.fqn) for miss in report.misses] == [(TAG, "layers.conv")]


def test_explained():
    """A frame that is not run says what it would be warned of."""
    report = megacpp_compile.explain(hybrid(), x(), POSITIONS)
    (miss,) = report.misses
    assert (miss.tag, miss.fqn) == (TAG, "layers.conv") and miss.reason.endswith("if there are several")
    assert if_several(None) == []
