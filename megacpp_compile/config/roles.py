"""The role of a linear, told by names: its own, its siblings', those of the modules around it, then their classes.

A feed-forward layer is known by the names of its linears, so that it has one role whatever it is called itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

# "attention_core" is no linear's: softmax and the two GEMMs around it.
ROLES = ("attention", "attention_core", "experts", "mamba", "router", "norm", "head", "embedding", "other")

_ROUTER = {"gate", "gating", "wg", "shared_expert_gate"}
# A router, or the gate of a gated feed-forward layer: siblings tell.
_GATE = {"gate", "wg"}
_EMBEDDING = {"wte", "wpe"}
_ATTENTION = {
    "q", "k", "v", "o", "qkv", "q_a", "q_b", "kv_a", "kv_b", "wq", "wk", "wv", "wo", "wq_a", "wq_b", "wkv_a", "wkv_b",
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "kv_proj", "q_a_proj", "q_b_proj", "kv_a_proj",
    "kv_a_proj_with_mqa", "kv_b_proj", "c_attn", "linear_qkv",
}  # fmt: skip
_EXPERTS = {
    "w1", "w2", "w3", "w12", "fc1", "fc2", "c_fc", "gate", "linear_fc1", "linear_fc2", "input_linear", "output_linear",
    "linear1", "linear2", "wi", "wi_0", "wi_1", "wu", "wd",
}  # fmt: skip
# Names made of one of the former and any of the latter are a feed-forward layer's too: "up_proj", "proj_gate_up".
_SIDES, _FILLERS = {"up", "down", "gate"}, {"proj", "w", "linear", "fc", "in", "out"}
_MAMBA = {"x_proj", "dt_proj"}
# Words within the name or class of a module around it.
_AROUND = (
    ("attention", ("attn", "attention", "mla")),
    ("mamba", ("mamba", "ssm", "ssd")),
    ("experts", ("mlp", "ffn", "feed_forward", "feedforward", "expert", "moe")),
)
# NemotronH calls attention, Mamba and MLP "mixer" alike; those of other roles are known by their own names.
_MIXER = {"in_proj", "out_proj"}


def _one_of_many(outer: Sequence[str]) -> bool:
    """Whether `outer` ends in one expert, "experts.7": its gate is a GEMM of the expert's and not the router."""
    return len(outer) > 1 and outer[-1].isdigit() and "expert" in outer[-2]


def _of_feed_forward(name: str) -> bool:
    """Whether `name` is that of a linear in a feed-forward layer, and could be no router's."""
    parts = set(name.split("_"))
    sided = bool(parts & _SIDES) and parts <= _SIDES | _FILLERS and parts != {"gate"}
    return sided or name in _EXPERTS and name not in _GATE


def _in_feed_forward(siblings: Collection[str]) -> bool:
    """Whether `siblings` are the linears of one feed-forward layer, and of nothing else, by the names of some."""
    names = [name.lower() for name in siblings]
    mixed = any(name in _ATTENTION - {"wo"} or name in _MAMBA or _named_after(name) for name in names)
    return not mixed and any(map(_of_feed_forward, names))


def _lacks_gate(own: str, siblings: Collection[str]) -> bool:
    """Whether the linears `siblings` have an up or down projection that `own` would be the only gate of."""
    sides = [_SIDES & set(name.lower().split("_")) for name in siblings if name.lower() != own]
    up_or_down = any(sides) or not {"wu", "wd"}.isdisjoint(name.lower() for name in siblings)
    return up_or_down and not any("gate" in side for side in sides)


def _named_after(name: str) -> str:
    """The role of a module that holds weights itself, "self_attn" or "experts", but not "moe_gate"; "" for others."""
    return next((role for role, words in _AROUND if name.endswith((*words, *(f"{w}s" for w in words)))), "")


def role_of(fqn: str, classes: Sequence[str] = (), siblings: Collection[str] = ()) -> str:
    """One of ROLES for the linear `fqn` ("model.layers.3.self_attn.q_proj").

    classes: class names of the modules around it, the innermost first; siblings: names of the modules beside it, its
    own among them or not; both where they are known. "experts" stands for feed-forward layers of all kinds, dense ones
    too; "other" for a linear whose role no name tells.
    """
    *outer, own = fqn.lower().split(".")
    in_feed_forward = _in_feed_forward(siblings)
    gates_up = own in _GATE and (in_feed_forward and _lacks_gate(own, siblings) or _one_of_many(outer))
    if (own in _ROUTER and not gates_up) or any("router" in part for part in (own, *outer)):
        return "router"
    if own in ("head", "unembed") or own.endswith("_head"):
        return "head"
    if own in _EMBEDDING or any("embed" in part for part in (own, *outer)):
        return "embedding"
    if "norm" in own:
        return "norm"
    if gates_up or _of_feed_forward(own) or own == "wo" and in_feed_forward:
        return "experts"
    for role, names in (("attention", _ATTENTION), ("mamba", _MAMBA)):
        if own in names:
            return role
    if role := _named_after(own) or ("experts" if in_feed_forward else ""):
        return role
    for name in (*reversed(outer), *(c.lower() for c in classes)):
        for role, words in _AROUND:
            if any(word in name for word in words):
                return role
        if name == "mixer" and own in _MIXER:
            return "mamba"
    return "other"
