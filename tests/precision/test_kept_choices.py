"""A router near a tie, whose scores come out a rounding apart the second time: its experts are chosen once.

What atomic adds do on a GPU a mode does here: every second GEMM that makes scores is off by a rounding, so that the
forward and its recomputation never agree. Each test shows what torch's checkpoint alone makes of that, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint

from megacpp_compile.errors import BadOptionError
from megacpp_compile.precision import checkpoint as rule
from megacpp_compile.precision.checkpoint import checkpoint_for
from megacpp_compile.precision.sentinel import RUNS_COMPILED

from .models import equal

DIM, EXPERTS, TOKENS = 8, 4, 12
ROUNDING = 1e-6


class Routed(nn.Module):
    """Token choice, one expert each; a gather and a scatter add an expert. ties: tokens whose two best scores are equal
    but for `ROUNDING`, one token above the other in turn."""

    def __init__(self, how="topk"):
        super().__init__()
        self.router, self.how = nn.Linear(DIM, EXPERTS), how
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(EXPERTS))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        if self.how == "topk":
            gates, chosen = scores.topk(1, -1)
        elif self.how == "argmax":
            chosen = scores.argmax(-1, keepdim=True)
            gates = scores.gather(-1, chosen)
        else:  # as many experts as have a score above the mean
            chosen, gates = None, scores
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = (chosen == e) if chosen is not None else (scores[:, e : e + 1] > 1 / EXPERTS)
            rows, slots = mask.nonzero(as_tuple=True)
            gate = gates[rows, slots if chosen is not None else torch.full_like(slots, e)]
            out = out.index_add(0, rows, expert(x[rows]) * gate[:, None])
        return out


class Wobble(TorchDispatchMode):
    """Scores of `tokens` are off by `ROUNDING` in every second GEMM that makes scores, in turn to the one side and the
    other. `again`: how many such GEMMs have run."""

    def __init__(self, tokens, how):
        super().__init__()
        self.tokens, self.how, self.again = tokens, how, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default and result.shape == (TOKENS, EXPERTS):
            off = -ROUNDING if self.again % 2 else ROUNDING
            self.again += 1
            for i, token in enumerate(self.tokens):
                tie = result[token].mean() if self.how == "threshold" else result[token].max() + 1
                result[token, :2] = torch.stack([tie + off, tie - off] if i % 2 == 0 else [tie - off, tie + off])
                if self.how == "threshold":
                    result[token, 2:] = tie
        return result


def gradients(call, block, x, ties, how="topk", steps=1):
    """Of a step, with the forward of the same rounding each time."""
    for _ in range(steps):
        block.zero_grad()
        x.grad = None
        with Wobble(ties, how) as wobble:
            call(x).square().sum().backward()
    return [x.grad, *(p.grad if p.grad is not None else torch.zeros_like(p) for p in block.parameters())], wobble.again


def made(block=Routed, **how):
    return block(**how).double(), torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)


def a_rounding_off(got, want):
    return all((a - b).norm() <= 10 * ROUNDING * (b.norm() + 1) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("how", ["topk", "argmax", "threshold"])
@pytest.mark.parametrize("routes", [None, True])
def test_a_token_near_a_tie_stays_with_its_expert(how, routes):
    block, x = made(how=how)
    want, _ = gradients(block, block, x, [3], how)
    again = checkpoint_for(block, routes=routes)
    got, made_scores = gradients(lambda x: again(block, x), block, x, [3], how, steps=2)
    assert made_scores == 1, "the scores were not made again"
    assert equal(got, want) and again.routes and again.relaxed


@pytest.mark.parametrize("how", ["topk", "argmax", "threshold"])
def test_without_the_rule_the_sizes_of_experts_change(how):
    block, x = made(how=how)
    with pytest.raises(CheckpointError, match="different metadata"):
        gradients(lambda x: checkpoint(block, x, use_reentrant=False), block, x, [3], how)


def test_without_the_rule_two_tokens_change_places_in_silence():
    """As many rows an expert as before, so that torch's comparison finds nothing, and gradients are wrong."""
    block, x = made()
    want, _ = gradients(block, block, x, [3, 4])
    wrong, _ = gradients(lambda x: checkpoint(block, x, use_reentrant=False), block, x, [3, 4])
    assert (wrong[0] - want[0]).norm() > 1e-2 * want[0].norm()
    again = checkpoint_for(block)
    assert equal(gradients(lambda x: again(block, x), block, x, [3, 4])[0], want)


def test_the_comparison_alone_relaxed_is_no_rule():
    """One token moves, and what is raised, if anything, is an error of some op in backward."""
    block, x = made()
    relaxed = {"use_reentrant": False, "determinism_check": "none"}
    with pytest.raises(RuntimeError) as caught:
        gradients(lambda x: checkpoint(block, x, **relaxed), block, x, [3])
    assert not isinstance(caught.value, CheckpointError)


def test_flips_are_counted():
    block, x = made()
    want, _ = gradients(block, block, x, [3, 4, 7])
    again = checkpoint_for(block, count_flips=True)
    got, made_scores = gradients(lambda x: again(block, x), block, x, [3, 4, 7])
    assert made_scores == 2 and again.flips == 3 and again.choices.again == 1
    # Experts are the first choice's all the same; gates are computed from scores a rounding away.
    assert a_rounding_off(got, want)
    steady = checkpoint_for(block, count_flips=True)
    gradients(lambda x: steady(block, x), block, x, [])
    assert steady.flips == 0 and steady.choices.again == 1


def test_a_second_backward_reads_the_same_choice():
    block, x = made()
    again = checkpoint_for(block)
    with Wobble([3], "topk"):
        loss = again(block, x).square().sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        assert torch.equal(first, torch.autograd.grad(loss, x)[0])


class Chooses(nn.Module):
    """`body(module, x)` of a router and a linear."""

    def __init__(self, body):
        super().__init__()
        self.router, self.out, self.body = nn.Linear(DIM, EXPERTS), nn.Linear(DIM, DIM), body
        self.bias = nn.Parameter(torch.randn(EXPERTS))

    def forward(self, x):
        return self.body(self, x)


def shared(m, x):
    """Scores written in place after they were made, and indices after they were chosen."""
    scores = m.router(x).add_(m.bias).sigmoid()
    chosen = scores.argmax(-1, keepdim=True)
    gates = scores.amax(-1, keepdim=True)
    chosen.clamp_(max=1)
    kept = torch.zeros_like(scores).scatter(-1, chosen, gates)
    return m.out(x) * kept.sum(-1, keepdim=True) + kept[:, :1]


def test_writes_in_place_leave_the_choice():
    block, x = made(Chooses, body=shared)
    want, _ = gradients(block, block, x, [])
    again = checkpoint_for(block)
    assert equal(gradients(lambda x: again(block, x), block, x, [])[0], want)
    # With a token near a tie: what was written to is made again, so gates are a rounding off, and the choice is not.
    want, _ = gradients(block, block, x, [3])
    assert a_rounding_off(gradients(lambda x: again(block, x), block, x, [3])[0], want)


class Asked:
    """What a checkpoint is called with."""

    def __init__(self, monkeypatch):
        self.calls = []
        monkeypatch.setattr(rule.stock, "checkpoint", self)

    def __call__(self, block, *args, **kwargs):
        self.calls.append(kwargs)
        return checkpoint(block, *args, **kwargs)


def written_later(m, x):
    """Writes to its scores after it has chosen by them, and reads them then."""
    logits = m.router(x)
    chosen = logits.argmax(-1, keepdim=True)
    read = logits.exp()
    logits = logits.mul_(0.5)
    return m.out(x) * read.gather(-1, chosen) * logits.tanh().sum(-1, keepdim=True)


def test_scores_written_to_after_the_choice_are_made_again():
    block, x = made(Chooses, body=written_later)
    want, _ = gradients(block, block, x, [])
    for selective in (False, True):
        again = checkpoint_for(block, selective=selective)
        got, made_scores = gradients(lambda x, a=again: a(block, x), block, x, [])
        assert made_scores == 2 and equal(got, want)


def draws(m, x):
    """Chooses at random, and drops out behind that."""
    scores = m.router(x).softmax(-1)
    gate = scores.gather(-1, scores.multinomial(1))
    return nn.functional.dropout(m.out(x) * gate, 0.5)


@pytest.mark.parametrize("selective", [False, True])
def test_random_choices_move_the_generator_on_again(selective):
    """Otherwise a mask behind a choice that is handed over would be another one."""
    block, x = made(Chooses, body=draws)
    found = []
    again = checkpoint_for(block, selective=selective)
    for call in (block, lambda x: again(block, x)):
        torch.manual_seed(0)
        found.append(gradients(call, block, x, [])[0])
    assert equal(*found)


def test_other_blocks_keep_the_comparison(monkeypatch):
    """Exactly the blocks that route lose it; dropout and masks by comparison are no routing."""

    class Plain(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            return torch.where(h > 0, h, 0.1 * h) * nn.functional.dropout(h)

    asked, (routed, x) = Asked(monkeypatch), made()
    plain = Plain(DIM, DIM).double()
    for block, routes, want in ((plain, None, None), (plain, False, False), (routed, None, True), (routed, True, True)):
        asked.calls.clear()
        again = checkpoint_for(block, routes=routes)
        for _ in range(2):
            again(block, x).sum().backward()
        checks = [call.get("determinism_check", "default") for call in asked.calls]
        relaxed = ["none" if again.routes else "default"] * 2
        if routes is None and again.routes:
            relaxed[0] = "default"  # nothing has shown it before the first call, whose choice is kept
        assert checks == relaxed and again.routes is want and again.relaxed == (want is True)
        assert all(("context_fn" in call) == (routes is not False) for call in asked.calls)


def test_a_block_that_starts_to_route_late_is_noticed():
    class Late(Routed):
        routing = False

        def forward(self, x):
            return super().forward(x) if self.routing else x * self.router.weight.sum()

    block, x = made(Late)
    again = checkpoint_for(block)
    again(block, x).sum().backward()
    assert again.routes is None
    block.routing = True
    want, _ = gradients(block, block, x, [3])
    assert equal(gradients(lambda x: again(block, x), block, x, [3])[0], want) and again.routes


@pytest.mark.skipif(not RUNS_COMPILED, reason="this torch compiles nothing under a mode, and so has no FlexAttention there")
def test_flex_attention_runs_under_it():
    """An operator of higher order, which modes have to let through."""
    from torch.nn.attention.flex_attention import flex_attention

    class Flex(nn.Module):
        def forward(self, x):
            q = x.detach()[None, None]  # there is no backward on CPU
            return flex_attention(q, q, q)[0, 0] * x * x.argmax(-1, keepdim=True)

    block, x = Flex(), torch.randn(16, 16, requires_grad=True)
    (want,) = torch.autograd.grad(block(x).square().sum(), x)
    (got,) = torch.autograd.grad(checkpoint_for(block)(block, x).square().sum(), x)
    assert torch.equal(got, want)


def test_without_gradients_nothing_is_kept(monkeypatch):
    block, x = made()
    asked, again = Asked(monkeypatch), checkpoint_for(block)
    with torch.no_grad():
        assert torch.equal(again(block, x), block(x))
    assert not asked.calls


def test_the_order_of_experts_is_a_word_of_the_caller():
    with pytest.raises(BadOptionError, match="routes"):
        checkpoint_for(made()[0], routes="topk")
