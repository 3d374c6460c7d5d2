"""FlashAttention-4 as a backend of `attention`: dense, causal, opt-in (`switch`).

`megacpp::fa4_attention` is the op that a graph holds, with a fake and a backward, so that nothing in it breaks a graph:

    q [B, H, S, D], k [B, G, S, D], v [B, G, S, E]    bfloat16 or float16; H a multiple of G
    returns out [B, H, S, E] in q's dtype, laid out as [B, S, H, E];  lse [B, H, S] float32

Saved for backward: q, k, v, out, lse. Who may be served is `eligibility`'s to say; the package is `fa4_runtime`'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.errors import AttentionError
from megacpp_compile.fx.sizes import hint
from megacpp_compile.lowerings._op import no_autocast
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.nn.attention import fa4_runtime, switch
from megacpp_compile.nn.attention.eligibility import DOC_IDS, RUNTIME, AttentionCall, DocIds, Runtime, eligible

# The types of device that it runs on. Tests, which have stand-ins for the kernel, name others.
DEVICES = ("cuda",)


def lacks(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Any, softcap: float | None, causal: bool, window: int | None = None,
    partial: bool = False, found: DocIds | None = None,
) -> tuple[str, str] | None:  # fmt: skip
    """Why it cannot serve a call, as (tag, reason), or None. found: what is known of the documents; by default that
    there are none, or that they are not uniform."""
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    state: DocIds = found or ("absent" if doc_ids is None else "non-uniform")
    call = AttentionCall(
        q.device.type, q.dtype, (q.shape[-1], v.shape[-1]), (q.shape[2], k.shape[2]), causal, state,
        window=window, partial=partial, softcap=softcap, backward=grad,
    )  # fmt: skip
    return against(call, q.device)


def against(call: AttentionCall, device: torch.device) -> tuple[str, str] | None:
    """`eligible` with what this process can run on `device`, which is asked where it could matter alone."""
    if call.device not in DEVICES:
        return eligible(call, Runtime(), DEVICES)
    failure, capability, softcap, backward = _facts(device.index or 0)
    return eligible(call, Runtime(failure, capability, softcap, backward), DEVICES)


@torch.compiler.assume_constant_result
def _facts(index: int) -> tuple[str, tuple[int, int] | None, bool, bool]:
    found = fa4_runtime.probe(index)
    return found.failure, found.capability, found.softcap, found.backward


def raise_by_policy(lack: tuple[str, str]) -> None:
    """Raise AttentionError where documents keep it from serving and the policy makes that an error."""
    if lack[0] == DOC_IDS and switch.doc_ids_policy() == "error":
        raise AttentionError("fa4", *lack, "enable_fa4(doc_ids='fall through') has another backend serve.")


def attend(q: Tensor, k: Tensor, v: Tensor, softcap: float | None, scale: float, causal: bool) -> Tensor:
    """Attention by the op; arguments as in `bodies`."""
    out: Tensor = torch.ops.megacpp.fa4_attention(q, k, v, float(scale), float(softcap or 0.0), causal)[0]
    return out


@torch.library.custom_op("megacpp::fa4_attention", mutates_args=())
def fa4_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, causal: bool
) -> tuple[Tensor, Tensor]:
    _loaded()
    with no_autocast(q):
        queries, keys, values = _by_token(q, k, v)
        out, lse = fa4_runtime.forward(queries, keys, values, scale, softcap, causal)
    if out.dtype != q.dtype:
        raise AssertionError(f"the kernel returned {out.dtype} for operands in {q.dtype}")
    return out.contiguous().transpose(1, 2), lse.contiguous()


@fa4_attention.register_fake
def _(q, k, v, scale, softcap, causal):  # type: ignore[no-untyped-def]
    batch, heads, tokens, _ = q.shape
    out = q.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("megacpp::fa4_attention_backward", mutates_args=())
def fa4_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, softcap: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _loaded()
    with no_autocast(q):
        grad, q, k, v, out = _by_token(grad, q, k, v, out)
        found = fa4_runtime.backward(grad, q, k, v, out, lse, scale, softcap, causal)
    dq, dk, dv = (g.contiguous().transpose(1, 2) for g in found)
    return dq, dk, dv


@fa4_attention_backward.register_fake
def _(grad, q, k, v, out, lse, scale, softcap, causal):  # type: ignore[no-untyped-def]
    return tuple(t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in (q, k, v))


def _by_token(*tensors: Tensor) -> list[Tensor]:
    """[B, H, S, .] as [B, S, H, .], with the channels of a head side by side."""
    turned = (t.transpose(1, 2) for t in tensors)
    return [t if t.stride(-1) == 1 else t.contiguous() for t in turned]


def _loaded() -> None:
    """Raise AttentionError where the package is not there, as for a graph of another machine."""
    if failure := fa4_runtime.failure():
        raise AttentionError("fa4", RUNTIME, failure, "Compile the graph on this machine, or install the package.")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    if grad is None:
        return (None,) * 6
    return *fa4_attention_backward(grad, q, k, v, out, lse, *ctx.settings), None, None, None


fa4_attention.register_autograd(_backward, setup_context=_setup_context)


def _flops(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, causal: bool) -> float:
    """Scores and their values; half of them under a causal mask."""
    batch, heads, tokens, width = map(hint, q.shape)
    whole = 2.0 * batch * heads * tokens * hint(k.shape[2]) * (width + hint(v.shape[-1]))
    return whole / 2 if causal else whole


declare(
    {
        "megacpp::fa4_attention": OpTraits(core=True, block_kind="ablock", flops=_flops),
        "megacpp::fa4_attention_backward": OpTraits(),
    }
)
