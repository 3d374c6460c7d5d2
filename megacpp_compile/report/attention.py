"""What is known of a call of attention in eager: who was asked, who served, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The truth of one call of `megacpp_compile.attention` outside of compiled code, or of several equal ones.

    Attributes:
        requested: "auto", or the backend that the call names.
        enabled: whether FlashAttention-4 was enabled.
        effective: the backend that served.
        refused: (backend, tag, reason) of each that was asked before it.
        shape: batch, heads, heads of keys, queries, keys, channels of queries, channels of values.
        dtype: of the operands, "bfloat16".
        device: its type.
        causal: as asked.
        doc_ids: "absent", "uniform", "non-uniform", or "unknown" where they are on a device.
        kind: "decode" for one query on more keys, else "prefill".
        kernels: names of the kernels seen by the profiler, where somebody looked (`observed_attention`); None else.
        calls: how many equal calls this stands for.
    """

    requested: str
    enabled: bool
    effective: str
    refused: tuple[tuple[str, str, str], ...]
    shape: tuple[int, int, int, int, int, int, int]
    dtype: str
    device: str
    causal: bool
    doc_ids: str
    kind: str
    kernels: tuple[str, ...] | None = None
    calls: int = 1

    @property
    def tags(self) -> tuple[str, ...]:
        """Why the others did not serve, for machines."""
        return tuple(tag for _, tag, _ in self.refused)

    @property
    def reason(self) -> str:
        """Why the others did not serve, for people; "" where the first that was asked did."""
        return "; ".join(f"{backend}: {reason} [{tag}]" for backend, tag, reason in self.refused)

    @classmethod
    def of(cls, values: dict[str, Any]) -> AttentionCall:
        """The record that JSON holds as `values`."""
        found = {**values, "refused": tuple(map(tuple, values["refused"])), "shape": tuple(values["shape"])}
        found["kernels"] = None if values["kernels"] is None else tuple(values["kernels"])
        return cls(**found)


def counted(calls: list[AttentionCall], call: AttentionCall) -> None:
    """Add `call` to `calls`, or to the count of its equal there."""
    for i, known in enumerate(calls):
        if replace(known, calls=call.calls) == call:
            calls[i] = replace(known, calls=known.calls + call.calls)
            return
    calls.append(call)
