"""`attention`: one callable on every target, with documents, a soft cap, grouped heads and values of another width.

    out = megacpp_compile.attention(q, k, v, doc_ids=doc_ids, softcap=50.0)

CUDA: torch's scaled_dot_product_attention, or FlexAttention where documents, a window or a cap ask for it; in front of
both FlashAttention-4, where `enable_fa4` has turned it on. A TPU under torch_xla: the Pallas kernel of `pallas.py`.
Everywhere else, and where these cannot serve: the same in plain PyTorch, with the reason in `attention_capability`, in
the record of the call (`last_attention`, `record()`) and, once, in the log. It is plain code to a compiler: nothing in
it breaks a graph, and in a frame of this package's backend the plain body becomes `megacpp::attention`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megacpp_compile._torch.fakes import is_fake
from megacpp_compile.errors import AttentionError, OperandError, closest
from megacpp_compile.nn.attention import bodies, fa4, pallas, switch, te
from megacpp_compile.nn.attention.eligibility import DocIds
from megacpp_compile.nn.attention.validity import Validity
from megacpp_compile.report import collector, log
from megacpp_compile.report.attention import AttentionCall
from megacpp_compile.report.kernels import attention_kernels
from megacpp_compile.targets import DEVICES

BACKENDS = ("fa4", "te", "sdpa", "flex", "pallas", "plain")


@dataclass(frozen=True, slots=True)
class Capability:
    """Who serves a call.

    Attributes:
        backend: "fa4", "te", "sdpa", "flex", "pallas" or "plain".
        refused: (backend, tag, reason) of each that is preferred and cannot: `bodies.TAGS` and `eligibility.TAGS` have
            the tags.
    """

    backend: str
    refused: tuple[tuple[str, str, str], ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        """What the preferred ones cannot, for machines."""
        return tuple(tag for _, tag, _ in self.refused)

    def __str__(self) -> str:
        reasons = "; ".join(f"{backend}: {reason} [{tag}]" for backend, tag, reason in self.refused)
        return self.backend + (f" ({reasons})" if reasons else "")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    doc_ids: Tensor | Sequence[Any] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    validity: Validity | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax(cap(scale * q k^T) masked) v.

    q: [B, H, S, D]; k: [B, G, T, D]; v: [B, G, T, E], H a multiple of G: each of G serves H / G heads in a row. Of one
    dtype, on one device. Returns [B, H, S, E] in that dtype; softmax is in float32, in float64 for float64.
    doc_ids: [B, S] or [S] of integers, S == T: a token attends to tokens of its own document alone, and one with a
        negative id (padding) to nothing: its row is zero, and nobody attends to it. Rows that are one document each
        need no mask; that is only found where the ids are in main memory, since asking a device would wait for it.
    softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2, arXiv:2408.00118); None or 0 for none.
    scale: 1 / sqrt(D) when None.
    causal: token i attends to the first i + 1, also where S and T differ, as in torch's `is_causal`.
    window: a token attends to itself and the `window` - 1 before it alone; of causal attention.
    validity: which tokens are there, as a `Validity` made outside of compiled code, S == T: those that are not are
        padding, as under a negative id.
    backend: one of BACKENDS instead of the device's own choice.

    Raises OperandError for shapes that do not belong together and unknown backends, and AttentionError, whose `tag`
    says why, for a `backend` that cannot serve the call, and for documents that FlashAttention-4 cannot mask where
    `enable_fa4` makes that an error.
    """
    softcap = softcap or None
    asked = _asked(q, k, v, doc_ids, softcap, causal, window, validity)
    found = _capability(q, k, v, asked, softcap, causal, window, backend)
    if not torch.compiler.is_compiling():
        if found.refused:
            _announce(found, q.device.type)
        _note(q, k, v, asked.state, causal, backend, found)
    ids = asked.ids
    if ids is not None:
        ids = ids.to(q.device, non_blocking=True)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if found.backend == "fa4":
        return fa4.attend(q, k, v, softcap, scale, causal)
    if found.backend == "te":
        return te.attend(q, k, v, softcap, scale, causal, window)
    if found.backend == "pallas":
        return pallas.attend(q, k, v, ids, softcap, scale, causal)
    return getattr(bodies, found.backend)(q, k, v, ids, softcap, scale, causal, window)  # type: ignore[no-any-return]


def attention_capability(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    doc_ids: Tensor | Sequence[Any] | None = None,
    softcap: float | None = None,
    causal: bool = True,
    window: int | None = None,
    validity: Validity | None = None,
    backend: str = "auto",
) -> Capability:
    """Who would serve `attention` with these arguments, and what speaks against the others. Computes nothing. Raises as
    `attention`."""
    softcap = softcap or None
    asked = _asked(q, k, v, doc_ids, softcap, causal, window, validity)
    return _capability(q, k, v, asked, softcap, causal, window, backend)


def last_attention() -> AttentionCall | None:
    """The record of this thread's last call of `attention` outside of compiled code; None before the first."""
    return getattr(_last, "call", None)


def observed_attention(fn: Callable[[], Any], device: torch.device | str) -> AttentionCall | None:
    """Run `fn` under the profiler, and return the record of its last call of `attention` with the kernels seen in
    `fn`; None where `fn` makes none outside of compiled code."""
    _last.call = None
    kernels = attention_kernels(fn, torch.device(device))
    if (call := last_attention()) is not None:
        _last.call = replace(call, kernels=tuple(kernels))
    return last_attention()


_last = threading.local()


def normalised(doc_ids: Tensor | None) -> Tensor | None:
    """None where every row is one document and no padding: then there is nothing to mask. Ids that are on a device, or
    that a compiler traces, stay as they are."""
    if doc_ids is None or not _readable(doc_ids) or not doc_ids.numel():
        return doc_ids
    return doc_ids if bool(((doc_ids != doc_ids[:, :1]) | (doc_ids < 0)).any()) else None


def _readable(doc_ids: Tensor) -> bool:
    """Whether the values of ids can be looked at without waiting for a device."""
    return doc_ids.device.type == "cpu" and not torch.compiler.is_compiling() and not is_fake(doc_ids)


@dataclass(frozen=True)
class _Asked:
    """Ids to mask by, what is known of the user's own, and whether some row is not full."""

    ids: Tensor | None
    state: DocIds
    partial: bool


def _asked(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Any, softcap: float | None, causal: bool, window: int | None,
    validity: Validity | None,
) -> _Asked:  # fmt: skip
    ids = given = _checked(q, k, v, doc_ids, softcap, causal, window)
    ids = normalised(ids)
    state: DocIds = "absent" if given is None else "uniform" if ids is None else "non-uniform"
    if ids is not None and not _readable(ids):
        state = "unknown"
    partial = validity is not None and validity.partial(k.shape[2])
    if partial:
        assert validity is not None
        if q.shape[2] != k.shape[2]:
            raise OperandError("attention", f"validity of {k.shape[2]} keys for {q.shape[2]} queries")
        # The user's own ids: of uniform ones the padding is a part.
        ids = validity.padded(given, q.shape[0], k.shape[2], q.device if given is None else given.device)
    return _Asked(ids, state, partial)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Any, softcap: float | None, causal: bool, window: int | None
) -> Tensor | None:
    """The ids as [B, S]. Raises OperandError."""
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise OperandError("attention", f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions, not 4")
    (batch, heads, tokens, width), keys = q.shape, k.shape[2]
    if k.shape[0] != batch or k.shape[3] != width or v.shape[:3] != k.shape[:3]:
        shapes = ", ".join(str(list(t.shape)) for t in (q, k, v))
        raise OperandError("attention", f"q, k, v are {shapes}, wanted [B, H, S, D], [B, G, T, D], [B, G, T, E]")
    if heads % k.shape[1]:
        raise OperandError("attention", f"{heads} heads of q are no multiple of {k.shape[1]} of k")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise OperandError("attention", "q, k and v are of more than one dtype or device")
    if softcap is not None and softcap < 0:
        raise OperandError("attention", f"softcap is {softcap}, wanted a positive number or None")
    if window is not None and (window < 1 or not causal):
        raise OperandError("attention", f"window is {window}, wanted a positive number, of causal attention")
    if doc_ids is None:
        return None
    ids = doc_ids if isinstance(doc_ids, Tensor) else torch.as_tensor(doc_ids)
    ids = ids.expand(batch, -1) if ids.dim() == 1 else ids
    if ids.shape != (batch, tokens) or keys != tokens or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        wanted = f"integers [{batch}, {tokens}] or [{tokens}], for as many keys as queries"
        raise OperandError("attention", f"doc_ids are {ids.dtype} {list(ids.shape)} for {keys} keys, wanted {wanted}")
    return ids


def _capability(
    q: Tensor, k: Tensor, v: Tensor, asked: _Asked, softcap: float | None, causal: bool, window: int | None,
    backend: str,
) -> Capability:  # fmt: skip
    if backend != "auto" and backend not in BACKENDS:
        near = closest(backend, BACKENDS)
        hint = f". Did you mean {near!r}?" if near else ""
        raise OperandError("attention", f"backend is {backend!r}, wanted 'auto' or one of {', '.join(BACKENDS)}{hint}")
    refused: list[tuple[str, str, str]] = []
    for name in attention_order(q.device.type) if backend == "auto" else (backend,):
        if name == "fa4":
            state = "absent" if asked.state == "uniform" else asked.state
            against = fa4.lacks(q, k, v, asked.ids, softcap, causal, window, asked.partial, state)
            if against is not None:
                fa4.raise_by_policy(against)
        elif name == "te":
            against = te.lacks(q, k, v, asked.ids, softcap, causal, window)
        elif name == "pallas":
            against = pallas.lacks(q, k, v, asked.ids, softcap, causal, window)
        else:
            against = getattr(bodies, f"{name}_lacks")(q, k, v, asked.ids, softcap, causal, window)
        if against is None:
            return Capability(name, tuple(refused))
        if name == backend:
            raise AttentionError(name, *against)
        refused.append((name, *against))
    raise AssertionError("the plain body serves everything")


@functools.lru_cache(maxsize=64)
def _announce(found: Capability, device: str) -> None:
    log.logger.info("attention on %s: %s", device, found)


def _note(q: Tensor, k: Tensor, v: Tensor, state: str, causal: bool, requested: str, found: Capability) -> None:
    """Record who served an eager call."""
    (batch, heads, queries, width), (_, groups, keys, _) = q.shape, k.shape
    call = AttentionCall(
        requested, switch.fa4_enabled(), found.backend, found.refused,
        (batch, heads, groups, queries, keys, width, v.shape[-1]), str(q.dtype).removeprefix("torch."), q.device.type,
        causal, state, "decode" if queries == 1 < keys else "prefill",
    )  # fmt: skip
    _last.call = call
    collector.emit_attention(call)


def attention_order(device: str, fa4_first: bool = False) -> tuple[str, ...]:
    """What serves on a device of this type, most wanted first; the plain body serves everything. fa4_first: as if
    FlashAttention-4 were enabled."""
    usual = DEVICES[device].attention if device in DEVICES else ("plain",)
    return ("fa4", *usual) if fa4_first or switch.fa4_enabled() else usual
