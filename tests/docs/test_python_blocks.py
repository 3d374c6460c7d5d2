"""Blocks of Python on the pages run as they are printed, on a model that has what they name."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megacpp_compile
from benchmarks import models
from tests.docs.commands import PAGES, ROOT
from tests.trainers.test_torchtitan import registries

COOKBOOK = "docs/cookbook.md"
# torchtitan's program asks for a GPU. In its place: what its 0.3 does with each block, in a program of the same name.
TITAN_TRAIN = """
import torch
from tests.docs.test_python_blocks import Model

model = Model()
for _, transformer_block in model.layers.named_children():
    transformer_block.compile(backend="inductor", fullgraph=True)
model(torch.randn(2, 16, 32)).sum().backward()
assert all(p.grad is not None for p in model.parameters())
"""


def blocks(*pages: Path) -> list[Any]:
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
        for page in pages
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M), start=1)
    ]


FIRST = [ROOT / "README.md", ROOT / COOKBOOK]
# Run by a test of their own, which compares what they print.
ELSEWHERE = {"docs/first_report.md-1": "tests/test_readme.py"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = models.MLA(32, 2, 24, 16, 16, 8, 16), nn.Module()
        self.mlp.gate, self.mlp.up, self.mlp.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x, cos, sin):
        x = x + self.attention(x, cos, sin)
        return x + self.mlp.down(nn.functional.silu(self.mlp.gate(x)) * self.mlp.up(x))


class Model(nn.Module):
    """What a page's `model` stands for: it takes `x` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        for name, table in zip(("cos", "sin"), models.rotary_tables(16, 8, torch.device("cpu"), torch.float32), strict=True):
            self.register_buffer(name, table)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x


def imported(block: str) -> set[str]:
    """The packages that a block imports."""
    nodes = [*ast.walk(ast.parse(block))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


@pytest.mark.end_to_end
@pytest.mark.parametrize("block", blocks(*FIRST))
def test_a_block_of_the_first_pages_runs(block, request, tmp_path, monkeypatch, no_kernels):
    needs = imported(block)
    if "torchtitan" in needs:
        (package := tmp_path / "torchtitan").mkdir()
        (package / "__init__.py").touch()
        (package / "train.py").write_text(TITAN_TRAIN)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "torchtitan", raising=False)
    for name in needs - {"torch", "megacpp_compile"}:
        pytest.importorskip(name)
    names = runs(block, request.node.callspec.id, tmp_path, monkeypatch)
    if "torchtitan" in needs:
        assert sys.modules.pop("torchtitan").__path__ == [str(package)]
        assert names["report"].counts["down_norm_up"] == 4 and all(frame.captured for frame in names["report"].frames)


@pytest.mark.end_to_end
@pytest.mark.sampled(6)
@pytest.mark.parametrize("block", blocks(*(page for page in PAGES if page not in FIRST)))
def test_a_block_runs(block, request, tmp_path, monkeypatch, no_kernels):
    registry = registries(monkeypatch, default=list) if "integrations.torchtitan" in block else None
    runs(block, request.node.callspec.id, tmp_path, monkeypatch)
    assert registry is None or registry.PASS_PIPELINE_REGISTRY.keys() == registry.POST_INIT_HOOKS.keys() == {"megacpp"}


def runs(block, place, tmp_path, monkeypatch):
    """Run a block; the names that it leaves."""
    if place in ELSEWHERE:
        assert "first_report.md" in (ROOT / ELSEWHERE[place]).read_text()
        return {}
    torch._dynamo.reset()
    monkeypatch.chdir(tmp_path)  # some write files
    x = torch.randn(2, 16, 32, requires_grad=True)
    names = {"torch": torch, "megacpp_compile": megacpp_compile, "model": (model := Model()), "x": x, "inputs": (x,)}
    names["step"] = lambda: model(x).sum().backward()
    with megacpp_compile.record() as report:
        exec(compile(block, place, "exec"), names)
        model.zero_grad()
        if "compiled" in names:
            names["compiled"](x).sum().backward()
    if "compiled" in names:
        # All fires, and a step is eager's.
        assert all(frame.captured for frame in report.frames) and report.counts["down_norm_up"] == 4
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).sum().backward()
        torch.testing.assert_close(got, [p.grad for p in model.parameters()])
    return names
