"""The role of a linear, told by names: its own first, then those of the modules around it, then their classes."""

from __future__ import annotations

from collections.abc import Sequence

ROLES = ("attention", "experts", "mamba", "router", "norm", "head", "embedding", "other")

_ROUTER = {"gate", "gating", "wg", "shared_expert_gate"}
_EMBEDDING = {"wte", "wpe"}
_ATTENTION = {
    "q", "k", "v", "o", "qkv", "q_a", "q_b", "kv_a", "kv_b", "wq", "wk", "wv", "wo", "wq_a", "wq_b", "wkv_a", "wkv_b",
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "kv_proj", "q_a_proj", "q_b_proj", "kv_a_proj",
    "kv_a_proj_with_mqa", "kv_b_proj", "c_attn", "linear_qkv",
}  # fmt: skip
_EXPERTS = {
    "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "w12", "fc1", "fc2", "c_fc", "gate",
    "linear_fc1", "linear_fc2", "up", "down", "input_linear", "output_linear",
}  # fmt: skip
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


def role_of(fqn: str, classes: Sequence[str] = ()) -> str:
    """One of ROLES for the linear `fqn` ("model.layers.3.self_attn.q_proj").

    classes: class names of the modules around it, the innermost first, where they are known. "experts" stands for
    feed-forward layers of all kinds, dense ones too; "other" for a linear whose role no name tells.
    """
    *outer, own = fqn.lower().split(".")
    if (own in _ROUTER and not _one_of_many(outer)) or any("router" in part for part in (own, *outer)):
        return "router"
    if own in ("head", "unembed") or own.endswith("_head"):
        return "head"
    if own in _EMBEDDING or any("embed" in part for part in (own, *outer)):
        return "embedding"
    if "norm" in own:
        return "norm"
    for role, names in (("attention", _ATTENTION), ("experts", _EXPERTS), ("mamba", _MAMBA)):
        if own in names:
            return role
    for role, words in _AROUND:  # a module that holds weights itself: "self_attn", "experts", but not "moe_gate"
        if own.endswith((*words, *(f"{word}s" for word in words))):
            return role
    for name in (*reversed(outer), *(c.lower() for c in classes)):
        for role, words in _AROUND:
            if any(word in name for word in words):
                return role
        if name == "mixer" and own in _MIXER:
            return "mamba"
    return "other"
