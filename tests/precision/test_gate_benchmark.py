"""`benchmarks.fp8_gate` measures what the gate predicts."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.config import fp8_gain


def test_the_gate_can_be_measured(stand_in, no_kernels):
    from benchmarks.fp8_gate import HEADERS, main, measure

    recipes = sorted(fp8_gain.RATES)
    rows = list(measure([(16, 32, 16)], recipes, torch.device("cpu"), torch.float32, "cuda", 1, 1.0))
    assert [len(row) for row in rows] == [len(HEADERS)] * 3
    assert [row[3] for row in rows] == recipes and all(row[4] > 0 and row[5] > 0 for row in rows)
    assert {row[-1] for row in rows} == {"bf16"}
    with pytest.raises(RuntimeError, match="cpu has no float8 GEMMs"):  # and no figure of something else
        next(measure([(16, 32, 16)], ["fp8_current"], torch.device("cpu"), torch.bfloat16, turns=1, compiled=True))
    if not torch.cuda.is_available():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megacpp_compile.precision.engine.load", lambda: (None, "no CUDA device"))
            assert main([]) == 2
