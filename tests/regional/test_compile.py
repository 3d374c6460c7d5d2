"""`megacpp_compile.compile`: which blocks are found, that blocks of a kind share one artifact, and what stays as it was."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn
from torch._inductor import compile_fx
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import megacpp_compile
from megacpp_compile import errors, record
from megacpp_compile.regional.repeated_blocks import find_kinds
from megacpp_compile.report.report import Report
from tests.memory.layered import MLP, Block, Model, Numbered, Small, ids
from tests.passes.experts import DIM, MoE, where_index_add
from tests.precision.models import Of


def step(model, x):
    model.zero_grad()
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


def agree(model, x):
    """`model`, compiled, beside a copy of it in eager."""
    eager = copy.deepcopy(model)
    for a, b in zip(step(model, x), step(eager, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def reported(model, x=None, **options):
    """The report of `model`, compiled and run beside a copy of it in eager."""
    with record() as report:
        megacpp_compile.compile(model, **options)
        agree(model, ids() if x is None else x)
    return report


# --- what is found


def fqns(model, patterns=None):
    return [list(kind.fqns) for kind in find_kinds(model, patterns)]


def stages():
    return nn.Sequential(nn.ModuleList([nn.Sequential(*(MLP(dim) for _ in range(2))) for dim in (8, 12)]))


def layers():
    return {str(i): MLP(8) for i in range(3)}


def in_a_sequential():
    return nn.Sequential(nn.Linear(8, 8), *(MLP(8) for _ in range(3)), nn.Sequential(nn.Tanh(), nn.Linear(8, 2)))


# Name -> (the model, kinds of blocks in it).
FOUND = {
    "layers of one structure": (lambda: Model(4), [[f"layers.{i}" for i in range(4)]]),
    # A single one too, and the experts in a block are part of it.
    "dense layers before experts": (lambda: Model(4, dense=1), [["layers.0"], [f"layers.{i}" for i in (1, 2, 3)]]),
    "in a Sequential": (in_a_sequential, [["1", "2", "3"]]),
    # As in torchtitan; beside an embedding, as in nanoGPT, they are found too.
    "in a dict": (lambda: nn.ModuleDict({"layers": nn.ModuleDict(layers())}), [[f"layers.{i}" for i in range(3)]]),
    "beside an embedding": (lambda: nn.ModuleDict({"wte": nn.Embedding(3, 8), **layers()}), [["0", "1", "2"]]),
    "stages of different widths": (stages, [["0.0.0", "0.0.1"], ["0.1.0", "0.1.1"]]),
    "linears repeat, but are no blocks": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), []),
    "two widths": (lambda: nn.ModuleList([MLP(8), MLP(12)]), []),
    "one layer twice in the list": (lambda: nn.Sequential(layer := MLP(8), layer, MLP(8)), [["0", "2"]]),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name):
    make, kinds = FOUND[name]
    assert fqns(make()) == kinds


def test_frozen_blocks_are_another_kind():
    model = Model(4)
    model.layers[:2].requires_grad_(False)
    assert fqns(model) == [["layers.0", "layers.1"], ["layers.2", "layers.3"]]


def test_blocks_by_name():
    model = Model(3, dense=1)
    assert fqns(model, ["layers.*.attention", "head"]) == [[f"layers.{i}.attention" for i in range(3)], ["head"]]
    assert fqns(model, ["layers.*", "layers.*.mlp"]) == fqns(model, ["layers.*"]), "a block inside a block is part of it"


# --- artifacts


@pytest.mark.end_to_end
def test_one_artifact_for_each_kind_with_names_of_the_model(no_kernels):
    model = nn.ModuleDict({"body": Model(6, dense=2)})
    with record() as report:
        assert megacpp_compile.compile(model) is model
        agree(model["body"], ids())
    assert [(f.block, f.blocks) for f in report.frames] == [("body.layers.0", 2), ("body.layers.2", 4)]
    assert all(f.captured and f.grad for f in report.frames)
    assert report.counts["down_norm_up"] == 2 * 2 and report.counts["mla_rope_kv"] == 2
    assert [s.fqn for s in report.sites] == [
        f"body.layers.{i}.attention{part}" for i in (0, 2) for part in (".q_b", ".kv_b", "", "")
    ]
    assert "body.layers.2, one of 4 equal blocks" in report.render(500)


def test_other_shapes_and_modes_are_artifacts_of_their_own(eager_backend):
    model = megacpp_compile.compile(Model(5, block=Small), dynamic=False)
    with record() as report:
        for x in (ids(), ids()[:1], ids()):
            model(x)
        with torch.no_grad():
            model(ids())
    assert [f.grad for f in report.frames] == [True, True, False]
    assert {f.block for f in report.frames} == {"layers.0"}


def test_layers_that_compute_with_a_number_of_their_own(eager_backend):
    """One artifact each, as Dynamo takes the number for a constant; none is left to eager, however many there are, where
    torch lets a call of `torch.compile` say so (2.9 does not)."""
    report = reported(Model(10, block=Numbered))
    own_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
    compiled = 10 if own_limit else torch._dynamo.config.recompile_limit
    left = [] if own_limit else [""]  # what is left to eager has a row
    assert [f.block for f in report.frames] == [f"layers.{i}" for i in range(compiled)] + left


def test_a_graph_break_inside_a_block(eager_backend):
    class Broken(Block):
        def forward(self, x):
            x = x + self.attention(x)
            torch._dynamo.graph_break()
            return x + self.mlp(x)

    report = reported(Model(4, block=Broken))
    assert [f.block for f in report.frames] == ["layers.0"] * 2
    assert report.sites[0].fqn == "layers.0.attention.q_b"


def test_blocks_of_one_class_and_two_widths_stay_static(eager_backend):
    narrow, wide = (nn.Sequential(*(MLP(dim) for _ in range(3))) for dim in (8, 12))
    two = Of(lambda m, x: m.wide(torch.cat((m.narrow(x), x[..., :4]), -1)), narrow=narrow, wide=wide)
    report = reported(two, torch.randn(5, 8, requires_grad=True))
    assert [(f.block, f.blocks) for f in report.frames] == [("narrow.0", 3), ("wide.0", 3)]


# --- what stays as it was


def test_names_classes_state_and_hooks_stay(eager_backend):
    model = Model(4, block=Small)
    before, called = list(model.state_dict()), []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: called.append(module.number))
    megacpp_compile.compile(model)
    assert type(model) is Model and type(model.layers[0]) is Small and list(model.state_dict()) == before
    with record() as report:
        model(ids())
    assert called == [0, 1, 2, 3] and len([f for f in report.frames if f.block]) == 1
    assert report.regions[0].fqns[0] == "layers.0", "a report that opens later knows them"


def test_sharded_by_fsdp2(eager_backend, one_rank):
    """Its parameters are other objects inside the forward than outside of it."""
    model, plain = Model(4), Model(4)
    for layer in model.layers:
        fully_shard(layer, mesh=one_rank)
    fully_shard(model, mesh=one_rank)
    with record() as report:
        megacpp_compile.compile(model)
        got = model(ids())
        got.sum().backward()
    torch.testing.assert_close(got, plain(ids()))
    assert [f.block for f in report.frames] == ["layers.0"] and report.counts["down_norm_up"] == 2
    assert type(model.layers[0].mlp.up.weight.grad).__name__ == "DTensor"


def test_checkpointed_by_the_model(eager_backend):
    """As transformers' gradient checkpointing does it: around blocks that know nothing of it."""
    class Checkpointed(Model):
        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(self.norm(x))

    assert {f.block for f in reported(Checkpointed(4, block=Small)).frames} == {"layers.0"}


def test_loops_over_experts_are_traced_as_for_the_backend_by_name(eager_backend):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = MoE(where_index_add)

        def forward(self, x):
            return x + self.moe(x)

    with record() as report:
        megacpp_compile.compile(nn.Sequential(*(Layer() for _ in range(4))))(torch.randn(11, DIM, requires_grad=True))
    assert [(f.block, f.passes["moe"]) for f in report.frames] == [("0", 1)]
    assert report.sites[0].fqn == "0.moe"


def test_torchs_own_layers(eager_backend):
    """Dynamo skips frames of torch's own code, and would compile nothing here."""
    layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(4)]
    report = reported(nn.Sequential(*layers), torch.randn(2, 3, 8, requires_grad=True))
    assert [(f.block, f.blocks) for f in report.frames] == [("0", 4)]


# --- whole models, and what lies outside of blocks


@pytest.mark.parametrize(
    "count, options, reason",
    [(2, {}, "2 blocks, fewer than 4"), (1, {}, "no block repeats"), (6, {"whole_below": 7}, "6 blocks, fewer than 7")],
)
def test_small_models_are_compiled_whole(eager_backend, count, options, reason):
    report = reported(Model(count, block=Small), **options)
    (region,) = report.regions
    assert region.fqns == ("",) and region.reason == reason
    assert [f.block for f in report.frames] == [""] and reason in str(report)


def test_a_model_whose_blocks_are_the_least_of_it(eager_backend):
    model = nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))), nn.Sequential(*(MLP(4) for _ in range(4))))
    with record() as report:
        megacpp_compile.compile(model)(torch.randn(2, 4))
    assert len(report.frames) == 1
    assert report.regions[0].reason == "repeated blocks hold 8 of 28 layers with parameters"


def test_what_is_outside_is_reported(eager_backend):
    with record() as report:
        megacpp_compile.compile(Model(5, dense=1))
    rows = {r.fqns: (r.module, r.treatment) for r in report.regions}
    assert rows == {
        ("layers.0",): ("Block", "compiled"), tuple(f"layers.{i}" for i in range(1, 5)): ("Block", "compiled"),
        ("embed",): ("Embedding", "eager"), ("norm",): ("RMSNorm", "eager"), ("head",): ("Linear", "eager"),
    }
    assert sum(r.parameters for r in report.regions) == sum(p.numel() for p in Model(5, dense=1).parameters())
    assert "layers.{1..4} ×4" in str(report)
    assert Report.from_json(report.to_json()) == report


def test_the_rest_compiled(eager_backend):
    with record() as report:
        model = megacpp_compile.compile(Model(4, block=Small), rest="compile")
        model(ids())
    treated = {r.fqns[0]: r.treatment for r in report.regions}
    assert treated == {"layers.0": "compiled", "embed": "eager", "norm": "compiled", "head": "eager"}
    assert [f.block for f in report.frames] == ["layers.0", "norm"]


# --- options and errors


def test_options_reach_the_passes(eager_backend):
    with record() as report:
        megacpp_compile.compile(Model(4), options={"disable": ("mla_rope_q",)}, require={"mla_rope_kv": 4})(ids())
    assert report.counts["mla_rope_kv"] == 1 and report.counts.get("mla_rope_q", 0) == 0


def test_mode_and_options_together(monkeypatch):
    patches = []
    told = lambda gm, i, config_patches=None, **_: patches.append(config_patches) or gm.forward  # noqa: E731
    monkeypatch.setattr(compile_fx, "compile_fx", told)
    more = {"mode": "max-autotune-no-cudagraphs", "inductor": {"epilogue_fusion": False}}
    megacpp_compile.compile(Model(4, block=Small), **more)(ids())
    assert patches[0]["max_autotune"] is True and patches[0]["epilogue_fusion"] is False


def test_errors():
    model = Model(4)
    with pytest.raises(errors.NotAModuleError, match="function"):
        megacpp_compile.compile(lambda x: x)
    with pytest.raises(errors.UnknownOptionError, match="'disable'"):
        megacpp_compile.compile(model, disabel="rope_qk")
    with pytest.raises(errors.BadOptionError, match="strict"):
        megacpp_compile.compile(model, options={"strict": True}, strict=False)
    with pytest.raises(errors.BadOptionError, match="rest"):
        megacpp_compile.compile(model, rest="inductor")
    for wrong in ("layer.*", "model.layers.*"):
        with pytest.raises(errors.BlockNotFoundError, match=r"Close to it: 'layers\.\*'"):
            megacpp_compile.compile(model, blocks=wrong)
    with pytest.raises(errors.BlockNotFoundError, match="Modules: embed, layers, layers.0,"):
        megacpp_compile.compile(model, blocks="zzz")
    assert all(m._compiled_call_impl is None for m in model.modules()), "an error leaves the model as it was"
    megacpp_compile.compile(model)
    with pytest.raises(errors.AlreadyCompiledError, match="layers.0"):
        megacpp_compile.compile(model)
    with pytest.raises(errors.AlreadyCompiledError, match="the model"):
        megacpp_compile.compile(torch.compile(Model(4), backend="eager"))
