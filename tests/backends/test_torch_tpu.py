"""The way to torch_tpu, with a stand-in for it: a Dynamo backend "tpu" that differentiates by itself as the real one does,
and CPU in the place of its device."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import megacpp_compile
from megacpp_compile import targets
from megacpp_compile.errors import TargetUnavailableError
from megacpp_compile.lowerings._registry import semantic_ops
from tests.corpus.spellings import PlainMLA, tables

SIZES = {"heads": 2, "q_lora": 14, "kv_lora": 10, "nope": 6, "rope": 4, "v": 5}
TOLERANCE = 1e-5


@pytest.fixture
def tpu(monkeypatch):
    """The graphs that torch_tpu's compiler was given, and the options of each call of its backend."""
    given, options = [], []

    def stand_in(gm, example_inputs, **kwargs):
        options.append(kwargs)
        assert torch._dynamo.config.assume_static_by_default, "torch_tpu refuses dynamic=True"

        def compiler(graph, inputs):
            assert not any(n.target in semantic_ops() for n in graph.graph.nodes), "left without a lowering"
            given.append(graph)
            return graph.forward

        # Boxed by AOTAutograd itself.
        return aot_autograd(
            fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=False,
        )(gm, example_inputs)  # fmt: skip

    monkeypatch.setitem(registry._COMPILER_FNS, "tpu", stand_in)
    monkeypatch.setitem(registry._BACKENDS, "tpu", None)
    device = targets.Device("cpu", "torch_tpu", "torch_tpu", ("sdpa", "plain"), dynamic=False)
    here = dataclasses.replace(targets.TPU, devices=(device,))
    monkeypatch.setattr(targets, "TPU", here)
    monkeypatch.setitem(targets.TARGETS, "tpu", here)
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: name == "torch_tpu" or None)
    return given, options


def made():
    torch.manual_seed(0)
    block, x = PlainMLA(24, **SIZES), torch.randn(2, 5, 24)
    return block, x, tables(block.rope.table, 5, 4)


def differences(call, block, x, angles) -> list[float]:
    """Of the result and all gradients from those of eager."""
    plain = copy.deepcopy(block)
    grad = torch.randn_like(x)
    found = []
    for function, module in ((plain, plain), (call, block)):
        leaf = x.detach().requires_grad_()
        out = function(leaf, *angles)
        out.backward(grad)
        found.append([out, leaf.grad, *(p.grad for p in module.parameters())])
    return [float((g - w).detach().abs().max() / w.detach().abs().max()) for w, g in zip(*found, strict=True)]


@pytest.mark.end_to_end
def test_both_halves_are_lowered_and_handed_over(tpu):
    given, options = tpu
    block, x, angles = made()
    with megacpp_compile.record() as report:
        call = torch.compile(block, backend="megacpp", options={"strict": True}, dynamic=False)
        assert max(differences(call, block, x, angles)) < TOLERANCE
    assert report.counts["down_norm_up"] == 2 and report.counts["mla_rope_q"] == report.counts["mla_rope_kv"] == 1
    assert [frame.target for frame in report.frames] == ["tpu"]
    assert {site.effective for site in report.sites} == {"tpu_xla"}
    assert len(given) == 2 and options == [{"options": {"serializable": False}}] * 2
    with torch.no_grad():  # and inference
        torch.testing.assert_close(call(x, *angles), block(x, *angles))
    assert len(given) == 3


@pytest.mark.end_to_end
def test_a_view_at_another_offset_is_compiled_anew(tpu):
    given, _ = tpu
    block, x, angles = made()
    call = torch.compile(block, backend="megacpp", options={"strict": True}, dynamic=False)
    both = torch.stack((x, 2 * x))
    with torch.no_grad():
        for i in range(2):
            torch.testing.assert_close(call(both[i], *angles), block(both[i], *angles))
            assert len(given) == i + 1
        call(both[1], *angles)
    assert len(given) == 2


@pytest.mark.end_to_end
def test_what_nothing_fires_in_and_sizes_that_are_not_known_are_left_to_torch_tpu(tpu):
    given, options = tpu
    module, x = torch.nn.Sequential(*(torch.nn.Linear(8, 8), torch.nn.GELU()) * 2), torch.randn(3, 8)
    torch.testing.assert_close(torch.compile(module, backend="megacpp", dynamic=False)(x), module(x))
    assert options == [{}] and len(given) >= 1
    options.clear()
    block, x, angles = made()
    torch._dynamo.mark_dynamic(x, 0)
    with megacpp_compile.record() as report, torch.no_grad():
        out = torch.compile(block, backend="megacpp")(x, *angles)
    torch.testing.assert_close(out, block(x, *angles))
    assert options == [{}] and not report.sites and "dynamic=False" in report.frames[0].reason


def test_blocks_are_compiled_with_static_shapes(tpu, monkeypatch):
    settings = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kwargs: settings.append(kwargs))
    megacpp_compile.compile(made()[0])
    assert settings[0]["dynamic"] is False


def test_without_its_backend_it_says_so(tpu, monkeypatch):
    for known in (registry._COMPILER_FNS, registry._BACKENDS):
        monkeypatch.delitem(known, "tpu")
    block, x, angles = made()
    with pytest.raises(TargetUnavailableError, match="Dynamo backend 'tpu'"):
        torch.compile(block, backend="megacpp", options={"strict": True}, dynamic=False)(x, *angles)
