"""A precision plan where there is no float8: everything stays as it is, and that is said."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import megacpp_compile
from megacpp_compile.config import rules
from megacpp_compile.precision.layer_spec import CLASSES

EVERYWHERE = "precision plan: bf16 everywhere (target tpu: no float8 here)"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down_proj(nn.functional.silu(self.up_proj(x)))


@pytest.fixture
def said(caplog):
    rules.announce.cache_clear()
    with caplog.at_level(logging.INFO, logger="megacpp_compile"):
        yield lambda: [record.getMessage() for record in caplog.records]


def test_a_plan_in_fp8_is_bf16_everywhere(xla, said):
    block, x = Block().to(xla, torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16).to(xla)
    out = {}
    for precision in (None, {"*.up_proj": "fp8_current", "*": "fp8_current"}):
        torch._dynamo.reset()
        with megacpp_compile.record() as report:
            options = {"strict": True, "precision": precision and {"rules": precision, "gate": False}}
            out[precision is None] = torch.compile(block, backend="megacpp", options=options)(x).detach().cpu()
    assert EVERYWHERE in said()
    assert not report.sites and {miss.tag for miss in report.misses} == {"device"} and len(report.misses) == 2
    assert torch.equal(out[True], out[False])


def test_replacing_linears_does_nothing(xla, said):
    block = Block().to(xla)
    before = copy.copy(block._modules)
    table = megacpp_compile.replace_linears(block, "fp8_current")
    assert table.done == () and table.reason == "target tpu: no float8 here" and block._modules == before
    assert said() == [f"{EVERYWHERE}; replace_linears left all 2 linears alone"]


def test_a_layer_spec_falls_back_to_plain_modules(xla):
    """What `docs/generated/targets.md` has in its table: the seven keys, none of Transformer Engine's, with the numbers of CPU."""
    spec = megacpp_compile.te_layer_spec().or_native()
    assert list(spec) == list(CLASSES) and all(c.__module__.startswith("megacpp_compile") for c in spec.values())
    torch.manual_seed(0)
    makers = {
        "norm": (32,), "linear_qkv": (32, 32), "linear_proj": (32, 32), "linear_fc1": (32, 32), "linear_fc2": (32, 32),
        "layernorm_mlp": (32, 64),
    }  # fmt: skip
    x = torch.randn(2, 3, 32)
    for key, sizes in makers.items():
        module = spec[key](*sizes)
        want, got = module(x), copy.deepcopy(module).to(xla)(x.to(xla)).cpu()
        assert (got - want).abs().max() < 1e-5 * want.abs().max(), key
    attention = spec["attention"](4, 8, qkv_format="bshd", softcap=2.0)
    q = torch.randn(2, 5, 4, 8)
    want, got = attention(q, q, q), attention(*[q.to(xla)] * 3).cpu()
    assert (got - want).abs().max() < 1e-5 * want.abs().max()
