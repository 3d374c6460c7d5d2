"""The head and its loss of a model that is compiled by blocks: one region where forward computes a loss, and told of
where it cannot be."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import megacpp_compile
from megacpp_compile import record
from megacpp_compile.regional.compile import uncompile
from tests.memory.layered import MLP, Small

NAME = "linear_cross_entropy"
WORDS, DIM = 23, 24


class Body(nn.Module):
    """Embedding, blocks and norm, as the models of transformers have them in a module."""

    def __init__(self, layers=4):
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Small(i, MLP(DIM)) for i in range(layers))
        self.norm = nn.RMSNorm(DIM)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return {"hidden": self.norm(x)}


def shifted(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class LM(nn.Module):
    """Its loss is a function that forward calls."""

    def __init__(self, layers=4, loss=shifted):
        super().__init__()
        self.body, self.head, self.loss = Body(layers), nn.Linear(DIM, WORDS, bias=False), loss

    def forward(self, ids, labels=None):
        logits = self.head(self.body(ids)["hidden"])
        return logits if labels is None else self.loss(logits, labels)


class Tied(LM):
    def forward(self, ids, labels=None):
        logits = F.linear(self.body(ids)["hidden"], self.body.embed.weight)
        return logits if labels is None else self.loss(logits, labels)


class Wrapped(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, labels=None):
        return self.model(ids, labels)


class ByItself(nn.Module):
    """Runs its blocks in its own forward, as nanoGPT does."""

    holder = nn.ModuleList

    def __init__(self):
        super().__init__()
        layers = self.holder([Small(i, MLP(DIM)) for i in range(4)])
        self.inner = nn.ModuleDict({"embed": nn.Embedding(WORDS, DIM), "layers": layers})
        self.head = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, ids, labels=None):
        x = self.inner.embed(ids)
        for layer in self.inner.layers:
            x = layer(x)
        logits = self.head(x)
        return logits if labels is None else shifted(logits, labels)


class InSequential(ByItself):
    """Goes around the forward of what holds its blocks."""

    @staticmethod
    def holder(layers):
        return nn.Sequential(*layers)


def ids(length=6):
    return torch.randint(0, WORDS, (2, length), generator=torch.Generator().manual_seed(length))


def step(model, length=6):
    model.zero_grad()
    loss = model(ids(length), ids(length))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def agree(model, eager, length=6):
    for a, b in zip(step(model, length), step(eager, length), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def reported(model, **options):
    """The report of `model`, compiled and run beside a copy of it in eager."""
    with record() as report:
        agree(*both(model, **options))
    return report


def both(model, **options):
    """(`model` compiled by blocks, a copy in eager)."""
    eager = copy.deepcopy(model)
    return megacpp_compile.compile(model, **options), eager


@pytest.mark.parametrize("kind", [LM, Tied, Wrapped], ids=lambda k: k.__name__)
def test_fires(no_kernels, kind):
    report = reported(Wrapped(LM()) if kind is Wrapped else kind())
    assert report.counts[NAME] == 1 and not report.misses
    inner = "model." if kind is Wrapped else ""
    assert [f.block for f in report.frames] == [f"{inner}body.layers.0", ""]
    (site,) = [s for s in report.sites if s.pass_name == NAME]
    assert site.fqn == ("" if kind is Tied else f"{inner}head")
    region = report.regions[-1]
    assert (region.fqns, region.module, region.treatment) == (("",), kind.__name__, "compiled")


@pytest.mark.end_to_end
def test_lengths_that_change(no_kernels):
    with record() as report:
        model, eager = both(LM())
        for length in (6, 9, 5, 12):
            agree(model, eager, length)
    assert report.counts[NAME] == 2 and not report.misses, "once static, once dynamic"


def test_without_labels_the_head_runs_in_eager(eager_backend):
    model, eager = both(LM())
    with record() as report:
        torch.testing.assert_close(got := model(ids()), eager(ids()))
        got.square().mean().backward()  # of a model without a loss
    assert [f.block for f in report.frames] == ["body.layers.0"] and not report.misses


def test_all_of_the_rest(eager_backend):
    report = reported(LM(), rest="compile")
    assert report.counts[NAME] == 1 and [f.block for f in report.frames] == ["body.layers.0", "body.norm", ""]


def test_required(eager_backend):
    """Counted in calls of the model."""
    assert reported(LM(), require={NAME: 1}).counts[NAME] == 1
    with pytest.raises(megacpp_compile.errors.MegacppError, match=NAME):
        step(both(LM(), require={NAME: 2})[0])


def test_disabled(eager_backend):
    report = reported(LM(), disable=(NAME,))
    assert [f.block for f in report.frames] == ["body.layers.0"] and len(report.regions) == 4


@pytest.mark.parametrize("kind", [ByItself, InSequential], ids=lambda k: k.__name__)
def test_a_model_that_runs_its_blocks_itself(eager_backend, kind):
    """Once, and of training alone."""
    with record() as report:
        model, eager = both(kind())
        model(ids())
        agree(model, eager)
        agree(model, eager)
    (miss,) = report.misses
    assert (miss.pass_name, miss.tag) == (NAME, "eager-loss")
    assert "a module of their own" in miss.reason and "whole_below" in miss.reason and kind.__name__ in miss.reason
    assert report.counts.get(NAME, 0) == 0


@torch.compiler.disable
def left_to_eager(logits, labels):
    return shifted(logits, labels)


def behind_a_break(logits, labels):
    torch._dynamo.graph_break()
    return shifted(logits, labels)


@pytest.mark.parametrize(
    ("loss", "tag", "said"),
    [(left_to_eager, "eager-loss", "TORCH_LOGS=graph_breaks"), (behind_a_break, "another-frame", "")],
)
def test_a_loss_in_another_frame_is_a_miss(no_kernels, loss, tag, said):
    report = reported(LM(loss=loss))
    assert [(m.pass_name, m.tag) for m in report.misses] == [(NAME, tag)] and said in report.misses[0].reason


def test_strict(no_kernels):
    """The graph breaks that keep blocks apart are meant."""
    agree(*both(LM(), strict=True))


def test_copies_and_pickles_run_in_eager(eager_backend):
    model = megacpp_compile.compile(LM())
    want = step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(m._compiled_call_impl is None for m in other.modules())
        torch.testing.assert_close(step(other), want)


def test_undone(eager_backend):
    model = LM()
    uncompile(megacpp_compile.compile(model))
    assert all(m._compiled_call_impl is None and not m._forward_pre_hooks for m in model.modules())
    megacpp_compile.compile(model)


def test_estimated():
    model = LM(loss=lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    args = torch.zeros(4, 512, dtype=torch.int64), torch.zeros(4, 512, dtype=torch.int64)
    outside = megacpp_compile.estimate(model, *args).activations[-1]
    logits = 4 * 4 * 512 * WORDS
    assert outside.eager - outside.compiled > logits / 2, "log-probabilities are kept in eager, gradients by the op"


@pytest.mark.end_to_end
def test_a_model_of_transformers(no_kernels):
    """Whose loss function is a plain one that forward calls, and whose logits are returned beside the loss."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    compiled, eager = both(transformers.LlamaForCausalLM(config), drop_outputs=("logits",))
    tokens = torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(6))
    with record() as report:
        losses = [m(input_ids=tokens, labels=tokens, use_cache=False).loss for m in (compiled, eager)]
        torch.autograd.backward(losses)
    torch.testing.assert_close(*losses)
    assert report.counts[NAME] == 1 and not report.misses
    for (name, p), q in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_sharded_by_fsdp2(no_kernels, one_rank):
    """The head's weight is another object inside the forward than outside of it."""
    model = LM()
    eager = copy.deepcopy(model)
    for layer in model.body.layers:
        fully_shard(layer, mesh=one_rank)
    fully_shard(model, mesh=one_rank)
    with record() as report:
        got = step(megacpp_compile.compile(model))
    for a, b in zip(got, step(eager), strict=True):
        torch.testing.assert_close(getattr(a, "_local_tensor", a), b, rtol=1e-4, atol=1e-6)
    assert report.counts[NAME] == 1 and not report.misses


def test_logits_that_are_returned(no_kernels):
    class Both(LM):
        def forward(self, ids, labels):
            logits = self.head(self.body(ids)["hidden"])
            return self.loss(logits, labels), logits

    with record() as report:
        megacpp_compile.compile(Both())(ids(), ids())
    assert [(m.pass_name, m.tag) for m in report.misses] == [(NAME, "logits-kept")]
    assert "drop_outputs" in report.misses[0].reason
