"""The loss that keeps no logits on an XLA device: the numbers of CPU, one `while` a pass over the tokens, the logits of no
more of them than a chunk has, nothing on the host, no float64."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils._pytree import tree_map_only

import megacpp_compile
from megacpp_compile.lowerings.linear_cross_entropy import chunks, linear_cross_entropy
from tests.lowerings import relative_error
from tests.lowerings.loss_cases import ALL, operands

from .test_lowered_ops import program
from .test_plain_models import compilations, host_ops

pytestmark = pytest.mark.usefixtures("fresh")

TOKENS, WORDS, EACH = 22, 40, 6


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Chunks of six rows, the last of four."""
    monkeypatch.setattr(chunks, "XLA_BYTES", EACH * WORDS * 4)
    monkeypatch.setattr(chunks, "TILE", 1)


def given(rand, dtype=torch.float32, **options):
    return operands(rand, dtype, n=TOKENS, v=WORDS, **(ALL | options))


def mean(x, w, b, target, *rest, reduction="sum"):
    loss, lse, *_ = linear_cross_entropy(x, w, b, target, *rest, reduction, "xwb" if reduction == "sum" else "")
    if reduction == "none":
        loss = (loss + lse.sin()).sum()
    return loss / (target != -100).sum()


def step(call, args, device, dtype=torch.float32, reduction="sum"):
    """The loss and gradients on `device`, in one program."""
    args = tree_map_only(torch.Tensor, lambda t: t.to(device), args)
    leaves = [t.detach().to(dtype).requires_grad_() for t in args[:3]]
    weight = args[4].to(dtype)
    loss = call(*leaves, args[3], weight, *args[5:], reduction=reduction)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("how", ["called", "megacpp"])
def test_numbers(xla, rand, how, reduction):
    import torch_xla

    args, call = given(rand), mean
    if how == "megacpp":
        call = torch.compile(mean, backend="megacpp", fullgraph=True, options={"strict": True})
    want, compiled = step(mean, args, "cpu", torch.float64, reduction), []
    with megacpp_compile.record() as report:
        for _ in range(3):
            before, got = compilations(), step(call, args, xla, reduction=reduction)
            torch_xla.sync(wait=True)
            compiled.append(compilations() - before)
    assert all(relative_error(g.cpu(), w) < 1e-5 for g, w in zip(got, want, strict=True))
    assert compiled[0] > 0 and not any(compiled[2:]) and not host_ops(), compiled
    assert [(s.requested, s.effective, s.reason) for s in report.sites] == [("tpu_xla", "tpu_xla", "")] * (how == "megacpp")


@pytest.mark.parametrize(("reduction", "loops"), [("sum", 1), ("none", 2)])
def test_no_more_logits_than_a_chunk_has(xla, rand, reduction, loops):
    h = 10
    text = program(step(mean, given(rand, h=h), xla, reduction=reduction))
    assert len(re.findall(r" while\(", text)) == loops and "f64" not in text and "<=" not in text
    rows = {int(n) for n in re.findall(rf"f32\[(\d+),{WORDS}\]", text)}
    assert rows - {1, h} == {EACH}  # beside w, transposed, and numbers


def test_in_half_precision(xla, rand):
    args, call = given(rand, torch.bfloat16), torch.ops.megacpp.linear_cross_entropy
    got = call(*tree_map_only(torch.Tensor, lambda t: t.to(xla), args), "sum", "xwb")
    want = call(*tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, args), "sum", "xwb")
    assert [t.dtype for t in got] == [torch.float32] * 2 + [torch.bfloat16] * 3
    assert all(relative_error(g.cpu(), w) < 2e-2 for g, w in zip(got, want, strict=True))


def test_a_target_that_is_no_word(xla, rand):
    args = given(rand, ignored=0)
    args[3][1] = WORDS
    loss, *_ = linear_cross_entropy(*tree_map_only(torch.Tensor, lambda t: t.to(xla), args), "none", "")
    assert loss.cpu().isnan().tolist() == [i == 1 for i in range(TOKENS)]
