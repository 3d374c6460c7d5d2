"""Half-precision GEMMs by the fastest of cuBLASLt's own candidates.

`torch.mm` takes the first kernel cuBLASLt's heuristic names. The heuristic ranks without running; for `x @ w.T` a later
candidate is often 10 % faster. Here each shape's candidates are timed once, beside torch's own, when a graph with it
is compiled or else on the first call, and the fastest serves from then on, if what it computes there is torch's to the
last bit; other processes find it beside torch's caches (`kept_choices.py`), and look at the bits again. Not under
`torch.use_deterministic_algorithms`.

The C API is called through ctypes on the libcublasLt that torch itself has loaded; numbers are from cublasLt.h
(https://docs.nvidia.com/cuda/cublas/, section "cuBLASLt Data Types Reference").
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from ctypes import byref, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from megacpp_compile._torch.dispatch import disable_current_modes
from megacpp_compile._torch.functorch import temporarily_clear_interpreter_stack
from megacpp_compile.lowerings._gemm import kept_choices
from megacpp_compile.lowerings._gemm.operands import Operand
from megacpp_compile.lowerings._kernels.kept_tensors import kept
from megacpp_compile.report import stages
from megacpp_compile.report.pieces import SEARCH

log = logging.getLogger(__name__)

DATA_TYPE = {torch.float16: 2, torch.bfloat16: 14}
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68
_TRANSPOSE_A, _TRANSPOSE_B = 3, 4
_MAX_WORKSPACE, _REDUCTION_SCHEMES, _ALIGNMENT_A = 1, 3, 5
_SUM_IN_COMPUTE_TYPE = 2
_WORKSPACE = 32 << 20
_CANDIDATES = 16
_ROUNDS, _FIRST_ROUNDS = 8, 2
# The same for GEMMs of at least so many ms, whose times scatter by less: a search of Cohere's takes seconds.
_LONG, _ROUNDS_OF_LONG, _FIRST_OF_LONG = 0.3, 4, 1
_TORCHS = -1  # the place of torch's own choice among the candidates
# Candidates this far behind after the first rounds are dropped.
_BEHIND = 1.1
# A candidate serves where it takes at most this part of the time of torch's choice, and saves more, in ms, than a call
# from here costs beyond one from Inductor's code.
_WORTH, _LEAST = 0.97, 0.010
# Bytes to which operands have to be aligned, as memory from an allocator is.
_ALIGNED = 16


# Words of an algorithm, which stays valid from process to process in one release of the library.
_ALGORITHM = 8


class _Candidate(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * _ALGORITHM),
        ("workspace", c_size_t),
        ("status", c_int32),
        ("waves", c_float),
        ("reserved", c_int32 * 4),
    )


@functools.cache
def _library(kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """The library torch has loaded, `ctypes.PyDLL` for calls that keep the interpreter; raises OSError where there is
    none."""
    torch.cuda.current_blas_handle()
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcublasLt.so" in line}
    if not paths:
        raise OSError("torch has loaded no libcublasLt")
    library = kind(min(paths))
    library.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
    library.cublasLtGetVersion.restype = c_size_t
    return library


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what}: cublasLt status {status}")


@functools.cache
def _handle(device: int) -> c_void_p:
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(byref(handle := c_void_p())), "cublasLtCreate")
    return handle


@functools.cache
def _workspace(device: int, stream: int) -> Tensor:
    on = torch.device("cuda", device)
    return kept(lambda: torch.empty(_WORKSPACE, dtype=torch.uint8, device=on), on)


def available() -> bool:
    """Whether GEMMs can be served at all: CUDA, and a cuBLASLt to call."""
    try:
        return torch.cuda.is_available() and torch.version.cuda is not None and bool(_library())
    except OSError:
        return False


class Gemm:
    """One shape's GEMM `out = a @ b`, prepared: descriptors, and the algorithm that won.

    a: [m, k] and b: [k, n], each with one stride of 1; out: [m, n] row-major. In cuBLAS's column-major terms that is
    out^T = b^T a^T, so b comes first.
    """

    def __init__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        lib, kind = _library(), DATA_TYPE[a.dtype]
        self.device, self.alpha, self.beta = a.device.index, c_float(1.0), c_float(0.0)
        _check(lib.cublasLtMatmulDescCreate(byref(desc := c_void_p()), _COMPUTE_FLOAT32, _FLOAT32), "desc")
        self.desc = desc
        for attribute, t in ((_TRANSPOSE_A, b), (_TRANSPOSE_B, a)):
            flag = c_int32(int(t.stride(1) != 1))
            _check(lib.cublasLtMatmulDescSetAttribute(desc, attribute, byref(flag), c_size_t(4)), "transpose")
        self.layouts = [self._layout(kind, t) for t in (b, a, out)]
        self.algorithm = self._chosen(a, b, out)

    def _layout(self, kind: int, t: Tensor) -> c_void_p:
        rows, columns = (t.shape[1], t.shape[0]) if t.stride(1) == 1 else (t.shape[0], t.shape[1])
        leading = t.stride(0) if t.stride(1) == 1 else t.stride(1)
        layout = c_void_p()
        status = _library().cublasLtMatrixLayoutCreate(
            byref(layout), kind, c_uint64(rows), c_uint64(columns), c_int64(max(leading, rows))
        )
        _check(status, "layout")
        return layout

    def _chosen(self, a: Tensor, b: Tensor, out: Tensor) -> _Candidate | None:
        """What a process before this one has found the fastest, else `_best`."""
        file = kept_choices.place(a.device, _library().cublasLtGetVersion(), _key(a, b)[1:])
        there, words = kept_choices.find(file)
        if there and words is None:
            return None
        if words is not None and len(words) == _ALGORITHM:
            known = _Candidate(algorithm=(c_uint64 * _ALGORITHM)(*words))
            with contextlib.suppress(RuntimeError):
                if self._has_torchs_bits(a, b, out, known):
                    return known
        best = self._best(a, b, out, self._candidates(a, b, out))
        kept_choices.keep(file, None if best is None else list(best.algorithm))
        return best

    def _has_torchs_bits(self, a: Tensor, b: Tensor, out: Tensor, candidate: _Candidate) -> bool:
        self.run(a, b, out, candidate)
        return torch.equal(out, torch.mm(a, b))

    def _candidates(self, a: Tensor, b: Tensor, out: Tensor) -> list[_Candidate]:
        lib = _library()
        _check(lib.cublasLtMatmulPreferenceCreate(byref(preference := c_void_p())), "preference")
        settings: list[tuple[int, Any]] = [
            (_MAX_WORKSPACE, c_uint64(_WORKSPACE)),
            (_REDUCTION_SCHEMES, c_uint32(_SUM_IN_COMPUTE_TYPE)),
            *((_ALIGNMENT_A + i, c_uint32(_ALIGNED)) for i in range(4)),
        ]
        for attribute, setting in settings:
            size = c_size_t(ctypes.sizeof(setting))
            _check(lib.cublasLtMatmulPreferenceSetAttribute(preference, attribute, byref(setting), size), "preference")
        found, count = (_Candidate * _CANDIDATES)(), c_int32()
        left, right, result = self.layouts
        status = lib.cublasLtMatmulAlgoGetHeuristic(
            _handle(self.device), self.desc, left, right, result, result, preference, _CANDIDATES, found, byref(count)
        )
        lib.cublasLtMatmulPreferenceDestroy(preference)
        _check(status, "no algorithm")
        return list(found[: count.value])

    def _best(self, a: Tensor, b: Tensor, out: Tensor, candidates: list[_Candidate]) -> _Candidate | None:
        """The fastest candidate, timed in turns; None where torch's choice is as good, or the bits differ."""

        def with_(candidate: _Candidate) -> Callable[[], None]:
            return lambda: self.run(a, b, out, candidate, _library(ctypes.PyDLL))

        calls: dict[int, Callable[[], Any]] = {i: with_(c) for i, c in enumerate(candidates)}
        calls[_TORCHS] = lambda: torch.mm(a, b, out=out)
        times: dict[int, list[float]] = {i: [] for i in calls}
        rounds, first_rounds = _ROUNDS, _FIRST_ROUNDS
        for turn in itertools.count():
            took = _round({i: calls[i] for i in times})
            times = {i: [*times[i], *([ms] if turn else [])] for i, ms in took.items()}
            if turn == 1 and min(took.values()) > _LONG:
                rounds, first_rounds = _ROUNDS_OF_LONG, _FIRST_OF_LONG
            if turn == rounds:
                break
            if turn == first_rounds:
                least = min(min(t) for t in times.values())
                times = {i: t for i, t in times.items() if i in (0, _TORCHS) or min(t) < _BEHIND * least}
        middle = {i: sorted(t)[len(t) // 2] for i, t in times.items()}
        best = min(middle, key=middle.__getitem__)
        # The first candidate is torch's, but for what torch's call itself takes.
        torchs = min(middle[_TORCHS], middle.get(0, middle[_TORCHS]))
        if best == _TORCHS or middle[best] > min(_WORTH * torchs, torchs - _LEAST):
            return None
        return candidates[best] if self._has_torchs_bits(a, b, out, candidates[best]) else None

    def run(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        algorithm: _Candidate | None = None,
        library: ctypes.CDLL | None = None,
    ) -> None:
        algorithm = algorithm or self.algorithm
        assert algorithm is not None
        stream = torch.cuda.current_stream(self.device).cuda_stream
        workspace = _workspace(self.device, stream).data_ptr()
        left, right, result = self.layouts
        target = out.data_ptr()
        status = (library or _library()).cublasLtMatmul(
            _handle(self.device), self.desc, byref(self.alpha), b.data_ptr(), left, a.data_ptr(), right,
            byref(self.beta), target, result, target, result, byref(algorithm), workspace, _WORKSPACE, stream,
        )  # fmt: skip
        _check(status, "cublasLtMatmul")


def _round(calls: dict[int, Callable[[], Any]]) -> dict[int, float]:
    """Milliseconds of each call on the GPU, without those that fail.

    All are launched before any is waited for, and none but torch's gives the interpreter away: where another thread has
    it, a launch would come late by more than a GEMM takes. Torch's is the last, when the GPU has others to do.
    """
    marks: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
    for i, call in calls.items():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        try:
            call()
        except RuntimeError:
            continue
        end.record()
        marks[i] = start, end
    for _, end in marks.values():
        end.synchronize()
    return {i: start.elapsed_time(end) for i, (start, end) in marks.items()}


def _aligned(*tensors: Tensor) -> bool:
    return all(t.data_ptr() and t.data_ptr() % _ALIGNED == 0 for t in tensors)


_gemms: dict[tuple[Any, ...], Gemm | None] = {}


def _key(a: Tensor, b: Tensor) -> tuple[Any, ...]:
    return a.device.index, a.dtype, b.dtype, a.shape, b.shape, a.stride(), b.stride()


def _gemm(a: Tensor, b: Tensor, out: Tensor) -> Gemm | None:
    """The prepared GEMM, or None where torch's own call serves. A shape first met while a CUDA graph is captured
    can't be timed; torch serves it, and it is looked at again later."""
    if not a.is_cuda or not _aligned(a, b, out):
        return None
    if (key := _key(a, b)) not in _gemms:
        if torch.cuda.is_current_stream_capturing():
            return None
        with _searching, torch.cuda.device(a.device):
            if key not in _gemms:
                _gemms[key] = _prepare(a, b, out)
    return _gemms[key]


def _prepare(a: Tensor, b: Tensor, out: Tensor) -> Gemm | None:
    half = a.dtype in DATA_TYPE and a.dtype == b.dtype
    dense = all(1 in t.stride() and t.numel() for t in (a, b))
    if not half or not dense or not available() or torch.are_deterministic_algorithms_enabled():
        return None
    try:
        gemm = Gemm(a, b, out)
    except RuntimeError as error:  # no memory to try it in, too
        log.warning("cublasLt candidates of %s x %s: %s", tuple(a.shape), tuple(b.shape), error)
        return None
    return gemm if gemm.algorithm is not None else None


def mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`; a: [m, k], b: [k, n]."""
    out = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    gemm = _gemm(a, b, out)
    if gemm is None:
        return torch.mm(a, b, out=out)
    gemm.run(a, b, out)
    return out


def gains(a: Tensor, b: Tensor) -> bool:
    """Whether a candidate is faster than torch's choice for such a GEMM: tried on operands of the shapes, strides,
    dtype and device of `a` and `b`, which may be fake, filled at random."""
    key = _key(a, b)
    if (search := _begun.pop(key, None)) is None and key in _gemms:  # by a layer before this one
        return _gemms[key] is not None
    with stages.piece(SEARCH, f"{list(a.shape)} @ {list(b.shape)}, {str(a.dtype).removeprefix('torch.')}"):
        if search is not None and not search.cancel():
            search.result()
        if key in _gemms:
            return _gemms[key] is not None
        if not available() or torch.cuda.is_current_stream_capturing():
            return False
        # A lowering asks while it is functionalised, under which new tensors have no memory of their own.
        with disable_current_modes(), temporarily_clear_interpreter_stack():
            return _tried(*(Operand.like(t) for t in (a, b)))


def begin(a: Tensor, b: Tensor) -> None:
    """Begin to find out in a thread what `gains` will be asked of `a` and `b`; each GEMM once."""
    if (key := _key(a, b)) in _gemms or key in _begun or not available() or torch.cuda.is_current_stream_capturing():
        return
    _begun[key] = _thread().submit(_tried, *(Operand.like(t) for t in (a, b)))


@contextlib.contextmanager
def searches_end() -> Iterator[None]:
    """At the end no search that was begun inside has the GPU: what nobody asked for is dropped."""
    try:
        yield
    finally:
        if going := [search for key in list(_begun) if not (search := _begun.pop(key)).cancel()]:
            with stages.piece(SEARCH, "begun, and asked for by nobody"):
                concurrent.futures.wait(going)


_begun: dict[tuple[Any, ...], concurrent.futures.Future[bool]] = {}
_searching = threading.Lock()  # what is timed has the GPU to itself


@functools.cache
def _thread() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(1, "megacpp_gemms")


def _tried(a: Operand, b: Operand) -> bool:
    try:
        with torch.no_grad():
            left, right = a.filled(), b.filled()
            return _gemm(left, right, left.new_empty((left.shape[0], right.shape[1]))) is not None
    except torch.cuda.OutOfMemoryError:
        return False
