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


@_bottleneck("the down output is needed whole, beside the norm")
def down_output_reused(m, x):
    h = m.down(x)
    return m.up(h * inverse_rms(h) * m.gain) + m.up(h)


@_bottleneck("the statistics are a second result", differs=False)
def statistics_escape(m, x):
    h = m.down(x)
    scale = inverse_rms(h)
    return m.up(h * scale * m.gain), scale


@_bottleneck("eps is added to the root")
def eps_outside_the_root(m, x):
    h = m.down(x)
    return m.up(h / (h.pow(2).mean(-1, keepdim=True).sqrt() + EPS) * m.gain)


@_bottleneck("eps is added to the inverse root")
def eps_added_to_inverse_root(m, x):
    h = m.down(x)
    return m.up(h * (inverse_rms(h, 1e-9) + EPS) * m.gain)


@_bottleneck("eps is added to the values before they are squared")
def eps_inside_the_square(m, x):
    h = m.down(x)
    return m.up(h * torch.rsqrt((h + EPS).pow(2).mean(-1, keepdim=True)) * m.gain)


@_bottleneck("eps is a lower bound, not a summand")
def eps_as_clamp(m, x):
    h = m.down(x)
    return m.up(h * h.pow(2).mean(-1, keepdim=True).clamp_min(EPS).rsqrt() * m.gain)


@_bottleneck("L2 normalisation: eps bounds the length")
def l2_normalised(m, x):
    return m.up(F.normalize(m.down(x), dim=-1, eps=EPS) * RANK**0.5 * m.gain)


@_bottleneck("no inverse: the latent is multiplied by its rms")
def multiplied_by_the_root(m, x):
    h = m.down(x)
    return m.up(h * (h.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * m.gain)


@_bottleneck("divided by the mean square, no root")
def divided_by_mean_square(m, x):
    h = m.down(x)
    return m.up(h / (h.pow(2).mean(-1, keepdim=True) + EPS) * m.gain)


@_bottleneck("the mean runs over positions")
def norm_over_positions(m, x):
    h = m.down(x)
    return m.up(h * inverse_rms(h, dim=1) * m.gain)


@_bottleneck("the mean runs over positions and channels")
def norm_over_positions_and_channels(m, x):
    h = m.down(x)
    return m.up(h * inverse_rms(h, dim=(1, 2)) * m.gain)


@_bottleneck("rms_norm over the last two dimensions")
def functional_norm_over_two_dimensions(m, x):
    return m.up(F.rms_norm(m.down(x), (SEQ, RANK), m.position_gain * m.gain, EPS))


@_bottleneck("the mean runs over groups of channels")
def grouped_norm(m, x):
    h = m.down(x).unflatten(-1, (2, RANK // 2))
    return m.up((h * inverse_rms(h)).flatten(-2) * m.gain)


@_bottleneck("only half of the latent is normed")
def half_of_the_latent_normed(m, x):
    h, rest = m.down(x).chunk(2, dim=-1)
    return m.up(torch.cat((h * inverse_rms(h), rest), dim=-1) * m.gain)


@_bottleneck("the statistics are those of another projection")
def statistics_of_another_tensor(m, x):
    return m.up(m.down(x) * inverse_rms(m.other_down(x)) * m.gain)


@_bottleneck("the statistics are those of some of the channels")
def statistics_of_a_slice(m, x):
    h = m.down(x)
    return m.up(h * inverse_rms(h[..., :ROPE]) * m.gain)


@_bottleneck("mean of |x|")
def mean_absolute_value(m, x):
    h = m.down(x)
    return m.up(h * torch.rsqrt(h.abs().mean(-1, keepdim=True) + EPS) * m.gain)


@_bottleneck("mean of x^4")
def mean_fourth_power(m, x):
    h = m.down(x)
    return m.up(h * torch.rsqrt(h.pow(4).mean(-1, keepdim=True) + EPS) * m.gain)


@_bottleneck("mean of a product of two projections")
def mean_of_unequal_product(m, x):
    h = m.down(x)
    return m.up(h * torch.rsqrt((h * m.other_down(x)).mean(-1, keepdim=True).abs() + EPS) * m.gain)


@_bottleneck("a sum where the mean belongs")
def sum_without_division(m, x):
    h = m.down(x)
    return m.up(h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + EPS) * m.gain)


@_bottleneck("the sum is divided by n - 1")
def wrong_divisor(m, x):
    h = m.down(x)
    return m.up(h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) / (RANK - 1) + EPS) * m.gain)


@_bottleneck("the cube root")
def wrong_exponent(m, x):
    h = m.down(x)
    return m.up(h * (h.pow(2).mean(-1, keepdim=True) + EPS).pow(-1 / 3) * m.gain)


@_bottleneck("LayerNorm subtracts the mean")
def layer_norm(m, x):
    return m.up(F.layer_norm(m.down(x), (RANK,), m.gain, None, EPS))


@_bottleneck("the mean is subtracted by hand")
def mean_subtracted(m, x):
    h = m.down(x)
    return m.up((h - h.mean(-1, keepdim=True)) * inverse_rms(h) * m.gain)


@_bottleneck("variance in place of the mean square")
def variance(m, x):
    h = m.down(x)
    return m.up(h * torch.rsqrt(h.var(-1, keepdim=True, unbiased=False) + EPS) * m.gain)


@_bottleneck("a bias follows the norm")
def norm_with_bias(m, x):
    h = m.down(x)
    return m.up(h * inverse_rms(h) * m.gain + m.shift_bias)


@_bottleneck("an activation stands before the up projection")
def activation_before_up(m, x):
    h = m.down(x)
    return m.up(F.silu(h * inverse_rms(h) * m.gain))


@_bottleneck("an activation stands before the norm")
def activation_before_norm(m, x):
    h = F.silu(m.down(x))
    return m.up(h * inverse_rms(h) * m.gain)


@_bottleneck("dropout stands before the up projection")
def dropout_before_up(m, x):
    h = m.down(x)
    return m.up(F.dropout(h * inverse_rms(h) * m.gain, p=0.3, training=True))


@_bottleneck("the normed latent is gated")
def gated_latent(m, x):
    h = m.down(x)
    return m.up(h * inverse_rms(h) * m.gain * torch.sigmoid(m.other_down(x)))


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


@_bottleneck("low rank without a norm")
def no_norm(m, x):
    return m.up(m.down(x) * m.gain)


@_bottleneck("the gain depends on the input")
def gain_from_the_input(m, x):
    h = m.down(x)
    return m.up(h * inverse_rms(h) * (m.gain + m.other_down(x)))


@_bottleneck("one gain for each position, none for channels")
def gain_of_positions(m, x):
    h = m.down(x)
    return m.up(h * inverse_rms(h) * m.position_gain)


@_bottleneck("no gradient passes through the statistics")
def statistics_detached(m, x):
    h = m.down(x)
    return m.up(h * inverse_rms(h).detach() * m.gain)


@_bottleneck("the statistics are computed without gradients")
def statistics_under_no_grad(m, x):
    h = m.down(x)
    with torch.no_grad():
        scale = inverse_rms(h)
    return m.up(h * scale * m.gain)


@_bottleneck("the statistics are rounded to bfloat16")
def statistics_in_lower_precision(m, x):
    h = m.down(x)
    return m.up(h * inverse_rms(h.bfloat16()).float() * m.gain)


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


@_both("NoPE: split and concat around nothing")
def no_rotation(m, x, cos, sin):
    return attention_with(m, x)


@_key_only("the rope key does not rotate")
def rope_key_unrotated(m, x, cos, sin):
    return attention_with(m, x, q_rope=partial(turn, cos=cos, sin=sin))


@_query_only("the query does not rotate")
def query_unrotated(m, x, cos, sin):
    return attention_with(m, x, k_rope=partial(turn, cos=cos, sin=sin))


@_both("the angle is the value itself")
def table_made_from_the_operand(m, x, cos, sin):
    def rope(t):
        half = t[..., : ROPE // 2]
        return turn(t, half.cos(), half.sin())

    return attention_with(m, x, rope, rope)


@_query_only("every head has a table of its own")
def table_of_every_head(m, x, cos, sin):
    rope = partial(turn, cos=cos, sin=sin)
    return attention_with(m, x, lambda q: turn(q, cos * m.head_scale, sin * m.head_scale), rope)


@_both("tables of one lane, broadcast over the slice")
def table_of_one_lane(m, x, cos, sin):
    rope = partial(turn, cos=cos[:, 1:2], sin=sin[:, 1:2])
    return attention_with(m, x, rope, rope)


@_both("tables of one position, broadcast over the text")
def table_of_one_position(m, x, cos, sin):
    rope = partial(turn, cos=cos[2:3], sin=sin[2:3])
    return attention_with(m, x, rope, rope)


@_both("the two halves read the tables of different positions", others=True)
def halves_at_different_positions(m, x, cos, sin, later_cos, later_sin):
    def rope(t):
        a, b = t.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * later_cos + a * later_sin), dim=-1)

    return attention_with(m, x, rope, rope)


@_both("float32 operands rotate in bfloat16")
def rotation_in_lower_precision(m, x, cos, sin):
    def rope(t):
        return turn(t.bfloat16(), cos.bfloat16(), sin.bfloat16()).float()

    return attention_with(m, x, rope, rope)


@_both("the rotation passes no gradient")
def rotation_under_no_grad(m, x, cos, sin):
    @torch.no_grad()
    def rope(t):
        return turn(t, cos, sin)

    return attention_with(m, x, rope, rope)


@_query_only("the nope lanes change places")
def nope_lanes_reversed(m, x, cos, sin):
    rope = partial(turn, cos=cos, sin=sin)
    return attention_with(m, x, rope, rope, q_join=lambda nope, pe: joined(nope.flip(-1), pe))


@_query_only("the rope parts go to other heads")
def rope_parts_to_other_heads(m, x, cos, sin):
    rope = partial(turn, cos=cos, sin=sin)
    return attention_with(m, x, rope, rope, q_join=lambda nope, pe: joined(nope, pe.roll(1, dims=1)))


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


@_query_only("only half of the rope slice rotates")
def half_of_the_rope_slice(m, x, cos, sin):
    def partly(q):
        moving, still = q.chunk(2, dim=-1)
        return torch.cat((turn(moving, cos[:, ::2], sin[:, ::2]), still), dim=-1)

    return attention_with(m, x, partly, partial(turn, cos=cos, sin=sin))


@_query_only("the rotated halves are put together the other way round")
def rotated_halves_change_places(m, x, cos, sin):
    rope = partial(turn, cos=cos, sin=sin)
    return attention_with(m, x, lambda q: torch.cat(rope(q).chunk(2, dim=-1)[::-1], dim=-1), rope)


@_key_only("every head has a rope key of its own", control=False)
def rope_key_of_every_head(m, x, cos, sin):
    q_nope, q_pe = m.queries(x)
    k_nope, _, v = m.keys(x)
    k_pe = m.heads(m.k(x))[..., NOPE:]
    return m.attend(joined(q_nope, turn(q_pe, cos, sin)), joined(k_nope, turn(k_pe, cos, sin)), v)


@_key_only("the shared rope key is scaled for every head")
def rope_key_scaled_by_head(m, x, cos, sin):
    rope = partial(turn, cos=cos, sin=sin)
    return attention_with(m, x, rope, lambda k: rope(k) * m.head_scale)


def by_head(table):
    """[H, S, r/2]: every head stands at positions of its own."""
    return torch.stack([table.roll(h, 0) for h in range(HEADS)])


@_key_only("the one rope key is turned anew for every head: what backward sums over the heads is no single row's")
def rope_key_turned_for_every_head(m, x, cos, sin):
    rope = partial(turn, cos=by_head(cos), sin=by_head(sin))
    return attention_with(m, x, rope, rope)


@_key_only("one rope key for the whole batch, turned anew for each of its texts")
def rope_key_turned_for_every_text(m, x, cos, sin):
    q_nope, q_pe = m.queries(x)
    k_nope, k_pe, v = m.keys(x)
    rope = partial(turn, cos=torch.stack((cos, cos.flip(0)))[:, None], sin=torch.stack((sin, sin.flip(0)))[:, None])
    return m.attend(joined(q_nope, rope(q_pe)), joined(k_nope, rope(k_pe[:1])), v)


@_key_only("one rope key serves all positions")
def rope_key_of_the_first_position(m, x, cos, sin):
    rope = partial(turn, cos=cos, sin=sin)
    return attention_with(m, x, rope, lambda k: rope(k)[:, :, :1])


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
@_heads(
    "partial rotary, rotated lanes first: no query or key of MLA",
    must_not_fire=("mla_rope_q", "mla_rope_kv"),
    control=False,
)
def leading_lanes_rotate(q, k, cos, sin):
    def partly(t):
        moving, still = t[..., :6], t[..., 6:]
        return torch.cat((turn(moving, cos[:, :3], sin[:, :3]), still), dim=-1)

    return partly(q), partly(k)


@_heads(
    "partial rotary, rotated lanes last: the key heads are not shared",
    must_not_fire=("mla_rope_q", "mla_rope_kv"),
    control=False,
)
def trailing_lanes_rotate(q, k, cos, sin):
    def partly(t):
        still, moving = t.split([8, 6], dim=-1)
        return torch.cat((still, turn(moving, cos[:, :3], sin[:, :3])), dim=-1)

    return partly(q), partly(k)


# --- what is no rotation, in both kinds of attention


def same_sign_in_both_halves(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos + a * sin), dim=-1)


def reflection(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, a * sin - b * cos), dim=-1)


def cosine_only(x, cos, sin):
    return torch.cat((x[..., : x.size(-1) // 2] * cos, x[..., x.size(-1) // 2 :] * cos), dim=-1)


def tables_swapped_in_the_second_half(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * sin + a * cos), dim=-1)


def second_half_reads_the_first_twice(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * cos + a * sin), dim=-1)


def second_half_reads_the_rotated_first(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    a = a * cos - b * sin
    return torch.cat((a, b * cos + a * sin), dim=-1)


def half_turn_without_a_sign(x, cos, sin):
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    return x * cos + torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1) * sin


def half_turn_of_a_scaled_operand(x, cos, sin):
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    return x * cos + rotate_half(2 * x) * sin


def neighbours_turned_with_the_wrong_partner(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2].flip(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def complex_conjugate_of_the_operand(x, cos, sin):
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z.conj() * torch.complex(cos, sin)).flatten(-2)


def complex_sum(x, cos, sin):
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z + torch.complex(cos, sin)).flatten(-2)


_NO_ROTATIONS = {
    same_sign_in_both_halves: "both halves add: hyperbolic, not a rotation",
    reflection: "determinant -1",
    cosine_only: "the sine terms are missing",
    tables_swapped_in_the_second_half: "cos and sin are swapped in one half",
    second_half_reads_the_first_twice: "a product takes the wrong half",
    second_half_reads_the_rotated_first: "the first half is overwritten before the second reads it",
    half_turn_without_a_sign: "the half turn lost its minus",
    half_turn_of_a_scaled_operand: "the sine term is doubled",
    neighbours_turned_with_the_wrong_partner: "odd lanes are reversed, so that pairs are no neighbours",
    complex_conjugate_of_the_operand: "the operand is conjugated: a reflection",
    complex_sum: "complex numbers are added, not multiplied",
}

for _function, _why in _NO_ROTATIONS.items():

    def _in_latent_attention(m, x, cos, sin, function=_function):
        rope = partial(function, cos=cos, sin=sin)
        return attention_with(m, x, rope, rope)

    def _in_heads(q, k, cos, sin, function=_function):
        return function(q, cos, sin), function(k, cos, sin)

    _both(_why, name=f"{_function.__name__}_in_latent_attention")(_in_latent_attention)
    _heads(_why, name=f"{_function.__name__}_in_whole_heads")(_in_heads)
