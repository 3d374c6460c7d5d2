"""`MLAKVCache`: what latent attention keeps of past tokens, a latent and one rotated key row a token and layer.

    cache = MLAKVCache(layers=27, batch=16, capacity=16384, latent_dim=512, rope_dim=64)
    for layer in ...:
        rows = cache.update(layer, latent, rope_row)      # [b, n, 512] and [b, n, 1, 64]
        ...                                               # attention over rows.rows, of which rows.length are valid
    cache.advance(n)                                      # once, when every layer has been updated

In bfloat16 a token takes 2 (latent_dim + rope_dim) bytes a layer, 1152 at 512 + 64 channels; keys and values of 128
heads of 192 + 128 channels take 81,920. The latent is what the up-projection takes, as a rule the normed one; the key
row comes rotated for its own position. Both lie side by side in one allocation a layer, [b, capacity, latent + rope],
whose rows `sparse_mla` and `mla_decode` read as they are.

The position is a tensor: in a compiled step nothing reads it on the host, and one graph serves all steps. All sequences
have one length. Inference only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacpp_compile._torch.dynamo import mark_static_address
from megacpp_compile._torch.fakes import is_fake
from megacpp_compile._torch.ops import assert_async
from megacpp_compile.decode.row_formats import RowFormat, formats_by_layer
from megacpp_compile.errors import CacheError
from megacpp_compile.report.log import logger
from megacpp_compile.targets import by_xla


@dataclass(frozen=True)
class CachedRows:
    """One layer's rows behind an update.

    Attributes:
        stored: what the format keeps, each [b, capacity, ...]; for plain rows the one tensor [b, capacity, latent +
            rope]. Rows from `length` on are of no token.
        length: [b] int32, how many rows are valid, with those just written.
        format: of the rows.
        latent_dim: channels of the latent.
        rope_dim: channels of the key row.
    """

    stored: tuple[Tensor, ...]
    length: Tensor
    format: RowFormat
    latent_dim: int
    rope_dim: int

    @property
    def rows(self) -> Tensor:
        """[b, capacity, latent + rope]: a view of plain rows; of others what they decode to."""
        return self.format.decode(self.stored, self.latent_dim, self.rope_dim)

    @property
    def latent(self) -> Tensor:
        """[b, capacity, latent]."""
        return self.rows[..., : self.latent_dim]

    @property
    def rope(self) -> Tensor:
        """[b, capacity, 1, rope]: one row for all heads."""
        return self.rows[..., self.latent_dim :].unsqueeze(2)


class MLAKVCache:
    """A cache of latents for all layers of a model; see the module.

    Args:
        layers: how many layers are cached.
        batch: sequences.
        capacity: the most tokens a sequence can have.
        latent_dim: channels of a latent (kv_lora_rank).
        rope_dim: channels of the rotated key row (qk_rope_head_dim).
        dtype: of what is written, and of plain rows.
        device: torch's default when None.
        codec: None for plain rows; the name of a format for all layers ("fp8", "turboquant", "polarquant"); or a
            mapping from layer to name, whose other layers stay plain.
        expanded_channels: of the keys and values of all heads, for the log: heads * (nope + rope + value channels).
        seed: of the formats that rotate rows.

    Raises CodecError for a codec that cannot store such rows, and CacheError for everything that would leave rows where
    they do not belong, before anything is written. A device that is not the host is not waited for: what only its
    memory tells is asserted there.
    """

    def __init__(
        self, layers: int, batch: int, capacity: int, latent_dim: int, rope_dim: int, *,
        dtype: torch.dtype = torch.bfloat16, device: torch.device | str | None = None,
        codec: str | dict[int, str] | None = None, expanded_channels: int | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        sizes = {"layers": layers, "batch": batch, "capacity": capacity, "latent_dim": latent_dim, "rope_dim": rope_dim}
        for name, size in sizes.items():
            if size < 1:
                raise CacheError("MLAKVCache", f"{name} of at least 1", size, "Give the model's own sizes")
        self.layers, self.batch, self.capacity = layers, batch, capacity
        self.latent_dim, self.rope_dim, self.dtype = latent_dim, rope_dim, dtype
        # Tensors of inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.formats = formats_by_layer(codec, layers, latent_dim, rope_dim, dtype, seed, device)
            self._stores = self._allocated(device)
            self.cache_seqlens = torch.zeros(batch, dtype=torch.int32, device=device)
            self._start = torch.zeros(1, dtype=torch.int64, device=device)
        self.device = self._start.device
        for tensor in (self.cache_seqlens, self._start, *(t for store in self._stores for t in store)):
            mark_static_address(tensor, guard=False)
        # By layer, the tokens written since the last advance. Dynamo guards on what a frame reads of it, which is the
        # same at every step.
        self._pending: list[Any] = [None] * layers
        self._log(expanded_channels)

    def _allocated(self, device: torch.device | str | None) -> list[tuple[Tensor, ...]]:
        """By layer, its tensors [b, capacity, width]. Each is memory of its own: inputs of a graph that share memory
        and are written to cost it copies. Zeros: a row nobody may see is multiplied by 0, which a NaN would survive."""
        stores = []
        for kind in self.formats:
            parts = kind.components(self.latent_dim, self.rope_dim)
            shape = (self.batch, self.capacity)
            stores.append(tuple(torch.zeros((*shape, n), dtype=dtype, device=device) for n, dtype in parts))
        return stores

    # --- one step

    def update(self, layer: int, latent: Tensor, rope_row: Tensor) -> CachedRows:
        """Write a step's rows of one layer behind those that are there, and return all of them. Moves no counter.

        Args:
            layer: its number, from 0.
            latent: [b, n, latent_dim].
            rope_row: [b, n, 1, rope_dim], rotated for positions length ... length + n - 1.
        """
        self._check_operands(layer, latent, rope_row)
        tokens = latent.shape[1]
        if self._pending[layer] is not None:
            raise CacheError("update", "one update of a layer a step", "a second one",
                             "Call advance once the last layer is updated, or abandon_step", layer)  # fmt: skip
        self._check_lengths(layer, tokens)
        index = self._start + torch.arange(tokens, device=self.device)
        parts = self.formats[layer].encode(latent, rope_row.squeeze(2))
        for store, part in zip(self._stores[layer], parts, strict=True):
            store.index_copy_(1, index, part)
        self._pending[layer] = tokens
        return self._rows_of(layer, self.cache_seqlens + tokens)

    def advance(self, tokens: int) -> None:
        """Count a step's tokens, once, when every layer has been updated with as many."""
        for layer, written in enumerate(self._pending):
            if written is None:
                raise CacheError("advance", "an update of every layer", "none", "Advance once a step, behind the last "
                                 "layer, not behind each", layer)  # fmt: skip
            if written != tokens:
                raise CacheError("advance", f"{tokens} tokens, as advance was told", written,
                                 "Give every layer the same tokens, and advance their number", layer)  # fmt: skip
        self.cache_seqlens.add_(tokens)
        self._start.add_(tokens)
        for layer in range(self.layers):
            self._pending[layer] = None

    def abandon_step(self) -> None:
        """Forget the updates since the last advance, as after a step that failed."""
        for layer in range(self.layers):
            self._pending[layer] = None

    def reset(self) -> None:
        """Begin anew with no token; the memory stays."""
        self.cache_seqlens.zero_()
        self._start.zero_()
        self.abandon_step()

    # --- what there is

    @property
    def length(self) -> int:
        """Tokens in the cache. Waits for the device: between steps, not in one."""
        return int(self._start)

    def rows(self, layer: int) -> CachedRows:
        """A layer's rows as they are, without an update."""
        return self._rows_of(layer, self.cache_seqlens)

    def prefix(self, layer: int) -> tuple[Tensor, Tensor]:
        """([b, length, latent_dim], [b, length, 1, rope_dim]): the valid rows of a layer, those of an unfinished step
        included. Waits for the device."""
        length, found = self.length + (self._pending[layer] or 0), self.rows(layer)
        return found.latent[:, :length], found.rope[:, :length]

    def nbytes(self, length: int | None = None) -> int:
        """Bytes of all rows allocated; with `length`, of so many tokens a sequence."""
        each = sum(store.element_size() * store.shape[-1] for stores in self._stores for store in stores)
        return each * self.batch * (self.capacity if length is None else length)

    def _rows_of(self, layer: int, length: Tensor) -> CachedRows:
        return CachedRows(self._stores[layer], length, self.formats[layer], self.latent_dim, self.rope_dim)

    # --- checks

    def _check_operands(self, layer: int, latent: Tensor, rope_row: Tensor) -> None:
        if not 0 <= layer < self.layers:
            raise CacheError("update", f"a layer from 0 to {self.layers - 1}", layer, "Number the layers from 0")
        remedy = "Give what this cache was made for"
        for name, given, shape in (
            ("the latent", latent, (self.batch, latent.shape[1] if latent.dim() == 3 else "n", self.latent_dim)),
            ("the rope row", rope_row, (self.batch, latent.shape[1] if latent.dim() == 3 else "n", 1, self.rope_dim)),
        ):
            if tuple(given.shape) != shape:
                raise CacheError("update", f"{name} as {shape}", tuple(given.shape), remedy, layer)
            if given.dtype != self.dtype:
                raise CacheError("update", f"{name} in {self.dtype}", given.dtype, remedy, layer)
            if given.device.type != self.device.type:
                raise CacheError("update", f"{name} on {self.device}", given.device, remedy, layer)
        if torch.is_grad_enabled() and (latent.requires_grad or rope_row.requires_grad):
            raise CacheError("update", "rows without a gradient", "rows that require one",
                             "Decode under torch.no_grad() or torch.inference_mode()", layer)  # fmt: skip

    def _check_lengths(self, layer: int, tokens: int) -> None:
        """All lengths are the one that `advance` left, and there is room. Compiled code and GPUs assert it when they
        run; XLA does not check it."""
        if by_xla(self.device):
            return
        if torch.compiler.is_compiling() or self.device.type != "cpu" or is_fake(self.cache_seqlens):
            uniform = (self.cache_seqlens == self._start).all()
            fits = (self._start + tokens <= self.capacity).all()
            what = f"MLAKVCache.update: lengths differ or moved within the step, or exceed {self.capacity}"
            assert_async(uniform & fits, what)
            return
        lengths, start = self.cache_seqlens.tolist(), int(self._start)
        if len(set(lengths)) > 1:
            raise CacheError("update", f"one length for all sequences, {start}", lengths,
                             "Pad or batch sequences of one length; this cache has no ragged rows", layer)  # fmt: skip
        if lengths[0] != start:
            raise CacheError("update", f"length {start}, as advance left it", lengths[0],
                             "Let advance alone move the counter, once a step", layer)  # fmt: skip
        if start + tokens > self.capacity:
            raise CacheError("update", f"at most {self.capacity} tokens", start + tokens,
                             "Make the cache larger, or reset it", layer)  # fmt: skip

    def _log(self, expanded_channels: int | None) -> None:
        names = list(dict.fromkeys(kind.name for kind in self.formats))
        routed = {name: [i for i, kind in enumerate(self.formats) if kind.name == name] for name in names}
        full = ""
        if expanded_channels is not None:
            whole = expanded_channels * self.dtype.itemsize * self.layers * self.batch * self.capacity
            full = f"; keys and values of all heads would take {whole} ({whole / self.nbytes():.1f}x)"
        logger.info(
            "MLAKVCache: %d layers, batch %d, capacity %d, %d + %d channels, %s, %s, %d bytes%s",
            self.layers, self.batch, self.capacity, self.latent_dim, self.rope_dim, self.dtype,
            "; ".join(f"{name}: layers {_ranges(of)}" for name, of in routed.items()), self.nbytes(), full,
        )  # fmt: skip


def _ranges(numbers: list[int]) -> str:
    """"0-3, 5" of ascending numbers."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] == n - 1:
            parts[-1][1:] = [n]
        else:
            parts.append([n])
    return ", ".join("-".join(map(str, part)) for part in parts)
