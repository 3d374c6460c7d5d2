"""A launch of a Gluon kernel that is like one before goes to what that one was compiled to, and no other does. What a
graph will launch is compiled ahead."""

from __future__ import annotations

import contextlib
import functools
import threading
import types

import pytest
import torch
from torch._subclasses import FakeTensorMode

triton = pytest.importorskip("triton")
gluon = pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from megacpp_compile.backends.static_launch import compile_ahead  # noqa: E402
from megacpp_compile.lowerings._kernels import gluon_launch, grouped, hopper_grouped, kept_tensors  # noqa: E402
from megacpp_compile.lowerings._kernels.trace_options import compiling_ahead  # noqa: E402


class Kernel(triton.JITFunction):
    """Compiles and launches nothing, and tells what it was asked for."""

    arg_names = ("rows", "flags", "count", "scale", "WIDTH")
    params = tuple(types.SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in arg_names)

    def __init__(self):
        self.compiled, self.launched, self.warmed, self.ready = [], [], [], threading.Event()

    def warmup(self, *args, grid, **options):
        assert self.ready.wait(60)
        self.warmed.append((args, options))

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
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(gluon_launch, "_compiled", {})
    monkeypatch.setattr(gluon_launch, "_begun", {})
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    return Kernel()


def arguments(**change):
    t = torch.zeros(64, 128, dtype=torch.bfloat16)
    layout = gluon_launch.tile_layout((64, 128), torch.bfloat16)
    tile = gluon_launch.Tile(t, [64, 128], [128, 1], [64, 128], layout)
    return {"rows": tile, "flags": torch.zeros(64), "count": 3, "scale": 0.5, "WIDTH": 128, "num_warps": 4, **change}


def test_a_launch_like_one_before(launched):
    """Tensors and floats may be others, and numbers that Triton does not tell apart. The compiled kernel takes its
    arguments in order, and a grid of three."""
    first, second = arguments(), arguments(scale=0.25, count=5)
    gluon_launch.launch(launched, (5,), **first)
    gluon_launch.launch(launched, (7, 2), **second)
    ((grid, given),) = launched.compiled
    assert grid == (5,) and isinstance(given["rows"], gluon.TensorDescriptor) and given["rows"].base is first["rows"].base
    ((grid, args),) = launched.launched
    assert grid == (7, 2, 1)
    assert [arg is second[name] for arg, name in zip(args, Kernel.arg_names, strict=True)] == [True] * 5


class TestPastTriton:
    """The second launch of a kernel calls what Triton has compiled for it in C."""

    @pytest.fixture
    def direct(self, launched, monkeypatch):
        """The calls, of a kernel with a tile. What a listener hears goes through Triton."""
        calls, listeners = [], []
        active = types.SimpleNamespace(
            get_current_stream=lambda device: 77,
            utils=types.SimpleNamespace(fill_tma_descriptor=lambda *how: ("tile", *how)))
        monkeypatch.setattr(triton.runtime, "driver", types.SimpleNamespace(active=active))
        monkeypatch.setattr("triton.backends.nvidia.driver.TMA_DTYPE_DEVICE_TO_HOST", {8: 10})
        monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", listeners)

        def launcher(*given):
            calls.append(given)

        def inner(*given):
            return launcher(*given)

        meta = {"swizzle": 3, "elem_size": 2, "elem_type": 8, "block_size": [64, 128], "fp4_padded": False}
        compiled = Compiled(launched.launched)
        compiled.function, compiled.packed_metadata = 55, (4, 1, 0)
        compiled.metadata = types.SimpleNamespace(tensordesc_meta=[meta])
        compiled.run = types.SimpleNamespace(launch=inner, global_scratch_size=0, profile_scratch_size=0,
                                             launch_cooperative_grid=False, launch_pdl=False)
        monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: lambda **args: compiled)
        return types.SimpleNamespace(calls=calls, listeners=listeners, compiled=compiled)

    def test_what_it_is_given(self, launched, direct):
        first, second = arguments(), arguments(scale=0.25, count=5)
        for given in (first, second):
            gluon_launch.launch(launched, (7, 2), **given)
        tile, flags = second["rows"], second["flags"]
        described = ("tile", tile.base.data_ptr(), 3, 2, 10, [64, 128], [64, 128], [128, 1], False)
        ((*how, stream, function, cooperative, pdl, scratch, profile, packed, metadata, enter, leave), args) = (
            direct.calls[0][:13], direct.calls[0][13:])  # fmt: skip
        assert (how, stream, function, packed) == ([7, 2, 1], 77, 55, (4, 1, 0)) and not (cooperative or pdl)
        assert {scratch, profile, metadata, enter, leave} == {None}
        assert args == (described, 64, 128, 128, 1, flags.data_ptr(), 5, 0.25, None)
        assert len(direct.calls) == 1 and not launched.launched

    def test_with_a_listener(self, launched, direct):
        gluon_launch.launch(launched, (1,), **arguments())
        direct.listeners.append(print)
        gluon_launch.launch(launched, (1,), **arguments())
        assert len(launched.launched) == 1 and not direct.calls

    @pytest.mark.parametrize("change", ["scratch", "another launcher"])
    def test_a_launcher_that_does_more(self, launched, direct, change):
        if change == "scratch":
            direct.compiled.run.global_scratch_size = 128
        else:
            direct.compiled.run.launch = direct.calls.append  # no closure over Triton's
        for _ in range(2):
            gluon_launch.launch(launched, (1,), **arguments())
        assert len(launched.launched) == 1 and not direct.calls


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_launched_again_on_a_gpu():
    """Weights and rows elsewhere, and other numbers of rows, than at the first launch: as eager's."""
    if hopper_grouped.kernels.missing or not hopper_grouped.on_hopper(torch.device("cuda")):
        pytest.skip("the kernels are for Hopper")
    for rows in (16384, 16384, 8192 + 24):
        x, gates, ups = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 16
                         for shape in ((rows, WIDE), (EXPERTS, WIDE, WIDE), (EXPERTS, WIDE, WIDE)))
        ends = torch.tensor([rows * (i + 1) // EXPERTS for i in range(EXPERTS)], device="cuda", dtype=torch.int32)
        gate, up, _ = grouped.gated(x, [gates], [ups], ends, None, "silu")
        for weights, seen in ((gates, gate), (ups, up)):
            parts = x.double().tensor_split(ends[:-1].tolist())
            wanted = torch.cat([part @ w.double().T for part, w in zip(parts, weights, strict=True)])
            assert (seen - wanted).norm() <= 3e-3 * wanted.norm()
    direct = [found[1] for found in gluon_launch._compiled.values()]
    assert direct and None not in direct


@pytest.mark.parametrize("change",
                         [{"count": 1}, {"count": 32}, {"count": 1 << 31}, {"WIDTH": 64}, {"num_warps": 8}, {"flags": torch.zeros(64, dtype=torch.int32)},
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
    for width in (1, 2, 3, 3):
        gluon_launch.launch(launched, (1,), **arguments(WIDTH=width))
    assert len(launched.compiled) == 3 and len(launched.launched) == 1 and len(gluon_launch._compiled) == 1


@pytest.mark.skipif(bool(hopper_grouped.kernels.missing), reason="a Triton without these kernels of Gluon")
def test_weights_that_lie_alike_elsewhere():
    """As FSDP gathers them in each step: how they lie to each other is on the device already."""
    buffer = torch.zeros(4, 2, 64, 64, dtype=torch.bfloat16)
    first, second = (hopper_grouped._lying([buffer[i], buffer[i + 2]]) for i in (0, 1))
    assert second.places is first.places and first.places.tolist() == [0, 1, 4, 5] and first.shape == [6, 64, 64]
    assert second.base.data_ptr() == buffer[1].data_ptr()


class TestAhead:
    def test_a_launch_waits_for_its_kernel(self, launched):
        """Calls that a kernel is compiled for alike begin one job, of what `warmup` takes in the place of tensors."""
        with compiling_ahead():
            for given in (arguments(), arguments(scale=0.25)):
                gluon_launch.launch(launched, (5,), **given)
        assert not launched.compiled and len(gluon_launch._begun) == 1
        threading.Timer(0.05, launched.ready.set).start()
        gluon_launch.launch(launched, (5,), **arguments())
        (((rows, flags, count, scale, width), options),) = launched.warmed
        assert (flags, count, scale, width, options) == (torch.float32, 3, 0.5, 128, {"num_warps": 4})
        assert isinstance(rows, gluon.TensorDescriptor) and rows.base.dtype == torch.bfloat16
        assert len(launched.compiled) == 1, "it is Triton that finds what is compiled"

    def test_a_job_that_failed(self, launched):
        launched.warmup = lambda *args, **options: 1 / 0
        with compiling_ahead():
            gluon_launch.launch(launched, (5,), **arguments())
        gluon_launch.launch(launched, (5,), **arguments())
        assert len(launched.compiled) == 1

    def test_begun_for_what_is_launched(self, launched, monkeypatch):
        """A view counts as aligned as its offset is, whether it is somewhere or not."""
        whole = torch.zeros(4096, dtype=torch.bfloat16)
        for view in (whole, whole[1:], whole[8:]):
            key, _ = gluon_launch._key(launched, {"rows": view, "count": 3})
            with compiling_ahead():
                assert gluon_launch._key(launched, {"rows": view, "count": 3})[0] == key

    def test_numbers_on_no_device(self):
        """What is kept for real calls is never a tensor without data."""
        made = functools.partial(kept_tensors.table, (3, 5), torch.int32, torch.device("cpu"))
        with FakeTensorMode(), compiling_ahead():
            assert made().shape == (2,)
        assert made().tolist() == [3, 5]


def test_kept_tables_are_bounded(monkeypatch):
    """Those behind them are as right, and for one call each."""
    monkeypatch.setattr(kept_tensors, "_tables", {})
    monkeypatch.setattr(kept_tensors, "MOST", 1)
    first, second = ([kept_tensors.table((n,), torch.int64, torch.device("cpu")) for _ in range(2)] for n in (3, 4))
    assert first[0] is first[1] and second[0] is not second[1]
    assert [t.tolist() for t in (*first, *second)] == [[3], [3], [4], [4]]


ROWS, WIDE, EXPERTS = 16384, 512, 4


def experts(layers=2):
    """A graph of the ops of experts, each layer with weights of its own, without results."""
    graph = torch.fx.Graph()

    def tensor(*shape, dtype=torch.bfloat16):
        node = graph.placeholder("t")
        node.meta["val"] = torch.empty(*shape, dtype=dtype, device="cuda")
        return node

    with FakeTensorMode():
        x, hidden, gates = tensor(ROWS, WIDE), tensor(ROWS, WIDE), tensor(ROWS, dtype=torch.float32)
        ends, take = tensor(EXPERTS, dtype=torch.int32), tensor(ROWS, dtype=torch.int64)
        for _ in range(layers):
            gate, up, down = ([tensor(WIDE, WIDE) for _ in range(EXPERTS)] for _ in range(3))
            graph.call_function(grouped.gated, (x, gate, up, ends, take, "silu"))
            graph.call_function(grouped.rows, ([hidden], down, ends, False))
            graph.call_function(grouped.gradients, (x, down, [hidden, hidden], gates, ends, take, "silu"))
            graph.call_function(grouped.weights, (x, hidden, ends, take, None))
            graph.call_function(grouped.sums, (hidden, ends))
    return graph


class TestCompileAhead:
    @pytest.fixture
    def begun(self, launched, monkeypatch):
        if hopper_grouped.kernels.missing:
            pytest.skip(hopper_grouped.kernels.missing)
        names = []
        monkeypatch.setattr(gluon_launch, "_begin", lambda kernel, grid, args: names.append(kernel.__name__))
        monkeypatch.setattr(hopper_grouped, "on_hopper", lambda device: True)
        monkeypatch.setattr(hopper_grouped, "multiprocessors", lambda device: 132)
        return names

    def test_experts(self, begun):
        """The kernels of one layer, without a tensor made on a device."""
        compile_ahead(experts())
        rows, weights = "grouped_rows_hopper", "grouped_weights_hopper"
        assert begun == [rows, rows, rows, "gated_gradients_of_rows", weights, "grouped_sums"]

    def test_an_op_that_fails_is_left(self, begun, monkeypatch, caplog):
        monkeypatch.setattr(hopper_grouped, "gated", lambda *args, **named: 1 / 0)
        with caplog.at_level("INFO", "megacpp_compile"):
            compile_ahead(experts(layers=1))
        assert len(begun) == 5 and "gated.default were not begun ahead: ZeroDivisionError" in caplog.text

    def test_one_compile_thread(self, begun, monkeypatch):
        """Whoever asks Inductor for one thread gets no others from us."""
        with torch._inductor.config.patch(compile_threads=1):
            compile_ahead(experts())
        assert not begun

    def test_symbols_are_not_guarded(self, begun):
        """Of a length that may change, the kernels for the one at hand are begun, and nothing is asked of it."""
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        env, graph = ShapeEnv(), torch.fx.Graph()
        mode = FakeTensorMode(shape_env=env)
        hidden, ends = graph.placeholder("hidden"), graph.placeholder("ends")
        (rows,) = mode.from_tensor(torch.empty(ROWS)).shape
        with mode:
            hidden.meta["val"] = torch.empty(rows, WIDE, dtype=torch.bfloat16, device="cuda")
            ends.meta["val"] = torch.empty(EXPERTS, dtype=torch.int32, device="cuda")
        graph.call_function(grouped.sums, (hidden, ends))
        assert isinstance(rows, torch.SymInt)
        before = len(env.guards)
        compile_ahead(graph)
        assert begun == ["grouped_sums"] and len(env.guards) == before
