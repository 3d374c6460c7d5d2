"""Hugging Face's optimised paths in the hybrid model of the examples: wired as they are on a GPU, computed plainly."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Missing
from benchmarks.models import Scan
from benchmarks.peers import hugging_face

moe = pytest.importorskip("transformers.integrations.moe")


def mixer(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, *, activation, headdim, ngroups):
    """What `mamba_split_conv1d_scan_combined` of mamba_ssm computes without a norm and a projection."""
    assert activation == "silu"
    inner, mixed = D.numel() * headdim, conv1d_weight.shape[0]
    z, xBC, dt = zxbcdt.split([inner, mixed, D.numel()], -1)
    xBC = F.pad(xBC.transpose(1, 2), (conv1d_weight.shape[-1] - 1, 0))
    xBC = F.silu(F.conv1d(xBC, conv1d_weight[:, None], conv1d_bias, groups=mixed)).transpose(1, 2)
    x, B, C = xBC.split([inner, (mixed - inner) // 2, (mixed - inner) // 2], -1)
    x, B, C = x.unflatten(-1, (-1, headdim)), B.unflatten(-1, (ngroups, -1)), C.unflatten(-1, (ngroups, -1))
    y = Scan(chunk_size)(x, F.softplus(dt + dt_bias), A, B, C) + D[:, None] * x
    return y.flatten(-2) * F.silu(z)


def norm(x, weight, bias, *, eps):
    return F.rms_norm(x, weight.shape, weight, eps)


@pytest.fixture
def hybrid_lm(monkeypatch):
    kernels = hugging_face.Kernels(mixer, norm, moe.grouped_mm_experts_forward)
    monkeypatch.setattr(hugging_face, "kernels", lambda: kernels)
    return importlib.import_module("benchmarks.hybrid_lm")


def gradients(model) -> dict[str, Tensor]:
    """By the plain model's names, those of its experts stacked as the peer holds them."""
    grads = {name.replace(".plain.", "."): p.grad for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        if hasattr(module, "experts"):
            gates, ups, downs = (
                [grads.pop(f"{name}.experts.{i}.{part}_proj.weight") for i in range(len(module.experts))]
                for part in ("gate", "up", "down")
            )
            grads[f"{name}.gate_up_proj"] = torch.cat((torch.stack(gates), torch.stack(ups)), 1)
            grads[f"{name}.down_proj"] = torch.stack(downs)
    return grads


def test_it_is_the_same_model(hybrid_lm):
    import plain_hybrid  # a script, which `hybrid_lm` finds

    torch.manual_seed(0)
    plain = plain_hybrid.HybridLM(plain_hybrid.TINY)
    wired = hybrid_lm.MODELS["hugging_face"](copy.deepcopy(plain))
    m, e, a = hugging_face.Mixer, hugging_face.Experts, plain_hybrid.Attention
    assert [type(layer.block) for layer in wired.layers] == [m, e, m, a, e, m]
    tokens, targets = torch.randint(0, 256, (2, 2, 64))
    losses = [F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) for model in (plain, wired)]
    torch.autograd.backward(losses)
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    want, got = gradients(plain), gradients(wired)
    assert got.keys() == want.keys()
    for name, grad in want.items():
        assert grad.norm() > 0, name
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-4 * grad.abs().max().item(), msg=name)


def test_it_trains_beside_the_plain_model(hybrid_lm, monkeypatch, capsys):
    monkeypatch.setattr(hybrid_lm.train_hybrid, "standard_library_text", lambda: torch.randint(0, 256, (4096,)).byte())
    arguments = "--device cpu --steps 3 --batch 1 --length 32 --no-plot --backends eager hugging_face+eager"
    monkeypatch.setattr("sys.argv", ["hybrid_lm", *arguments.split()])
    assert hybrid_lm.main() == 0
    printed = capsys.readouterr().out
    assert "hugging_face+eager" in printed and "stopped" not in printed and "OK: the loss curves agree" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_its_packages_there_is_a_reason():
    with pytest.raises(Missing, match="CUDA"):
        hugging_face.kernels()
