"""What it means that a lowering agrees with the reference: which ones can run here, how far off each may be, what must
be written, and what must not."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from megacpp_compile.lowerings import _registry
from megacpp_compile.lowerings._registry import preference, semantic_ops

from . import relative_error
from .rounding import moved_by_rounding

# Norm of the difference to the float64 reference over the reference's norm, for inputs rounded to the dtype, in units
# in the last place: 2^-7 in bfloat16, 2^-10 in float16, 2^-23 in float32, 2^-52 in float64.
UNITS = {
    # kind of op: (in full precision, in half)
    # A rotation rounds its products and its sum, then the result. A gradient summed over heads is no worse.
    "rotation": (4, 1),
    # Four or so products, or a norm of one, in float32 and rounded once. Gradients of weights are sums over all tokens.
    "mixer": (8, 1),
    # Two GEMMs with a norm between. In half precision latent and normed latent are rounded in between, each adding half
    # a unit; the backward goes through both again. float32: sums over the width in any order, and TF32 is off.
    "projection": (8, 2.5),
    # Products of rounded factors, decays among them, summed over the positions of a chunk and then over chunks. In half
    # precision scores, decays and states may each be rounded once before a GEMM, as in a flash attention's kernel.
    "scan": (8, 2.5),
    # As a scan's, with the inverse of a triangular matrix between, which rounds what it multiplies once more. Linear
    # attention has none.
    "delta rule": (8, 2.5),
    # Three GEMMs, an activation between and a weighted sum; in half precision hidden, activated and output are rounded.
    "experts": (8, 2.5),
    # Two GEMMs with a softmax between, which rounds its probabilities to the dtype; in backward also the scores'
    # gradient. Rows in fp8 are exact, and rounded to the dtype of the queries, bfloat16.
    "attention": (8, 2.5),
    # A GEMM, what is positive of it and a weighted sum in float32; in half precision the gradient of the products is
    # rounded in front of two more.
    "indexer": (8, 2.5),
    # Two GEMMs with a softmax between, as attention's: logits and their gradient are rounded to the dtype.
    "loss": (8, 2.5),
}
# Results in float8, or of what was rounded to it, by kind of op; neither has units that would say much.
# "float8": payloads are the same but where a scale of another rounding crosses a tie, which moves an element by 2^-3 of
# itself; one in some 150 may, by norm. GEMMs of payloads are exact until they are summed, on tensor cores with 14 bits in
# the forward. Gradients are rounded in between, to e4m3 or (some calls) to e5m2, where a tie is twice as wide.
# "fp8_linear": GEMMs of what was rounded before, summed in float32; a number on the border of two of fp8's falls to the
# other side in float64, by less than 2^-3 of itself, which counts where there are but a few. Exact:
# `test_linear_fp8_weight`.
OF_FLOAT8 = {"float8": 1e-2, "fp8_linear": 1e-1}
# What is off by more has to be ill-conditioned, and by no more than rounding accounts for: so many times the root mean
# square of what rounding every step of the reference does to that output (`rounding.py`).
TIMES_ROUNDING = 4
# What is zero because terms cancel may be off by so much of the largest output: float32 rounds the terms.
CANCELLED = 2**-20
# What steps in between are rounded to where operands are in half precision: the kernels' GEMMs keep 16 bits of a factor.
INNER_UNIT = 2**-16
KIND = {"fp8_quantize": "float8", "fp8_quantize_delayed": "float8", "fp8_quantize_transposed": "float8",
        "fp8_quantize_weights": "float8", "fp8_quantize_experts": "float8", "push_maxima": "float8",
        "fp8_linear": "float8", "fp8_linear_backward": "float8", "fp8_quantize_tiles": "float8",
        "fp8_block_linear": "float8", "fp8_block_linear_backward": "float8", "causal_conv1d": "mixer",
        "causal_conv1d_backward": "mixer", "gated_delta_rule": "delta rule", "gated_delta_rule_backward": "delta rule",
        "gated_linear_attention": "delta rule", "gated_linear_attention_backward": "delta rule",
        "gated_rms_norm": "mixer", "gated_rms_norm_backward": "mixer", "hyper_connection": "mixer",
        "hyper_connection_backward": "mixer", "stream_update": "mixer",
        "stream_update_backward": "mixer", "down_norm_up": "projection",
        "down_norm_up_backward": "projection", "norm_linear": "projection", "norm_linear_backward": "projection",
        "compressed_linear": "projection", "compressed_linear_backward": "projection", "linear_cross_entropy": "loss",
        "linear_cross_entropy_backward": "loss", "linear_fp8_weight": "fp8_linear",
        "linear_fp8_weight_backward": "fp8_linear", "moe": "experts", "moe_backward": "experts",
        "moe_sorted": "experts", "moe_sorted_backward": "experts", "mla_rope_q": "rotation", "mla_rope_kv": "rotation",
        "mla_rope_kv_backward": "rotation", "rope_qk": "rotation", "mla_decode": "attention",
        "attention": "attention", "attention_backward": "attention", "sparse_mla": "attention",
        "sparse_mla_backward": "attention", "index_scores": "indexer", "index_scores_backward": "indexer",
        "ssd_scan": "scan", "ssd_scan_backward": "scan", "selective_scan": "scan",
        "selective_scan_backward": "scan"}


def interpreted() -> bool:
    """Whether Triton kernels run on CPU tensors: Triton reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def places() -> list[tuple[str, str]]:
    """(device, target) of all that can run here; in the interpreter kernels alone, as what needs none runs without it."""
    if torch.cuda.is_available():
        return [("cpu", "cpu"), ("cpu", "tpu"), ("cuda", "cuda")]  # what suits XLA is plain PyTorch
    return [("cpu", "cuda")] if interpreted() else [("cpu", "cpu"), ("cpu", "tpu")]


CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
KERNELS = pytest.mark.skipif(not CUDA and not interpreted(), reason="kernels need a GPU, or TRITON_INTERPRET=1")
# The marks of a file whose tests run Triton's kernels.
OF_KERNELS = [KERNELS, *([pytest.mark.cuda] if CUDA else [])]


def seldom(test: Any) -> Any:
    """A test that the interpreter leaves to `make test-all`, as another runs the same kernels; a GPU runs it always."""
    return test if CUDA else pytest.mark.exhaustive(test)


def rarely(*values: Any) -> Any:
    """A set of parameters that `seldom` runs."""
    return pytest.param(*values, marks=[] if CUDA else [pytest.mark.exhaustive])


def lowerings(target: str) -> Iterator[tuple[Any, str, str, str]]:
    """(op, folder, op's name, lowering) of every lowering there is for `target`."""
    for op, (folder, name) in semantic_ops().items():
        home = Path(_registry.package.__path__[0]) / folder
        for lowering in preference(folder, target) if target != "tpu" else ("tpu_xla",):  # the reference is the CPU's too
            if (home / f"{lowering}.py").exists():
                yield op, folder, name, lowering


def module_of(folder: str, lowering: str) -> Any:
    return importlib.import_module(f"megacpp_compile.lowerings.{folder}.{lowering}")


def reference_of(name: str) -> Callable[..., Any]:
    folder = next(folder for folder, other in semantic_ops().values() if other == name)
    return getattr(module_of(folder, "reference"), name)


def why_not(module: Any, name: str, args: Sequence[Any]) -> str | None:
    supports = getattr(module, "supports", None)
    return None if supports is None else supports(name, args)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory is full of NaN, so that an element nobody writes can't pass for a result."""
    kept = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(kept[0], warn_only=kept[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


def tensors_of(results: Any) -> list[Tensor]:
    return [t for t in tree_flatten(results)[0] if isinstance(t, Tensor)]


def on(device: str, args: Any, dtype: torch.dtype | None = None) -> Any:
    """`args` on `device`, and in `dtype` where they are floating point, strides kept."""

    def move(t: Tensor) -> Tensor:
        if dtype is not None and t.is_floating_point():
            t = t.to(dtype)
        if t.device.type == device or 0 in t.shape:
            return t.to(device)
        # The memory behind `t`, gaps and overlaps included, so that what shares an element still does.
        reach = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
        return t.as_strided((reach,), (1,)).to(device).as_strided(t.shape, t.stride(), 0)

    args = tree_map_only(Tensor, move, args)
    return tuple(dtype if dtype is not None and isinstance(a, torch.dtype) else a for a in args)


def coarsest(*parts: Any) -> torch.dtype:
    """The least exact floating point dtype of all tensors and dtypes in `parts`."""
    found = {t.dtype for t in tensors_of(parts) if t.is_floating_point()}
    found |= {a for part in parts for a in (part if isinstance(part, tuple) else ()) if isinstance(a, torch.dtype)}
    return max(found, key=lambda d: torch.finfo(d).eps)


def disagreements(got: Sequence[Tensor], name: str, args: Any) -> list[str]:
    """What is wrong with the results `got` of the op called `name` on `args`, by the reference in float64."""
    reference, place = reference_of(name), tensors_of(args)[0].device.type
    want = tensors_of(reference(*on(place, args, torch.float64)))
    if KIND[name] in OF_FLOAT8:
        return faults(got, want, OF_FLOAT8[KIND[name]])
    unit = unit_of(coarsest(args))
    half = unit > INNER_UNIT

    def rounding() -> list[float]:
        wide = on("cpu", args, torch.float64)
        return [TIMES_ROUNDING * moved for moved in moved_by_rounding(reference, wide, INNER_UNIT if half else unit)]

    return faults(got, want, UNITS[KIND[name]][half] * unit, rounding)


def unit_of(dtype: torch.dtype) -> float:
    """A unit in the last place of 1; of float8, which is rounded to it, bfloat16's."""
    return torch.finfo(torch.bfloat16 if dtype.itemsize == 1 else dtype).eps


def faults(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float,
           rounding: Callable[[], list[float]] | None = None) -> list[str]:
    """What is wrong with the results `got`, in words; `want` are those in float64. tolerance: of an error, relative to
    the norm of its output. rounding: by output, the norm of an error that rounding alone accounts for."""
    wrong, accounted = [], None
    largest = max((float(w.double().nan_to_num(0.0, 0.0, 0.0).norm()) for w in want), default=0.0)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.shape != w.shape:
            wrong.append(f"output {i} is {tuple(g.shape)}, not {tuple(w.shape)}")
        elif not w.numel():
            continue
        elif g.isnan().any():
            wrong.append(f"output {i} has {int(g.isnan().sum())} of {g.numel()} elements unwritten")
        elif not w.any() and float(g.double().norm()) <= CANCELLED * largest:
            continue
        elif (error := relative_error(g, w)) > tolerance:
            accounted = accounted or (rounding() if rounding is not None else [0.0] * len(want))
            share = accounted[i] / max(float(w.double()[w.isfinite()].norm()), 1e-12)
            if error > share:
                wrong.append(f"output {i} is off by {error:.2e}, of which rounding explains {share:.2e}")
    return wrong


def memory(t: Tensor) -> Tensor:
    """All bytes of the buffer that `t` is a part of, to be compared or cloned."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())  # type: ignore[arg-type]


def copy_of(t: Tensor) -> Tensor:
    """`t` in a copy of its whole buffer: what is around it, strides and offset are kept."""
    return memory(t).clone().view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())


def copies_of(args: Any) -> Any:
    return tree_map_only(Tensor, copy_of, args)


def may_overwrite(operands: Sequence[Tensor], out_dtype: torch.dtype) -> bool:
    """Whether the results fit where the operands are: in `out_dtype`, each element at an address of its own."""
    return all(t.dtype == out_dtype and addresses(t).unique().numel() == t.numel() for t in operands)


def addresses(t: Tensor) -> Tensor:
    """Where each element of `t` is in its buffer."""
    return sum(
        (
            torch.arange(n).mul(s).view(-1, *[1] * (t.dim() - i - 1))
            for i, (n, s) in enumerate(zip(t.shape, t.stride(), strict=True))
        ),
        torch.zeros(t.shape, dtype=torch.int64),
    )


def in_place_faults(body: Callable[..., Any], overwrites: Sequence[int], args: Any,
                    out_dtype: torch.dtype) -> list[str]:
    """What is wrong with `in_place=True` of a lowering that works without, in words. `args` are left as they are.

    The results have to be the operands themselves, equal bit for bit to those of the plain call, and no other byte of
    any operand's buffer may change. Where an operand can't hold its result, nothing at all is overwritten.
    """
    plain = tensors_of(body(*copies_of(args)))
    runs = [copies_of(args) for _ in range(1 if interpreted() else 2)]  # one program after the other runs alike
    results = [tensors_of(body(*run, in_place=True)) for run in runs]
    wrong = []
    expected = copies_of(args)
    if may_overwrite([args[i] for i in overwrites], out_dtype):
        for i, value in zip(overwrites, plain, strict=True):
            expected[i].copy_(value)
            result, operand = results[0][overwrites.index(i)], runs[0][i]
            if operand.numel() and (result.data_ptr(), result.shape,
                                    result.stride()) != (operand.data_ptr(), operand.shape, operand.stride()):
                wrong.append(f"result {i} is not argument {i}")
    elif any(r.untyped_storage().data_ptr() == args_i.untyped_storage().data_ptr()
             for r in results[0] for args_i in tensors_of(runs[0]) if r.numel()):  # fmt: skip
        wrong.append("a result shares memory with an argument that cannot hold it")
    for which, (a, b) in enumerate(zip(tensors_of(expected), tensors_of(runs[0]), strict=True)):
        if not torch.equal(memory(a), memory(b)):
            wrong.append(f"tensor {which}'s buffer is not what it has to be in {_differing(a, b)} bytes")
    for name, other in (("the plain call", plain), *(("a second run", again) for again in results[1:])):
        if any(not torch.equal(bits(a), bits(b)) for a, b in zip(results[0], other, strict=True)):
            wrong.append(f"differs from {name}")
    return wrong


def bits(t: Tensor) -> Tensor:
    """Comparable bit by bit, NaN and the sign of zero included."""
    return t.contiguous().view(t.shape or (1,)).view(torch.uint8) if t.numel() else t


def _differing(a: Tensor, b: Tensor) -> int:
    return int((memory(a) != memory(b)).sum())


class DoesNotCompile:
    """In the place of a kernel, one that this release of Triton does not know the names of."""

    def __getitem__(self, grid):
        from triton.errors import TritonError

        def launch(*_, **__):
            raise TritonError("at 3:4:\nno attribute 'barrier'")

        return launch
