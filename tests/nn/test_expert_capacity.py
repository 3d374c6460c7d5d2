"""A capacity for experts: who is dropped, that it is counted, and that the experts behind it are still one op."""

from __future__ import annotations

import pytest
import torch

import megacpp_compile
from megacpp_compile import equal_split
from megacpp_compile.errors import OperandError
from tests.passes.experts import DIM, EXPERTS, TOKENS, MoE, where_index_add


def by_hand(indices: torch.Tensor, experts: int, capacity: int) -> tuple[torch.Tensor, list[int]]:
    rows = indices.clone().view(-1, indices.shape[-1])
    taken, dropped = [0] * experts, [0] * experts
    for choice in range(rows.shape[1]):
        for token in range(rows.shape[0]):
            e = int(rows[token, choice])
            if not 0 <= e < experts:
                continue
            if taken[e] == capacity:
                dropped[e] += 1
                rows[token, choice] = -1
            else:
                taken[e] += 1
    return rows.view(indices.shape), dropped


@pytest.mark.parametrize("shape", [(12,), (9, 2), (2, 7, 3), (0, 2), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_earlier_choices_of_earlier_tokens_stay(shape, dtype):
    indices = torch.randint(-1, 4, shape, dtype=dtype)
    for capacity in (0, 1, 3, 100):
        kept, dropped = equal_split(indices, 4, capacity=capacity)
        assert kept.dtype == dtype and dropped.dtype == torch.int64
        as_rows = indices if indices.dim() > 1 else indices.unsqueeze(-1)
        want, counted = by_hand(as_rows, 4, capacity)
        assert torch.equal(kept, want.view(shape)) and dropped.tolist() == counted
        there = ((indices >= 0) & (indices < 4)).sum()
        assert (kept >= 0).sum() + dropped.sum() == there


def test_the_equal_share_drops_nothing_of_an_even_routing():
    even = torch.arange(24).remainder(6).view(12, 2)
    kept, dropped = equal_split(even, 6)
    assert torch.equal(kept, even) and not dropped.any()
    assert equal_split(torch.zeros(12, 2, dtype=torch.int64), 6, factor=1.5)[1].tolist() == [18, 0, 0, 0, 0, 0]


def test_operands_that_mean_nothing():
    for indices, experts, options in (
        (torch.ones(3, 2), 4, {}), (torch.tensor(1), 4, {}), (torch.ones(3, 2, dtype=torch.int64), 0, {}),
        (torch.ones(3, 2, dtype=torch.int64), 4, {"factor": 0.0}), (torch.ones(3, 2, dtype=torch.int64), 4, {"capacity": -1}),
    ):  # fmt: skip
        with pytest.raises(OperandError):
            equal_split(indices, experts, **options)


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("expert", [4, 1 << 40, -2])
def test_an_expert_that_does_not_exist(expert):
    indices = torch.tensor([[0, 1], [3, expert], [-1, 2]])
    with pytest.raises(OperandError, match=rf"indices hold {expert}, .*0 to 3.*-1"):
        equal_split(indices, 4)
    compiled = torch.compile(equal_split, backend="megacpp", fullgraph=True)
    with pytest.raises(RuntimeError, match="equal_split: an index is neither an expert from 0 to 3 nor -1"):
        compiled(indices, 4)
    assert torch.equal(compiled(indices[:1], 4)[0], indices[:1])


@pytest.mark.end_to_end
def test_experts_behind_it_are_one_op(no_kernels):
    counted = []

    def body(m, x, indices, gates):
        kept, dropped = equal_split(indices, EXPERTS, capacity=4)
        counted.append(dropped)
        return where_index_add(m, x, kept, gates)

    module, x = MoE(body), torch.randn(TOKENS, DIM, requires_grad=True)
    want = module(x)
    grads = torch.autograd.grad(want.square().sum(), [x, *module.parameters()])
    assert counted[0].sum() > 0
    with megacpp_compile.record() as report:
        got = torch.compile(module, backend="megacpp", options={"strict": True}, fullgraph=True)(x)
        found = torch.autograd.grad(got.square().sum(), [x, *module.parameters()])
    assert report.counts["moe"] == 1 and {s.op for s in report.sites} == {"megacpp::moe"}
    for a, b in zip((want, *grads), (got, *found), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
