"""`attention`: one callable on every target, with documents, a soft cap, grouped heads and values of another width.

    out = megacpp_compile.attention(q, k, v, doc_ids=doc_ids, softcap=50.0)

CUDA: torch's scaled_dot_product_attention, or FlexAttention where documents or a cap ask for it. A TPU under torch_xla:
the Pallas kernel of `pallas.py`. Everywhere else, and where these cannot serve: the same in plain PyTorch, with the
reason in `attention_capability` and, once, in the log. It is plain code to a compiler: nothing in it breaks a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacpp_compile._torch.fakes import is_fake
from megacpp_compile.errors import AttentionError, OperandError
from megacpp_compile.nn.attention import bodies, pallas
from megacpp_compile.report import log
from megacpp_compile.targets import DEVICES

BACKENDS = ("sdpa", "flex", "pallas", "plain")


@dataclass(frozen=True, slots=True)
class Capability:
    """Who serves a call.

    Attributes:
        backend: "sdpa", "flex", "pallas" or "plain".
        refused: (backend, tag, reason) of each that is preferred on the device and cannot: `bodies.TAGS` has the tags.
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
    backend: one of BACKENDS instead of the device's own choice.

    Raises OperandError for shapes that do not belong together, and AttentionError, whose `tag` says why, for a
    `backend` that cannot serve the call.
    """
    softcap = softcap or None
    doc_ids = _checked(q, k, v, doc_ids, softcap)
    doc_ids = normalised(doc_ids)
    found = _capability(q, k, v, doc_ids, softcap, causal, backend)
    if found.refused and not torch.compiler.is_compiling():
        _announce(found, q.device.type)
    if doc_ids is not None:
        doc_ids = doc_ids.to(q.device, non_blocking=True)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if found.backend == "pallas":
        return pallas.attend(q, k, v, doc_ids, softcap, scale, causal)
    return getattr(bodies, found.backend)(q, k, v, doc_ids, softcap, scale, causal)  # type: ignore[no-any-return]


def attention_capability(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    doc_ids: Tensor | Sequence[Any] | None = None,
    softcap: float | None = None,
    causal: bool = True,
    backend: str = "auto",
) -> Capability:
    """Who would serve `attention` with these arguments, and what speaks against the others. Computes nothing. Raises as
    `attention`."""
    softcap = softcap or None
    return _capability(q, k, v, normalised(_checked(q, k, v, doc_ids, softcap)), softcap, causal, backend)


def normalised(doc_ids: Tensor | None) -> Tensor | None:
    """None where every row is one document and no padding: then there is nothing to mask. Ids that are on a device, or
    that a compiler traces, stay as they are."""
    if doc_ids is None or doc_ids.device.type != "cpu" or torch.compiler.is_compiling() or not doc_ids.numel():
        return doc_ids
    if is_fake(doc_ids):
        return doc_ids
    return doc_ids if bool(((doc_ids != doc_ids[:, :1]) | (doc_ids < 0)).any()) else None


def _checked(q: Tensor, k: Tensor, v: Tensor, doc_ids: Any, softcap: float | None) -> Tensor | None:
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
    if doc_ids is None:
        return None
    ids = doc_ids if isinstance(doc_ids, Tensor) else torch.as_tensor(doc_ids)
    ids = ids.expand(batch, -1) if ids.dim() == 1 else ids
    if ids.shape != (batch, tokens) or keys != tokens or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        wanted = f"integers [{batch}, {tokens}] or [{tokens}], for as many keys as queries"
        raise OperandError("attention", f"doc_ids are {ids.dtype} {list(ids.shape)} for {keys} keys, wanted {wanted}")
    return ids


def _capability(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None, softcap: float | None, causal: bool, backend: str
) -> Capability:
    if backend != "auto" and backend not in BACKENDS:
        raise OperandError("attention", f"backend is {backend!r}, wanted 'auto' or one of {', '.join(BACKENDS)}")
    refused: list[tuple[str, str, str]] = []
    for name in _preferred(q.device.type) if backend == "auto" else (backend,):
        asked = pallas.lacks if name == "pallas" else getattr(bodies, f"{name}_lacks")
        against = asked(q, k, v, doc_ids, softcap, causal)
        if against is None:
            return Capability(name, tuple(refused))
        if name == backend:
            raise AttentionError(name, *against)
        refused.append((name, *against))
    raise AssertionError("the plain body serves everything")


@functools.lru_cache(maxsize=64)
def _announce(found: Capability, device: str) -> None:
    log.logger.info("attention on %s: %s", device, found)


def _preferred(device: str) -> tuple[str, ...]:
    """What serves on a device of this type, most wanted first; the plain body serves everything."""
    return DEVICES[device].attention if device in DEVICES else ("plain",)
