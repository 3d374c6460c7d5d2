"""Masks that a model makes once, ahead of blocks that repeat: each block makes its own where more fires in it so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacpp_compile.frontend import masks_in_blocks, worth_cutting
from megacpp_compile.frontend.masks_in_blocks import with_own_masks
from megacpp_compile.frontend.repeated_blocks import cut
from tests.backends.test_stitched import agrees, blocks, why_whole
from tests.backends.test_stitched_auto import reported
from tests.frontend.test_repeated_blocks import Norm

DIM, HEADS, TOKENS, LAYERS = 32, 2, 48, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide = Norm(DIM), Norm(DIM)
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o(o.transpose(1, 2).flatten(-2))
        return x + self.down(F.silu(self.up(self.wide(x))))


class Writing(Layer):
    """Hides more in the mask of all layers, in place."""

    def forward(self, x, mask):
        return super().forward(x, mask.logical_and_(mask.roll(1, -2)))


def causal(x, words):
    at = torch.arange(x.shape[1], device=x.device)
    return (at[None, :] <= at[:, None])[None, None]


def added(x, words):
    return torch.zeros(causal(x, words).shape).masked_fill(~causal(x, words), float("-inf"))


def padded(x, words):
    """As transformers makes it of flags of words; the last word of a row is hidden from the others."""
    at = torch.arange(x.shape[1])
    return causal(x, words) & words.bool()[torch.arange(x.shape[0])[:, None, None, None], at[None, None, None, :]]


def documents(x, words):
    numbers = (words == 0).cumsum(-1)
    return causal(x, words) & (numbers[:, None, :, None] == numbers[:, None, None, :])


def learned(x, words):
    return causal(x, words) & (x.detach().sum(-1)[:, None, None, :] > -100.0)


def drawn(x, words):
    return causal(x, words) & (torch.rand(x.shape[1], x.shape[1]) > -1.0)


class Model(nn.Module):
    def __init__(self, mask, layer=Layer, layers=LAYERS):
        super().__init__()
        torch.manual_seed(3)
        self.mask, self.embed = mask, nn.Embedding(16, DIM)
        self.layers = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, ids, words):
        x = self.embed(ids)
        mask = self.mask(x, words)
        for layer in self.layers:
            x = layer(x, mask)
        return x.square().sum(-1)


def inputs(tokens=TOKENS):
    words = torch.ones(2, tokens, dtype=torch.long)
    words[:, tokens // 2] = 0
    return torch.arange(2 * tokens).remainder(13).view(2, -1), words


@pytest.mark.parametrize("mask", [causal, added])
def test_attention_fires_in_each_block(no_kernels, mask):
    report = agrees(Model(mask), *inputs(), tolerance=1e-4)
    assert blocks(report) == [("layers.0", LAYERS)]
    assert report.counts["attention"] == LAYERS


def test_a_length_that_changes(no_kernels):
    torch._dynamo.reset()
    model = Model(causal)
    first = agrees(model, *inputs(), tolerance=1e-4, dynamic=True)
    assert first.counts["attention"] == LAYERS and blocks(first) == [("layers.0", LAYERS)]
    assert not agrees(model, *inputs(TOKENS + 16), tolerance=1e-4, dynamic=True).frames


@pytest.mark.parametrize("mask", [learned, drawn, padded, documents])
def test_masks_that_are_handed_on(no_kernels, mask):
    """What is computed of activations, or drawn, is the same in all layers; of the others no more fires on a CPU."""
    report = agrees(Model(mask), *inputs(), steps=1, tolerance=1e-4)
    assert blocks(report) == [("layers.0", LAYERS)] and not report.counts["attention"]


def test_a_mask_that_a_layer_writes_to(no_kernels):
    """Each layer reads what those before it have written."""
    report = agrees(Model(causal, Writing), *inputs(), steps=1, tolerance=1e-4)
    assert "writes to what is made elsewhere" in why_whole(report)


def test_auto_takes_a_model_with_one_mask(no_kernels, monkeypatch):
    monkeypatch.setattr(worth_cutting, "SPARED", 64)
    report = reported(Model(causal, layers=8), *inputs())
    assert blocks(report) == [("layers.0", 8)] and report.counts["attention"] == 8


def frame(model, *args):
    """Dynamo's graph of `model`, and its pieces."""
    found = []

    def backend(gm, example_inputs):
        found[:] = gm, cut(gm, example_inputs), example_inputs
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(*args)
    return found


def test_what_a_block_is_handed():
    gm, pieces, example_inputs = frame(Model(padded), *inputs())
    own = with_own_masks(gm, pieces)
    assert own is not gm
    before, after = (
        [[str(n.meta["example_value"].dtype) for n in piece.inputs if n.op != "placeholder"] for piece in found if piece.name]
        for found in (pieces, cut(own, example_inputs))
    )
    assert before == [["torch.float32", "torch.bool"]] * LAYERS
    assert after == [["torch.float32"]] * LAYERS, "the hidden states alone; flags of words are inputs of the frame"
    kinds = {piece.kind for piece in cut(own, example_inputs) if piece.name}
    assert len(kinds) == 1
    for a, b in zip(own(*example_inputs), gm(*example_inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("change", ["many calls", "no block", "small"])
def test_graphs_that_stay(monkeypatch, change):
    gm, pieces, _ = frame(Model(causal if change != "small" else lambda x, words: words.bool()[:, None, None]), *inputs())
    if change == "many calls":
        monkeypatch.setattr(masks_in_blocks, "MOST", 2)
    elif change == "no block":
        pieces = [piece for piece in pieces if not piece.name]
    assert with_own_masks(gm, pieces) is gm


def test_a_mask_made_in_another_mode_stays():
    def mask(x, words):
        with torch.no_grad():
            return causal(x, words)

    gm, pieces, _ = frame(Model(mask), *inputs())
    assert with_own_masks(gm, pieces) is gm
