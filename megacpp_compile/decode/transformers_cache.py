"""`use_latent_cache`: generation from a cache of latents, for models of transformers, whose code stays as it is.

    cache = megacpp_compile.use_latent_cache(model, batch=1, capacity=4096)
    model.generate(ids, past_key_values=cache, max_new_tokens=256)

A model of transformers asks its cache to keep what a layer computed, and calls its attention by a name of its
configuration. Here the cache hands the new tokens' own keys back, so that no cached row is expanded, and attention by
the name "megacpp_latents" stores the new latents and attends over the stored rows (`latent_attention`). Without such a
cache that name is torch's scaled_dot_product_attention, as before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megacpp_compile._torch.fakes import is_fake
from megacpp_compile._torch.ops import assert_async
from megacpp_compile.decode.absorbed import choose_form, latent_attention
from megacpp_compile.decode.cache import MLAKVCache
from megacpp_compile.decode.latent_plans import LatentPlan, Seen, plan_of
from megacpp_compile.errors import CacheError, LatentCacheError

NAME, PROBE, PLAN = "megacpp_latents", "megacpp_latents_probe", "latent_plan"


def use_latent_cache(
    model: Any, *, batch: int, capacity: int, codec: str | dict[int, str] | None = None, form: str = "auto"
) -> Any:
    """A cache of latents for a model of transformers with latent attention in every layer, to be given to `generate` or
    `forward` as `past_key_values`.

    Runs one forward over three tokens to see what each attention computes. The model's code, weights and results
    without this cache stay as they are; its `attn_implementation` becomes "megacpp_latents".

    Args:
        model: of transformers, with attention "sdpa".
        batch: sequences, all of one length: padded batches are refused.
        capacity: the most tokens a sequence can have, the prompt included.
        codec: how rows are stored, as `MLAKVCache` takes it.
        form: "auto", "absorbed" or "expanded", as `latent_attention` takes it.

    Returns:
        A `transformers.Cache`; its `latents` is the MLAKVCache, its `report()` has a line for each layer.

    Raises LatentCacheError, with the reason, for a model that cannot be served.
    """
    name = type(model).__name__
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "config"):
        raise LatentCacheError(name, "it is no model of transformers, and has no positions and cache to be given")
    if model.config._attn_implementation not in ("sdpa", NAME):
        raise LatentCacheError(name, f"its attention is {model.config._attn_implementation!r}, not 'sdpa'")
    try:
        _register()
    except ImportError as missing:
        raise LatentCacheError(name, f"this transformers is without what is needed: {missing}") from None
    plans = _planned(model, name)
    first = plans[0]
    if any(plan.sizes[2:] != first.sizes[2:] for plan in plans):
        raise LatentCacheError(name, "its layers have latents of different sizes")
    latents = MLAKVCache(
        len(plans), batch, capacity, first.latent_dim, first.rope_dim, dtype=first.up.weight.dtype,
        device=first.up.weight.device, codec=codec,
        expanded_channels=first.heads * (first.nope_dim + first.rope_dim + first.v_dim),
    )  # fmt: skip
    model.set_attn_implementation(NAME)
    return _classes()[1](latents, plans, form)


def _planned(model: Any, name: str) -> list[LatentPlan]:
    """The plan of every layer in the order of the cache, kept at its module. Raises LatentCacheError."""
    try:
        calls = _probed(model)
    except Exception as error:  # the model's own, which may want anything beside tokens and a cache
        raise LatentCacheError(name, f"a forward over three tokens failed: {type(error).__name__}: {error}") from error
    numbered = {index: seen for index, seen in calls if index is not None}
    if not numbered or len(numbered) != len(calls) or sorted(numbered) != list(range(len(numbered))):
        raise LatentCacheError(name, "not every layer asks the cache once and then calls its attention by name")
    plans = []
    for index in range(len(numbered)):
        module = numbered[index].module
        plan = plan_of(numbered[index])
        if isinstance(plan, str):
            raise LatentCacheError(f"layer {index} ({type(module).__name__}) of {name}", plan)
        plans.append(plan)
    for index, plan in enumerate(plans):
        module = numbered[index].module
        if (known := getattr(module, PLAN, None)) is not None and known.up is plan.up:
            plans[index] = known  # with its hook, and the caches that go by it
        else:
            setattr(module, PLAN, plan)
            plan.up.register_forward_pre_hook(functools.partial(_keep, plan))
    return plans


def _keep(plan: LatentPlan, _: nn.Module, args: tuple[Any, ...]) -> None:
    plan.latent = args[0]


# --- what a forward does


def _attend(
    fallback: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    **more: Any,
) -> Any:  # fmt: skip
    """The model's attention: over the cache whose layer waits for it, else as before."""
    plan = getattr(module, PLAN, None)
    layer = None if plan is None else plan.pending
    if plan is None or layer is None:
        if plan is not None:
            plan.latent = None
        return fallback(module, query, key, value, attention_mask, **more)
    latent, plan.pending, plan.latent = plan.latent, None, None
    cache: MLAKVCache = layer.latents
    batch, _, tokens, _ = query.shape
    if layer.index == 0 and attention_mask is not None:
        _check_mask(cache, attention_mask, tokens)
    rows = cache.update(layer.index, latent.reshape(batch, tokens, -1), key[:, 0, :, plan.nope_dim :].unsqueeze(2))
    q_nope, q_rope = query.transpose(1, 2).split([plan.nope_dim, plan.rope_dim], -1)
    out = latent_attention(q_nope, q_rope, rows, plan.up.weight, scale=more.get("scaling"), form=layer.form)
    if layer.index == cache.layers - 1:
        cache.advance(tokens)
    return out, None


def _check_mask(cache: MLAKVCache, mask: Tensor, tokens: int) -> None:
    """Every query sees all rows before it, as this cache does. Compiled code and GPUs assert it when they run."""
    place = torch.arange(cache.capacity, device=mask.device)
    last = cache.cache_seqlens[0] + torch.arange(tokens, device=mask.device)
    # A short mask has the columns there are tokens for.
    place = place[: mask.shape[-1]]
    seen = mask if mask.dtype == torch.bool else mask == 0
    same = (seen == (place <= last[:, None])).all()
    if torch.compiler.is_compiling() or mask.device.type != "cpu" or is_fake(mask):
        assert_async(same, "the cache of latents: attention_mask is not causal, or pads")
    elif not same:
        raise CacheError("update", "a causal attention_mask without padding", "another one",
                         "Batch prompts of one length")  # fmt: skip


@functools.cache
def _classes() -> tuple[Any, Any]:
    """The classes of a layer and of the cache, which are transformers'."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class LatentLayer(CacheLayerMixin):
        is_compileable, is_sliding = False, False

        def __init__(self, latents: MLAKVCache, index: int, plan: LatentPlan, form: str) -> None:
            super().__init__()
            self.latents, self.index, self.plan, self.form = latents, index, plan, form
            self.batch_size, self.is_initialized = latents.batch, True

        def lazy_initialization(self, *_: Any) -> None: ...

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            self.plan.pending = self
            return key_states, value_states

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.latents.capacity, 0

        def get_seq_length(self) -> Any:
            return self.latents.cache_seqlens[0]

        def get_max_length(self) -> int:
            return self.latents.capacity

        def reset(self) -> None:
            self.latents.reset()

        def reorder_cache(self, beam_idx: Any) -> None:
            raise CacheError("reorder_cache", "sequences that go on by themselves", "beams", "Generate without beams")

        def crop(self, tokens_to_remove: int) -> None:
            raise CacheError("crop", "rows that stay", tokens_to_remove, "Generate without assisted decoding")

    class LatentCache(Cache):
        def __init__(self, latents: MLAKVCache, plans: list[LatentPlan], form: str) -> None:
            super().__init__(layers=[LatentLayer(latents, i, plan, form) for i, plan in enumerate(plans)])
            self.latents, self.plans, self.form = latents, plans, form

        def report(self, tokens: int = 1) -> str:
            """A line for each layer: the form that a step of so many tokens takes, by whom, multiply-adds, bytes."""
            each, lines = self.latents.nbytes() // self.latents.layers, []
            for i, plan in enumerate(self.plans):
                form = choose_form(tokens, self.latents.capacity, *plan.sizes, self.form)
                lines.append(f"layer {i}: {form}; {each} bytes of {self.latents.formats[i].name} rows")
            return "\n".join(lines)

    return LatentLayer, LatentCache


# --- the model's own protocol


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def attend(module: nn.Module, *args: Any, **more: Any) -> Any:
        return _attend(sdpa_attention_forward, module, *args, **more)

    def probe(module: nn.Module, *args: Any, **more: Any) -> Any:
        _probing[-1].attended(module, args, more)
        return sdpa_attention_forward(module, *args, **more)

    for name, function in ((NAME, attend), (PROBE, probe)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)


# What shows that attention is more than softmax(q k) v: names of arguments that are None elsewhere.
OPTIONS = ("sliding_window", "softcap", "s_aux")


class _Probe:
    """What a forward's attention modules compute, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Seen]] = []
        self.layer: Any = None
        self.linears: dict[nn.Linear, tuple[Tensor, Tensor]] = {}

    def attended(self, module: nn.Module, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        inside = {m: self.linears[m] for m in module.modules() if isinstance(m, nn.Linear) and m in self.linears}
        options = {name: more.get(name) for name in OPTIONS}
        query, key, value = args[:3]
        self.calls.append((self.layer, Seen(module, query, key, value, inside, options)))
        self.layer = None


_probing: list[_Probe] = []


@contextmanager
def _as_for_inference(model: Any) -> Iterator[None]:
    """Without dropout, gradients, drawing random numbers or another name of attention left behind."""
    training = [m for m in model.modules() if m.training]
    before = model.config._attn_implementation
    try:
        model.eval()
        model.set_attn_implementation(PROBE)
        with torch.no_grad(), torch.random.fork_rng():
            yield
    finally:
        model.set_attn_implementation(before)
        for module in training:
            module.training = True


def _probed(model: Any) -> list[tuple[int | None, Seen]]:
    """(Its number in the cache, what it computed) of every call of attention in a forward over three tokens."""
    from transformers.cache_utils import Cache, DynamicLayer

    probe = _Probe()

    class Layer(DynamicLayer):
        def update(self, *args: Any, **more: Any) -> Any:
            probe.layer = self
            return super().update(*args, **more)

    def note(linear: Any, args: tuple[Any, ...], output: Tensor) -> None:
        probe.linears[linear] = args[0], output

    cache = Cache(layer_class_to_replicate=Layer)
    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Linear)]
    _probing.append(probe)
    try:
        with _as_for_inference(model):
            ids = torch.arange(3, device=model.device).unsqueeze(0)
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    finally:
        _probing.pop()
        for hook in hooks:
            hook.remove()
    order = {id(layer): i for i, layer in enumerate(cache.layers)}
    return [(order.get(id(layer)), seen) for layer, seen in probe.calls]
