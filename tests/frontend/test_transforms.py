"""A `torch.func` transform, or a scan made of them, is carried around capture: what stands around it is rewritten."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from megacpp_compile import record
from megacpp_compile.frontend import transforms
from tests.frames import TOLERANCE, check, largest_error, train

DIM = 8


class Around(nn.Module):
    """Each `between` stands between two idioms."""

    def __init__(self, *between):
        super().__init__()
        n = len(between) + 1
        self.down, self.up = (nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(n)) for _ in range(2))
        self.norms, self.between = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(n)), (lambda x: x, *between)

    def forward(self, x):
        for down, norm, up, between in zip(self.down, self.norms, self.up, self.between, strict=True):
            x = up(norm(down(between(x))))
        return x


def decayed(a, b):
    return a[0] * b[0], b[0] * a[1] + b[1]


def scanned(x):
    return associative_scan(decayed, (x.sigmoid(), x), 1, combine_mode="generic")[1]


def scanned_in_reverse(x):
    return associative_scan(lambda a, b: 0.5 * a + b, x, 1, reverse=True, combine_mode="generic")


def scanned_under_a_checkpoint(x):
    return checkpoint(scanned, x, use_reentrant=False)


def scanned_without_gradients(x):
    with torch.no_grad():
        gates = scanned(x)
    return x * gates


def mapped(x):
    return torch.vmap(torch.vmap(lambda row: (row - row.mean()).tanh()))(x)


def mapped_under_autocast(x):
    def row(r):
        with torch.autocast("cpu", torch.bfloat16):
            mixed = r @ r.transpose(-1, -2)
        return mixed.float() @ r

    return torch.vmap(row)(x)


def mapped_in_place(x):
    def row(r):
        y = r * 2
        y[..., 0].mul_(3)
        return y

    return torch.vmap(row)(x)


def counted_under_it(x):
    """Regression: a tensor made under vmap, as in FlexAttention's `create_block_mask`, was no fake among fakes."""
    counts = (x.detach().sum(-1) > 0).sum(-1)
    kept = torch.vmap(lambda n: torch.arange(x.shape[1]) < n)(counts)
    return x * kept.unsqueeze(-1)


def slope(x):
    return torch.func.grad(lambda y: y.tanh().square().sum())(x)


def slopes(x):
    return torch.vmap(torch.func.grad(lambda y: y.tanh().square().sum()))(x)


def pulled_back(x):
    out, back = torch.func.vjp(torch.tanh, x)
    return back(out)[0]


def pushed_forward(x):
    return torch.func.jvp(torch.tanh, (x,), (x * 2,))[1]


def changed_around_it(x):
    """What the transform reads and what it returns are both written to before either is used again."""
    x = x * 1.0
    y = torch.vmap(lambda r: r * 3 - r.mean())(x)
    x.add_(1)
    y.mul_(2)
    return x + y


def branches(x):
    return torch.cond(x.sum() > 0, lambda y: y @ y.transpose(-1, -2) @ y, lambda y: y * 3, (x,))


def loops(x):
    """Its count is a number that the loop returns."""
    steps, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.9), (0, x.detach()))
    return x + y * steps


CARRIED = [
    (scanned, scanned_in_reverse, scanned_under_a_checkpoint, scanned_without_gradients),
    (mapped, mapped_under_autocast, mapped_in_place, counted_under_it, changed_around_it),
    (slope, slopes, pulled_back, pushed_forward), (branches, loops),
]  # fmt: skip


@pytest.mark.end_to_end
@pytest.mark.sampled(5)
@pytest.mark.parametrize("betweens", CARRIED, ids=lambda fs: fs[0].__name__)
def test_what_stands_around_it_is_rewritten(betweens):
    """Several in a frame: one that is not carried takes the frame along, and the reason that it is not captured for."""
    frames = check(Around(*betweens), (torch.randn(2, 5, DIM),))
    assert frames.fired == {"down_norm_up": len(betweens) + 1}, [s.fqn for a in frames.analyses for s in a.outcome.sites]


def writes_to_its_argument(x):
    y = x * 1.0
    torch.vmap(lambda r: r.mul_(2))(y)
    return y + torch.vmap(lambda r: r.add_(1).sin())(y)


def views_its_argument(x):
    y = x * 1.0
    torch.vmap(lambda r: r[..., :3])(y).mul_(2)
    return y


def test_a_vmap_that_cannot_be_traced_is_carried_as_it_is(monkeypatch):
    """Regression: the failed trace left its vmap open, and the frame was lost with it."""

    def fails(body, **_):
        def run(*args):
            torch._C._functorch._vmap_increment_nesting(2, "error")
            raise RuntimeError

        return run

    monkeypatch.setattr(transforms, "make_fx", fails)
    frames = check(Around(counted_under_it), (torch.randn(2, 5, DIM),))
    assert frames.fired == {"down_norm_up": 2}


@pytest.mark.parametrize("between", [writes_to_its_argument, views_its_argument], ids=lambda f: f.__name__)
def test_a_transform_that_shares_memory_with_its_arguments_is_refused(between):
    frames = check(Around(between), (torch.randn(2, 5, DIM),), captured=False)
    assert not frames.fired


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("between", "told"), [
    (mapped_under_autocast, "inside a `vmap` that switches autocast"), (branches, "inside `cond`"), (scanned, None),
], ids=lambda p: getattr(p, "__name__", None))  # fmt: skip
def test_inductor_takes_it_and_the_report_says_what_is_not_looked_at(between, told, no_kernels):
    model, x = Around(between), torch.randn(2, 5, DIM)
    eager = copy.deepcopy(model)
    want = train(eager, eager, (x,))
    with record() as report:
        got = train(torch.compile(model, backend="megacpp", options={"strict": True}), model, (x,))
    error, name = largest_error(got, want)
    assert error <= TOLERANCE[torch.float32], name
    assert report.counts["down_norm_up"] == 2
    rows = [(m.tag, m.reason) for m in report.misses if m.pass_name == "capture"]
    assert [tag for tag, _ in rows] == ["opaque"] * bool(told)
    assert not told or told in rows[0][1]


class Gated(nn.Module):
    def __init__(self, pair):
        super().__init__()
        self.pair = pair

    def forward(self, x):
        return torch.vmap(self.pair)(x, x.sin())


def without_gradients_within(a, b):
    with torch.no_grad():
        c = a * b
    return c + a


@pytest.mark.parametrize(("pair", "plain"), [
    (lambda a, b: a * b + torch.exp(a) - 2 * b, True), (lambda a, b: a * b.detach(), False),
    (without_gradients_within, False),
    (lambda a, b: a * b.relu(), False),
], ids=["arithmetic", "detached", "no_gradient_within", "more_than_arithmetic"])  # fmt: skip
def test_a_vmap_of_arithmetic_is_plain_where_gradients_flow(pair, plain):
    """Others stay one call, and gradients are eager's (`check` holds them to it)."""
    frames = check(Gated(pair), (torch.randn(3, 4).requires_grad_(),))
    (captured,) = (a.captured for a in frames.analyses)
    assert any(n.op == "call_module" for n in captured.gm.graph.nodes) != plain
