"""Bytes kept for backward are counted at the sizes of the call, where all of them are known, and guard nothing."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import megacpp_compile
from megacpp_compile.frontend.capture import capture
from megacpp_compile.fx.differentiated import Differentiated
from megacpp_compile.fx.mode_states import mode_states
from megacpp_compile.fx.subgraph import between
from megacpp_compile.passes import _review
from megacpp_compile.report.saved_bytes import saved_bytes


def counted(function, *args, dynamic=True):
    """(bytes that `function` of `args` keeps, how many guards counting them added)."""
    found = {}

    def backend(gm, inputs):
        captured = capture(gm, inputs)
        graph = captured.gm.graph
        part = between(captured.gm, graph.find_nodes(op="placeholder"), list(graph.output_node().args[0]))
        env = captured.fake_mode.shape_env
        before = len(env.guards) if env else 0
        trained = Differentiated(graph, captured.trained, mode_states(graph))
        found["bytes"] = saved_bytes(part, captured.fake_mode, trained)
        found["guards"] = (len(env.guards) if env else 0) - before
        return gm.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    return found["bytes"], found["guards"]


def products(x, w):
    return ((x @ w).exp().reshape(x.shape[0] * 4, 2).tanh(),)


def leaves(*shapes):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("rows", [5, 0])
def test_symbolic_sizes_count_as_they_are(rows):
    args = leaves((rows, 4), (4, 8))
    static, _ = counted(products, *args, dynamic=False)
    assert counted(products, *args) == (static, 0) and static == 2 * 4 * 8 * rows


def test_a_tensor_that_several_read_counts_once():
    """An exponential keeps its result, and so do both products that read it: 5 rows of 8 numbers, as each product does."""
    given = leaves((5, 4), (4, 8), (8, 8), (8, 8))
    bytes_, _ = counted(lambda x, a, b, c: (torch.tanh((e := (x @ a).exp()) @ b + e @ c),), *given, dynamic=False)
    assert bytes_ == 2 * 5 * 8 * 4


def test_sizes_known_at_run_time_only_are_not_counted():
    bytes_, _ = counted(lambda x: (x[x[:, 0] > 0].exp(),), *leaves((5, 4)))
    assert bytes_ is None


def kept_by_eager(function, *args):
    """Bytes of the storages that autograd packs while `function` runs, those of its arguments aside."""
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        function(*args)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in packed}
    own = {a.untyped_storage().data_ptr() for a in args}
    return sum(size for at, size in storages.items() if at not in own)


def gated(x, gain, gate, up, down):
    normed = functional.rms_norm(x, gain.shape, gain)
    return (functional.silu(normed @ gate) * (normed @ up)) @ down


def rotated(x, w, cos, sin):
    a, b = (q := x @ w).chunk(2, -1)
    return q * cos + torch.cat((-b, a), -1) * sin


def partly_recorded(x, w, v):
    with torch.no_grad():
        routed = (x @ w).softmax(-1)
    return (x @ v).exp() * routed + routed.exp()


MODELS = {
    "linear": lambda x, w, v: (x @ w) @ v,
    "mlp": lambda x, w, v: functional.gelu(x @ w) @ v,
    "attention": lambda x, w, v: (((x @ w) @ (x @ v).mT).softmax(-1) @ x).tanh(),
    "detached": lambda x, w, v: (x @ w).detach().exp() * (x @ v).exp(),
    "views": lambda x, w, v: (x @ w).view(2, 3, 8).transpose(0, 1).exp().flatten(0, 1) @ v,
    "norm": lambda x, w, v: functional.layer_norm(x @ w, (8,)) @ v,
    "cast": lambda x, w, v: ((x @ w).bfloat16() @ v.bfloat16()).float().exp(),
    "type_as": lambda x, w, v: (x @ w).sigmoid().type_as(x.detach().exp()) @ v,
    "loss": lambda x, w, v: functional.cross_entropy((x @ w) @ v, torch.zeros(6, dtype=torch.long)),
    "checkpointed": lambda x, w, v: checkpoint(lambda x: (x @ w).exp().sin() @ v, x, use_reentrant=False).exp(),
    "partly recorded": partly_recorded,
    "rotated": lambda x, w, v: rotated(x, w, v[0].cos().detach(), v[1].sin().detach()),
    "gated": lambda x, w, v: gated(x, w[0], w, v, (w * 2).mT),
}  # fmt: skip


@pytest.mark.parametrize("trained", ["xwv", "wv", "v", "w", ""])
@pytest.mark.parametrize("name", MODELS)
def test_counted_is_what_eager_keeps(name, trained):
    """By parameter, under checkpoints and without gradients: what nothing is trained through is not kept."""
    args = torch.randn(6, 8), torch.randn(8, 8), torch.randn(8, 8)
    for letter, tensor in zip("xwv", args, strict=True):
        tensor.requires_grad_(letter in trained)
    function = MODELS[name]
    bytes_, _ = counted(lambda *a: (function(*a),), *args, dynamic=False)
    assert bytes_ == kept_by_eager(function, *args)


@pytest.mark.parametrize("trained", [True, False])
def test_a_selective_checkpoint_keeps_what_its_policy_saves(trained):
    """The results of both products, which torch's cache holds, and the exponential behind the region."""

    def saves(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def function(x, w, v):
        context = functools.partial(create_selective_checkpoint_contexts, saves)
        return (checkpoint(lambda x: (x @ w).sin() @ v, x, use_reentrant=False, context_fn=context).exp(),)

    args = [t.requires_grad_(trained) for t in leaves((6, 8), (8, 8), (8, 8))]
    assert counted(function, *args, dynamic=False)[0] == trained * 3 * 6 * 8 * 4


def stack_of(layers):
    """Of sites of two widths a layer."""
    parts = [[nn.Tanh(), nn.Linear(24, n, bias=False), nn.RMSNorm(n), nn.Linear(n, 24, bias=False)] for n in (10, 14) * layers]
    return nn.Sequential(*(module for part in parts for module in part)), torch.randn(2, 16, 24).requires_grad_()


@pytest.mark.end_to_end
@pytest.mark.usefixtures("no_kernels")
def test_equal_sites_are_counted_once(monkeypatch):
    runs = []
    monkeypatch.setattr(_review.saved_bytes, "saved_bytes", lambda *a: runs.append(a) or saved_bytes(*a))

    def saved(layers):
        runs.clear()
        model, x = stack_of(layers)
        torch._dynamo.reset()
        with megacpp_compile.record() as report:
            torch.compile(model, backend="megacpp")(x)
        return [(s.pass_name, s.saved_before, s.saved_after) for s in report.sites], len(runs)

    (one, once), (two, as_often) = saved(1), saved(2)
    assert sorted(two) == sorted(2 * one) and len({n for _, n, _ in one}) > 1 and once == as_often == 2 * len({*one})


def part_of(function, *args):
    """What computes the results of `function`, and the names of the nodes in it."""
    graph = torch.fx.symbolic_trace(function)
    part = between(graph, graph.graph.find_nodes(op="placeholder"), list(graph.graph.output_node().args[0]))
    return part.code(), {n.name for n in (*part.inputs, *part.calls)}


def test_a_part_is_told_by_what_it_computes():
    same, names = part_of(lambda x, y: (torch.mul(x.exp(), y),))
    renamed, others = part_of(lambda a, b: (torch.mul(a.exp(), b),))
    assert same == renamed and names != others
    different = {part_of(function)[0] for function in (
        lambda x, y: (torch.mul(y, x.exp()),), lambda x, y: (torch.mul(x.exp(), x),),
        lambda x, y: (torch.mul(x.sin(), y),), lambda x, y: (x.exp().mul(y),), lambda x, y: (x.exp().mul("%1"),),
        lambda x, y: (torch.mul(x.exp(), y), y), lambda x, y, z: (torch.mul(x.exp(), y),),
    )}
    assert len({same, *different}) == 8
