"""Decoding from a cache of latents."""

from __future__ import annotations

from megacpp_compile.errors._base import MegacppError


class CacheError(MegacppError, ValueError):
    """A cache of latents was used in a way that would leave rows where they do not belong. Nothing was written.

    Args:
        call: the method that refuses.
        expected: what it takes, in words.
        found: what it was given.
        remedy: what to do, as a sentence without its full stop.
        layer: which layer it is about, None where it is about all.
    """

    def __init__(self, call: str, expected: str, found: object, remedy: str, layer: int | None = None) -> None:
        self.call, self.expected, self.found, self.remedy, self.layer = call, expected, found, remedy, layer
        of = "" if layer is None else f" of layer {layer}"
        super().__init__(f"{call}{of}: expected {expected}, found {found}. {remedy}.")


class CodecError(MegacppError, ValueError):
    """A codec of cached rows was given what it cannot store or read.

    Args:
        codec: its name.
        wanted: what it takes, and what it was given.
        remedy: what to do, as a sentence without its full stop.
    """

    def __init__(self, codec: str, wanted: str, remedy: str) -> None:
        self.codec, self.wanted, self.remedy = codec, wanted, remedy
        super().__init__(f"{codec} takes {wanted}. {remedy}{'' if remedy.endswith('?') else '.'}")


class LatentCacheError(MegacppError):
    """A model that cannot decode from a cache of latents.

    Args:
        where: the model, or the layer of it.
        reason: why, as a sentence without its full stop.
    """

    def __init__(self, where: str, reason: str) -> None:
        self.where, self.reason = where, reason
        super().__init__(
            f"{where} cannot decode from a cache of latents: {reason}. Decode with its own cache, or write the step "
            "with megacpp_compile.MLAKVCache and latent_attention."
        )


class ServingConfigError(MegacppError, ValueError):
    """A serving configuration that nothing serves.

    Args:
        tag: why, for machines.
        reason: why, in words.
    """

    def __init__(self, tag: str, reason: str) -> None:
        self.tag, self.reason = tag, reason
        super().__init__(f"this serving configuration is refused: {reason} [{tag}].")


class ServingRecordError(MegacppError, ValueError):
    """A record of a prefill that says too little, or more than it bears.

    Args:
        tag: why, for machines.
        problem: why, in words.
    """

    def __init__(self, tag: str, problem: str) -> None:
        self.tag, self.problem = tag, problem
        super().__init__(f"this record of a prefill is invalid: {problem} [{tag}].")
