"""Recurrences without a lowering: named in the report, and a kind of block to remat, by structure and not by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition

import megacpp_compile
from megacpp_compile.matchers.recurrences import NAMES, find_recurrences
from megacpp_compile.matchers.rope.activations import activations
from megacpp_compile.remat.kinds import kind_of
from megacpp_compile.remat.tagging import joint
from megacpp_compile.report.report import Report
from tests.frames import check
from tests.matchers.graphs import trace

HEADS, LANES, TOKENS, STATES = 2, 4, 6, 3
DIM = HEADS * LANES


class Block(nn.Module):
    """`body(block, q, k, v, step)` with operands [B, T, H, lanes] and a step [B, T, H]."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.inward, self.out = body, nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.step, self.rates = nn.Linear(DIM, HEADS), nn.Parameter(torch.rand(DIM, STATES))
        self.mixed = nn.Parameter(torch.rand(2))
        self.register_buffer("slope", torch.rand(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inward(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return self.out(self.body(self, q, k, v, self.step(x).sigmoid()).flatten(2))


def delta_rule_by_token(m, q, k, v, step):
    state, out = torch.zeros(len(q), HEADS, LANES, LANES), []
    for t in range(TOKENS):
        state = state * (-step[:, t]).exp()[..., None, None]
        predicted = (state * k[:, t, :, :, None]).sum(-2)
        state = state + k[:, t, :, :, None] * ((v[:, t] - predicted) * step[:, t, :, None])[..., None, :]
        out.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(out, 1)


def delta_rule_by_chunk(m, q, k, v, step):
    """Two chunks, as the chunked form of Gated DeltaNet has them behind its triangular solve."""
    q, k, v = (t.transpose(1, 2).unflatten(2, (2, -1)) for t in (q, k, v))
    decay = step.transpose(1, 2).unflatten(2, (2, -1)).cumsum(-1).neg().exp()
    solved = torch.linalg.solve_triangular((k @ k.mT) * decay[..., None], torch.cat((v, k), -1), upper=False, unitriangular=True)
    new, read = solved.chunk(2, -1)
    state, out = torch.zeros(len(q), HEADS, LANES, LANES), []
    for i in range(2):
        corrected = new[:, :, i] - read[:, :, i] @ state
        out.append(q[:, :, i] @ state + (q[:, :, i] @ k[:, :, i].mT).tril() @ corrected)
        state = state * decay[:, :, i, -1, None, None] + k[:, :, i].mT @ corrected
    return torch.stack(out, 2).flatten(2, 3).transpose(1, 2)


def delta_rule_of_one_chunk(m, q, k, v, step):
    """Nothing reads the state at its end."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    total = step.transpose(1, 2).cumsum(-1)
    decay = (total[..., None, :] - total[..., :, None]).tril().exp()
    new = torch.linalg.solve_triangular((k @ k.mT) * decay, v, upper=False, unitriangular=True)
    return (((q @ k.mT) * decay).tril() @ new).transpose(1, 2)


def selective_scan(m, q, k, v, step):
    """As Mamba's plain path: a rate for each lane and state."""
    x = q.flatten(2).transpose(1, 2)
    steps = F.softplus(k.flatten(2)).transpose(1, 2)
    decays = torch.exp(-m.rates[None, :, None, :] * steps[..., None])
    taken = steps[..., None] * v[:, None, :, 0, :STATES] * x[..., None]
    state, out = torch.zeros(len(q), DIM, STATES), []
    for t in range(TOKENS):
        state = decays[:, :, t] * state + taken[:, :, t]
        out.append((state @ v[:, t, 1, :STATES, None])[..., 0])
    return torch.stack(out, 1)


def selective_scan_in_einsums(m, q, k, v, step):
    """As plain rewritings of Mamba have it."""
    x, steps = q.flatten(2), F.softplus(k.flatten(2))
    decays = torch.einsum("bld,dn->bldn", steps, -m.rates).exp()
    taken = torch.einsum("b l d, b l n -> b l d n", steps, v[:, :, 0, :STATES])
    state, out = torch.zeros(len(q), DIM, STATES), []
    for t in range(TOKENS):
        state = decays[:, t] * state + taken[:, t] * x[:, t, :, None]
        out.append(torch.einsum("bdn,bn->bd", state, v[:, t, 1, :STATES]))
    return torch.stack(out, 1)


def selective_scan_without_steps(m, q, k, v, step):
    """What enters is not weighted with the step: no op has it."""
    x, steps = q.flatten(2), F.softplus(k.flatten(2))
    decays = torch.exp(-m.rates * steps[..., None])
    taken = v[:, :, None, 0, :STATES] * x[..., None]
    state, out = torch.zeros(len(q), DIM, STATES), []
    for t in range(TOKENS):
        state = decays[:, t] * state + taken[:, t]
        out.append((state @ v[:, t, 1, :STATES, None])[..., 0])
    return torch.stack(out, 1)


def lightning_attention(m, q, k, v, step):
    """As MiniMax's: blocks of tokens, and a slope for every head that nothing computes."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    state, out, size = torch.zeros(len(q), HEADS, LANES, LANES), [], 2
    for start in range(0, TOKENS, size):
        a, b, c = (t[:, :, start : start + size] for t in (q, k, v))
        out.append((a @ b.mT).tril() @ c + a @ state)
        state = state * torch.exp(-m.slope * size) + b.mT @ c
    return torch.cat(out, 2).transpose(1, 2)


def gated_linear_attention(m, q, k, v, step):
    """A decay computed from the token, and no correction: none of the three."""
    state, out = torch.zeros(len(q), HEADS, LANES, LANES), []
    for t in range(TOKENS):
        state = state * step[:, t, :, None, None] + k[:, t, :, :, None] @ v[:, t, :, None, :]
        out.append(q[:, t, :, None, :] @ state)
    return torch.cat(out, 2).transpose(1, 2)


def rwkv4(m, q, k, v, step):
    """A numerator and its denominator, kept below the exponentials' range by a running maximum."""
    k, v, out = k.flatten(2), v.flatten(2), []
    num, den, top = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]) - 1e38
    for t in range(TOKENS):
        now, decay = k[:, t].float(), -torch.exp(m.rates[:, 0])
        most = torch.maximum(top, now + m.rates[:, 1])
        left, new = torch.exp(top - most), torch.exp(now + m.rates[:, 1] - most)
        out.append((left * num + new * v[:, t]) / (left * den + new))
        most = torch.maximum(top + decay, now)
        left, new = torch.exp(top + decay - most), torch.exp(now - most)
        num, den, top = left * num + new * v[:, t], left * den + new, most
    return torch.stack(out, 1)


def rwkv4_without_a_maximum(m, q, k, v, step):
    k, v, out = k.flatten(2).exp(), v.flatten(2), []
    num, den, decay = torch.zeros_like(v[:, 0]), torch.zeros_like(v[:, 0]), torch.exp(-m.rates[:, 0].exp())
    for t in range(TOKENS):
        out.append((num + m.rates[:, 1] * k[:, t] * v[:, t]) / (den + m.rates[:, 1] * k[:, t]))
        num, den = v[:, t] * k[:, t] + num * decay, decay * den + k[:, t]
    return torch.stack(out, 1)


def rwkv5(m, q, k, v, step):
    """Rows and columns of a state, a decay for each head, and a bonus for the token itself."""
    decay, bonus = torch.exp(-torch.exp(m.rates[:HEADS, 0])), m.rates[HEADS : 2 * HEADS, 1]
    state, out = torch.zeros(len(q), HEADS, LANES, LANES), []
    for t in range(TOKENS):
        a = k[:, t, :, :, None] @ v[:, t, :, None, :]
        out.append((q[:, t, :, None, :] @ (bonus[:, None, None] * a + state))[..., 0, :])
        state = a + decay[:, None, None] * state
    return torch.stack(out, 1)


def rwkv6(m, q, k, v, step):
    """As before, but the decay is each token's."""
    decay, state, out = torch.exp(-torch.exp(q)), torch.zeros(len(q), HEADS, LANES, LANES), []
    for t in range(TOKENS):
        a = k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((q[:, t].unsqueeze(-1) * (state + a * m.mixed[0])).sum(-2))
        state = state * decay[:, t].unsqueeze(-1) + a
    return torch.stack(out, 1)


def rwkv7(m, q, k, v, step):
    """The state is turned by a product of rank one."""
    decay, gate = torch.exp(-0.606531 * torch.sigmoid(q)), step[..., None] * k
    state, out = torch.zeros(len(q), HEADS, LANES, LANES), []
    for t in range(TOKENS):
        turned = state @ -k[:, t, :, :, None] @ gate[:, t, :, None, :]
        state = state * decay[:, t, :, None, :] + turned + v[:, t, :, :, None] @ k[:, t, :, None, :]
        out.append((state @ q[:, t, :, :, None])[..., 0])
    return torch.stack(out, 1)


def rg_lru(m, q, k, v, step):
    """With states that start anew at chosen tokens."""
    reset = (torch.arange(TOKENS) % 4 == 0)[None, :, None]
    power = -8.0 * torch.sigmoid(q.flatten(2)) * F.softplus(m.rates[:, 0])
    a = torch.exp(power)
    x = torch.sigmoid(k.flatten(2)) * v.flatten(2) * (reset + ~reset * torch.sqrt(1 - torch.exp(2 * power)))
    a, state, out = a * ~reset, torch.zeros_like(x[:, 0]), []
    for t in range(TOKENS):
        state = a[:, t].float() * state
        state = state + x[:, t].float()
        out.append(state)
    return torch.stack(out, 1)


def rg_lru_as_a_power(m, q, k, v, step):
    a = torch.sigmoid(m.rates[:, 0]) ** (8.0 * torch.sigmoid(q.flatten(2)))
    state, out = torch.zeros(len(q), DIM), []
    for t in range(TOKENS):
        state = (1 - a[:, t] ** 2).sqrt() * v.flatten(2)[:, t] + a[:, t] * state
        out.append(state)
    return torch.stack(out, 1)


def minimal_gru(m, q, k, v, step):
    """A decay of each channel that no exponential makes."""
    a, state, out = torch.sigmoid(q.flatten(2)), torch.zeros(len(q), DIM), []
    for t in range(TOKENS):
        state = (1 - a[:, t]) * state + a[:, t] * v.flatten(2)[:, t]
        out.append(state)
    return torch.stack(out, 1)


def moments(m, q, k, v, step):
    """Two averages that forget alike, the one of squares."""
    decay = torch.exp(-m.rates[:, 0])
    first, second, new = torch.zeros(len(q), DIM), torch.zeros(len(q), DIM), k.flatten(2).exp()
    for t in range(TOKENS):
        first, second = decay * first + new[:, t], decay * second + new[:, t] * new[:, t]
    return (first / second.sqrt())[:, None]


def weighted_residuals(m, q, k, v, step):
    """Layers on a residual stream that is scaled each time."""
    x = q
    for _ in range(3):
        x = x * m.mixed[0] + (x @ k.mT) @ v
    return x


def averages(m, q, k, v, step):
    """Of what no product makes."""
    state = torch.zeros_like(q)
    for other in (k, v, q):
        state = state * m.slope[0] + F.silu(other)
    return state


BODIES = {
    "Gated DeltaNet": [delta_rule_by_chunk, delta_rule_of_one_chunk],
    "Mamba-1's selective scan": [selective_scan_without_steps],
    "lightning attention": [lightning_attention],
    "RWKV's time mixing": [rwkv4, rwkv4_without_a_maximum, rwkv5, rwkv6, rwkv7],
    "RG-LRU": [rg_lru, rg_lru_as_a_power],
    "": [gated_linear_attention, weighted_residuals, averages, minimal_gru, moments],
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("kind", "body"), [(kind, body) for kind, bodies in BODIES.items() for body in bodies],
    ids=lambda p: p if isinstance(p, str) else p.__name__,
)  # fmt: skip
def test_recognised(kind, body):
    x = torch.randn(2, TOKENS, DIM).requires_grad_()
    frames = check(Block(body), (x,))
    (analysis,) = frames.analyses
    assert [found["kind"] for found in analysis.frame.recognised] == [kind] * bool(kind)
    if kind:
        assert f"in {body.__name__}" in analysis.frame.recognised[0]["source"]


@pytest.mark.parametrize(("body", "op"), [
    (delta_rule_by_token, "gated_delta_rule"), (selective_scan, "selective_scan"),
    (selective_scan_in_einsums, "selective_scan"),
], ids=lambda p: getattr(p, "__name__", None))  # fmt: skip
def test_what_a_pass_takes_is_not_named_beside_its_site(body, op):
    frames = check(Block(body), (torch.randn(2, TOKENS, DIM).requires_grad_(),))
    (analysis,) = frames.analyses
    assert [site.op for site in analysis.outcome.sites] == [f"megacpp::{op}"]
    assert not analysis.frame.recognised and not analysis.outcome.misses


def found(body):
    """What `find_recurrences` says of `body` alone: (kind, steps) of each."""
    block = Block(body)
    held = {**dict(block.named_parameters()), **dict(block.named_buffers())}

    f = lambda x, *given: torch.func.functional_call(block, dict(zip(held, given, strict=True)), (x,))  # noqa: E731
    graph = trace(f, torch.randn(2, TOKENS, DIM), *(t.detach() for t in held.values()))
    weights = {n for n, t in zip(graph.inputs[1:], held.values(), strict=True) if isinstance(t, nn.Parameter)}
    computed = activations(graph.graph, frozenset(weights))
    return [(r.kind, r.steps) for r in find_recurrences(graph.graph.nodes, computed)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("body", "kind", "steps"),
    [
        (delta_rule_by_token, "gated-delta-rule", TOKENS),
        (delta_rule_by_chunk, "gated-delta-rule", 1),  # nobody reads the state behind the last chunk
        (delta_rule_of_one_chunk, "gated-delta-rule", 1),
        (selective_scan, "selective-scan", TOKENS),
        (selective_scan_in_einsums, "selective-scan", TOKENS),
        (lightning_attention, "lightning-attention", TOKENS // 2 - 1),
        (rwkv4, "rwkv", TOKENS),
        (rwkv7, "rwkv", TOKENS),
        (rg_lru, "rg-lru", TOKENS),
        (gated_linear_attention, "", TOKENS),
    ],
    ids=lambda p: getattr(p, "__name__", None),
)
def test_steps_are_counted(body, kind, steps):
    assert found(body) == [(kind, steps)]


@pytest.mark.parametrize("body", [weighted_residuals, averages, minimal_gru, moments], ids=lambda p: p.__name__)
def test_other_sums_are_no_recurrence(body):
    assert found(body) == []


def test_every_name_is_tested():
    assert set(NAMES.values()) == set(BODIES) - {""}


class Loop(nn.Module):
    """A recurrence with a non-linear step, in a class whose name says nothing."""

    def __init__(self, shared: bool):
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(1 if shared else 3))

    def forward(self, x):
        h = x
        for t in range(3):
            h = torch.tanh(self.own[t % len(self.own)](h) + x)
        return h


def kind_to_remat(module, x):
    """The kind of all that `module` computes, as remat sees it: in the joint graph of forward and backward."""
    kinds = []

    def partition(joint_module, args, **kwargs):
        kinds.append(kind_of(joint(joint_module.graph)[0]))
        return default_partition(joint_module, args, **kwargs)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward), partition_fn=partition)
    torch.compile(module, backend=backend)(x).sum().backward()
    (kind,) = kinds
    return kind


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("make", "kind"), [
    (lambda: Loop(shared=True), "rblock"), (lambda: Loop(shared=False), "eblock"),
    (lambda: Block(delta_rule_by_token), "mblock"), (lambda: Block(lightning_attention), "mblock"),
    (lambda: Block(selective_scan), "mblock"), (lambda: Block(weighted_residuals), "eblock"),
], ids=["loop", "layers", "delta_rule", "lightning", "selective_scan", "residuals"])  # fmt: skip
def test_kind_to_remat(make, kind):
    assert kind_to_remat(make(), torch.randn(2, TOKENS, DIM)) == kind


def test_the_report_names_it():
    report = megacpp_compile.explain(Block(lightning_attention), torch.randn(2, TOKENS, DIM))
    assert "recognised, without a lowering" in str(report) and "lightning attention" in str(report)
    assert Report.from_json(report.to_json()).frames[0].recognised == report.frames[0].recognised
