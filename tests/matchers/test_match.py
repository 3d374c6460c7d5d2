"""How a match is refused."""

from __future__ import annotations

import pytest
from torch import fx

from megacpp_compile.matchers._match import MatchFailure, Refused, or_failure, refuse, refuse_if

NODE = fx.Graph().placeholder("x")


def checked(number: int) -> int:
    refuse_if(number < 0, NODE, "sign", f"{number} is negative")
    if number > 9:
        refuse(NODE, "digits", f"{number} has several digits")
    return number


@pytest.mark.parametrize("number, found", [
    (3, 3), (-1, MatchFailure(NODE, "sign", "-1 is negative")),
    (10, MatchFailure(NODE, "digits", "10 has several digits")),
])  # fmt: skip
def test_who_asks_for_a_match_gets_the_failure(number, found):
    assert or_failure(checked)(number) == found


def test_without_that_it_ends_what_the_match_is_part_of():
    with pytest.raises(Refused, match="-1 is negative") as raised:
        checked(-1)
    assert raised.value.failure.tag == "sign"


def test_other_errors_are_no_refusals():
    with pytest.raises(TypeError):
        or_failure(checked)(None)
