"""Whether FlashAttention-4 can serve a call: a pure function of what is asked and of what this process can run.

A tag is for machines, the sentence beside it for people. Both come back in records, reports and errors; the catalog of
`megacpp_compile.evidence` names constraints by the same tags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

DocIds = Literal["absent", "uniform", "non-uniform", "unknown"]

CUDA_ONLY = "dense_fa4_cuda_only"
CAPABILITY = "dense_fa4_capability"
RUNTIME = "dense_fa4_runtime"
FP4 = "dense_fa4_fp4"
DTYPE = "dense_fa4_dtype"
WIDTHS = "dense_fa4_widths"
ABSORBED = "dense_fa4_no_absorbed_shape"
CAUSAL = "dense_fa4_requires_causal"
LENGTHS = "dense_fa4_lengths"
DOC_IDS = "dense_fa4_no_doc_ids_support"
MASK = "dense_fa4_no_mask"
WINDOW = "dense_fa4_no_sliding_window"
VALID_COUNTS = "dense_fa4_no_valid_token_counts"
DROPOUT = "dense_fa4_no_dropout"
SOFTCAP = "dense_fa4_no_softcap"
BACKWARD = "dense_fa4_no_backward"
TRACED = "dense_fa4_traced_numbers"
TAGS = (CUDA_ONLY, CAPABILITY, RUNTIME, FP4, DTYPE, WIDTHS, ABSORBED, CAUSAL, LENGTHS, DOC_IDS, MASK, WINDOW,
        VALID_COUNTS, DROPOUT, SOFTCAP, BACKWARD, TRACED)  # fmt: skip

# Capabilities with a kernel: Hopper, datacenter Blackwell, and GB10.
CAPABILITIES = ((9, 0), (10, 0), (12, 1))
_DTYPES = (torch.bfloat16, torch.float16)
_NARROWEST, _WIDEST, _LATENT = 64, 128, 512


@dataclass(frozen=True)
class AttentionCall:
    """What a call asks for, as far as eligibility goes by it.

    Attributes:
        device: type of the operands' device.
        dtype: of the operands.
        widths: channels of queries and keys, channels of values.
        tokens: queries, keys.
        causal: whether a query attends to itself and what is before it alone.
        doc_ids: "unknown" is of ids on a device, which nobody waits for, or in a graph that is being traced.
        mask: whether there is an explicit mask or bias.
        window: tokens that a query sees, itself included; None for all.
        partial: whether some row has fewer tokens than it is wide (`Validity.partial`).
        softcap: of the scores, None for none.
        dropout: probability.
        backward: whether a gradient will be asked for.
        fp4: whether operands are to be rounded to 4 bits.
        traced: whether the scale, the dropout or a flag is an input of a graph.
    """

    device: str
    dtype: torch.dtype
    widths: tuple[int, int]
    tokens: tuple[int, int]
    causal: bool = True
    doc_ids: DocIds = "absent"
    mask: bool = False
    window: int | None = None
    partial: bool = False
    softcap: float | None = None
    dropout: float = 0.0
    backward: bool = False
    fp4: bool = False
    traced: bool = False


@dataclass(frozen=True)
class Runtime:
    """What this process can run on one device.

    Attributes:
        failure: why the package cannot be loaded or compiles nothing here, "" where it does.
        capability: of the device, None where there is none.
        softcap: whether the installed kernel caps scores.
        backward: whether it has a backward.
    """

    failure: str = ""
    capability: tuple[int, int] | None = None
    softcap: bool = False
    backward: bool = False


def eligible(call: AttentionCall, runtime: Runtime, devices: tuple[str, ...] = ("cuda",)) -> tuple[str, str] | None:
    """None where FlashAttention-4 can serve `call`, else (tag, sentence). devices: the types that it runs on."""
    if call.device not in devices:
        return CUDA_ONLY, f"FlashAttention-4 runs on CUDA devices, not on {call.device}"
    return _of_machine(call, runtime) or _of_operands(call) or _of_masking(call) or _of_kernel(call, runtime)


def _of_machine(call: AttentionCall, runtime: Runtime) -> tuple[str, str] | None:
    if runtime.capability not in CAPABILITIES:
        known = ", ".join(map(_named, CAPABILITIES))
        return CAPABILITY, f"the device is {_named(runtime.capability)}, and there are kernels for {known}"
    if call.fp4:
        if runtime.capability == (12, 1):
            return FP4, "sm_121a has no 4-bit tensor path"
        return FP4, "the operands would have to come in 4 bits, and they are " + _name(call.dtype)
    if runtime.failure:
        return RUNTIME, runtime.failure
    return None


def _of_operands(call: AttentionCall) -> tuple[str, str] | None:
    if call.dtype not in _DTYPES:
        return DTYPE, f"it computes in bfloat16 and float16, not in {_name(call.dtype)}"
    keys, values = call.widths
    if values >= _LATENT:
        return ABSORBED, f"heads of {keys} and {values} channels are latent attention in its absorbed form"
    equal = keys == values and _NARROWEST <= keys <= _WIDEST and keys % 8 == 0
    if not equal and (keys, values) != (192, 128):
        wanted = f"192 and 128, or equal multiples of 8 from {_NARROWEST} to {_WIDEST}"
        return WIDTHS, f"heads have {keys} and {values} channels, wanted {wanted}"
    return None


def _of_masking(call: AttentionCall) -> tuple[str, str] | None:
    if call.mask:
        return MASK, "it takes no explicit mask or bias"
    if not call.causal:
        return CAUSAL, "the dense line is for causal attention"
    if call.doc_ids == "non-uniform":
        return DOC_IDS, "rows hold more than one document, and it would attend across them"
    if call.doc_ids == "unknown":
        return DOC_IDS, "documents are on a device or traced, so nobody knows whether a row is one document"
    if call.window is not None:
        return WINDOW, f"it would attend beyond the window of {call.window} tokens"
    if call.partial:
        return VALID_COUNTS, "some rows are not full, and it would attend to their padding"
    queries, keys = call.tokens
    if queries != keys:
        # Its diagonal ends in the last key; torch's `is_causal` begins at the first.
        return LENGTHS, f"{queries} queries and {keys} keys: its causal diagonal is another than torch's"
    return None


def _of_kernel(call: AttentionCall, runtime: Runtime) -> tuple[str, str] | None:
    if call.traced:
        return TRACED, "its scale or dropout is an input of the graph, and the op takes numbers"
    if call.dropout:
        return DROPOUT, f"it drops nothing, and dropout is {call.dropout:g}"
    if call.softcap is not None and not runtime.softcap:
        return SOFTCAP, "the installed version caps no scores"
    if call.backward and not runtime.backward:
        return BACKWARD, "the installed version has no backward"
    return None


def _named(capability: tuple[int, int] | None) -> str:
    return "without a capability" if capability is None else f"sm_{capability[0]}{capability[1]}"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
