"""Attention, over all keys and over rows that are named, and rotations, in `special_values.ENTRIES`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from megacpp_compile.lowerings.mla_decode.reference import unpacked

from .special_values import ENTRIES, Args, Entry, filled, of_case, replaced


def attention(q, k, v, mask, bias, sinks, documents, scale, softcap, left, right, fill):
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, fill)
    if documents is not None:
        scores = scores.masked_fill((documents[:, :, None] != documents[:, None])[:, None], -torch.inf)
    gap = torch.arange(k.shape[2], device=q.device) - torch.arange(q.shape[2], device=q.device)[:, None]
    if right is not None:
        scores = scores.masked_fill(gap > right, -torch.inf)
    if left is not None:
        scores = scores.masked_fill(gap < -left, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(*sinks.shape, *(1,) * (sinks.dim() == 1), 1).to(scores.dtype).expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return [weights[..., : k.shape[2]] @ v]


def no_key_for_a_row(args: Args, _: float) -> Args:
    """A query sees no key."""
    return replaced(args, _3=filled(args[3].expand(*args[0].shape[:3], args[1].shape[2]), (0, slice(None), 1), False))


def hidden_keys(args: Args, value: float) -> Args:
    """The last two keys of the first sequence are padding, which no query sees."""
    mask = filled(args[3].expand(*args[0].shape[:3], args[1].shape[2]), (0, ..., slice(-2, None)), False)
    where = (0, slice(None), slice(-2, None))
    return replaced(args, _1=filled(args[1], where, value), _2=filled(args[2], where, value), _3=mask)


ENTRIES["attention"] = Entry(
    attention, (0, 1, 2, 4, 5), "all_at_once",
    left_out={"no key for a row": no_key_for_a_row, "hidden keys": hidden_keys},
    empty={"no sequence": of_case("attention", "no_sequence")["no_sequence"]},
    token={0: 2, 1: 2, 2: 2}, rows=(2,),
)  # fmt: skip



def of_torch(q, k, v, mask, bias, sinks, documents, scale, softcap, left, right, fill):
    """Torch's kernels are eager's own, and multiply keys that are hidden by zero, too."""
    return [F.scaled_dot_product_attention(q, k, v, is_causal=right == 0, scale=scale, enable_gqa=True)]


for label in ("causal", "several_blocks", "documents", "sinks_and_window", "sinks_of_rows", "rows_without_a_key"):
    ENTRIES[f"attention {label}"] = Entry(
        attention, (0, 1, 2, 5), label, token={0: 2, 1: 2, 2: 2}, rows=(2,),
        prepare=lambda args: replaced(args, _11=args[11] if args[11] == -torch.inf else torch.finfo(args[0].dtype).min),
        left_out={"hidden keys": hidden_keys} if label.startswith("rows") else {},
        by_kernels={"cpu_sdpa": of_torch, "cuda_sdpa": of_torch} if label == "several_blocks" else {},
        freed="kernels do not visit blocks of hidden keys" if label == "several_blocks" else "",
    )  # fmt: skip

# --- latent attention


def sparse_mla(q, kv, indices, kv_scale, scale, d_v, causal=True, offset=0):
    """The rows gathered that a query names, in one softmax."""
    wide = torch.promote_types(q.dtype, torch.float32)
    outs, sums = ([x] if 0 in q.shape[:2] else [x[:, :0]] for x in (q[..., :d_v], q[..., 0].to(wide)))
    for t in range(q.shape[1] if len(q) else 0):
        rows, lses = [], []
        for b in range(q.shape[0]):
            named = [n for n in indices[b, t, 0].tolist() if 0 <= n < kv.shape[1] and not (causal and n > t + offset)]
            own = kv[b, named, 0].to(wide)
            scores = q[b, t].to(wide) @ own.T * scale
            rows.append((scores.softmax(-1) @ own[:, :d_v]).to(q.dtype))
            lses.append(scores.logsumexp(-1))
        outs.append(torch.stack(rows)[:, None])
        sums.append(torch.stack(lses)[:, None])
    return [torch.cat(outs, 1), torch.cat(sums, 1)]


def unnamed(args: Args, bad: float) -> Args:
    """Rows that no query names, the first of all among them, which -1 might be taken for."""
    indices = args[2].clone()
    indices[(indices == 0) | (indices == 4)] = 1
    indices[..., -1] = -1
    return replaced(args, _1=filled(args[1], (slice(None), [0, 4]), bad), _2=indices)


ENTRIES["sparse_mla"] = Entry(
    sparse_mla, (0, 1), "plain", left_out={"rows not named": unnamed},
    empty=of_case("sparse_mla", "no_token", "no_sequence", "no_row_is_valid"), token={0: 1, 1: 1}, rows=(1, 1),
)  # fmt: skip


def mla_decode(q, rows, lengths, row_scale, codebook, scale, d_v):
    wide = torch.promote_types(q.dtype, torch.float32)
    outs = []
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            seen = min(int(lengths[b]) - q.shape[1] + t + 1, rows.shape[1])
            own = rows[b, : max(seen, 0)]
            if codebook is not None:
                values = codebook[unpacked(own, d_v)]
                factors = row_scale[b, : len(own)].repeat_interleave(torch.tensor([d_v, q.shape[-1] - d_v]).to(q.device), 1)
                own = values * factors
            elif row_scale is not None:
                own = own.to(wide) * row_scale[b, : len(own)]
            own = own.to(wide)
            outs.append(((q[b, t].to(wide) @ own.T * scale).softmax(-1) @ own[:, :d_v]).to(q.dtype))
    return [torch.stack(outs).unflatten(0, q.shape[:2]) if outs else q[..., :d_v]]


def beyond(args: Args, bad: float) -> Args:
    rows, scale = args[1], args[3]
    behind = torch.arange(rows.shape[1], device=rows.device) >= args[2][:, None]
    if scale is None:
        return replaced(args, _1=filled(rows, behind, bad))
    return replaced(args, _3=filled(scale, behind, bad))


for label in ("three_tokens", "fp8", "codes"):
    ENTRIES[f"mla_decode {label}"] = Entry(
        mla_decode, (), label, left_out={"rows beyond": beyond}, promised=frozenset({"rows beyond"}),
        empty=of_case("mla_decode", "no_token", "no_sequence", "no_row"), rows=(1,),
    )  # fmt: skip

# --- rotations


def rotated(t, cos, sin, nope, into, out, first, dtype):
    wide = torch.promote_types(torch.promote_types(t.dtype, cos.dtype), torch.float32)
    r = t.shape[-1] - nope
    rope, others = (t[..., :r], t[..., r:]) if first else (t[..., nope:], t[..., :nope])
    rope, cos, sin = (x.to(wide) for x in (rope, cos, sin))
    a, b = (rope[..., ::2], rope[..., 1::2]) if into else rope.chunk(2, -1)
    pairs = a * cos - b * sin, b * cos + a * sin
    rope = torch.stack(pairs, -1).flatten(-2) if out else torch.cat(pairs, -1)
    return torch.cat((rope.to(dtype), others.to(dtype)) if first else (others.to(dtype), rope.to(dtype)), -1)


def by_position(table, cu_seqlens, tokens):
    """Rows of a table by the tokens' places in their own sequences; what is behind the last counts on from its end."""
    if cu_seqlens is None:
        return table
    places = []
    for start, end in zip(ends := cu_seqlens.tolist(), [*ends[1:], tokens], strict=True):
        places += range(end - start)
    return table[[min(place, len(table) - 1) for place in places]]


def mla_rope_q(q, cos, sin, nope, into, out, first, inverse, dtype, cu=None):
    cos, sin = (by_position(t, cu, len(q)) for t in (cos, sin))
    return [rotated(q, cos, sin, nope, into, out, first, dtype)]


def rope_qk(q, k, cos, sin, nope, into, out, first, inverse, dtype, cu=None):
    cos, sin = (by_position(t, cu, len(q)) for t in (cos, sin))
    return [rotated(t, cos, sin, nope, into, out, first, dtype) for t in (q, k)]


def mla_rope_kv(kv, k_rope, cos, sin, nope, into, out, first, dtype, cu=None):
    cos, sin = (by_position(t, cu, len(kv)) for t in (cos, sin))
    rope = rotated(k_rope, cos, sin, 0, into, out, False, dtype).expand(*kv.shape[:-1], k_rope.shape[-1])
    parts = kv[..., :nope].to(dtype), rope
    return [torch.cat(parts[::-1] if first else parts, -1), kv[..., nope:]]


def tokens_behind(operands: int) -> Callable[[Args, float], Args]:
    """Tokens behind the last sequence."""

    def fill(args: Args, bad: float) -> Args:
        end = int(args[-1][-1])
        return replaced(args, **{f"_{i}": filled(args[i], slice(end, None), bad) for i in range(operands)})

    return fill


BEHIND = "packed_tokens_behind_heads_1"
for name, plain, operands in (("mla_rope_q", mla_rope_q, 1), ("rope_qk", rope_qk, 2), ("mla_rope_kv", mla_rope_kv, 2)):
    ENTRIES[f"{name} packed"] = Entry(
        plain, tuple(range(operands)), BEHIND, left_out={"tokens behind": tokens_behind(operands)},
        empty=of_case(name, "packed_empty_heads_1"), token=dict.fromkeys(range(operands), 0),
        rows=(0, 0)[: 1 if name == "mla_rope_q" else 2],
    )  # fmt: skip
    ENTRIES[name] = Entry(
        plain, tuple(range(operands)), "bshd_deepseek", empty=of_case(name, "no_batch"),
        token=dict.fromkeys(range(operands), 1), rows=(1, 1)[: 1 if name == "mla_rope_q" else 2],
    )  # fmt: skip


def index_scores(q, k, weights, scale, dtype):
    wide = torch.promote_types(q.dtype, weights.dtype)
    products = torch.einsum("bthc,bsc->bths", q.to(wide), k.to(wide)) * scale
    return [(weights.to(wide).unsqueeze(-1) * products.relu()).sum(2).to(dtype)]


ENTRIES["index_scores"] = Entry(
    index_scores, (0, 1, 2), "plain", empty=of_case("index_scores", "no_batch", "no_key"), token={0: 1, 2: 1}, rows=(1,),
)  # fmt: skip
