"""The switch for FlashAttention-4. A call of `enable_fa4` turns it on for `attention`, the option `fa4` for one
compilation; nothing else does: not that the package is installed, not the environment, not a preset."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from megacpp_compile.errors import AttentionError, BadOptionError
from megacpp_compile.nn.attention import fa4_runtime
from megacpp_compile.nn.attention.eligibility import CAPABILITIES, RUNTIME

# What becomes of documents that FlashAttention-4 cannot mask: the next backend that can serves, or an error.
POLICIES = ("fall through", "error")

# Of the process. Dynamo guards on them: a graph that was traced with one value is not run under another.
_enabled = False
_doc_ids = POLICIES[0]


class Fa4:
    """What `enable_fa4` and `disable_fa4` return; as a context manager it restores what was before."""

    def __init__(self, enabled: bool, doc_ids: str) -> None:
        global _enabled, _doc_ids
        self._before = _enabled, _doc_ids
        _enabled, _doc_ids = enabled, doc_ids

    def __enter__(self) -> Fa4:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        global _enabled, _doc_ids
        _enabled, _doc_ids = self._before


def enable_fa4(*, doc_ids: str = "fall through") -> Fa4:
    """From here on, `megacpp_compile.attention` asks FlashAttention-4 first, in this process and in what it compiles.
    What it cannot serve, the device's own choice does, with the reason in the record of the call.

    doc_ids: what becomes of rows of more than one document, which it cannot mask: "fall through" to a backend that can,
    or "error". Raises AttentionError where the package flash-attn-4 is not installed, and BadOptionError for another
    policy.

        megacpp_compile.enable_fa4()
        with megacpp_compile.enable_fa4(doc_ids="error"):
            model(x)
    """
    if doc_ids not in POLICIES:
        raise BadOptionError("doc_ids", doc_ids, "one of " + ", ".join(map(repr, POLICIES)), POLICIES)
    require_fa4()
    return Fa4(True, doc_ids)


def disable_fa4() -> Fa4:
    """From here on, `megacpp_compile.attention` does not ask FlashAttention-4, unless a call does by name."""
    return Fa4(False, POLICIES[0])


def require_fa4(remedy: str = "Install it, or do without enable_fa4().") -> None:
    """Raise AttentionError where flash-attn-4 is not installed. Loads nothing. remedy: for whoever asked for it."""
    if not fa4_runtime.installed():
        reason = f"the package {fa4_runtime.PACKAGE} is not installed (pip install {fa4_runtime.PACKAGE})"
        raise AttentionError("fa4", RUNTIME, reason, remedy)


def fa4_enabled() -> bool:
    """Whether `attention` asks FlashAttention-4 first."""
    return _enabled


def doc_ids_policy() -> str:
    """What becomes of documents that it cannot mask."""
    return _doc_ids


def uses_dense_fa4(device: Any = "cuda") -> bool:
    """Whether dense causal attention on `device` goes to FlashAttention-4 first, and it runs there. Says nothing of
    sparse attention, and no setting of that counts here."""
    place = torch.device(device)
    if not _enabled or place.type not in ("cuda",) or not torch.cuda.is_available():
        return False
    found = fa4_runtime.probe(place.index if place.index is not None else torch.cuda.current_device())
    return not found.failure and found.capability in CAPABILITIES


