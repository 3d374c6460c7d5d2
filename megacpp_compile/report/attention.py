"""Attentions, in frames and called by eager code: who was asked, who serves, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(slots=True)
class AttentionSite:
    """One attention of a frame, as it was decided when the frame was compiled.

    Attributes:
        fqn: module the code belongs to, "" when it could not be resolved.
        source: as in `Site`.
        call: what the model calls: "sdpa" (`scaled_dot_product_attention`), "flex_attention", "attention", this
            package's, or "spelled out", products and a softmax that the pass `attention` replaced.
        requested: the backend asked first: "fa4" under the option of that name or `enable_fa4`.
        effective: the backend in the graph: "fa4", "sdpa", "flex" or "plain"; a lowering of the op `attention` where it
            was spelled out.
        kernel: the family of kernels that serves: "fa4", "cudnn", "flash", "efficient", "flex", "triton" and "chunks"
            are fused, "unfused" multiplies all scores out, "?" is not known here.
        tag: why `requested` is not `effective`, or "unfused"; "" where neither.
        reason: the same in words.
        observed: the family that ran in the step given to `Report.observe`; "" where nobody looked, "?" where it could
            not be told.
    """

    fqn: str
    source: str
    call: str
    requested: str
    effective: str
    kernel: str
    tag: str = ""
    reason: str = ""
    observed: str = ""


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
