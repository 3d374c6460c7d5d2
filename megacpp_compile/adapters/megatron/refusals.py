"""Why a module of Megatron's stays Megatron's, "" where plain PyTorch computes the same."""

from __future__ import annotations

from typing import Any

from megacpp_compile.adapters.megatron.plain_forwards import is_plain_tensor, rates


def ranks_of(group: Any) -> int:
    return 1 if group is None else int(group.size())


def _engine_ranks(module: Any) -> str:
    if module.tp_size == 1:
        return ""
    mode = getattr(module, "parallel_mode", None)
    if mode not in ("column", "row"):
        return f"parallel_mode {mode!r} over {module.tp_size} ranks"
    if module.tp_group is None:
        return "its tensor-parallel group is not set yet"
    return _named(module.tp_group) or _asked(module.config, "tp_comm_overlap")


def _stored(*tensors: Any) -> str:
    odd = next((t for t in tensors if not is_plain_tensor(t)), None)
    return f"a parameter is a {type(odd).__name__}" if odd is not None else ""


def _asked(config: Any, *fields: str) -> str:
    """The first of the configuration's `fields` that is on."""
    found = next((name for name in fields if getattr(config, name, None)), "")
    return f"{found} asks for what Megatron's own kernels do" if found else ""


def _accumulates(fused: Any) -> str:
    wanted = "turn gradient_accumulation_fusion off"
    return f"its backward adds weight gradients to main_grad by a kernel of its own: {wanted}" if fused else ""


def _named(group: Any) -> str:
    """Of a group of several ranks."""
    return "" if ranks_of(group) == 1 or hasattr(group, "group_name") else "its process group has no name"


def linear(module: Any) -> str:
    deferred = module.config.defer_embedding_wgrad_compute and module.embedding_activation_buffer is not None
    return (
        _named(module.tp_group)
        or ("an expert's, whose ranks its dispatcher joins" if getattr(module, "explicit_expert_comm", False) else "")
        or _accumulates(module.gradient_accumulation_fusion)
        or ("its weight gradient is deferred by defer_embedding_wgrad_compute" if deferred else "")
        or _asked(module.config, "cpu_offloading")
        or _stored(module.weight, module.bias)
    )


def embedding(module: Any) -> str:
    return _named(module.tp_group) or _stored(module.weight)


def loss(module: Any) -> str:
    return _named(module.pg_collection.tp)


def engine_linear(module: Any) -> str:
    own = "te_quant_params" if getattr(module, "te_quant_params", None) is not None else ""
    own = own or ("return_layernorm_output" if getattr(module, "return_layernorm_output", False) else "")
    return (
        _engine_ranks(module)
        or _accumulates(module.fuse_wgrad_accumulation)
        or (f"{own} is set, which plain PyTorch does not serve" if own else "")
        or _asked(module.config, "fp8", "fp4", "delay_wgrad_compute", "cpu_offloading")
        or _stored(module.weight, module.bias)
    )


def engine_norm(module: Any) -> str:
    missing = [name for name in ("eps", "zero_centered_gamma") if not hasattr(module, name)]
    return f"it does not say its {missing[0]}" if missing else _stored(module.weight)


def engine_attention(module: Any) -> str:
    config = module.config
    if getattr(config, "context_parallel_size", 1) > 1:
        return f"context parallel over {config.context_parallel_size} ranks"
    if getattr(config, "softmax_type", "vanilla") != "vanilla":
        return f"softmax_type {config.softmax_type!r}"
    in_fp8 = "fp8_dot_product_attention", "fp8_multi_head_attention"
    return _asked(config, "window_size", "qk_clip", "log_max_attention_logit", *in_fp8)


def attention(module: Any) -> str:
    recomputes = "it recomputes {} by Megatron's checkpoint, which breaks the graph: leave {} out of "
    recomputes += "recompute_modules, and ask for policy="
    if getattr(module, "recompute_up_proj", False):
        return recomputes.format("its up-projections", "mla_up_proj")
    if getattr(module, "checkpoint_core_attention", False):
        return recomputes.format("its core", "core_attn")
    return _asked(module.config, "cache_mla_latents", "fine_grained_activation_offloading")


def rotary(module: Any) -> str:
    if ranks_of(module.cp_group) > 1:
        return f"context parallel over {ranks_of(module.cp_group)} ranks"
    try:
        return "" if rates(module) is not None else "its angles are not the position times a rate"
    except Exception as error:  # its table is made on a GPU
        return f"its table cannot be made here: {type(error).__name__}"


def mlp(module: Any) -> str:
    return _asked(module.config, "use_te_activation_func", "activation_func_fp8_input_store")


def layer(module: Any) -> str:
    recomputing = "recompute_input_layernorm", "recompute_pre_mlp_layernorm", "recompute_mlp"
    own = *recomputing, "offload_attn_norm", "offload_mlp_norm"
    on = next((name for name in own if getattr(module, name, False)), "")
    if on:
        return f"{on} runs in Megatron's own checkpoint or offloading, which breaks the graph: ask for policy= instead"
    implementation = getattr(module.config, "cuda_graph_impl", "none")
    return f"cuda_graph_impl {implementation!r} captures it before it is compiled" if implementation != "none" else ""


def block(module: Any) -> str:
    if getattr(module.config, "recompute_granularity", None) == "full":
        return "recompute_granularity 'full' runs its layers in Megatron's checkpoint: ask for policy='full' instead"
    return _asked(module.config, "fp8", "fp4") or forked(module)


def forked(module: Any) -> str:
    """Under sequence parallelism Megatron forks its random states, which breaks a graph, around what may drop out."""
    rates = ("attention_dropout", "hidden_dropout")
    drawn = next((name for name in rates if getattr(module.config, name, 0.0)), "")
    if not getattr(module.config, "sequence_parallel", False) or not drawn:
        return ""
    return f"sequence_parallel with {drawn}, which is drawn from random states of its own"


def rows(module: Any) -> str:
    if module.config.sequence_parallel and module.scatter_to_sequence_parallel and not module.reduce_scatter_embeddings:
        return "it scatters the sum of its embeddings over sequence_parallel's ranks itself"
    return forked(module)
