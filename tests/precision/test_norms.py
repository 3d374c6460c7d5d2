"""Which RMSNorms are folded into a linear: those one linear alone reads, by what the model computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from megacpp_compile import PrecisionPlan, replace_linears
from megacpp_compile.precision.norms import RMSNorm, as_rms_norm, readers
from tests.seeds import Draws

from .models import DIM, Norm, ids, model

PLAN = PrecisionPlan({"*": "fp8_current"}, gate=False)
X = Draws(__name__)(2, 16, 32)


class Gemma(Norm):
    """The gain is 1 + weight."""

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (y * (1 + self.weight.float())).to(x.dtype)


class Centred(Norm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class EpsOutside(Norm):
    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


@pytest.mark.parametrize(
    ("make", "meaning"),
    [(lambda: Norm(32, 1e-6), RMSNorm(1e-6, False)), (lambda: Norm(48, 1e-3), RMSNorm(1e-3, False)),
     (lambda: Gemma(32), RMSNorm(1e-6, True)), (lambda: nn.RMSNorm(32, eps=1e-5), RMSNorm(1e-5, False)),
     (lambda: nn.RMSNorm(32, eps=1e-5, device="meta"), RMSNorm(1e-5, False)),
     (lambda: nn.RMSNorm(32), None),  # its eps depends on the dtype of its input
     (lambda: nn.RMSNorm(32, eps=1e-5, elementwise_affine=False), None), (lambda: nn.LayerNorm(32), None),
     (lambda: nn.LayerNorm(32, bias=False), None), (lambda: Centred(32), None), (lambda: EpsOutside(32), None),
     (lambda: nn.Linear(32, 32), None)],
    ids=["norm", "another eps", "gain of 1 + weight", "torch's", "torch's on meta", "eps by dtype", "no gain",
         "LayerNorm", "LayerNorm without bias", "centred", "eps outside", "linear"],
)  # fmt: skip
def test_a_norm_is_told_by_what_it_computes(make, meaning):
    assert as_rms_norm(make()) == meaning


class Small(nn.Module):
    """norm -> a, and what a test makes of it."""

    def __init__(self, body):
        super().__init__()
        self.norm, self.a, self.b, self.body = Norm(32), nn.Linear(32, 32), nn.Linear(32, 32), body

    def forward(self, x):
        return self.body(self, x)


def written(m, x):
    h = m.norm(x)
    h += 1
    return m.a(h)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("body", "why"),
    [
        (lambda m, x: m.a(m.norm(x)), ""),
        (lambda m, x: m.a(m.norm(x)) + m.a(m.norm(x * 2)), ""),
        (lambda m, x: m.a(m.norm(x)) + m.b(x), ""),
        (lambda m, x: m.a(input=m.norm(x)), ""),
        (lambda m, x: m.a(m.norm(x)) + m.b(m.norm(x)), "read by 2 linears"),
        (lambda m, x: (m.a(h := m.norm(x)), h), "read by the model's output"),
        (lambda m, x: m.a(m.norm(x)) + m.a(x), "a reads something else"),
        (lambda m, x: m.a(m.norm(x).relu()), "relu"),
        (lambda m, x: m.a(x), "not run"),
        (lambda m, x: m.a(m.norm(x).flatten(0, 1)).view(x.shape), ""),
        (lambda m, x: m.a(m.norm(x).transpose(0, 1)), "transpose"),
        (lambda m, x: m.a(m.norm(x)[:1]), "slice"),
        (lambda m, x: m.a(m.norm(x).view(-1, 64)[:, :32]), "view"),
        (lambda m, x: m.a(m.norm(x).flatten(0, 1)) * m.norm(x).view(-1, 32).sum(), "sum"),
        (lambda m, x: m.a(m.norm(x)) * m.norm(x).shape[-1], ""),
        (lambda m, x: m.a(h := m.norm(x)) + linear(h, m.b.weight), "read by"),
        (written, "add_"),
        (lambda m, x: (h := m.norm(x), torch._foreach_add_([h], 1.0), m.a(h))[-1], "add_"),  # which returns nothing
        (lambda m, x: m.a(h := m.norm(x)) * h.sum(), "sum"),
        (lambda m, x: m.a(m.norm(x))[x > 0], "cannot run on shapes"),
    ],
    ids=range(20),
)
def test_who_reads_a_norm(body, why):
    made = Small(body)
    pairs, refused = readers(made, (X,))
    assert pairs == ({} if why else {"norm": "a"})
    assert why in refused.get("norm", "") and bool(refused) == bool(why)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.modules())
    assert all(type(p) is nn.Parameter for p in made.parameters()), "left with fake parameters"


def test_one_norm_folded_the_other_left(te):
    made, inputs = model(te, layers=1), ids(te)
    table = replace_linears(made, PLAN, target=te.target, example_inputs={"ids": inputs})
    rows = {row.fqn: row for row in table}
    folded, left = rows["layers.0.self_attn.q_norm"], rows["layers.0.self_attn.in_norm"]
    assert folded.done and folded.reason == "computed by layers.0.self_attn.q_b_proj"
    assert not left.done and left.reason == "read by 3 linears, each of which would compute it"
    assert rows["layers.0.self_attn.q_b_proj"].now == "te.LayerNormLinear, fp8_current"
    attention = made.layers[0].self_attn
    assert attention.q_b_proj.layer_norm_weight is attention.q_norm.weight
    assert attention.q_b_proj.eps == 1e-6 and not attention.q_b_proj.zero_centered_gamma
    assert type(attention.in_norm) is nn.RMSNorm


class Arranging(Norm):
    def forward(self, x):
        return super().forward(x).contiguous()


# Name -> (the norm, what reads it, lanes of the input).
FOLDED = {
    "a zero-centred gain": (Gemma, lambda m, x: m.a(m.norm(x)), 32),
    # As DeepSeek-V3 has it: what is normed is part of a wider product, and the result is arranged anew.
    "a slice in front and a view behind": (Norm, lambda m, x: m.a(m.norm(x[..., :32]).view(4, 8, 32)), 48),
    "a view that its input cannot have": (Arranging, lambda m, x: m.a(m.norm(x.transpose(0, 1)).view(-1, 32)), 32),
}


@pytest.mark.parametrize("name", FOLDED)
def test_folded(stand_in, name):
    norm, body, lanes = FOLDED[name]
    made, x = Small(body), torch.randn(2, 16, lanes)
    made.norm = norm(32)
    nn.init.normal_(made.norm.weight)
    want = made(x)
    assert "norm" in replace_linears(made, PLAN, target="cuda", example_inputs=(x,)).done
    torch.testing.assert_close(made(x), want, rtol=1e-4, atol=1e-5)


def test_without_inputs_no_norm_is_touched(te):
    made = model(te, layers=1)
    table = replace_linears(made, PLAN, target=te.target)
    assert not [row for row in table if row.role == "norm"]
    assert type(made.layers[0].self_attn.q_norm) is Norm


def test_norms_of_linears_that_stay_stay(stand_in):
    made = Small(lambda m, x: m.a(m.norm(x)))
    plan = PrecisionPlan({"a": "bf16", "*": "fp8_current"}, gate=False)
    table = replace_linears(made, plan, target="cuda", example_inputs=(X,))
    assert table.done == ("b",) and table.skipped["norm"] == "read by a, which stays in bf16"
    made = Small(lambda m, x: m.a(m.norm(x).float()))
    made.norm.bfloat16()
    table = replace_linears(made, PLAN, target="cuda", example_inputs=(X.bfloat16(),))
    assert "norm" in table.skipped and DIM == 32
