"""`megacpp::stream_update`: registration, gradients, the formula, what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings.stream_update import stream_update

from .contract import as_leaves, assert_is, assert_keeps, gradcheck, tolerances
from .stream_cases import UPDATES, update

FORM = pytest.mark.parametrize("form", [name for name in UPDATES if name not in ("wide", "no_tokens")])


def arguments(rand, form, dtype=torch.float64):
    return (*as_leaves(update(rand, dtype, **{**UPDATES[form], "outer": (2, 3), "d": 5})), dtype)


def formula(streams, block, post, mix, out_dtype):
    n = streams.shape[-2]
    new = [
        sum(mix[..., i, j, None] * streams[..., j, :] for j in range(n)) + post[..., i, None] * block for i in range(n)
    ]
    return torch.stack(new, -2).to(out_dtype)


def test_gradcheck(rand):
    gradcheck(stream_update, arguments(rand, "three_streams"))


@tolerances(1e-13, 3e-6, 1e-2)
@FORM
def test_against_the_formula(rand, form, dtype, tolerance):
    args = arguments(rand, form, dtype)
    assert assert_is(stream_update, formula, rand, args, tolerance, dtype=dtype)[0].dtype == dtype


def test_registration(rand):
    opcheck(stream_update, arguments(rand, "four_streams", torch.float32))


def test_a_result_in_another_dtype(rand):
    args = arguments(rand, "four_streams", torch.bfloat16)[:4]
    out, *_ = assert_is(stream_update, formula, rand, (*args, torch.float32), 1e-2, dtype=torch.float32)
    assert out.dtype == torch.float32


def test_keeps_operands(rand):
    args = arguments(rand, "four_streams")
    assert_keeps(stream_update, args, args[:4])


def test_refuses_other_shapes(rand):
    streams, block, post, mix, dtype = arguments(rand, "four_streams")
    with pytest.raises(AssertionError, match="for streams"):
        stream_update(streams, block, post, mix[..., 1:, :], dtype)
