"""Cases of the gated delta rule, and of linear attention with gates."""

from __future__ import annotations

import os

import torch

from .agreement import reference_of
from .cases import case, each_case

GATES = ("none", "head", "channel")
# How far a token's gate may fall: nothing, as in a model, to 1e-4, and now and then to 1e-4.
DECAYS = {"even": lambda x: 0 * x, "usual": lambda x: -torch.nn.functional.softplus(x - 1),
          "strong": lambda x: -9.2 * x.sigmoid(), "sudden": lambda x: torch.where(x > 0.8, -9.2, 0.0)}


def gates(rand, shape, gate, decay="usual", dtype=torch.float32):
    """Logarithms of gates for heads `shape` [b, t, hv] of k channels [..., k]."""
    if gate == "none":
        return None
    return DECAYS[decay](rand(*(shape if gate == "channel" else shape[:-1]), dtype=dtype))


def operands(rand, dtype, b=2, t=24, hk=2, hv=4, k=16, v=16, gate="head", decay="usual", beta=True, initial=True,
             documents=None, eps=1e-6, wide=False):  # fmt: skip
    """(q, k, v, g, beta, initial_state, cu_seqlens) as in a model: q, k and v slices of one buffer, gates float32."""
    f32 = torch.promote_types(dtype, torch.float32)
    cu_seqlens = None
    if documents is not None:
        b, ends = 1, torch.tensor([0, *documents]).cumsum(0)
        t, cu_seqlens = int(ends[-1]), ends.int()
    sizes = [hk * k, hk * k, hv * v]
    buffer = rand(b, t, sum(sizes) + 8, dtype=f32 if wide else dtype)[..., 8:]
    q, key, value = (part.unflatten(-1, (-1, n)) for part, n in zip(buffer.split(sizes, -1), (k, k, v), strict=True))
    if eps is None:  # as far from unit length as keys may be for a state that stays in bounds
        key = key / (1 + key.norm(dim=-1, keepdim=True))
    n = b if documents is None else len(documents)
    return (q, key, value, gates(rand, (b, t, hv, k), gate, decay, f32),
            rand(b, t, hv, dtype=f32).sigmoid().to(dtype) if beta else None,
            rand(n, hv, k, v, dtype=f32) if initial else None, cu_seqlens)  # fmt: skip


RULES = {
    "gate_a_head": {}, "gate_a_channel": {"gate": "channel"}, "no_gate": {"gate": "none"}, "no_beta": {"beta": False},
    "bare": {"gate": "none", "beta": False, "initial": False}, "no_state": {"initial": False},
    "keys_as_they_are": {"eps": None}, "one_key_head": {"hk": 1}, "as_many_key_heads": {"hk": 4}, "one_token": {"t": 1},
    "one_token_channels": {"t": 1, "gate": "channel", "b": 3}, "no_token": {"t": 0},
    "no_token_no_state": {"t": 0, "initial": False}, "no_batch": {"b": 0}, "whole_chunks": {"t": 32, "gate": "channel"},
    "chunk_32": {"t": 70, "chunk": 32}, "chunk_32_channels": {"t": 70, "chunk": 32, "gate": "channel"},
    "chunk_64": {"b": 1, "t": 130, "chunk": 64},
    "chunk_64_channels": {"b": 1, "t": 130, "chunk": 64, "gate": "channel"},
    "chunk_64_short": {"t": 20, "chunk": 64, "gate": "channel"}, "two_segments": {"b": 1, "t": 150, "hk": 1, "hv": 2},
    "two_segments_channels": {"b": 1, "t": 150, "hk": 1, "hv": 2, "gate": "channel"}, "wide_values": {"b": 1, "v": 32},
    "wide_keys": {"b": 1, "k": 32, "gate": "channel"}, "odd_sizes": {"k": 12, "v": 20, "gate": "channel"},
    "documents": {"documents": (5, 33, 16, 1)}, "documents_channels": {"documents": (5, 33, 16, 1), "gate": "channel"},
    "documents_no_state": {"documents": (20, 9), "initial": False, "gate": "none"},
    "empty_documents": {"documents": (0, 7, 0, 0, 18, 0)}, "documents_without_tokens": {"documents": (0, 0)},
    "many_documents": {"documents": (1, 2, 3, 17, 30, 1, 64, 5, 16), "hk": 1, "hv": 2},
    "one_document": {"documents": (40,), "chunk": 32}, "even_gates": {"b": 1, "t": 70, "decay": "even"},
    "strong_gates": {"b": 1, "t": 70, "decay": "strong", "chunk": 64},
    "strong_gates_channels": {"b": 1, "t": 70, "decay": "strong", "chunk": 64, "gate": "channel"},
    "sudden_gates": {"b": 1, "t": 70, "decay": "sudden", "chunk": 64},
    "sudden_gates_channels": {"b": 1, "t": 70, "decay": "sudden", "chunk": 64, "gate": "channel"},
    "float32_operands": {"b": 1, "wide": True},
}


if os.environ.get("TRITON_INTERPRET") == "1":
    # The interpreter takes minutes for all of them; GPUs, and the other lowerings, are held to all. Each takes as few
    # programs as show what it is about: rows of a batch, heads that share a key, chunks and documents are counted in some
    # case of either kind of gates.
    FEW = {"b": 1, "hk": 1, "hv": 2}
    SHORT = {"gate_a_head": {"hk": 1, "hv": 2}, "gate_a_channel": {"hk": 1, "hv": 2}, "bare": {"b": 1}, "no_state": FEW,
             "one_token": {"hk": 1, "hv": 2}, "one_token_channels": FEW, "no_token": {},
             "documents": {**FEW, "documents": (5, 17, 1)}, "one_document": FEW, "chunk_64_short": {"b": 1},
             "strong_gates_channels": FEW}  # fmt: skip
    RULES = {label: RULES[label] | fewer for label, fewer in SHORT.items()}


@each_case("gated_delta_rule", RULES)
def rule(rand, dtype, chunk=16, **options):
    given = operands(rand, dtype, **options)
    return *given, given[0].shape[-1] ** -0.5, options.get("eps", 1e-6), chunk, dtype


def final_gradient(rand, final, options):
    return rand(*final.shape, dtype=final.dtype) if options.get("initial", True) else None


@each_case("gated_delta_rule_backward", RULES)
def rule_backward(rand, dtype, **options):
    *given, scale, eps, chunk, _ = rule(rand, dtype, **options)
    o, final, states, inverse = reference_of("gated_delta_rule")(*given, scale, eps, chunk, dtype)
    do = rand(*o.shape, dtype=dtype)
    return do, final_gradient(rand, final, options), *given, states, inverse, scale, eps, chunk


@case("gated_delta_rule", "higher_out_dtype")
def _(rand, dtype):
    return *rule(rand, dtype)[:-1], torch.promote_types(dtype, torch.float32)


@case("gated_delta_rule", "heads_before_tokens")
def _(rand, dtype):
    q, k, v, g, *others = rule(rand, dtype)
    return *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, g)), *others


@case("gated_delta_rule_backward", "gradient_of_a_sum")
def _(rand, dtype):
    *given, scale, eps, chunk, _ = rule(rand, dtype, gate="channel")
    o, _, states, inverse = reference_of("gated_delta_rule")(*given, scale, eps, chunk, dtype)
    return rand(1, dtype=dtype).expand(o.shape), None, *given, states, inverse, scale, eps, chunk


def attention(rand, dtype, chunk=16, **options):
    q, k, v, g, _, state, cu_seqlens = operands(rand, dtype, **{"eps": None, **options})
    return q, k, v, g, state, cu_seqlens, q.shape[-1] ** -0.5, chunk, dtype


ATTENTIONS = {
    label: {name: value for name, value in options.items() if name not in ("beta", "eps")}
    for label, options in RULES.items()
    if label not in ("no_beta", "bare", "keys_as_they_are")
}


@each_case("gated_linear_attention_backward", ATTENTIONS)
def attention_backward(rand, dtype, **options):
    *given, scale, chunk, _ = attention(rand, dtype, **options)
    o, final, states = reference_of("gated_linear_attention")(*given, scale, chunk, dtype)
    return rand(*o.shape, dtype=dtype), final_gradient(rand, final, options), *given, states, scale, chunk


@case("gated_linear_attention", "a_constant_of_each_head")
def _(rand, dtype):
    q, k, v, _, *others = attention(rand, dtype)
    return q, k, v, -rand(4, dtype=torch.float32).abs().expand(2, 24, 4), *others
each_case("gated_linear_attention", ATTENTIONS)(attention)
