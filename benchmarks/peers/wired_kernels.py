"""Three Triton kernels for the RoPE of MLA as one writes them by hand for one model: half-split channels, contiguous
projections, a power of two of heads. A yardstick for the lowerings, which take every layout; not used by the package.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

HEADS_A_PROGRAM = 16


@triton.jit
def load_turned(row, c, s, HALF: tl.constexpr):
    """Both halves of the rotated channels of the rows at pointers `row`."""
    d = tl.arange(0, HALF)[None, :]
    first, second = tl.load(row + d).to(tl.float32), tl.load(row + HALF + d).to(tl.float32)
    return first * c - second * s, second * c + first * s


@triton.jit
def store_halves(row, first, second, HALF: tl.constexpr):
    d = tl.arange(0, HALF)[None, :]
    tl.store(row + d, first.to(row.dtype.element_ty))
    tl.store(row + HALF + d, second.to(row.dtype.element_ty))


@triton.jit
def load_angles(cos, sin, position, HALF: tl.constexpr):
    at = position * 2 * HALF + tl.arange(0, HALF)
    return tl.load(cos + at).to(tl.float32)[None, :], tl.load(sin + at).to(tl.float32)[None, :]


@triton.jit
def turn_queries(q, cos, sin, length, token_stride, head_stride, NOPE: tl.constexpr, HALF: tl.constexpr,
                 INVERSE: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    c, s = load_angles(cos, sin, token % length, HALF)
    if INVERSE:
        s = -s
    row = q + token * token_stride + head[:, None] * head_stride + NOPE
    first, second = load_turned(row, c, s, HALF)
    store_halves(row, first, second, HALF)


@triton.jit
def assemble_keys(kv, k_pe, k, cos, sin, length, heads, pe_stride, NOPE: tl.constexpr, HALF: tl.constexpr,
                  V: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, NOPE)[None, :]
    c, s = load_angles(cos, sin, token % length, HALF)
    one_row = k_pe + token * pe_stride + tl.zeros([1, 1], tl.int32)
    first, second = load_turned(one_row, c, s, HALF)
    row = (token * heads + head)[:, None]
    target = k + row * (NOPE + 2 * HALF)
    tl.store(target + lane, tl.load(kv + row * (NOPE + V) + lane))
    spread = tl.zeros([HEADS, HALF], tl.float32)
    store_halves(target + NOPE, spread + first, spread + second, HALF)


@triton.jit
def key_gradients(d_k, d_v, d_kv, d_pe, cos, sin, length, heads, k_token, k_head, v_token, v_head,
                  NOPE: tl.constexpr, HALF: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    d, lane, v_lane = tl.arange(0, HALF)[None, :], tl.arange(0, NOPE)[None, :], tl.arange(0, V)[None, :]
    first, second = tl.zeros([1, HALF], tl.float32), tl.zeros([1, HALF], tl.float32)
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS))[:, None]
        source = d_k + token * k_token + head * k_head
        first += tl.sum(tl.load(source + NOPE + d).to(tl.float32), 0, keep_dims=True)
        second += tl.sum(tl.load(source + NOPE + HALF + d).to(tl.float32), 0, keep_dims=True)
        target = d_kv + (token * heads + head) * (NOPE + V)
        tl.store(target + lane, tl.load(source + lane))
        tl.store(target + NOPE + v_lane, tl.load(d_v + token * v_token + head * v_head + v_lane))
    c, s = load_angles(cos, sin, token % length, HALF)
    row = d_pe + token * 2 * HALF + tl.zeros([1, 1], tl.int32)
    store_halves(row, first * c + second * s, second * c - first * s, HALF)


@triton_op("megacpp_benchmarks::turned", mutates_args={})
def turned(q: Tensor, cos: Tensor, sin: Tensor, nope: int, inverse: bool) -> Tensor:
    """q [batch, tokens, heads, nope + rope] with its rope channels rotated, in a copy that Inductor may drop."""
    out = q.clone()
    batch, tokens, heads, channels = out.shape
    wrap_triton(turn_queries)[(batch * tokens, heads // HEADS_A_PROGRAM)](
        out, cos, sin, tokens, out.stride(1), out.stride(2), NOPE=nope, HALF=(channels - nope) // 2, INVERSE=inverse,
        HEADS=HEADS_A_PROGRAM, num_warps=2,
    )  # fmt: skip
    return out


@triton_op("megacpp_benchmarks::keys", mutates_args={})
def keys(kv: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, nope: int) -> Tensor:
    """K from kv [batch, tokens, heads, nope + v] and the one shared row k_pe [batch, tokens, rope]."""
    batch, tokens, heads, channels = kv.shape
    rope = k_pe.shape[-1]
    k = kv.new_empty(batch, tokens, heads, nope + rope)
    wrap_triton(assemble_keys)[(batch * tokens, heads // HEADS_A_PROGRAM)](
        kv, k_pe, k, cos, sin, tokens, heads, k_pe.stride(1), NOPE=nope, HALF=rope // 2, V=channels - nope,
        HEADS=HEADS_A_PROGRAM, num_warps=4,
    )  # fmt: skip
    return k


@triton_op("megacpp_benchmarks::keys_backward", mutates_args={})
def keys_backward(d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """Gradients of kv and of k_pe."""
    batch, tokens, heads, channels = d_k.shape
    rope, v = channels - nope, d_v.shape[-1]
    d_kv, d_pe = d_k.new_empty(batch, tokens, heads, nope + v), d_k.new_empty(batch, tokens, rope)
    wrap_triton(key_gradients)[(batch * tokens,)](
        d_k, d_v, d_kv, d_pe, cos, sin, tokens, heads, d_k.stride(1), d_k.stride(2), d_v.stride(1), d_v.stride(2),
        NOPE=nope, HALF=rope // 2, V=v, HEADS=HEADS_A_PROGRAM, num_warps=4,
    )  # fmt: skip
    return d_kv, d_pe
