"""Options of a compilation that show in what a model keeps for its backward, and in the GEMMs it runs."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from torch import Tensor, fx, nn

from megacpp_compile import pipeline, targets
from megacpp_compile.backends import _lower
from tests.corpus.spellings import PlainMLA

BATCH, SEQ, DIM, Q_LORA, KV_LORA, ROPE = 2, 7, 24, 14, 10, 4


def kept_shapes(options: dict[str, bool]) -> tuple[Counter[tuple[int, ...]], dict[str, Tensor]]:
    """Shapes of all that one compiled forward saves, by the buffer they keep alive; and the gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = PlainMLA(DIM, heads=2, q_lora=Q_LORA, kv_lora=KV_LORA, nope=6, rope=ROPE, v=5, table_source="buffer")
    x = torch.randn(BATCH, SEQ, DIM, requires_grad=True)
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers(), x)}
    kept: dict[int, tuple[int, ...]] = {}
    alive = []

    def pack(t: Tensor) -> Tensor:
        alive.append(t)
        at = t.untyped_storage()
        if at.data_ptr() not in own and at.nbytes():
            kept[at.data_ptr()] = (at.nbytes() // t.element_size() // (BATCH * SEQ), t.shape[-1])
        return t

    compiled = torch.compile(model, backend="megacpp", options=options, fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = compiled(x)
    out.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    return Counter(kept.values()), gradients


@pytest.mark.end_to_end
@pytest.mark.usefixtures("no_kernels")
def test_keep_latents():
    """Two latents more are saved, each in its down-projection's own buffer, and nothing else changes."""
    without, gradients = kept_shapes({})
    with_latents, same = kept_shapes({"keep_latents": True})
    widths = Counter({(Q_LORA, Q_LORA): 1, (KV_LORA + ROPE, KV_LORA): 1})
    assert with_latents - without == widths and not without - with_latents
    torch.testing.assert_close(gradients, same)


@pytest.fixture
def gemms(monkeypatch):
    """The number of GEMMs in each lowered graph, for a CPU whose GEMMs are taken for cuBLAS's."""
    found: list[int] = []
    lower, cublas = _lower.LowerSemanticOps.run, dataclasses.replace(targets.CPU, cublas=True)

    def run(self: _lower.LowerSemanticOps, graph: fx.Graph) -> None:
        lower(self, graph)
        found.append(len(graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)))

    monkeypatch.setattr(_lower.LowerSemanticOps, "run", run)
    monkeypatch.setattr(pipeline, "resolve_target", lambda *_: cublas)
    return found


@pytest.mark.end_to_end
@pytest.mark.usefixtures("no_kernels")
def test_fuse_shared_input_gemms(gemms):
    """In MLA one GEMM less in forward, for the two down-projections of the input, and two less in backward: the
    gradients of their weights, and the two parts of the input's gradient."""
    results = [kept_shapes({"fuse_shared_input_gemms": fuse, "autotune_gemms": False})[1] for fuse in (False, True)]
    assert [a - b for a, b in zip(gemms[:2], gemms[2:], strict=True)] == [1, 2]
    torch.testing.assert_close(*results)


class TwoDowns(nn.Module):
    """Two down-projections of one input with biases, or too wide, beside an idiom that fires."""

    def __init__(self, bias: bool, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, width, bias=bias), nn.Linear(8, width, bias=bias)
        self.norm, self.up = nn.RMSNorm(width), nn.Linear(width, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(self.a(x))) + self.b(x)[..., :4]


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(("bias", "width"), [(False, 2049), (True, 16)], ids=["wide", "biases"])
def test_shared_inputs_that_stay_by_themselves(gemms, bias, width):
    model, x, counts = TwoDowns(bias, width), torch.randn(3, 8), []
    for fuse in (False, True):
        torch._dynamo.reset()
        gemms.clear()
        options = {"fuse_shared_input_gemms": fuse, "autotune_gemms": False, "require": {"down_norm_up": 1}}
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(model, backend="megacpp", options=options)(x), model(x))
        counts.append(list(gemms))
    assert counts[0] == counts[1] != []
