"""Hyper-connections behind a block: found in their spellings, and refused for every reason there is."""

from __future__ import annotations

import expecttest
import pytest
import torch
from torch import nn

from tests.frames import check_graph, render

from . import streams as streams_of
from .conditions import assert_serves, conditions, op_of, sampled
from .contract import assert_fires, assert_refused
from .streams import BEHIND, ON, D, N, streams

NAME = "stream_update"


class Given(nn.Module):
    """What is behind a block, with weights and a matrix of any origin."""

    def __init__(self, behind, n=N):
        super().__init__()
        self.behind = behind
        self.block, self.post, self.mix = nn.Linear(D, D), nn.Linear(D, n), nn.Linear(D, n * n)

    def forward(self, x):
        first, n = x[:, :, 0], x.shape[2]
        mix = self.mix(first).unflatten(-1, (n, n)).float()
        return self.behind(x, self.block(x.mean(2)), self.post(first).float(), mix)


def build(behind, dtype=torch.float32, n=N):
    torch.manual_seed(0)
    return Given(behind, n).to(dtype), streams(dtype=dtype, n=n)


def test_is_off_by_default():
    assert not check_graph(*build(BEHIND["product"])).fired


def test_graph():
    frames = assert_fires(NAME, *build(BEHIND["deepseek_v4"], torch.bfloat16), config=ON, dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
select: bf16[2, 5, 6] = select.int(x, 2, 0)
linear: bf16[2, 5, 16] = linear(select, mix_weight, mix_bias)
view: bf16[2, 5, 4, 4] = view(linear, [2, 5, 4, 4])
mean: bf16[2, 5, 6] = mean.dim(x, [2])
linear_1: bf16[2, 5, 6] = linear(mean, block_weight, block_bias)
linear_2: bf16[2, 5, 4] = linear(select, post_weight, post_bias)
permute: bf16[2, 5, 4, 4] = permute(view, [0, 1, 3, 2])
stream_update: bf16[2, 5, 4, 6] = megacpp.stream_update(x, linear_1, linear_2, permute, bfloat16)
return [stream_update]""")


@sampled(2, "dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", BEHIND)
def test_fires(form, dtype):
    node = op_of(assert_fires(NAME, *build(BEHIND[form], dtype), config=ON), NAME)
    assert node.args[0].meta["val"].dtype == node.args[4] == dtype, "the streams as they are"


@pytest.mark.parametrize("n", [2, 3, 8])
def test_other_numbers_of_streams(n):
    assert_fires(NAME, *build(BEHIND["product"], n=n), config=ON)


test_conditions = conditions(
    NAME, 1, ON,
    bfloat16=lambda: build(BEHIND["deepseek_v4"], torch.bfloat16),
    inference=lambda: build(BEHIND["deepseek_v4"]),
    autocast=lambda: build(BEHIND["deepseek_v4"]),
    fires=lambda: build(BEHIND["deepseek_v4"]),
)  # fmt: skip


def test_one_graph_for_all_lengths():
    module, (x,) = build(BEHIND["deepseek_v4"])
    torch._dynamo.mark_dynamic(x, 1)
    assert_serves(assert_fires(NAME, module, (x,), config=ON, dynamo=True), module, streams(9), streams(4))


def static(x, block, post, mix):
    """The same matrix for all tokens."""
    return (mix[0, 0].unsqueeze(-1) * x.unsqueeze(-3)).sum(-2) + post.unsqueeze(-1) * block.unsqueeze(-2)


def streams_last(x, block, post, mix):
    x = x.mT.contiguous()
    return torch.einsum("bsdj,bsij->bsdi", x, mix) + torch.einsum("bsd,bsi->bsdi", block, post)


@pytest.mark.parametrize(("tag", "behind"), [("static", static), ("layout", streams_last)], ids=["static", "layout"])
def test_refused(tag, behind):
    assert_refused(NAME, tag, *build(behind), config=ON)


def without_gradients(x, block, post, mix):
    with torch.no_grad():
        mixed = mix @ x
    return mixed + post.unsqueeze(-1) * block.unsqueeze(-2)


def test_parts_without_gradients():
    assert_refused(NAME, "region", *build(without_gradients), config=ON, dynamo=True)


def doubled(x, block, post, mix):
    return torch.add(mix @ x, post.unsqueeze(-1) * block.unsqueeze(-2), alpha=2)


OTHERS = {
    "streams are not mixed": lambda x, block, post, mix: x + post.unsqueeze(-1) * block.unsqueeze(-2),
    "alpha": doubled,
    "less": lambda x, block, post, mix: mix @ x - post.unsqueeze(-1) * block.unsqueeze(-2),
    "another block a stream": lambda x, block, post, mix: mix @ x + post.unsqueeze(-1) * x,
    "one weight for all streams": lambda x, block, post, mix: mix @ x + post[..., :1].unsqueeze(-1) * block.unsqueeze(-2),
    "a weight a channel": lambda x, block, post, mix: mix @ x + torch.ones(D) * block.unsqueeze(-2) * post.mean(),
    "two mixed": lambda x, block, post, mix: mix @ x + mix.mT @ x,
    "mixed by elements": lambda x, block, post, mix: (mix @ mix)[..., :1] * x + post.unsqueeze(-1) * block.unsqueeze(-2),
    "summed over rows and columns": lambda x, block, post, mix: (
        (mix.unsqueeze(-1) * x.unsqueeze(-3)).sum((-2, -3)).unsqueeze(-2) + post.unsqueeze(-1) * block.unsqueeze(-2)),
    "streams of the tokens before": lambda x, block, post, mix: (
        torch.einsum("bsij,btjd->bsid", mix, x) + post.unsqueeze(-1) * block.unsqueeze(-2)),
    "fewer new streams": lambda x, block, post, mix: mix[..., :2, :] @ x + post[..., :2].unsqueeze(-1) * block.unsqueeze(-2),
    "maximum": lambda x, block, post, mix: (mix.unsqueeze(-1) * x.unsqueeze(-3)).amax(-2) + post.unsqueeze(-1) * block.unsqueeze(-2),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_left_alone(form):
    assert not check_graph(*build(OTHERS[form]), ON).counts[NAME]


def test_streams_that_are_not_mixed_are_told():
    """Where they are streams: what adds an outer product is no hyper-connection by that alone."""
    frames = check_graph(*streams_of.build(streams_of.hy_v4, rows=2 * N), ON)
    assert frames.fired == {"hyper_connection": 1}
    told = [one["kind"] for analysis in frames.analyses for one in analysis.outcome.recognised]
    assert told == ["streams that are not mixed"]
    frames = check_graph(*build(OTHERS["streams are not mixed"]), ON)
    assert not any(analysis.outcome.recognised for analysis in frames.analyses)


def test_the_mixed_streams_are_read_elsewhere_too():
    """They are computed for that reader as they were."""

    def behind(x, block, post, mix):
        mixed = mix @ x
        return mixed + post.unsqueeze(-1) * block.unsqueeze(-2), mixed.sin()

    assert_fires(NAME, *build(behind), config=ON)


def test_the_streams_of_other_tokens():
    """What is rolled is not the streams, but other streams that are mixed as well."""
    assert_fires(NAME, *build(lambda x, block, post, mix: BEHIND["product"](x.roll(1, 1), block, post, mix)), config=ON)
