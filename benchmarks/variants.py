"""The compilers a plain model is measured under: eager, Inductor, ours, and ours with other options.

A new variant is one line in `VARIANTS`. One whose options this version of the package does not know is shown as
missing, with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Contestant, Missing, Runner, training


@dataclasses.dataclass(frozen=True)
class Variant:
    """Options of `torch.compile(model, backend="megacpp", options=...)` and the subjects they make a difference to."""

    options: Mapping[str, Any]
    subjects: frozenset[str]
    bound: float | None = None  # largest relative error, where it is not eager's by which a row is judged
    missing: Callable[[], str] = str  # what it needs that is not there, "" where all of it is

    def within(self) -> contextlib.AbstractContextManager[None]:
        """What is open around all its calls: casts of weights, where it caches them, are those of the first."""
        import megacpp_compile

        made = getattr(megacpp_compile, "cached_weight_casts", contextlib.nullcontext)
        return made() if self.options.get("cache_weight_casts") else contextlib.nullcontext()


def registered() -> None:
    """Make `backend="megacpp"` known by its name in a checkout that is not installed, too."""
    import megacpp_compile

    if "megacpp" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(compiler_fn=megacpp_compile.backend, name="megacpp")


def without_fa4() -> str:
    """Why FlashAttention-4 cannot be asked; without it the row would be the default's once more."""
    from megacpp_compile.nn.attention import fa4_runtime

    return "" if fa4_runtime.installed() else f"needs {fa4_runtime.PACKAGE}"


FP8_BOUND = 0.2  # float8 has three bits of mantissa; gradients of some peers' recipes have two
VARIANTS: dict[str, Variant] = {
    "megacpp, policy none": Variant({"policy": "none"}, frozenset({"block", "stack"})),
    "megacpp, selective": Variant({"policy": "selective"}, frozenset({"stack", "language_model"})),
    "megacpp, selective, latents kept": Variant({"policy": "selective", "keep_latents": True}, frozenset({"stack"})),
    "megacpp, latents kept": Variant(
        {"policy": "none", "keep_latents": True}, frozenset({"block", "stack", "down_norm_up"})
    ),
    "megacpp, latents kept, fuse_shared_input_gemms": Variant(
        {"policy": "none", "keep_latents": True, "fuse_shared_input_gemms": True}, frozenset({"block"})
    ),
    "megacpp, fastest attention": Variant({"attention": "fastest"}, frozenset({"block"}), missing=without_fa4),
    "megacpp, latents kept, fastest attention": Variant(
        {"keep_latents": True, "attention": "fastest"}, frozenset({"block"}), missing=without_fa4
    ),
    "megacpp, without down_norm_up": Variant({"disable": "down_norm_up"}, frozenset({"block", "stack"})),
    "megacpp, float8": Variant({"precision": "fp8_current"}, frozenset({"block", "stack", "moe"}), FP8_BOUND),
    "megacpp, float8, selective": Variant(
        {"precision": "fp8_current", "policy": "selective"}, frozenset({"stack"}), FP8_BOUND
    ),
    "megacpp, float8, delayed": Variant({"precision": "fp8_delayed"}, frozenset({"block", "stack"}), FP8_BOUND),
    "megacpp, float8, delayed, selective": Variant(
        {"precision": "fp8_delayed", "policy": "selective"}, frozenset({"stack"}), FP8_BOUND
    ),
    "megacpp, float8, weights cast once": Variant(
        {"precision": "fp8_current", "cache_weight_casts": True}, frozenset({"block", "stack", "moe"}), FP8_BOUND
    ),
    "megacpp, float8, delayed, weights cast once": Variant(
        {"precision": "fp8_delayed", "cache_weight_casts": True}, frozenset({"block", "stack"}), FP8_BOUND
    ),
    "megacpp, float8 by blocks": Variant({"precision": "fp8_block"}, frozenset({"block"}), FP8_BOUND),
}


def compilers(subject: str) -> dict[str, tuple[str, Callable[[nn.Module], Callable[..., Any]]]]:
    """Row name -> (kind, what turns a plain model into what is called)."""
    rows: dict[str, tuple[str, Callable[[nn.Module], Callable[..., Any]]]] = {
        "eager": ("eager", lambda model: model),
        "Inductor": ("inductor", inductor),
        "megacpp": ("ours", ours({})),
    }
    for name, variant in VARIANTS.items():
        if subject in variant.subjects:
            rows[name] = ("ours", ours(variant.options, variant.missing))
    # The same code once more: how far its ratio is from 1 is what a difference between rows means nothing below.
    rows["Inductor, again"] = ("control", inductor)
    return rows


def inductor(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model)


def ours(
    options: Mapping[str, Any], missing: Callable[[], str] = str
) -> Callable[[nn.Module], Callable[..., Any]]:
    def compiled(model: nn.Module) -> Callable[..., Any]:
        if why := missing():
            raise Missing(why)
        import megacpp_compile
        from megacpp_compile.config.options import Config
        from megacpp_compile.errors import UnknownOptionError
        from megacpp_compile.passes._driver import pass_names

        try:
            Config.from_options(options, pass_names())
        except UnknownOptionError as error:
            raise Missing(str(error)) from None
        # backend="megacpp" by object, as that also works in a checkout that is not installed.
        return torch.compile(model, backend=megacpp_compile.backend, options=dict(options) or None)

    return compiled


def contestants(
    subject: str,
    model: nn.Module | Callable[[], nn.Module],
    inputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> list[Contestant]:
    """A row for every compiler, all of them given the same model and inputs. Eager is the first: it sets the bound."""

    def build(compiler: Callable[[nn.Module], Callable[..., Any]]) -> Callable[[], Runner]:
        def made() -> Runner:
            return training(compiler(model if isinstance(model, nn.Module) else model()), inputs, leaves, grads)

        return made

    return [
        Contestant(name, kind, build(compiler), VARIANTS[name].bound, within=VARIANTS[name].within)
        if name in VARIANTS
        else Contestant(name, kind, build(compiler))
        for name, (kind, compiler) in compilers(subject).items()
    ]
