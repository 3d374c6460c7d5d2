"""Blocks in the manner of well-known code bases: what has to fire does, and nothing else about them changes."""

from __future__ import annotations

import pytest

from tests.corpus import allowed_counts
from tests.corpus.gallery import GALLERY
from tests.frames import check


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's rms_norm under autocast
@pytest.mark.parametrize("name", GALLERY)
def test_gallery(name):
    entry = GALLERY[name]
    # A block that turns autocast on computes in bfloat16 although its parameters do not show it.
    tolerance = 4e-2 if "autocast" in name else None
    frames = check(*entry.build(), tolerance=tolerance)
    wrong = {p: (frames.counts[p], e) for p, e in entry.expected.items() if frames.counts[p] not in allowed_counts(e)}
    assert not wrong, f"(fired, expected): {wrong}; refused {frames.misses}"
    assert not frames.again()
