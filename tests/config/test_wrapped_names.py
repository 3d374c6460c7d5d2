"""Rules and reports name modules as the user's model does, whatever wraps them or cuts the model in pieces."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import megacpp_compile
from megacpp_compile import PrecisionPlan, record
from megacpp_compile.config import rules
from megacpp_compile.config.options import Config
from megacpp_compile.errors import BlockKindError, RuleWithoutHitError
from megacpp_compile.fx.module_names import named_modules, named_parameters
from megacpp_compile.fx.provenance import local_path
from megacpp_compile.passes import linear

DIM, DTYPE = 32, torch.bfloat16


@pytest.fixture(autouse=True)
def float8(eager_backend, monkeypatch):
    monkeypatch.setattr(linear, "no_float8", lambda device: "")


@pytest.fixture
def buckets(group, monkeypatch):
    """DDP's buckets are smaller than a layer."""
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1)
    return {"bucket_cap_mb": 0.001}


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 64, bias=False), nn.Linear(64, DIM, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, broken=False):
        super().__init__()
        self.mlp, self.broken = FeedForward(), broken

    def forward(self, x):
        if self.broken:
            torch._dynamo.graph_break()
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, layers, **kwargs):
        super().__init__()
        self.layers = nn.ModuleList(Layer(**kwargs) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def model(layers=2, **kwargs):
    return Model(layers, **kwargs).to(DTYPE)


def x():
    return torch.randn(16, DIM, dtype=DTYPE)


def plan(*rules):
    return PrecisionPlan({**dict.fromkeys(rules, "fp8_current"), "*": "bf16"}, gate=False)


def in_float8(report):
    """Names of linears that the report says run in float8, and of the others."""
    rows = [row for frame in report.frames for row in frame.precision]
    return [[row["fqn"] for row in rows if (row["effective"] == "fp8_current") is asked] for asked in (True, False)]


def by_blocks(wrapped, *patterns, **options):
    with record() as report:
        megacpp_compile.compile(wrapped, precision=plan(*patterns), **options)(x().requires_grad_())
    return report


def as_one(wrapped, *patterns):
    with record() as report:
        torch.compile(wrapped, backend="megacpp", options={"precision": plan(*patterns)})(x())
    return report


def checkpointed(layers):
    wrapped = model(layers)
    for i, layer in enumerate(wrapped.layers):
        layer.mlp = checkpoint_wrapper(layer.mlp, CheckpointImpl.NO_REENTRANT)
        wrapped.layers[i] = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT)
    return wrapped


def compiled_inside(layers):
    wrapped = model(layers)
    wrapped.layers[1] = torch.compile(wrapped.layers[1], backend="eager")
    return wrapped


def around(forward):
    return lambda *args: forward(*args)


def replaced_forward(layers):
    """As torchtitan and accelerate put themselves around a module's forward."""
    wrapped = model(layers)
    for mlp in (layer.mlp for layer in wrapped.layers):
        mlp.forward = around(around(mlp.forward))
        mlp.up._old_forward = mlp.up.forward
        mlp.up.forward = functools.partial(lambda module, x: module._old_forward(x), mlp.up)
        mlp.down.forward = functools.partial(lambda forward, x: forward(x), mlp.down.forward)
    return wrapped


def test_a_path_has_none_of_what_wraps_and_all_that_is_the_user_s():
    path = "L['self']._modules['layers']._modules['0'].__dict__['_modules']['_checkpoint_wrapped_module']"
    assert local_path(path + "._modules['mlp']._orig_mod._parameters['weight']") == ("self", "layers.0.mlp.weight")
    assert local_path("L['self'].layers.0._fsdp_wrapped_module.mlp") == ("self", "layers.0.mlp")
    assert "module.0" in [name for name, _ in named_modules(nn.ModuleDict({"module": nn.Sequential(nn.Tanh())}))]


def test_model_and_frames_agree(buckets):
    names = [name for name, _ in named_modules(model())]
    replicated = nn.parallel.DistributedDataParallel(checkpointed(2))
    for wrapped in (checkpointed(2), compiled_inside(2), torch.compile(model()), replicated):
        assert list(dict.fromkeys(name for name, _ in named_modules(wrapped))) == names
        assert [n for n, _ in named_parameters(wrapped)] == [n for n, _ in model().named_parameters()]
        assert set(rules.modules_with_weights(wrapped)) == {n.rpartition(".")[0] for n, _ in model().named_parameters()}


@pytest.mark.parametrize("wrap", [checkpointed, compiled_inside, replaced_forward])
def test_an_exact_rule_behind_a_wrapper(wrap):
    """Regression: the model hit it or the frame did, never both, and nobody said so."""
    fp8, others = in_float8(as_one(wrap(2), "layers.1.mlp.up"))
    assert fp8 == ["layers.1.mlp.up"] and others == ["layers.0.mlp.up", "layers.0.mlp.down", "layers.1.mlp.down"]


def test_a_line_that_hands_on_its_arguments_is_no_source():
    """Regression: every linear of torchtitan's was said to be at the line that wraps it, and near misses were one row."""

    def handing_on(forward):
        def handed(*args, **kwargs):
            return forward(*args, **kwargs)

        return handed

    wrapped = model(1)
    for linear_ in (wrapped.layers[0].mlp.up, wrapped.layers[0].mlp.down):
        linear_.forward = handing_on(linear_.forward)
    rows = [row for frame in as_one(wrapped, "*.up").frames for row in frame.precision]
    assert {row["fqn"] for row in rows} == {"layers.0.mlp.up", "layers.0.mlp.down"}
    assert all("return self.down(F.silu(self.up(x)))" in row["source"] for row in rows)


def test_an_exact_rule_for_a_block_behind_a_wrapper():
    report = by_blocks(checkpointed(4), "layers.1.mlp.up", blocks="layers.*")
    assert in_float8(report)[0] == ["layers.1.mlp.up"]
    assert [(f.block, f.blocks) for f in report.frames] == [("layers.0", 3), ("layers.1", 1)]
    assert not any("_checkpoint" in str(part) for part in report.to_dict().values())


def test_a_rule_without_a_hit_behind_a_wrapper_is_told():
    options = {"precision": {"layers.0._checkpoint_wrapped_module.mlp.up": "bf16"}}
    for compile in (
        lambda m: megacpp_compile.compile(m, options=options),
        lambda m: megacpp_compile.explain(m, x(), options=options),
        lambda m: torch.compile(m, backend="megacpp", options=options)(x()),
    ):
        with pytest.raises(Exception, match="hits no module with a weight.* Did you mean 'layers.0.mlp.up'") as caught:
            compile(checkpointed(4))
        assert isinstance(getattr(caught.value, "inner_exception", caught.value), RuleWithoutHitError)
    with pytest.raises(BlockKindError, match="layers.0.mlp"):
        rules.check_model(checkpointed(2), Config(block_kinds={"layers.0._checkpoint_wrapped_module.mlp": "eblock"}))
    with pytest.raises(RuleWithoutHitError, match="sharding"):
        rules.check_model(model(), Config(sharding={"mesh": {"model": 1}, "rules": {"*.mlp.upp.weight": None}}))


def test_a_rule_whose_module_a_block_does_not_know_is_told(monkeypatch, caplog):
    """A model that is checked is no proof that a frame knows the name."""
    monkeypatch.setattr(megacpp_compile.regional.backend, "_name_absolutely", lambda *_: None)
    by_blocks(model(4), "layers.0.mlp.up")
    assert "'layers.0.mlp.up' has no effect on layers.0.mlp.up" in caplog.text


@pytest.mark.end_to_end
def test_a_bucket_of_ddp_keeps_the_names(buckets, caplog):
    """Regression: a rule that is about another bucket was told to hit nothing."""
    report = as_one(nn.parallel.DistributedDataParallel(model(), **buckets), "layers.1.mlp.up")
    assert in_float8(report)[0] == ["layers.1.mlp.up"] and len(report.frames) > 2
    assert "hits no module" not in caplog.text and "'layers.1.mlp.up' has no effect" not in caplog.text
    with pytest.raises(Exception, match="'layers.7.mlp.up' hits no module"):
        as_one(nn.parallel.DistributedDataParallel(model(), **buckets), "layers.7.mlp.up")


def test_blocks_under_ddp_keep_the_names_of_the_model(buckets, caplog):
    """Regression: they were looked up by the identity of parameters, which are fakes there, so that rules fell to roles
    without a word."""
    compiled = megacpp_compile.compile(model(4), precision=plan("layers.1.mlp.up"))
    with record() as report:
        nn.parallel.DistributedDataParallel(compiled, **buckets)(x().requires_grad_())
    fp8, others = in_float8(report)
    assert fp8 == ["layers.1.mlp.up"] and {"layers.0.mlp.up", "layers.1.mlp.down"} <= set(others)
    assert {f.block for f in report.frames} == {"layers.0", "layers.1"}
    assert "the pattern" not in caplog.text  # a rule that misses its module is told so


def sharded(layers):
    wrapped, mesh = model(layers), init_device_mesh("cpu", (1,))
    for layer in wrapped.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(wrapped, mesh=mesh)


def test_frames_between_the_hooks_of_fsdp2_and_what_they_count(group, caplog):
    """Regression: no graph break is counted there, and a rule by the model's names was an error."""
    as_one(sharded(2), "layers.1.mlp.up")
    assert "'layers.1.mlp.up' has no effect on layers.1.mlp.up" in caplog.text and "as one of mlp, mlp.up" in caplog.text
    assert in_float8(as_one(sharded(2), "*.mlp.up", "mlp.up"))[0] == ["mlp.up", "mlp.up"]
    with pytest.raises(Exception, match="'layers.7.mlp.up' hits no module"):
        as_one(sharded(2), "layers.7.mlp.up")
    options = {"precision": plan("*.up"), "require": {"linear": 2}}
    torch.compile(sharded(2), backend="megacpp", options=options)(x())


def test_blocks_under_fsdp(group, recwarn):
    assert in_float8(by_blocks(sharded(4), "layers.1.mlp.up"))[0] == ["layers.1.mlp.up"]
    wrapped = model(4)
    for i, layer in enumerate(wrapped.layers):
        wrapped.layers[i] = FullyShardedDataParallel(layer, use_orig_params=True, device_id=torch.device("cpu"))
    report = by_blocks(wrapped, "layers.1.mlp.up")
    assert in_float8(report)[0] == ["layers.1.mlp.up"]
    assert not any("_fsdp" in str(part) for part in report.to_dict().values())
