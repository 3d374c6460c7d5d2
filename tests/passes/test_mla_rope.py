"""What the passes on MLA's queries and on its keys keep alike; the rest is in a file of each."""

from __future__ import annotations

import pytest
import torch

from tests.corpus.gallery import GALLERY
from tests.corpus.near_misses import joined, turn
from tests.frames import check, check_graph, largest_error, run, train

from .conditions import near_miss, sampled
from .contract import assert_refused
from .latents import ALONE, build, first_product_read, plain, rotated
from .not_rotations import NOT_ROTATIONS

NAMES = {"q": "mla_rope_q", "k": "mla_rope_kv"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES.values())
def test_alone_and_in_float64(name, dtype):
    block, _ = plain(norm="no_upcast", rope_spelling="rotate_half_by_slices")
    assert check_graph(block.to(dtype), block.example_inputs(dtype=dtype), ALONE[name]).fired == {name: 1}


def test_counts_every_layer():
    frames = check_graph(*GALLERY["tied_language_model"].build())
    assert [frames.counts[name] for name in NAMES.values()] == [2, 2]


@pytest.mark.parametrize("name", NAMES.values())
def test_float32_tables_promote_bfloat16_exactly(name):
    module, args = GALLERY["concat_promoted_to_float32"].build()
    want, frames = train(module, module, args), run(module, args, ALONE[name])
    assert frames.fired == {name: 1}
    assert largest_error({"": frames.results["output 0"]}, {"": want["output 0"]})[0] == 0.0
    # Gradients: plain code rounds each product's to bfloat16 before it adds them, the op rounds their sum.
    assert largest_error(frames.results, want)[0] <= 4e-2


@sampled(5, "which", NAMES)
@pytest.mark.parametrize("tag", NOT_ROTATIONS)
def test_refuses_what_is_no_rotation(tag, which):
    wrong = NOT_ROTATIONS[tag]
    others = {"q": "k", "k": "q"}  # as many lanes as are left
    rope = {which: wrong, others[which]: lambda t, *tables: turn(t, *tables)[..., : wrong(t, *tables).shape[-1]]}
    assert_refused(NAMES[which], tag, *build(rotated(**rope)))


@pytest.mark.parametrize("which", NAMES)
def test_refuses_a_product_that_escapes(which):
    assert_refused(NAMES[which], "escapes", *build(first_product_read(which)))


@sampled(3, "dynamic", [None, True], ids=["numbers", "numbers as inputs"])
@pytest.mark.parametrize("which", NAMES)
def test_parts_that_are_scaled(which, dynamic):
    """As LongCat's, each by itself."""

    def body(m, x, cos, sin):
        def rope(t, cos, sin):
            return turn(t * m.numbers[0], cos, sin)

        join = {f"{which}_join": lambda nope, pe: joined(nope * m.numbers[1], pe)}
        return rotated(**{which: rope}, **join)(m, x, cos, sin)

    module, args = build(body)
    module.numbers = [0.3, 0.5]
    assert check(module, args, dynamic=dynamic).counts[NAMES[which]] == 1


@sampled(3, ("tag", "name"), [
    ("nope-lanes", "nope_lanes_reversed"), ("rope-place", "slices_overlap"),
    ("rotated-middle", "half_of_the_rope_slice"), ("signs", "rotated_halves_change_places"),
])  # fmt: skip
def test_refuses_queries_of_near_misses(tag, name):
    assert_refused("mla_rope_q", tag, *near_miss(name))


@sampled(3, "name", ["rope_key_of_every_head", "rope_key_unrotated", "absorbed_scores"])
def test_leaves_keys_alone_that_are_not_shared_or_not_rotated(name):
    frames = check_graph(*near_miss(name))
    assert not frames.counts["mla_rope_kv"]
    # Said of the keys; whether the queries meet other MLA keys is theirs to say.
    assert name != "rope_key_of_every_head" or "own-rope-keys" in frames.tags("mla_rope_q")
