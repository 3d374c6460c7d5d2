"""Options that are given and change nothing, for what is compiled or beside the others, and those that are not tested
together: one warning each a process."""

from __future__ import annotations

from collections.abc import Iterator

from megacpp_compile.config.options import Config
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.targets import Target

# What `keep_latents` is an argument of.
_HAS_LATENTS = "down_norm_up"
# What carries `compress` out.
_COMPRESSES = "compressed_linear"


def warn_of_ineffective(config: Config, target: Target) -> None:
    """Warn of each option that the user gave and that changes nothing of code for `target`."""
    for option, reason in _ineffective(config, target):
        if option in config.asked:
            warn_once(f"option {option}={getattr(config, option)!r} has no effect: {reason}.")
    if config.precision is not None and (recipe := dict(config.precision.roles)["mamba"]) != "bf16":
        warn_of_untested(config, target, recipe, "role mamba")


def warn_of_untested(config: Config, target: Target, recipe: str, rule: str) -> None:
    """Warn where whole Mamba blocks are recomputed, whose projections `rule` of the precision plan puts in `recipe`."""
    entry = config.own_policy.entry("mblock", False) if config.own_policy is not None else "none"
    if entry in ("full", "full_plus_norms") and target.float8:
        warn_once(
            f"policy mblock={entry!r} beside Mamba's projections in {recipe!r} by {rule}: whole Mamba blocks in "
            "float8 are not tested with packed documents; activations of such runs are reported to reach e4m3's bound "
            "of 448. With packed documents use mblock='selective', or leave Mamba's projections in bf16."
        )


def _ineffective(config: Config, target: Target) -> Iterator[tuple[str, str]]:
    elsewhere = f"and this is compiled for target {target.name!r}"
    if not target.cublas:
        for option in ("autotune_gemms", "fuse_shared_input_gemms"):
            if getattr(config, option):
                yield option, f"it is about GEMMs of cuBLAS, {elsewhere}"
    if config.autotune and "cuda_triton" not in target.lowerings:
        yield "autotune", f"it is about Triton's kernels, {elsewhere}"
    if config.fa4 and not target.cublas:
        yield "fa4", f"FlashAttention-4 needs CUDA, {elsewhere}"
    if config.attention == "fastest" and not target.cublas:
        yield "attention", f"it is about CUDA's kernels, {elsewhere}"
    if config.precision is not None and not target.float8 and config.precision.recipes() != {"bf16"}:
        yield "precision", f"float8 needs CUDA, {elsewhere}, where everything stays in the model's own dtype"
    if config.cache_weight_casts and (config.precision is None or config.precision.recipes() == {"bf16"}):
        yield "cache_weight_casts", "no weight is cast to float8 without a 'precision' that asks for it"
    if config.sharding is not None and not any(d.backend == "openxla" for d in target.devices):
        yield "sharding", f"it is about devices of XLA, {elsewhere}"
    if config.keep_latents is True and not config.enabled(_HAS_LATENTS):
        yield "keep_latents", f"the pass {_HAS_LATENTS!r}, which saves them, is not to run"
    if config.compress is not None and not config.enabled(_COMPRESSES):
        yield "compress", f"the pass {_COMPRESSES!r}, which carries it out, is not to run"
    if config.block_kinds and config.own_policy is None:
        yield "block_kinds", "it corrects how 'policy' takes a block, and no policy is given that goes by them"
