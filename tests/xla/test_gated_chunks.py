"""The gated delta rule and linear attention on an XLA device: the numbers of CPU, one `while` a walk, nothing on the host,
no float64."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils._pytree import tree_map_only

import megacpp_compile
from megacpp_compile.lowerings._kernels.xla_gated_chunks import block_inverse
from megacpp_compile.lowerings.gated_delta_rule import gated_delta_rule
from megacpp_compile.lowerings.gated_linear_attention import gated_linear_attention
from tests.lowerings import relative_error
from tests.lowerings.delta_cases import ATTENTIONS, RULES, attention, rule

from .test_lowered_ops import program
from .test_plain_models import host_ops

pytestmark = pytest.mark.usefixtures("fresh")

OPS = {"delta": (gated_delta_rule, rule, RULES), "linear": (gated_linear_attention, attention, ATTENTIONS)}
# Gates and documents are apart in the lowering, so two cases see either of both; a loop is traced of each alone below.
LABELS = ("gate_a_head", "documents_channels")


def step(op, args, device, dtype=torch.float32):
    """o, final state and gradients on `device`, moved to where they can be compared."""
    args = tree_map_only(torch.Tensor, lambda t: t.to(device), args)
    leaves = [a.detach().to(dtype).requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
              for a in args[:-1]]  # fmt: skip
    o, final = op(*leaves, dtype)[:2]
    wanted = [a for a in leaves if isinstance(a, torch.Tensor) and a.requires_grad]
    return o, final, *torch.autograd.grad(o.square().sum() + final.square().sum(), wanted)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("name", OPS)
def test_numbers(xla, rand, name, label):
    import torch_xla

    op, make, cases = OPS[name]
    args = make(rand, torch.float32, **cases[label])
    got, want = step(op, args, xla), step(op, args, "cpu", torch.float64)
    torch_xla.sync(wait=True)  # one program for all of them
    for g, w in zip(got, want, strict=True):
        assert relative_error(g.cpu(), w) < 2e-5
    assert not host_ops()


@pytest.mark.parametrize("name", OPS)
def test_one_loop_a_walk(xla, rand, name):
    op, make, _ = OPS[name]
    text = program(list(step(op, make(rand, torch.float32, b=1, t=80, gate="channel"), xla)))
    assert len(re.findall(r" while\(", text)) == 2 and "f64" not in text and "<=" not in text


@pytest.mark.parametrize("n", [16, 32, 48, 64])
def test_inverses(rand, n):
    """Also of what a power series would lose: every token the same key."""
    for lower in (rand(3, n, n).tril(-1) / n**0.5, torch.ones(1, n, n).tril(-1)):
        want = torch.linalg.inv(torch.eye(n).double() + lower.double())
        assert relative_error(block_inverse(lower), want) < 1e-5


def test_in_a_compiled_frame(xla, rand):
    args = rule(rand, torch.float32, t=40)

    def module(*operands):
        return gated_delta_rule(operands[0].sin(), *operands[1:])[:2]

    compiled = torch.compile(module, backend="megacpp", options={"strict": True}, fullgraph=True)
    with megacpp_compile.record() as report:
        got = step(compiled, args, xla)
    for g, w in zip(got, step(module, args, "cpu", torch.float64), strict=True):
        assert relative_error(g.cpu(), w) < 2e-5
    (s,), want = report.sites, ("megacpp::gated_delta_rule", "tpu_xla", "tpu_xla", "")
    assert (s.op, s.requested, s.effective, s.reason) == want and not host_ops()
