"""`estimate`: what it says of a model on fake tensors, beside what autograd keeps of the model itself."""

from __future__ import annotations

import functools
import json
import sys

import pytest
import torch
from torch import nn

import megacpp_compile
from megacpp_compile import estimate
from megacpp_compile.cli import main
from megacpp_compile.errors import BadOptionError, EstimateError, NotAModuleError, TargetUnavailableError
from megacpp_compile.memory import pareto
from megacpp_compile.memory.shapes import grouped_shape
from tests.memory.layered import Block, Model, Small, ids
from tests.passes import experts, experts_at_once

CLOSE = 0.05


def measured(model, *inputs):
    """Bytes of the distinct storages that autograd keeps, without the model's own and its inputs'."""
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(*inputs)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs)}
    del out
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)


def test_eager_is_what_autograd_keeps():
    model = Model(3, dense=1)
    found = estimate(model, ids(), compiled=False)
    assert found.eager == pytest.approx(measured(model, ids()), rel=CLOSE)
    whole = found.parameters + found.buffers + found.gradients + found.optimizer + found.eager
    assert found.compiled is None and found.total == pytest.approx(whole)


@pytest.mark.end_to_end
def test_compiled_is_what_the_partitioned_graphs_keep(no_kernels):
    model = Model(1)
    found = estimate(model, ids())
    assert found.compiled < found.eager
    latents = 10 * (14 + 10 + 4) * 4  # tokens, widths (the rope key lies beside its latent), float32
    assert estimate(model, ids(), options={"keep_latents": True}).compiled == found.compiled + latents
    megacpp_compile.compile(model, whole_below=0)
    assert found.compiled == pytest.approx(measured(model, ids()), rel=CLOSE)


def test_by_kind_of_block_and_its_parts():
    found = estimate(Model(4, dense=1), ids(), compiled=False)
    dense, experts, outside = found.activations
    assert (dense.module, dense.kind, dense.blocks) == ("layers.0", "Block", 1)
    assert (experts.module, experts.blocks) == ("layers.{1..3}", 3) and outside.module == "(outside the blocks)"
    assert dense.parts.keys() >= {"attention", "mlp"} and sum(dense.parts.values()) == dense.eager
    assert experts.parts["attention"] == 3 * dense.parts["attention"]
    assert experts.parts["mlp"] > 3 * dense.parts["mlp"]
    table = str(found)
    assert "layers.{1..3} ×3" in table and ".attention" in table and "total" in table


def test_state():
    model = Model(2, block=Small)
    model.head.weight = model.embed.weight  # tied: counted once
    model.layers[0].requires_grad_(False)
    everything = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for dtype, width in ((torch.float32, 4), (torch.bfloat16, 2)):
        found = estimate(model.to(dtype), ids(), compiled=False)
        want = width * everything, width * trainable, 8 * trainable
        assert (found.parameters, found.gradients, found.optimizer) == want
    if hasattr(torch.Tensor, "grad_dtype"):  # from torch 2.10 on
        for p in model.parameters():
            p.grad_dtype = torch.float32
        assert estimate(model, ids(), compiled=False).gradients == 4 * trainable
    for optimizer, width in (("adamw_master", 12), ("sgd", 0), (3.5, 3.5)):
        assert estimate(model, ids(), optimizer=optimizer, compiled=False).optimizer == int(width * trainable)


def test_a_model_on_meta():
    with torch.device("meta"):
        there = estimate(Model(2), ids().to("meta"), compiled=False)
    assert there == estimate(Model(2), ids(), compiled=False, device=there.device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there():
    """Autograd would abort the process."""
    with pytest.raises(TargetUnavailableError, match="CUDA"):
        estimate(Model(2, block=Small), ids(), compiled=False, device="cuda")


def test_autocast():
    model = Model(2, block=Small)
    wide = estimate(model, ids(), compiled=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = estimate(model, ids(), compiled=False)
        assert found.eager == pytest.approx(measured(model, ids()), rel=CLOSE)
    assert found.eager != wide.eager


def test_the_model_is_left_alone(no_kernels):
    model = megacpp_compile.compile(Model(4, block=Small))
    before = dict(model.named_parameters())
    calls = [m._compiled_call_impl for m in model.modules()]
    estimate(model, ids())
    assert all(p is before[name] for name, p in model.named_parameters())
    assert calls == [m._compiled_call_impl for m in model.modules()] and torch.isfinite(model(ids())).all()


def test_it_is_plain_data_with_blocks_and_without():
    found = estimate(Model(2, block=Small), ids(), compiled=False)
    again = json.loads(json.dumps(found.to_dict()))
    assert again["total"] == found.total and again["activations"][0]["module"] == "layers.{0..1}"
    found = estimate(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4), compiled=False)
    assert [a.module for a in found.activations] == ["(the model)"] and found.eager > 0


def test_errors():
    class Loop(Block):
        def forward(self, x):
            return x * (x > 0).sum().item()

    with pytest.raises(EstimateError, match="shapes alone"):
        estimate(Model(2, block=Loop), ids(), compiled=False)
    with pytest.raises(NotAModuleError):
        estimate(torch.sin, torch.ones(2))
    with pytest.raises(BadOptionError, match="Did you mean 'adamw'"):
        estimate(Model(2), ids(), optimizer="adam")


def build():
    """What the command line names."""
    return Model(2, block=Small), (ids(),)


def test_command_line(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "estimated", sys.modules[__name__])
    assert main(["estimate", "estimated:build", "--json", "--eager", "--optimizer", "sgd"]) == 0
    printed = json.loads(capsys.readouterr().out)
    model, args = build()
    assert printed["optimizer"] == 0 and printed["eager"] == estimate(model, *args, compiled=False).eager
    assert main(["estimate", "estimated:build", "--optimizer", "lion"]) == 2 and "lion" in capsys.readouterr().err


class Routed(nn.Module):
    """A layer of experts, whose rows are counted by values."""

    def __init__(self, body, **settings):
        super().__init__()
        self.norm, self.experts = nn.RMSNorm(experts.DIM), experts.MoE(body, **settings)

    def forward(self, x):
        return x + self.experts(self.norm(x))


def routed(body, **settings):
    return nn.Sequential(*(Routed(body, **settings) for _ in range(2))), torch.randn(experts.TOKENS, experts.DIM)


@pytest.mark.end_to_end
def test_a_loop_over_masks_and_grouped_gemms_in_eager():
    model, x = routed(experts_at_once.mask_any_choice)
    found = estimate(model, x, compiled=False)
    assert found.eager == pytest.approx(measured(model, x), rel=CLOSE)
    assert [a.module for a in found.activations] == ["{0..1}", "(outside the blocks)"]
    # The fake kernel of torch takes bfloat16 alone.
    model, x = routed(experts.sorted_grouped_gemms, stacked=True)
    assert estimate(model, x, compiled=False).eager == pytest.approx(measured(model, x), rel=CLOSE)


@pytest.mark.exhaustive
def test_a_loop_over_experts_that_fuses(no_kernels):
    """However the rows are shared out among the experts, there are as many of all of them together. Compiled, it is one
    op in any spelling."""
    model, x = routed(experts.one_hot_mask)
    found = estimate(model, x)
    assert found.eager == pytest.approx(measured(model, x), rel=CLOSE)
    assert estimate(model, x, compiled=False).eager == found.eager
    assert [a.module for a in found.activations] == ["{0..1}", "(outside the blocks)"]
    megacpp_compile.compile(model, whole_below=0)
    assert found.compiled == pytest.approx(measured(model, x), rel=CLOSE)


@pytest.mark.parametrize("a, b, groups", [((5, 8), (8, 5), 3), ((5, 8), (3, 8, 4), 3), ((3, 5, 8), (8, 6), 3),
                                          ((3, 5, 8), (3, 8, 4), None)])  # fmt: skip
def test_shapes_of_grouped_gemms(a, b, groups):
    """As torch's own fake kernel has them, of sizes that it takes."""
    a, b = (torch.empty([8 * n for n in s], dtype=torch.bfloat16, device="meta") for s in (a, b))
    offs = torch.empty(8 * groups, dtype=torch.int32, device="meta") if groups else None
    assert grouped_shape(a, b, offs) == tuple(torch._grouped_mm(a, b, offs=offs).shape)


def test_rows_that_a_mask_picks_are_at_most_all():
    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x[mask]).exp().sum()

    model, x = Masked(8, 16), torch.randn(6, 8)
    everything = measured(model, x, torch.ones(6, dtype=torch.bool))
    assert estimate(model, x, torch.rand(6) > 0.5, compiled=False).eager == pytest.approx(everything, rel=CLOSE)


def test_a_loop_over_experts_that_needs_data_is_told_what_explain_says():
    """What is counted in eager needs the data, also where the compiled loop does not."""
    model, x = routed(experts.skipping_idle_experts)
    advice = megacpp_compile.explain(model, x, options={"expert_loops": False}).misses[0].reason
    for ask in (estimate, pareto.points, functools.partial(megacpp_compile.fit, limit_gib=1.0)):
        with pytest.raises(EstimateError, match="if mask.any") as raised:
            ask(model, x)
        assert advice in str(raised.value) and "\n" not in str(raised.value)
