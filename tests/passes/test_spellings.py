"""Recall over spellings: every way to write RoPE, RMSNorm, concat and the rest, in combination, has to be found.

Each combination is a compilation of half a second or more. What runs by itself are pairs: no pass looks at more than
two of the choices at once, a norm being one pass's and a rotation and its concat another's. TEST_EVERY_SPELLING=1 runs
three times as many: more norms, either kind of concat with every pair of a RoPE and a norm, and larger samples.
"""

from __future__ import annotations

import os
import random
import zlib

import pytest

from tests.corpus import allowed_counts
from tests.corpus.gallery import GALLERY
from tests.corpus.spellings import ATTENTIONS, CONCATS, NORMS, ROPES, SPLITS, PlainGQA, PlainMLA
from tests.frames import check, check_graph

from .conditions import sampled

LAYOUTS = ("bhsd", "bshd")
CATS = [name for name in CONCATS if "cat_query" in name or "assign" not in name]
ASSIGNMENTS = [name for name in CONCATS if "assign" in name]
EVERY = os.environ.get("TEST_EVERY_SPELLING") == "1"
NORMS_PER_ROPE = 5 if EVERY else 2
SAMPLES_PER_ROPE = 2 if EVERY else 1

# The rest of what an author chooses.
OTHERS = {
    "layout": LAYOUTS,
    "split": tuple(SPLITS),
    "down": ("merged", "merged_rope_first", "separate"),
    "up": ("one_linear", "two_linears", "split_over_heads"),
    "attention": tuple(ATTENTIONS),
    "norm_to_up": ("direct", "four_dim", "flattened"),
    "table_source": ("input", "buffer", "computed"),
    "q_lora": (20, None),
    "heads": (1, 2, 3, 4),
}
GQA_OTHERS = {
    "layout": LAYOUTS,
    "projections": ("separate", "fused"),
    "qk_norm": (None, *NORMS),
    "attention": tuple(ATTENTIONS),
    "table_source": ("input", "buffer", "computed"),
    "kv_heads": (1, 2, 3, 6),
}


def _grid():
    """Every RoPE with two norms or more, which by turns meet a concat and slice assignments; all norms and concats take
    turns."""
    norms = list(NORMS)
    for i, rope in enumerate(ROPES):
        for j in range(NORMS_PER_ROPE):
            norm = norms[(i * NORMS_PER_ROPE + j) % len(norms)]
            turn, whose = divmod(i * NORMS_PER_ROPE + j, 2)
            for kind, concats in enumerate((CATS, ASSIGNMENTS)):
                if EVERY or kind == whose:
                    concat = concats[(i + j if EVERY else turn) % len(concats)]
                    yield {"rope_spelling": rope, "norm": norm, "concat": concat}


def _sample():
    """Every RoPE, the other choices at random."""
    choose = random.Random(0).choice
    for rope in ROPES:
        for _ in range(SAMPLES_PER_ROPE):
            own = {"norm": list(NORMS), "concat": list(CONCATS)}
            yield {"rope_spelling": rope, **{name: choose(values) for name, values in {**own, **OTHERS}.items()}}


def _gqa():
    """Every RoPE, the layouts taking turns, the other choices at random."""
    for i, rope in enumerate(ROPES):
        choose = random.Random(zlib.crc32(rope.encode())).choice
        others = {name: choose(values) for name, values in GQA_OTHERS.items()}
        yield {"rope_spelling": rope, **others, "layout": LAYOUTS[i % len(LAYOUTS)]}


def _show(options) -> str:
    return "-".join(str(value) for value in options.values())


def _assert_found(frames, expected):
    counts = frames.counts
    wrong = {name: (counts[name], e) for name, e in expected.items() if counts[name] not in allowed_counts(e)}
    assert not wrong, f"(fired, expected): {wrong}; refused {frames.misses}"


@sampled(9, "options", [*_grid(), *_sample()], ids=_show)
def test_latent_attention(options):
    block = PlainMLA(**options)
    _assert_found(check_graph(block, block.example_inputs()), block.expected(**options))


@sampled(9, "options", list(_gqa()), ids=_show)
def test_grouped_query_attention(options):
    block = PlainGQA(**options)
    _assert_found(check_graph(block, block.example_inputs()), block.expected(**options))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's rms_norm under autocast
@sampled(3, "name", GALLERY)
def test_gallery(name):
    """Blocks in the manner of well-known code bases: what has to fire does, and nothing else about them changes. One that
    turns autocast on computes in bfloat16 although its parameters do not show it."""
    frames = check(*GALLERY[name].build(), tolerance=4e-2 if "autocast" in name else None)
    _assert_found(frames, GALLERY[name].expected)
    assert not frames.again()


def test_the_grid_holds_every_spelling():
    grid = list(_grid())
    for option, names in (("rope_spelling", ROPES), ("norm", NORMS), ("concat", CONCATS)):
        assert {options[option] for options in grid} == set(names)
    for rope in ROPES:
        own = [options for options in grid if options["rope_spelling"] == rope]
        assert len({options["norm"] for options in own}) == NORMS_PER_ROPE
        for kind in (CATS, ASSIGNMENTS):
            assert len({options["concat"] for options in own} & set(kind)) >= NORMS_PER_ROPE // 2, (rope, kind)
    for name, values in OTHERS.items():
        assert {options[name] for options in _sample()} == set(values), name
