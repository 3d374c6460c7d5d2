"""Models that stand right beside an idiom and are something else: firing there is wrong, or was not asked for.

Every entry runs in eager with gradients. Most name a control, the nearest model in which the passes do fire, with the
same parameters and arguments: a pass that stays silent on both has not been tested by the near miss. Where `differs`
is set, the near miss computes other results or other gradients than its control, so a false match is a wrong model;
elsewhere the values agree, or no such claim is made, and what a match would break is said in `why`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import jitter_gains
from .spellings import angles, rotate_half, sdpa

Build = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


@dataclass(frozen=True)
class NearMiss:
    """build() -> (module, args); the passes in `must_not_fire` have count 0 there and more than 0 in control()."""

    name: str
    build: Build
    must_not_fire: tuple[str, ...]
    why: str
    control: Build | None = None
    differs: bool = False


NEAR_MISSES: list[NearMiss] = []

BATCH, SEQ, DIM, HEADS, RANK, NOPE, ROPE, V = 2, 5, 40, 3, 26, 16, 8, 12
EPS = 0.05  # large, so that a misplaced eps shows in the result


def _build(module: type[nn.Module], body, table_width=None, dtype=torch.float32, table_dtype=None, others=False):
    """A module around `body` and its arguments, the same numbers at every call."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        block = jitter_gains(module(body)).to(dtype)
        x = torch.randn(BATCH, SEQ, DIM).to(dtype).requires_grad_()
    if table_width is None:
        return block, (x,)
    theta = angles(SEQ + 3, 2 * table_width)
    cos, sin = (t.to(table_dtype or dtype) for t in (theta.cos(), theta.sin()))
    args = (x, cos[:SEQ].clone(), sin[:SEQ].clone())
    return block, args + (cos[3:].clone(), sin[3:].clone()) if others else args


def _register(module, control_body, passes, table_width=None):
    """Decorator for bodies beside `control_body`; every body is one near miss, named after its function."""

    def decorator(why, *, differs=True, must_not_fire=passes, control=True, name=None, **arguments):
        def register(body):
            build = partial(_build, module, table_width=table_width, **arguments)
            NEAR_MISSES.append(
                NearMiss(
                    name=name or body.__name__,
                    build=partial(build, body),
                    must_not_fire=tuple(must_not_fire),
                    why=why,
                    control=partial(build, control_body) if control else None,
                    differs=differs and control,
                )
            )
            return body

        return register

    return decorator


# --- down, norm, up


class Bottleneck(nn.Module):
    """Parameters of a low-rank projection with a norm in the middle, and of what some near misses add to it."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.down = nn.Linear(DIM, RANK, bias=False)
        self.other_down = nn.Linear(DIM, RANK, bias=False)
        self.gain = nn.Parameter(torch.ones(RANK))
        self.wide_gain = nn.Parameter(torch.ones(DIM))
        self.shift_bias = nn.Parameter(torch.randn(RANK))
        self.position_gain = nn.Parameter(1 + 0.3 * torch.randn(SEQ, 1))
        self.up = nn.Linear(RANK, HEADS * (NOPE + ROPE), bias=False)
        self.wide_up = nn.Linear(DIM, HEADS * (NOPE + ROPE), bias=False)
        self.token_mix = nn.Linear(SEQ, 7, bias=False)
        self.register_buffer("cache", torch.zeros(BATCH, 2 * SEQ, RANK))

    def forward(self, x):
        return self.body(self, x)


def inverse_rms(h, eps=EPS, dim=-1):
    """1 / sqrt(mean(h^2) + eps)"""
    return torch.rsqrt(h.pow(2).mean(dim, keepdim=True) + eps)


def bottleneck(m, x):
    """The idiom itself."""
    h = m.down(x)
    return m.up(h * inverse_rms(h) * m.gain)


_bottleneck = _register(Bottleneck, bottleneck, ("down_norm_up",))


def _mean_square(h, dim=-1):
    return h.pow(2).mean(dim, keepdim=True)


# name: (why, what the up projection reads, of the input and the latent)
_READ_BY_UP = {
    "eps_outside_the_root": ("eps is added to the root", lambda m, x, h: h / (_mean_square(h).sqrt() + EPS) * m.gain),
    "eps_added_to_inverse_root": (
        "eps is added to the inverse root", lambda m, x, h: h * (inverse_rms(h, 1e-9) + EPS) * m.gain),
    "eps_inside_the_square": (
        "eps is added to the values before they are squared",
        lambda m, x, h: h * torch.rsqrt(_mean_square(h + EPS)) * m.gain),
    "eps_as_clamp": (
        "eps is a lower bound, not a summand", lambda m, x, h: h * _mean_square(h).clamp_min(EPS).rsqrt() * m.gain),
    "l2_normalised": (
        "L2 normalisation: eps bounds the length",
        lambda m, x, h: F.normalize(h, dim=-1, eps=EPS) * RANK**0.5 * m.gain),
    "multiplied_by_the_root": (
        "no inverse: the latent is multiplied by its rms", lambda m, x, h: h * (_mean_square(h) + EPS).sqrt() * m.gain),
    "divided_by_mean_square": (
        "divided by the mean square, no root", lambda m, x, h: h / (_mean_square(h) + EPS) * m.gain),
    "norm_over_positions": ("the mean runs over positions", lambda m, x, h: h * inverse_rms(h, dim=1) * m.gain),
    "norm_over_positions_and_channels": (
        "the mean runs over positions and channels", lambda m, x, h: h * inverse_rms(h, dim=(1, 2)) * m.gain),
    "functional_norm_over_two_dimensions": (
        "rms_norm over the last two dimensions",
        lambda m, x, h: F.rms_norm(h, (SEQ, RANK), m.position_gain * m.gain, EPS)),
    "statistics_of_another_tensor": (
        "the statistics are those of another projection", lambda m, x, h: h * inverse_rms(m.other_down(x)) * m.gain),
    "statistics_of_a_slice": (
        "the statistics are those of some of the channels", lambda m, x, h: h * inverse_rms(h[..., :ROPE]) * m.gain),
    "mean_absolute_value": (
        "mean of |x|", lambda m, x, h: h * torch.rsqrt(h.abs().mean(-1, keepdim=True) + EPS) * m.gain),
    "mean_fourth_power": (
        "mean of x^4", lambda m, x, h: h * torch.rsqrt(h.pow(4).mean(-1, keepdim=True) + EPS) * m.gain),
    "mean_of_unequal_product": (
        "mean of a product of two projections",
        lambda m, x, h: h * torch.rsqrt((h * m.other_down(x)).mean(-1, keepdim=True).abs() + EPS) * m.gain),
    "sum_without_division": (
        "a sum where the mean belongs", lambda m, x, h: h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + EPS) * m.gain),
    "wrong_divisor": (
        "the sum is divided by n - 1",
        lambda m, x, h: h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) / (RANK - 1) + EPS) * m.gain),
    "wrong_exponent": ("the cube root", lambda m, x, h: h * (_mean_square(h) + EPS).pow(-1 / 3) * m.gain),
    "layer_norm": ("LayerNorm subtracts the mean", lambda m, x, h: F.layer_norm(h, (RANK,), m.gain, None, EPS)),
    "mean_subtracted": (
        "the mean is subtracted by hand", lambda m, x, h: (h - h.mean(-1, keepdim=True)) * inverse_rms(h) * m.gain),
    "variance": (
        "variance in place of the mean square",
        lambda m, x, h: h * torch.rsqrt(h.var(-1, keepdim=True, unbiased=False) + EPS) * m.gain),
    "norm_with_bias": ("a bias follows the norm", lambda m, x, h: h * inverse_rms(h) * m.gain + m.shift_bias),
    "activation_before_up": (
        "an activation stands before the up projection", lambda m, x, h: F.silu(h * inverse_rms(h) * m.gain)),
    "dropout_before_up": (
        "dropout stands before the up projection",
        lambda m, x, h: F.dropout(h * inverse_rms(h) * m.gain, p=0.3, training=True)),
    "gated_latent": (
        "the normed latent is gated",
        lambda m, x, h: h * inverse_rms(h) * m.gain * torch.sigmoid(m.other_down(x))),
    "no_norm": ("low rank without a norm", lambda m, x, h: h * m.gain),
    "gain_from_the_input": (
        "the gain depends on the input", lambda m, x, h: h * inverse_rms(h) * (m.gain + m.other_down(x))),
    "gain_of_positions": (
        "one gain for each position, none for channels", lambda m, x, h: h * inverse_rms(h) * m.position_gain),
    "statistics_detached": (
        "no gradient passes through the statistics", lambda m, x, h: h * inverse_rms(h).detach() * m.gain),
    "statistics_in_lower_precision": (
        "the statistics are rounded to bfloat16", lambda m, x, h: h * inverse_rms(h.bfloat16()).float() * m.gain),
}  # fmt: skip

for _name, (_why, _read) in _READ_BY_UP.items():
    _bottleneck(_why, name=_name)(lambda m, x, read=_read: m.up(read(m, x, m.down(x))))


@_bottleneck("the down output is needed whole, beside the norm")
def down_output_reused(m, x):
    h = m.down(x)
    return m.up(h * inverse_rms(h) * m.gain) + m.up(h)


@_bottleneck("the statistics are a second result", differs=False)
def statistics_escape(m, x):
    h = m.down(x)
    scale = inverse_rms(h)
    return m.up(h * scale * m.gain), scale


@_bottleneck("the mean runs over groups of channels")
def grouped_norm(m, x):
    h = m.down(x).unflatten(-1, (2, RANK // 2))
    return m.up((h * inverse_rms(h)).flatten(-2) * m.gain)


@_bottleneck("only half of the latent is normed")
def half_of_the_latent_normed(m, x):
    h, rest = m.down(x).chunk(2, dim=-1)
    return m.up(torch.cat((h * inverse_rms(h), rest), dim=-1) * m.gain)


@_bottleneck("an activation stands before the norm")
def activation_before_norm(m, x):
    h = F.silu(m.down(x))
    return m.up(h * inverse_rms(h) * m.gain)


@_bottleneck("the weight stands on the other side and mixes positions", control=False)
def up_weight_mixes_positions(m, x):
    h = m.down(x)
    return m.token_mix((h * inverse_rms(h) * m.gain).transpose(-1, -2))


@_bottleneck("pre-norm: nothing projects down", control=False)
def no_down_projection(m, x):
    return m.wide_up(x * inverse_rms(x) * m.wide_gain) + m.wide_up(x)


@_bottleneck("an activation, no linear, makes the latent", control=False)
def elementwise_in_place_of_down(m, x):
    h = F.gelu(x)
    return m.wide_up(h * inverse_rms(h) * m.wide_gain)


@_bottleneck("the statistics are computed without gradients")
def statistics_under_no_grad(m, x):
    h = m.down(x)
    with torch.no_grad():
        scale = inverse_rms(h)
    return m.up(h * scale * m.gain)


@_bottleneck("the latent stays float32 and the up projection runs in float32", differs=False, dtype=torch.bfloat16)
def float32_up_projection(m, x):
    h = m.down(x).float()
    return F.linear(h * inverse_rms(h) * m.gain, m.up.weight.float())


# --- the rope slice of queries and keys


class Latents(nn.Module):
    """Projections of a small MLA block; body(m, x, cos, sin, ...) puts queries, keys and values together."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.q = nn.Linear(DIM, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a = nn.Linear(DIM, RANK + ROPE, bias=False)
        self.kv_norm = nn.RMSNorm(RANK, eps=1e-6)
        self.kv_b = nn.Linear(RANK, HEADS * (NOPE + V), bias=False)
        self.k = nn.Linear(DIM, HEADS * (NOPE + ROPE), bias=False)
        self.head_scale = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        self.o = nn.Linear(HEADS * V, DIM, bias=False)

    def forward(self, x, cos, sin, *others):
        return self.body(self, x, cos, sin, *others)

    def heads(self, t):
        """(B, S, H * D) -> (B, H, S, D)"""
        return t.view(BATCH, SEQ, HEADS, -1).transpose(1, 2)

    def queries(self, x):
        """q_nope, q_pe of every head."""
        return self.heads(self.q(x)).split([NOPE, ROPE], dim=-1)

    def keys(self, x):
        """k_nope and v of every head, and the one rope key between them."""
        latent, k_pe = self.kv_a(x).split([RANK, ROPE], dim=-1)
        k_nope, v = self.heads(self.kv_b(self.kv_norm(latent))).split([NOPE, V], dim=-1)
        return k_nope, k_pe.unsqueeze(1), v

    def attend(self, q, k, v):
        """Causal attention and the output projection."""
        return self.o(sdpa(q, k, v).transpose(1, 2).flatten(2))


def turn(x, cos, sin):
    """RoPE on halves, with tables of half the width."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def joined(nope, pe):
    """nope | pe in every head; a single rope key is shared."""
    return torch.cat((nope, pe.expand(*nope.shape[:-1], -1)), dim=-1)


def attention_with(m, x, q_rope=lambda q: q, k_rope=lambda k: k, q_join=joined, k_join=joined):
    """An MLA block around the given rotations and concats."""
    q_nope, q_pe = m.queries(x)
    k_nope, k_pe, v = m.keys(x)
    return m.attend(q_join(q_nope, q_rope(q_pe)), k_join(k_nope, k_rope(k_pe)), v)


def latent_attention(m, x, cos, sin, *_):
    """The idiom itself."""
    rope = partial(turn, cos=cos, sin=sin)
    return attention_with(m, x, rope, rope)


_both = _register(Latents, latent_attention, ("mla_rope_q", "mla_rope_kv"), ROPE // 2)
_query_only = _register(Latents, latent_attention, ("mla_rope_q",), ROPE // 2)
_key_only = _register(Latents, latent_attention, ("mla_rope_kv",), ROPE // 2)


def by_head(table):
    """[H, S, r/2]: every head stands at positions of its own."""
    return torch.stack([table.roll(h, 0) for h in range(HEADS)])


def _by_own_angle(t):
    half = t[..., : ROPE // 2]
    return turn(t, half.cos(), half.sin())


def _half_turned(q, cos, sin):
    moving, still = q.chunk(2, dim=-1)
    return torch.cat((turn(moving, cos[:, ::2], sin[:, ::2]), still), dim=-1)


def _same(t):
    return t


# name: (of which passes, why, what to put in the place of the rotations and concats, given a module and the tables)
_PUT_TOGETHER = {
    "no_rotation": (_both, "NoPE: split and concat around nothing", lambda m, c, s, rope: (_same, _same)),
    "rope_key_unrotated": (_key_only, "the rope key does not rotate", lambda m, c, s, rope: (rope, _same)),
    "query_unrotated": (_query_only, "the query does not rotate", lambda m, c, s, rope: (_same, rope)),
    "table_made_from_the_operand": (
        _both, "the angle is the value itself", lambda m, c, s, rope: (_by_own_angle, _by_own_angle)),
    "table_of_every_head": (
        _query_only, "every head has a table of its own",
        lambda m, c, s, rope: (lambda q: turn(q, c * m.head_scale, s * m.head_scale), rope)),
    "table_of_one_lane": (
        _both, "tables of one lane, broadcast over the slice",
        lambda m, c, s, rope: (partial(turn, cos=c[:, 1:2], sin=s[:, 1:2]),) * 2),
    "table_of_one_position": (
        _both, "tables of one position, broadcast over the text",
        lambda m, c, s, rope: (partial(turn, cos=c[2:3], sin=s[2:3]),) * 2),
    "rotation_in_lower_precision": (
        _both, "float32 operands rotate in bfloat16",
        lambda m, c, s, rope: (lambda t: turn(t.bfloat16(), c.bfloat16(), s.bfloat16()).float(),) * 2),
    "rotation_under_no_grad": (
        _both, "the rotation passes no gradient",
        lambda m, c, s, rope: (torch.no_grad()(lambda t: turn(t, c, s)),) * 2),
    "nope_lanes_reversed": (
        _query_only, "the nope lanes change places",
        lambda m, c, s, rope: (rope, rope, lambda nope, pe: joined(nope.flip(-1), pe))),
    "rope_parts_to_other_heads": (
        _query_only, "the rope parts go to other heads",
        lambda m, c, s, rope: (rope, rope, lambda nope, pe: joined(nope, pe.roll(1, dims=1)))),
    "half_of_the_rope_slice": (
        _query_only, "only half of the rope slice rotates",
        lambda m, c, s, rope: (lambda q: _half_turned(q, c, s), rope)),
    "rotated_halves_change_places": (
        _query_only, "the rotated halves are put together the other way round",
        lambda m, c, s, rope: (lambda q: torch.cat(rope(q).chunk(2, dim=-1)[::-1], dim=-1), rope)),
    "rope_key_scaled_by_head": (
        _key_only, "the shared rope key is scaled for every head",
        lambda m, c, s, rope: (rope, lambda k: rope(k) * m.head_scale)),
    "rope_key_turned_for_every_head": (
        _key_only,
        "the one rope key is turned anew for every head: what backward sums over the heads is no single row's",
        lambda m, c, s, rope: (partial(turn, cos=by_head(c), sin=by_head(s)),) * 2),
    "rope_key_of_the_first_position": (
        _key_only, "one rope key serves all positions", lambda m, c, s, rope: (rope, lambda k: rope(k)[:, :, :1])),
}  # fmt: skip


def _put_together(parts):
    return lambda m, x, cos, sin: attention_with(m, x, *parts(m, cos, sin, partial(turn, cos=cos, sin=sin)))


for _name, (_passes, _why, _parts) in _PUT_TOGETHER.items():
    _passes(_why, name=_name)(_put_together(_parts))


@_both("the two halves read the tables of different positions", others=True)
def halves_at_different_positions(m, x, cos, sin, later_cos, later_sin):
    def rope(t):
        a, b = t.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * later_cos + a * later_sin), dim=-1)

    return attention_with(m, x, rope, rope)


@_query_only("the rope slice overlaps the nope slice")
def slices_overlap(m, x, cos, sin):
    q = m.heads(m.q(x))
    k_nope, k_pe, v = m.keys(x)
    q = joined(q[..., :NOPE], turn(q[..., NOPE - 2 : NOPE + ROPE - 2], cos, sin))
    return m.attend(q, joined(k_nope, turn(k_pe, cos, sin)), v)


@_query_only("two lanes of every head are lost and two are read twice")
def lanes_lost(m, x, cos, sin):
    q = m.heads(m.q(x))
    k_nope, k_pe, v = m.keys(x)
    nope = torch.cat((q[..., :2], q[..., : NOPE - 2]), dim=-1)
    return m.attend(joined(nope, turn(q[..., NOPE:], cos, sin)), joined(k_nope, turn(k_pe, cos, sin)), v)


@_key_only("every head has a rope key of its own", control=False)
def rope_key_of_every_head(m, x, cos, sin):
    q_nope, q_pe = m.queries(x)
    k_nope, _, v = m.keys(x)
    k_pe = m.heads(m.k(x))[..., NOPE:]
    return m.attend(joined(q_nope, turn(q_pe, cos, sin)), joined(k_nope, turn(k_pe, cos, sin)), v)


@_key_only("one rope key for the whole batch, turned anew for each of its texts")
def rope_key_turned_for_every_text(m, x, cos, sin):
    q_nope, q_pe = m.queries(x)
    k_nope, k_pe, v = m.keys(x)
    rope = partial(turn, cos=torch.stack((cos, cos.flip(0)))[:, None], sin=torch.stack((sin, sin.flip(0)))[:, None])
    return m.attend(joined(q_nope, rope(q_pe)), joined(k_nope, rope(k_pe[:1])), v)


@_both("absorbed attention: nope and rope scores are added, no head is put together", differs=False)
def absorbed_scores(m, x, cos, sin):
    q_nope, q_pe = m.queries(x)
    latent, k_pe = m.kv_a(x).split([RANK, ROPE], dim=-1)
    latent = m.kv_norm(latent)
    k_up, v_up = m.kv_b.weight.view(HEADS, NOPE + V, RANK).split([NOPE, V], dim=1)
    scores = torch.einsum("bhsr,btr->bhst", torch.einsum("bhsn,hnr->bhsr", q_nope, k_up), latent)
    scores = scores + torch.einsum("bhsd,btd->bhst", turn(q_pe, cos, sin), turn(k_pe, cos, sin))
    hidden = torch.ones(SEQ, SEQ, dtype=torch.bool, device=x.device).triu(1)
    weights = (scores * (NOPE + ROPE) ** -0.5).masked_fill(hidden, float("-inf")).softmax(-1)
    out = torch.einsum("bhsr,hvr->bshv", torch.einsum("bhst,btr->bhsr", weights, latent), v_up)
    return m.o(out.flatten(2))


# --- whole heads of ordinary attention


class Heads(nn.Module):
    """Projections of grouped-query attention; body(m, q, k, v, cos, sin, ...) rotates and attends."""

    heads, kv_heads, width = 4, 2, 14

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.q = nn.Linear(DIM, self.heads * self.width, bias=False)
        self.k = nn.Linear(DIM, self.kv_heads * self.width, bias=False)
        self.v = nn.Linear(DIM, self.kv_heads * self.width, bias=False)
        self.o = nn.Linear(self.heads * self.width, DIM, bias=False)

    def forward(self, x, cos, sin, *others):
        q, k, v = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = self.body(q, k, cos, sin, *others)
        return self.o(sdpa(q, k, v).transpose(1, 2).flatten(2))


def rotated_heads(q, k, cos, sin, *_):
    """The idiom itself."""
    return turn(q, cos, sin), turn(k, cos, sin)


_heads = _register(Heads, rotated_heads, ("rope_qk",), Heads.width // 2)


@_heads("queries and keys read different tables", others=True)
def tables_differ_between_query_and_key(q, k, cos, sin, later_cos, later_sin):
    return turn(q, cos, sin), turn(k, later_cos, later_sin)


@_heads("queries and keys share the cosines only", others=True)
def sines_differ_between_query_and_key(q, k, cos, sin, later_cos, later_sin):
    return turn(q, cos, sin), turn(k, cos, later_sin)


@_heads("only queries rotate")
def key_heads_unrotated(q, k, cos, sin):
    return turn(q, cos, sin), k


@_heads("queries turn neighbouring lanes, keys turn halves")
def pairings_differ_between_query_and_key(q, k, cos, sin):
    a, b = q[..., ::2], q[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2), turn(k, cos, sin)


@_heads("the rotated halves of queries are put together the other way round")
def query_halves_change_places(q, k, cos, sin):
    a, b = q.chunk(2, dim=-1)
    return torch.cat((b * cos + a * sin, a * cos - b * sin), dim=-1), turn(k, cos, sin)


# rope_qk takes rotated lanes at either end of the head, so both of these are its own; they stay no MLA.
_no_mla = partial(_heads, must_not_fire=("mla_rope_q", "mla_rope_kv"), control=False)


@_no_mla("partial rotary, rotated lanes first: no query or key of MLA")
def leading_lanes_rotate(q, k, cos, sin):
    return tuple(torch.cat((turn(t[..., :6], cos[:, :3], sin[:, :3]), t[..., 6:]), dim=-1) for t in (q, k))


@_no_mla("partial rotary, rotated lanes last: the key heads are not shared")
def trailing_lanes_rotate(q, k, cos, sin):
    parts = (t.split([8, 6], dim=-1) for t in (q, k))
    return tuple(torch.cat((still, turn(moving, cos[:, :3], sin[:, :3])), dim=-1) for still, moving in parts)


# --- what is no rotation, in both kinds of attention


def of_halves(rotated):
    """`rotated(a, b, cos, sin)`: both halves of the result, of those of the operand."""
    return lambda x, cos, sin: torch.cat(rotated(*x.chunk(2, dim=-1), cos, sin), dim=-1)


reflection = of_halves(lambda a, b, cos, sin: (a * cos + b * sin, a * sin - b * cos))
tables_swapped_in_the_second_half = of_halves(lambda a, b, cos, sin: (a * cos - b * sin, b * sin + a * cos))


def cosine_only(x, cos, sin):
    return torch.cat((x[..., : x.size(-1) // 2] * cos, x[..., x.size(-1) // 2 :] * cos), dim=-1)


def second_half_reads_the_rotated_first(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    a = a * cos - b * sin
    return torch.cat((a, b * cos + a * sin), dim=-1)


def by_half_turn(turned):
    def rotated(x, cos, sin):
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        return x * cos + turned(x) * sin

    return rotated


def neighbours_turned_with_the_wrong_partner(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2].flip(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def of_complex_numbers(combined):
    def rotated(x, cos, sin):
        z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(combined(z, torch.complex(cos, sin))).flatten(-2)

    return rotated


# name: (why, function)
_NO_ROTATIONS = {
    "same_sign_in_both_halves": (
        "both halves add: hyperbolic, not a rotation",
        of_halves(lambda a, b, cos, sin: (a * cos + b * sin, b * cos + a * sin))),
    "reflection": ("determinant -1", reflection),
    "cosine_only": ("the sine terms are missing", cosine_only),
    "tables_swapped_in_the_second_half": ("cos and sin are swapped in one half", tables_swapped_in_the_second_half),
    "second_half_reads_the_first_twice": (
        "a product takes the wrong half", of_halves(lambda a, b, cos, sin: (a * cos - b * sin, a * cos + a * sin))),
    "second_half_reads_the_rotated_first": (
        "the first half is overwritten before the second reads it", second_half_reads_the_rotated_first),
    "half_turn_without_a_sign": (
        "the half turn lost its minus", by_half_turn(lambda x: torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1))),
    "half_turn_of_a_scaled_operand": ("the sine term is doubled", by_half_turn(lambda x: rotate_half(2 * x))),
    "neighbours_turned_with_the_wrong_partner": (
        "odd lanes are reversed, so that pairs are no neighbours", neighbours_turned_with_the_wrong_partner),
    "complex_conjugate_of_the_operand": (
        "the operand is conjugated: a reflection", of_complex_numbers(lambda z, table: z.conj() * table)),
    "complex_sum": ("complex numbers are added, not multiplied", of_complex_numbers(lambda z, table: z + table)),
}  # fmt: skip

for _name, (_why, _function) in _NO_ROTATIONS.items():

    def _in_latent_attention(m, x, cos, sin, function=_function):
        rope = partial(function, cos=cos, sin=sin)
        return attention_with(m, x, rope, rope)

    def _in_heads(q, k, cos, sin, function=_function):
        return function(q, cos, sin), function(k, cos, sin)

    _both(_why, name=f"{_name}_in_latent_attention")(_in_latent_attention)
    _heads(_why, name=f"{_name}_in_whole_heads")(_in_heads)
