"""Which layer of a hybrid model is which: MLA, sparse attention (DSA) or another mixer, and multi-token prediction.

"Rank" is a layer's index among the attention layers of the whole model, not a process's: a pipeline stage has the
ranks of its layers. Layers of multi-token prediction are MLA, as a prediction head attends to all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacpp_compile.errors import LayoutError
from megacpp_compile.report.tables import table_text

KINDS = {"A": "MLA", "D": "DSA", "M": "Mamba", "E": "experts", "R": "recurrent"}
_ATTENTION = "AD"


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """One layer.

    Attributes:
        layer: its index in the whole model; layers of multi-token prediction follow the others.
        letter: A, D, M, E or R.
        rank: its index among the attention layers of the whole model, None for another mixer.
        why: what decided it.
    """

    layer: int
    letter: str
    rank: int | None
    why: str

    @property
    def kind(self) -> str:
        """The letter in words."""
        return KINDS[self.letter]


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """A row for each layer of a model, or of a pipeline stage of one; `layer_layout` makes it."""

    rows: tuple[LayoutRow, ...]

    def __iter__(self) -> Iterator[LayoutRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        rows = [(str(r.layer), r.kind, "-" if r.rank is None else str(r.rank), r.why) for r in self.rows]
        return table_text("layers", ("layer", "kind", "rank", "why"), rows)

    def stage(self, first: int, count: int) -> LayerLayout:
        """The layers of one pipeline stage, with the ranks they have in the whole model.

        first, count: layers `first` to `first + count` of the model. Raises LayoutError for layers there are none of.
        """
        if first < 0 or count < 1 or first + count > len(self.rows):
            raise LayoutError(f"layers {first} to {first + count}", f"there are {len(self.rows)}")
        return LayerLayout(self.rows[first : first + count])

    def check_stage(self, stage: LayerLayout, first: int) -> None:
        """Hold what a process built as its `stage`, whose first layer is `first` of the model, against this layout.

        Raises LayoutError for a layer whose kind or rank is another one there, as those of a stage that counts its
        attention layers from zero are.
        """
        for row, want in zip(stage.rows, self.stage(first, len(stage.rows)), strict=True):
            if (row.letter, row.rank) != (want.letter, want.rank):
                found = f"the stage has {row.kind} of rank {row.rank} in its place"
                raise LayoutError(f"layer {want.layer}", f"{found}, the model {want.kind} of rank {want.rank}")

    def specs(self, by_letter: Mapping[str, Any]) -> list[Any]:
        """The entry of `by_letter` for each layer, by its letter: specs, or what makes modules. Raises LayoutError for
        a letter that has none."""
        for row in self.rows:
            if row.letter not in by_letter:
                raise LayoutError(f"layer {row.layer}", f"nothing is given for {row.letter} ({row.kind})")
        return [by_letter[row.letter] for row in self.rows]


def layer_layout(
    pattern: str | Sequence[str], *, dsa_ranks: Iterable[int] = (), mtp_layers: int | str | Sequence[str] = 0
) -> LayerLayout:
    """The layout that `pattern` says.

    pattern: a letter for each layer: A (MLA), D (DSA), M (Mamba), E (experts), R (recurrent).
    dsa_ranks: ranks of attention layers that are DSA, where the pattern says A for all of them.
    mtp_layers: how many layers of multi-token prediction follow; or their letters, which have to be A.

    Raises LayoutError for an unknown letter, a pattern without attention, a rank there is none of or that is given
    beside D, and DSA in multi-token prediction.
    """
    letters, sparse = list(pattern), sorted(set(dsa_ranks))
    mtp = ["A"] * mtp_layers if isinstance(mtp_layers, int) else list(mtp_layers)
    for i, letter in enumerate([*letters, *mtp]):
        if letter not in KINDS:
            raise LayoutError(f"layer {i}", f"{letter!r} is none of {', '.join(KINDS)}")
    count = sum(letter in _ATTENTION for letter in letters)
    if not count:
        raise LayoutError(f"the pattern {''.join(letters)!r}", "it has no attention layer, no A or D")
    if sparse and "D" in letters:
        raise LayoutError("dsa_ranks", "the pattern says D itself: say it in one place")
    if sparse and not 0 <= sparse[0] <= sparse[-1] < count:
        raise LayoutError(f"dsa_ranks {sparse}", f"attention layers have the ranks 0 to {count - 1}")
    rows, rank = [], 0
    for i, letter in enumerate(letters):
        if letter not in _ATTENTION:
            rows.append(LayoutRow(i, letter, None, "pattern"))
            continue
        chosen = rank in sparse
        rows.append(LayoutRow(i, "D" if chosen else letter, rank, f"dsa_ranks has {rank}" if chosen else "pattern"))
        rank += 1
    for i, letter in enumerate(mtp, start=len(letters)):
        if letter != "A":
            why = "multi-token prediction attends to all tokens, so that its layers are MLA, never " + KINDS[letter]
            raise LayoutError(f"layer {i}", why)
        rows.append(LayoutRow(i, "A", rank, "multi-token prediction is MLA"))
        rank += 1
    return LayerLayout(tuple(rows))
