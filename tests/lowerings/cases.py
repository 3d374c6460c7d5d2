"""The cases every lowering is tried on: `CASES[op][label](rand, dtype)` makes the arguments of one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megacpp_compile.lowerings.moe._grouped import experts_of
from megacpp_compile.lowerings.moe.reference import by_expert

from . import LAYOUTS
from .agreement import KIND, reference_of

CASES: dict[str, dict[str, Callable[..., tuple[Any, ...]]]] = {name: {} for name in KIND}


def case(op: str, label: str):
    """Register `make(rand, dtype) -> arguments` as a case of `op`."""

    def register(make):
        CASES[op][label] = make
        return make

    return register


def each_case(op: str, table: Mapping[str, dict[str, Any]]):
    """Register `make(rand, dtype, **options)` as a case of `op` for all options in `table`."""

    def register(make):
        CASES[op] |= {label: functools.partial(make, **options) for label, options in table.items()}
        return make

    return register


def _projection(rand, dtype, outer=(2, 17), d=48, k=24, start=0, size=24, ups=(40,), bias=False, gain=True):
    x, w_down = rand(*outer, d, dtype=dtype), rand(k, d, dtype=dtype) / d**0.5
    b_down, w_norm = rand(k, dtype=dtype) if bias else None, 1 + rand(size, dtype=dtype) / 4 if gain else None
    return x, w_down, b_down, w_norm, [rand(n, size, dtype=dtype) / size**0.5 for n in ups], 1e-6, start, size


PROJECTIONS = {"query": {}, "latent_before_rope_key": {"k": 32, "bias": True},
               "rope_key_before_latent": {"k": 32, "start": 8}, "two_ups_no_gain": {"ups": (40, 24), "gain": False},
               "one_up_no_gain": {"k": 32, "gain": False},
               "odd_sizes": {"outer": (3, 5), "d": 37, "k": 29, "size": 23, "ups": (31,), "bias": True},
               "one_token": {"outer": (1, 1)}, "no_token": {"outer": (0, 3), "bias": True},
               "flat": {"outer": (33,), "k": 32}, "three_ups": {"outer": (2, 1, 3), "ups": (4, 6, 5)}}
ALL_PROJECTIONS = {
    label + "_kept" * keep: {**of, "keep": keep} for label, of in PROJECTIONS.items() for keep in (False, True)
}


@each_case("down_norm_up", ALL_PROJECTIONS)
def down_norm_up(rand, dtype, keep, **options):
    return *_projection(rand, dtype, **options), *([True] if keep else [])


@each_case("down_norm_up_backward", ALL_PROJECTIONS)
def down_norm_up_backward(rand, dtype, keep, **options):
    """A gradient of the other channels may be anything, also a broadcast number, as a sum's gradient is."""
    x, w_down, b_down, w_norm, w_up, eps, start, size = forward = _projection(rand, dtype, **options)
    up, rest, rrms, latent = reference_of("down_norm_up")(*forward, keep)
    grad_rest = rand(1, dtype=dtype).expand(rest.shape) if keep else rand(*rest.shape, dtype=dtype)
    seeds = [rand(*u.shape, dtype=dtype) for u in up], grad_rest
    return *seeds, x, w_down, b_down, w_norm, w_up, rrms, start, size, *([latent] if keep else [])


@case("down_norm_up", "low_rank_and_normed")
def _(rand, dtype):
    return *_projection(rand, dtype, k=32), False, rand(2, 17, 4, dtype=dtype), rand(32, 4, dtype=dtype) / 2, dtype


@case("down_norm_up", "low_rank_in_a_wider_dtype")
def _(rand, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    return *CASES["down_norm_up"]["low_rank_and_normed"](rand, dtype), None, wide


for label in ("low_rank", "low_rank_and_other_readers"):

    @case("down_norm_up_backward", label)
    def _(rand, dtype, readers=label != "low_rank"):
        forward = CASES["down_norm_up"]["low_rank_and_normed"](rand, dtype)
        up, rest, rrms, _ = reference_of("down_norm_up")(*forward)
        grads = [rand(*t.shape, dtype=dtype) for t in (up[0], rest, up[1], up[1])]
        x, w_down, b_down, w_norm, w_up, _, start, size, _, x_side, w_side, _ = forward
        more = x_side, w_side, *(grads[2:] if readers else [])
        return [grads[0]], grads[1], x, w_down, b_down, w_norm, w_up, rrms, start, size, None, *more


@case("down_norm_up_backward", "low_rank_in_a_wider_dtype")
def _(rand, dtype):
    given = CASES["down_norm_up_backward"]["low_rank"](rand, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return given[0], given[1].to(wide), *given[2:], None, None, None, wide


@case("down_norm_up_backward", "summed_over_ranks")
def _(rand, dtype):
    given = CASES["down_norm_up_backward"]["latent_before_rope_key"](rand, dtype)
    w_up = given[6][0]
    return *given, None, None, None, None, None, rand(2, 17, w_up.shape[1], dtype=dtype)


PRE_NORMS = {"qkv": {}, "one_no_gain": {"ups": (40,), "gain": False}, "biases": {"bias": True},
             "flat": {"outer": (33,)}, "no_token": {"outer": (0, 3), "bias": True}}  # fmt: skip


@each_case("norm_linear", PRE_NORMS)
def norm_linear(rand, dtype, bias=False, **options):
    x, *_, w_norm, w, eps, _, _ = _projection(rand, dtype, **{"d": 24, "ups": (40, 8), **options})
    return x, w_norm, w, [rand(len(m), dtype=dtype) for m in w] if bias else [], eps


@each_case("norm_linear_backward", PRE_NORMS)
def norm_linear_backward(rand, dtype, **options):
    x, w_norm, w, b, eps = norm_linear(rand, dtype, **options)
    y, rrms = reference_of("norm_linear")(x, w_norm, w, b, eps)
    return [rand(*one.shape, dtype=dtype) for one in y], x, w_norm, w, rrms, bool(b)


COMPRESSED = {"one": {"ups": (40,)}, "three_biases": {"bias": True}, "drawn": {"draw": -(1 << 40) + 5},
              "whole_rank": {"rank": 24}, "rank_1": {"rank": 1, "outer": (33,)}, "no_token": {"outer": (0, 3)}}


@each_case("compressed_linear", COMPRESSED)
def compressed_linear(rand, dtype, ups=(40, 8, 16), outer=(2, 17), rank=6, bias=False, draw=None):
    w = [rand(n, 24, dtype=dtype) / 24**0.5 for n in ups]
    b = [rand(n, dtype=dtype) for n in ups] if bias else []
    return rand(*outer, 24, dtype=dtype), w, b, None if draw is None else torch.tensor(draw), rank, (1 << 62) + 7


@each_case("compressed_linear_backward", COMPRESSED)
def compressed_linear_backward(rand, dtype, **options):
    x, w, b, draw, rank, seed = compressed_linear(rand, dtype, **options)
    y, z = reference_of("compressed_linear")(x, w, b, draw, rank, seed)
    return [rand(*one.shape, dtype=dtype) for one in y], z, w, draw, seed, bool(b)


def _scan(rand, dtype, b=2, t=24, h=4, p=16, g=2, n=16, chunk=16, skip=True, initial=True, wide=False, rates=(0.1, 2.0),
          begins=None):  # fmt: skip
    """As in a model: x, B and C slices of one buffer, dt and A positive and negative float32. begins: where documents
    begin, by row."""
    f32 = torch.promote_types(dtype, torch.float32)
    sizes = [h * p, g * n, g * n]
    x, B, C = rand(b, t, sum(sizes) + 8, dtype=f32 if wide else dtype)[..., 8:].split(sizes, -1)
    dt = torch.nn.functional.softplus(rand(b, t, h, dtype=f32) - 1)
    low, high = rates
    A = -(low + (high - low) * torch.linspace(0, 1, h, dtype=f32))
    D = rand(h, dtype=f32) if skip else None
    state = rand(b, h, p, n, dtype=f32) if initial else None
    call = x.view(b, t, h, p), dt, A, B.view(b, t, g, n), C.view(b, t, g, n), D, state, chunk, dtype
    return call if begins is None else (*call, _documents(begins, t))


def _documents(begins, tokens):
    """Numbers of documents that begin at `begins`, by row; every other one is 0, in memory with other numbers between."""
    numbers = torch.zeros(len(begins), 2 * tokens, dtype=torch.int32)[:, ::2]
    for row, at in zip(numbers, begins, strict=True):
        for i, first in enumerate(at):
            row[first:] = i + 1 if i % 2 == 0 else 0
    return numbers


SCANS = {"plain": {}, "no_skip_no_state": {"skip": False, "initial": False}, "no_state": {"b": 1, "initial": False},
         "whole_chunks": {"b": 1, "t": 48}, "one_group": {"b": 1, "t": 40, "g": 1},
         "group_of_each_head": {"b": 1, "g": 4}, "eight_groups": {"b": 1, "h": 8, "g": 8, "t": 17},
         "one_head": {"h": 1, "g": 1}, "one_token": {"t": 1}, "one_batch_odd_length": {"b": 1, "t": 77, "chunk": 64},
         "no_batch": {"b": 0}, "no_token": {"t": 0}, "no_token_no_state": {"t": 0, "initial": False},
         "chunk_128": {"b": 1, "t": 130, "chunk": 128}, "chunk_256": {"b": 1, "t": 300, "h": 2, "g": 1, "chunk": 256},
         "wide_heads": {"b": 1, "h": 2, "g": 1, "p": 64, "n": 32}, "wide_states": {"b": 1, "h": 2, "g": 1, "n": 128},
         "odd_sizes": {"h": 3, "g": 1, "p": 12, "n": 20},
         "strong_decay": {"b": 1, "rates": (1.0, 40.0), "t": 70, "chunk": 32},
         "no_decay": {"b": 1, "rates": (0.0, 0.0)}, "float32_operands": {"b": 1, "wide": True},
         "documents": {"t": 40, "begins": [(0, 3, 5, 16, 17, 31), (20,)]},
         "documents_no_state": {"b": 1, "t": 77, "g": 1, "chunk": 64, "initial": False, "begins": [(64, 76)]},
         "documents_chunk_128": {"b": 1, "t": 130, "h": 2, "g": 1, "chunk": 128, "begins": [(1, 63, 127, 128)]},
         "documents_chunk_256": {"b": 1, "t": 300, "h": 2, "g": 1, "chunk": 256, "begins": [(70, 257)]}}
each_case("ssd_scan", SCANS)(_scan)


@each_case("ssd_scan_backward", SCANS)
def ssd_scan_backward(rand, dtype, **options):
    args = _scan(rand, dtype, **options)
    operands, (chunk, _, *documents) = args[:7], args[7:]
    y, final, states = reference_of("ssd_scan")(*args)
    dfinal = rand(*final.shape, dtype=final.dtype) if options.get("initial", True) else None
    return rand(*y.shape, dtype=dtype), dfinal, *operands, states, chunk, *documents


def _routing(rand, kind, tokens, experts, choices):
    """Random choices of distinct experts; some of no expert; all of one."""
    if kind == "to_one":
        return torch.full((tokens, choices), experts - 1)
    order = rand(tokens, experts + 2 if kind == "some_of_none" else experts).argsort(-1)
    return order[:, :choices] - (1 if kind == "some_of_none" else 0)


def _experts(rand, dtype, layout="pair", stacked=False, kind="random", activation="silu", tokens=23, experts=5,
             choices=2, d=24, n=16, transposed=False, keep=True, biased="", wide=False):  # fmt: skip
    """biased: which of the projections have biases, as in "gate up down"; wide: in no less than float32."""
    def weights(out, width):
        if stacked:
            shape = (experts, width, out) if transposed else (experts, out, width)
            made = rand(*shape, dtype=dtype) / width**0.5
            return [made.transpose(1, 2) if transposed else made]
        return [rand(out, width, dtype=dtype) / width**0.5 for _ in range(experts)]

    both = 2 * n if layout in ("gate_up", "up_gate", "interleaved") else n
    up = weights(both, d)
    gates = rand(tokens, choices, dtype=dtype).sigmoid()
    indices = _routing(rand, kind, tokens, experts, choices)
    gate = weights(n, d) if layout == "pair" else []
    made = rand(tokens, d, dtype=dtype), indices, gates, gate, up, weights(d, n), activation, layout, dtype, keep
    if not biased:
        return made
    widths = {"gate": n, "up": both, "down": d}
    of = torch.promote_types(dtype, torch.float32) if wide else dtype
    biases = (rand(experts, width, dtype=of) if name in biased.split() else None for name, width in widths.items())
    return *made, "", *biases


# What lies between the GEMMs in models that clamp it; the limits are such that random numbers reach them.
CURVES = {"swish": "silu(alpha=1.702)", "clamped_silu": "silu(gate=clamp -inf 0.5, up=clamp -0.5 0.5)",
          "clamped_swish": "silu(alpha=1.702, gate=clamp -inf 0.5, up=clamp -0.5 0.5, offset=1.0)",
          "clamped_result": "silu(result=clamp -inf 0.2, up=clamp -0.6 0.2)",
          "hard_gelu": "gelu(gate=hardtanh -0.4 0.6)",
          "softcapped_factors": "silu(up=tanh -0.3 0.3, linear=tanh -0.5 0.5)",
          "clamped_factor": "silu(alpha=1.702, linear=clamp -inf 0.4)",
          "softcapped_silu": "silu(gate=tanh -0.5 0.5, result=tanh -0.8 0.8, up=tanh -0.3 0.3)"}
EXPERTS = {
    **{f"{layout}_{s}": {"layout": layout, "stacked": s == "stacked"}
       for layout in ("pair", "single", "gate_up", "up_gate") for s in ("separate", "stacked")},
    **{name: {"activation": name} for name in ("gelu", "gelu_tanh", "relu", "relu2")},
    "interleaved_separate": {"layout": "interleaved"},
    "biases": {"biased": "gate up down"},
    "bias_of_up": {"biased": "up", "kind": "some_of_none"},
    "bias_of_down": {"biased": "down", "stacked": True, "kind": "some_of_none", "keep": False},
    "biases_up_gate": {"biased": "up down", "layout": "up_gate", "keep": False},
    "biases_gate_up": {"biased": "up down", "layout": "gate_up", "stacked": True, "kind": "some_of_none"},
    "biases_single": {"biased": "up down", "layout": "single", "activation": "relu2"},
    "biases_of_no_token": {"biased": "gate up down", "tokens": 0},
    "as_gpt_oss": {"biased": "up down", "layout": "interleaved", "stacked": True, "transposed": True,
                   "activation": CURVES["clamped_swish"]},
    "as_gpt_oss_odd": {"biased": "up down", "layout": "interleaved", "activation": CURVES["clamped_swish"], "d": 37,
                       "n": 29, "kind": "some_of_none"},
    "wide_biases": {"biased": "gate up down", "wide": True},
    "wide_bias_of_up": {"biased": "up", "wide": True, "kind": "some_of_none"},
    "wide_as_gpt_oss": {"biased": "up down", "wide": True, "layout": "interleaved", "stacked": True,
                        "activation": CURVES["clamped_swish"], "kind": "some_of_none"},
    "wide_biases_gate_up": {"biased": "up down", "wide": True, "layout": "gate_up", "stacked": True},
    "wide_biases_of_no_token": {"biased": "gate up down", "wide": True, "tokens": 0},
    "single_gelu": {"layout": "single", "activation": "gelu"},
    **{name: {"activation": text} for name, text in CURVES.items()},
    "clamped_swish_stacked": {"layout": "gate_up", "stacked": True, "activation": CURVES["clamped_swish"]},
    "transposed": {"stacked": True, "transposed": True},
    "to_one": {"kind": "to_one"},
    "some_of_none": {"kind": "some_of_none"},
    "some_of_none_stacked": {"kind": "some_of_none", "stacked": True, "layout": "gate_up"},
    "odd_sizes": {"d": 37, "n": 29, "experts": 3},
    "no_token": {"tokens": 0},
    "one_choice": {"choices": 1, "kind": "some_of_none"},
    "one_expert": {"experts": 1, "choices": 1},
    "hidden_not_kept": {"keep": False},
}  # fmt: skip
each_case("moe", EXPERTS)(_experts)


@each_case("moe_backward", EXPERTS)
def moe_backward(rand, dtype, **options):
    args = _experts(rand, dtype, **options)
    y, hidden, order, offsets = reference_of("moe")(*args)
    x, _, gates, w_gate, w_up, w_down, activation, layout, _, keep, *others = args
    hidden = [_unread(h, offsets) for h in hidden] if keep else []
    grad = rand(*y.shape, dtype=dtype)
    return grad, x, gates, w_gate, w_up, w_down, hidden, order, offsets, activation, layout, *others


# Of `EXPERTS`, rows that are sorted; those of no expert are padding, behind all others.
SORTED = ("pair_separate", "pair_stacked", "single_stacked", "gate_up_separate", "gate_up_stacked", "up_gate_stacked",
          "relu2", "interleaved_separate", "biases", "bias_of_down", "biases_gate_up", "biases_single",
          "biases_of_no_token", "as_gpt_oss", "as_gpt_oss_odd", "wide_biases", "wide_bias_of_up", "wide_as_gpt_oss",
          "softcapped_silu", "clamped_swish_stacked", "transposed", "to_one", "some_of_none", "some_of_none_stacked",
          "odd_sizes", "no_token", "one_expert", "hidden_not_kept")  # fmt: skip
OF_SORTED = {label: EXPERTS[label] for label in SORTED}


@each_case("moe_sorted", OF_SORTED)
def _sorted_rows(rand, dtype, **options):
    x, indices, _, w_gate, w_up, w_down, activation, layout, _, keep, *others = _experts(rand, dtype, **options)
    order, offsets = by_expert(indices, experts_of(w_down))
    rows = _unread(x[order // indices.shape[1]], offsets)
    return rows, offsets, w_gate, w_up, w_down, activation, layout, keep, *others


@each_case("moe_sorted_backward", OF_SORTED)
def moe_sorted_backward(rand, dtype, **options):
    args = _sorted_rows(rand, dtype, **options)
    y, hidden = reference_of("moe_sorted")(*args)
    x, offsets, w_gate, w_up, w_down, activation, layout, keep, *others = args
    hidden = [_unread(h, offsets) for h in hidden] if keep else []
    grad = _unread(rand(*y.shape, dtype=dtype), offsets)
    return grad, x, w_gate, w_up, w_down, hidden, offsets, activation, layout, *others


def _unread(rows, offsets):
    """`rows`, where those behind the last expert's may hold anything."""
    behind = torch.arange(int(offsets[-1]), rows.shape[0], device=rows.device)
    return rows.index_fill(0, behind, float("nan"))


# label -> (leading dimensions of q, of the tables, which one the heads are)
OUTER = {"bshd": ((2, 9, 4), (1, 9, 1), 2), "bhsd": ((2, 4, 9), (1, 1, 9), 1), "sbhd": ((9, 2, 4), (9, 1, 1), 2),
         "row_tables": ((2, 9, 6), (2, 9, 1), 2), "one_angle_for_all": ((2, 5, 3), (1, 1, 1), 2),
         "flat": ((9, 4), (9, 1), 1), "blocks_of_positions": ((2, 3, 5, 4), (1, 3, 5, 1), 3),
         "one": ((1, 1, 1), (1, 1, 1), 2), "no_batch": ((0, 5, 4), (1, 5, 1), 2),
         "one_position": ((3, 1, 4), (1, 1, 1), 2), "many_positions_of_a_head": ((1, 2, 70), (1, 1, 70), 1),
         **{f"heads_{n}": ((2, 3, n), (1, 3, 1), 2) for n in (1, 12, 20, 28)}, "heads_128": ((1, 2, 128), (1, 2, 1), 2)}
# label -> (nope, rope)
HEADS = {"deepseek": (32, 16), "odd": (11, 6), "no_nope": (0, 16)}
ROPE_DIMS = {f"rope_{r}": (8, r) for r in (2, 24, 32, 64, 80, 128)}
# label -> (boundaries, tokens, positions the tables have)
PACKED = {"unequal": ((0, 3, 10, 11), 11, 7), "empty": ((0, 0, 4, 4, 9, 9), 9, 5),
          "of_one_token": ((0, 1, 2, 3, 6), 6, 3), "one_sequence": ((0, 7), 7, 8), "tokens_behind": ((0, 4), 9, 6),
          "more_behind_than_tables_reach": ((0, 2, 4), 11, 3)}


def _rotations() -> Iterator[tuple[str, dict[str, Any]]]:
    for layout in LAYOUTS:
        for full in (False, True):
            flags = "".join("io"[i] if on else "." for i, on in enumerate(layout[:2])) + ("r" if layout[2] else ".")
            yield f"layout_{flags}{'_full' if full else ''}", {"layout": layout, "full": full}
    for outer in ("bshd", "bhsd", "row_tables", "one"):
        for heads in HEADS:
            yield f"{outer}_{heads}", {"outer": outer, "heads": heads}
    for outer in OUTER.keys() - {"bshd", "bhsd", "row_tables", "one"}:
        yield outer, {"outer": outer, "heads": "odd"}
    for heads in ROPE_DIMS:
        yield heads, {"outer": "flat", "heads": heads, "full": heads == "rope_24"}
    for name in ("inverse", "half_tables_dtype", "bfloat16_tables", "strided", "expanded", "other_out_dtype"):
        yield name, {name: True}
    for layout in LAYOUTS:
        yield f"inverse_{''.join('01'[on] for on in layout)}", {"layout": layout, "inverse": True, "outer": "flat"}


def _options(options, dtype):
    layout = options.get("layout", (True, False, False))
    outer, leading, heads = OUTER[options.get("outer", "bshd")]
    nope, r = (HEADS | ROPE_DIMS)[options.get("heads", "deepseek")]
    table_dtype = dtype if options.get("half_tables_dtype") else torch.promote_types(dtype, torch.float32)
    if options.get("bfloat16_tables"):
        table_dtype = torch.bfloat16
    width = r if options.get("full") else r // 2
    # Only upwards: a reference in float64 would not know of the rounding that comes after.
    out_dtype = torch.promote_types(dtype, torch.float32) if options.get("other_out_dtype") else dtype
    return layout, outer, leading, heads, nope, r, width, table_dtype, out_dtype


def _tables(rand, leading, width, dtype):
    return rand(*leading, width, dtype=dtype), rand(*leading, width, dtype=dtype)


def _main(rand, shape, dtype, options):
    """The main operand: perhaps part of a wider buffer whose rows stand in another order, or one row for all."""
    if options.get("expanded"):
        return rand(1, *shape[1:], dtype=dtype).expand(shape)
    if options.get("strided"):
        return rand(shape[1], shape[0], *shape[2:-1], shape[-1] + 8, dtype=dtype).transpose(0, 1)[..., 8:]
    return rand(*shape, dtype=dtype)


ROTATIONS = dict(_rotations())
FORWARD_ALONE = {label: options for label, options in ROTATIONS.items() if "inverse" not in options}


@each_case("mla_rope_q", ROTATIONS)
def mla_rope_q(rand, dtype, **options):
    layout, outer, leading, _, nope, r, width, table_dtype, out_dtype = _options(options, dtype)
    q = _main(rand, (*outer, nope + r), dtype, options)
    return q, *_tables(rand, leading, width, table_dtype), nope, *layout, bool(options.get("inverse")), out_dtype


@each_case("rope_qk", ROTATIONS)
def rope_qk(rand, dtype, **options):
    layout, outer, leading, heads, nope, r, width, table_dtype, out_dtype = _options(options, dtype)
    q = _main(rand, (*outer, nope + r), dtype, options)
    fewer = [max(1, n // 2) if i == heads else n for i, n in enumerate(outer)]
    k = _main(rand, (*fewer, nope + r), dtype, options)
    return q, k, *_tables(rand, leading, width, table_dtype), nope, *layout, bool(options.get("inverse")), out_dtype


@each_case("mla_rope_kv", FORWARD_ALONE)
def mla_rope_kv(rand, dtype, **options):
    layout, outer, leading, heads, nope, r, width, table_dtype, out_dtype = _options(options, dtype)
    shared = [1 if i == heads else n for i, n in enumerate(outer)]
    kv, k_rope = _main(rand, (*outer, nope + 24), dtype, options), _main(rand, (*shared, r), dtype, options)
    return kv, k_rope, *_tables(rand, leading, width, table_dtype), nope, *layout, out_dtype


@each_case("mla_rope_kv_backward", FORWARD_ALONE)
def mla_rope_kv_backward(rand, dtype, **options):
    layout, outer, leading, heads, nope, r, width, table_dtype, _ = _options(options, dtype)
    grads = _main(rand, (*outer, nope + r), dtype, options), _main(rand, (*outer, 24), dtype, options)
    return *grads, *_tables(rand, leading, width, table_dtype), nope, *layout, [heads], dtype, dtype


@case("rope_qk", "one_key_head")
def _(rand, dtype):
    q, k = rand(2, 9, 4, 16, dtype=dtype), rand(2, 9, 1, 16, dtype=dtype)
    return q, k, *_tables(rand, (1, 9, 1), 8, torch.float32), 0, False, False, False, False, dtype


@case("mla_rope_q", "wide_nope")
def _(rand, dtype):
    """An absorbed query: the latent's 512 channels before the rotated ones."""
    q = rand(3, 2, 512 + 16, dtype=dtype)
    return q, *_tables(rand, (3, 1), 8, torch.float32), 512, True, False, False, False, dtype


PACKS = {f"packed_{label}_heads_{heads}": {"boundaries": boundaries, "tokens": tokens, "positions": positions,
                                           "heads": heads, "layout": LAYOUTS[(len(label) + heads) % len(LAYOUTS)]}
         for label, (boundaries, tokens, positions) in PACKED.items() for heads in (1, 3)}


def packs(op: str, shapes: Callable[[int], list[tuple[int, ...]]], behind: Callable[..., tuple[Any, ...]]):
    """Cases of `op` on packed sequences. shapes: by heads, those of its tensors of tokens; behind: the arguments
    between the layout and the boundaries."""

    @each_case(op, PACKS)
    def _(rand, dtype, boundaries, tokens, positions, heads, layout):
        tables = _tables(rand, (positions, 1), 8 if heads == 1 else 16, torch.promote_types(dtype, torch.float32))
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32 if heads == 1 else torch.int64)
        operands = (rand(tokens, *shape, dtype=dtype) for shape in shapes(heads))
        return *operands, *tables, 11, *layout, *behind(heads, dtype), cu_seqlens


packs("mla_rope_q", lambda n: [(n, 27)], lambda n, dtype: (n == 3, dtype))
packs("rope_qk", lambda n: [(2 * n, 27), (n, 27)], lambda n, dtype: (n == 3, dtype))
packs("mla_rope_kv", lambda n: [(n, 30), (1, 16)], lambda n, dtype: (dtype,))
packs("mla_rope_kv_backward", lambda n: [(n, 27), (n, 19)], lambda n, dtype: ([1], dtype, dtype))


from . import (  # noqa: E402  their cases enter themselves above
    attention_cases,  # noqa: F401
    decode_cases,  # noqa: F401
    delta_cases,  # noqa: F401
    fp8_cases,  # noqa: F401
    index_cases,  # noqa: F401
    loss_cases,  # noqa: F401
    mixer_cases,  # noqa: F401
    selective_cases,  # noqa: F401
    softmax_attention_cases,  # noqa: F401
    stream_cases,  # noqa: F401
)
