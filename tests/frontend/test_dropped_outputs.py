"""`drop_outputs`: logits that a model returns beside its loss are not made in training, and say so when they are read."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megacpp_compile
from megacpp_compile.errors import BadOptionError, DroppedOutputError
from megacpp_compile.frontend.dropped_outputs import DroppedOutput

WORDS, DIM = 23, 12
DROP = {"drop_outputs": ("logits",), "strict": True}


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Model(nn.Module):
    """capped: the variable is assigned again, as in models with a softcap."""

    def __init__(self, capped: bool = False):
        super().__init__()
        self.body, self.head, self.capped = nn.Linear(DIM, DIM), nn.Linear(DIM, WORDS), capped

    def forward(self, x, labels=None):
        logits = self.head(self.body(x).tanh())
        if self.capped:
            logits = logits / 5.0
            logits = torch.tanh(logits)
            logits = logits * 5.0
        if labels is None:
            return Output(None, logits)
        return Output(F.cross_entropy(logits.float().view(-1, WORDS), labels.view(-1)), logits)


def arguments():
    return torch.randn(2, 6, DIM), torch.randint(0, WORDS, (2, 6))


def compiled(model, options=DROP):
    torch._dynamo.reset()
    return torch.compile(model, backend="megacpp", options=options)


@pytest.mark.parametrize("capped", [False, True])
def test_training(no_kernels, capped):
    model, args = Model(capped), arguments()
    eager = copy.deepcopy(model)
    with megacpp_compile.record() as report:
        out = compiled(model)(*args)
    out.loss.backward()
    want = eager(*args).loss
    want.backward()
    torch.testing.assert_close(out.loss, want)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert report.counts["linear_cross_entropy"] == 1 and not report.misses
    assert isinstance(out.logits, DroppedOutput)


@pytest.mark.parametrize("cast", [torch.Tensor.float, lambda t: t.to(torch.float32)], ids=["float", "to"])
def test_a_cast_for_the_caller(no_kernels, cast):
    """As accelerate makes one of each output under mixed precision."""

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Model().bfloat16()

        def forward(self, x, labels):
            out = self.inner(x, labels)
            return Output(cast(out.loss), cast(out.logits))

    x, labels = arguments()
    with megacpp_compile.record() as report:
        out = compiled(Cast())(x.bfloat16(), labels)
    out.loss.backward()
    assert report.counts["linear_cross_entropy"] == 1 and isinstance(out.logits, DroppedOutput)


def test_without_it_the_report_names_it(no_kernels):
    with megacpp_compile.record() as report:
        out = compiled(Model(), {})(*arguments())
    assert out.logits.shape == (2, 6, WORDS)
    (miss,) = report.misses
    assert miss.tag == "logits-kept" and "drop_outputs" in miss.reason


def test_explained():
    report = megacpp_compile.explain(Model(), *arguments(), options=DROP)
    assert report.counts["linear_cross_entropy"] == 1


def test_by_blocks(no_kernels):
    """A model that is compiled whole, being small."""
    torch._dynamo.reset()
    out = megacpp_compile.compile(Model(), options=DROP)(*arguments())
    assert isinstance(out.logits, DroppedOutput)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_evaluation_has_them(no_kernels, around):
    model, args = Model(), arguments()
    with around():
        out = compiled(model)(*args)
        torch.testing.assert_close(out.logits, model(*args).logits)


def test_they_stay_where_the_frame_has_no_loss(no_kernels):
    """A loss of the caller's own reads them."""
    model, (x, labels) = Model(), arguments()
    out = compiled(model)(x)
    F.cross_entropy(out.logits.flatten(0, 1), labels.flatten()).backward()
    assert model.head.weight.grad is not None


def test_other_names_stay(no_kernels, caplog):
    out = compiled(Model(), {"drop_outputs": ("loss", "hidden")})(*arguments())
    assert isinstance(out.logits, torch.Tensor) and isinstance(out.loss, torch.Tensor)
    (warning,) = [r.getMessage() for r in caplog.records if "drop_outputs" in r.getMessage()]
    assert "names 'hidden', 'loss'" in warning and "are 'logits'" in warning


@pytest.mark.parametrize("name", ["logit", "Logits"])
def test_a_misspelled_name_is_an_error(no_kernels, name):
    with pytest.raises(BadOptionError, match="drop_outputs: got .* Did you mean 'logits'"):
        compiled(Model(), {"drop_outputs": (name,)})(*arguments())


@pytest.mark.parametrize("use", [
    lambda t: t.argmax(-1), lambda t: t.shape, lambda t: t[0], lambda t: t + 1, lambda t: 1 - t, lambda t: -t, len,
    list, bool, torch.argmax, lambda t: F.softmax(t, -1), lambda t: torch.ones(3) * t,
])  # fmt: skip
def test_any_use_is_an_error(use):
    with pytest.raises(DroppedOutputError, match="'logits' is read.*drop_outputs"):
        use(DroppedOutput("logits"))


def test_what_trainers_do_to_every_output():
    dropped = DroppedOutput("logits")
    assert not isinstance(dropped, torch.Tensor) and not hasattr(dropped, "__wrapped__")
    assert not hasattr(dropped, "dtype"), "as accelerate asks before it casts outputs under mixed precision"
    assert "drop_outputs" in repr(dropped) and "logits" in repr(copy.deepcopy(dropped))
    assert "logits" in repr(pickle.loads(pickle.dumps(dropped)))
    assert torch.utils._pytree.tree_leaves({"logits": dropped}) == [dropped]
