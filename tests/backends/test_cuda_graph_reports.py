"""What the report says of CUDA graphs: what Inductor decided, read off the code it made; on CPU that there are none."""

from __future__ import annotations

import types

import pytest
import torch
from torch import fx

import megacpp_compile
from megacpp_compile._torch.inductor import CudaGraphDecision, decision_on_cuda_graphs
from megacpp_compile.backends import cuda_graphs
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.lowerings._traits import declared, traits_of
from megacpp_compile.remat import offload
from megacpp_compile.report.records import Frame
from megacpp_compile.report.report import Report
from tests.backends.models import Layer


@pytest.mark.parametrize(
    "asked", [{"mode": "reduce-overhead"}, {"options": {"inductor": {"triton.cudagraphs": True}}}], ids=["mode", "options"]
)
def test_on_cpu_there_are_none(asked, no_kernels):
    model, x = Layer(8, 6, 8), torch.randn(4, 8)
    with megacpp_compile.record() as report:
        got = torch.compile(model, backend="megacpp", **asked)(x)
    torch.testing.assert_close(got, model(x))
    (frame,) = report.frames
    assert frame.cuda_graph == "not captured: cpu" and frame.passes["down_norm_up"] == 1
    assert "CUDA graphs: not captured: cpu" in str(report)
    assert Report.from_json(report.to_json()).frames[0].cuda_graph == frame.cuda_graph
    torch._dynamo.reset()
    with megacpp_compile.record() as report:  # where nobody asks
        torch.compile(model, backend="megacpp")(x)
    assert report.frames[0].cuda_graph == "" and "CUDA graphs" not in str(report)


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("fires", [True, False], ids=["rewritten", "as it came"])
def test_inductor_s_own_reason(monkeypatch, fires):
    """Its code is asked on CPU as it is on CUDA, for a frame of our ops and for one that is Inductor's alone."""
    monkeypatch.setattr(cuda_graphs, "is_for_cuda", lambda inputs: True)
    settings = {"triton.cudagraphs": True, "graph_partition": False, "fx_graph_cache": False}
    options = {"inductor": settings, "disable": () if fires else ("down_norm_up",)}
    cache = torch._functorch.config.patch(enable_autograd_cache=False)
    with megacpp_compile.record() as report, torch.no_grad(), cache:
        torch.compile(Layer(8, 6, 8), backend="megacpp", options=options)(torch.randn(4, 8))
    (frame,) = report.frames
    assert frame.passes.get("down_norm_up", 0) == fires
    assert frame.cuda_graph.startswith("not captured: cpu device ("), frame.cuda_graph


class Box:
    """As Inductor's `BoxedBool`."""

    def __init__(self, value):
        self.value = value

    def __bool__(self):
        return self.value


def code(**fields):
    usual = {"cudagraph_info": None, "disabled_cudagraphs_reason": None, "mutated_input_idxs": (), "partition_maps": None}
    return types.SimpleNamespace(**usual | fields)


def info(*reasons):
    return types.SimpleNamespace(cudagraph_fail_reasons=list(reasons))


@pytest.mark.parametrize(
    ("made", "given", "want"),
    [
        (code(), {"cudagraphs": Box(True)}, CudaGraphDecision(True)),
        (code(partition_maps=[1, 2]), {"cudagraphs": Box(True)}, CudaGraphDecision(True, 2)),
        (code(mutated_input_idxs={0, 3, 4}), {"cudagraphs": Box(True), "static_input_idxs": (3,)},
         CudaGraphDecision(True, writes=2)),
        (code(disabled_cudagraphs_reason="skipping cudagraphs due to cpu device (x). Found from : \n  File"),
         {"cudagraphs": Box(False)}, CudaGraphDecision(False, reason="cpu device (x)")),
        (code(disabled_cudagraphs_reason="disabling cudagraphs due to incompatible op aten.nonzero"),
         {"cudagraphs": Box(False)}, CudaGraphDecision(False, reason="incompatible op aten.nonzero")),
        (code(cudagraph_info=info("non-Tensor inputs", "mutated inputs")), {"cudagraphs": Box(False)},
         CudaGraphDecision(False, reason="non-Tensor inputs, mutated inputs")),
        (code(), {"cudagraphs": Box(False)}, CudaGraphDecision(False)),
        (lambda: None, {"cudagraphs": Box(True)}, CudaGraphDecision(False, reason="it is no code of Inductor's")),
    ],
)  # fmt: skip
def test_what_inductor_decided(made, given, want):
    assert decision_on_cuda_graphs(made, given) == want


def told(graph, *codes):
    """What a frame's report ends with, of the code of each of its graphs."""
    frame, made = Frame(), iter(codes)
    watched = cuda_graphs.Watched(lambda *_, **__: next(made)[0], lambda text: setattr(frame, "cuda_graph", text))
    for i, (_, given) in enumerate(codes):
        watched(types.SimpleNamespace(graph=graph), [], is_backward=i > 0, **given)
    return frame.cuda_graph


def graph_of(*targets):
    graph = fx.Graph()
    node = graph.placeholder("x")
    for target in targets:
        node = graph.call_function(target, (node,))
    graph.output(node)
    return graph


def test_what_is_told():
    yes, no = {"cudagraphs": Box(True)}, {"cudagraphs": Box(False)}
    plain = graph_of(torch.ops.aten.sin.default)
    assert told(plain, (code(), yes)) == told(plain, (code(), yes), (code(), yes)) == "captured"
    assert told(plain, (code(partition_maps=[1, 2]), yes)) == "captured in 2 parts"
    assert told(plain, (code(), no)) == "not captured: Inductor does not say why"
    assert told(plain, (code(), yes), (code(disabled_cudagraphs_reason="a"), no)) == (
        "forward captured; backward not captured: a"
    )
    assert "mark_static_address" in told(plain, (code(mutated_input_idxs={1}), yes))
    offloading = graph_of(torch.ops.megacpp.offload.default)
    assert told(offloading, (code(), yes)) == (
        "captured, without megacpp::offload (the host hands out pinned memory while it runs)"
    )


def test_what_is_declared_has_torch_s_tag():
    """The one is for the report, the other for Inductor."""
    ops = [*semantic_ops(), torch.ops.megacpp.offload.default, torch.ops.megacpp.reload.default]
    for op in ops:
        assert bool(traits_of(op).uncapturable) == (torch.Tag.cudagraph_unsafe in op.tags), op
    assert [str(op) for op in ops if traits_of(op).uncapturable] == ["megacpp.offload.default", "megacpp.reload.default"]
    assert offload.UNSAFE == (torch.Tag.cudagraph_unsafe,) and declared()
