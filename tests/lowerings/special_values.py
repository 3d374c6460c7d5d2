"""What no number, infinities, nothing at all and sums in half precision are held to be, by op: `ENTRIES`.

`plain` is the op as a model writes it in eager, a row at a time where eager goes by rows. An entry says which parts of
its operands do not count (`left_out`), and which of that the op promises, whatever plain code makes of it (`promised`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import CASES
from .delta_recurrence import delta_rule, linear_attention

Args = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """What an op is held to, and by which calls.

    Attributes:
        plain: (*args) -> the results that have gradients, by the arguments of the op.
        leaves: places of the arguments that have gradients.
        case: a label of `CASES`, whose arguments `prepare` may change.
        left_out: name -> (args, value) -> args with `value` where nothing counts.
        promised: names in `left_out` that the op says change nothing, be it more than plain code does.
        empty: name -> (rand) -> arguments of a call of which something is empty.
        token: place of an operand to be no number in one token -> its dimension of tokens.
        squared: those operands are summed in squares, which leave float32's range before they do.
        rows: of each result that has a gradient, the dimension of tokens.
        block: of each, the tokens that upstream gradients treat alike.
        freed: why results and gradients may be numbers where plain code's are none.
        estimates: leaves whose gradients have not the values of plain code's.
        call: (op, *args) -> results to compare, where these are not the op's own.
        tolerance: how far off they may be, where operands are rounded to float8.
        by_kernels: lowering -> what stands in the place of `plain` where that serves the call.
        large: (args) -> args whose sums leave float16's range before what they are multiplied by brings them back.
    """

    plain: Callable[..., list[Tensor]]
    leaves: tuple[int, ...]
    case: str
    prepare: Callable[[Args], Args] = lambda args: args
    left_out: Mapping[str, Callable[[Args, float], Args]] = dataclasses.field(default_factory=dict)
    promised: frozenset[str] = frozenset()
    empty: Mapping[str, Callable[[Any], Args]] = dataclasses.field(default_factory=dict)
    token: Mapping[int, int] = dataclasses.field(default_factory=dict)
    squared: bool = False
    rows: tuple[int, ...] = (0,)
    block: Callable[[Args], tuple[slice, ...]] = lambda _: (slice(1, 2), slice(1, 2), slice(1, 2))
    freed: str = ""
    estimates: tuple[int, ...] = ()
    call: Callable[..., Any] | None = None
    tolerance: float | None = None
    by_kernels: Mapping[str, Callable[..., list[Tensor]]] = dataclasses.field(default_factory=dict)
    large: Callable[[Args], Args] | None = None


ENTRIES: dict[str, Entry] = {}


def replaced(args: Args, **new: Any) -> Args:
    """`args` with others at the places `_0`, `_1`, ..."""
    return tuple(new.get(f"_{i}", a) for i, a in enumerate(args))


def filled(t: Tensor, where: Any, value: float) -> Tensor:
    t = t.clone()
    t[where] = value
    return t


def of_case(op: str, *labels: str) -> dict[str, Callable[[Any], Args]]:
    """Calls of which nothing is left, from the table of cases."""
    return {label: lambda rand, label=label: CASES[op][label](rand, torch.float32) for label in labels}


# --- mixers


def causal_conv1d(x, weight, bias, activation, out_dtype, seq_idx=None):
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias, taps = weight.to(wide), None if bias is None else bias.to(wide), weight.shape[1]
    rows = []
    for row in range(x.shape[0]):
        steps = []
        for t in range(x.shape[1]):
            total = torch.zeros_like(x[row, 0], dtype=wide) if bias is None else bias
            for j in range(t - taps + 1, t + 1):
                there = j >= 0 and (seq_idx is None or seq_idx[row, j] == seq_idx[row, t])
                step = x[row, j] if there else torch.zeros_like(x[row, 0])
                total = total + weight[:, taps - 1 - t + j] * step.to(wide)
            steps.append(total)
        rows.append(torch.stack(steps) if steps else x[row].to(wide))
    y = torch.stack(rows) if rows else x.to(wide)
    return [(F.silu(y) if activation == "silu" else y).to(out_dtype)]


ENTRIES["causal_conv1d"] = Entry(
    causal_conv1d, (0, 1, 2), "documents",
    left_out={"a document": lambda args, bad: replaced(args, _0=filled(args[0], args[5] == args[5][0, 4], bad))},
    empty={
        "no batch": of_case("causal_conv1d", "no_batch")["no_batch"],
        "no step": lambda rand: replaced(a := CASES["causal_conv1d"]["taps_3"](rand, torch.float32), _0=a[0][:, :0]),
    },
    token={0: 1}, rows=(1,),
)  # fmt: skip


def gated_rms_norm(y, z, weight, eps, group, norm_before_gate, out_dtype, act="silu"):
    wide = torch.promote_types(y.dtype, torch.float32)
    gate, h = (F.silu if act == "silu" else torch.sigmoid)(z.to(wide)), y.to(wide)
    h = h if norm_before_gate else h * gate
    parts = h.unflatten(-1, (-1, group))
    h = (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    h = h if weight is None else h * weight.to(wide)
    return [(h * gate if norm_before_gate else h).to(out_dtype)]


for label in ("groups", "groups_norm_first_sigmoid"):
    ENTRIES[f"gated_rms_norm {label}"] = Entry(
        gated_rms_norm, (0, 1, 2), label, empty=of_case("gated_rms_norm", "no_rows"), token={0: 1, 1: 1}, squared=True,
        rows=(1,),
    )


def hyper_connection(streams, weight, scale, base, norm_eps, pre, post, init, eps, axes, out_dtype):
    wide, n = torch.promote_types(streams.dtype, torch.float32), streams.shape[-2]
    flat = streams.to(wide).flatten(-2)
    flat = flat * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + norm_eps)
    affine = F.linear(flat, weight.to(wide)) * scale.to(wide) + base.to(wide)
    before = torch.sigmoid(affine[..., :n]) * pre[0] + pre[1]
    behind = torch.sigmoid(affine[..., n : 2 * n]) * post[0] + post[1]
    mix = torch.softmax(affine[..., 2 * n :].unflatten(-1, (n, n)), -1) + eps[0]
    for axis in axes:
        mix = mix / (mix.sum(axis, keepdim=True) + eps[1])
    return [(before.unsqueeze(-1) * streams.to(wide)).sum(-2).to(out_dtype), behind, mix]


ENTRIES["hyper_connection"] = Entry(
    hyper_connection, (0, 1, 2, 3), "sinkhorn", empty=of_case("hyper_connection", "no_tokens"), token={0: 1},
    squared=True, rows=(1, 1, 1),
    freed="backward goes by the logits, which are 0 where the mean of squares has left float32's range",
)


def stream_update(streams, block, post, mix, out_dtype):
    wide = torch.promote_types(streams.dtype, torch.float32)
    mixed = (mix.to(wide).unsqueeze(-1) * streams.to(wide).unsqueeze(-3)).sum(-2)
    return [(mixed + post.to(wide).unsqueeze(-1) * block.to(wide).unsqueeze(-2)).to(out_dtype)]


ENTRIES["stream_update"] = Entry(
    stream_update, (0, 1, 2, 3), "four_streams", empty=of_case("stream_update", "no_tokens"),
    token={0: 1, 1: 1, 2: 1, 3: 1}, rows=(1,),
)


def chunked(x, dt, A, B, C, D, state, chunk, out_dtype, seq_idx=None):
    """Listing 1 of Mamba-2, as models without its kernels have it, and with a state to begin from."""
    assert seq_idx is None
    wide = torch.promote_types(x.dtype, torch.float32)
    (b, t, h, p), n = x.shape, B.shape[-1]
    behind = -t % chunk
    B, C = (m.to(wide).repeat_interleave(h // m.shape[2], 2) for m in (B, C))
    given = x.to(wide)
    x, decay, B, C = (
        F.pad(m, (0, 0) * (m.dim() - 2) + (0, behind)).unflatten(1, (-1, chunk))
        for m in (given * dt[..., None].to(wide), dt.to(wide) * A.to(wide), B, C)
    )
    decay = decay.permute(0, 3, 1, 2)  # [b, h, c, l]
    sums = decay.cumsum(-1)
    within = segments(decay).exp()
    y = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, within, x)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, (sums[..., -1:] - sums).exp(), x)
    first = states.new_zeros(b, 1, h, p, n) if state is None else state.to(wide)[:, None]
    across = segments(F.pad(sums[..., -1], (1, 0))).exp()
    states = torch.einsum("bhzc,bchpn->bzhpn", across, torch.cat((first, states), 1))
    y = y + torch.einsum("bclhn,bchpn,bhcl->bclhp", C, states[:, :-1], sums.exp())
    y = y.flatten(1, 2)[:, :t]
    return [(y if D is None else y + D.to(wide)[:, None] * given).to(out_dtype), states[:, -1]]


def segments(logs: Tensor) -> Tensor:
    """[..., l, s]: the sum of what comes behind s and up to l."""
    n = logs.shape[-1]
    below = torch.ones(n, n, dtype=torch.bool, device=logs.device)
    each = logs[..., None].expand(*logs.shape, n).masked_fill(~below.tril(-1), 0).cumsum(-2)
    return each.masked_fill(~below.tril(), -torch.inf)


ENTRIES["ssd_scan"] = Entry(
    chunked, (0, 1, 2, 3, 4, 5, 6), "plain", empty=of_case("ssd_scan", "no_batch", "no_token", "no_token_no_state"),
    token={0: 1, 3: 1}, rows=(1, 0),
    freed="kernels carry the state from chunk to chunk, where a GEMM over all chunks multiplies by zeros",
)  # fmt: skip


def by_token(u, dt, A, B, C, D, state, chunk, out_dtype):
    """Mamba-1's scan as models have it: decays and what enters of all tokens, and a loop."""
    u, dt, A, B, C = wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (u, dt, A, B, C)]
    decay, added = (dt[..., None] * A).exp(), dt[..., None] * B[:, :, None] * u[..., None]
    state, y = wide[0].new_zeros(u.shape[0], *A.shape) if state is None else state.to(u.dtype), []
    for i in range(u.shape[1]):
        state = decay[:, i] * state + added[:, i]
        y.append((state * C[:, i, None]).sum(-1))
    made = torch.stack(y, 1) if y else u
    return [(made if D is None else made + D.to(u.dtype) * u).to(out_dtype), state]


ENTRIES["selective_scan"] = Entry(
    by_token, (0, 1, 2, 3, 4, 5, 6), "plain",
    empty=of_case("selective_scan", "no_batch", "no_token", "no_token_no_state", "no_channel"), token={0: 1, 3: 1},
    rows=(1, 0),
)  # fmt: skip


def a_document(tensors: int) -> Callable[[Args, float], Args]:
    def fill(args: Args, bad: float) -> Args:
        *operands, ends = *args[:tensors], args[tensors + 1]
        start, end = ends.tolist()[1:3]
        where = (slice(None), slice(start, end))
        return replaced(args, **{f"_{i}": filled(t, where, bad) for i, t in enumerate(operands) if t is not None})

    return fill


def second_document(args: Args) -> tuple[slice, ...]:
    """A whole one: a token reaches the others of its chunk, whose keys and values are one GEMM, as they are in the code
    by chunks that models have for training."""
    ends = next(t for t in args if isinstance(t, Tensor) and t.dtype == torch.int32)
    return slice(*ends.tolist()[1:3]), slice(1, 2)


def decoupled(rule: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    """A rule by tokens in no less than float32, rounded as the op says."""

    def plain(*args: Any) -> list[Tensor]:
        wide = [a.to(torch.promote_types(a.dtype, torch.float32)) if isinstance(a, Tensor) and a.is_floating_point()
                else a for a in args]  # fmt: skip
        o, final = rule(*wide)
        return [o.to(args[-1]), final]

    return plain


NOTHING = "no_token", "no_batch", "empty_documents", "documents_without_tokens"
for name, rule, tensors in (("gated_delta_rule", delta_rule, 5), ("gated_linear_attention", linear_attention, 4)):
    for label in ("documents", "documents_channels"):
        if label in CASES[name]:
            ENTRIES[name + label.removeprefix("documents").replace("_", " ")] = Entry(
                decoupled(rule), tuple(range(tensors + 1)), label, left_out={"a document": a_document(tensors)},
                empty=of_case(name, *[nothing for nothing in NOTHING if nothing in CASES[name]]), rows=(1, 0),
                block=second_document,
            )  # fmt: skip

# --- norms and projections


def normed(x: Tensor, gain: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide if gain is None else wide * gain.to(wide.dtype)).to(dtype)


def norm_linear(x, w_norm, w, b, eps):
    h = normed(x, w_norm, eps, w[0].dtype)
    return [F.linear(h, one, b[i] if b else None) for i, one in enumerate(w)]


def down_norm_up(x, w_down, b_down, w_norm, w_up, eps, start, size, keep_latent=False):
    down = F.linear(x, w_down, b_down)
    h = normed(down[..., start : start + size], w_norm, eps, down.dtype)
    rest = torch.cat((down[..., :start], down[..., start + size :]), -1)
    return [*(F.linear(h, w) for w in w_up), rest]


def compressed_linear(x, w, b, draw, rank, seed):
    return [F.linear(x, one, b[i] if b else None) for i, one in enumerate(w)]


ENTRIES["norm_linear"] = Entry(
    norm_linear, (0, 1, 2, 3), "biases", empty=of_case("norm_linear", "no_token"), token={0: 1}, squared=True,
    rows=(1, 1),
)
for label in ("latent_before_rope_key", "latent_before_rope_key_kept"):
    ENTRIES[f"down_norm_up {label}"] = Entry(
        down_norm_up, (0, 1, 2, 3, 4), label, empty=of_case("down_norm_up", "no_token"), token={0: 1}, squared=True,
    rows=(1, 1),
    )
ENTRIES["compressed_linear"] = Entry(
    compressed_linear, (0, 1, 2), "three_biases", empty=of_case("compressed_linear", "no_token"), token={0: 1},
    rows=(1, 1, 1), estimates=(1,),
)  # fmt: skip


from . import (  # noqa: E402  their entries enter themselves above
    special_attention,  # noqa: F401
    special_experts,  # noqa: F401
    special_float8,  # noqa: F401
)
