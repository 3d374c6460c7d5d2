"""What a serving engine says it does, checked before it does it: `ServingConfig`, records of prefill, decode's gate.

There is no engine here. A config that cannot be kept is refused when it is made, with a tag for machines; what is not
known to work counts as what does not. "fa3" and "fa4" are the names of dense FlashAttention 3 and 4 in such configs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacpp_compile.errors import ServingConfigError, ServingRecordError, closest

PREFILL = ("sdpa", "flex", "plain", "fa3", "fa4")
DECODE = ("none", "mla_decode", "sparse_mla", "sdpa", "plain", "fa3", "fa4")
LAYOUTS = ("none", "contiguous", "paged")
DOC_IDS = ("none", "prefill", "decode")
CACHES = ("none", "latents", "full")
CODECS = (None, "fp8", "turboquant", "polarquant")
FORMS = ("auto", "absorbed", "expanded")

# What dense FA4 decode waits for.
FA4_DECODE_NEEDS = (
    "a public decode and KV contract in the dispatcher",
    "a proof of paged semantics",
    "a policy for doc_ids and packed documents in decode that fails closed",
    "a bounded token-by-token run on an H200",
    "a parity matrix after the hand-over from prefill",
)


@dataclass(frozen=True)
class ServingConfig:
    """How sequences are served.

    Attributes:
        prefill_backend: of PREFILL.
        decode_backend: of DECODE; "none" where nothing is decoded.
        kv_layout: "none", "contiguous" (rows of a sequence one behind the other) or "paged" (by block tables).
        continuous_batching: whether sequences join and leave a batch that runs.
        doc_ids: where packed documents may come: "none", "prefill", or "decode" too.
        cache: "none", "latents" (`MLAKVCache`) or "full" (keys and values of all heads).
        codec: how cached latents are stored, None for plain rows.
        form: of attention over cached latents, as `latent_attention` takes it.

    Raises ServingConfigError, with a tag, for names that are none of these and for combinations that nothing serves.
    """

    prefill_backend: str = "sdpa"
    decode_backend: str = "mla_decode"
    kv_layout: str = "contiguous"
    continuous_batching: bool = False
    doc_ids: str = "none"
    cache: str = "latents"
    codec: str | None = None
    form: str = "auto"

    def __post_init__(self) -> None:
        for name, known in (("prefill_backend", PREFILL), ("decode_backend", DECODE), ("kv_layout", LAYOUTS),
                            ("doc_ids", DOC_IDS), ("cache", CACHES), ("codec", CODECS), ("form", FORMS)):  # fmt: skip
            _known(name, getattr(self, name), known)
        if not isinstance(self.continuous_batching, bool):
            raise ServingConfigError("unknown_name", f"continuous_batching is {self.continuous_batching!r}, not a bool")
        for refused, tag, reason in self._catalog():
            if refused:
                raise ServingConfigError(tag, reason)

    def _catalog(self) -> list[tuple[bool, str, str]]:
        """(Whether it is this config's, tag, reason) of every surface that is blocked."""
        prefill, decode, paged = self.prefill_backend, self.decode_backend, self.kv_layout == "paged"
        latents, over_latents = self.cache == "latents", decode in ("mla_decode", "sparse_mla")
        flash = decode in ("fa3", "fa4")
        return [
            (prefill == "fa4" and paged, "fa4_prefill_paged", "dense FA4 prefill writes no pages"),
            (prefill == "fa4" and self.continuous_batching, "fa4_prefill_continuous",
             "dense FA4 prefill has not been shown beside sequences that join and leave"),
            (flash and latents, "absorbed_no_flash",
             f"{decode} takes scores of one part and heads of its own, cached latents have neither"),
            (decode == "fa4" and self.kv_layout != "contiguous", "fa4_decode_not_contiguous",
             f"dense FA4 decode is of the bounded contiguous form at most, not {self.kv_layout}"),
            (decode == "fa4", "fa4_decode_blocked", "dense FA4 decode waits for " + "; ".join(FA4_DECODE_NEEDS)),
            (latents and paged, "latents_not_paged", "the cache of latents has one row behind the other, and no pages"),
            (paged, "paged_unproven", "nothing here honours block tables, their moves and residency"),
            (latents and self.continuous_batching, "uniform_lengths",
             "the cache of latents has one length for all sequences, which none joins or leaves"),
            (self.doc_ids == "decode", "doc_ids_in_decode", "no decode here masks packed documents"),
            (latents and self.doc_ids != "none", "doc_ids_in_latents", "the cache of latents has no documents"),
            (over_latents and not latents, "no_latents", f"{decode} reads cached latents, the cache is {self.cache!r}"),
            (latents and decode not in ("none", "mla_decode", "sparse_mla") and not flash, "decode_not_of_latents",
             f"{decode} reads keys and values of all heads, the cache has latents"),
            (self.codec is not None and not latents, "codec_without_latents", "codecs store latents"),
            (self.form != "auto" and not latents, "form_without_latents", "only latents have two forms of attention"),
            (self.cache != "none" and self.kv_layout == "none", "cache_without_layout", "a cache has a layout"),
            (self.cache == "none" and self.kv_layout != "none", "layout_without_cache", "a layout is a cache's"),
            (self.cache == "none" and decode != "none", "decode_without_cache", "decoding reads a cache"),
        ]  # fmt: skip

    def for_engine(self) -> ServingConfig:
        """This config, for an engine to begin with. Refuses dense FA4 prefill altogether: until an engine asks the
        dispatcher which backend ran, nothing tells whether it did."""
        if self.prefill_backend == "fa4":
            raise ServingConfigError("fa4_prefill_in_engine", "no engine asks the dispatcher which prefill ran")
        return self

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ServingConfig:
        """Of what `to_dict` returned; a field that there is not is refused."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in names:
                raise ServingConfigError("unknown_name", f"there is no {name!r}{_meant(name, names)}")
        return cls(**fields)


def _meant(name: object, known: Sequence[str | None]) -> str:
    meant = closest(str(name), [k for k in known if k is not None])
    return f": did you mean {meant!r}?" if meant else ""


def _known(field: str, got: Any, known: Sequence[str | None]) -> None:
    if got not in known:
        listed = ", ".join(map(repr, known))
        raise ServingConfigError("unknown_name", f"{field} is {got!r}, none of {listed}{_meant(got, known)}")


@dataclass(frozen=True)
class Verification:
    """How drafted tokens were verified: whether they are one behind the other, and were one batch."""

    contiguous: bool
    one_batch: bool


@dataclass(frozen=True)
class PrefillRecord:
    """One prefill as it happened, and what is said of the decode behind it.

    Attributes:
        machine: what it ran on.
        prompt_tokens: the exact length of the prompt.
        causal: the mask's policy.
        doc_ids: whether packed documents were there.
        requested: the backend asked for.
        effective: the one that ran.
        fallback_reason: why they differ, "" where they do not.
        decode_executed: False where nothing was decoded, else None.
        decode_backend: what decoded, else None. One of the two is given.
        kv_layout: the layout this is evidence of.
        ran_layout: the layout that ran.
        verification: of drafted tokens, where this prefill is one of those.

    Raises ServingRecordError, with a tag, where a field is missing or claims what the others do not bear.
    """

    machine: str
    prompt_tokens: int
    causal: bool
    doc_ids: bool
    requested: str
    effective: str
    fallback_reason: str = ""
    decode_executed: bool | None = None
    decode_backend: str | None = None
    kv_layout: str = "contiguous"
    ran_layout: str = "contiguous"
    verification: Verification | None = None

    def __post_init__(self) -> None:
        labelled = (self.decode_executed is False) != (self.decode_backend is not None)
        differ, fa4 = self.requested != self.effective, "fa4" in (self.requested, self.effective)
        drafted = self.verification
        for wrong, tag, problem in (
            (not self.machine, "no_machine", "it is bound to no machine"),
            (type(self.prompt_tokens) is not int or self.prompt_tokens < 1, "no_length",
             f"the prompt has {self.prompt_tokens!r} tokens"),
            (not isinstance(self.causal, bool) or not isinstance(self.doc_ids, bool), "no_policy",
             "causal and doc_ids are not said"),
            (self.requested not in PREFILL or self.effective not in PREFILL, "unknown_backend",
             f"{self.requested!r} or {self.effective!r} is none of {', '.join(PREFILL)}"),
            (differ and not self.fallback_reason, "no_fallback_reason", "another backend ran, and no reason is given"),
            (not differ and bool(self.fallback_reason), "reason_without_fallback", "a reason, and no other backend"),
            (not labelled and fa4, "fa4_beside_unlabelled_decode",
             "FA4 prefill, and whether and by what was decoded is not said"),
            (not labelled, "unlabelled_decode",
             "either decode_executed is False or decode_backend has a name, and not both"),
            (self.decode_backend is not None and self.decode_backend not in DECODE[1:], "unknown_backend",
             f"decode_backend {self.decode_backend!r} is none of {', '.join(DECODE[1:])}"),
            (self.decode_backend == "fa4", "fa4_decode_blocked", "dense FA4 decode is blocked"),
            (self.kv_layout not in LAYOUTS or self.ran_layout not in LAYOUTS, "unknown_layout",
             f"{self.kv_layout!r} or {self.ran_layout!r} is none of {', '.join(LAYOUTS)}"),
            (self.kv_layout != self.ran_layout, "layout_not_run",
             f"{self.ran_layout} rows ran, which is no evidence of {self.kv_layout} ones"),
            (drafted is not None and not (drafted.contiguous and drafted.one_batch), "verification_not_bounded",
             "drafted tokens count as prefill where they are contiguous and verified as one batch"),
            (drafted is not None and self.decode_backend is not None, "verification_is_no_decode",
             "verifying drafted tokens is never decoding"),
        ):  # fmt: skip
            if wrong:
                raise ServingRecordError(tag, problem)


def contiguous_decode_refuses(
    *, causal: bool, sliding_window: int | None = None, appends_keys: bool, appends_values: bool,
    block_table: Sequence[int] | None = None, batch: int, device: str,
) -> tuple[str, ...]:  # fmt: skip
    """Tags of what keeps a call from decode over contiguous rows: append at the lengths, gather what is valid, attend a
    row at a time. () where nothing does. It is no paged engine: a `block_table`, given by its shape, names one row a
    sequence."""
    return tuple(
        tag
        for refused, tag in (
            (not causal, "requires_causal"),
            (sliding_window is not None, "no_sliding_window"),
            (not appends_keys, "requires_appended_k"),
            (not appends_values, "requires_appended_v"),
            (block_table is not None and len(block_table) != 2, "block_table_rank"),
            (block_table is not None and len(block_table) == 2 and block_table[0] != batch, "block_table_batch"),
            (device != "cuda", "cuda_only"),
        )
        if refused
    )
