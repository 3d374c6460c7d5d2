"""A torch without one of the private symbols: nothing that is imported breaks, and a frame says why it is plain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_compile._torch import _registry, fakes
from megacpp_compile._torch._registry import Missing, Symbol, present
from megacpp_compile._torch.symbols import ALONE, SYMBOLS
from megacpp_compile.errors import TorchInternalsError

GONE = Symbol("theme.gone", "torch._dynamo.gone", "a test", ALONE)
ROOT = Path(__file__).parents[2]


def said(*arguments: str) -> Any:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # `without` forks, and autograd has threads for GPUs
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=hidden)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def without(*keys: str) -> dict[str, dict]:
    return said("-m", "tests._torch.without", *keys)


def test_it_can_be_asked_for_and_not_used():
    gone = GONE.get()
    assert not present(gone) and not present(fakes.FakeTensor, gone) and present(fakes.FakeTensor)
    assert gone != len and gone in (len, gone)

    class Derived(gone):
        def __init__(self):
            pass

    for use in (
        lambda: gone(), lambda: gone.attribute, lambda: gone["key"], lambda: isinstance(1, gone), lambda: Derived(),
        lambda: gone.__enter__(), lambda: list(gone),
    ):  # fmt: skip
        with pytest.raises(TorchInternalsError) as caught:
            use()
        assert caught.value.symbol == "torch._dynamo.gone"
        assert str(caught.value) == f"torch {torch.__version__} has no torch._dynamo.gone (for a test): {ALONE}"


def test_what_stands_in():
    assert Symbol("theme.gone", "torch._dynamo.gone", "a test", "a list serves", instead=list).get() == []
    operator = SYMBOLS["ops.OpOverload"].instead()
    assert isinstance(torch.ops.aten.add.Tensor, operator) and operator is torch._ops.OpOverload
    with pytest.raises(AttributeError, match=r"megacpp_compile\._torch\.fakes.*nothing_of_this_name"):
        fakes.nothing_of_this_name  # noqa: B018


def test_a_lack_is_logged_once_and_only_where_it_is_unexpected(caplog):
    _registry._warn_once.cache_clear()
    for _ in range(2):
        GONE.get()
    newer = Symbol("theme.gone", "torch._dynamo.gone_too", "a test", ALONE, seen="99.0-99.1")
    assert isinstance(newer.get(), Missing)
    assert [r.getMessage() for r in caplog.records] == [str(GONE.get()._error)]


NEEDED = ("functorch.aot_export_module", "inductor.select_decomp_table")
COUNTING = "dispatch.enable_python_dispatcher"
UNASKED = "dynamo.lookup_backend+functorch.min_cut_rematerialization_partition+logging.trace_structured"


@pytest.fixture(scope="module")
def found():
    return without("none", *NEEDED, COUNTING, UNASKED, "all")


@pytest.mark.end_to_end
@pytest.mark.xdist_group("missing symbols")
def test_frames_say_why(found):
    """Capture, the passes, and the handoff lack something; and what nobody asked for is not missed."""
    for key in ("none", UNASKED):
        assert (found[key]["fused"], found[key]["reasons"]) == (1, [""])
    for key in NEEDED:
        assert found[key].get("fused") == 0, found[key]
        assert SYMBOLS[key].path in found[key]["reasons"][0]
    # What only a report needs costs no frame.
    assert found[COUNTING]["fused"] == 1 and SYMBOLS[COUNTING].path in found[COUNTING]["uncounted"][0]
    assert found["none"]["uncounted"] == [""]


@pytest.mark.exhaustive
@pytest.mark.end_to_end
@pytest.mark.xdist_group("missing symbols")
def test_no_lack_breaks_a_frame(found):
    """But for what compiles one at all, and that by its name. Of what a frame asks for, one symbol a theme; all of them
    with TEST_EVERY_SYMBOL=1. What it does not ask for, all at once."""
    vital = "inductor.compile_fx"
    paths = found["none"]["asked"]
    asked = [k for k, s in SYMBOLS.items() if any(p == s.path or p.startswith(f"{s.path}.") for p in paths)]
    unasked = "+".join(sorted(SYMBOLS.keys() - set(asked)))
    chosen = asked if os.environ.get("TEST_EVERY_SYMBOL") else [*{k.partition(".")[0]: k for k in asked}.values(), vital]
    for key, result in without(unasked, *dict.fromkeys(chosen)).items():
        if key == unasked:
            assert (result["fused"], result["reasons"]) == (1, [""])
        elif key == vital:
            assert "TorchInternalsError" in result["error"] and SYMBOLS[key].path in result["error"]
        else:
            assert "error" not in result, (key, result)
            assert result["fused"] == 1 or SYMBOLS[key].path in result["reasons"][0], (key, result)


@pytest.mark.end_to_end
@pytest.mark.xdist_group("missing symbols")
def test_everything_imports_without_all(found):
    assert found["all"].get("imported", 0) > 100, found["all"]
