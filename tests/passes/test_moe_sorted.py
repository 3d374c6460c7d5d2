"""Experts over rows that come sorted: found in every spelling and condition, and refused for every reason there is."""

from __future__ import annotations

import contextlib
import copy
import functools

import expecttest
import pytest
import torch

from megacpp_compile.config.options import Config
from tests.frames import TOLERANCE, largest_error, render, run, train
from tests.lowerings.agreement import poisoned_memory

from . import experts_sorted
from .contract import assert_disabled, assert_fires, assert_refused
from .experts import DIM
from .experts_sorted import NEAR_MISSES, OTHERS, ROWS, Sorted, TokenChoice

NAME, OP = "moe", "megacpp::moe_sorted"
COUNTS = (3, 0, 6)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def given(body=None, rows: int = sum(COUNTS), dtype=torch.bfloat16):
    """In bfloat16: torch traces its grouped GEMM in nothing else."""
    counts = torch.tensor([rows - sum(COUNTS[1:]), *COUNTS[1:]])
    if body is experts_sorted.ends_that_come:
        counts = counts.cumsum(0, dtype=torch.int32)
    return torch.randn(rows, DIM).to(dtype).requires_grad_(), counts


def ops(frames):
    return [site.op for analysis in frames.analyses if analysis.outcome for site in analysis.outcome.sites]


def name(body):
    return body.__name__ if callable(body) else ""


def test_graph():
    frames = assert_fires(NAME, Sorted(experts_sorted.two_projections).bfloat16(), given(), dynamo=True)
    expecttest.assert_expected_inline(
        render(frames.graph),
        """\
cumsum: int32[3] = cumsum(counts, 0, dtype=int32)
moe_sorted: (bf16[9, 8], (bf16[9, 16], bf16[9, 16])) = megacpp.moe_sorted(rows, cumsum, [gate], [up], [down], silu, pair)
getitem: bf16[9, 8] = moe_sorted[0]
return [getitem]""",
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("body", ROWS, ids=name)
def test_fires(body):
    frames = assert_fires(NAME, Sorted(body).bfloat16(), given(body))
    assert ops(frames) == [OP] and not frames.misses


def test_fires_on_weights_that_lie_the_other_way():
    assert ops(assert_fires(NAME, Sorted(experts_sorted.stored_in_out, other=True).bfloat16(), given())) == [OP]


def close(got, want):
    error, which = largest_error(got, want)
    assert error <= TOLERANCE[torch.bfloat16], (which, error)


def test_fires_between_casts():
    """Parameters, rows and results in float32."""
    module, args = Sorted(experts_sorted.with_casts), given(dtype=torch.float32)
    want = train(module, module, args)
    frames = run(module, args)
    assert ops(frames) == [OP] and not frames.misses
    close(frames.results, want)


@pytest.mark.sampled(3)
@torch.no_grad()
@pytest.mark.parametrize("body", ROWS, ids=name)
def test_fires_in_inference(body):
    module, args = Sorted(body).bfloat16(), given(body)
    frames = run(module, args)
    assert ops(frames) == [OP] and not frames.misses
    close({"y": frames.compiled(*args)}, {"y": module(*args)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_fires_under_autocast(dtype):
    """Which leaves grouped GEMMs as they are."""
    module, args = Sorted(experts_sorted.with_casts).to(dtype), given(dtype=dtype)

    def around():
        return torch.autocast("cpu", torch.bfloat16)

    want = train(module, module, args, around)
    frames = run(module, args, around=around)
    assert ops(frames) == [OP] and not frames.misses
    close(frames.results, want)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("everything", [False, True], ids=["length", "everything"])
@pytest.mark.parametrize("body", ROWS, ids=name)
def test_fires_at_every_length(body, everything):
    module, inputs = Sorted(body).bfloat16(), [given(body, rows) for rows in (12, 16, 9)]
    if not everything:
        torch._dynamo.mark_dynamic(inputs[0][0], 0)
    frames = run(module, inputs[0], dynamic=True if everything else None)
    for args in inputs:
        close(train(frames.compiled, module, args), train(module, module, args))
    assert ops(frames) == [OP] and not frames.misses and len(frames.graphs) == 1


def test_padding_is_zero():
    """Plain code leaves such rows unwritten, so there is nothing to compare them with."""
    module, (rows, _) = Sorted(experts_sorted.two_projections).bfloat16(), given(rows=12)
    counts = torch.tensor(COUNTS)
    frames = run(module, (rows, counts))
    assert ops(frames) == [OP]
    got, want = frames.compiled(rows, counts), module(rows, counts)
    close({"y": got[:9]}, {"y": want[:9]})
    assert not got[9:].any()


@pytest.mark.parametrize("rows", [9, 12])
def test_verifies(rows):
    """Rows of padding, which plain code leaves unwritten, are not compared."""
    module, (x, _) = Sorted(experts_sorted.two_projections).bfloat16(), given(rows=rows)
    with poisoned_memory():
        frames = run(module, (x, torch.tensor(COUNTS)), Config(strict=True, verify="each"))
    assert ops(frames) == [OP] and not frames.misses


@pytest.mark.parametrize(("tag", "body"), NEAR_MISSES.items(), ids=name)
def test_refuses(tag, body):
    assert_refused(NAME, tag, Sorted(body).bfloat16(), given())


@pytest.mark.parametrize("body", OTHERS, ids=name)
def test_no_experts(body):
    frames = run(Sorted(body).bfloat16(), given())
    assert not frames.counts[NAME] and not frames.misses


def test_disabled():
    assert_disabled(NAME, Sorted(experts_sorted.two_projections).bfloat16(), given())


# --- whole layers


CONDITIONS = {"float32": {}, "bfloat16": {}, "autocast": {}, "dynamic": {"dynamic": True}, "batches": {}}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("options", [{}, {"scores_first": True}, {"marks": False}, {"shared": False}], ids=str)
def test_a_whole_layer(options, condition):
    layer_fires("megacpp::moe", options, condition)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_layer_that_ends_in_what_no_compiler_looks_into(condition):
    layer_fires(OP, {"opaque": True}, condition)


@pytest.mark.sampled(2, unit=2)  # each condition with one of the two
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("body", [experts_sorted.with_casts_and_biases, experts_sorted.with_casts_and_wide_biases], ids=name)
def test_biases_by_counts_of_the_same_graph(body, condition):
    """What counts the rows, behind a router that runs under another autocast mode, is no part of the experts."""
    layer_fires(OP, {"opaque": True, "body": body}, condition)


def layer_fires(op, options, condition):
    module = TokenChoice(**options).to(torch.bfloat16 if condition == "bfloat16" else torch.float32)
    module.expert_bias, module.tokens_per_expert = (b.float() for b in (module.expert_bias, module.tokens_per_expert))
    module.router.float()
    x = torch.randn(2, 6, DIM).to(module.experts.gate.dtype).requires_grad_()
    around = contextlib.nullcontext

    if condition == "autocast":
        around = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    if condition == "batches":
        x = x.detach().flatten(0, 1).requires_grad_()
    eager = copy.deepcopy(module)
    want = train(eager, eager, (x,), around)
    frames = run(module, (x,), around=around, **CONDITIONS[condition])
    assert ops(frames) == [op], frames.misses
    assert not frames.misses
    close(frames.results, want)
