"""A Triton kernel is read once for all its calls that are alike, and what is read is what torch reads. It is compiled
from when its source is written."""

from __future__ import annotations

import inspect
import types

import pytest
import sympy
import torch

from megacpp_compile._torch._registry import find
from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile._torch.triton_kernels import kernels_begun_when_written, kernels_read_once

wrap = find("torch._higher_order_ops.triton_kernel_wrap")
NAME = next(name for name in ("identify_accessed_tensors", "identify_mutated_tensors") if hasattr(wrap, name))


@pytest.fixture
def asked(monkeypatch):
    """What torch was asked of, each time with a new answer."""
    calls = []

    def read(kernel, kwargs, *more):
        calls.append((kernel, kwargs, *more))
        return [len(calls)]

    monkeypatch.setattr(wrap, NAME, read)
    return calls


class Buffer:
    """As Inductor has a tensor."""

    def __init__(self, dtype):
        self.dtype = dtype

    def get_dtype(self):
        return self.dtype


def kernel():
    """Stands for one."""


def test_calls_that_are_alike_are_asked_about_once(asked):
    with FakeTensorMode():
        x, y = torch.empty(4), torch.empty(8, 8)
    before = getattr(wrap, NAME)
    with kernels_read_once():
        read = getattr(wrap, NAME)
        first = read(kernel, {"x": x, "rows": 4, "stride": sympy.Symbol("s0"), "K": torch.float32}, {})
        assert read(kernel, {"x": y, "rows": 4, "stride": sympy.Integer(7), "K": torch.float32}, {}) is first
        assert read(kernel, {"x": Buffer(torch.float32), "rows": 4, "stride": sympy.Symbol("s1"), "K": torch.float32}, {}) is first
    assert len(asked) == 1 and getattr(wrap, NAME) is before
    with kernels_read_once():
        assert getattr(wrap, NAME)(kernel, {"x": x, "rows": 4}, {}) != first  # nothing is kept from one to the next


@pytest.mark.parametrize(("other", "descriptors"), [
    ({"rows": 8}, {}), ({"rows": 4.0}, {}), ({"rows": True}, {}), ({"x": Buffer(torch.bfloat16)}, {}),
    ({"x": torch.ones(2)}, {}), ({"K": [1]}, {}), ({"more": None}, {}), ({}, {"x": "a descriptor"}),
])  # fmt: skip
def test_what_makes_another_kernel_of_it_is_asked_about_anew(asked, other, descriptors):
    """Each time where it is not known how torch takes it."""
    given = {"x": Buffer(torch.float32), "rows": 1}
    with kernels_read_once():
        read = getattr(wrap, NAME)
        read(kernel, given, {})
        for _ in range(2):
            read(kernel, given | other, descriptors)
        assert len(asked) == (3 if descriptors or not isinstance(other.get("x", Buffer(0)), Buffer) or "K" in other else 2)
        read(lambda: None, given, {})
    assert len(asked) in (3, 4)


def tuner(*configs):
    """As torch wraps a kernel whose warps a launch chooses."""
    return types.SimpleNamespace(fn=kernel, configs=[types.SimpleNamespace(kwargs=kwargs) for kwargs in configs])


def test_a_choice_of_warps_is_asked_about_once_and_one_of_constants_by_its_first(asked):
    given = {"x": Buffer(torch.float32), "rows": 1}
    with kernels_read_once():
        read = getattr(wrap, NAME)
        first = read(tuner({}), given, {})
        assert read(kernel, given, {}) is first and read(tuner({}), given, {}) is first
        other = read(tuner({"rows": 2}, {"rows": 1}), given, {})
        assert other != first and read(kernel, {**given, "rows": 2}, {}) is other
    assert len(asked) == 2


def test_errors_and_threads_that_leave_in_the_order_they_entered_leave_torch_as_it_was(asked):
    before = getattr(wrap, NAME)
    with pytest.raises(ZeroDivisionError), kernels_read_once():
        raise ZeroDivisionError
    assert getattr(wrap, NAME) is before
    one, other = kernels_read_once(), kernels_read_once()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    read = getattr(wrap, NAME)
    assert read(kernel, {"rows": 1}, {}) is read(kernel, {"rows": 1}, {}) and read is not before
    other.__exit__(None, None, None)
    assert getattr(wrap, NAME) is before


def test_inductor_asks_by_that_name():
    """When it makes a call of a kernel, not when it is imported."""
    from torch._inductor import ir

    assert NAME in inspect.getsource(ir.UserDefinedTritonKernel.__init__) and not hasattr(ir, NAME)


def test_a_kernel_of_ours_is_read_as_torch_reads_it(request):
    """On a machine without a GPU, for one that Triton can make code for."""
    triton = pytest.importorskip("triton")
    from megacpp_compile.lowerings._kernels.triton_delayed_cast import TILE, fp8_delayed_cast

    if not isinstance(fp8_delayed_cast, triton.JITFunction):
        pytest.skip("Triton's interpreter compiles nothing")
    request.getfixturevalue("hopper")

    def arguments(rows, transposed):
        with FakeTensorMode():
            x, out, columns = (torch.empty(rows, 64, dtype=d) for d in (torch.bfloat16, *[torch.float8_e4m3fn] * 2))
            numbers = {name: torch.empty(4) for name in ("largest", "scale", "seen")}
        sizes = {"rows": rows, "channels": 64, "stride": 64, "across": 1, "RB": TILE["RB"], "CB": TILE["CB"]}
        constants = {"MARGIN": 16.0, "SAMPLE": 32, "ROOM": 2.0, "ROWS": 1, "TRANSPOSED": transposed}
        constants["INTERPRETED"] = False
        return {"x": x, "out": out, "transposed": columns, **numbers, **sizes, **constants}

    cases = [(rows, transposed) for transposed in (0, 1) for rows in (64, 128, 64)]
    want = [getattr(wrap, NAME)(fp8_delayed_cast, arguments(*case), {}) for case in cases]
    with kernels_read_once():
        got = [getattr(wrap, NAME)(fp8_delayed_cast, arguments(*case), {}) for case in cases]
    assert got == want and got[0] is got[2] and got[3] is got[5] and got[0] is not got[1]
    assert got[0] != got[3], "transposed is written where it is asked for"


class TestKernelsBegunWhenWritten:
    """Inductor finds a kernel that is being compiled by its source, to the letter."""

    SOURCE = "\nimport triton\n   \n\t\n@triton_heuristics.user_autotune()\n@triton.jit\ndef scale(x):\n    \\'\\'\\'a line\\'\\'\\'\n\n    x\n"
    BODY = f"async_compile.triton('scale', '''{SOURCE}''', device_str='cuda')\n"

    @pytest.fixture
    def begun(self, monkeypatch):
        from torch._inductor.async_compile import AsyncCompile

        calls = []
        monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(lambda cls: True))
        monkeypatch.setattr(AsyncCompile, "triton", lambda self, *call, device_str="cuda": calls.append(call))
        return calls

    def written(self, body):
        """What Inductor's wrapper writes for a kernel, as the module that is loaded has it."""
        from torch._inductor.codegen.wrapper import PythonWrapperCodegen
        from torch._inductor.utils import IndentedBuffer

        class Wrapper:
            writeline = staticmethod(lambda line: None)

        PythonWrapperCodegen.define_kernel(Wrapper(), "scale_0", body, "# Original path: scale.py:1")
        header = IndentedBuffer()
        header.splice(PythonWrapperCodegen._format_kernel_definition("scale_0", body, "# Original path: scale.py:1"))
        return header.getvalue()

    def test_under_the_source_that_the_module_asks_for(self, begun):
        from torch._inductor.async_compile import AsyncCompile

        with kernels_begun_when_written():
            module = self.written(self.BODY)
        assert len(begun) == 1
        exec(module, {"async_compile": AsyncCompile()})
        assert begun[0] == begun[1] and begun[0][0] == "scale" and "'''a line'''" in begun[0][1]

    def test_nothing_is_begun_outside_without_workers_or_for_other_code(self, begun, monkeypatch):
        from torch._inductor.async_compile import AsyncCompile

        self.written(self.BODY)
        with kernels_begun_when_written():
            self.written("async_compile.cpp_pybinding(['float*'], r'''\nint main() {}\n''')\n")
            self.written(self.BODY.replace("user_autotune", "pointwise"))  # Inductor's own, which it has begun
            monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(lambda cls: False))
            self.written(self.BODY)
        assert not begun

    def test_what_fails_is_left_to_where_the_code_is_loaded(self, begun, caplog):
        with kernels_begun_when_written(), caplog.at_level("INFO"):
            assert "scale_0 = async_compile" in self.written("async_compile.triton('scale', '''\n@triton_heuristics.user_autotune(\n")
        assert not begun and "kernel scale_0 was not begun ahead: SyntaxError" in caplog.text
