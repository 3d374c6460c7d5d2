"""`attention` on CUDA in Triton: flash attention with masks by distance or as data, bias, softcap and sinks.

Backward is a kernel for the gradients of keys and values, which walks queries, one for those of queries, which walks
keys, and for a bias that is learned a third: nothing is added by atomics, so that results are the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.fx.edit import same_size
from megacpp_compile.lowerings._kernels.triton_launch import Kernel, in_sixteens, multiply, power_of_2, strides
from megacpp_compile.lowerings.attention import _triton_backward as backward
from megacpp_compile.lowerings.attention import _triton_kernels as kernels
from megacpp_compile.lowerings.attention._dropout import factor, least
from megacpp_compile.lowerings.attention._layout import empty_like_tokens, laid_out
from megacpp_compile.lowerings.attention._sinks import of_rows, sinks_gradient

__all__ = ["attention", "attention_backward", "supports"]

# Channels of a head that one program holds.
MAX_CHANNELS = 256
# Programs a launch may have along its second and third axis.
MAX_GRID = 65535

_TILES = [
    {"BM": bm, "BN": bn, "num_warps": warps, "num_stages": stages}
    for bm, bn in ((128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64))
    for warps in (4, 8)
    for stages in (2, 3)
]
_KEY = ("D", "E", "HEADS", "tokens")
_forward = Kernel(kernels.attention_forward, _TILES, _KEY)
_query_grad = Kernel(backward.attention_query_grad, _TILES, _KEY)
_keys_grad = Kernel(backward.attention_keys_grad, _TILES, _KEY)
_bias_grad = Kernel(backward.attention_bias_grad, _TILES, _KEY)


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernels cannot serve this call, or None."""
    q, k, v = args[1:4] if name == "attention_backward" else args[:3]
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"queries in {q.dtype}: tensor cores multiply in float32 at most"
    if not q.dtype == k.dtype == v.dtype:
        return f"queries, keys and values in {q.dtype}, {k.dtype} and {v.dtype}"
    sizes = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
    if not all(isinstance(n, int) for n in sizes):
        return f"symbolic heads or channels: {sizes}"
    if max(sizes[2:]) > MAX_CHANNELS:
        return f"{max(sizes[2:])} channels a head: programs hold {MAX_CHANNELS}"
    if any(isinstance(n, int) and n == 0 for n in (*q.shape, *v.shape)):
        return "there is nothing to attend to"
    if (name == "attention_backward" and same_size(q.shape[2], 1)) or same_size(k.shape[2], 1):
        return "one query or key: what ptxas makes of a walk of one step is wrong"  # Triton 3.6, H100
    if isinstance(q.shape[0], int) and max(q.shape[0], q.shape[1], q.shape[0] * q.shape[1]) > MAX_GRID:
        return f"more than {MAX_GRID} sequences and heads"
    return None


def _parts(channels: int) -> tuple[int, int]:
    """Channels as two tiles: a power of 2 that is at most as many, and the rest."""
    first = max(16, power_of_2(channels) if power_of_2(channels) == channels else power_of_2(channels) // 2)
    return first, max(16, power_of_2(channels - first)) if channels > first else 0


def _broadcast(name: str, t: Tensor | None) -> dict[str, Any]:
    """Strides of what broadcasts to [b, h, t, s], 0 along what it is one of."""
    if t is None:
        return {f"{name}_{dim}": 0 for dim in "bhts"}
    return strides(name, t, "bhts")


def _beside(t: Tensor | None) -> int:
    """0 for nothing, 1 for what is the same for all queries, 2 for the rest."""
    return 0 if t is None else 1 if statically_known_true(t.shape[2] == 1) else 2


# Tokens of which it is looked for where those of their documents begin and end.
UNIT = 64


def _documents(q: Tensor, documents: Tensor | None) -> dict[str, Any]:
    """The numbers of documents, and four units for each UNIT of tokens: the first with a number between its least and
    its largest, and the one behind the last, as none beyond is seen, in whatever order the numbers are; the first that
    has one number, its own, alone, and the next that has not, as of those between all is seen."""
    if documents is None:
        return {"documents": q, "spans": q, "d_b": 0, "s_b": 0, "units": 0, "DOCUMENTS": 0}
    units = triton.cdiv(documents.shape[1], UNIT)
    numbers = documents.to(torch.int64)
    most = torch.iinfo(torch.int64)
    rest = (0, units * UNIT - documents.shape[1])
    least, largest = (
        torch.nn.functional.pad(numbers, rest, value=value).unflatten(1, (units, UNIT))
        for value in (most.max, most.min)
    )
    least, largest = least.amin(2), largest.amax(2)
    meets = (least[:, :, None] <= largest[:, None]) & (least[:, None] <= largest[:, :, None])
    same = meets & (least == largest)[:, :, None] & (least == largest)[:, None]
    place = torch.arange(units, device=q.device)
    whole = torch.where(same, place, units).amin(2)
    spans = torch.stack([
        torch.where(meets, place, units).amin(2), torch.where(meets, place + 1, 0).amax(2), whole,
        torch.where(~same & (place > whole[:, :, None]), place, units).amin(2),
    ], 2).to(torch.int32)  # fmt: skip
    return {
        "documents": numbers.contiguous(), "spans": spans.contiguous(), "units": units, "DOCUMENTS": 1,
        "d_b": 0 if statically_known_true(documents.shape[0] == 1) else documents.shape[1],
        "s_b": 0 if statically_known_true(documents.shape[0] == 1) else units * 4,
    }  # fmt: skip


def _operands(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, documents: Tensor | None, scale: float,
    softcap: float, left: int | None, right: int | None, fill: float, words: Tensor | None, dropout: float,
    prefix: Tensor | None,
) -> dict[str, Any]:  # fmt: skip
    a, r = _parts(q.shape[-1])
    return {
        "q": q, "k": k, "v": v, "mask": q if mask is None else mask, "bias": q if bias is None else bias,
        "tokens": q.shape[2], "keys": k.shape[2], "left": 0 if left is None else left,
        "right": 0 if right is None else right, "scale": scale, "softcap": softcap, "fill": fill,
        **strides("q", q, "bht"), **strides("k", k, "bhs"), **strides("v", v, "bhs"), **_broadcast("m", mask),
        **_broadcast("b", bias), "HEADS": q.shape[1], "GROUP": q.shape[1] // k.shape[1], "D": q.shape[-1], "A": a,
        "R": r, "E": v.shape[-1], "EP": max(16, power_of_2(v.shape[-1])), "MASK": _beside(mask), "BIAS": _beside(bias),
        "SOFTCAP": int(softcap != 0), "LEFT": int(left is not None),
        "RIGHT": int(right is not None), **multiply(q.dtype), **_documents(q, documents), **_drawn(q, words, dropout),
        **_prefix(q, prefix),
    }  # fmt: skip


def _drawn(q: Tensor, words: Tensor | None, dropout: float) -> dict[str, Any]:
    signed = min(least(dropout) - 2**31, 2**31 - 1)  # hashes are compared with a sign
    return {
        "words": q if words is None else words, "least": signed, "factor": factor(dropout),
        "DROPOUT": int(words is not None),
    }  # fmt: skip


def _prefix(q: Tensor, prefix: Tensor | None) -> dict[str, Any]:
    if prefix is None:
        return {"prefix": q, "p_b": 0, "PREFIX": 0}
    one = statically_known_true(prefix.shape[0] == 1)
    return {"prefix": prefix.to(torch.int32).contiguous(), "p_b": 0 if one else 1, "PREFIX": 1}


# Block sizes by kernel, of heads of so many channels at most (H100; measured causal at 64, 128, 192/128 and 256).
_STATIC: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "forward": {128: (64, 64, 4, 3), 256: (128, 64, 8, 2)},
    "queries": {64: (64, 64, 4, 2), 128: (128, 64, 8, 3), 192: (128, 64, 8, 2), 256: (128, 32, 8, 3)},
    "keys": {64: (64, 64, 4, 2), 128: (32, 64, 4, 3), 192: (64, 128, 8, 2), 256: (128, 32, 8, 2)},
    "bias": {64: (64, 64, 4, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 1)},
}


# Documents are some hundred tokens, most of whose blocks are at a border: smaller ones compute less that is hidden.
_DOCUMENTS: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "forward": {128: (64, 32, 4, 3)},
    "queries": {128: (64, 32, 4, 3)},
}


def _tile(kernel: str, q: Tensor, v: Tensor, documents: Tensor | None = None) -> dict[str, int]:
    """The static choice of block sizes of "forward", "queries", "keys" or "bias"."""
    if q.dtype.itemsize == 4:
        return {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 1}
    widest = max(q.shape[-1], v.shape[-1])
    for_all = next((most, sizes) for most, sizes in _STATIC[kernel].items() if widest <= most)
    packed = {} if documents is None else _DOCUMENTS.get(kernel, {})
    found = packed.get(for_all[0], for_all[1])
    return dict(zip(("BM", "BN", "num_warps", "num_stages"), found, strict=True))


def _in_sixteens(t: Tensor) -> Tensor:
    """`t`, or a copy with zeros behind its channels up to a multiple of 16, in rows that begin at such: of other rows
    Triton 3.6 loads beyond its tiles in more than one stage, and ptxas compiles one stage wrong (H100)."""
    return in_sixteens(torch.nn.functional.pad(t, (0, -t.shape[-1] % 16)) if t.shape[-1] % 16 else t)


def _as_before(padded: Tensor, like: Tensor, channels: int) -> Tensor:
    """Results for `_in_sixteens`, less the channels that it added, in the layout of `like`."""
    return padded if padded.shape[-1] == channels else laid_out(padded[..., :channels], like)


def _steps_of_sinks(sinks: Tensor | None, rows: Tensor) -> dict[str, Any]:
    """From one sequence, head and row of `rows` to the next."""
    if sinks is None:
        return {"x_b": 0, "x_h": 0, "x_t": 0}
    return strides("x", of_rows(sinks).expand(rows.shape), "bht")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    documents: Tensor | None,
    scale: float,
    softcap: float,
    left: int | None,
    right: int | None,
    fill: float,
    words: Tensor | None = None,
    dropout: float = 0.0,
    prefix: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    like, channels = q, v.shape[-1]
    q, k, v = map(_in_sixteens, (q, k, v))
    args = _operands(q, k, v, mask, bias, documents, scale, softcap, left, right, fill, words, dropout, prefix)
    out = empty_like_tokens(like, q.shape[1], q.shape[2], v.shape[-1])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    top = lse.new_empty(q.shape[:3] if mask is not None or bias is not None else (0,))
    _forward(
        lambda meta: (triton.cdiv(q.shape[2], meta["BM"]), q.shape[1], q.shape[0]), _tile("forward", q, v, documents),
        sinks=q if sinks is None else sinks, SINKS=int(sinks is not None), out=out, lse=lse, top=top,
        **strides("o", out, "bht"), **_steps_of_sinks(sinks, lse), **args,
    )  # fmt: skip
    return _as_before(out, like, channels), lse, top


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    top: Tensor,
    scale: float,
    softcap: float,
    left: int | None,
    right: int | None,
    fill: float,
    bias_grad: bool,
    words: Tensor | None = None,
    dropout: float = 0.0,
    prefix: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    delta = (grad.float() * out.float()).sum(-1).contiguous()
    operands = q, k, v
    grad, q, k, v = map(_in_sixteens, (grad, q, k, v))
    args = _operands(q, k, v, mask, bias, documents, scale, softcap, left, right, fill, words, dropout, prefix)
    args |= {"grad": grad, **strides("g", grad, "bht"), "lse": lse, "top": top if top.numel() else lse, "delta": delta}
    b, h, tokens, _ = q.shape
    groups, keys = k.shape[1:3]
    dq, dk, dv = (empty_like_tokens(like, *x.shape[1:]) for like, x in zip(operands, (q, k, v), strict=True))
    _keys_grad(lambda meta: (triton.cdiv(keys, meta["BN"]), groups, b), _tile("keys", q, v), dk=dk, dv=dv,
               **strides("dk", dk, "bhs"), **strides("dv", dv, "bhs"), **args)  # fmt: skip
    _query_grad(lambda meta: (triton.cdiv(tokens, meta["BM"]), h, b), _tile("queries", q, v, documents), dq=dq,
                **strides("o", dq, "bht"), **args)  # fmt: skip
    dbias, dsinks = q.new_empty(0), q.new_empty(0)
    if bias_grad and bias is not None:
        per_batch, per_head = (not statically_known_true(n == 1) for n in bias.shape[:2])
        shared = [d for d, n in ((2, tokens), (3, keys)) if not statically_known_true(bias.shape[d] == n)]
        sizes = (*bias.shape[:2], tokens, keys)
        dbias = torch.empty(sizes, dtype=torch.float32 if shared else bias.dtype, device=q.device)
        args.pop("BIAS")
        args |= _broadcast("b", bias.expand(sizes))
        _bias_grad(
            lambda meta: (triton.cdiv(keys, meta["BN"]), triton.cdiv(tokens, meta["BM"]),
                          bias.shape[0] * bias.shape[1]),
            _tile("bias", q, v), dbias=dbias, batches=b, PER_BATCH=int(per_batch), PER_HEAD=int(per_head),
            **args,
        )  # fmt: skip
        dbias = dbias.sum(shared, keepdim=True).to(bias.dtype) if shared else dbias
    if sinks is not None:
        dsinks = sinks_gradient(sinks, lse, top, delta)
    dq, dk, dv = (_as_before(x, like, like.shape[-1]) for x, like in zip((dq, dk, dv), operands, strict=True))
    return dq, dk, dv, dbias, dsinks
