"""A launch of a Gluon kernel that is like one before goes to what that one was compiled to, and no other does."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
gluon = pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from megacpp_compile.lowerings._kernels import gluon_launch  # noqa: E402


class Kernel(triton.JITFunction):
    """Compiles and launches nothing, and tells what it was asked for."""

    arg_names = ("rows", "flags", "count", "scale", "WIDTH")

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def launch(**args):
            self.compiled.append((grid, args))
            return Compiled(self.launched)

        return launch


class Compiled:
    def __init__(self, launched):
        self.launched = launched

    def __getitem__(self, grid):
        return lambda *args: self.launched.append((grid, args))


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gluon_launch, "_compiled", {})
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    return Kernel()


def arguments(**change):
    t = torch.zeros(64, 128, dtype=torch.bfloat16)
    layout = gluon_launch.tile_layout((64, 128), torch.bfloat16)
    tile = gluon_launch.Tile(t, [64, 128], [128, 1], [64, 128], layout)
    return {"rows": tile, "flags": torch.zeros(64), "count": 3, "scale": 0.5, "WIDTH": 128, "num_warps": 4, **change}


def test_a_launch_like_one_before(launched):
    """Tensors and floats may be others. The compiled kernel takes its arguments in order, and a grid of three."""
    first, second = arguments(), arguments(scale=0.25)
    gluon_launch.launch(launched, (5,), **first)
    gluon_launch.launch(launched, (7, 2), **second)
    ((grid, given),) = launched.compiled
    assert grid == (5,) and isinstance(given["rows"], gluon.TensorDescriptor) and given["rows"].base is first["rows"].base
    ((grid, args),) = launched.launched
    assert grid == (7, 2, 1)
    assert [arg is second[name] for arg, name in zip(args, Kernel.arg_names, strict=True)] == [True] * 5


@pytest.mark.parametrize("change",
                         [{"count": 4}, {"WIDTH": 64}, {"num_warps": 8}, {"flags": torch.zeros(64, dtype=torch.int32)},
                          {"flags": torch.zeros(65)[1:]}, {"scale": None}], ids=lambda change: next(iter(change)))
def test_what_a_kernel_is_compiled_for(launched, change):
    for given in (arguments(), arguments(**change)):
        gluon_launch.launch(launched, (1,), **given)
    assert len(launched.compiled) == 2 and not launched.launched


def test_releases_that_nobody_has_looked_at(launched, monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    for _ in range(2):
        gluon_launch.launch(launched, (1,), **arguments())
    assert len(launched.compiled) == 2 and not launched.launched


def test_what_is_remembered_is_bounded(launched, monkeypatch):
    monkeypatch.setattr(gluon_launch, "MOST", 2)
    for count in (1, 2, 3, 3):
        gluon_launch.launch(launched, (1,), **arguments(count=count))
    assert len(launched.compiled) == 3 and len(launched.launched) == 1 and len(gluon_launch._compiled) == 1
