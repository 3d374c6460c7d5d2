"""The same sites fire in every dtype, with static and dynamic shapes, in training and inference.

A row is a model, a column a condition it runs under: in every cell of a row all of its sites fire. Where they do not,
`KNOWN` says what fires instead and why, and the test fails as soon as that is no longer so. Models are of two layers;
where layers cannot get in each other's way, what takes long runs with the first alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.corpus import layers
from tests.frames import run, train

from . import experts, experts_at_once
from .experts import MoE

LENGTHS = (2 * layers.CHUNK, 3 * layers.CHUNK)


@dataclasses.dataclass(frozen=True)
class Row:
    """make(n): the first n layers. sites: what fires in each. together: layers may get in each other's way."""

    make: Callable[[int], nn.Module]
    sites: tuple[dict[str, int], ...]
    dim: int = layers.DIM
    together: bool = False
    only_bfloat16: bool = False


@dataclasses.dataclass(frozen=True)
class Column:
    """A way to run a model. another_length: one graph serves it."""

    dtype: torch.dtype = torch.float32
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    dynamic: bool | None = None
    another_length: bool = False
    training: bool = True
    layers: int = 1


def routed(*bodies: Callable[..., Any], only_bfloat16: bool = False, **kwargs: Any) -> Row:
    def make(n: int) -> nn.Module:
        return layers.drawn(lambda: [layers.Flattened(MoE(body, **kwargs)) for body in bodies[:n]])

    return Row(make, ({"moe": 1},) * len(bodies), experts.DIM, together=True, only_bfloat16=only_bfloat16)


MLA = {"down_norm_up": 2, "mla_rope_q": 1, "mla_rope_kv": 1}
MIXER = {"ssd_scan": 1, "causal_conv1d": 1, "gated_rms_norm": 1}

ROWS = {
    "latent attention": Row(layers.latent_attention, (MLA, {**MLA, "down_norm_up": 1})),
    "latent attention with adapters": Row(layers.latent_attention_with_adapters, (MLA, MLA)),
    "attention": Row(layers.attention, ({"rope_qk": 1}, {"rope_qk": 1})),
    "mixers": Row(layers.mixers, (MIXER, MIXER)),
    "gated norms": Row(layers.gated_norms, ({"gated_rms_norm": 1},) * 2, together=True),
    "heads and losses": Row(layers.heads, ({"linear_cross_entropy": 1},) * 2),
    "experts in a loop": routed(experts.where_index_add, experts.one_hot_mask, experts=2),
    "experts, batched and dense": routed(experts.batched_gemms, experts_at_once.einsum_of_all, stacked=True),
    # torch's fake kernel of grouped GEMMs takes bfloat16 alone
    "experts of sorted rows": routed(
        experts.sorted_grouped_gemms, experts_at_once.sorted_index_add, stacked=True, only_bfloat16=True
    ),
}

COLUMNS = {
    "float32": Column(layers=2),
    "bfloat16": Column(torch.bfloat16),
    "autocast": Column(around=lambda: torch.autocast("cpu", torch.bfloat16)),
    "another length": Column(another_length=True),
    "dynamic": Column(dynamic=True),
    "inference": Column(around=torch.inference_mode, training=False),
}

# (model, condition): (the sites that do not fire there, why not)
KNOWN: dict[tuple[str, str], tuple[dict[str, int], str]] = {}

CELLS = [(m, c) for m, row in ROWS.items() for c in COLUMNS if not (row.only_bfloat16 and c in ("float32", "autocast"))]


@pytest.mark.sampled(5, unit=15)
@pytest.mark.parametrize(("model", "condition"), CELLS)
def test_sites(model, condition):
    row, column = ROWS[model], COLUMNS[condition]
    n = len(row.sites) if row.together else column.layers
    dtype = torch.bfloat16 if row.only_bfloat16 else column.dtype
    module = row.make(n).to(dtype).train(column.training)

    def hidden(length: int) -> tuple[torch.Tensor]:
        x = torch.randn(2, length, row.dim).to(dtype).requires_grad_()
        if column.another_length:
            torch._dynamo.mark_dynamic(x, 1)
        return (x,)

    frames = run(module, hidden(LENGTHS[0]), dynamic=column.dynamic, around=column.around)
    if column.another_length:
        train(frames.compiled, module, hidden(LENGTHS[1]))
        assert len(frames.graphs) == 1, "compiled again for another length"
    everything = sum((Counter(sites) for sites in row.sites[:n]), Counter())
    lost, reason = KNOWN.get((model, condition), ({}, ""))
    fired = Counter(frames.fired)
    assert not lost or fired != everything, f"nothing is lost any more: take it out of KNOWN ({reason})"
    assert fired == everything - Counter(lost), f"{dict(everything - fired)} did not fire; refused {frames.misses}"


def test_what_is_known_to_be_lost_is_in_the_table():
    assert KNOWN.keys() <= set(CELLS)
    assert all(lost and reason for lost, reason in KNOWN.values())
