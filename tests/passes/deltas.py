"""Blocks around delta rules, linear attentions and scans, with their arguments, for the tests of the passes that find
them in chunks and in loops over tokens."""

from __future__ import annotations

import torch
from torch import nn

from tests.corpus.delta.block import PlainDelta, Spelling
from tests.corpus.delta.parts import no_norm, repeated, zeros_for
from tests.corpus.scans import PlainMamba2
from tests.frames import Frames, check


def delta(spelling, length=3, dtype=torch.float32, batch=2, **kwargs):
    """A block of a spelling, or of a form without a norm. dtype: of the block and of its arguments."""
    spelling = spelling if isinstance(spelling, Spelling) else Spelling(spelling, norm=no_norm)
    module = PlainDelta(spelling, **kwargs).to(dtype)
    return module, module.example_inputs(length, batch, dtype)


def linear(spelling, length=3, dtype=torch.float32, gate="head", **kwargs):
    """Like `delta`, of a form that corrects nothing."""
    spelling = spelling if isinstance(spelling, Spelling) else Spelling(spelling, gate, no_norm, False)
    return delta(spelling, length, dtype, **kwargs)


def scan(form, length=3, dtype=torch.float32, batch=2, **kwargs):
    module = PlainMamba2(form, **kwargs).to(dtype)
    return module, module.example_inputs(length, batch, dtype)


def by_token(step, decays=torch.exp):
    """A loop around `step(state, q, k, v, decay, beta)`, which takes one token of each and gives an output and a state;
    without gates `decay` is None."""

    def form(q, k, v, g, beta, state, size, scale, norm):
        q, k = repeated(norm(q), v.shape[2]) * scale, repeated(norm(k), v.shape[2])
        state, out = zeros_for(k.transpose(1, 2), v.transpose(1, 2)) if state is None else state, []
        for i in range(v.shape[1]):
            decay, weight = None if g is None else decays(g[:, i]), None if beta is None else beta[:, i]
            o, state = step(state, q[:, i], k[:, i], v[:, i], decay, weight)
            out.append(o)
        return torch.stack(out, 1), state

    return form


class OfItsInputs(nn.Module):
    """A spelling by itself: queries, keys, values, gates and weights are the frame's own inputs."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling = spelling

    def forward(self, q, k, v, g=None, beta=None):
        return self.spelling.form(q, k, v, g, beta, None, 4, 0.5, self.spelling.norm)[0]

    def example_inputs(self, length, batch=2):
        q, k = torch.randn(2, batch, length, 2, 3).unbind()
        v, gates = torch.randn(batch, length, 4, 5), -torch.rand(batch, length, 4)
        weights = (torch.rand(batch, length, 4),) if self.spelling.delta else ()
        return tuple(x.requires_grad_() for x in (q, k, v, gates, *weights))


def fires_dynamic(name: str, module, args) -> Frames:
    """With every size and number an input: the number of tokens is a number, as a loop over them is unrolled."""
    frames = check(module, args, dynamic=True)
    assert frames.counts[name] == 1, frames.misses
    return frames
