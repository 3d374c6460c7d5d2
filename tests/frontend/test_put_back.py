"""Rows, of a number known at run time only, that are written to their places by a permutation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from megacpp_compile.frontend.canonicalize.put_back import put_back

TOKENS, CHOICES, DIM = 3, 2, 4
SLOTS = TOKENS * CHOICES


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return (self.function(*args),)


def written(f, present):
    """How many writes are sized anew in the graph of `f`, which has to compute the same behind it, and whether its
    result's sizes are known."""
    args = (torch.randn(7, DIM), torch.tensor(present), torch.tensor([2, 0, 1, 0, 2, 1]))
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(a, static_shapes=True) for a in args]
    module, _ = aot_export_module(Call(f), fakes, trace_joint=False, pre_dispatch=True)
    count = put_back(module.graph, mode)
    ((out,),) = module.graph.output_node().args
    module.recompile()
    (got,) = module(*args)
    torch.testing.assert_close(got, f(*args))
    return count, not free_unbacked_symbols(out.meta["val"].shape)


ALL = [True] * 6 + [False]


def sums_choices(x, present, ids):
    rows = x[present]
    y = torch.empty_like(rows)
    y[ids.argsort()] = rows
    return y.view(TOKENS, CHOICES, -1).sum(1)


def sorts(x, present, ids):
    rows = x[present]
    y = rows.new_zeros(rows.shape)
    y[ids.sort(stable=True)[1]] = rows
    return y.exp()


def knows_its_channels_later(x, present, ids):
    """What is checked behind it makes sizes equal that are still said by the number of rows."""
    rows = x[present]
    y = torch.empty_like(rows)
    y[ids.argsort()] = rows
    y = y.view(SLOTS, -1).exp()
    y.view(SLOTS, DIM)
    return y


@pytest.mark.sampled(3)
@pytest.mark.parametrize("f", [sums_choices, sorts, knows_its_channels_later], ids=lambda f: f.__name__)
def test_as_many_rows_as_the_permutation_has_numbers(f):
    assert written(f, ALL) == (1, True)


def keeps_some(x, present, ids):
    rows = x[present]
    y = torch.zeros_like(rows)
    y[ids] = rows
    return y.exp()


def to_a_longer_one(x, present, ids):
    rows = x[present]
    y = rows.new_zeros(2 * SLOTS, DIM)
    y[ids.argsort()] = rows
    return y.exp()


def one_row_everywhere(x, present, ids):
    rows = x[present]
    y = rows.new_zeros(SLOTS, DIM)
    y[ids.argsort()] = rows
    return y * rows.shape[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("f", "present"), [
    (keeps_some, ALL), (to_a_longer_one, ALL), (one_row_everywhere, [True] + [False] * 6),
], ids=lambda p: getattr(p, "__name__", ""))  # fmt: skip
def test_other_writes_are_left_as_they_are(f, present):
    assert written(f, present)[0] == 0
