"""Which names are read behind an instruction, and where the ways of a branch meet."""

from __future__ import annotations

import sys

import pytest
from torch._dynamo.bytecode_transformation import cleaned_instructions

from megacpp_compile.frontend.expert_loops.control_flow import live_names, meeting, skipped


def loop(xs, y, z):
    last = w = 0
    for x in xs:
        if y:
            continue
        w = x + z
        last = w
    return last


def live_at_head(function):
    instructions = cleaned_instructions(function.__code__)
    (head,) = [i for i in instructions if i.opname == "FOR_ITER"]
    return live_names(instructions, head)


def branches(function):
    """The instructions of `function`, and the branches among them."""
    instructions = cleaned_instructions(function.__code__)
    return instructions, [i for i in instructions if "JUMP" in i.opname and "_IF_" in i.opname]


def test_names_that_are_live():
    assert live_at_head(loop) == {"y", "z", "last"}, "not x and w, which are set before they are read"


def within(xs, scope, z):
    y = 0
    for x in xs:
        with scope:
            y = x + z
        z = y
    return z


def test_a_name_that_a_with_sets_is_not_live_before_it():
    """Where no error is swallowed it is set whenever it is read."""
    assert live_at_head(within) == {"scope", "z"}


def one_way_or_the_other(xs, y):
    for x in xs:
        if y:
            w = x
        else:
            w = y
        y = w
    return y


def at_times(xs, y):
    for x in xs:
        if y:
            if x:
                y = y + 1
            y = y + x
        y = y - 1
    return y


def test_an_else_is_no_way_to_skip():
    for loop_, joins in ((one_way_or_the_other, [None]), (at_times, ["LOAD_FAST", "LOAD_FAST"])):
        instructions, found = branches(loop_)
        ways = [skipped(instructions, i) for i in found]
        assert [way and way[0].opname[:9] for way in ways] == joins


def on_or_out(xs, y):
    for x in xs:
        if y:
            y = x
        else:
            break
    return y


def test_where_ways_meet_that_both_do_something():
    heads = {one_way_or_the_other: ["LOAD_FAST"], loop: ["FOR_ITER"], on_or_out: [None]}
    for loop_, joins in heads.items():
        instructions, found = branches(loop_)
        met = [meeting(instructions, i) for i in found]
        assert [join and join.opname[:9] for join in met] == joins


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="names of 3.11's jumps")
def test_where_ways_meet():
    instructions, (jump,) = branches(loop)
    join, by_jump = skipped(instructions, jump)
    assert join.opname == "FOR_ITER" and by_jump == ("IF_TRUE" in jump.opname)
