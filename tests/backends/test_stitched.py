"""Frames cut into pieces: numbers and gradients are those of one graph, whatever passes between the blocks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import megacpp_compile
from megacpp_compile import errors, record
from tests.backends.models import Layer as DownNormUp
from tests.frontend import test_repeated_blocks
from tests.frontend.test_repeated_blocks import Stack, ids
from tests.memory.layered import Model
from tests.memory.layered import ids as token_ids
from tests.remat.steps import without_code


class Layer(test_repeated_blocks.Layer):
    """Without what is called twice in a block, which is half of the work of tracing it."""

    def forward(self, x, table):
        return x + self.wide(self.second(x + self.mixed(x, table)))


def step(call, model, *args):
    """Outputs, gradients and buffers of one training step."""
    model.zero_grad()
    torch.manual_seed(5)
    out = call(*args)
    outputs = out if isinstance(out, tuple) else (out,)
    sum(o.float().square().mean() for o in outputs if o.requires_grad).backward()
    return [
        o.detach().clone() for o in (*outputs, *(p.grad for p in model.parameters()), *model.buffers()) if o is not None
    ]


def compiled(model, options=None, **settings):
    options = {"repeated_blocks": True, **(options or {})}
    return torch.compile(model, backend="megacpp", options=options, fullgraph=True, **settings)


def agrees(model, *args, steps=2, tolerance=1e-5, **settings):
    """The report of `model` beside eager, over `steps` steps."""
    eager = copy.deepcopy(model)
    with record() as report:
        call = compiled(model, **settings)
        for _ in range(steps):
            for a, b in zip(step(call, model, *args), step(eager, eager, *args), strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    return report


def blocks(report):
    return [(f.block, f.blocks) for f in report.frames if f.block]


def why_whole(report):
    (region,) = report.regions
    assert region.fqns == ("",)
    return region.reason


def test_layers_of_two_kinds(no_kernels):
    report = agrees(Model(7, dense=3), token_ids(), steps=1, tolerance=1e-4)
    assert blocks(report) == [("layers.0", 3), ("layers.3", 4)]
    assert report.counts["down_norm_up"] == 2 * 7 and report.counts["mla_rope_kv"] == 7
    assert [(r.fqns[0], len(r.fqns), r.reason) for r in report.regions] == [
        ("layers.0", 3, "compiled once, called 3 times"), ("layers.3", 4, "compiled once, called 4 times")]  # fmt: skip
    assert all(f.captured for f in report.frames)
    assert "layers.3, one of 4 equal blocks" in report.render(500)


def test_gradients_are_those_of_one_graph(no_kernels):
    model = Stack([Layer(i) for i in range(4)])
    whole, cut = copy.deepcopy(model), copy.deepcopy(model)
    one = step(compiled(whole, {"repeated_blocks": False}), whole, ids())
    for a, b in zip(step(compiled(cut), cut, ids()), one, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_each_block_has_its_own_weights_and_gradients(no_kernels):
    """Also of what is called twice in a block."""
    model = Stack([test_repeated_blocks.Layer(i) for i in range(5)])
    assert blocks(agrees(model, ids())) == [("layers.0", 5)]


class Dropping(Layer):
    def forward(self, x, table):
        return super().forward(x, table) + F.dropout(x, 0.5, self.training)


@pytest.mark.end_to_end
def test_each_call_of_a_block_draws_its_own_random_numbers():
    """Equal weights on equal inputs: with one mask for all, the blocks' results would be equal."""

    class Sides(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Dropping(i) for i in range(4))
            for layer in self.layers:
                layer.load_state_dict(self.layers[0].state_dict())

        def forward(self, x, table):
            return torch.stack([layer(x, table) for layer in self.layers])

    model = Sides()
    x, table = torch.ones(2, 5, 8, requires_grad=True), torch.ones(8)
    with record() as report:
        call = compiled(model)
        first, again = call(x, table), call(x, table)
    assert blocks(report) == [("layers.0", 4)]
    results = [*first.detach(), *again.detach()]
    assert all(not a.equal(b) for i, a in enumerate(results) for b in results[:i])
    first.sum().backward()
    plain = model.eval()(x.detach(), table)
    assert plain.shape == first.shape
    # The mask that forward drew is backward's: x's gradient is 2 or 0 beyond what the layers without dropout give.
    (own,) = torch.autograd.grad(model(y := x.detach().requires_grad_(), table).sum(), y)
    extra = (x.grad - own + 0.0).detach()
    kept = (first.detach() - plain + 1.0).sum(0) - 4  # plain has dropout's identity, 1, in it
    torch.testing.assert_close(extra + 4, kept + 4, rtol=1e-4, atol=1e-4)


class Checkpointed(Stack):
    def between(self, layer, x, table):
        return checkpoint(layer, x, table, use_reentrant=False)


def test_checkpoint_regions(no_kernels):
    assert blocks(agrees(Checkpointed([Layer(i) for i in range(5)]), ids())) == [("layers.0", 5)]


def test_checkpoint_regions_with_dropout():
    """Backward recomputes what forward drew: gradients are those that the outputs imply."""

    class Scaling(Layer):
        def forward(self, x, table):
            return F.dropout(x, 0.5) * self.first.weight + 0 * super().forward(x, table)

    torch.manual_seed(0)
    model = Checkpointed([Scaling(i) for i in range(4)])
    model.norm = nn.Identity()
    with without_code([]), record() as report:
        out = compiled(model)(ids())
        out.sum().backward()
    assert blocks(report) == [("layers.0", 4)]
    grads = [layer.first.weight.grad for layer in model.layers]
    for grad in grads:  # out = sum of squares, linear in each weight squared: d out/d w * w = 2 out
        torch.testing.assert_close((grad * 1.0).sum(), 2 * out.detach().sum(), rtol=1e-4, atol=1e-4)


class Collecting(Stack):
    """Returns what every layer made, and the table that all read."""

    def forward(self, ids):
        x = self.embed(ids)
        table = torch.arange(x.shape[-1], device=x.device).cos()
        seen = []
        for layer in self.layers:
            seen.append(x)
            x = layer(x, table)
        return (self.norm(x), *seen, table)


def test_outputs_of_blocks_are_outputs_of_the_frame(no_kernels):
    assert blocks(agrees(Collecting([Layer(i) for i in range(5)]), ids())) == [("layers.0", 5)]


def test_shared_values_that_ask_for_a_gradient(no_kernels):
    class Learned(Stack):
        def __init__(self, layers):
            super().__init__(layers)
            self.table = nn.Parameter(torch.randn(8))

        def forward(self, ids):
            x, table = self.embed(ids), self.table.tanh()
            for layer in self.layers:
                x = layer(x, table)
            return self.norm(x)

    assert blocks(agrees(Learned([Layer(i) for i in range(5)]), ids())) == [("layers.0", 5)]


def test_tied_weights(no_kernels):
    layers = [Layer(i) for i in range(4)]
    for layer in layers[1:]:
        layer.mlp = layers[0].mlp
    assert blocks(agrees(Stack([*layers, layers[1]]), ids())) == [("layers.0", 5)]


class Normed(Layer):
    def __init__(self, number):
        super().__init__(number)
        self.batch = nn.BatchNorm1d(8)

    def forward(self, x, table):
        return super().forward(self.batch(x.flatten(0, 1)).view_as(x), table)


class Counting(test_repeated_blocks.Layer):
    def __init__(self, number):
        super().__init__(number)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, table):
        self.calls.add_(1)
        return super().forward(x, table) * self.calls


@pytest.mark.parametrize("layer", [Normed, Counting])
def test_blocks_that_write_to_buffers(no_kernels, layer):
    report = agrees(Stack([layer(i) for i in range(4)]), ids(), tolerance=1e-4)
    assert "writes to what is made elsewhere" in why_whole(report)


def test_train_and_eval(no_kernels):
    model = Stack([Dropping(i) for i in range(4)])
    eager = copy.deepcopy(model).eval()
    call = compiled(model)
    step(call, model, ids())
    model.eval()
    for _ in range(2):
        torch.testing.assert_close(call(ids()), eager(ids()), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(call(ids()), eager(ids()), rtol=1e-5, atol=1e-5)


def test_autocast_around_the_frame(no_kernels):
    model = Stack([Layer(i) for i in range(4)])
    eager = copy.deepcopy(model)
    call = compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = call(ids()), eager(ids())
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(call(ids()), eager(ids()), rtol=1e-5, atol=1e-5)


@pytest.mark.end_to_end
@pytest.mark.sampled(2)  # sizes that change become such inputs, too
@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_are_inputs(no_kernels, dynamic):
    class Unscaled(Layer):
        def mixed(self, x, table):
            return torch.tanh(self.mlp(self.first(x)) * table).view(x.shape[0] * x.shape[1], -1).view_as(x)

    model = Stack([Unscaled(i) for i in range(5)])
    eager = copy.deepcopy(model)
    with record() as report:
        call = compiled(model, dynamic=dynamic)
        for length in (5, 7, 9):
            tokens = torch.arange(2 * length).remainder(11).view(2, length)
            for a, b in zip(step(call, model, tokens), step(eager, eager, tokens), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    # A size that several blocks read is computed by the first.
    assert blocks(report) == [*([("layers.0", 5)] if dynamic is None else []), ("layers.1", 4)]


def test_backward_twice_and_second_use_of_a_graph(no_kernels):
    model = Stack([Layer(i) for i in range(4)])
    call = compiled(model)
    out = call(ids()).sum()
    out.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    out.backward()
    for a, p in zip(once, [p for p in model.parameters() if p.grad is not None], strict=True):
        torch.testing.assert_close(2 * a, p.grad)


@pytest.mark.end_to_end
def test_rules_over_names_make_kinds(no_kernels):
    options = {"block_kinds": {"layers.2.mlp": "mblock"}, "policy": {"eblock": "full"}}
    report = agrees(Stack([Layer(i) for i in range(6)]), ids(), steps=1, options=options)
    assert blocks(report) == [("layers.0", 4)], "neither the third, nor the last, which recomputes nothing"
    (region,) = report.regions
    assert region.fqns == tuple(f"layers.{i}" for i in (0, 1, 3, 4))


@pytest.mark.end_to_end
def test_requirements_count_every_block(no_kernels):
    class Latent(Layer):
        def __init__(self, number):
            super().__init__(number)
            self.latent = DownNormUp(8, 6, 8)

        def forward(self, x, table):
            return super().forward(x, table) + self.latent(x)

    agrees(Stack([Latent(i) for i in range(4)]), ids(), steps=1, options={"require": {"down_norm_up": 4}})
    torch._dynamo.reset()
    for wanted in (3, 5):
        model = Stack([Latent(i) for i in range(4)])
        with pytest.raises(errors.RequirementError):
            step(compiled(model, {"require": {"down_norm_up": wanted}}), model, ids())
        torch._dynamo.reset()


def test_dropped_outputs(no_kernels):
    class Both(Stack):
        def forward(self, ids):
            logits = super().forward(ids)
            return F.cross_entropy(logits, ids[:, 0]), logits

    model = Both([Layer(i) for i in range(4)])
    with record() as report:
        loss, logits = compiled(model, {"drop_outputs": ("logits",)})(ids().remainder(5))
    loss.backward()
    with pytest.raises(errors.DroppedOutputError):
        logits.sum()
    assert blocks(report) == [("layers.0", 4)]


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("options", "why"),
    [({"verify": "each"}, "verify"), ({"policy": {"peak_gib": 4.0}}, "peak_gib")],
)
def test_options_about_the_whole_frame(no_kernels, options, why):
    model = Stack([Layer(i) for i in range(4)])
    assert why in why_whole(agrees(model, ids(), steps=1, tolerance=1e-4, options=options))


def test_few_blocks_are_one_graph(no_kernels):
    report = agrees(Stack([Layer(i) for i in range(3)]), ids(), steps=1)
    assert why_whole(report) == "as one: 3 blocks, fewer than 4" and len(report.frames) == 1


def test_results_laid_out_otherwise_than_in_eager(monkeypatch, eager_backend):
    """What a block returns in other strides than eager's is copied for what was compiled for eager's."""
    model = Stack([Layer(i) for i in range(4)])
    eager = copy.deepcopy(model)
    seen = []
    from torch._inductor import compile_fx

    def turned(gm, inputs, **_):
        strides = [x.stride() if isinstance(x, torch.Tensor) else None for x in inputs]

        def run(*args):
            seen.append([x.stride() if isinstance(x, torch.Tensor) else None for x in args] == strides)
            return tuple(o.transpose(0, 1).contiguous().transpose(0, 1) if o.dim() == 3 else o for o in gm(*args))

        return run

    monkeypatch.setattr(compile_fx, "compile_fx", turned)
    for a, b in zip(step(compiled(model), model, ids()), step(eager, eager, ids()), strict=True):
        torch.testing.assert_close(a, b)
    assert len(seen) > 4 and all(seen)


@pytest.mark.end_to_end
def test_inside_megacpp_compile(no_kernels):
    """Blocks that are compiled by themselves are not cut again, and a small model that is compiled whole may be."""
    model = Stack([Layer(i) for i in range(4)])
    eager = copy.deepcopy(model)
    with record() as report:
        megacpp_compile.compile(model, repeated_blocks=True)
        for a, b in zip(step(model, model, ids()), step(eager, eager, ids()), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert blocks(report) == [("layers.0", 4)]
